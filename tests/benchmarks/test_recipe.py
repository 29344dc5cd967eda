"""Tasks and recipes: what is asked, and that nothing a user writes is ignored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from benchmarks.paper import OURS, OURS_ALONE, find_pairs, paper_costs, paper_rows, run_differences
from benchmarks.recipe import KINDS, PLAIN, BenchConfig
from benchmarks.results import Run, read_record
from benchmarks.run import read_plan
from benchmarks.tasks import BUILTIN, BUILTIN_FILE, GRADED_AS, TASKS, check_tasks, read_task
from jetspec.data.prompts import read_questions
from jetspec.train.config import load_recipe
from tests.benchmarks.run_folders import make_result

ROOT = Path(__file__).parent.parent.parent
RECIPES = {path.stem: path for path in sorted((ROOT / "benchmarks" / "recipes").glob("*.yaml"))}
OUR_DRAFT_TEMPERATURE = "draft temperature 0.8, in the paper 1"


# -- tasks


def test_the_built_in_questions_can_be_asked_and_their_answers_are_right() -> None:
    prompts = read_questions(BUILTIN_FILE, 1000)
    assert len(prompts) == 28 == len(read_task(BUILTIN, None, None))
    assert any(len(prompt.turns) > 1 for prompt in prompts)
    kinds = [prompt.row.get(GRADED_AS) for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {"gsm8k": 10, "mbpp": 10, None: 8}
    assert len(set(kinds[:3])) == 3, "a few of them are a fair choice"
    for prompt in prompts:
        if prompt.row.get(GRADED_AS) == "mbpp":
            tests = prompt.turns[0].partition("Your code should pass these tests:\n")[2]
            assert tests.count("assert ") >= 2
            exec(prompt.row["answer"] + tests, {})


def test_questions_come_from_a_folder_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"id": "a", "turns": ["x"], "answer": 1}\n{"id": "b", "turns": ["y", "z"]}\n')
    check_tasks(["mine", BUILTIN], tmp_path)
    assert [prompt.turns for prompt in read_task("mine", tmp_path, None)] == [["x"], ["y", "z"]]
    assert read_task("mine", tmp_path, 1)[0].row["answer"] == 1
    for name, place, why in (
        ("gsm8k", tmp_path, "there is no task 'gsm8k' in"),
        ("gsm9k", None, "choose from gsm8k"),
        ("spec_bench", None, "give a folder with spec_bench.jsonl"),
    ):
        with pytest.raises(ValueError, match=why):
            check_tasks([name], place)


def test_questions_of_other_tasks_are_selected_and_rewritten(tmp_path: Path) -> None:
    code = {"id": "c", "turns": ["Write:\n```python\ndef f():\n```"], "answer": "    return 7"}
    texts = [("s", "summarization", "Summarize: one two"), ("r", "rag", "Who? Text."), ("w", "writing", "Write.")]
    rows = [{"id": id, "source": f"Spec-Bench:{kind}", "turns": [text]} for id, kind, text in texts]
    for name, lines in (("humaneval", [code]), ("spec_bench", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_tasks(["summarization", "retrieval", "editing"], tmp_path)
    assert [prompt.turns for prompt in read_task("summarization", tmp_path, None)] == [["Summarize: one two"]]
    assert [prompt.turns for prompt in read_task("retrieval", tmp_path, None)] == [["Who? Text."]]
    edits = read_task("editing", tmp_path, None)
    assert len({edit.id for edit in edits}) == len(edits) == 2
    assert "def f():\n    return 7\n" in edits[0].turns[0] and edits[1].turns[0].endswith("\n\none two")
    assert len(read_task("editing", tmp_path, 1)) == 1
    with pytest.raises(ValueError, match="spec_bench"):
        check_tasks(["retrieval"], None)


SCRIPTED = ("livecodebench/code_generation_lite", "tatsu-lab/alpaca_eval")
"""Datasets that come with a loading script."""
HUB_ROW: dict[str, Any] = {"question": "1 + 1?", "problem": "1 + 1?", "answer": "so it is\n#### 1,002"}
HUB_ROW |= {"prompt": ["a", "b"], "canonical_solution": "    pass", "test": "check", "entry_point": "f"}
HUB_ROW |= {"text": "add", "test_list": ["assert f() == 1", "assert f() == 2"], "code": "def f(): ..."}
HUB_ROW |= {"question_content": "read and add", "instruction": "why?"}


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.hub])
def test_rows_of_hugging_face_become_questions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load_dataset(name: str, *part: str, split: str, data_files: str = "", streaming: bool = False) -> Any:
        """Loads no dataset that needs a script, as in newer versions."""
        if name in SCRIPTED:
            raise RuntimeError("Dataset scripts are no longer supported")
        asked.append(data_files or name)
        return iter([HUB_ROW] * 5)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prompts = read_task(name, None, 3)
    hub = TASKS[name].hub
    assert hub is not None and all(hub in where for where in asked)
    assert [prompt.id for prompt in prompts] == [f"{name}-{i:05d}" for i in range(3)]
    assert len(prompts[0].turns) == (2 if name == "mt_bench" else 1)
    if TASKS[name].grader == "math":
        assert prompts[0].turns[0].endswith("\\boxed{}.") and prompts[0].row["answer"]
    if name == "gsm8k":
        assert prompts[0].row["answer"] == "1002"
    if name == "mbpp":
        assert prompts[0].turns[0].endswith("these tests:\nassert f() == 1\nassert f() == 2")


def test_offline_a_folder_of_questions_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*name: str, split: str) -> None:
        raise ConnectionError("no route\nto anywhere")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(ValueError, match=r"\(no route\); give a folder with gsm8k.jsonl as --data-dir"):
        read_task("gsm8k", None, None)


# -- recipes


def make_config(recipe: Path | None, **settings: Any) -> BenchConfig:
    return read_plan(recipe, settings)


def shipped() -> dict[str, BenchConfig]:
    """Recipes of methods, by name."""
    return {name: make_config(path) for name, path in RECIPES.items()}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"budget": 3}, "budget"),
        ({"repeats": 0}, "repeats is 0"),
        ({"tasks": []}, "tasks"),
        ({"budgets": [16, 16]}, "twice|two"),
        ({"temperatures": [-1]}, "temperature is -1"),
        ({"methods": ["ngram"], "budgets": [1]}, "ngram: a budget of 1"),
        ({"methods": [{"name": "ngram", "budgets": [4, 1]}]}, "ngram: a budget of 1"),
        ({"skip": {"gsm8k": -1}}, "skip of gsm8k is -1"),
        ({"skip": {"gsmk8": 1}}, "there is no task gsmk8"),
        ({"methods": ["jetspeck"]}, "choose from plain, ngram"),
        ({"methods": ["plain=x"]}, "plain=x"),
        ({"methods": ["server"]}, "server=VALUE"),
        ({"methods": ["ngram", {"name": "ngram", "width": 2}]}, "ngram"),
        ({"methods": [{"name": "ngram", "head": "x"}]}, "head .* ngram"),
        ({"methods": [{"name": "dflash", "head": "x", "width": 4}]}, "width .* dflash"),
        ({"methods": [{"name": "plain", "kind": "ngram"}]}, "plain"),
        ({"methods": [{"name": "jetspec", "score": "entropy", "entropy_weight": 1}]}, "entropy_weight"),
        ({"methods": ["transformers-lookup"], "batches": [1, 4]}, "transformers-lookup"),
        ({"methods": [{"name": "plain", "limit": 2}]}, "limit"),
        ({"methods": [{"name": "ngram", "temperatures": [0, 0.5]}]}, "temperatures 0.5"),
        ({"methods": [{"name": "ngram", "tasks": ["builtin", "mbpp"]}]}, "tasks mbpp"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_plan(None, settings)


def test_plain_decoding_is_there_for_every_cell_of_every_method() -> None:
    methods: list[Any] = ["ngram", {"name": "big", "kind": "jetspec", "batches": [32], "budgets": [256]}, "dflash"]
    config = make_config(None, methods=methods, batches=[1, 8], temperatures=[0, 1], tasks=["a", "b"])
    cells = {method.name: config.cells(method) for method in config.all_methods()}
    assert [*cells] == ["plain", "ngram", "big", "dflash"]
    for some in cells.values():
        assert len(some) == len(set(some))
        assert {cell.beside(PLAIN, 1) for cell in some} <= set(cells[PLAIN])
    assert {cell.budget for cell in cells["dflash"]} == {16} and {cell.batch for cell in cells["big"]} == {32}


def test_old_names_of_settings_work_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("repeats: 7\nbudgets: [16]\nmethods: [{name: jetspec-edge, head: x, heat: 0.7, likely: 3}]\n")
    config = make_config(path, budgets=[32])
    assert (config.repeats, config.budgets) == (7, (32,)), "changes count before the file"
    tree = config.all_methods()[1].tree(64)
    assert (tree.draft_temperature, tree.shortlist_parents) == (0.7, 3)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "heat" in said and "draft_temperature" in said


def test_shipped_recipes_are_valid() -> None:
    """And pass over the questions that settings of heads for the default model were chosen on, nothing on others."""
    chosen_on = {"gsm8k", "math500", "humaneval", "mbpp", "mt_bench", "alpaca_eval"}
    for name, plan in shipped().items():
        assert len(plan.all_methods()) > 1 and set(plan.tasks) <= set(TASKS), name
        if plan.model == BenchConfig.model:
            assert {plan.skip_of(task) for task in chosen_on & {*plan.tasks}} <= {40}, name


def test_the_script_of_a_recipe_trains_its_heads() -> None:
    """On the same answers for the same number of steps, by recipes that are there and settings that they have."""
    words = ["bash", str(RECIPES["smollm2"].with_suffix(".sh")), "PROMPTS", "QUESTIONS", "70"]
    names = {**os.environ, "JETSPEC": "echo", "BENCHMARKS": "echo"}
    done = subprocess.run(words, cwd=ROOT, env=names, check=True, capture_output=True)
    first, *trained, last = (line.split() for line in done.stdout.decode().splitlines())
    configs = [load_recipe(ROOT / line[1], tuple(line[3::2])) for line in trained]
    methods = [method for name in ("smollm2", "heads") for method in shipped()[name].all_methods()]
    heads = {method.head for method in methods if method.head} - {"smollm2-135m-instruct"}
    assert heads == {f"{config.out}/head" for config in configs} and all(config.steps == 70 for config in configs)
    assert all(config.data == (first[first.index("--out") + 1],) for config in configs)
    assert last == ["run", "benchmarks/recipes/smollm2.yaml", "--data-dir", "QUESTIONS"]


def test_the_script_of_table_12_profiles_every_depth(tmp_path: Path) -> None:
    names = {**os.environ, "JETSPEC": "echo", "BENCHMARKS": "echo"}
    words = ["bash", str(ROOT / "benchmarks" / "recipes" / "table12.sh"), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=names, check=True, capture_output=True)
    *profiles, report = done.stdout.decode().splitlines()
    asked = set[tuple[int, int]]()
    for line in profiles:
        budget, *contexts = map(int, re.findall(r"--(?:budget|context) (\d+)", line))
        asked |= {(context, budget - 1) for context in contexts}
    assert asked == set(paper_costs()[1]) and report.startswith("report ")


def test_methods_of_recipes_have_their_paper_rows_or_are_ours_alone() -> None:
    named = {row.method for row in paper_rows()}
    assert {ours.name for ours in OURS.values()} == named, "all of the paper's methods are ours, too"
    assert not set(OURS) & set(OURS_ALONE) and set(KINDS) <= {*OURS, *OURS_ALONE}
    plans = [plan for name, plan in shipped().items() if not name.startswith(("heads", "ngrams", "engine", "cpu"))]
    assert {method.name for plan in plans for method in plan.all_methods()} <= {*OURS, *OURS_ALONE}


def make_made_up(plan: BenchConfig, **record: Any) -> Run:
    """A run with made-up numbers."""
    methods = plan.all_methods()
    cells = [make_result(cell) for method in methods for cell in plan.cells(method)]
    return Run("run", {"model": plan.model, "recipe": plan.to_dict(methods), **record}, tuple(cells))


@pytest.mark.parametrize("number", sorted({row.table.number for row in paper_rows()}))
def test_a_run_of_a_tables_recipe_stands_beside_that_table(number: int) -> None:
    run = make_made_up(make_config(RECIPES[f"table{number:02d}"]))
    pairs = [pair for pair in find_pairs(run) if pair.row.table.number == number]
    rows = [row for row in paper_rows() if row.table.number == number]
    assert {id(pair.row) for pair in pairs} == {id(row) for row in rows}
    paired = {pair.cell.method for pair in find_pairs(run)}
    assert {cell.method for cell in run.cells} <= {*paired, PLAIN, *OURS_ALONE}
    told = {pair.cell.method for pair in pairs if "lost" in pair.remark}
    assert told == {name for name in paired if name.startswith(("lr-", "sft-lr-", "hybrid-"))}
    for pair in pairs:
        known = {"ddtree": OUR_DRAFT_TEMPERATURE, "eagle3": OUR_DRAFT_TEMPERATURE}.get(pair.cell.method, "")
        if pair.cell.method not in ("jetspec", "jetspec-edge"):
            assert "in the paper" not in pair.remark.removeprefix(known), pair.cell.label


def remarks_of(method: dict[str, Any], budget: int = 64, temperature: float = 0) -> dict[str, str]:
    """The paper's methods that a method of ours is set beside, and what is said of the pair."""
    one: Any = {"budgets": [budget], "temperatures": [temperature], "tasks": ["gsm8k"]}
    plan = make_config(None, methods=[{"head": "x", **method}], **one)
    return {p.row.method: p.remark for p in find_pairs(make_made_up(plan)) if not p.cell.is_plain}


