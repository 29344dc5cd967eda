"""`records`: every record of the performance page, measured one after the other on this machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.limits import check_limits
from benchmarks.options import RecordFolder, examples
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
