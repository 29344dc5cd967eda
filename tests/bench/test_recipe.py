"""Tasks and recipes: what is asked, and that nothing a user writes is ignored."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetspec.bench.costs import CostConfig, cost_results
from jetspec.bench.paper import OURS, OURS_ALONE, find_pairs, paper_costs, paper_rows
from jetspec.bench.recipe import KINDS, PLAIN, BenchConfig, MethodConfig
from jetspec.bench.runs import CostRecord, Run
from jetspec.bench.tables import cost_table
from jetspec.bench.tasks import BUILTIN, BUILTIN_FILE, GRADED_AS, TASKS, check_tasks, read_task
from jetspec.terminal.bench import QUICK, read_plan
from jetspec.train.answers import read_questions
from scripts.ablate import VARIANTS
from tests.bench.run_folders import make_result

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes" / "bench").glob("*.yaml"))


# -- tasks


def test_the_built_in_questions_can_be_asked_and_their_answers_are_right() -> None:
    prompts = read_questions(BUILTIN_FILE, 1000)
    assert len(prompts) == 28 == len(read_task(BUILTIN, None, None)) and any(
        len(prompt.turns) > 1 for prompt in prompts
    )
    kinds = [prompt.row.get(GRADED_AS) for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {"gsm8k": 10, "mbpp": 10, None: 8}
    assert len(set(kinds[:3])) == 3, "a few of them are a fair choice"
    for prompt in prompts:
        if prompt.row.get(GRADED_AS) == "mbpp":
            tests = prompt.turns[0].partition("Your code should pass these tests:\n")[2]
            assert tests.count("assert ") >= 2
            exec(prompt.row["answer"] + tests, {})


def test_a_quick_run_asks_for_answers_that_its_limit_does_not_cut() -> None:
    prompts = read_questions(BUILTIN_FILE, QUICK["limit"])
    graded = [prompt for prompt in prompts if GRADED_AS in prompt.row]
    assert len(graded) >= 4
    for prompt in graded:
        task, _, _ = prompt.turns[0].partition("Your code should pass these tests:\n")
        assert "one short sentence" in task or "the code alone" in task
        assert len(prompt.row["answer"]) < 2 * QUICK["max_tokens"], "a token of code has two letters or more"


def test_questions_come_from_a_folder_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"id": "a", "turns": ["x"], "answer": 1}\n{"id": "b", "turns": ["y", "z"]}\n')
    check_tasks(["mine", BUILTIN], tmp_path)
    assert [prompt.turns for prompt in read_task("mine", tmp_path, None)] == [["x"], ["y", "z"]]
    assert read_task("mine", tmp_path, 1)[0].row["answer"] == 1
    with pytest.raises(ValueError, match="there is no task 'gsm8k' in"):
        check_tasks(["gsm8k"], tmp_path)


@pytest.mark.parametrize(
    ("name", "why"), [("gsm9k", "choose from gsm8k"), ("spec_bench", "give a folder with spec_bench.jsonl")]
)
def test_a_task_that_cannot_be_had_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_tasks([name], None)


HUB_ROW: dict[str, Any] = {"question": "1 + 1?", "problem": "1 + 1?", "answer": "so it is\n#### 1,002"}
HUB_ROW |= {"prompt": ["a", "b"], "canonical_solution": "    pass", "test": "check", "entry_point": "f"}
HUB_ROW |= {"text": "add", "test_list": ["assert f() == 1", "assert f() == 2"], "code": "def f(): ..."}
HUB_ROW |= {"question_content": "read and add", "instruction": "why?"}


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.hub])
def test_rows_of_hugging_face_become_questions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(load_dataset=lambda *name, split: iter([HUB_ROW] * 5))
    monkeypatch.setitem(sys.modules, "datasets", module)
    prompts = read_task(name, None, 3)
    assert [prompt.id for prompt in prompts] == [f"{name}-{i:05d}" for i in range(3)]
    assert len(prompts[0].turns) == (2 if name == "mt_bench" else 1)
    if TASKS[name].grader == "math":
        assert prompts[0].turns[0].endswith("\\boxed{}.") and prompts[0].row["answer"]
    if name == "gsm8k":
        assert prompts[0].row["answer"] == "1002"
    if name == "mbpp":
        assert prompts[0].turns[0].endswith("these tests:\nassert f() == 1\nassert f() == 2")


def test_out_of_reach_of_hugging_face_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*name: str, split: str) -> None:
        raise ConnectionError("no route\nto anywhere")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(ValueError, match=r"\(no route\); give a folder with gsm8k.jsonl as --data-dir"):
        read_task("gsm8k", None, None)


# -- recipes


def make_config(recipe: Path | None, settings: dict[str, Any]) -> BenchConfig:
    plan = read_plan(recipe, settings)
    assert isinstance(plan, BenchConfig)
    return plan


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"measure": "miles"}, "choose one of methods, costs"),
        ({"measure": "costs", "tasks": ["gsm8k"]}, "unknown setting tasks"),
        ({"measure": "costs", "depths": [500]}, "depth is 500"),
        ({"budget": 3}, "unknown setting budget; did you mean budgets"),
        ({"repeats": 0}, "repeats is 0"),
        ({"tasks": []}, "tasks must name at least one"),
        ({"budgets": [16, 16]}, "none twice"),
        ({"budgets": [0]}, "budget is 0"),
        ({"batches": [0]}, "a batch is 0"),
        ({"temperatures": [-1]}, "temperature is -1"),
        ({"methods": ["jetspeck"]}, "choose from plain, ngram"),
        ({"methods": ["plain=x"]}, "takes nothing behind an equals sign"),
        ({"methods": ["server"]}, "server=VALUE"),
        ({"methods": ["ngram", "ngram"]}, "none twice"),
        ({"methods": ["ngram", {"name": "ngram", "width": 2}]}, "two methods are called ngram"),
        ({"methods": [{"name": "ngram", "head": "x"}]}, "head means nothing to ngram"),
        ({"methods": [{"name": "dflash", "head": "x", "width": 4}]}, "width means nothing to dflash"),
        ({"methods": [{"name": "jetspec", "url": "x"}]}, "url means nothing to jetspec"),
        ({"methods": [{"name": "mine", "kind": "server"}]}, "needs a url"),
        ({"methods": [{"name": "plain", "kind": "ngram"}]}, "must be what its name says"),
        ({"methods": [{"name": "jetspec", "score": "entropy", "entropy_weight": 1}]}, "only counts in the hybrid"),
        ({"methods": ["transformers-lookup"], "batches": [1, 4]}, "give it batches"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_config(None, settings)


def test_plain_decoding_is_there_for_every_cell_of_every_method() -> None:
    methods: list[Any] = ["ngram", {"name": "big", "kind": "jetspec", "batches": [32], "budgets": [256]}, "dflash"]
    config = make_config(None, {"methods": methods, "batches": [1, 8], "temperatures": [0, 1], "tasks": ["a", "b"]})
    cells = {method.name: config.cells(method) for method in config.contenders()}
    assert [*cells] == ["plain", "ngram", "big", "dflash"]
    for some in cells.values():
        assert len(some) == len(set(some))
        assert {cell.beside(PLAIN, 1) for cell in some} <= set(cells[PLAIN])
    assert {cell.budget for cell in cells["dflash"]} == {16} and {cell.batch for cell in cells["big"]} == {32}


def test_kinds_differ_as_the_papers_do() -> None:
    trees = {name: MethodConfig(name, head="x").tree(64) for name in ("dflash", "ddtree", "jetspec-paper", "jetspec")}
    assert trees["dflash"].width == 1 and trees["ddtree"].width > 1
    assert trees["jetspec-paper"].expand == "paper" and trees["jetspec"].expand == trees["ddtree"].expand == "optimal"
    heads = {name: kind.head for name, kind in KINDS.items()}
    assert (
        heads["dflash"] == heads["ddtree"] == "bidirectional" and heads["jetspec"] == heads["jetspec-paper"] == "causal"
    )


def test_flags_take_the_place_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("repeats: 7\nbudgets: [16]\nmethods: [ngram]\n")
    config = make_config(path, {"budgets": [32]})
    assert (config.repeats, config.budgets) == (7, (32,))


def test_the_record_of_a_recipe_names_no_folders() -> None:
    config = make_config(None, {"methods": ["jetspec=/home/me/heads/mine"], "data_dir": "/home/me/eval"})
    assert "/home" not in str(config.to_dict(config.contenders()))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    plan = read_plan(path, {})
    assert isinstance(plan, CostConfig) == (path.stem == "table12")
    if isinstance(plan, BenchConfig):
        assert len(plan.contenders()) > 1 and set(plan.tasks) <= set(TASKS)


def test_methods_of_recipes_have_their_paper_rows_or_are_ours_alone() -> None:
    named = {row.method for row in paper_rows()}
    assert {name for names, _ in OURS.values() for name in names} == named, "all of the paper's methods are ours, too"
    assert not set(OURS) & set(OURS_ALONE) and set(KINDS) <= {*OURS, *OURS_ALONE}
    for path in RECIPES:
        plan = read_plan(path, {})
        methods = plan.contenders() if isinstance(plan, BenchConfig) else []
        for method in methods:
            assert method.name in OURS or method.name in OURS_ALONE, f"{path.stem}: {method.name}"


def test_every_paper_table_has_a_recipe() -> None:
    numbers = {row.table.number for row in paper_rows()} | {paper_costs()[0].number}
    assert numbers == {1, 2, 3, 4, 5, 6, 7, 10, 11, 12}
    assert {f"table{number:02d}" for number in numbers} == {path.stem for path in RECIPES if "table" in path.stem}


def run_of(path: Path) -> Run:
    """What a recipe would measure, with made-up numbers."""
    plan = make_config(path, {})
    cells = [make_result(cell) for method in plan.contenders() for cell in plan.cells(method)]
    return Run(path.stem, {"model": plan.model}, tuple(cells))


@pytest.mark.parametrize("number", sorted({row.table.number for row in paper_rows()}))
def test_a_run_of_a_tables_recipe_stands_beside_that_table(number: int) -> None:
    run = run_of(next(path for path in RECIPES if path.stem == f"table{number:02d}"))
    pairs = [pair for pair in find_pairs(run) if pair.row.table.number == number]
    rows = [row for row in paper_rows() if row.table.number == number]
    # A chain is as long as a block: ours has no second budget.
    expected = [row for row in rows if (row.method, row.budget) != ("DFlash", 32)]
    assert {id(pair.row) for pair in pairs} == {id(row) for row in expected}
    paired = {pair.cell.method for pair in find_pairs(run)}
    assert {cell.method for cell in run.cells} <= {*paired, PLAIN, *OURS_ALONE}
    told = {pair.cell.method for pair in pairs if "lost" in pair.remark}
    assert told == {name for name in paired if name.startswith(("lr-", "hybrid-"))}


def test_a_run_of_table_12_stands_beside_it() -> None:
    plan = read_plan(next(path for path in RECIPES if path.stem == "table12"), {})
    assert isinstance(plan, CostConfig)
    _, paper = paper_costs()
    asked = {(context, depth) for context in plan.contexts for depth in plan.depths}
    assert asked == {(context, depth) for context, depth in paper if depth <= 128}, "a head drafts up to 255 tokens"
    time = {"mean": 1.0, "sd": 0.1, "values": [0.9, 1.1]}
    costs = [{"context": c, "depth": d, "draft_ms": time, "verify_ms": time, "c_percent": time} for c, d in asked]
    table = cost_table(CostRecord("run", cost_results(plan, costs)), beside_paper=True)
    assert {row[-1] for row in table.rows} == {f"{paper[place]:.3f}" for place in asked}


def test_heads_that_a_recipe_takes_from_the_ablations_are_made_there() -> None:
    for path in RECIPES:
        plan = read_plan(path, {})
        methods = plan.contenders() if isinstance(plan, BenchConfig) else []
        for method in methods:
            if method.head and "ablations" in method.head:
                assert Path(method.head).name in VARIANTS
                made = VARIANTS[Path(method.head).name]
                found = "edge" if made.edge_rank else "causal" if made.causal else "bidirectional"
                assert found == method.of.head, f"{path.stem}: {method.name}"
