"""Progress in a log is whole lines, now and then."""

from __future__ import annotations

import time

import pytest

from jetspec.progress import progress_bar


def test_logs_get_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_bar(total=100, desc="training", unit=" steps") as bar:
        for _ in range(100):
            now += 1
            bar.update()
            bar.set_postfix(loss="1.0")
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert all(line.startswith("training: ") and line.endswith("\n") and "\r" not in line for line in lines)
    assert 2 <= len(lines) <= 12 and "training: 100/100 steps" in lines[-1]


def test_short_work_leaves_one_line_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_bar("abc", desc="scoring", unit="answer")) == ["a", "b", "c"]
    assert "scoring: 3/3 answer" in capsys.readouterr().err
    assert list(progress_bar("abc", leave=False)) == list(progress_bar("abc", disable=True)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
