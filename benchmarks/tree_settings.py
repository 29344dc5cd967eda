"""Which trees suit a head: tokens per round at every heat and width, teacher-forced, on the first questions of every
task, which recipes skip. A record per head; trees that it holds are not measured again.

    python -m benchmarks.tree_settings ddtree=runs/bench/bidirectional/head eagle3=runs/bench/eagle3/head \
        --data-dir data/eval --out docs/results/tree_settings
    python -m benchmarks.tree_settings --out docs/results/tree_settings --page docs/benchmark.md

With a page, a table per head goes between the marks of the folder's name.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.ablate import write_answers
from benchmarks.document import Table, markdown_table
from benchmarks.pages import put_between
from jetspec.config import EngineConfig, TreeConfig
from jetspec.data.answers import fingerprint
from jetspec.data.corpus import Document
from jetspec.engine.llm import LLM
from jetspec.models.decoder import Decoder
from jetspec.models.heads import Head, load_any_head
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import current_commit, shown_head, write_record
from jetspec.train.evaluate import score_head

BUDGETS = ("16", "64", "256")
DRAFT_TEMPERATURES = (0.6, 0.8, 1.0, 1.2)
WIDTHS = (4, 8, 10, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", metavar="NAME=HEAD", help="folder of a head, and what its record is called")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="their target")
    parser.add_argument("--data-dir", type=Path, help="folder with a file of questions per task")
    parser.add_argument("--limit", type=int, default=20, help="questions per task")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per answer")
    parser.add_argument("--heats", type=float, nargs="+", default=DRAFT_TEMPERATURES)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--page", type=Path, help="page with the marks")
    args = parser.parse_args()
    if not all("=" in head for head in args.heads):
        parser.error("heads are given as NAME=HEAD")
    if args.heads and args.data_dir is None:
        parser.error("heads are measured on questions: give --data-dir FOLDER")
    heads = dict(head.split("=", 1) for head in args.heads)
    if todo := {name: path for name, path in heads.items() if missing(args, name)}:
        measure(todo, args)
    if args.page is not None:
        records = [json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]
        if not records:
            parser.error(f"{args.out} holds no record")
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(put_between(page, args.out.name, "\n\n".join(map(as_text, records))), encoding="utf-8")


def missing(args: argparse.Namespace, name: str) -> list[TreeConfig]:
    """Trees that the record of a head does not hold."""
    known = {(tree["heat"], tree["width"]) for tree in read_record(args.out, name).get("trees", [])}
    pairs = product(args.draft_temperatures, args.widths)
    return [
        TreeConfig(draft_temperature=draft_temperature, width=width)
        for draft_temperature, width in pairs
        if (draft_temperature, width) not in known
    ]


def read_record(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(heads: Mapping[str, str], args: argparse.Namespace) -> None:
    commit = current_commit()
    llm = LLM(args.model, drafter="none", engine=EngineConfig(max_batch=64))
    target = llm.target.decoder
    device, dtype = target.embedding.device, target.embedding.dtype
    loaded = {name: load_any_head(path, target.config).to(device, dtype) for name, path in heads.items()}
    answers = write_answers(llm, args.data_dir, args.limit, args.tokens)
    del llm.__dict__["engine"]  # its cache is not needed any more
    for name, head in loaded.items():
        about = {"head": shown_head(heads[name]), "weights": fingerprint(head), "model": args.model}
        about |= {"questions": args.limit, "tokens": args.tokens}
        for tree in tqdm(missing(args, name), desc=name, unit="tree"):
            trees = [*begun(args.out, name, {**about, "commit": commit}), score(target, head, answers, tree)]
            trees.sort(key=lambda tree: (tree["heat"], tree["width"]))
            write_record(args.out / f"{name}.json", {"name": name, **about, "trees": trees}, commit)


def begun(folder: Path, name: str, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trees of a record that a run goes on with. One that does not tell whose they are is left as it is."""
    record = read_record(folder, name)
    if record and any(record.get(key) != value for key, value in about.items()):
        raise SystemExit(
            f"{folder / name}.json was begun by another commit, or with another head or other options: move it away"
        )
    return record.get("trees", [])


def score(target: Decoder, head: Head, answers: Mapping[str, Sequence[Document]], tree: TreeConfig) -> dict[str, Any]:
    found = {
        task: score_head(target, head, rows, BUDGETS, tree, num_gaps=0).tokens_per_round
        for task, rows in answers.items()
    }
    mean = {budget: statistics.fmean(row[budget] for row in found.values()) for budget in BUDGETS}
    return {"heat": tree.draft_temperature, "width": tree.width, "tokens_per_round": found, "mean": mean}


def as_text(record: Mapping[str, Any]) -> str:
    """A row per tree, the best of every budget bold."""
    trees = record["trees"]
    best = {budget: max(tree["mean"][budget] for tree in trees) for budget in BUDGETS}
    rows = [
        (f"{tree['draft_temperature']:g}", f"{tree['width']}", *(f"{tree['mean'][budget]:.3f}" for budget in BUDGETS))
        for tree in trees
    ]
    bold = {
        (row, 2 + column)
        for row, tree in enumerate(trees)
        for column, budget in enumerate(BUDGETS)
        if tree["mean"][budget] == best[budget]
    }
    columns = "heat", "width", *(f"{budget} nodes" for budget in BUDGETS)
    table = markdown_table(Table(columns, tuple(rows), first_number=0, bold=frozenset(bold)))
    return (
        f"`{record['name']}`, {record['head']}, on the first {record['questions']} questions of each task with answers"
        f" of up to {record['tokens']} tokens (commit {record['commit'][:7]}):\n\n{table}{_not_measured(trees)}"
    )


def _not_measured(trees: Sequence[Mapping[str, Any]]) -> str:
    """What a grid lacks that is not complete."""
    known = {(tree["heat"], tree["width"]) for tree in trees}
    draft_temperatures, widths = (sorted(set(values)) for values in zip(*known, strict=True))
    lacks = [
        f"heat {draft_temperature:g} with width {width}"
        for draft_temperature, width in product(draft_temperatures, widths)
        if (draft_temperature, width) not in known
    ]
    return f"\n\nNot measured: {', '.join(lacks)}. Bold is the best of the rest." if lacks else ""


if __name__ == "__main__":
    main()
