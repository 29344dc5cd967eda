"""Reports: every number of the record is in them, nothing is claimed inside the spread, and the page stands alone."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import plots, tables
from benchmarks.document import make_table, to_html
from benchmarks.estimate import Estimate, to_record
from benchmarks.paper import paper_costs
from benchmarks.plots import Painter
from benchmarks.report import build_report
from benchmarks.results import Run, Score, read_inputs
from tests.benchmarks.run_folders import RIGHT, WRONG, make_head_record, make_profile_record, make_run, make_speedup
from tests.benchmarks.run_folders import read_table as read
from tests.benchmarks.tiny_bench import invoke

SMALL: dict[str, Any] = {"tasks": ("gsm8k", "mt_bench"), "budgets": (16, 64), "batches": (1,), "temperatures": (0.0,)}
RESULTS = Path(__file__).parents[2] / "docs" / "results"
Row = dict[str, str]


def small_run(folder: Path, change: Callable[[dict[str, Any]], object] | None = None, **settings: Any) -> Run:
    """A run of few cells, and the changes to its record."""
    file = make_run(folder / "run", **{**SMALL, **settings}) / "results.json"
    record = json.loads(file.read_text())
    if change is not None:
        change(record)
    file.write_text(json.dumps(record))
    return read_inputs([file.parent])[0]


def by(name: str, table: str) -> dict[str, Row]:
    """Rows of a table by the text of a column."""
    return {row[name]: row for row in read(table)}


def warnings(*runs: Run) -> str:
    return "\n".join(line for line in build_report(runs).splitlines() if line.startswith("> **Note:**"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of all kinds of input: one run, two heads."""
    root = tmp_path_factory.mktemp("report")
    run = make_run(root / "run", **{**SMALL, "batches": (1, 8)}, methods=("plain", "transformers", "ngram", "jetspec"))
    heads = [make_head_record(root / "causal.json"), make_head_record(root / "other.json", 20)]
    result = invoke("report", run, *heads, "--out", root / "out")
    assert result.exit_code == 0, result.output
    return root / "out"


def test_the_page_is_well_formed_and_stands_alone(written: Path) -> None:
    text = (written / "report.html").read_text()
    elements = list(ElementTree.fromstring(text.removeprefix("<!doctype html>")).iter())
    assert not {"script", "link", "img", "iframe", "object", "base"} & {element.tag for element in elements}
    ids = [element.attrib["id"] for element in elements if "id" in element.attrib]
    references = [
        value for element in elements for name, value in element.items() if name[-4:] in ("href", "}src", "src")
    ]
    assert references and set(references) <= {f"#{name}" for name in ids} and len(ids) == len(set(ids))
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_all_kinds_of_plots_are_drawn_and_follow_the_screen(written: Path) -> None:
    pictures = {path.stem: path.read_text() for path in (written / "plots").glob("*.svg")}
    for kind in ("speedup_t0_b1", "rounds_t0_b1", "speedup_budget_t0_b8", "acceptance", "equation1", "equation2"):
        assert any(name.startswith(kind) for name in pictures)
    assert {"speedup_batch_t0_ngram", "speedup_batch_t0_jetspec", "rank1_gap"} <= set(pictures)
    assert "choices_causal_temperature_1" in pictures
    for svg in pictures.values():
        ElementTree.fromstring(svg)
        assert "currentColor" in svg and plots.INK not in svg and "prefers-color-scheme" in svg


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("report", sorted(RESULTS.glob("bench_*/report.md")), ids=lambda report: report.parent.name)
def test_published_reports_agree_with_their_records(report: Path) -> None:
    assert build_report(read_inputs([report.parent]), painter=Painter()) == report.read_text()


def test_text_is_no_html() -> None:
    text = make_table([{"name": "<b>|</b>"}], "a <i>caption</i>") + "\n\n<script>x</script>"
    page = ElementTree.fromstring(to_html("<u>", text, {}).removeprefix("<!doctype html>"))
    assert not {"b", "i", "u", "script"} & (found := {element.tag for element in page.iter()}) and {"td", "p"} <= found


@given(st.floats(1, 100), st.floats(0, 10), st.floats(1, 100), st.floats(0, 10))
def test_a_difference_needs_more_than_both_spreads(a: float, a_sd: float, b: float, b_sd: float) -> None:
    first, second = Estimate(a, a_sd), Estimate(b, b_sd)
    assert first.differs(second) == second.differs(first)
    assert not first.differs(second) or abs(a - b) > max(a_sd, b_sd)
    assert first.differs(second) or abs(a - b) <= 2 * (a_sd + b_sd)
    assert first.is_near(second) == second.is_near(first) and not (first.is_near(second) and first.differs(second))
    assert (
        Estimate(a).differs(second) is None and second.differs(Estimate(a)) is None and not second.is_near(Estimate(a))
    )


