"""`records`: every record of the performance page, measured one after the other on this machine, and its limits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.document import make_table
from benchmarks.options import RecordFolder, examples
from benchmarks.results import Record, read_record
from jetspec.files import read_text
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import current_commit, hardware, is_whole_commit, module_command

PROFILES = {
    "profile_qwen3_8b": "qwen3-8b --budget 64 --budget 128 --context 256 --context 2048 --context 8192",
    "profile_qwen3_8b_edge": "qwen3-8b --set head.edge_rank=128 --budget 64 --budget 128 --context 256",
    "profile_qwen3_30b_a3b": "qwen3-30b-a3b --budget 64 --context 256",
    "profile_smollm2": f"{DEFAULT_MODEL} --weights real --head {DEFAULT_MODEL} --budget 32 --budget 64 --budget 128 "
    "--context 256",
}
CHECKS = {
    "engine_speed": "engine speed --budgets 32,48,64",
    "engine_batches": "engine batches",
    "engine_strict": "engine strict",
    "engine_soak": "soak",
}
NAMES = (*PROFILES, *CHECKS)
EPILOG = examples(
    "records --data DATA --out docs/results",
    "records --data DATA --out docs/results engine_speed profile_qwen3_8b",
    "records --check --out docs/results",
)


def records(
    out: RecordFolder,
    data: Annotated[Path | None, typer.Option(help="Folder of JSONL files with `turns`.", exists=True)] = None,
    names: Annotated[list[str], typer.Argument(help=f"{', '.join(NAMES)}; all by default.", metavar="NAME")] = [],  # noqa: B006
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="cuda or cpu.")] = "cuda",
    check: Annotated[bool, typer.Option("--check", help="Only compare existing records with the limits.")] = False,
) -> None:
    """Measure the records of the performance page on this machine.

    Stop it at any time: the same command resumes. A record of the same commit, command and machine is kept. Exit status
    1: a record could not be made, or says that something is wrong; with --check, that a limit is not kept.
    """
    if check:
        table, holds = check_limits(out)
        print(table)
        raise typer.Exit(0 if holds else 1)
    if data is None:
        raise typer.BadParameter("give --data FOLDER")
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"no record is called {unknown[0]}; there are {', '.join(NAMES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; --device cpu measures without one")
    out.mkdir(parents=True, exist_ok=True)
    if failed := [name for name in names or NAMES if not make(name, data, out, device)]:
        print(f"failed, or say that something is wrong: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def make(name: str, data: Path, folder: Path, device: str) -> bool:
    """Make a record in a process of its own, which frees its memory. False: something is wrong."""
    path = folder / f"{name}.json"
    words = command(name, data, path, device)
    if (kept := current(path, words, device)) is not None:
        print(f"{path}: exists", flush=True)
        return bool(kept.get("holds", True))
    print(f"{path}: python -m {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", *words]).returncode == 0


def current(path: Path, words: Sequence[str], device: str) -> Mapping[str, Any] | None:
    """A whole record of this source, command and machine. None: there is none."""
    record, commit = json.loads(read_text(path)) if path.is_file() else {}, current_commit()
    if not is_whole_commit(commit) or record.get("commit") != commit or "unfinished" in record:
        return None
    where = "gpu" if device == "cuda" else "cpu"
    is_here = record["device"] == device and record["hardware"].get(where) == hardware()[where]
    is_same = without_out(record["command"]) == without_out(module_command(words))
    return record if is_here and is_same else None


def without_out(line: str) -> list[str]:
    """Words of a command without `--out FILE`."""
    words = shlex.split(line)
    place = words.index("--out")
    return words[:place] + words[place + 2 :]


def command(name: str, data: Path, path: Path, device: str) -> Sequence[str]:
    where = ["--device", device, "--out", str(path)]
    if name in PROFILES:
        return ["jetspec", "profile", "--shape", *PROFILES[name].split(), *where]
    return ["benchmarks", *CHECKS[name].split(), "--head", DEFAULT_MODEL, "--data", str(data), *where]


# -- limits that the engine is built to keep

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
