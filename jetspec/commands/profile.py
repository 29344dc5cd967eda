"""`jetspec profile`: the time of a round by stage, and of single operations, as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from jetspec.commands.options import AsJson, examples, options
from jetspec.commands.screen import err, number_table, out, working, write_json
from jetspec.config import TreeConfig
from jetspec.files import check_writable
from jetspec.profile.config import OpOptions, RoundOptions
from jetspec.train.config import HeadShape

if TYPE_CHECKING:
    from jetspec.profile.operations import OpProfile

CPU_ROUNDS, GPU_ROUNDS = 10, 200
EDGE_RANK = 128

app = typer.Typer(invoke_without_command=True, add_completion=False, name="profile")


@dataclass(frozen=True)
class Profiling:
    """Settings of `jetspec profile`."""

    profile: RoundOptions = field(default_factory=RoundOptions)
    tree: TreeConfig = field(default_factory=TreeConfig)
    head: HeadShape = field(default_factory=HeadShape)


@dataclass(frozen=True)
class OpProfiling:
    """Settings of `jetspec profile op`."""

    profile: OpOptions = field(default_factory=OpOptions)


ROWS = (
    *((stage, "{:.3f}", stage) for stage in ("draft", "build", "verify", "accept", "commit")),
    ("round", "{:.3f}", "round_ms"),
    ("its floor", "{:.3f}", "floor_round_ms"),
    ("ratio", "{:.3f}", "ratio_round"),
    ("at most", "{:.3f}", "ratio_round_range"),
    ("reading its weights", "{:.3f}", "read_round_ms"),
    ("plain step", "{:.3f}", "plain_ms"),
    ("its floor", "{:.3f}", "floor_plain_ms"),
    ("ratio", "{:.3f}", "ratio_plain"),
    ("at most", "{:.3f}", "ratio_plain_range"),
    ("in the engine's loop", "{:.3f}", "step_ms"),
    ("idle there", "{:.1%}", "idle_frac"),
    ("tokens per round", "{:.2f}", "tokens_per_round"),
    ("room for tokens", "{:,}", "max_len"),
    ("experts per layer", "{:.1f}", "experts_round"),
)
"""Label, form and key of the rows of a table of profiles. Of a range the end is shown."""
ENDS = ("commit", "at most")
"""Rows with a line below."""

RecordFile = Annotated[Path | None, typer.Option("--out", help="Also write a record.", metavar="FILE")]


@app.callback(
    epilog=examples(
        "jetspec profile --shape qwen3-8b --budget 64 --budget 128 --context 256 --context 2048",
        "jetspec profile --shape smollm2-135m-instruct --weights real --head heads/mine --out profile.json",
        "jetspec profile op tree_attention --shape qwen3-8b --context 4096",
    )
)
@options(
    *("profile.shape", "profile.weights", "profile.batch"),
    *("--budget=profile.budgets", "--context=profile.contexts"),
)
def profile(
    context: typer.Context,
    settings: Profiling,
    head: Annotated[str | None, typer.Option(help="Draft head. By default random weights.", metavar="NAME")] = None,
    edge: Annotated[bool, typer.Option("--edge", hidden=True)] = False,
    out_file: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Time a round stage by stage.

    Beside it stands a plain step, below both their floor: the matrix products alone. Random weights take as long as
    real ones, so no model is needed.
    """
    if context.invoked_subcommand:
        for option in _given_options(context):
            raise typer.BadParameter(f"put {option} behind `{context.invoked_subcommand}`", ctx=context)
        return
    shape = settings.head
    if edge:
        err().print(f"warning: --edge is now --set head.edge_rank={EDGE_RANK}; it works until the next release")
        shape = replace(shape, edge_rank=EDGE_RANK)
    if head is not None and shape != HeadShape():
        raise ValueError("--head names a head with a shape of its own; leave out head.* and --edge")
    asked = settings.profile
    trees = [replace(settings.tree, budget=nodes) for nodes in asked.budgets]
    if out_file is not None:
        check_writable(out_file)
    from jetspec.engine.llm import choose_device, choose_dtype
    from jetspec.profile import rounds
    from jetspec.profile.shapes import open_head, open_target, shape_of
    from jetspec.record import current_commit, shown, shown_head

    commit, device = current_commit(), choose_device(asked.device)
    usual = CPU_ROUNDS if device.type == "cpu" else GPU_ROUNDS
    timed = usual if asked.rounds is None else asked.rounds
    works = [rounds.Workload(length, asked.batch, timed, asked.max_len, asked.temperature) for length in asked.contexts]
    config = shape_of(asked.shape)
    for work, tree in product(works, trees):
        rounds.check(config, tree, work)
    with working(f"Loading {asked.shape}"):
        target = open_target(asked.shape, asked.weights, choose_dtype(asked.dtype, device), device)
        drafting = open_head(target, head, shape)
    runs = []
    for work, tree in product(works, trees):
        with working(f"Timing trees of {tree.budget} nodes after {work.context} tokens"):
            runs.append(rounds.profile(target, drafting, tree, work))
    results: dict[str, Any] = {
        "shape": shown(asked.shape),
        "weights": asked.weights,
        "head": {
            "name": head and shown_head(head),
            "layers": drafting.config.num_layers,
            "block_size": drafting.head_config.block_size,
            "edge_rank": drafting.head_config.edge.rank if drafting.head_config.edge else 0,
        },
        "tree": {**asdict(trees[0]), "budget": None},
        "dtype": str(target.embedding.dtype).removeprefix("torch."),
        "device": device.type,
        "rounds": timed,
        "runs": [run.to_dict() for run in runs],
    }
    show(results, _round_table(results["runs"]), commit, out_file, as_json)


