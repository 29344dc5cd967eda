"""Files: errors that name them, writes that are whole or absent, folders of one run at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMED = 4
"""Names that a message lists. It counts the others."""


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to errors of the system, which names one only when it is opened, not on a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all: to a temporary name, then renamed.

    A device or a pipe is written in place: a rename would replace it by a file.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuses a path that cannot be written, before the work whose result goes there. Creates nothing."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written: {above} is no folder")
    place = path if path.exists() and not path.is_file() else above
    if not os.access(place, os.W_OK):
        raise ValueError(f"{path} cannot be written: {place} is read-only for you")


@contextmanager
def whole_folder(folder: Path, own: Sequence[str]) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `folder` at the end: it appears complete or not at all.

    An older folder of files with these names is replaced; a folder with any other file is refused.
    """
    folder = folder.absolute()
    check_replaceable(folder, own)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        fresh.mkdir()
        yield fresh
        if folder.exists():
            os.replace(folder, old)
        os.replace(fresh, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_replaceable(folder: Path, own: Sequence[str]) -> None:
    """Refuses a folder that holds files of other names."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; a folder is to be written")
    if others := sorted(path.name for path in folder.iterdir() if path.name not in own):
        raise ValueError(f"{folder} holds other files ({some(others)}); choose a folder of its own")


def some(names: Sequence[str]) -> str:
    """The first `NAMED` of some names, and the number of the others."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def lock(file: IO[Any], refusal: str) -> None:
    """Locks an open file, on systems that can. The lock ends with the process, however that ends."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(refusal) from None
    except (ImportError, OSError):
        return


def install_hint(extra: str) -> str:
    """The command that installs an extra of this package, in a clone or beside an installed wheel."""
    root = Path(__file__).parent.parent
    in_clone = (root / "pyproject.toml").is_file()
    return f"pip install -e '{root}[{extra}]'" if in_clone else f"pip install 'jetspec[{extra}]'"


def missing_package(package: str, extra: str, purpose: str) -> ValueError:
    """Error for an optional package that is not installed, with the command that installs it."""
    return ValueError(f"{purpose} needs the package {package}: {install_hint(extra)}")
