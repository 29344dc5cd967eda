"""How fast a recipe trains, and how much memory it takes, against the number of anchors. Writes a record.

python -m scripts.check_training --recipe recipes/smollm2_135m.yaml --anchors 128,256,512 --out speed.json
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

from jetspec.models.decoder import Decoder
from jetspec.models.weights import load_target
from jetspec.record import current_commit, write_record
from jetspec.train.config import TrainConfig, load_recipe
from jetspec.train.data import PackedData
from jetspec.train.run import read_data, start_head
from jetspec.train.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of it")
    parser.add_argument("--anchors", default="128,256,512", help="anchors per row to try, separated by commas")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, after the warm-up")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    commit, config = current_commit(), load_recipe(args.recipe, tuple(args.set))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(config.model, dtype, device).decoder
    mask_token = start_head(config, target).head_config.mask_token
    documents = read_data(config, target.config.vocab_size, mask_token)
    data = PackedData(documents, config.row_len, config.seed)
    rows = []
    for anchors in map(int, args.anchors.split(",")):
        tried = replace(config, anchors=anchors, steps=args.warmup + args.steps)
        rows.append(measure(tried, target, data, args.warmup))
        print(rows[-1], flush=True)
    shape = {"rows": config.rows, "row_len": config.row_len, "anchors_at_once": config.anchors_at_once}
    write_record(args.out, {**shape, "timed_steps": args.steps, "speeds": rows}, commit)


def measure(config: TrainConfig, target: Decoder, data: PackedData, warmup: int) -> dict[str, Any]:
    """Draft positions that had a label, per second, and the most memory that was held."""
    device = target.embedding.device
    gc.collect()  # an earlier trainer is a cycle: its memory would count here
    trainer = Trainer(config, target, start_head(config, target).to(device), data)
    for _ in range(warmup):
        trainer.train_step()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    sums = [trainer.train_step() for _ in tqdm(range(config.steps - warmup), f"{config.anchors} anchors", unit="step")]
    wait(device)
    seconds = time.perf_counter() - began
    positions = sum(float(part.reach_D.sum()) for part in sums)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "anchors": config.anchors,
        "step_ms": seconds / len(sums) * 1e3,
        "positions_per_s": positions / seconds,
        "peak_bytes": peak,
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
