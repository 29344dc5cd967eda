"""Generated tables of the pages hold the numbers of the records."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.pages import PAGES, fill, put_between
from benchmarks.training import VARIANTS
from tests.benchmarks.run_folders import TASKS, make_run, read_table

ROOT = Path(__file__).parents[2]
ORIGIN = {
    "command": "python -m benchmarks engine speed",
    "hardware": {"cpu": "a CPU"},
    "versions": {"torch": "2", "triton": "3"},
    "commit": "0123456789",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    return tmp_path


def make(root: Path, mark: str, record: dict[str, Any] | None = None, page: str = "") -> str:
    """The page of a mark after filling, from a record of its name."""
    page = page or next(page for page, makers in PAGES.items() if mark in makers)
    if record is not None:
        (root / "docs" / "results" / f"{mark}.json").write_text(json.dumps({**ORIGIN, **record}))
    path = root / page
    path.write_text(f"before\n<!-- {mark}: begin -->\nold\n<!-- {mark}: end -->\nafter\n")
    fill(root, page, mark)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    return text


def cells(text: str) -> list[list[str]]:
    """Rows of the tables in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("page", PAGES)
def test_pages_agree_with_their_records(page: str, tmp_path: Path) -> None:
    """Filling a page again changes nothing."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / page, tmp_path / page)
    for mark in PAGES[page]:
        fill(tmp_path, page, mark)
    assert (tmp_path / page).read_text() == (ROOT / page).read_text()
    for picture in (tmp_path / "docs").glob("plots/*.svg"):
        assert (ROOT / "docs" / "plots" / picture.name).exists()


def test_every_mark_of_a_page_has_a_maker() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs" / "results").glob("*.md")):
        marks = {line.split()[1].rstrip(":") for line in page.read_text().splitlines() if line.endswith("begin -->")}
        assert marks == set(PAGES.get(page.relative_to(ROOT).as_posix(), ()))


def test_a_table_without_a_record_is_kept(root: Path) -> None:
    for page, makers in PAGES.items():
        for mark in makers:
            assert "old" in make(root, mark, page=page) or mark == "limits"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="name"):
        put_between("text", "name", "more")


GAPS = [
    {"gap": 0.25, "tie": True},
    {"gap": None, "tie": False},
    {"gap": 1.7, "least": 0.0, "tie": True},
    {"gap": 1.6, "least": 1.6, "tie": False},
]


def run(**changes: Any) -> dict[str, Any]:
    common = {"tokens_per_s": 1234.5, "tokens_per_round": 5.678, "speedup": 2.345, "different": 3, "mistakes": 1}
    return {"set": "gsm8k", "batch": 4, "budget": 64, "depth": None, "batch_trees": False, **common, **changes}


@pytest.mark.parametrize(
    ("mark", "result", "row"),
    [
        (
            "engine_speed",
            {"tie_limit": 1.5, "runs": [run(speedup_over_transformers=683.9, differences=GAPS)]},
            ["bfloat16", "gsm8k", "64", "1234", "5.68", "2.35", "680", "3", "1", "1", "1.7", "1.5"],
        ),
        (
            "engine_batches",
            {"best_speedup": {"4": 1.987}, "runs": [run(budget=1), run(), run(depth=8), run(shrinks=True)]},
            ["batch", "plain", "64", "64, depth 8", "64, shrinking", "best over plain"],
        ),
        ("engine_soak", {"correct": True, "problems": [], "rounds": 10_000}, ["rounds", "10,000"]),
    ],
)
def test_tables_of_the_engine(root: Path, mark: str, result: dict[str, Any], row: list[str]) -> None:
    text = make(root, mark, {"results": {"bfloat16": result}}, "docs/results/engine.md")
    assert row in cells(text) and "a CPU" in text and "0123456" in text


def test_the_best_tree_is_the_fastest_over_all_sets(root: Path) -> None:
    speeds = {(1, "a"): 1.0, (1, "b"): 1.0, (32, "a"): 3.0, (32, "b"): 2.0, (64, "a"): 2.5, (64, "b"): 2.75}
    runs = [run(budget=budget, set=name, speedup=value) for (budget, name), value in speeds.items()]
    text = make(root, "engine_speed", {"results": {"bfloat16": {"runs": runs}}}, "README.md")
    assert "trees of 64" in text and [row[-1] for row in cells(text)[2:]] == ["2.50", "2.75"]


def test_sampled_text_is_shown_with_and_without_the_choice_model(root: Path) -> None:
    """The README has the extremes of the sampled settings at the size that is fastest over all of them."""
    speeds = {("greedy", 8): 9.0, ("warm", 8): 1.75, ("hot", 8): 1.25, ("warm", 16): 1.5, ("hot", 16): 1.75}
    rows = [
        {"setting": setting, "budget": budget, "choice_model": uses, "tokens_per_round": 2 + uses, "tokens_per_s": 50}
        | {"plain_tokens_per_s": 25, "speedup": speed if uses else 1, "same_text": 3, "total": 4}
        for (setting, budget), speed in speeds.items()
        for uses in (True, False)
    ]
    record = {"results": {"bfloat16": {"rows": rows}}}
    shown = cells(make(root, "sampling", record, "docs/results/sampling.md"))[2:]
    assert [(row[1], int(row[2]), float(row[-2])) for row in shown] == [(*key, speed) for key, speed in speeds.items()]
    assert all(row[3:5] == ["2.00", "3.00"] and row[-1] == "3 of 4" for row in shown)
    said = " ".join(make(root, "sampling", record, "README.md").split())
    places = [said.index(word) for word in ("trees of 16", "1.50", "warm", "1.75", "hot")]
    assert places == sorted(places) and "greedy" not in said


def test_records_of_runs_fill_the_tables_of_the_engine(root: Path) -> None:
    folder = make_run(root / "run", methods=("plain", "transformers", "jetspec-edge"), temperatures=(0.0,))
    record = json.loads((folder / "results.json").read_text()) | ORIGIN
    (root / "docs" / "results" / "engine_batches_float32.json").write_text(json.dumps({**record, "dtype": "float32"}))
    speeds = read_table(make(root, "engine_speed", record, "docs/results/engine.md"))
    assert {(row["set"], row["budget"]) for row in speeds} == set(product(TASKS, ("plain", "16", "64", "256")))
    batches = cells(make(root, "engine_batches", record))
    assert batches.count(["batch", "plain", "16", "64", "256", "best over plain"]) == 2
    (strict,) = read_table(make(root, "engine_strict", record))
    assert strict["texts"] == f"{40 * 3 * 3 * 2}" and strict["by more than a tie"] == "0"


def test_every_variant_is_compared() -> None:
    assert {name for names in pages.COMPARISONS.values() for name in names} == set(VARIANTS)
