"""`records`: every record of the performance page, measured one after the other on this machine, and its limits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.document import make_table
from benchmarks.options import RecordFolder, examples
from benchmarks.results import RESULTS_FILE, Record, best_over_plain, engine_rows, read_record
from jetspec.files import read_text
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import current_commit, hardware, is_whole_commit, module_command, write_record

PROFILES = {
    "profile_qwen3_8b": "qwen3-8b --budget 64 --budget 128 --context 256 --context 2048 --context 8192",
    "profile_qwen3_8b_edge": "qwen3-8b --set head.edge_rank=128 --budget 64 --budget 128 --context 256",
    "profile_qwen3_30b_a3b": "qwen3-30b-a3b --budget 64 --context 256",
    "profile_smollm2": f"{DEFAULT_MODEL} --weights real --head {DEFAULT_MODEL} --budget 32 --budget 64 --budget 128 "
    "--context 256",
}
RUNS: dict[str, tuple[str, ...]] = {
    "engine_speed": ("bfloat16",),
    "engine_batches": ("bfloat16", "float32"),
    "engine_strict": ("bfloat16", "float32"),
}
"""Recipes of `run`, and the precisions that each is measured in."""
NAMES = (*PROFILES, *RUNS, "engine_soak")
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
    """Make a record in processes of their own, which free their memory. False: something is wrong."""
    path = folder / f"{name}.json"
    lines = commands(name, data, path, device)
    if (kept := current(path, lines[0], device)) is not None:
        print(f"{path}: exists", flush=True)
        return bool(kept.get("holds", True))
    holds = True
    for words in lines:
        print(f"{path}: python -m {' '.join(words)}", flush=True)
        holds = subprocess.run([sys.executable, "-m", *words]).returncode == 0 and holds
    found = [Path(words[-1]) / RESULTS_FILE for words in lines]
    if name in RUNS and all(file.is_file() for file in found):
        results = {dtype: read_record(file) for dtype, file in zip(RUNS[name], found, strict=True)}
        first = results[RUNS[name][0]]
        about = {key: first[key] for key in ("command", "date", "hardware", "versions", "model", "device")}
        about |= {"head": first["recipe"]["head"] or first["model"], "max_tokens": first["recipe"]["max_tokens"]}
        write_record(path, {**about, "holds": holds, "results": results}, first["commit"])
    return holds


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


def commands(name: str, data: Path, path: Path, device: str) -> list[list[str]]:
    """Commands of a record, one for each precision of a recipe. The folder of a run belongs to one commit."""
    where = ["--device", device, "--out"]
    if name in PROFILES:
        return [["jetspec", "profile", "--shape", *PROFILES[name].split(), *where, str(path)]]
    if name not in RUNS:
        return [["benchmarks", "soak", "--head", DEFAULT_MODEL, "--data", str(data), *where, str(path)]]
    run = ["benchmarks", "run", f"benchmarks/recipes/{name}.yaml", "--data-dir", str(data)]
    folders = {dtype: f"runs/bench/{name}_{dtype}_{str(current_commit())[:7]}" for dtype in RUNS[name]}
    return [[*run, "--dtype", dtype, *where, folder] for dtype, folder in folders.items()]


# -- limits that the engine is built to keep

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
            without = read_record(folder / "profile_qwen3_8b.json")
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