def test_one_repeat_has_no_spread_and_says_so(tmp_path: Path) -> None:
    run = small_run(tmp_path, repeats=1)
    assert "measured once" in warnings(run)
    timed = "tokens/s", "speedup", "over transformers"
    assert not any("±" in row[name] for row in read(tables.cells_table([run])) for name in timed)
    assert verdicts(run, run) == {"plain": {"-"}, "others": {"spread unknown"}}


def test_a_glance_shows_scores_of_all_questions_ties_and_what_is_faster_than_transformers(tmp_path: Path) -> None:
    def ask_less(record: dict[str, Any]) -> None:
        for cell in record["cells"]:
            if cell["method"] == "transformers":
                cell["questions"] = cell["score"]["graded"] = cell["score"]["correct"] = 1

    run = small_run(tmp_path, ask_less, tasks=("gsm8k",), methods=("plain", "transformers", "ddtree"))
    rows = by("method", tables.glance_table(run.cells))
    assert rows["transformers"]["score"] == "-" and rows["plain"]["score"].startswith("0.300")
    assert rows["ddtree"]["same text as plain"] == "39/40, 1 tie"
    assert rows["transformers"]["over transformers"] == "-" and float(rows["plain"]["over transformers"]) == 3


@pytest.mark.parametrize(
    ("compared", "identical", "ties", "told", "untold"),
    [
        (9, 9, 0, "", "at a tie"),
        (9, 7, 2, "8 texts leave those of plain decoding at a tie", "not at a tie"),
        (9, 7, 0, "8 texts differ from those of plain decoding, and not at a tie: ngram 16, ngram 64", "leave"),
        (0, 0, 0, "no text could be compared", "at a tie"),
    ],
)
def test_ties_mistakes_and_missing_comparisons_are_distinguished(
    compared: int, identical: int, ties: int, told: str, untold: str, tmp_path: Path
) -> None:
    check = {"check": "greedy tokens", "different": [], "compared": compared, "identical": identical, "ties": ties}
    found = warnings(small_run(tmp_path, methods=("ngram",), changes={"lossless": check}))
    assert told in found and untold not in found


def test_a_method_that_was_asked_some_tasks_has_no_mean_and_no_part_in_what_is_said_of_all(tmp_path: Path) -> None:
    whole = small_run(tmp_path, methods=("plain", "transformers", "ngram", "jetspec"))
    lacks = {"transformers": "gsm8k", "ngram": "gsm8k"}
    run = replace(whole, cells=tuple(cell for cell in whole.cells if lacks.get(cell.method) != cell.task))
    rows = by("method", tables.glance_table(run.cells))
    for column in ("tokens/s", "tokens per round", "score"):
        assert rows["jetspec"][column] != "-" and rows["ngram"][column] == "-", column
    assert (rows["ngram"]["questions"], rows["jetspec"]["questions"]) == ("40", "80")
    ngram = by("method, budget", tables.task_tables(run.cells)["Speedup over plain decoding"])["ngram 16"]
    assert ngram["gsm8k"] == ngram["mean"] == "-" != ngram["mt_bench"]
    assert set(by("method, budget", tables.lossless_table(run))) == {"transformers; ngram 16, 64", "jetspec 16, 64"}
    painter = Painter()
    assert "Left out, as asked some tasks only: transformers, ngram." in build_report([run], painter=painter)
    assert "ngram" not in painter.pictures["acceptance_t0_b1"] and "ngram" in painter.pictures["speedup_t0_b1"]
    assert "Left out" not in build_report([whole], painter=Painter())


def test_failures_and_differences_are_listed(tmp_path: Path) -> None:
    errors = [{"id": "gsm8k-7", "repeat": repeat, "error": "ran out of pages"} for repeat in (0, 2)]
    run = small_run(tmp_path, changes={"errors": errors})
    text = build_report([run])
    assert f"{2 * len(run.cells)} answers failed" in text and "ran out of pages" in text and "0.0312" in text
    first, *_ = read(tables.errors_table(run))
    assert list(first.values())[1:] == ["gsm8k-7", "plain", "0", "1", "1, 3", "ran out of pages"]


