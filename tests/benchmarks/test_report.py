"""Reports: every number of the record is in them, nothing is claimed inside the spread, and the page stands alone."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.document import Block, Note, Plot, to_markdown
from benchmarks.estimate import Estimate, to_record
from benchmarks.formulas import (
    expected_speedup,
    expected_tokens,
    fit_alpha,
    implied_cost,
    reach_shares,
    tokens_when_cut,
)
from benchmarks.paper import find_pairs, paper_costs
from benchmarks.plots import INK, series_of
from benchmarks.report import build_report
from benchmarks.results import Inputs, Run, Score, read_inputs
from benchmarks.tables import (
    against_table,
    cells_table,
    cost_table,
    errors_table,
    glance_table,
    heads_table,
    lossless_table,
    score_table,
    speedup_of,
    speedup_table,
    summary,
    trees_text,
)
from jetspec.config import TreeConfig
from tests.benchmarks.run_folders import RIGHT, WRONG, make_head_record, make_profile_record, make_run, make_speedup
from tests.benchmarks.tiny_bench import invoke

SMALL: dict[str, Any] = {"tasks": ("gsm8k", "mt_bench"), "budgets": (16, 64), "batches": (1,), "temperatures": (0.0,)}


def read_run(folder: Path) -> Run:
    return read_inputs([folder]).runs[0]


def small_run(folder: Path, **settings: Any) -> Run:
    return read_run(make_run(folder / "run", **{**SMALL, **settings}))


def report(*runs: Run, paper: bool = True, plots: bool = False) -> list[Block]:
    return build_report(Inputs(list(runs), [], []), paper, plots)


def warnings(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, Note))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of all kinds of input: one run, two heads."""
    root = tmp_path_factory.mktemp("report")
    run = make_run(root / "run", **{**SMALL, "batches": (1, 8)}, methods=("plain", "transformers", "ngram", "jetspec"))
    heads = [make_head_record(root / "causal.json"), make_head_record(root / "other.json", 20)]
    result = invoke("report", run, *heads, "--out", root / "out")
    assert result.exit_code == 0, result.output
    return root / "out"


