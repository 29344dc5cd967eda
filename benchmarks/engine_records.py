"""Every record of docs/performance.md, measured one after the other on this machine, and what they say.

    python -m benchmarks.engine_records --data DATA --out docs/results            all of them
    python -m benchmarks.engine_records --data DATA --out docs/results engine_speed profile_qwen3_8b

DATA is a folder of JSONL files with `turns`. Stopped at any time, the same command goes on: a record of the same
commit, command and machine stays, any other is measured anew. Ends with status 1 where one could not be had, or says
that something is wrong. Without a GPU it must be told so, by `--device cpu`: records of one are not replaced by chance.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jetspec.files import read_text
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import current_commit, hardware, is_whole_commit, module_command

PROFILES = {
    "profile_qwen3_8b": "qwen3-8b --budget 64 --budget 128 --context 256 --context 2048 --context 8192",
    "profile_qwen3_8b_edge": "qwen3-8b --edge --budget 64 --budget 128 --context 256",
    "profile_qwen3_30b_a3b": "qwen3-30b-a3b --budget 64 --context 256",
    "profile_smollm2": f"{DEFAULT_MODEL} --weights real --head {DEFAULT_MODEL} --budget 32 --budget 64 --budget 128 "
    "--context 256",
}
CHECKS = {
    "engine_speed": "speed --budgets 32 48 64",
    "engine_batches": "batches",
    "engine_strict": "strict",
    "engine_soak": "soak",
}
NAMES = (*PROFILES, *CHECKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"records to make: {', '.join(NAMES)}; default: all")
    parser.add_argument("--data", type=Path, required=True, help="folder of JSONL files with `turns`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"no record is called {unknown[0]}; there are {', '.join(NAMES)}")
    if not args.data.is_dir():
        parser.error(f"there is no folder {args.data}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu measures without one")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in args.names or NAMES if not make(name, args.data, args.out, args.device)]
    if failed:
        raise SystemExit(f"failed, or say that something is wrong: {', '.join(failed)}")


def make(name: str, data: Path, folder: Path, device: str) -> bool:
    """Have a record, by a process of its own, which gives all its memory back. False: something is wrong."""
    path = folder / f"{name}.json"
    words = command(name, data, path, device)
    if (kept := current(path, words, device)) is not None:
        print(f"{path}: is there", flush=True)
        return bool(kept.get("holds", True))
    print(f"{path}: python -m {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", *words]).returncode == 0


def current(path: Path, words: Sequence[str], device: str) -> Mapping[str, Any] | None:
    """A whole record of the source as it stands, if there is one, that these words would make again on this machine."""
    record, commit = json.loads(read_text(path)) if path.is_file() else {}, current_commit()
    if not is_whole_commit(commit) or record.get("commit") != commit or "unfinished" in record:
        return None
    where = "gpu" if device == "cuda" else "cpu"
    is_here = record["device"] == device and record["hardware"].get(where) == hardware()[where]
    is_same = options(record["command"]) == options(module_command(words))
    return record if is_here and is_same else None


def options(line: str) -> list[str]:
    """The words of a command, but for the place of its record."""
    words = shlex.split(line)
    place = words.index("--out")
    return words[:place] + words[place + 2 :]


def command(name: str, data: Path, path: Path, device: str) -> Sequence[str]:
    where = ["--device", device, "--out", str(path)]
    if name in PROFILES:
        return ["jetspec", "profile", "--shape", *PROFILES[name].split(), *where]
    check, *rest = CHECKS[name].split()
    return ["benchmarks.check_engine", check, "--head", DEFAULT_MODEL, "--data", str(data), *where, *rest]


if __name__ == "__main__":
    main()
