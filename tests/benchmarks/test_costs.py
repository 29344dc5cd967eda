"""Cost of drafting: an entry for every context and depth, from recorded times."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import costs
from benchmarks.costs import CostConfig, measure_cost
from benchmarks.report import print_summary
from benchmarks.results import ROWS_FILE
from benchmarks.run import run_plan
from tests.train.tiny_model import write_model


def tiny_plan(folder: Path, **changes: Any) -> CostConfig:
    model = folder / "model" if (folder / "model").exists() else write_model(folder / "model")
    plan = CostConfig(str(model), contexts=(8, 32), depths=(1, 3, 7), head_layers=1, rounds=5, repeats=2, device="cpu")
    return replace(plan, **changes)


def test_the_table_of_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_plan(tmp_path)
    assert run_plan(config, tmp_path / "run", "md")
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "c in %" in head and len(lines) == 2 * 3
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["model"] == "model" and str(tmp_path) not in json.dumps(record)
    for cost in record["costs"]:
        pairs = zip(cost["draft_ms"]["values"], cost["verify_ms"]["values"], strict=True)
        assert cost["c_percent"]["values"] == pytest.approx([100 * d / (cost["depth"] * v) for d, v in pairs])
        assert f"{cost['c_percent']['mean']:.3f} ± {cost['c_percent']['sd']:.3f}" in "\n".join(lines)
    print_summary([tmp_path / "run"], "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["draft_ms"]) for row in rows] == [cost["draft_ms"]["mean"] for cost in record["costs"]]


def test_a_stopped_run_resumes_and_repeats_no_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, run, timed = tiny_plan(tmp_path), tmp_path / "run", list[tuple[int, int]]()

    def stop_after_two(target: Any, config: CostConfig, context: int, depth: int) -> dict[str, Any]:
        if len(timed) == 2:
            raise KeyboardInterrupt
        timed.append((context, depth))
        return measure_cost(target, config, context, depth)

    monkeypatch.setattr(costs, "measure_cost", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, run, "md")
    held = (run / ROWS_FILE).read_bytes()
    assert held.count(b"\n") == 2
    with (run / ROWS_FILE).open("ab") as file:  # a kill may also cut a line in half
        file.write(b'{"context": 8, "dep')
    monkeypatch.undo()
    assert run_plan(plan, run, "md")
    assert (run / ROWS_FILE).read_bytes().startswith(held)
    for refused, why in ((replace(plan, rounds=6), "made with another rounds"), (plan, "is for questions")):
        with pytest.raises(ValueError, match=why):
            run_plan(refused, run, "md", retry_failed=refused is plan)
    record = json.loads((run / "results.json").read_text())["costs"]
    assert [json.loads(line) for line in held.splitlines()] == record[:2]
    assert [(cost["context"], cost["depth"]) for cost in record] == [(c, d) for d in (1, 3, 7) for c in (8, 32)]

    monkeypatch.setattr(costs, "open_target", lambda *_: pytest.fail("all is there, and no model is needed"))
    before = (run / "results.json").read_bytes()
    assert run_plan(plan, run, "md") and (run / "results.json").read_bytes() == before
    assert "nothing was left to measure" in capsys.readouterr().err