@app.command(
    epilog=examples(
        "jetspec profile op",
        "jetspec profile op all",
        "jetspec profile op build_edge_tree --shape qwen3-8b --set profile.shortlist=512",
        "jetspec profile op add_mixture --shape qwen3-30b-a3b --budget 128 --json",
    )
)
@options("profile.shape", "profile.batch", "profile.budget", "profile.context")
def op(
    settings: OpProfiling,
    name: Annotated[str | None, typer.Argument(help="Its name, or all; left out, they are listed.")] = None,
    out_file: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Time one operation: its kernel in a CUDA graph, as in a round, and its reference eagerly."""
    asked = settings.profile
    if name is not None and out_file is not None:
        check_writable(out_file)
    from jetspec.engine.llm import choose_device, choose_dtype
    from jetspec.profile.operations import Inputs, find_operations, profile_operation
    from jetspec.profile.shapes import shape_of
    from jetspec.record import current_commit, shown

    config = shape_of(asked.shape)
    if name is None:
        out().print("\n".join(find_operations("all", config)))
        return
    commit, device = current_commit(), choose_device(asked.device)
    inputs = Inputs(config, choose_dtype(asked.dtype, device), device, asked)
    runs = []
    for each in find_operations(name, config):
        with working(f"Timing {each}"):
            runs.append(profile_operation(each, inputs))
    results: dict[str, Any] = {
        "shape": shown(asked.shape),
        "dtype": str(inputs.dtype).removeprefix("torch."),
        "device": device.type,
        "budget": asked.budget,
        "context": asked.context,
        "max_len": inputs.room,
        "batch": asked.batch,
        "shortlist": asked.shortlist,
        "window": asked.window,
        "operations": [run.to_dict() for run in runs],
    }
    show(results, _op_table(runs), commit, out_file, as_json)


def _given_options(context: typer.Context) -> Iterator[str]:
    """Options on the command line, by their long names."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield option.opts[0]


def show(results: dict[str, Any], table: Table, commit: str | None, out_file: Path | None, as_json: bool) -> None:
    from jetspec.record import write_record

    if out_file is not None:
        write_record(out_file, results, commit)
    write_json(results) if as_json else out().print(table)


def _round_table(runs: Sequence[dict[str, Any]]) -> Table:
    """A table with a column per run: there are more numbers than runs."""
    table = Table(title="milliseconds", title_justify="left", box=SIMPLE)
    table.add_column("")
    for run in runs:
        table.add_column(f"budget {run['budget']}\ncontext {run['context']}\nbatch {run['batch']}", justify="right")
    flat = [{**run, **run["stages_ms"]} for run in runs]
    for label, form, name in ROWS:
        values = [run[name][1] if name.endswith("_range") else run[name] for run in flat]
        if name != "experts_round" or any(values):
            table.add_row(label, *(form.format(value or 0) for value in values), end_section=label in ENDS)
    return table


def _op_table(runs: Sequence[OpProfile]) -> Table:
    heads = ("operation", "kernel µs", "eager reference µs", "MB", "GB/s", "difference")
    return number_table(
        heads,
        [
            (
                run.name,
                "-" if run.kernel_ms is None else f"{run.kernel_ms * 1e3:.1f}",
                f"{run.reference_ms * 1e3:.1f}",
                f"{run.num_bytes / 1e6:.2f}",
                f"{run.gb_per_s:.0f}",
                "-" if run.max_difference is None else f"{run.max_difference:.1e}",
            )
            for run in runs
        ],
    )
