"""Records: results with the command, commit, hardware and versions that produced them."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jetspec.files import write_whole

WITH_CHANGES = " with changes"
PACKAGES = ("jetspec", "torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "numpy")
"""Packages that compute. A resumed measurement requires the same versions."""
GRADERS = ("datasets", "math-verify", "latex2sympy2-extended", "sympy")
"""Packages that read questions and grade answers. No time and no text depends on them."""


def make_record(results: dict[str, Any], commit: str | None = None) -> dict[str, Any]:
    """Results with their command, date, commit, hardware and versions.

    `commit` is for runs on a copy of the source without history; by default git reports it.
    """
    return {
        "command": current_command(),
        "date": date_now(),
        "commit": commit or current_commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **package_versions(), **package_versions(GRADERS)},
        **results,
    }


def date_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_record(path: Path, results: dict[str, Any], commit: str | None = None) -> None:
    """Writes a record as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(make_record(results, commit), indent=1) + "\n")


def current_command() -> str:
    """The command of this process, to run again in the same folder. Absolute paths are made relative to the folder, and
    of those far from it only the last part is kept: records name no place of a machine."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    program, *words = sys.argv
    if main is not None:
        return module_command([main.name.removesuffix(".__main__"), *words])
    begin = ["python", _from_here(program)] if program.endswith(".py") else [Path(program).name]
    return shlex.join([*begin, *map(_from_here, words)])


def module_command(words: Sequence[str]) -> str:
    """The recorded form of `python -m` with these words."""
    return shlex.join(["python", "-m", *map(_from_here, words)])


def _from_here(word: str) -> str:
    """A word of a command line, such as --out=PATH, NAME=PATH,NAME=PATH or data=[PATH, PATH], with relative paths, or
    only the last part of a path that shares nothing but the root with this folder."""

    def relative(part: str) -> str:
        if not Path(part).is_absolute():
            return part
        shares = len(Path(os.path.commonpath((part, Path.cwd()))).parts) > 1
        return os.path.relpath(part) if shares else Path(part).name

    return "".join(map(relative, re.split(r"([=,\[\]] *)", word)))


def shown(path: str) -> str:
    """A path or a name; of an absolute path only the last part, since the rest depends on the machine."""
    return Path(path).name if Path(path).is_absolute() else path


def shown_head(path: str) -> str:
    """A path or a name; of an absolute path the last two parts, since every training names its head `head`."""
    return "/".join(Path(path).parts[1:][-2:]) if Path(path).is_absolute() else path


def current_commit() -> str | None:
    """The commit of the source, marked when files differ from it; None when it is unknown.

    A copy without history names its commit in a file COMMIT at its root.
    """
    named = Path(__file__).parent.parent / "COMMIT"
    if named.is_file():
        return named.read_text().strip()

    def git(*words: str) -> str:
        """Output of git, which takes no lock: it may be killed with this process."""
        command, here = ["git", "--no-optional-locks", *words], Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
        return f"{commit}{WITH_CHANGES}" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def is_whole_commit(commit: str | None) -> bool:
    """True if a commit is known and holds all of the source: later changes could not be restored."""
    return commit is not None and not commit.endswith(WITH_CHANGES)


def hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        # NVIDIA's MPS lets processes compute on a GPU at the same time.
        if Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists():
            found["mps"] = True
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of the installed packages, from their metadata: nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
