"""`jetspec profile`: where the time of a round goes, as a table or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from jetspec.commands.generate import write_json
from jetspec.commands.screen import out, working
from jetspec.config import TreeConfig
from jetspec.engine.llm import choose_device, choose_dtype
from jetspec.files import check_writable
from jetspec.profile.operations import OpProfile, Setting, find_operations, profile_operation
from jetspec.profile.rounds import STAGES, Profile, Workload, check, profile
from jetspec.profile.shapes import Weights, open_head, open_target, shape_of
from jetspec.record import current_commit, shown, shown_head, write_record
from jetspec.train.config import HeadShape

CPU_ROUNDS, GPU_ROUNDS = 10, 200


@dataclass(frozen=True)
class Where:
    """What to measure, and on what."""

    shape: str
    dtype: str
    device: str


@dataclass(frozen=True)
class Report:
    """Where results go."""

    as_json: bool
    out: Path | None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_writable(self.out)


@dataclass(frozen=True)
class HeadChoice:
    """A head on disk, or one of a shape with random weights."""

    path: str | None
    shape: HeadShape


def profile_rounds(
    where: Where,
    weights: Weights,
    choice: HeadChoice,
    trees: Sequence[TreeConfig],
    works: Sequence[Workload],
    report: Report,
) -> None:
    """Every tree with every workload, over one load of the models."""
    commit, device = current_commit(), choose_device(where.device)
    config = shape_of(where.shape)
    for work, tree in product(works, trees):
        check(config, tree, work)
    with working(f"Loading {where.shape}"):
        target = open_target(where.shape, weights, choose_dtype(where.dtype, device), device)
        head = open_head(target, choice.path, choice.shape)
    runs = []
    for work, tree in product(works, trees):
        with working(f"Timing trees of {tree.budget} nodes after {work.context} tokens"):
            runs.append(profile(target, head, tree, work))
    results = {
        "shape": shown(where.shape),
        "weights": weights,
        "head": {
            "name": choice.path and shown_head(choice.path),
            "layers": head.config.num_layers,
            "block_size": head.head_config.block_size,
            "edge_rank": head.head_config.edge.rank if head.head_config.edge else 0,
        },
        "tree": {**asdict(trees[0]), "budget": None},
        "dtype": str(target.embedding.dtype).removeprefix("torch."),
        "device": device.type,
        "rounds": works[0].rounds,
        "runs": [run.to_dict() for run in runs],
    }
    _write(results, _round_table(runs), report, commit)


def default_rounds(device: str) -> int:
    """Fewer where each takes long."""
    return CPU_ROUNDS if choose_device(device).type == "cpu" else GPU_ROUNDS


def list_operations(shape: str) -> None:
    """Those that a shape has, one per line."""
    out().print("\n".join(find_operations("all", shape_of(shape))))


def profile_operations(
    name: str,
    where: Where,
    *,
    budget: int,
    context: int,
    batch: int,
    shortlist: int,
    window: int | None,
    max_len: int | None,
    report: Report,
) -> None:
    """One operation, or all of them."""
    commit, device = current_commit(), choose_device(where.device)
    config = shape_of(where.shape)
    names = find_operations(name, config)
    dtype = choose_dtype(where.dtype, device)
    setting = Setting(config, dtype, device, budget, context, batch, shortlist, window, max_len)
    runs = []
    for each in names:
        with working(f"Timing {each}"):
            runs.append(profile_operation(each, setting))
    results = {
        "shape": shown(where.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "budget": budget,
        "context": context,
        "max_len": setting.room,
        "batch": batch,
        "shortlist": shortlist,
        "window": window,
        "operations": [run.to_dict() for run in runs],
    }
    _write(results, _op_table(runs), report, commit)


def _write(results: dict[str, Any], table: Table, report: Report, commit: str | None) -> None:
    if report.out is not None:
        write_record(report.out, results, commit)
    write_json(results) if report.as_json else out().print(table)


def _round_table(runs: Sequence[Profile]) -> Table:
    """A column per run, because there are more numbers than runs."""
    table = Table(title="milliseconds", title_justify="left", box=SIMPLE)
    table.add_column("")
    for run in runs:
        table.add_column(f"budget {run.budget}\ncontext {run.context}\nbatch {run.batch}", justify="right")
    for label, form, values in _rows(runs):
        table.add_row(label, *(form.format(value) for value in values), end_section=label in ("commit", "at most"))
    return table


def _rows(runs: Sequence[Profile]) -> list[tuple[str, str, list[float]]]:
    stages: Mapping[str, list[float]] = {name: [run.stages_ms[name] for run in runs] for name in STAGES}
    rows = [(name, "{:.3f}", values) for name, values in stages.items()]
    rows += [
        ("round", "{:.3f}", [run.round_ms for run in runs]),
        ("its floor", "{:.3f}", [run.floor_round_ms for run in runs]),
        ("ratio", "{:.3f}", [run.ratio_round for run in runs]),
        ("at most", "{:.3f}", [run.ratio_round_range[1] for run in runs]),
        ("reading its weights", "{:.3f}", [run.read_round_ms for run in runs]),
        ("plain step", "{:.3f}", [run.plain_ms for run in runs]),
        ("its floor", "{:.3f}", [run.floor_plain_ms for run in runs]),
        ("ratio", "{:.3f}", [run.ratio_plain for run in runs]),
        ("at most", "{:.3f}", [run.ratio_plain_range[1] for run in runs]),
        ("in the engine's loop", "{:.3f}", [run.step_ms for run in runs]),
        ("idle there", "{:.1%}", [run.idle_frac for run in runs]),
        ("tokens per round", "{:.2f}", [run.tokens_per_round for run in runs]),
        ("room for tokens", "{:,}", [run.max_len for run in runs]),
    ]
    if any(run.experts_round for run in runs):
        rows.append(("experts per layer", "{:.1f}", [run.experts_round or 0 for run in runs]))
    return rows


def _op_table(runs: Sequence[OpProfile]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("operation")
    for title in ("kernel µs", "eager reference µs", "MB", "GB/s", "difference"):
        table.add_column(title, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            "-" if run.kernel_ms is None else f"{run.kernel_ms * 1e3:.1f}",
            f"{run.reference_ms * 1e3:.1f}",
            f"{run.num_bytes / 1e6:.2f}",
            f"{run.gb_per_s:.0f}",
            "-" if run.max_difference is None else f"{run.max_difference:.1e}",
        )
    return table
