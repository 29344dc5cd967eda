"""Output of both commands of `jetspec data`: killed runs resume, settings are not mixed, foreign files are kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jetspec.data.regenerate import RowFile
from jetspec.data.rows import JobFile
from jetspec.data.synthesize import PromptFile
from tests.commands.cli import run
from tests.data import test_regenerate as rows
from tests.data import test_synthesize as prompts
from tests.train.tiny_model import write_model


class Job(NamedTuple):
    """A command: its file, the count of a run, and a function that writes `count` rows in all."""

    kind: type[JobFile]
    counted: str
    write: Callable[..., Any]


def regenerate(out: Path, count: int, seed: int = 0) -> Any:
    data = rows.prompt_file(out.parent, rows.make_prompts(9), limit=count)
    return rows.write(out, data, config=replace(rows.CONFIG, seed=seed))


def synthesize(out: Path, count: int, seed: int = 0) -> Any:
    return prompts.write(out, count, config=replace(prompts.CONFIG, seed=seed))


JOBS = [Job(RowFile, "answered", regenerate), Job(PromptFile, "kept", synthesize)]
jobs = pytest.mark.parametrize("job", JOBS, ids=["regenerate", "synthesize"])


@jobs
def test_truncated_file_is_completed_to_the_same_rows(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetspec.data.rows.write_record", lambda path, results: None)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    job.write(whole, 3)
    content = whole.read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    near = {end + step for end in (0, *ends) for step in (-2, -1, 0, 1, 2)}
    for size in sorted({*range(0, len(content), 29), *near} & set(range(len(content) + 1))):
        out.write_bytes(content[:size])
        tally = job.write(out, 3)
        assert tally.already == content[:size].count(b"\n")
        assert tally.already + getattr(tally, job.counted) == 3
        assert sorted(out.read_bytes().splitlines()) == sorted(content.splitlines())


@jobs
def test_settings_are_not_mixed_and_the_record_adds_up(job: Job, tmp_path: Path) -> None:
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    tallies = [job.write(out, count) for count in (5, 8, 8)]
    job.write(other, 8, seed=5)
    content = out.read_bytes()
    assert content != other.read_bytes()
    with pytest.raises(ValueError, match="seed 0, not 5"):
        job.write(out, 9, seed=5)
    assert out.read_bytes() == content
    record = json.loads(out.with_name("out.jsonl.meta.json").read_text())
    assert [(run[job.counted], run["already"]) for run in record["runs"]] == [(5, 0), (3, 5)]
    assert [run["tokens"] for run in record["runs"]] == [tally.tokens for tally in tallies[:2]]
    assert record["settings"]["seed"] == 0 and "jobs" in record["runs"][0]


FOREIGN = ["my notes", "my notes\n", '{"turns": ["a"]}\n', "3\n", "[]\n", '{"id": "a"}\n{"id": "b']
FOREIGN_PROMPTS = ['"p1", "turns": ["a b"]', '"invented-s0-1", "turns": []', '"invented-s0-1", "turns": [3]', "3"]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        *((job.kind, content) for job in JOBS for content in FOREIGN),
        *((PromptFile, f'{{"id": {content}}}\n') for content in FOREIGN_PROMPTS),
    ],
)
def test_foreign_file_is_not_touched(kind: type[JobFile], content: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(ValueError, match=r"out\.jsonl:1: .*another --out"):
        kind(out, {})
    assert out.read_text() == content


def test_one_run_writes_to_a_regular_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = RowFile(tmp_path / "out.jsonl", {})
    with pytest.raises(ValueError, match=r"out\.jsonl"):
        RowFile(tmp_path / "out.jsonl", {})
    first.close()
    assert list(tmp_path.iterdir()) == [], "a file without rows is removed"
    for path in (tmp_path, Path(os.devnull)):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            RowFile(path, {})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["regenerate", "--data", "p.jsonl", "--temperature", "-1"], "temperature"),
        (["regenerate", "--data", "p.jsonl", "--shard", "3/2"], "shard"),
        (["regenerate", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["regenerate", "--data", "p.jsonl", "--max-len", "20"], "p.jsonl:1: is longer than the context"),
        (["synthesize", "--count", "0"], "--count"),
        (["synthesize", "--count", "2", "--batch", "0"], "batch"),
        (["synthesize", "--count", "2", "--prefixes", "nowhere.txt"], "nowhere.txt"),
        (["synthesize", "--count", "2", "--prefixes", "none", "--prefix", "Why"], "prefixes"),
        (["synthesize", "--count", "2", "--prefix", "x" * 300], "tokens"),
    ],
)
def test_mistakes_are_one_line_with_status_2(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "tiny")
    rows.write_jsonl(tmp_path / "p.jsonl", rows.make_prompts(2))
    result = run("data", *words, "--model", str(model), "--out", "out.jsonl", "--device", "cpu")
    errors = [line for line in result.stderr.splitlines() if line.startswith("jetspec: error: ")]
    assert result.exit_code == 2 and len(errors) == 1 and named in errors[0]
