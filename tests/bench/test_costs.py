"""What drafting costs: an entry for every context and depth, from times that are all there."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from jetspec.bench.costs import CostConfig
from jetspec.terminal.bench import run_plan
from jetspec.terminal.report import show
from tests.train.tiny_model import write_model


def test_the_table_of_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    config = CostConfig(
        str(model), contexts=(8, 32), depths=(1, 3, 7), head_layers=1, rounds=5, repeats=2, device="cpu"
    )
    assert run_plan(config, tmp_path / "run", "md")
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "c in %" in head and len(lines) == 2 * 3
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["model"] == "model" and str(tmp_path) not in json.dumps(record)
    assert {(cost["context"], cost["depth"]) for cost in record["costs"]} == {
        (c, d) for c in (8, 32) for d in (1, 3, 7)
    }
    for cost in record["costs"]:
        pairs = zip(cost["draft_ms"]["values"], cost["verify_ms"]["values"], strict=True)
        assert cost["c_percent"]["values"] == pytest.approx([100 * d / (cost["depth"] * v) for d, v in pairs])
        assert f"{cost['c_percent']['mean']:.3f} ± {cost['c_percent']['sd']:.3f}" in "\n".join(lines)
    show([tmp_path / "run"], "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["draft_ms"]) for row in rows] == [cost["draft_ms"]["mean"] for cost in record["costs"]]
