"""Stopping and going on as if nothing had happened. Tensors in safetensors, the rest in JSON, nothing pickled."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from jetspec.files import lock
from jetspec.models.tensor_files import write_tensors
from jetspec.train.config import DataFile, TrainConfig
from jetspec.train.parallel import split_like, whole

Numbers = list[dict[str, dict[str, float]]]
"""Per optimizer and parameter, the state that is no tensor."""
FREE = {
    *("out", "device", "parallel", "compile", "anchors_at_once", "steps", "minutes"),
    *("log_every", "validate_every", "save_every", "keep", "score"),
}
"""Settings that may change between the parts of a run. Of those below, only the product has to stay."""
BATCH = ("rows", "accumulate", "processes")
STATE = {"step": int, "optimizers": list, "config": dict, "time": dict}
"""What `state.json` must hold for a run to go on."""


def run_state(head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Numbers]:
    """All that a run needs to go on, on the host. Weights that are split are gathered, so all processes must ask."""
    tensors, numbers = optimizer_state(head, optimizers)
    weights = {f"head.{name}": _on_host(x) for name, x in head.state_dict().items()}
    return weights | tensors, numbers


def save_checkpoint(
    folder: Path, step: int, state: tuple[dict[str, Tensor], Numbers], keep: int, extra: dict[str, Any]
) -> Path:
    """Write `folder/step-N` whole or not at all, and drop all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final, draft = folder / f"step-{step:07d}", folder / f".writing-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        tensors, numbers = state
        write_tensors(tensors, draft / "state.safetensors")
        (draft / "state.json").write_text(json.dumps({"step": step, "optimizers": numbers, **extra}, indent=1))
        for file in draft.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """One run at a time in a folder. What a killed one was writing is cleared away."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        lock(file, f"another run is training into {folder}; wait for it or choose another out")
        for pattern in ("checkpoints/.writing-*", ".head.*.new", ".head.*.old"):
            for left in folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        yield


def settings(config: TrainConfig, processes: int) -> dict[str, Any]:
    """A recipe as it is kept in a checkpoint."""
    files = [asdict(file) for file in config.files]
    return json.loads(json.dumps(asdict(config) | {"data": files, "processes": processes}))


def check_same(saved: dict[str, Any], now: dict[str, Any], out: str) -> None:
    """Refuse to go on with settings that would have made another run. Of settings unknown back then nothing is said."""
    before, after = _fixed(saved), _fixed(now)
    changed = [name for name in before if name in after and before[name] != after[name]]
    if changed:
        words = " and ".join(f"{name} {_said(before[name])}, not {_said(after[name])}" for name in changed)
        raise ValueError(f"the run in {out} was made with {words}; use --fresh or another out")


def _fixed(raw: dict[str, Any]) -> dict[str, Any]:
    """What has to stay, by its name in a recipe."""
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


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def load_checkpoint(
    path: Path, head: nn.Module, optimizers: list[torch.optim.Optimizer], config: TrainConfig, processes: int
) -> dict[str, Any]:
    """Restore weights and optimizers in place, if the recipe is still the same; returns what was saved beside them."""
    try:
        tensors, raw = load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text())
        if lacking := [name for name, kind in STATE.items() if not isinstance(raw.get(name), kind)]:
            raise ValueError(f"state.json lacks {', '.join(lacking)}")
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} is damaged ({error}); delete it to go on from the one before"
        ) from error
    check_same(raw["config"], settings(config, processes), config.out)
    with torch.no_grad():
        for name, value in head.state_dict().items():
            value.copy_(split_like(tensors[f"head.{name}"], value))
    restore_optimizers(head, optimizers, tensors, raw["optimizers"])
    return raw


def optimizer_state(head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Numbers]:
    """State by the name of the parameter: tensors, and numbers apart."""
    name_of = {id(p): name for name, p in head.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: Numbers = []
    for i, optimizer in enumerate(optimizers):
        numbers.append({})
        for parameter, state in optimizer.state.items():
            name = name_of[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    tensors[f"optimizer.{i}.{name}.{key}"] = _on_host(value)
                else:
                    numbers[i].setdefault(name, {})[key] = float(value)
    return tensors, numbers


def restore_optimizers(
    head: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    tensors: dict[str, Tensor],
    numbers: Numbers,
) -> None:
    for i, optimizer in enumerate(optimizers):
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in head.named_parameters():
            prefix = f"optimizer.{i}.{name}."
            state: dict[str, Any] = {
                key.removeprefix(prefix): split_like(value, parameter)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            state |= {key: torch.tensor(value) for key, value in numbers[i].get(name, {}).items()}
            if state and id(parameter) in mine:
                optimizer.state[parameter] = state


def _on_host(x: Tensor) -> Tensor:
    return whole(x.detach()).cpu().contiguous()
