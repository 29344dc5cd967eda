"""`records`: the limits that the engine is built to keep, compared with the records of the performance page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.document import make_table
from benchmarks.options import RecordFolder, examples
from benchmarks.results import Record, best_over_plain, engine_rows, read_engine
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import is_whole_commit

SCRIPT = "benchmarks/recipes/performance.sh"
EPILOG = examples("records --out docs/results")


def records(
    out: RecordFolder,
    names: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    check: Annotated[bool, typer.Option("--check", hidden=True)] = True,
    data: Annotated[Path | None, typer.Option(hidden=True)] = None,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
) -> None:
    """Compare the records of the performance page with the limits of the engine.

    `benchmarks/recipes/performance.sh` measures them. Exit status 1: a limit is not kept.
    """
    if data is not None:
        chosen = f"ONLY='{' '.join(names)}' " if names else ""
        raise ValueError(f"records are measured by `{chosen}DEVICE={device} {SCRIPT} {data} {out}`")
    table, holds = check_limits(out)
    print(table)
    raise typer.Exit(0 if holds else 1)


Value = Callable[[Record], float]
Needs = Mapping[str, Any]
"""Settings of a record by their path: a value, or a test of it."""
BUDGETS, CONTEXTS = (64, 128), (256, 2048, 8192)
"""Budgets and contexts of profiles of the dense shape."""
BATCHES = set(product((1, 2, 4, 8, 16, 32, 64), (1, 16, 32, 64, 128)))
"""Batch sizes and budgets of `engine_batches`."""
SPEEDS = set(product(("gsm8k", "humaneval", "mt_bench"), (False, True)))
"""Sets of `engine_speed`, with trees and without."""


class NotMeasured(Exception):
    """A record lacks a value or a setting, which the message names."""


def require(record: Record, needs: Needs) -> None:
    for path, wanted in needs.items():
        found: Any = record
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None or not (wanted(found) if callable(wanted) else found == wanted):
            raise NotMeasured(path if callable(wanted) else f"{path} {wanted}")


@dataclass(frozen=True)
class Limit:
    """A value of one record, and its bound."""

    name: str
    record: str
    bound: float
    value: Value
    needs: Needs
    at_least: bool = False

    def row(self, folder: Path) -> dict[str, str]:
        """Row of the table, by the record of a folder."""
        value, commit, told = None, None, "not measured"
        try:
            record = read_engine(folder / f"{self.record}.json")
            require(record, self.needs)
            value, commit = self.value(record), record["commit"]
            told = number(value)
        except (NotMeasured, KeyError) as error:
            told = f"not measured: {error.args[0]}"
        except ValueError:  # there is no such record
            pass
        holds = value is not None and (value >= self.bound if self.at_least else value <= self.bound)
        return {
            "what": self.name,
            "asked": f"{'≥' if self.at_least else '≤'} {number(self.bound)}",
            "measured": told,
            "holds": "yes" if holds else "no",
            "commit": commit[:7] if commit else "-",
        }


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def check_limits(folder: Path) -> tuple[str, bool]:
    """Table of all limits by the records of a folder. True: all hold."""
    rows = [limit.row(folder) for limit in limits(folder)]
    return make_table(rows, keep_empty=True), all(row["holds"] == "yes" for row in rows)


GPU: Needs = {"device": "cuda", "hardware.gpu": bool, "commit": is_whole_commit}
SMOLLM2: Needs = {**GPU, "model": DEFAULT_MODEL, "head": DEFAULT_MODEL}


def profile(shape: str, weights: str = "random", **head: Any) -> Needs:
    """Settings of a profile: greedy rounds of one request."""
    return {
        **GPU,
        "shape": shape,
        "weights": weights,
        "dtype": "bfloat16",
        "rounds": lambda rounds: rounds >= 200,
        "runs": lambda runs: all(run["batch"] == 1 and not run["temperature"] for run in runs),
        **{f"head.{name}": value for name, value in head.items()},
    }


def happened(*events: str) -> Needs:
    return {**SMOLLM2, **{f"results.float32.{event}": bool for event in events}}


def run_of(budget: int, context: int, field: str) -> Value:
    def value(record: Record) -> float:
        runs = {(run["budget"], run["context"]): run for run in record["runs"]}
        if (budget, context) not in runs:
            raise NotMeasured(f"{budget} nodes after {context:,} tokens")
        return float(runs[budget, context][field])

    return value


def most(field: str, budgets: Sequence[int] = BUDGETS, contexts: Sequence[int] = CONTEXTS) -> Value:
    """Maximum over all budgets and contexts."""
    return lambda record: max(run_of(*run, field)(record) for run in product(budgets, contexts))


def least_speedup(record: Record) -> float:
    rows = engine_rows(record)
    return float(best_over_plain(rows[rows.dtype == "bfloat16"]).min())


def all_mistakes(record: Record) -> float:
    return float(engine_rows(record).mistakes.sum())


def mistakes_in(dtype: str, record: Record) -> float:
    return all_mistakes({"results": {dtype: record["results"][dtype]}})


def has_settings(dtype: str, wanted: set[Any], key: Callable[[Any], Any], result: Record) -> bool:
    """The results of a precision hold all wanted settings."""
    rows = engine_rows({"results": {dtype: result}})
    return wanted <= set(map(key, rows.itertuples()))


def speeds(dtype: str) -> Needs:
    has_all = partial(has_settings, dtype, SPEEDS, lambda row: (row.set, row.budget > 1))
    return {**SMOLLM2, f"results.{dtype}": has_all}


def batches(*dtypes: str) -> Needs:
    tests = {f"results.{t}": partial(has_settings, t, BATCHES, lambda row: (row.batch, row.budget)) for t in dtypes}
    return {**SMOLLM2, **tests}


def strict(dtype: str) -> Needs:
    """A thousand texts of at most 256 tokens, in batches of 32 with trees of 64 nodes."""

    def is_large(result: Record) -> bool:
        rows = engine_rows({"results": {dtype: result}})
        trees = rows[(rows.batch == 32) & (rows.budget == 64)]
        return bool(trees.prompts.sum() >= 1000)

    return {**SMOLLM2, "max_tokens": 256, f"results.{dtype}": is_large}


def edge_ms(folder: Path, budget: int) -> Value:
    """Time of the edge term: the difference to a profile without it, of the same commit and machine."""

    def value(record: Record) -> float:
        try:
            without = read_engine(folder / "profile_qwen3_8b.json")
        except ValueError:
            raise NotMeasured("rounds without an edge term") from None
        require(without, {**DENSE, **{name: record[name] for name in ("commit", "hardware")}})
        field = run_of(budget, 256, "round_ms")
        return field(record) - field(without)

    return value


DENSE = profile("qwen3-8b", layers=5, block_size=16, edge_rank=0)
EDGE = profile("qwen3-8b", layers=5, block_size=16, edge_rank=bool)
SPARSE = profile("qwen3-30b-a3b", layers=5, block_size=16, edge_rank=0)
SMALL = profile(DEFAULT_MODEL, "real", name=DEFAULT_MODEL)


def limits(folder: Path) -> Iterator[Limit]:
    dense, edge = "profile_qwen3_8b", "profile_qwen3_8b_edge"
    for context, bound in zip(CONTEXTS, (1.10, 1.20, 1.35), strict=True):
        for budget in BUDGETS:
            name = f"Qwen3-8B, a round of {budget} nodes after {context:,} tokens, over its floor"
            yield Limit(name, dense, bound, run_of(budget, context, "ratio_round"), DENSE)
    yield Limit("Qwen3-8B, a plain step over its floor, at most", dense, 1.10, most("ratio_plain"), DENSE)
    for budget in BUDGETS:
        yield Limit(f"Qwen3-8B, the edge term with {budget} nodes, ms", edge, 0.25, edge_ms(folder, budget), EDGE)
    yield Limit("Qwen3-8B, idle between rounds, at most", dense, 0.02, most("idle_frac"), DENSE)
    idle = most("idle_frac", (32, *BUDGETS), CONTEXTS[:1])
    yield Limit("SmolLM2, idle between rounds after 256 tokens, at most", "profile_smollm2", 0.02, idle, SMALL)
    name, fast = "SmolLM2, one request", speeds("bfloat16")
    yield Limit(f"{name}, over plain decoding, at least", "engine_speed", 2.5, least_speedup, fast, True)
    yield Limit(f"{name}, differences beyond a tie", "engine_speed", 0, all_mistakes, fast)
    name, best = "SmolLM2, every batch size", "best tree over plain in bfloat16, at least"
    yield Limit(f"{name}, {best}", "engine_batches", 1.0, least_speedup, batches("bfloat16"), True)
    both = batches("float32", "bfloat16")
    yield Limit(f"{name}, differences beyond a tie", "engine_batches", 0, all_mistakes, both)
    for dtype in ("float32", "bfloat16"):
        name = f"SmolLM2, 1,000 texts in {dtype}, differences beyond a tie"
        yield Limit(name, "engine_strict", 0, partial(mistakes_in, dtype), strict(dtype))
    name, soak = "SmolLM2, rounds while requests come, go and are preempted", "engine_soak"
    soaked = happened("caches_compared", "cancelled", "preempted")
    yield Limit(name, soak, 10_000, lambda r: float(r["results"]["float32"]["rounds"]), soaked, True)
    name = "SmolLM2, pages, bytes, caches and texts that are wrong after them"
    yield Limit(name, soak, 0, lambda r: float(len(r["results"]["float32"]["problems"])), soaked)
    name = "Qwen3-30B-A3B, a round of 64 nodes over reading its weights"
    round_ms, read_ms = run_of(64, 256, "round_ms"), run_of(64, 256, "read_round_ms")
    yield Limit(name, "profile_qwen3_30b_a3b", 1.5, lambda r: round_ms(r) / read_ms(r), SPARSE)
