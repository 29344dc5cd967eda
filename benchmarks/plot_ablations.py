"""Plots and tables of the ablations, from their records, for docs/training.md.

    python -m benchmarks.plot_ablations --records docs/results/ablations --records docs/results/ablations_longer \
        --records docs/results/ablations_eagle3 \
        --scores docs/results/equal_steps_causal.json --scores docs/results/equal_steps_edge.json \
        --page docs/training.md --plots docs/plots

The tables go between two marks in the page, so that no number in it is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.ablate import VARIANTS
from benchmarks.pages import put_between

Records = Mapping[str, Mapping[str, Any]]

TABLES: dict[str, tuple[str, ...]] = {
    "Mask and edge term": ("causal", "bidirectional", "edge-32", "edge-128", "edge-256"),
    "Loss": ("causal", "sft", "reverse-kl"),
    "Weight of positions, causal": ("causal", "causal-gamma-3", "causal-gamma-7", "causal-gamma-15"),
    "Weight of positions, bidirectional": (
        "bidirectional",
        "bidirectional-gamma-3",
        "bidirectional-gamma-7",
        "bidirectional-gamma-15",
    ),
    "Learning rate": ("lr-0.001", "lr-0.002", "causal", "lr-0.01", "lr-0.02"),
    "Learning rate, SFT": ("sft-lr-0.001", "sft-lr-0.002", "sft", "sft-lr-0.01", "sft-lr-0.02"),
    "Learning rate, bidirectional": (
        "bidirectional-lr-0.002",
        "bidirectional",
        "bidirectional-lr-0.01",
        "bidirectional-lr-0.02",
    ),
    "Optimizer": ("causal", "adamw"),
    "Whose text": ("regenerated", "corpus"),
    "EAGLE-3": tuple(name for name in VARIANTS if name.startswith("eagle3")),
    "Chance": (
        *("causal", "causal-seed-1", "causal-seed-2", "bidirectional", "bidirectional-seed-1"),
        *("sft", "sft-seed-1"),
    ),
}
"""What is compared with what."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--records",
        type=Path,
        action="append",
        required=True,
        help="folder that benchmarks.ablate wrote, one per length",
    )
    parser.add_argument("--page", type=Path, required=True, help="page with the two marks")
    parser.add_argument("--plots", type=Path, required=True, help="folder for the pictures")
    parser.add_argument(
        "--scores", type=Path, action="append", default=[], help="of `jetspec eval-head`: the first, and what beats it"
    )
    args = parser.parse_args()
    args.plots.mkdir(parents=True, exist_ok=True)
    parts = []
    for folder in args.records:
        records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        if not records:
            parser.error(f"{folder} holds no record")
        parts += length_parts(records, args.plots, args.page.parent)
    if args.scores:
        read = [json.loads(path.read_text()) for path in args.scores]
        scores = {name_of(record["head"]): record for record in read}
        if len(scores) < len(read):
            parser.error(f"heads of the scores have the same name: {', '.join(name_of(r['head']) for r in read)}")
        parts += ["### Task by task", scores_table(scores)]
    args.page.write_text(put_between(args.page.read_text(), "ablations", "\n\n".join(parts)))


def length_parts(records: Records, plots: Path, page_folder: Path) -> list[str]:
    """What heads of one length have reached: a table and a picture for each comparison of which there are two."""
    steps = all_of(record["settings"]["steps"] for record in records.values())
    parts = [f"### After {steps} steps", about(records.values())]
    for title, names in TABLES.items():
        found = [name for name in names if name in records]
        if len(found) < 2:
            print(f"{title}: left out, since there are records of {len(found)} of {', '.join(names)}", file=sys.stderr)
            continue
        stem = f"ablation {title} {steps}".lower().replace(",", "").replace(" ", "_")
        picture = plots / f"{stem}.svg"
        draw(f"{title}, {steps} steps", {name: records[name]["mean"] for name in found}, picture)
        link = os.path.relpath(picture, page_folder)
        parts += [f"#### {title}", table({name: records[name] for name in found}), f"![{title}]({link})"]
    return parts


def all_of(values: Iterable[int]) -> str:
    return " or ".join(f"{value:,}" for value in sorted(set(values)))


def about(records: Iterable[Mapping[str, Any]]) -> str:
    """What the numbers rest on."""
    found = list(records)
    questions, tokens = (all_of(record[name] for record in found) for name in ("questions", "tokens"))
    anchors = all_of(record["settings"]["anchors"] for record in found)
    return (
        f"Scored on the first {questions} questions of each task, with answers of up to {tokens} tokens; trained with"
        f" {anchors} anchors of a row."
    )


def name_of(head: str | None) -> str:
    """What a run is called: it leaves its head in a folder `head`. Without a folder it is the one that is shipped."""
    if head is None:
        return "shipped"
    path = Path(head)
    return path.parent.name if path.name == "head" else path.name


def table(records: Records) -> str:
    """Mean tokens per round over the tasks, a row per variant."""
    budgets = list(next(iter(records.values()))["mean"])
    rows = [["variant", *budgets, "conversations", "steps", "minutes"]]
    for name, record in records.items():
        means = [f"{record['mean'][budget]:.2f}" for budget in budgets]
        length = f"{record['documents']:,}", f"{record['settings']['steps']}", f"{record['seconds'] / 60:.1f}"
        rows.append([name, *means, *length])
    return as_markdown(rows)


def scores_table(records: Records) -> str:
    """Tokens per round at the largest budget, teacher-forced and where that was measured decoding, a row per task, and
    how far each record is above the first."""
    first, *others = records
    budget = list(records[first]["mean"])[-1]
    columns = {"": [teacher_forced(record, budget) for record in records.values()]}
    if all(record["real"] for record in records.values()):
        columns["decoding, "] = [decoded(record, budget) for record in records.values()]
    titles = [f"{how}{name}" for how in columns for name in (*records, *(f"gain of {name}" for name in others))]
    rows = [[f"budget {budget}", *titles]]
    for task in columns[""][0]:
        cells = [task]
        for values in ([tasks[task] for tasks in found] for found in columns.values()):
            cells += [*(f"{v:.2f}" for v in values), *(f"{v / values[0] - 1:+.1%}" for v in values[1:])]
        rows.append(cells)
    return as_markdown(rows)


def teacher_forced(record: Mapping[str, Any], budget: str) -> dict[str, float]:
    tasks = {task: row[budget] for task, row in record["tokens_per_round"].items()}
    return {**tasks, "mean": record["mean"][budget]}


def decoded(record: Mapping[str, Any], budget: str) -> dict[str, float]:
    tasks = {task: row[budget]["tokens_per_round"] for task, row in record["real"].items()}
    return {**tasks, "mean": statistics.fmean(tasks.values())}


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head; its columns of numbers are aligned right."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])


def draw(title: str, means: Mapping[str, Mapping[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for name, mean in means.items():
        axes.plot(list(mean), list(mean.values()), marker="o", label=name)
    axes.set(title=title, xlabel="budget", ylabel="tokens per round")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    with plt.rc_context({"svg.hashsalt": title}):  # the same picture is the same file
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
