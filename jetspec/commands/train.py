"""`jetspec train`: a recipe, its run, and how its checkpoints decode."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspec.commands.options import Set, describe, examples, help_all
from jetspec.commands.screen import duration, err, note, out, working
from jetspec.config import EngineConfig, TreeConfig
from jetspec.models.hub import check_name
from jetspec.settings import describe_settings
from jetspec.train.config import TrainConfig, check_files, load_recipe, recipes
from jetspec.types import SamplingParams

if TYPE_CHECKING:
    import torch

    from jetspec.data.corpus import Document
    from jetspec.models.heads import Head
    from jetspec.models.weights import Target
    from jetspec.train.trainer import Trainer

Ask = tuple[list[int], int]
"""A prompt, and how many tokens to write."""

app = typer.Typer(add_completion=False)


@app.command(
    "train",
    epilog=examples(
        "jetspec train",
        "jetspec train smollm2_135m --dry-run",
        "jetspec train my_recipe.yaml --set optimizer.lr=3e-4 --set out=runs/other",
        "torchrun --nproc-per-node 8 -m jetspec train qwen3_8b",
    ),
)
def train_command(
    recipe: Annotated[
        str | None, typer.Argument(help="A packaged recipe, or a YAML file. Left out: the list.", metavar="RECIPE")
    ] = None,
    set_: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run's checkpoints and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the time that it takes.")] = False,
    all_: help_all(lambda: describe(describe_settings(TrainConfig))) = False,  # type: ignore[valid-type]
) -> None:
    """Train a draft head for a target, from the target's own answers.

    Stop it at any time: the same command goes on from the last checkpoint.
    """
    if recipe is None:
        list_recipes()
        return
    train_recipe(recipe, set_ or (), fresh=fresh, dry_run=dry_run)


def list_recipes() -> None:
    """Prints the packaged recipes with their descriptions."""
    for name, description in recipes().items():
        out().print(f"{name:24}{description}", markup=False)


def train_recipe(recipe: str | Path, overrides: Sequence[str], *, fresh: bool, dry_run: bool) -> None:
    """Trains from the last checkpoint on, or from the start with `fresh`."""
    config = load_recipe(recipe, overrides)
    check_files(config)
    import torch.distributed as dist

    from jetspec.engine.llm import choose_device
    from jetspec.files import check_replaceable
    from jetspec.models.head_folder import OWN_FILES
    from jetspec.train.checkpoint import claimed
    from jetspec.train.run import join_processes

    check_replaceable(Path(config.out) / "head", OWN_FILES)
    check_name(config.model)
    device = join_processes() or choose_device(config.device)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with claimed(Path(config.out)) if is_first and not dry_run else nullcontext():
        names = [override.partition("=")[0] for override in overrides]
        train(config, device, fresh=fresh, dry_run=dry_run, overridden=names)


def train(
    config: TrainConfig, device: torch.device, *, fresh: bool, dry_run: bool, overridden: Sequence[str] = ()
) -> None:
    """Trains in a folder that no other process uses. `overridden` names the settings of the command line."""
    from jetspec.engine.llm import choose_dtype
    from jetspec.models.weights import load_target
    from jetspec.train.run import ROWS_FILE, make_trainer

    with working(f"Loading {config.model}"):
        target = load_target(config.model, choose_dtype(config.dtype, device), device)
    trainer = make_trainer(config, target.decoder, listed=None if dry_run else Path(config.out) / ROWS_FILE)
    if config.score is not False and trainer.validation is not None:
        trainer.score = lambda head: score_head(target, head, asks_of(trainer.decoded_documents))
    if fresh and trainer.rank == 0 and not dry_run:
        shutil.rmtree(Path(config.out) / "checkpoints", ignore_errors=True)
    step = 0 if fresh else trainer.resume(overridden)
    if trainer.rank == 0:
        show_plan(config, trainer, step)
    if dry_run:
        show_time(config, trainer)
        return
    try:
        trainer.run()
    except KeyboardInterrupt:
        if trainer.rank == 0:
            note(where_it_stopped(trainer))
        raise
    if trainer.rank == 0:
        note(f"The head is in {Path(config.out) / 'head'}")


def asks_of(documents: Sequence[Document]) -> list[Ask]:
    """The prompt and length of every answer in some documents."""
    from jetspec.data.corpus import answer_spans

    return [
        (document.tokens[:start].tolist(), end - start)
        for document in documents
        for start, end in answer_spans(document)
    ]


def score_head(target: Target, head: Head, asks: Sequence[Ask]) -> dict[str, float]:
    """Tokens per round of a chain and of a tree when the engine decodes with this head.

    Graph capture would take longer than these few rounds.
    """
    from jetspec.engine.engine import Engine

    depth = head.head_config.depth
    trees = {"chain": TreeConfig(budget=depth + 1, width=1), "tree_64": TreeConfig(budget=64)}
    longest = max(len(prompt) + count for prompt, count in asks)
    scores = {}
    for name, tree in trees.items():
        config = EngineConfig(max_batch=len(asks), max_len=longest, cache_gb=1, execution="eager")
        engine = Engine(target.decoder, head, drafter="head", tree=tree, config=config, eos_tokens=target.eos_tokens)
        for prompt, count in asks:
            engine.add(prompt, SamplingParams(max_tokens=count))
        tokens = rounds = 0
        while engine.has_work:
            for update in engine.step():
                tokens, rounds = tokens + len(update.token_ids), rounds + 1
        scores[name] = tokens / rounds
    return scores


def show_plan(config: TrainConfig, trainer: Trainer, step: int) -> None:
    """Prints the size of the run before it starts."""
    size = sum(p.numel() for p in trainer.parameters)
    tokens = sum(len(document.tokens) for document in trainer.data.documents)
    rows = config.rows * config.accumulate * trainer.world
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("target", config.model)
    table.add_row("data", f"{len(trainer.data.documents):,} conversations, {tokens:,} tokens per pass")
    kind = "an EAGLE-3" if config.head.kind == "eagle3" else "a causal" if config.head.causal else "a bidirectional"
    table.add_row("trained", f"{size:,} weights of {kind} head")
    table.add_row("step", f"{rows} rows of {config.row_len} tokens, {config.anchors} {config.head.drafts} each")
    table.add_row(
        "steps", f"{config.steps:,}, {config.steps * rows / trainer.data.rows_per_pass:.1f} passes over the data"
    )
    if config.minutes is not None:
        table.add_row("minutes", f"{config.minutes:g} at most, {trainer.limit.used_s / 60:.1f} of them used")
    table.add_row("runs on", runs_on(trainer))
    table.add_row("starts at", f"step {step}" if step else "the beginning")
    table.add_row("writes to", config.out)
    err().print(table)


def runs_on(trainer: Trainer) -> str:
    """The device: a machine whose GPU is unusable would train on its processor for days."""
    import torch

    name = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "the processor, no GPU"
    processes = f", {trainer.world} processes" if trainer.world > 1 else ""
    return f"{name}, {str(trainer.target.embedding.dtype).removeprefix('torch.')}{processes}"


@dataclass(frozen=True)
class Part:
    """A repeated part of a run."""

    name: str
    seconds: float
    times: int


def show_time(config: TrainConfig, trainer: Trainer) -> None:
    """Prints the expected time of the run, from a few steps of each part. Their results are discarded."""
    from jetspec.train.parallel import frozen_copy

    steps_left = max(config.steps - trainer.step, 0)
    trainer.train_step()
    parts = [Part("step", seconds_of(trainer, trainer.train_step, 2), steps_left)]
    if trainer.validation is not None:
        seconds = seconds_of(trainer, lambda: (trainer.validate(), trainer.tree_lengths()))
        parts.append(Part("validation", seconds, -(-steps_left // config.validate_every)))
    head = frozen_copy(trainer.head, trainer.target.embedding.dtype)
    if trainer.rank > 0:
        return
    if (score := trainer.score) is not None:
        seconds = seconds_of(trainer, lambda: score(head))
        parts.append(Part("checkpoint decoded", seconds, -(-steps_left // config.save_every)))
    note(time_left(parts, config.minutes, trainer.limit.used_s / 60))


def seconds_of(trainer: Trainer, run: Callable[[], object], times: int = 1) -> float:
    import torch

    began = time.perf_counter()
    for _ in range(times):
        run()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def time_left(parts: Sequence[Part], limit: float | None, used: float) -> str:
    """The time of all parts, at most the rest of a limit in minutes."""
    minutes = sum(part.seconds * part.times for part in parts) / 60
    if limit is not None:
        minutes = min(minutes, max(limit - used, 0.0))
    each = ", ".join(f"{part.seconds:.2f} s per {part.name}" for part in parts)
    return f"{each}; {duration(60 * minutes)} for what is left. Nothing was written."


def where_it_stopped(trainer: Trainer) -> str:
    from jetspec.train.checkpoint import checkpoints, step_of

    saved = checkpoints(trainer.folder / "checkpoints")
    last = f"the last checkpoint is of step {step_of(saved[-1])}" if saved else "there is no checkpoint yet"
    return f"stopped at step {trainer.step}; {last}"