def test_a_cell_in_which_everything_failed_is_shown_as_such(tmp_path: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        broken = next(cell for cell in record["cells"] if cell["method"] == "ddtree")
        broken |= {"tokens_per_s": {"mean": None, "sd": None, "values": []}, "accepted": []}
        broken |= {"tokens_per_round": {**to_record([]), "questions": []}}
        broken |= {"speedup": None, "speedup_transformers": None, "prefill_s": to_record([0.0] * 3)}
        broken |= {"errors": [{"id": "gsm8k-1", "repeat": 0, "error": "no pages"}]}

    run = small_run(tmp_path, fail, methods=("plain", "ngram", "ddtree"))
    text = build_report([run], painter=Painter())
    assert "| gsm8k-1 | ddtree 16 |" in text and "| failed |" in text
    lines = plots.series_of(run.cells, "speedup")
    assert set(lines["ngram"]) == {16, 64} and set(lines["ddtree"]) == {64}, "a mean over all tasks, or none"
    assert len(read(tables.summary([run], "md"))) == len(run.cells)


def test_scores_stand_beside_those_of_plain_decoding(tmp_path: Path) -> None:
    scores: dict[str, Mapping[str, Any]] = {
        "ddtree": {"correct": 13, "right": [*RIGHT, WRONG[0]], "wrong": WRONG[1:]},
        "dflash": {"correct": 40, "right": [*RIGHT, *WRONG], "wrong": []},
        "jetspec-paper": {"right": [*RIGHT[1:], WRONG[0]], "wrong": [RIGHT[0], *WRONG[1:]]},
        "ngram": {"correct": 3, "graded": 10, "right": RIGHT[:3], "wrong": WRONG[:7]},
    }

    def grade(record: dict[str, Any]) -> None:
        for cell in record["cells"]:
            if cell["score"]:
                cell["score"] |= scores.get(cell["method"], {})

    found = by("method", tables.score_table(small_run(tmp_path, grade)))
    assert {name: (row["value"], row["against plain"]) for name, row in found.items()} == {
        "plain": ("0.3000", "-"),
        "transformers; jetspec-edge 16, 64": ("0.3000", "same"),
        "ddtree 16, 64": ("0.3250", "+0.0250, 1 won, 0 lost (no difference)"),
        "dflash 16": ("1.0000", "+0.7000, 28 won, 0 lost"),
        "jetspec-paper 16, 64": ("0.3000", "+0.0000, 1 won, 1 lost (no difference)"),  # as many, not the same
        "ngram 16, 64": ("0.3000", "other questions"),
    }


@given(st.integers(1, 2000), st.data())
def test_no_score_is_certain(graded: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, graded))
    share = Score(correct, graded, 0, 0, (), ()).share
    assert share.mean == correct / graded and share.sd and share.sd > 1 / (graded + 4)
    if graded > 100:
        usual = math.sqrt(share.mean * (1 - share.mean) / graded)
        assert share.sd == pytest.approx(usual, abs=2 / graded)


def test_how_heads_were_trained_is_told_and_whether_alike(tmp_path: Path) -> None:
    def run(name: str, **other: str) -> Run:
        usual = {"weights": "ab12", "data": "answers.jsonl, 9 rows", "steps": "1,500", "command": "jetspec train x"}
        heads = {"dflash": usual, "jetspec-edge": {**usual, **other}}
        return small_run(tmp_path / name, lambda record: record.update(heads=heads))

    alike, longer = run("alike"), run("longer", steps="9,000")
    assert [row["steps"] for row in read(tables.heads_table(longer))] == ["1,500", "9,000"]
    assert "not all trained alike" not in warnings(alike)
    assert "jetspec-edge: 9,000 steps, answers.jsonl, 9 rows" in warnings(longer)


def test_two_runs_are_compared_cell_by_cell(tmp_path: Path) -> None:
    a, b = small_run(tmp_path / "a"), small_run(tmp_path / "b", budgets=(16, 128), gpu="NVIDIA A100")
    mine, its = ({cell.key for cell in run.cells} for run in (a, b))
    assert len(read(tables.against_table(a, b))) == len(mine & its)
    assert "device NVIDIA H200 and NVIDIA A100" in warnings(a, b)
    assert f"{len(mine ^ its)} cells are in one of the runs only" in build_report([a, b])


def test_verdicts_need_more_than_the_spread(tmp_path: Path) -> None:
    def run(name: str, values: list[float], speed: float = 1) -> Run:
        changes = {"speedup": make_speedup(values), "tokens_per_s": to_record([99 * speed, 100 * speed, 101 * speed])}
        return small_run(tmp_path / name, changes=changes)

    slow, near, fast = run("slow", [1.98, 2.0, 2.02]), run("near", [2.0, 2.02, 2.04]), run("fast", [3.9, 4.0, 4.1])
    assert verdicts(slow, near)["others"] == {"no difference"}
    assert verdicts(slow, fast)["others"] == {"B gains more"} and verdicts(fast, slow)["others"] == {"A gains more"}
    assert verdicts(slow, run("elsewhere", [1.98, 2.0, 2.02], 0.5)) == {"plain": {"-"}, "others": {"no difference"}}


