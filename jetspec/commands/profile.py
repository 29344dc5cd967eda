"""`jetspec profile`: the time of a round by stage, and of single operations, as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.table import Table

from jetspec.commands.options import AsJson, DtypeName, examples, options
from jetspec.commands.screen import err, out, working, write_json
from jetspec.config import TreeConfig
from jetspec.files import check_writable
from jetspec.models.hub import check_name
from jetspec.train.config import HeadShape

if TYPE_CHECKING:
    from jetspec.profile.operations import OpProfile
    from jetspec.profile.rounds import Profile

CPU_ROUNDS, GPU_ROUNDS = 10, 200
EDGE_RANK = 128
SHAPES = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-0.6b", "smollm2-135m")
"""Names of shapes that need no files."""

app = typer.Typer(invoke_without_command=True, add_completion=False, name="profile")


@dataclass(frozen=True)
class Where:
    """Shape and device of a measurement."""

    shape: str = "smollm2-135m"
    """qwen3-8b, qwen3-30b-a3b, qwen3-0.6b, smollm2-135m, or that of a model, folder or GGUF file."""
    dtype: DtypeName = "auto"
    """Number format. Auto, the default: float32 on a CPU, bfloat16 on a GPU."""
    device: str = "auto"
    """cpu or cuda. Auto, the default: the GPU, if there is one."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            check_name(self.shape)


@dataclass(frozen=True)
class RoundOptions(Where):
    """Rounds to measure."""

    weights: Literal["random", "real"] = "random"
    """Weights of the target."""
    batch: int = 1
    """Requests decoded together."""
    budgets: tuple[int, ...] = (64,)
    """Nodes of a tree; repeatable."""
    contexts: tuple[int, ...] = (1024,)
    """Tokens before the tree; repeatable."""
    rounds: int | None = None
    """Rounds to time. By default 10, on a GPU 200."""
    max_len: int | None = None
    """Positions of a request in the cache. By default the model's context."""
    temperature: float = 0.0
    """Temperature of the target; 0 is greedy."""


@dataclass(frozen=True)
class OpOptions(Where):
    """Operations to measure."""

    batch: int = 1
    """Requests decoded together."""
    budget: int = 64
    """Nodes of a tree."""
    context: int = 1024
    """Tokens before the tree."""
    shortlist: int = TreeConfig.shortlist
    """Tokens per depth that an edge term ranks for each parent. 0: all."""
    window: int | None = None
    """Tokens before each that attention sees. By default all."""
    max_len: int | None = None
    """Positions of a request in the cache. By default the model's context."""


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
    show(*profile_rounds(asked, head, shape, trees), out_file, as_json)


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
    if name is None:
        list_operations(settings.profile.shape)
        return
    if out_file is not None:
        check_writable(out_file)
    show(*profile_operations(name, settings.profile), out_file, as_json)


def _given_options(context: typer.Context) -> Iterator[str]:
    """Options on the command line, by their long names."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield option.opts[0]


Results = tuple[dict[str, Any], Table, str | None]
"""Results of a measurement as a dict and as a table, and the commit that ran when it began."""


def profile_rounds(
    asked: RoundOptions, head_name: str | None, shape: HeadShape, trees: Sequence[TreeConfig]
) -> Results:
    """Times every tree after every context, over one load of the models. `shape` is that of a random head."""
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
        head = open_head(target, head_name, shape)
    runs = []
    for work, tree in product(works, trees):
        with working(f"Timing trees of {tree.budget} nodes after {work.context} tokens"):
            runs.append(rounds.profile(target, head, tree, work))
    results = {
        "shape": shown(asked.shape),
        "weights": asked.weights,
        "head": {
            "name": head_name and shown_head(head_name),
            "layers": head.config.num_layers,
            "block_size": head.head_config.block_size,
            "edge_rank": head.head_config.edge.rank if head.head_config.edge else 0,
        },
        "tree": {**asdict(trees[0]), "budget": None},
        "dtype": str(target.embedding.dtype).removeprefix("torch."),
        "device": device.type,
        "rounds": timed,
        "runs": [run.to_dict() for run in runs],
    }
    return results, _round_table(runs), commit


def list_operations(shape: str) -> None:
    """Prints the operations of a shape, one per line."""
    from jetspec.profile.operations import find_operations
    from jetspec.profile.shapes import shape_of

    out().print("\n".join(find_operations("all", shape_of(shape))))


def profile_operations(name: str, asked: OpOptions) -> Results:
    """Times one operation, or all of them."""
    from jetspec.engine.llm import choose_device, choose_dtype
    from jetspec.profile.operations import Setting, find_operations, profile_operation
    from jetspec.profile.shapes import shape_of
    from jetspec.record import current_commit, shown

    commit, device = current_commit(), choose_device(asked.device)
    config, dtype = shape_of(asked.shape), choose_dtype(asked.dtype, device)
    names = find_operations(name, config)
    setting = Setting(
        config, dtype, device, asked.budget, asked.context, asked.batch, asked.shortlist, asked.window, asked.max_len
    )
    runs = []
    for each in names:
        with working(f"Timing {each}"):
            runs.append(profile_operation(each, setting))
    results = {
        "shape": shown(asked.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "budget": asked.budget,
        "context": asked.context,
        "max_len": setting.room,
        "batch": asked.batch,
        "shortlist": asked.shortlist,
        "window": asked.window,
        "operations": [run.to_dict() for run in runs],
    }
    return results, _op_table(runs), commit


def show(results: dict[str, Any], table: Table, commit: str | None, out_file: Path | None, as_json: bool) -> None:
    from jetspec.record import write_record

    if out_file is not None:
        write_record(out_file, results, commit)
    write_json(results) if as_json else out().print(table)


def _round_table(runs: Sequence[Profile]) -> Table:
    """A table with a column per run: there are more numbers than runs."""
    table = Table(title="milliseconds", title_justify="left", box=SIMPLE)
    table.add_column("")
    for run in runs:
        table.add_column(f"budget {run.budget}\ncontext {run.context}\nbatch {run.batch}", justify="right")
    for label, form, values in _rows(runs):
        table.add_row(label, *(form.format(value) for value in values), end_section=label in ("commit", "at most"))
    return table


def _rows(runs: Sequence[Profile]) -> list[tuple[str, str, list[float]]]:
    from jetspec.profile.rounds import STAGES

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
