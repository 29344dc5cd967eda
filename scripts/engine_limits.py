"""What the engine is asked for, and what the records say: a table for docs/performance.md.

    python -m scripts.engine_limits --records docs/results --page docs/performance.md

Ends with status 1 where a limit is not kept or a record does not say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec.bench.document import Table, markdown_table
from jetspec.files import read_text, write_whole
from scripts.pages import put_between

Record = Mapping[str, Any]
MARK = "limits"


@dataclass(frozen=True)
class Limit:
    """A number that one record holds, and the bound that it must keep."""

    what: str
    record: str
    bound: float
    value: Callable[[Record], float]
    at_least: bool = False

    def found(self, folder: Path) -> Found:
        path = folder / f"{self.record}.json"
        try:
            record = json.loads(read_text(path))
            return Found(self, self.value(record), record["commit"])
        except (OSError, KeyError):
            return Found(self, None, None)


@dataclass(frozen=True)
class Found:
    limit: Limit
    value: float | None
    """None: nothing tells."""
    commit: str | None

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit.bound if self.limit.at_least else self.value <= self.limit.bound

    @property
    def row(self) -> tuple[str, ...]:
        sign = "≥" if self.limit.at_least else "≤"
        value = "not measured" if self.value is None else number(self.value)
        holds, commit = "yes" if self.holds else "no", self.commit[:7] if self.commit else "-"
        return self.limit.what, f"{sign} {number(self.limit.bound)}", value, holds, commit


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def run_of(budget: int, context: int, field: str) -> Callable[[Record], float]:
    def value(record: Record) -> float:
        runs = {(run["budget"], run["context"]): run for run in record["runs"]}
        return float(runs[budget, context][field])

    return value


def most(field: str) -> Callable[[Record], float]:
    return lambda record: max(float(run[field]) for run in record["runs"])


def over_reading(record: Record) -> float:
    return run_of(64, 256, "round_ms")(record) / run_of(64, 256, "read_round_ms")(record)


def mistakes(dtype: str) -> Callable[[Record], float]:
    return lambda record: float(record["results"][dtype]["mistakes"])


def all_mistakes(record: Record) -> float:
    return float(sum(run["mistakes"] for result in record["results"].values() for run in result["runs"]))


def in_soak(value: Callable[[Record], float]) -> Callable[[Record], float]:
    return lambda record: value(record["results"]["float32"])


def least_speedup(record: Record) -> float:
    return float(min(record["results"]["bfloat16"]["best_speedup"].values()))


def edge_ms(folder: Path, budget: int) -> Callable[[Record], float]:
    """More than without the edge term, at the same budget and context."""

    def value(record: Record) -> float:
        without = json.loads(read_text(folder / "profile_qwen3_8b.json"))
        field = run_of(budget, 256, "round_ms")
        return field(record) - field(without)

    return value


def limits(folder: Path) -> Iterator[Limit]:
    dense, edge, sparse = "profile_qwen3_8b", "profile_qwen3_8b_edge", "profile_qwen3_30b_a3b"
    for context, bound in ((256, 1.10), (2048, 1.20), (8192, 1.35)):
        for budget in (64, 128):
            what = f"Qwen3-8B, a round of {budget} nodes after {context:,} tokens, over its floor"
            yield Limit(what, dense, bound, run_of(budget, context, "ratio_round"))
    yield Limit("Qwen3-8B, a plain step over its floor, at most", dense, 1.10, most("ratio_plain"))
    for budget in (64, 128):
        yield Limit(f"Qwen3-8B, the edge term with {budget} nodes, ms", edge, 0.25, edge_ms(folder, budget))
    yield Limit("Qwen3-8B, idle between rounds, at most", dense, 0.02, most("idle_frac"))
    yield Limit("SmolLM2, one request, over plain decoding, at least", "engine_speed", 2.5, least_speedup, True)
    yield Limit("SmolLM2, one request, differences beyond a tie", "engine_speed", 0, all_mistakes)
    yield Limit("SmolLM2, every batch size, over plain decoding, at least", "engine_batches", 1.0, least_speedup, True)
    yield Limit("SmolLM2, every batch size, differences beyond a tie", "engine_batches", 0, all_mistakes)
    for dtype in ("float32", "bfloat16"):
        what = f"SmolLM2, 1,000 texts in {dtype}, differences beyond a tie"
        yield Limit(what, "engine_strict", 0, mistakes(dtype))
    rounds, problems = in_soak(lambda found: found["rounds"]), in_soak(lambda found: len(found["problems"]))
    yield Limit("SmolLM2, rounds while requests come, go and are preempted", "engine_soak", 10_000, rounds, True)
    yield Limit("SmolLM2, pages, bytes, caches and texts that are wrong after them", "engine_soak", 0, problems)
    yield Limit("Qwen3-30B-A3B, a round of 64 nodes over reading its weights", sparse, 1.5, over_reading)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="folder with the records")
    parser.add_argument("--page", type=Path, help="page with the marks")
    args = parser.parse_args()
    found = [limit.found(args.records) for limit in limits(args.records)]
    table = markdown_table(
        Table(("what", "asked", "measured", "holds", "commit"), tuple(each.row for each in found), first_number=1)
    )
    if args.page is None:
        print(table)
    else:
        write_whole(args.page, put_between(read_text(args.page), MARK, table))
    raise SystemExit(0 if all(each.holds for each in found) else 1)


if __name__ == "__main__":
    main()
