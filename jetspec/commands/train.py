"""`jetspec train`: a recipe, its run, and how its checkpoints decode."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
        for name, description in recipes().items():
            out().print(f"{name:24}{description}", markup=False)
        return
    train_recipe(recipe, set_ or (), fresh=fresh, dry_run=dry_run)


def train_recipe(recipe: str | Path, overrides: Sequence[str], *, fresh: bool, dry_run: bool) -> None:
    """Trains from the last checkpoint on, or from the start with `fresh`."""
    config = load_recipe(recipe, overrides)
    check_files(config)
    import torch.distributed as dist

    from jetspec.engine.llm import choose_device, choose_dtype
    from jetspec.files import check_replaceable
    from jetspec.models.head_folder import OWN_FILES
    from jetspec.models.weights import load_target
    from jetspec.train.checkpoint import checkpoints, claimed, step_of
    from jetspec.train.run import ROWS_FILE, join_processes, make_trainer

    check_replaceable(Path(config.out) / "head", OWN_FILES)
    check_name(config.model)
    device = join_processes() or choose_device(config.device)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with claimed(Path(config.out)) if is_first and not dry_run else nullcontext():
        with working(f"Loading {config.model}"):
            target = load_target(config.model, choose_dtype(config.dtype, device), device)
        trainer = make_trainer(config, target.decoder, listed=None if dry_run else Path(config.out) / ROWS_FILE)
        if config.score is not False and trainer.validation is not None:
            trainer.score = lambda head: score_head(target, head, asks_of(trainer.decoded_documents))
        if fresh and trainer.rank == 0 and not dry_run:
            shutil.rmtree(Path(config.out) / "checkpoints", ignore_errors=True)
        step = 0 if fresh else trainer.resume([override.partition("=")[0] for override in overrides])
        if trainer.rank == 0:
            show_plan(config, trainer, step)
        if dry_run:
            show_time(config, trainer)
            return
        try:
            trainer.run()
        except KeyboardInterrupt:
            if trainer.rank == 0:
                saved = checkpoints(trainer.folder / "checkpoints")
                last = f"the last checkpoint is of step {step_of(saved[-1])}" if saved else "there is no checkpoint yet"
                note(f"stopped at step {trainer.step}; {last}")
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
    alone = TreeConfig(ngrams=False)
    trees = {"chain": replace(alone, budget=depth + 1, width=1), "tree_64": replace(alone, budget=64)}
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
    import torch
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
    # Without a usable GPU the run would take days.
    device = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "the processor, no GPU"
    processes = f", {trainer.world} processes" if trainer.world > 1 else ""
    table.add_row("runs on", f"{device}, {str(trainer.target.embedding.dtype).removeprefix('torch.')}{processes}")
    table.add_row("starts at", f"step {step}" if step else "the beginning")
    table.add_row("writes to", config.out)
    err().print(table)


def show_time(config: TrainConfig, trainer: Trainer) -> None:
    """Prints the expected time of the run, from a few steps of each part. Their results are discarded."""
    from jetspec.train.parallel import frozen_copy

    steps_left = max(config.steps - trainer.step, 0)
    trainer.train_step()
    parts = [("step", seconds_of(trainer, trainer.train_step, 2), steps_left)]
    if trainer.validation is not None:
        seconds = seconds_of(trainer, lambda: (trainer.validate(), trainer.tree_lengths()))
        parts.append(("validation", seconds, -(-steps_left // config.validate_every)))
    head = frozen_copy(trainer.head, trainer.target.embedding.dtype)
    if trainer.rank > 0:
        return
    if (score := trainer.score) is not None:
        seconds = seconds_of(trainer, lambda: score(head))
        parts.append(("checkpoint decoded", seconds, -(-steps_left // config.save_every)))
    left_s = sum(seconds * times for _, seconds, times in parts)
    if config.minutes is not None:
        left_s = min(left_s, max(60 * config.minutes - trainer.limit.used_s, 0.0))
    each = ", ".join(f"{seconds:.2f} s per {name}" for name, seconds, _ in parts)
    note(f"{each}; {duration(left_s)} for what is left. Nothing was written.")


def seconds_of(trainer: Trainer, run: Callable[[], object], times: int = 1) -> float:
    import torch

    began = time.perf_counter()
    for _ in range(times):
        run()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
