"""`training`: speed and memory of training with batches of several shapes."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from benchmarks.options import RecordFile, Settings, TrainRecipe, examples
from jetspec.data.corpus import PackedData
from jetspec.models.decoder import Decoder
from jetspec.models.weights import load_target
from jetspec.profile.timing import Moment, without_capture
from jetspec.progress import progress_bar
from jetspec.record import current_commit, write_record
from jetspec.train.config import TrainConfig, load_recipe
from jetspec.train.loss import DraftLoss
from jetspec.train.run import read_data, start_head
from jetspec.train.trainer import Trainer

SHAPES = "64x256x32,64x512x32,32x1024x128,32x1024x256,32x1024x512"
EPILOG = examples("training --recipe jetspec/recipes/smollm2_135m.yaml --shapes 64x256x32,32x1024x128 --out speed.json")


def training(
    recipe: TrainRecipe,
    out: RecordFile,
    set_: Settings = [],  # noqa: B006
    shapes: Annotated[str, typer.Option(help="ROWSxTOKENSxANCHORS of a row, separated by commas.")] = SHAPES,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after the warm-up.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the warm-up.")] = 4,
) -> None:
    """Time training steps with batches of several shapes, and measure their memory.

    Shapes that differ in anchors alone show that memory does not grow with these.
    """
    commit, config = current_commit(), load_recipe(recipe, tuple(set_))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(config.model, dtype, device).decoder
    found = []
    for shape in shapes.split(","):
        rows, row_len, anchors = map(int, shape.split("x"))
        tried = replace(config, rows=rows, row_len=row_len, anchors=anchors, steps=warmup + steps)
        found.append(measure(tried, target, warmup))
        print(found[-1], flush=True)
        write_record(out, {"timed_steps": steps, "shapes": found}, commit)


def measure(config: TrainConfig, target: Decoder, warmup: int) -> dict[str, Any]:
    """Drafted positions per second, all and those with a label, and peak memory. Steps that capture are repeated."""
    device = target.embedding.device
    documents = read_data(config, target.config.vocab_size, start_head(config, target))
    data = PackedData(documents, config.row_len, config.seed)
    gc.collect()  # an earlier trainer is a reference cycle: its memory would count here
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, target, start_head(config, target).to(device), data)
    for _ in range(warmup):
        trainer.train_step()
    steps, label = config.steps - warmup, f"{config.rows} x {config.row_len} x {config.anchors}"

    def timed() -> tuple[list[DraftLoss], float]:
        began = Moment(device)
        losses = [trainer.train_step() for _ in progress_bar(range(steps), desc=label, unit="step")]
        return losses, began.ms_until(Moment(device)) / 1e3

    sums, seconds = without_capture(trainer.passes, timed)
    positions = sum(float(part.reach_D.sum()) for part in sums)
    return {
        **{name: getattr(config, name) for name in ("rows", "row_len", "anchors")},
        "anchors_at_once": min(config.anchors, config.anchors_at_once),
        "step_ms": seconds / len(sums) * 1e3,
        "positions_per_s": positions / seconds,
        "drafted_per_s": len(sums) * config.rows * config.anchors * sums[0].reach_D.numel() / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
