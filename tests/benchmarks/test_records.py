"""The script of the performance page makes every record; limits are kept, broken or not measured according to them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import engine
from benchmarks.pages import PAGES
from benchmarks.records import check_limits, limits
from benchmarks.run import read_plan, run
from jetspec.commands.app import app
from tests.benchmarks.run_folders import read_table
from tests.benchmarks.tiny_bench import invoke

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
NAMES = sorted({limit.record for limit in limits(RESULTS)})


def measure(folder: Path, *, fails: str = "", **names: str) -> tuple[int, list[list[str]]]:
    """Exit status of the script, and its commands: they are not run, and leave a record of this commit each."""
    (folder / "program").write_text(
        '#!/bin/bash\nshift; echo "$@" >&3; place="${@: -1}"; [[ $place == *.json ]] || { mkdir -p "$place"; '
        'place="$place/results.json"; }\n'
        f'printf \'{{"commit": "%s"}}\' "$(git rev-parse HEAD)" > "$place"; [[ -z "{fails}" || "$*" != *"{fails}"* ]]\n'
    )
    program = f"bash {folder / 'program'}"
    script, env = ROOT / "benchmarks" / "recipes" / "performance.sh", {**os.environ, **names}
    env |= {"JETSPEC": f"{program} jetspec", "BENCHMARKS": f"{program} benchmarks"}
    line = f"{shlex.quote(str(script))} DATA {shlex.quote(str(folder / 'out'))} 3> {shlex.quote(str(folder / 'said'))}"
    status = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True).returncode
    return status, [words.split() for words in (folder / "said").read_text().splitlines()]


def test_all_records_of_the_page_and_the_limits_are_made_once(tmp_path: Path) -> None:
    """By commands that have the options that they are given."""
    status, commands = measure(tmp_path, DEVICE="cpu")
    made = {path.stem for path in (tmp_path / "out").glob("*.json")}
    assert status == 0 and made - {"engine_batches_float32", "engine_strict_float32"} == set(NAMES)
    assert set(NAMES) == set(PAGES["docs/results/engine.md"]) - {"limits"}
    for first, *words in commands:
        if first == "profile":
            refused = CliRunner().invoke(app, [first, *words, "--set", "profile.rounds=0"])
            assert refused.exit_code == 2 and "rounds" in refused.output
            continue
        single = typer.Typer()
        single.command()({"run": run, "soak": engine.soak}[first])
        options = {option for param in typer.main.get_command(single).params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options
        assert first != "run" or read_plan(ROOT / words[0], {})
    assert measure(tmp_path) == (0, [])
    (tmp_path / "out" / "engine_soak.json").write_text('{"commit": "another"}')
    assert measure(tmp_path, ONLY="engine_strict engine_speed") == (0, [])
    assert [words[0] for words in measure(tmp_path)[1]] == ["soak"]


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    status, commands = measure(tmp_path, fails="edge_rank")
    assert status == 1 and len(commands) == len(NAMES) + 2
    refused = invoke("records", "--data", tmp_path, "--out", tmp_path, "engine_soak", "--device", "cpu")
    assert refused.exit_code == 2 and "ONLY='engine_soak' DEVICE=cpu benchmarks/recipes/performance" in refused.stderr


# -- limits


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The published records, which keep every limit."""
    for name in NAMES:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    return tmp_path


def set_in(path: Path, place: str, value: Any) -> None:
    """Set a value of a record by its keys; None removes it."""
    record = json.loads(path.read_text())
    *above, last = place.split(".")
    inner = record
    for key in above:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(record))


def test_published_records_keep_every_limit(published: Path) -> None:
    table, holds = check_limits(published)
    assert holds and len(rows := read_table(table)) == len(list(limits(published)))
    assert all(row["holds"] == "yes" and len(row["commit"]) == 7 for row in rows)
    assert invoke("records", "--check", "--out", published).exit_code == 0


@pytest.mark.parametrize(
    ("name", "place", "kept", "broken", "measured"),
    [
        ("profile_qwen3_8b", "runs.-1.ratio_round", 1.35, 1.36, "1.36"),
        ("profile_qwen3_8b", "runs.0.idle_frac", 0.02, 0.024, "0.024"),
        ("profile_smollm2", "runs.0.idle_frac", 0.02, 0.024, "0.024"),
        ("engine_speed", "results.bfloat16.runs.0.tokens_per_s", 3600.0, 4000.0, "2.29"),
        ("engine_batches", "results.bfloat16.runs.3.mistakes", 0, 2, "2"),
        ("engine_soak", "results.float32.rounds", 10_000, 9_999, "9,999"),
        ("engine_soak", "results.float32.problems", [], ["a page is lost"], "1"),
    ],
)
def test_a_limit_holds_up_to_its_bound(
    published: Path, name: str, place: str, kept: Any, broken: Any, measured: str
) -> None:
    set_in(published / f"{name}.json", place, kept)
    assert check_limits(published)[1]
    set_in(published / f"{name}.json", place, broken)
    table, holds = check_limits(published)
    assert [row["measured"] for row in read_table(table) if row["holds"] == "no"] == [measured] and not holds
    assert invoke("records", "--check", "--out", published).exit_code == 1


def test_a_missing_record_does_not_hold(published: Path) -> None:
    (published / "engine_speed.json").unlink()
    set_in(published / "profile_qwen3_30b_a3b.json", "runs.0.context", 512)
    rows = read_table(check_limits(published)[0])
    assert [row["measured"][:12] for row in rows if row["holds"] == "no"] == ["not measured"] * 3


@pytest.mark.parametrize(
    ("name", "place", "value", "rows"),
    [
        ("engine_strict", "device", "cpu", 2),
        ("engine_strict", "commit", "0123456789 with changes", 2),
        ("engine_strict", "head", "another", 2),
        ("engine_strict", "max_tokens", None, 2),
        ("engine_strict", "results.float32.prompts", 999, 1),
        ("engine_batches", "results.float32", None, 1),
        ("engine_batches", "results.bfloat16.runs", [], 2),
        ("engine_soak", "results.float32.cancelled", 0, 2),
        ("profile_qwen3_8b", "rounds", 199, 10),
        ("profile_qwen3_8b", "dtype", "float32", 10),
        ("profile_qwen3_8b", "head.layers", 1, 10),
        ("profile_qwen3_8b", "commit", "another", 2),
        ("profile_qwen3_8b_edge", "hardware", {"gpu": "another GPU"}, 2),
        ("profile_qwen3_8b_edge", "head.edge_rank", 0, 2),
        ("profile_qwen3_30b_a3b", "runs.0.batch", 2, 1),
        ("profile_qwen3_30b_a3b", "runs.0.temperature", 1.0, 1),
        ("profile_smollm2", "head.name", "another", 1),
    ],
)
def test_a_record_of_another_setting_does_not_count(
    published: Path, name: str, place: str, value: Any, rows: int
) -> None:
    set_in(published / f"{name}.json", place, value)
    found = [row["measured"] for row in read_table(check_limits(published)[0]) if row["holds"] == "no"]
    assert len(found) == rows and all(text.startswith("not measured: ") for text in found)
