"""`tree-settings`: teacher-forced tokens per round at every draft temperature and width, on the first questions of
every task, which recipes skip. One record per head; trees that it holds are not measured again."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.ablate import forced_rounds, write_answers
from benchmarks.options import DEFAULT, Model, Questions, RecordFolder, examples, numbers
from benchmarks.results import read_record
from jetspec.config import EngineConfig, TreeConfig
from jetspec.data.answers import fingerprint
from jetspec.engine.llm import LLM
from jetspec.models.heads import load_any_head
from jetspec.progress import progress_bar
from jetspec.record import current_commit, shown_head, write_record

BUDGETS = ("16", "64", "256")
EPILOG = examples(
    "tree-settings ddtree=runs/bench/bidirectional/head eagle3=runs/bench/eagle3/head --data-dir data/eval"
    " --out docs/results/tree_settings"
)


def tree_settings(
    heads: Annotated[list[str], typer.Argument(help="Record name and folder of a head.", metavar="NAME=HEAD")],
    data_dir: Questions,
    out: RecordFolder,
    model: Model = DEFAULT,
    limit: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 128,
    draft_temperatures: Annotated[str, typer.Option("--draft-temperatures", "--heats")] = "0.6,0.8,1.0,1.2",
    widths: Annotated[str, typer.Option(help="Children of a node.")] = "4,8,10,16",
) -> None:
    """Measure the trees of a head at every draft temperature and width.

    `pages` makes a table of each record.
    """
    if wrong := [head for head in heads if "=" not in head]:
        raise typer.BadParameter(f"heads are given as NAME=HEAD, not {wrong[0]}")
    asked = list(product(numbers(draft_temperatures, float, 1e-6), numbers(widths)))
    paths = dict(head.split("=", 1) for head in heads)
    todo = {name: [TreeConfig(draft_temperature=t, width=w) for t, w in asked if (t, w) not in known(out, name)]
            for name in paths}  # fmt: skip
    if not any(todo.values()):
        return
    commit = current_commit()
    llm = LLM(model, drafter="none", engine=EngineConfig(max_batch=64))
    target = llm.target.decoder
    place = target.embedding.device, target.embedding.dtype
    loaded = {name: load_any_head(path, target.config).to(*place) for name, path in paths.items() if todo[name]}
    answers = write_answers(llm, data_dir, limit, tokens)
    del llm.__dict__["engine"]  # its cache is not needed any more
    for name, head in loaded.items():
        about: dict[str, Any] = {"head": shown_head(paths[name]), "weights": fingerprint(head), "model": model}
        about |= {"questions": limit, "tokens": tokens}
        for tree in progress_bar(todo[name], desc=name, unit="tree"):
            setting = {"draft_temperature": tree.draft_temperature, "width": tree.width}
            found = setting | forced_rounds(target, head, answers, tree, BUDGETS, num_gaps=0)
            trees = sorted([*begun(out, name, {**about, "commit": commit}), found], key=tree_key)
            write_record(out / f"{name}.json", {"name": name, **about, "trees": trees}, commit)


def tree_key(tree: Mapping[str, Any]) -> tuple[float, int]:
    return tree["draft_temperature"], tree["width"]


def known(folder: Path, name: str) -> set[tuple[float, int]]:
    """Trees that the record of a head holds."""
    path = folder / f"{name}.json"
    return set(map(tree_key, read_record(path)["trees"])) if path.exists() else set()


def begun(folder: Path, name: str, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trees of the record that a run resumes. A record of other weights, options or commit is refused."""
    path = folder / f"{name}.json"
    record = read_record(path) if path.exists() else {}
    if record and any(record.get(key) != value for key, value in about.items()):
        raise ValueError(f"{path} was begun by another commit, or with another head or other options: move it away")
    return list(record.get("trees", []))
