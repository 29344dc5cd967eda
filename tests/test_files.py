"""Files appear whole, and only ordinary ones are replaced."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from jetspec import files
from jetspec.files import check_writable, write_whole


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_whole(file, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half a character: \ud800")
    assert file.read_text() == "before"
    write_whole(file, "after")
    assert file.read_text() == "after" and list(tmp_path.iterdir()) == [file]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "through the pipe")
    assert pipe.is_fifo(), "the pipe was replaced by a file"
    reader.join(timeout=10)
    assert heard == ["through the pipe"]


def test_unwritable_paths_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for good in ("file", "new", "a/b/new"):
        check_writable(tmp_path / good)
    check_writable(Path(os.devnull))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is made"
    with pytest.raises(ValueError, match=str(tmp_path)):
        check_writable(tmp_path)
    for bad in ("file/new", "file/a/new"):
        with pytest.raises(ValueError, match=r"file\b"):
            check_writable(tmp_path / bad)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for bad in ("file", "new", "a/b/new"):
        with pytest.raises(ValueError, match="read-only"):
            check_writable(tmp_path / bad)


@pytest.mark.parametrize("in_clone", [True, False])
def test_install_hint_fits_the_installation(in_clone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "__file__", str(tmp_path / "jetspec" / "files.py"))
    if in_clone:
        (tmp_path / "pyproject.toml").touch()
    named = f"-e '{tmp_path}[serve]'" if in_clone else "'jetspec[serve]'"
    assert str(files.missing_package("xgrammar", "serve", "a grammar")).endswith(f"xgrammar: pip install {named}")
