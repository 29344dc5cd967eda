"""Checkpoints: tensors in safetensors, the rest in JSON, nothing pickled. A resumed run equals an unbroken one."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from jetspec.files import lock, whole_folder
from jetspec.models.tensor_files import write_tensors
from jetspec.train.config import DataFile, TrainConfig
from jetspec.train.parallel import split_like, whole

Numbers = list[dict[str, dict[str, float]]]
"""Scalar state per optimizer and parameter."""
FREE = {
    *("out", "device", "parallel", "compile", "anchors_at_once", "minutes"),
    *("log_every", "validate_every", "save_every", "keep", "score"),
}
"""Settings that may change when a run is resumed. `steps` may as an override. Of `BATCH` only the product is fixed."""
BATCH = ("rows", "accumulate", "processes")
FILES = ("state.safetensors", "state.json")
"""Files of a checkpoint."""
STATE = {"step": int, "optimizers": list, "config": dict, "time": dict}
"""Required content of `state.json`."""


def run_state(head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Numbers]:
    """Weights and optimizer state on the host. A collective: sharded tensors are gathered from all processes."""

    def on_host(x: Tensor) -> Tensor:
        return whole(x.detach()).cpu().contiguous()

    tensors = {f"head.{name}": on_host(x) for name, x in head.state_dict().items()}
    numbers: Numbers = [{} for _ in optimizers]
    name_of = {id(p): name for name, p in head.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            name = name_of[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    tensors[f"optimizer.{i}.{name}.{key}"] = on_host(value)
                else:
                    numbers[i].setdefault(name, {})[key] = float(value)
    return tensors, numbers


def save_checkpoint(
    folder: Path, step: int, state: tuple[dict[str, Tensor], Numbers], keep: int, extra: dict[str, Any]
) -> None:
    """Writes `folder/step-N`, whole or not at all, and removes all but the newest `keep` checkpoints."""
    tensors, numbers = state
    with whole_folder(folder / f"step-{step:07d}", FILES) as draft:
        write_tensors(tensors, draft / FILES[0])
        (draft / FILES[1]).write_text(json.dumps({"step": step, "optimizers": numbers, **extra}, indent=1))
        for name in FILES:
            with (draft / name).open("rb") as handle:
                os.fsync(handle.fileno())
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Locks the folder of a run, and removes the incomplete output of a killed one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        lock(file, f"another run is training into {folder}; wait for it or choose another out")
        for pattern in ("checkpoints/.*", ".head.*.new", ".head.*.old"):
            for left in folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        yield


def settings(config: TrainConfig, processes: int) -> dict[str, Any]:
    """A recipe in the format of a checkpoint."""
    files = [asdict(file) for file in config.files]
    return json.loads(json.dumps(asdict(config) | {"data": files, "processes": processes}))


def check_same(saved: dict[str, Any], now: dict[str, Any], out: str, overridden: Collection[str] = ()) -> None:
    """Refuses to resume a run with settings that change its result. Settings that the checkpoint lacks pass.

    `overridden` are the names of settings given as overrides: a number of steps among them may differ.
    """
    before, after = _fixed(saved), _fixed(now)
    changed = [name for name in before if name in after and before[name] != after[name]]
    if "steps" in overridden and "steps" in changed:
        changed.remove("steps")
    if changed:
        values = {n: [x if isinstance(x, str) else json.dumps(x) for x in (before[n], after[n])] for n in changed}
        words = " and ".join(f"{name} {old}, not {new}" for name, (old, new) in values.items())
        steps = f"--set steps={now['steps']} to change the length, or " if changed == ["steps"] else ""
        raise ValueError(f"the run in {out} was made with {words}; use {steps}--fresh or another out")


def _fixed(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings that determine the result of a run, by their names in a recipe."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": part for key, part in value.items()}
        elif name == "data":
            files = (DataFile(item) if isinstance(item, str) else DataFile(**item) for item in value)
            found[name] = [(str(Path(file.path).absolute()), file.times) for file in files]
        elif name not in FREE and name not in BATCH:
            found[name] = value
    found[" x ".join(BATCH)] = math.prod(raw.get(name, 1) for name in BATCH)
    return found


def load_checkpoint(
    path: Path,
    head: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: TrainConfig,
    processes: int,
    overridden: Collection[str] = (),
) -> dict[str, Any]:
    """Restores weights and optimizers in place, if the recipe is unchanged; returns the content of `state.json`."""
    try:
        tensors, raw = load_file(path / FILES[0]), json.loads((path / FILES[1]).read_text())
        if lacking := [name for name, kind in STATE.items() if not isinstance(raw.get(name), kind)]:
            raise ValueError(f"state.json lacks {', '.join(lacking)}")
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} is damaged ({error}); delete it to resume from the one before"
        ) from error
    check_same(raw["config"], settings(config, processes), config.out, overridden)
    with torch.no_grad():
        for name, value in head.state_dict().items():
            value.copy_(split_like(tensors[f"head.{name}"], value))
    for i, optimizer in enumerate(optimizers):
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in head.named_parameters():
            prefix = f"optimizer.{i}.{name}."
            state: dict[str, Any] = {
                key.removeprefix(prefix): split_like(value, parameter)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            state |= {key: torch.tensor(value) for key, value in raw["optimizers"][i].get(name, {}).items()}
            if state and id(parameter) in mine:
                optimizer.state[parameter] = state
    return raw
