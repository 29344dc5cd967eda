"""Rows to a record: what may be claimed, what is graded, and the command that does it all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import Result

import jetspec.record as records
from benchmarks import measure, rows
from benchmarks.cells import Measured, accepted_lengths, question_speedups, speedup, tokens_per_round
from benchmarks.estimate import Estimate
from benchmarks.recipe import Cell
from benchmarks.results import Result as CellResult
from benchmarks.results import commits_of
from benchmarks.rows import histogram
from benchmarks.run_record import Results
from jetspec.engine.llm import LLM
from tests.benchmarks.tiny_bench import invoke, make_bench, results_of


def answer(id: str, turns: Sequence[float], error: str | None = None, accepted: Sequence[int] = ()) -> dict[str, Any]:
    return {"id": id, "tokens": turns, "error": error, "rounds": len(turns), "accepted": accepted or [len(turns)]}


def row(*answers: dict[str, Any], seconds: float = 1.0) -> dict[str, Any]:
    return {"ids": [a["id"] for a in answers], "decode_s": seconds, "prefill_s": 1.0, "answers": answers}


def measured(speeds: Sequence[float], method: str = "mine", errors: Sequence[str] = ()) -> Measured:
    """A cell of one question per repeat, which wrote so many tokens in a second."""
    failed = [answer(id, [], "no") for id in errors]
    return Measured(Cell(method, "task", 0.0, 1, 1), [[row(answer("q", [speed]), *failed)] for speed in speeds])


# -- statistics


def test_an_answer_that_failed_half_way_counts_in_no_number() -> None:
    """Nor does the time of its group, of which it took an unknown part."""
    cell, lost = Cell("mine", "task", 0.0, 16, 2), "lost its connection"
    whole, half = answer("a", [8, 8]), answer("b", [100], lost)
    failed, alone = (Measured(cell, [rows] * 2) for rows in ([row(whole), row(half)], [row(whole)]))
    beside = Measured(cell, [[row(whole), row(answer("c", [8, 8]), half)]] * 2)
    assert failed.tokens == alone.tokens == 2 * 16 and beside.tokens == 2 * 32
    assert failed.speeds == alone.speeds == beside.speeds == [16, 16]
    assert failed.prefills == alone.prefills == beside.prefills == [1, 1]
    assert tokens_per_round(failed) == tokens_per_round(alone) == tokens_per_round(beside) == [8, 8]
    assert accepted_lengths(failed) == accepted_lengths(alone) == [4]
    plain = Measured(cell.beside("plain", 1), [[row(whole), row(answer("b", [8, 8]))]] * 2)
    assert speedup(failed, plain) is None and speedup(plain, failed) is None, "not the same questions"


def test_no_speedup_over_other_questions() -> None:
    base = measured([1, 1], errors=["hard"])
    assert speedup(measured([2, 2], errors=["hard"]), base) is not None
    assert speedup(measured([2, 2]), base) is None, "no group in common"
    solved = [
        [{**row, "answers": [{**a, "error": None} for a in row["answers"]]} for row in rows] for rows in base.repeats
    ]
    assert speedup(Measured(base.cell, solved), base) is None, "it did not fail where the other did"
    assert speedup(measured([2, 2]), None) is None


def test_a_method_with_a_limit_is_compared_on_its_own_questions(folder: Path, llm: LLM) -> None:
    methods = ["ngram", {"name": "transformers", "limit": 2}]
    bench = make_bench(folder, "limited", llm, methods=methods)
    results = Results(bench, bench.run())
    cells = {cell["method"]: cell for cell in results.record()["cells"]}
    assert [cells[name]["questions"] for name in ("plain", "ngram", "transformers")] == [5, 5, 2]
    mine, base = (
        next(m for c, m in results.measured.items() if c.method == name) for name in ("ngram", "transformers")
    )
    assert mine.beside(base).speeds != mine.speeds and len(mine.beside(base).all_whole_answers) == 4
    ratios = [a / b for a, b in zip(mine.beside(base).speeds, base.speeds, strict=True)]
    assert cells["ngram"]["speedup_transformers"]["values"] == ratios
    assert cells["ngram"]["speedup_transformers"]["mean"] == pytest.approx(math.prod(ratios) ** 0.5)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=40))
def test_acceptance_counts_every_round_once(lengths: list[int]) -> None:
    tokens = len(lengths) + sum(lengths)
    whole = answer("q", [tokens], accepted=histogram(lengths)) | {"rounds": len(lengths)}
    mine = Measured(Cell("mine", "task", 0.0, 16, 1), [[row(whole)]])
    counts = accepted_lengths(mine)
    assert sum(counts) == len(lengths) and tokens_per_round(mine) == [tokens / len(lengths)]
    assert sum(kept * count for kept, count in enumerate(counts)) == sum(lengths)


# -- what a reader should know


def test_a_method_with_too_few_questions_does_not_pass_for_a_full_batch(folder: Path, llm: LLM) -> None:
    few = {"name": "few", "kind": "ngram", "limit": 2}
    results = results_of(make_bench(folder, "few", llm, batches=[4], repeats=1, methods=["ngram", few]))
    assert results["notes"] == ["sums in batches of 4: few got only 2 questions"]
    cells = [CellResult.read(cell) for cell in results["cells"]]
    assert [(c.method, c.batch_text) for c in cells] == [("plain", "4"), ("ngram", "4"), ("few", "2 of 4")]


def test_rows_of_several_sources_are_noted(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes_of(commit: str, repeats: int) -> list[str]:
        monkeypatch.setattr(rows, "current_commit", lambda: commit)
        notes: list[str] = results_of(make_bench(folder, "sources", llm, repeats=repeats))["notes"]
        return notes

    assert notes_of("old", 1) == notes_of("new", 1) == [], "the second time there is nothing left to measure"
    (note,) = notes_of("new", 2)
    assert note.endswith(": old, new")


def asked(method: str, speeds: Sequence[Mapping[str, float]], together: int = 1) -> Measured:
    """Questions with their speeds, by repeat, so many in a group."""
    repeats = []
    for speed in speeds:
        answers = [answer(id, [100 * value]) for id, value in speed.items()]
        some = [answers[i : i + together] for i in range(0, len(answers), together)]
        repeats.append([row(*own, seconds=100.0) for own in some])
    return Measured(Cell(method, "sums", 0.0, 1, together), repeats)


def test_speedups_know_how_much_questions_differ() -> None:
    """Paired by question, whatever their order and speeds are; of its repeats the median counts."""
    plain = asked("plain", [{"a": 1, "b": 10, "c": 5}] * 3)
    mine = asked("mine", [{"a": 2, "b": 40, "c": 40}, {"c": 41, "a": 2, "b": 40}, {"b": 40, "c": 1, "a": 2}])
    found = speedup(mine, plain)
    assert found is not None
    assert question_speedups(mine, plain) == found["questions"] == pytest.approx({"a": 2, "b": 4, "c": 8})
    error = math.log(2) / math.sqrt(3)  # their logarithms are as far apart as that of 2
    assert found["se_questions"] == pytest.approx(4 * error) and found["num_questions"] == 3  # of their mean, 4
    read = Estimate.read_ratios(found)
    assert read and read.questions and read.questions.sd == pytest.approx(found["se_questions"])
    assert read.questions.freedom == 2 and read.differs_from_1() == found["differs"]
    assert read.questions.asked[0] == pytest.approx({"a": math.log(2), "b": math.log(4), "c": math.log(8)})
    unnamed = Estimate.read_ratios({key: value for key, value in found.items() if key != "questions"})
    assert unnamed and unnamed.questions and unnamed.questions.sd == read.questions.sd and not unnamed.questions.asked
    old = Estimate.read_ratios({key: value for key, value in found.items() if "questions" not in key})
    assert old and old.questions is None and old.sd == read.sd


def test_questions_that_were_decoded_together_have_no_times_of_their_own() -> None:
    speeds = [{"a": 1.0, "b": 2.0, "c": 1.0}] * 2
    found = speedup(asked("mine", speeds, together=2), asked("plain", speeds, together=2))
    assert found is not None and found["se_questions"] is None and found["num_questions"] == 0
    plain = asked("plain", speeds)
    itself = speedup(plain, plain)
    assert itself is not None and itself["se_questions"] is None, "beside itself nothing varies"


# -- the command


def run_command(folder: Path, *words: str) -> Result:
    usual = ["--model", str(folder / "model"), "--data-dir", str(folder / "eval"), "--tasks", "sums", "--device", "cpu"]
    usual += ["-n", "6", "-r", "2", "--out", str(folder / "command")]
    return invoke("run", *usual, *words)


def test_the_command_prints_the_record_that_it_writes(folder: Path) -> None:
    asked = ["--methods", f"ngram,ddtree={folder / 'bidirectional'}", "--budgets", "4,8", "--batch", "2"]
    done = run_command(folder, *asked, "--output", "jsonl")
    assert done.exit_code == 0, done.output
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    record = json.loads((folder / "command" / "results.json").read_text())
    assert {"command", "commit", "hardware", "versions", "recipe"} <= set(record)
    assert [method["name"] for method in record["recipe"]["methods"]] == ["plain", "ngram", "ddtree"]

    def key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(cell[name] for name in ("method", "task", "temperature", "budget", "batch"))

    measured = {key(cell): cell for cell in record["cells"]}
    assert len(shown) == len(measured) == 1 + 2 + 2
    for row in shown:
        cell = measured[key(row)]
        assert (row["tokens_per_s"], row["tokens_per_s_sd"]) == (
            cell["tokens_per_s"]["mean"],
            cell["tokens_per_s"]["sd"],
        )
        assert (row["speedup"], row["differs"]) == (cell["speedup"]["mean"], cell["speedup"]["differs"])
        assert row["tokens_per_round"] == cell["tokens_per_round"]["mean"] and row["failed"] == 0
    before = (folder / "command" / "rows.jsonl").read_bytes()
    again = run_command(folder, *asked, "--output", "jsonl")
    assert again.stdout == done.stdout and (folder / "command" / "rows.jsonl").read_bytes() == before


def test_a_run_that_measures_nothing_keeps_its_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record stays that of the commands that measured, also when it is written again."""

    def run_as(commit: str, *words: str) -> tuple[dict[str, Any], str]:
        for module in (rows, records):
            monkeypatch.setattr(module, "current_commit", lambda: commit * 8)
        monkeypatch.setattr(records, "current_command", lambda: f"jetspec bench as {commit}")
        done = run_command(folder, "--out", str(folder / "later"), "--limit", "1", *words)
        assert done.exit_code == 0, done.output
        return json.loads((folder / "later" / "results.json").read_text()), done.stderr

    monkeypatch.setattr(rows, "date_now", lambda: "2026-01-01T00:20:00+00:00")
    first, said = run_as("first")
    assert "nothing was left" not in said
    assert (first["commit"], first["date"]) == ("first" * 8, "2026-01-01T00:20:00+00:00")
    again, said = run_as("later")
    assert again == first
    found = "all of it was measured by 2026-01-01 00:20:00 UTC at commit firstfi, and --fresh measures again"
    assert found in " ".join(said.split())
    monkeypatch.setattr(rows, "date_now", lambda: "2026-01-02T00:00:00+00:00")
    more, said = run_as("later", "--budgets", "4,64")
    assert "nothing was left" not in said and commits_of(more) == "firstfi, laterla"
    assert (more["commit"], more["command"]) == ("later" * 8, "jetspec bench as later")
    fresh, _ = run_as("third", "--fresh")
    assert fresh["commit"] == "third" * 8 and len(fresh["runs"]) == 1


@pytest.mark.parametrize("words", [[], ["--fresh"]])
@pytest.mark.parametrize("where", [(measure.Bench, "decode"), (Results, "cell")], ids=["measuring", "grading"])
def test_an_interrupted_run_says_how_to_resume(
    where: tuple[Any, str], words: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, (owner, name) = [], where
    whole = getattr(owner, name)

    def stop(self: Any, *asked: Any) -> Any:
        calls.append(asked)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *asked)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        stopped = run_command(folder, "--out", str(tmp_path / "run"), "--limit", "2", *words)
    assert stopped.exit_code == 130 and stopped.stdout == "" and len(calls) == 2
    said = stopped.stderr.splitlines()[-1]
    assert said.endswith(f"resumes {tmp_path / 'run'}") and ("--fresh" in said) == bool(words)
    held = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert held and run_command(folder, "--out", str(tmp_path / "run"), "--limit", "2").exit_code == 0
    assert (tmp_path / "run" / "rows.jsonl").read_bytes().startswith(held)