class Page(HTMLParser):
    """Elements, ids and references of a page."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "srcset", "data"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_stands_alone(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.seen)
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_all_kinds_of_plots_are_drawn_and_follow_the_screen(written: Path) -> None:
    plots = {path.stem: path.read_text() for path in (written / "plots").glob("*.svg")}
    for kind in ("speedup_t0_b1", "rounds_t0_b1", "speedup_budget_t0_b8", "acceptance", "equation1", "equation2"):
        assert any(name.startswith(kind) for name in plots)
    assert {"speedup_batch_t0_ngram", "speedup_batch_t0_jetspec", "rank1_gap"} <= set(plots)
    for svg in plots.values():
        ElementTree.fromstring(svg)
        assert "currentColor" in svg and INK not in svg and "prefers-color-scheme" in svg


def test_every_cell_is_in_the_report_with_the_numbers_of_the_record(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    raw = json.loads((folder / "results.json").read_text())["cells"]
    table = cells_table([read_run(folder)], details=True)
    rows = {row[:5]: row for row in table.rows}
    at = {name: i for i, name in enumerate(table.columns)}
    assert len(rows) == len(raw)
    for cell in raw:
        budget = "-" if cell["budget"] is None or cell["method"] == "plain" else str(cell["budget"])
        row = rows[cell["method"], cell["task"], f"{cell['temperature']:g}", budget, str(cell["batch"])]
        speed = cell["tokens_per_s"]
        assert row[at["tokens/s"]] == f"{speed['mean']:.1f} ± {speed['sd']:.1f}"
        assert row[at["tokens"]] == str(cell["tokens"])
        if cell["method"] != "plain":
            assert row[at["speedup"]].endswith(f"{cell['speedup']['mean']:.2f} ± {cell['speedup']['sd']:.2f}")
            assert row[at["speedup"]].startswith("≈") == (not cell["speedup"]["differs"])
        per_round = Estimate.of_parts(cell["tokens_per_round"]["questions"])
        if per_round is not None and per_round.sd is not None:
            assert row[at["tokens/round"]] == f"{per_round.mean:.2f} ± {per_round.sd:.2f}"
        prefill = float(row[at["prefill s per question"]].split(" ± ")[0])
        assert prefill == pytest.approx(cell["prefill_s"]["mean"] / cell["questions"])


def test_differences_within_the_spread_are_not_claimed(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    table = speedup_table(run.cells)
    assert table is not None
    cells = {(cell.label, cell.task): cell.speedup for cell in run.cells}
    marked = 0
    for label, *row in table.rows:
        for task, text in zip(table.columns[1:-1], row, strict=False):
            speedup = cells[label, task]
            assert speedup is not None and text.startswith("≈") != speedup.differs_from_1()
            marked += not speedup.differs_from_1()
    assert marked


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
    assert "measured once" in warnings(report(run))
    table = cells_table([run])
    timed = [table.columns.index(name) for name in ("tokens/s", "speedup", "over transformers")]
    assert not any("±" in row[column] for row in table.rows for column in timed)
    assert verdicts(run, run) == {"plain": {"-"}, "others": {"spread unknown"}}


def test_a_glance_shows_scores_of_all_questions_ties_and_what_is_faster_than_transformers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", **{**SMALL, "tasks": ("gsm8k",)}, methods=("plain", "transformers", "ddtree"))
    record = json.loads((folder / "results.json").read_text())
    for cell in record["cells"]:
        if cell["method"] == "transformers":
            cell["questions"] = cell["score"]["graded"] = cell["score"]["correct"] = 1
    (folder / "results.json").write_text(json.dumps(record))
    table = glance_table(read_run(folder).cells)
    at = {name: i for i, name in enumerate(table.columns)}
    rows = {row[0]: row for row in table.rows}
    assert rows["transformers"][at["score"]] == "-" and rows["plain"][at["score"]].startswith("0.300")
    assert rows["ddtree"][at["same text as plain"]] == "39/40, 1 tie"
    assert rows["transformers"][at["over transformers"]] == "-" and float(rows["plain"][at["over transformers"]]) == 3


def test_ties_mistakes_and_missing_comparisons_are_distinguished(tmp_path: Path) -> None:
    def check(compared: int, identical: int, ties: int) -> dict[str, Any]:
        return {"check": "greedy tokens", "different": [], "compared": compared, "identical": identical, "ties": ties}

    def told(name: str, **counts: int) -> str:
        return warnings(report(small_run(tmp_path / name, methods=("ngram",), changes={"lossless": check(**counts)})))

    assert "at a tie" not in told("same", compared=9, identical=9, ties=0)
    tied = told("tied", compared=9, identical=7, ties=2)
    assert "8 texts leave those of plain decoding at a tie" in tied and "not at a tie" not in tied
    wrong = told("wrong", compared=9, identical=7, ties=0)
    assert "8 texts differ from those of plain decoding, and not at a tie" in wrong and "ngram 16, ngram 64" in wrong
    assert "no text could be compared" in told("none", compared=0, identical=0, ties=0)


def test_a_method_that_was_asked_some_tasks_has_no_mean_and_no_part_in_what_is_said_of_all(tmp_path: Path) -> None:
    whole = small_run(tmp_path, methods=("plain", "transformers", "ngram", "jetspec"))
    lacks = {"transformers": "gsm8k", "ngram": "gsm8k"}
    run = replace(whole, cells=tuple(cell for cell in whole.cells if lacks.get(cell.method) != cell.task))
    glance = glance_table(run.cells)
    rows = {row[0]: dict(zip(glance.columns, row, strict=True)) for row in glance.rows}
    for column in ("tokens/s", "tokens per round", "score"):
        assert rows["jetspec"][column] != "-" and rows["ngram"][column] == "-", column
    assert (rows["ngram"]["questions"], rows["jetspec"]["questions"]) == ("40", "80")
    table = speedup_table(run.cells)
    assert table is not None
    by_task = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert by_task["ngram 16"]["gsm8k"] == by_task["ngram 16"]["mean"] == "-" != by_task["ngram 16"]["mt_bench"]
    lossless = lossless_table(run)
    assert lossless is not None
    assert {row[0] for row in lossless.rows} == {"transformers; ngram 16, 64", "jetspec 16, 64"}
    plots = {block.name: block for block in report(run, plots=True) if isinstance(block, Plot)}
    assert "Left out, as asked some tasks only: transformers, ngram." in plots["acceptance_t0_b1"].caption
    assert "ngram" not in plots["acceptance_t0_b1"].svg and "ngram" in plots["speedup_t0_b1"].svg
    assert "Left out" not in "".join(b.caption for b in report(whole, plots=True) if isinstance(b, Plot))


def test_failures_and_differences_are_listed(tmp_path: Path) -> None:
    errors = [{"id": "gsm8k-7", "repeat": repeat, "error": "ran out of pages"} for repeat in (0, 2)]
    run = small_run(tmp_path, changes={"errors": errors})
    blocks = report(run)
    assert f"{2 * len(run.cells)} answers failed" in warnings(blocks)
    assert "texts leave those of plain decoding at a tie" in warnings(blocks)
    text = to_markdown("Title", blocks, "plots")
    assert "ran out of pages" in text and "0.0312" in text
    failed = errors_table(run)
    assert failed is not None and failed.rows[0][1:] == ("gsm8k-7", "plain", "0", "1", "1, 3", "ran out of pages")


def test_a_cell_in_which_everything_failed_is_shown_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", **SMALL, methods=("plain", "ngram", "ddtree"))
    record = json.loads((folder / "results.json").read_text())
    broken = next(cell for cell in record["cells"] if cell["method"] == "ddtree")
    broken |= {"tokens_per_s": {"mean": None, "sd": None, "values": []}, "accepted": []}
    broken |= {"tokens_per_round": {**to_record([]), "questions": []}}
    broken |= {"speedup": None, "speedup_transformers": None, "prefill_s": to_record([0.0] * 3)}
    broken |= {"errors": [{"id": "gsm8k-1", "repeat": 0, "error": "no pages"}]}
    (folder / "results.json").write_text(json.dumps(record))
    run = read_run(folder)
    text = to_markdown("Title", report(run, run, plots=True), "plots")
    assert "| gsm8k-1 | ddtree 16 |" in text and "| failed |" in text
    lines = series_of(run.cells, speedup_of)
    assert set(lines["ngram"]) == {16, 64} and set(lines["ddtree"]) == {64}, "a mean over all tasks, or none"
    assert len(summary(Inputs([run], [], []), "md").splitlines()) == len(run.cells) + 2


def test_scores_stand_beside_those_of_plain_decoding(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", **SMALL)
    record = json.loads((folder / "results.json").read_text())
    for cell in record["cells"]:
        if cell["method"] == "ddtree" and cell["score"]:
            cell["score"] |= {"correct": 13, "right": [*RIGHT, WRONG[0]], "wrong": WRONG[1:]}
        if cell["method"] == "dflash" and cell["score"]:
            cell["score"] |= {"correct": 40, "right": [*RIGHT, *WRONG], "wrong": []}
        if cell["method"] == "jetspec-paper" and cell["score"]:
            cell["score"] |= {"right": [*RIGHT[1:], WRONG[0]], "wrong": [RIGHT[0], *WRONG[1:]]}
        if cell["method"] == "ngram" and cell["score"]:
            cell["score"] |= {"correct": 3, "graded": 10, "right": RIGHT[:3], "wrong": WRONG[:7]}
    (folder / "results.json").write_text(json.dumps(record))
    table = score_table(read_run(folder))
    assert table is not None
    found = {row[1]: (row[-3], row[-1]) for row in table.rows}
    assert found["plain"] == ("0.3000", "-") and found["transformers; jetspec-edge 16, 64"] == ("0.3000", "same")
    assert found["ddtree 16, 64"] == ("0.3250", "+0.0250, 1 won, 0 lost (no difference)")
    assert found["dflash 16"] == ("1.0000", "+0.7000, 28 won, 0 lost")
    assert found["jetspec-paper 16, 64"] == ("0.3000", "+0.0000, 1 won, 1 lost (no difference)"), (
        "as many, not the same"
    )
    assert found["ngram 16, 64"] == ("0.3000", "other questions")


@given(st.integers(1, 2000), st.data())
def test_no_score_is_certain(graded: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, graded))
    share = Score(correct, graded, 0, 0, frozenset(), frozenset()).share
    assert share.mean == correct / graded and share.sd and share.sd > 1 / (graded + 4)
    if graded > 100:
        usual = math.sqrt(share.mean * (1 - share.mean) / graded)
        assert share.sd == pytest.approx(usual, abs=2 / graded)


def test_the_paper_stands_beside_cells_of_the_same_setting_only(tmp_path: Path) -> None:
    run = small_run(tmp_path, budgets=(16, 48))
    pairs = find_pairs(run)
    assert pairs
    for pair in pairs:
        assert pair.cell.task == pair.row.task and pair.cell.temperature == pair.row.temperature
        assert pair.row.budget in (None, pair.cell.budget) and pair.cell.batch == pair.row.batch
        assert pair.row.table.model == "Qwen3-8B"
    assert {pair.cell.budget for pair in pairs} == {16}
    assert any(pair.remark for pair in pairs if pair.cell.method == "jetspec-edge")
    assert not any(pair.remark for pair in pairs if pair.cell.method == "jetspec-paper")


def test_how_heads_were_trained_is_told_and_whether_alike(tmp_path: Path) -> None:
    def run(name: str, **other: str) -> Run:
        folder = make_run(tmp_path / name, **SMALL)
        record = json.loads((folder / "results.json").read_text())
        usual = {"weights": "ab12", "data": "answers.jsonl, 9 rows", "steps": "1,500", "command": "jetspec train x"}
        record["heads"] = {"dflash": usual, "jetspec-edge": {**usual, **other}}
        (folder / "results.json").write_text(json.dumps(record))
        return read_run(folder)

    alike, longer = run("alike"), run("longer", steps="9,000")
    table = heads_table(longer)
    assert table is not None and [row[2] for row in table.rows] == ["1,500", "9,000"]
    assert "not all trained alike" not in warnings(report(alike))
    assert "jetspec-edge: 9,000 steps, answers.jsonl, 9 rows" in warnings(report(longer))


def test_settings_of_drafts_are_told() -> None:
    tree = asdict(TreeConfig(budget=32, draft_temperature=0.7, shortlist=64, shortlist_parents=3))
    text = {kind: trees_text({"kind": kind, "trees": [tree]}) for kind in ("plain", "ngram", "jetspec", "jetspec-edge")}
    assert (
        text["plain"] == ""
        and text["ngram"] == "32: width 8"
        and text["jetspec"] == "32: width 8, draft temperature 0.7"
    )
    assert text["jetspec-edge"] == "32: width 8, draft temperature 0.7, shortlist 64, parents 3"


def test_two_runs_are_compared_cell_by_cell(tmp_path: Path) -> None:
    a = read_run(make_run(tmp_path / "a", **SMALL))
    b = read_run(make_run(tmp_path / "b", **{**SMALL, "budgets": (16, 128)}, gpu="NVIDIA A100"))
    blocks = report(a, b)
    text = to_markdown("Title", blocks, "plots")
    shared = {cell.key for cell in a.cells} & {cell.key for cell in b.cells}
    assert len(against_table(a, b).rows) == len(shared)
    assert "device NVIDIA H200 and NVIDIA A100" in warnings(blocks)
    assert f"{len({c.key for c in a.cells} ^ {c.key for c in b.cells})} cells are in one of the runs only" in text


def test_verdicts_need_more_than_the_spread(tmp_path: Path) -> None:
    def run(name: str, values: list[float], speed: float = 1) -> Run:
        changes = {"speedup": make_speedup(values), "tokens_per_s": to_record([99 * speed, 100 * speed, 101 * speed])}
        return read_run(make_run(tmp_path / name, **SMALL, changes=changes))

    slow, near, fast = run("slow", [1.98, 2.0, 2.02]), run("near", [2.0, 2.02, 2.04]), run("fast", [3.9, 4.0, 4.1])
    assert verdicts(slow, near)["others"] == {"no difference"}
    assert verdicts(slow, fast)["others"] == {"B gains more"} and verdicts(fast, slow)["others"] == {"A gains more"}
    assert verdicts(slow, run("elsewhere", [1.98, 2.0, 2.02], 0.5)) == {"plain": {"-"}, "others": {"no difference"}}


def verdicts(a: Run, b: Run) -> dict[str, set[str]]:
    table = against_table(a, b)
    found: dict[str, set[str]] = {}
    for row in table.rows:
        found.setdefault("plain" if row[1] == "plain" else "others", set()).add(row[table.columns.index("verdict")])
    return found


def test_summaries_hold_the_same_numbers_in_every_form(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    inputs = Inputs([run], [], [])
    rows = json.loads(summary(inputs, "json"))
    assert [json.loads(line) for line in summary(inputs, "jsonl").splitlines()] == rows
    assert len(rows) == len(run.cells)
    for read, row in zip(csv.DictReader(StringIO(summary(inputs, "csv"))), rows, strict=True):
        assert read == {key: "" if value is None else str(value) for key, value in row.items()}
    lines = summary(inputs, "md").splitlines()
    assert len(lines) == len(rows) + 2 and len({len(line) for line in lines}) == 1
    for line, row in zip(lines[2:], rows, strict=True):
        assert f" {row['tokens_per_s']:.1f} ± {row['tokens_per_s_sd']:.1f} |" in line
        assert ("≈" in line) == (row["differs"] is False and row["method"] != "plain")


@given(st.floats(0.05, 0.95), st.integers(1, 20))
def test_equation_1_is_the_sum_of_chances(alpha: float, length: int) -> None:
    assert expected_tokens(alpha, length) == pytest.approx(sum(alpha**i for i in range(length + 1)))
    cost = implied_cost(expected_tokens(alpha, length), 1.7, length)
    assert expected_speedup(alpha, length, cost) == pytest.approx(1.7)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=17).filter(any))
def test_histograms_give_back_their_mean(accepted: list[int]) -> None:
    rounds = sum(accepted)
    mean = 1 + sum(length * n for length, n in enumerate(accepted)) / rounds
    assert tokens_when_cut(accepted)[-1] == pytest.approx(mean)
    assert sum(reach_shares(accepted)) == pytest.approx(mean - 1)
    assert 0 <= fit_alpha(accepted) <= 1


def test_costs_of_a_profile_stand_beside_the_papers(tmp_path: Path) -> None:
    inputs = read_inputs([make_profile_record(tmp_path / "profile.json", contexts=(256, 1000))])
    text = to_markdown("Title", build_report(inputs, plots=False), "plots")
    # 0.98 ms for 16 tokens beside 5.0 ms; the paper has this context, and not the other.
    assert cost_table(inputs.costs[0], beside_paper=True).rows == [
        ("256", "16", "64", "1", "0.980", "5.000", "1.225", "0.837"),
        ("1000", "16", "64", "1", "0.980", "5.000", "1.225", "-"),
    ]
    assert "Not the paper's settings: it ran on NVIDIA H200, in the paper on H200 NVL." in text
    assert (
        f"{len(paper_costs()[1]) - 1} of the paper's {len(paper_costs()[1])} values are of contexts and depths" in text
    )
    alone = to_markdown("Title", build_report(inputs, paper=False, plots=False), "plots")
    assert "0.837" not in alone and "paper" not in alone


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (None, "results.json"),
        ("{", "is not JSON"),
        ("[]", "is not a record"),
        ("{}", "no result of"),
        ('{"cells": []}', "no cells"),
        ('{"cells": null}', "is damaged"),
        ('{"cells": [{"method": "plain"}]}', "cell 0 cannot be read"),
        ('{"details": {}}', "is damaged"),
        ('{"details": 3, "mean": {"16": 1}, "tokens_per_round": {"gsm8k": {"16": 1}}}', "is damaged"),
        ('{"costs": []}', "no costs"),
        ('{"costs": [{}]}', "is damaged"),
        ('{"shape": "qwen3-8b", "runs": []}', "is damaged"),
    ],
)
def test_a_damaged_run_is_one_line_and_status_2(text: str | None, hint: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    result = invoke("report", tmp_path)
    assert result.exit_code == 2 and hint in result.stderr and len(result.stderr.splitlines()) == 1


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    inputs = read_inputs([make_run(tmp_path / "a" / "run", **SMALL), make_run(tmp_path / "b" / "run", **SMALL)])
    assert len({run.name for run in inputs.runs}) == 2


def test_names_of_plots_are_names_of_files(tmp_path: Path) -> None:
    settings = {**SMALL, "temperatures": (0.6,), "batches": (1, 2), "methods": ("plain", "odd/../name", "jetspec")}
    names = [block.name for block in report(small_run(tmp_path, **settings), plots=True) if isinstance(block, Plot)]
    assert names and all(re.fullmatch(r"[\w-]+", name) for name in names)