def test_a_name_alone_is_no_counterpart() -> None:
    assert remarks_of({"name": "jetspec-paper"}) == {"JetSpec": ""}
    assert remarks_of({"name": "jetspec-paper", "kind": "ngram", "head": None}) == {}
    assert remarks_of({"name": "jetspec-paper", "kind": "ddtree", "draft_temperature": 1.0}) == {"DDTree": ""}
    assert remarks_of({"name": "mine", "kind": "jetspec-paper"}) == {"JetSpec": ""}
    assert "lr-0.02" in OURS and remarks_of({"name": "lr-0.02", "kind": "ngram", "head": None}) == {}


def test_every_difference_of_a_tree_is_told() -> None:
    other = remarks_of({"name": "jetspec-paper", "width": 3, "depth": 4, "score": "entropy"})["JetSpec"]
    assert "width 3, in the paper 7" in other and "depth 4" in other and "score entropy" in other
    assert "a tree of the best nodes, in the paper of all children" in remarks_of({"name": "jetspec"})["JetSpec"]
    assert "in the paper" not in remarks_of({"name": "jetspec-paper"}, budget=16)["JetSpec"]
    assert "width 8, in the paper 1" in remarks_of({"name": "jetspec"}, budget=16)["JetSpec"]
    assert "width 2, the paper's is not stated" in remarks_of({"name": "jetspec-paper"}, budget=32)["JetSpec"]
    assert remarks_of({"name": "ddtree"}) == {"DDTree": OUR_DRAFT_TEMPERATURE}
    assert remarks_of({"name": "ddtree"}, temperature=1) == {"DDTree": ""}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"thinking": True}, ["think first"]),
        ({"thinking": None}, ["left to itself"]),
        ({"dtype": "float32"}, ["float32"]),
        ({"model": "Qwen/Qwen3-4B", "gpu": "A100"}, ["Qwen3-4B", "A100"]),
    ],
)
def test_every_difference_of_a_run_is_told(changes: dict[str, Any], told: list[str]) -> None:
    now = {"model": "Qwen/Qwen3-8B", "thinking": False, "dtype": "bfloat16", "gpu": "NVIDIA H100", **changes}
    plan = make_config(None, model=now["model"], thinking=now["thinking"], methods=["dflash=x"])
    run = make_made_up(plan, dtype=now["dtype"], hardware={"gpu": now["gpu"]})
    tables = {row.table.number: row.table for row in paper_rows()}
    found = run_differences(run, tables[1])
    assert len(found) == len(told) and all(word in line for word, line in zip(told, found, strict=True))
    assert any("vLLM" in line for line in run_differences(run, tables[11]))


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        (40, "40 questions per task behind the first 40, at most"),
        ({"gsm8k": 40, "aime25": 9}, "40 questions per task, behind the first 40 of gsm8k and 9 of aime25, at most"),
    ],
)
def test_a_run_says_what_was_passed_over(skip: int | dict[str, int], said: str) -> None:
    run = make_made_up(BenchConfig(tasks=("gsm8k", "aime25"), methods=("ngram",), skip=skip))
    assert said in run.setting


def tried_trees(folder: str) -> dict[tuple[str, str], pd.DataFrame]:
    """Tokens per round by draft temperature and width, a column per budget, for every method and head."""
    records = [read_record(path) for path in (ROOT / "docs" / "results" / folder).glob("*.json")]
    keys = ["draft_temperature", "width"]
    return {(r["name"], r["head"]): pd.json_normalize(r["trees"]).set_index(keys).filter(like="mean.") for r in records}


def test_baselines_draft_the_trees_that_are_best_for_their_heads() -> None:
    """The temperature that was best at every budget, and the least width that none is better than by one in 1000."""
    tried, wide = tried_trees("tree_settings"), tried_trees("tree_settings_wide")
    methods = {(m.kind_name, m.head or ""): m for plan in shipped().values() for m in plan.all_methods()}
    assert {kind for kind, _ in tried if (kind, _) in methods} == {"ddtree", "eagle3"}
    for key in tried.keys() & methods.keys():
        assert {temperature for temperature, _ in tried[key].idxmax()} == {methods[key].draft_temperature}
        enough = wide[key].index[(wide[key] > 0.999 * wide[key].max()).all(axis=1)]
        assert methods[key].width == min(width for _, width in enough)
