"""How fast a recipe trains, and how much memory it takes, with batches of several shapes. Writes a record.

python -m benchmarks.check_training --recipe jetspec/recipes/smollm2_135m.yaml --shapes 64x256x32,32x1024x128 \\
    --out speed.json

A shape is rows x tokens of a row x anchors of a row. Shapes that differ in anchors alone show that memory does not grow
with these. A pass is captured when it first has a size; steps that capture one are not timed, but all taken again.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from jetspec.data.corpus import PackedData
from jetspec.models.decoder import Decoder
from jetspec.models.weights import load_target
from jetspec.profile.timing import without_capture
from jetspec.record import current_commit, write_record
from jetspec.train.config import TrainConfig, load_recipe
from jetspec.train.loss import DraftLoss
from jetspec.train.run import read_data, start_head
from jetspec.train.trainer import Trainer

SHAPES = "64x256x32,64x512x32,32x1024x128,32x1024x256,32x1024x512"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of it")
    parser.add_argument("--shapes", default=SHAPES, help="rows x tokens x anchors to try, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, after the warm-up")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    commit, config = current_commit(), load_recipe(args.recipe, tuple(args.set))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(config.model, dtype, device).decoder
    found = []
    for shape in args.shapes.split(","):
        rows, row_len, anchors = map(int, shape.split("x"))
        tried = replace(config, rows=rows, row_len=row_len, anchors=anchors, steps=args.warmup + args.steps)
        found.append(measure(tried, target, args.warmup))
        print(found[-1], flush=True)
        write_record(args.out, {"timed_steps": args.steps, "shapes": found}, commit)


def measure(config: TrainConfig, target: Decoder, warmup: int) -> dict[str, Any]:
    """Drafted positions per second, all of them and those that had a label, and the most memory that was held."""
    device = target.embedding.device
    documents = read_data(config, target.config.vocab_size, start_head(config, target))
    data = PackedData(documents, config.row_len, config.seed)
    gc.collect()  # an earlier trainer is a cycle: its memory would count here
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, target, start_head(config, target).to(device), data)
    for _ in range(warmup):
        trainer.train_step()
    steps, label = config.steps - warmup, f"{config.rows} x {config.row_len} x {config.anchors}"
    sums, seconds = without_capture(trainer.passes, lambda: take_steps(trainer, steps, label))
    positions = sum(float(part.reach_D.sum()) for part in sums)
    return {
        "rows": config.rows,
        "row_len": config.row_len,
        "anchors": config.anchors,
        "anchors_at_once": min(config.anchors, config.anchors_at_once),
        "step_ms": seconds / len(sums) * 1e3,
        "positions_per_s": positions / seconds,
        "drafted_per_s": len(sums) * config.rows * config.anchors * sums[0].reach_D.numel() / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def take_steps(trainer: Trainer, steps: int, label: str) -> tuple[list[DraftLoss], float]:
    """And the seconds that they took."""
    wait(trainer.device)
    began = time.perf_counter()
    sums = [trainer.train_step() for _ in tqdm(range(steps), label, unit="step")]
    wait(trainer.device)
    return sums, time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
