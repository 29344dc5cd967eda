"""Limits that the engine is built to keep, and the measurements of them in the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.document import make_table
from benchmarks.results import Record, read_record
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import is_whole_commit

Value = Callable[[Record], float]
Need = tuple[str, Callable[[Record], bool]]
"""Condition on a record: its description, and the test."""
BUDGETS, CONTEXTS = (64, 128), (256, 2048, 8192)
"""Budgets and contexts of profiles of the dense shape."""
BATCH_SIZES, BATCH_BUDGETS = (1, 2, 4, 8, 16, 32, 64), (1, 16, 32, 64, 128)
SPEED_SETS = ("gsm8k", "humaneval", "mt_bench")


class NotMeasured(Exception):
    """A record lacks a value or a condition, which the message names."""


def require(record: Record, needs: Sequence[Need]) -> None:
    def lacks(test: Callable[[Record], bool]) -> bool:
        try:
            return not test(record)
        except KeyError:
            return True

    if missing := [name for name, test in needs if lacks(test)]:
        raise NotMeasured(", ".join(missing))


@dataclass(frozen=True)
class Limit:
    """A value of one record, and its bound."""

    name: str
    record: str
    bound: float
    value: Value
    needs: Sequence[Need]
    at_least: bool = False

    def row(self, folder: Path) -> dict[str, str]:
        """Row of the table, by the record of a folder."""
        value, commit, told = None, None, "not measured"
        try:
            record = read_record(folder / f"{self.record}.json")
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


# -- conditions on a record

GPU: tuple[Need, ...] = (
    ("a GPU", lambda r: r["device"] == "cuda" and bool(r["hardware"]["gpu"])),
    ("a commit without changes", lambda r: is_whole_commit(r["commit"])),
)
SMOLLM2 = (*GPU, ("SmolLM2 with its own head", lambda r: r["model"] == DEFAULT_MODEL == r["head"]))


def timed(name: str, weights: str) -> tuple[Need, ...]:
    """Conditions on a profile of any shape."""
    return (
        *GPU,
        (f"{weights} weights of {name}", lambda r: (r["shape"], r["weights"]) == (name, weights)),
        ("bfloat16", lambda r: r["dtype"] == "bfloat16"),
        ("200 rounds", lambda r: r["rounds"] >= 200),
        ("batch 1", lambda r: all(run["batch"] == 1 for run in r["runs"])),
        ("greedy rounds", lambda r: not any(run["temperature"] for run in r["runs"])),
    )


def shape(name: str, *, edge: bool = False) -> tuple[Need, ...]:
    return (
        *timed(name, "random"),
        ("a head of 5 layers and 16 slots", lambda r: (r["head"]["layers"], r["head"]["block_size"]) == (5, 16)),
        ("an edge term" if edge else "a head without an edge term", lambda r: (r["head"]["edge_rank"] > 0) == edge),
    )


REAL = (*timed(DEFAULT_MODEL, "real"), ("its own head", lambda r: r["head"]["name"] == DEFAULT_MODEL))


def has_runs(dtype: str, wanted: Iterable[Any], key: Callable[[Record], Any]) -> Callable[[Record], bool]:
    keys = set(wanted)
    return lambda record: keys <= {key(run) for run in record["results"][dtype]["runs"]}


def speed(dtype: str) -> tuple[Need, ...]:
    """Condition: every set, with trees and without."""
    has_all = has_runs(dtype, product(SPEED_SETS, (False, True)), lambda run: (run["set"], run["budget"] > 1))
    return (*SMOLLM2, (f"{', '.join(SPEED_SETS)} in {dtype}", has_all))


def batches(dtype: str) -> tuple[Need, ...]:
    has_all = has_runs(dtype, product(BATCH_SIZES, BATCH_BUDGETS), lambda run: (run["batch"], run["budget"]))
    return (*SMOLLM2, (f"every batch size with every budget in {dtype}", has_all))


def strict(dtype: str) -> tuple[Need, ...]:
    return (
        *SMOLLM2,
        (f"1,000 prompts in {dtype}", lambda r: r["results"][dtype]["prompts"] >= 1000),
        ("256 tokens", lambda r: r["max_tokens"] == 256),
        ("batch 32", lambda r: r["results"][dtype]["batch"] == 32),
        ("budget 64", lambda r: r["results"][dtype]["budget"] == 64),
    )


SOAK = (
    *SMOLLM2,
    ("caches compared", lambda r: r["results"]["float32"]["caches_compared"] > 0),
    ("cancels", lambda r: r["results"]["float32"]["cancelled"] > 0),
    ("preemptions", lambda r: r["results"]["float32"]["preempted"] > 0),
)

# -- values of a record


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
    return float(min(record["results"]["bfloat16"]["best_speedup"].values()))


def all_mistakes(record: Record) -> float:
    return float(sum(run["mistakes"] for result in record["results"].values() for run in result["runs"]))


def edge_ms(folder: Path, budget: int) -> Value:
    """Time of the edge term: the difference to a profile without it, of the same commit and machine."""

    def value(record: Record) -> float:
        try:
            without = read_record(folder / "profile_qwen3_8b.json")
        except ValueError:
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
            name = f"Qwen3-8B, a round of {budget} nodes after {context:,} tokens, over its floor"
            yield Limit(name, dense, bound, run_of(budget, context, "ratio_round"), plain)
    yield Limit("Qwen3-8B, a plain step over its floor, at most", dense, 1.10, most("ratio_plain"), plain)
    for budget in BUDGETS:
        yield Limit(f"Qwen3-8B, the edge term with {budget} nodes, ms", edge, 0.25, edge_ms(folder, budget), of_edge)
    yield Limit("Qwen3-8B, idle between rounds, at most", dense, 0.02, most("idle_frac"), plain)
    idle = most("idle_frac", (32, *BUDGETS), CONTEXTS[:1])
    yield Limit("SmolLM2, idle between rounds after 256 tokens, at most", "profile_smollm2", 0.02, idle, REAL)
    name, fast = "SmolLM2, one request", speed("bfloat16")
    yield Limit(f"{name}, over plain decoding, at least", "engine_speed", 2.5, least_speedup, fast, True)
    yield Limit(f"{name}, differences beyond a tie", "engine_speed", 0, all_mistakes, fast)
    name, fast, exact = "SmolLM2, every batch size", batches("bfloat16"), batches("float32")
    best = "best tree over plain in bfloat16, at least"
    yield Limit(f"{name}, {best}", "engine_batches", 1.0, least_speedup, fast, True)
    yield Limit(f"{name}, differences beyond a tie", "engine_batches", 0, all_mistakes, exact + fast)
    for dtype in ("float32", "bfloat16"):
        name = f"SmolLM2, 1,000 texts in {dtype}, differences beyond a tie"
        yield Limit(name, "engine_strict", 0, lambda r, d=dtype: float(r["results"][d]["mistakes"]), strict(dtype))  # type: ignore[misc]
    name = "SmolLM2, rounds while requests come, go and are preempted"
    yield Limit(name, "engine_soak", 10_000, lambda r: float(r["results"]["float32"]["rounds"]), SOAK, True)
    name = "SmolLM2, pages, bytes, caches and texts that are wrong after them"
    yield Limit(name, "engine_soak", 0, lambda r: float(len(r["results"]["float32"]["problems"])), SOAK)
    name = "Qwen3-30B-A3B, a round of 64 nodes over reading its weights"
    round_ms, read_ms = run_of(64, 256, "round_ms"), run_of(64, 256, "read_round_ms")
    yield Limit(name, sparse, 1.5, lambda r: round_ms(r) / read_ms(r), shape("qwen3-30b-a3b"))
