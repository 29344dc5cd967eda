"""Cost of drafting a token beside a verify pass: the coefficient c of the speedup formula, by context and depth.

    c = t_draft / (k * t_verify)

for a chain of k drafts from one pass of a head, verified in one pass of the target. Random weights take as long as real
ones, so a shape is enough.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.estimate import to_record
from benchmarks.recipe import DtypeName, distinct
from benchmarks.results import ROWS_FILE, RUN_FILE
from benchmarks.rows import KeyedFile, kept_settings, measured_by
from jetspec.config import TreeConfig
from jetspec.engine.llm import choose_device, choose_dtype
from jetspec.profile.rounds import Decoding, StandingRound, Workload
from jetspec.profile.shapes import open_head, open_target, shape_of
from jetspec.progress import progress_bar
from jetspec.record import hardware, package_versions, shown
from jetspec.settings import at_least
from jetspec.train.config import HeadShape

TIMED = ("draft", "build", "verify")
"""Stages up to the last timed one; each needs the output of the one before."""


@dataclass(frozen=True)
class CostConfig:
    """A recipe with `measure: costs`."""

    shape: str = "smollm2-135m"
    """Shape of `jetspec profile`, or of a model."""
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Drafts in one pass."""
    head_layers: int = 5
    rounds: int = 50
    """Calls per timing."""
    repeats: int = 3
    device: str = "auto"
    dtype: DtypeName = "auto"

    def __post_init__(self) -> None:
        for name in ("head_layers", "rounds", "repeats"):
            at_least(1, name, getattr(self, name))
        for name in ("contexts", "depths"):
            distinct(name, getattr(self, name))
        for context in self.contexts:
            at_least(1, "a context", context)
        for depth in self.depths:
            TreeConfig(depth=depth)


def measure_costs(config: CostConfig, folder: Path, fresh: bool = False, progress: bool = False) -> dict[str, Any]:
    """Record of a row per context and depth. Existing rows are not timed again, unless `fresh` deletes them."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    where = {"dtype": str(dtype).removeprefix("torch."), "device": device.type}
    settings = {  # all that rows depend on, beside their keys
        "shape": asdict(shape_of(config.shape)),
        **where,
        "hardware": hardware(),
        "versions": package_versions(),
        **{name: getattr(config, name) for name in ("head_layers", "rounds", "repeats")},
    }
    with closing(KeyedFile(folder / ROWS_FILE, itemgetter("context", "depth"), fresh)) as file:
        wanted = [(context, depth) for depth, context in product(config.depths, config.contexts)]
        todo = [chain for chain in wanted if chain not in file.rows]
        has_rows = bool(file.rows)
        file.begin(settings, lambda _: has_rows, is_measured=bool(todo))
        target = open_target(config.shape, "random", dtype, device) if todo else None
        for context, depth in progress_bar(todo, desc="timing chains", unit="chain", disable=not (progress and todo)):
            file.append(measure_cost(target, config, context, depth))
        costs, runs = [file.rows[chain] for chain in wanted], kept_settings(folder / RUN_FILE)["runs"]
    return {
        **measured_by(costs, runs),
        "model": shown(config.shape),
        **where,
        "recipe": {**asdict(config), "shape": shown(config.shape)},
        "costs": costs,
        "runs": runs,
    }


@torch.inference_mode()
def measure_cost(target: Any, config: CostConfig, context: int, depth: int) -> dict[str, Any]:
    head = open_head(target, None, HeadShape(num_layers=config.head_layers, block_size=depth + 1))
    chain = TreeConfig(budget=depth + 1, width=1, ngrams=False)
    still = StandingRound(Decoding(target, head, chain, Workload(context, rounds=1)).engine)
    times = [still.stages_ms(config.rounds, TIMED) for _ in range(config.repeats)]
    return {
        "context": context,
        "depth": depth,
        "draft_ms": to_record([time["draft"] for time in times]),
        "verify_ms": to_record([time["verify"] for time in times]),
        "c_percent": to_record([100 * time["draft"] / (depth * time["verify"]) for time in times]),
    }