def verdicts(a: Run, b: Run) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in read(tables.against_table(a, b)):
        found.setdefault("plain" if row["method"] == "plain" else "others", set()).add(row["verdict"])
    return found


def test_summaries_hold_the_same_numbers_in_every_form(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    rows = json.loads(tables.summary([run], "json"))
    assert [json.loads(line) for line in tables.summary([run], "jsonl").splitlines()] == rows
    assert len(rows) == len(run.cells)
    for found, row in zip(csv.DictReader(StringIO(tables.summary([run], "csv"))), rows, strict=True):
        assert found == {key: "" if value is None else str(value) for key, value in row.items()}
    lines = tables.summary([run], "md").splitlines()
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines[2:], rows, strict=True):
        assert f" {row['tokens_per_s']:.1f} ± {row['tokens_per_s_sd']:.1f} |" in line
        assert ("≈" in line) == (row["differs"] is False and row["method"] != "plain")


@given(st.lists(st.integers(0, 50), min_size=2, max_size=17).filter(any), st.floats(0.5, 5))
def test_speed_formulas_give_back_what_was_measured(accepted: list[int], speedup: float) -> None:
    drafts, rounds = plots.Drafts("", "", accepted, speedup), sum(accepted)
    assert drafts.tokens_when_cut[-1] == pytest.approx(1 + sum(n * count for n, count in enumerate(accepted)) / rounds)
    assert sum(drafts.reach_shares) == pytest.approx(drafts.tokens_when_cut[-1] - 1)
    assert 0 <= drafts.alpha <= 1
    assert drafts.tokens(drafts.depth) == pytest.approx(sum(drafts.alpha**i for i in range(len(accepted))))
    assert drafts.tokens(drafts.depth) / (drafts.depth * drafts.cost + 1) == pytest.approx(speedup)


def test_costs_of_a_profile_stand_beside_the_papers(tmp_path: Path) -> None:
    inputs = read_inputs([make_profile_record(tmp_path / "profile.json", contexts=(256, 1000))])
    # 0.98 ms for 16 tokens beside 5.0 ms; the paper has this context, and not the other.
    assert [list(row.values()) for row in read(tables.cost_table(inputs[0].costs, beside_paper=True))] == [
        ["256", "16", "64", "1", "0.980", "5.000", "1.225", "0.837"],
        ["1000", "16", "64", "1", "0.980", "5.000", "1.225", "-"],
    ]
    text, known = build_report(inputs), len(paper_costs()[1])
    assert "Not the paper's settings: it ran on NVIDIA H200, in the paper on H200 NVL." in text
    assert f"{known - 1} of the paper's {known} values are of contexts and depths" in text
    other = make_profile_record(tmp_path / "other.json", contexts=(512,))
    assert build_report([*inputs, *read_inputs([other])]).count("## Cost of drafting") == 1
    alone = build_report(inputs, paper=False)
    assert "0.837" not in alone and "paper" not in alone


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, "results.json"),
        ("{", "is not JSON"),
        ("[]", "is not a record"),
        ("{}", "no result of"),
        ('{"cells": []}', "no cells, scores or costs"),
        ('{"cells": [{"method": "plain"}]}', "is damaged"),
        ('{"details": 3, "mean": {"16": 1}, "tokens_per_round": {"gsm8k": {"16": 1}}}', "is damaged"),
        ('{"costs": [{}]}', "is damaged"),
    ],
)
def test_a_damaged_run_is_one_line_and_status_2(text: str | None, hint: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    result = invoke("report", tmp_path)
    assert result.exit_code == 2 and hint in result.stderr and len(result.stderr.splitlines()) == 1


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    inputs = read_inputs([make_run(tmp_path / "a" / "run", **SMALL), make_run(tmp_path / "b" / "run", **SMALL)])
    assert len({run.name for run in inputs}) == 2


@pytest.mark.usefixtures("undrawn")
def test_names_of_plots_are_names_of_files(tmp_path: Path) -> None:
    painter, methods = Painter(), ("plain", "odd/../name", "jetspec")
    run = small_run(tmp_path, temperatures=(0.6,), batches=(1, 2), methods=methods)
    text = build_report([run], painter=painter)
    assert painter.pictures and all(re.fullmatch(r"[\w-]+", name) for name in painter.pictures)
    assert set(re.findall(r"\(plots/(.*)\.svg\)", text)) == set(painter.pictures)
