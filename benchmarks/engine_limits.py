"""What the engine is asked for, and what the records say: a table for docs/performance.md.

    python -m benchmarks.engine_limits --records docs/results --page docs/performance.md

Ends with status 1 where a limit is not kept or a record does not say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import check_engine
from benchmarks.document import Table, markdown_table
from benchmarks.pages import put_between
from jetspec.files import read_text, write_whole
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import is_whole_commit

Record = Mapping[str, Any]
MARK = "limits"
BUDGETS, CONTEXTS = (64, 128), (256, 2048, 8192)
"""Of profiles of the dense shape."""
BATCH_SIZES, BATCH_BUDGETS = (1, 2, 4, 8, 16, 32, 64), (1, 16, 32, 64, 128)


class NotMeasured(Exception):
    """Names what a record does not tell."""


@dataclass(frozen=True)
class Need:
    """What a record must be of, to tell anything about a limit."""

    what: str
    is_met: Callable[[Record], bool]

    def lacks(self, record: Record) -> bool:
        """A record that does not say lacks it, too."""
        try:
            return not self.is_met(record)
        except KeyError:
            return True


def require(record: Record, needs: tuple[Need, ...]) -> None:
    if missing := [need.what for need in needs if need.lacks(record)]:
        raise NotMeasured(", ".join(missing))


@dataclass(frozen=True)
class Limit:
    """A number that one record holds, and the bound that it must keep."""

    what: str
    record: str
    bound: float
    value: Callable[[Record], float]
    needs: tuple[Need, ...]
    at_least: bool = False

    def found(self, folder: Path) -> Found:
        try:
            record = json.loads(read_text(folder / f"{self.record}.json"))
            require(record, self.needs)
            return Found(self, self.value(record), record["commit"])
        except OSError:
            return Found(self, None, None)
        except (NotMeasured, KeyError) as error:
            return Found(self, None, None, missing=str(error.args[0]))


@dataclass(frozen=True)
class Found:
    limit: Limit
    value: float | None
    """None: nothing tells."""
    commit: str | None
    missing: str | None = None
    """What a record that is there does not tell."""

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit.bound if self.limit.at_least else self.value <= self.limit.bound

    @property
    def row(self) -> tuple[str, ...]:
        sign = "≥" if self.limit.at_least else "≤"
        told = f"not measured: {self.missing}" if self.missing else "not measured"
        value = told if self.value is None else number(self.value)
        holds, commit = "yes" if self.holds else "no", self.commit[:7] if self.commit else "-"
        return self.limit.what, f"{sign} {number(self.limit.bound)}", value, holds, commit


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# -- what a record must be of

GPU = (
    Need("a GPU", lambda record: record["device"] == "cuda" and bool(record["hardware"]["gpu"])),
    Need("a commit without changes", lambda record: is_whole_commit(record["commit"])),
)
SMOLLM2 = (
    *GPU,
    Need(
        "SmolLM2 with its own head", lambda record: record["model"] == DEFAULT_MODEL and record["head"] == DEFAULT_MODEL
    ),
)


def timed(name: str, weights: str) -> tuple[Need, ...]:
    """A profile, as it must be of whatever shape."""
    return (
        *GPU,
        Need(f"{weights} weights of {name}", lambda record: (record["shape"], record["weights"]) == (name, weights)),
        Need("bfloat16", lambda record: record["dtype"] == "bfloat16"),
        Need("200 rounds", lambda record: record["rounds"] >= 200),
        Need("batch 1", lambda record: all(run["batch"] == 1 for run in record["runs"])),
        Need("greedy rounds", lambda record: not any(run["temperature"] for run in record["runs"])),
    )


def shape(name: str, *, edge: bool = False) -> tuple[Need, ...]:
    return (
        *timed(name, "random"),
        Need(
            "a head of 5 layers and 16 slots",
            lambda record: (record["head"]["layers"], record["head"]["block_size"]) == (5, 16),
        ),
        Need(
            "an edge term" if edge else "a head without an edge term",
            lambda record: (record["head"]["edge_rank"] > 0) == edge,
        ),
    )


REAL = (*timed(DEFAULT_MODEL, "real"), Need("its own head", lambda record: record["head"]["name"] == DEFAULT_MODEL))


def speed(dtype: str) -> tuple[Need, ...]:
    """Every set, with trees and without."""

    def has_all(record: Record) -> bool:
        runs = [(run["set"], run["budget"] > 1) for run in record["results"][dtype]["runs"]]
        return set(product(check_engine.SPEED_SETS, (False, True))) <= set(runs)

    return (*SMOLLM2, Need(f"{', '.join(check_engine.SPEED_SETS)} in {dtype}", has_all))


def batches(dtype: str) -> tuple[Need, ...]:
    def has_all(record: Record) -> bool:
        runs = [(run["batch"], run["budget"]) for run in record["results"][dtype]["runs"]]
        return set(product(BATCH_SIZES, BATCH_BUDGETS)) <= set(runs)

    return (*SMOLLM2, Need(f"every batch size with every budget in {dtype}", has_all))


def strict(dtype: str) -> tuple[Need, ...]:
    return (
        *SMOLLM2,
        Need(f"1,000 prompts in {dtype}", lambda record: record["results"][dtype]["prompts"] >= 1000),
        Need("256 tokens", lambda record: record["max_tokens"] == 256),
        Need("batch 32", lambda record: record["results"][dtype]["batch"] == 32),
        Need("budget 64", lambda record: record["results"][dtype]["budget"] == 64),
    )


def happened(what: str, field: str) -> Need:
    return Need(what, lambda record: record["results"]["float32"][field] > 0)


SOAK = (
    *SMOLLM2,
    happened("caches compared", "caches_compared"),
    happened("cancels", "cancelled"),
    happened("preemptions", "preempted"),
)

# -- what is read from it


def run_of(budget: int, context: int, field: str) -> Callable[[Record], float]:
    def value(record: Record) -> float:
        runs = {(run["budget"], run["context"]): run for run in record["runs"]}
        if (budget, context) not in runs:
            raise NotMeasured(f"{budget} nodes after {context:,} tokens")
        return float(runs[budget, context][field])

    return value


def most(field: str, budgets: Sequence[int] = BUDGETS, contexts: Sequence[int] = CONTEXTS) -> Callable[[Record], float]:
    """Over all budgets and contexts."""
    return lambda record: max(run_of(*run, field)(record) for run in product(budgets, contexts))


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
    """More than without the edge term, at the same budget and context, by the same source on the same machine."""

    def value(record: Record) -> float:
        try:
            without = json.loads(read_text(folder / "profile_qwen3_8b.json"))
        except OSError:
            raise NotMeasured("rounds without an edge term") from None
        require(without, shape("qwen3-8b"))
        if any(record[name] != without[name] for name in ("commit", "hardware")):
            raise NotMeasured("both of one commit and machine")
        field = run_of(budget, 256, "round_ms")
        return field(record) - field(without)

    return value


def limits(folder: Path) -> Iterator[Limit]:
    dense, edge, sparse = "profile_qwen3_8b", "profile_qwen3_8b_edge", "profile_qwen3_30b_a3b"
    plain, of_edge = shape("qwen3-8b"), shape("qwen3-8b", edge=True)
    for context, bound in zip(CONTEXTS, (1.10, 1.20, 1.35), strict=True):
        for budget in BUDGETS:
            what = f"Qwen3-8B, a round of {budget} nodes after {context:,} tokens, over its floor"
            yield Limit(what, dense, bound, run_of(budget, context, "ratio_round"), plain)
    yield Limit("Qwen3-8B, a plain step over its floor, at most", dense, 1.10, most("ratio_plain"), plain)
    for budget in BUDGETS:
        yield Limit(f"Qwen3-8B, the edge term with {budget} nodes, ms", edge, 0.25, edge_ms(folder, budget), of_edge)
    yield Limit("Qwen3-8B, idle between rounds, at most", dense, 0.02, most("idle_frac"), plain)
    idle = most("idle_frac", (32, *BUDGETS), CONTEXTS[:1])
    yield Limit("SmolLM2, idle between rounds after 256 tokens, at most", "profile_smollm2", 0.02, idle, REAL)
    what, fast = "SmolLM2, one request", speed("bfloat16")
    yield Limit(f"{what}, over plain decoding, at least", "engine_speed", 2.5, least_speedup, fast, True)
    yield Limit(f"{what}, differences beyond a tie", "engine_speed", 0, all_mistakes, fast)
    what, fast, exact = "SmolLM2, every batch size", batches("bfloat16"), batches("float32")
    best = "best tree over plain in bfloat16, at least"
    yield Limit(f"{what}, {best}", "engine_batches", 1.0, least_speedup, fast, True)
    yield Limit(f"{what}, differences beyond a tie", "engine_batches", 0, all_mistakes, exact + fast)
    for dtype in ("float32", "bfloat16"):
        what = f"SmolLM2, 1,000 texts in {dtype}, differences beyond a tie"
        yield Limit(what, "engine_strict", 0, mistakes(dtype), strict(dtype))
    rounds, problems = in_soak(lambda found: found["rounds"]), in_soak(lambda found: len(found["problems"]))
    what = "SmolLM2, rounds while requests come, go and are preempted"
    yield Limit(what, "engine_soak", 10_000, rounds, SOAK, True)
    what = "SmolLM2, pages, bytes, caches and texts that are wrong after them"
    yield Limit(what, "engine_soak", 0, problems, SOAK)
    what = "Qwen3-30B-A3B, a round of 64 nodes over reading its weights"
    yield Limit(what, sparse, 1.5, over_reading, shape("qwen3-30b-a3b"))


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
