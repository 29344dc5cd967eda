"""Stopping and going on as if nothing had happened. Tensors in safetensors, the rest in JSON, nothing pickled."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jetspec.train.parallel import split_like, whole

Numbers = list[dict[str, dict[str, float]]]
"""Per optimizer and parameter, the state that is no tensor."""


def run_state(head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Numbers]:
    """All that a run needs to go on, on the host. Weights that are split are gathered, so all processes must ask."""
    tensors, numbers = optimizer_state(head, optimizers)
    weights = {f"head.{name}": _on_host(p) for name, p in head.named_parameters()}
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
        save_file(tensors, draft / "state.safetensors")
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


def load_checkpoint(path: Path, head: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Restore weights and optimizers in place; returns what was saved beside them."""
    try:
        tensors, raw = load_file(path / "state.safetensors"), json.loads((path / "state.json").read_text())
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} is damaged ({error}); delete it to go on from the one before"
        ) from error
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(split_like(tensors[f"head.{name}"], parameter))
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
