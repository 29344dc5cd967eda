"""Tables and plots come from records alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot_ablations
from benchmarks.ablate import VARIANTS
from benchmarks.pages import marks, put_between


def write(folder: Path, name: str, value: float, steps: int = 70) -> None:
    record = {"mean": {"chain": value, "16": value + 1}, "settings": {"steps": steps, "anchors": 6}}
    record |= {"documents": 1200, "seconds": 90.0, "questions": 4, "tokens": 2000}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_a_page_gets_what_its_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records, page = tmp_path / "records", tmp_path / "docs" / "page.md"
    longer = tmp_path / "longer"
    for folder in (records, longer, page.parent):
        folder.mkdir()
    for name, value in (("causal", 2.5), ("edge-128", 3.25), ("sft", 2.0)):
        write(records, name, value)
    for name, value in (("causal", 3.5), ("sft", 3.75)):
        write(longer, name, value, 1500)
    begin, end = marks("ablations")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    plots = tmp_path / "docs" / "plots"
    args = ["plot", *("--records", str(records)), *("--records", str(longer)), *("--page", str(page))]
    args += ["--plots", str(plots)]
    monkeypatch.setattr(sys, "argv", args)
    plot_ablations.main()
    text = page.read_text()
    assert "first 4 questions of each task, with answers of up to 2,000 tokens; trained with 6 anchors" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert (
        "| edge-128 | 3.25 | 4.25 | 1,200 | 70 | 1.5 |" in text and "| sft | 2.00 | 3.00 | 1,200 | 70 | 1.5 |" in text
    )
    assert "plots/ablation_mask_and_edge_term_70.svg" in text and (plots / "ablation_loss_70.svg").exists()
    assert text.index("### After 70 steps") < text.index("### After 1,500 steps") < text.index("| sft | 3.75 |")
    assert (plots / "ablation_loss_1500.svg").exists() and not (plots / "ablation_mask_and_edge_term_1500.svg").exists()
    assert "Learning rate" not in text and "Learning rate: left out" in capsys.readouterr().err
    pictures = {path: path.read_text() for path in plots.iterdir()}
    plot_ablations.main()
    assert page.read_text() == text and pictures == {path: path.read_text() for path in plots.iterdir()}


def test_scores_are_compared_with_the_first() -> None:
    records: dict[str, dict[str, Any]] = {
        name: {
            "tokens_per_round": {"gsm8k": {"chain": 1.0, "64": value}},
            "mean": {"chain": 1.0, "64": value},
            "real": {},
        }
        for name, value in (("plain", 2.0), ("better", 2.5))
    }
    lines = plot_ablations.scores_table(records).splitlines()
    assert lines[0] == "| budget 64 | plain | better | gain of better |"
    assert lines[2:] == ["| gsm8k | 2.00 | 2.50 | +25.0% |", "| mean | 2.00 | 2.50 | +25.0% |"]
    for name, value in (("plain", 4.0), ("better", 4.4)):
        records[name]["real"] = {"gsm8k": {"64": {"tokens_per_round": value}}}
    lines = plot_ablations.scores_table(records).splitlines()
    assert lines[0].endswith("| decoding, plain | decoding, better | decoding, gain of better |")
    assert lines[2:] == [f"| {task} | 2.00 | 2.50 | +25.0% | 4.00 | 4.40 | +10.0% |" for task in ("gsm8k", "mean")]


@pytest.mark.parametrize(
    ("head", "name"), [("runs/bench/edge/head", "edge"), ("heads/edge-128", "edge-128"), (None, "shipped")]
)
def test_a_head_is_called_as_its_run_is(head: str | None, name: str) -> None:
    assert plot_ablations.name_of(head) == name


def test_scores_of_the_same_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = tmp_path / "scores.txt"
    scores.write_text(json.dumps({"head": "runs/a/head"}))
    write(tmp_path, "causal", 2.0)
    words = ["--records", str(tmp_path), "--page", str(tmp_path / "page.md"), "--plots", str(tmp_path / "plots")]
    (tmp_path / "page.md").write_text("\n".join(marks("ablations")))
    monkeypatch.setattr(sys, "argv", ["plot", *words, "--scores", str(scores), "--scores", str(scores)])
    with pytest.raises(SystemExit, match="2"):
        plot_ablations.main()
    assert "have the same name: a, a" in capsys.readouterr().err


def test_a_folder_without_records_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--records", str(tmp_path), "--page", str(tmp_path / "page.md"), "--plots", str(tmp_path / "plots")]
    monkeypatch.setattr(sys, "argv", ["plot", *words])
    with pytest.raises(SystemExit, match="2"):
        plot_ablations.main()
    assert f"{tmp_path} holds no record" in capsys.readouterr().err


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        put_between("text", "name", "more")


def test_every_variant_is_in_a_table() -> None:
    assert {name for names in plot_ablations.TABLES.values() for name in names} == set(VARIANTS)
