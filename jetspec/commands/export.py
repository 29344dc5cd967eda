"""`jetspec export`: a head as other engines want it, or a model as a Hugging Face folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Literal

import torch

from jetspec.commands.screen import err, out, working
from jetspec.models.describe import describe
from jetspec.models.export import Engine, export_head
from jetspec.models.head_format import load_head
from jetspec.models.hub import shipped_head
from jetspec.models.target_format import save_target
from jetspec.models.weights import load_target

Format = Literal["hf", "vllm", "sglang", "speculators"]


def export(name: str, folder: Path, format: Format, dtype: torch.dtype, target: str | None) -> None:
    """Write `name` as `format` wants it, and say how the result is started."""
    engine: Engine | None = None if format == "hf" else format
    own_head = shipped_head(name) if engine else None
    if own_head is None and describe(name)["kind"] == "target":
        _export_target(name, folder, engine, dtype)
    else:
        _export_head(str(own_head or name), folder, engine, dtype, target)


def _export_target(name: str, folder: Path, engine: Engine | None, dtype: torch.dtype) -> None:
    if engine is not None:
        raise ValueError(f"{name} is a model, not a head: {engine} loads it as it is written with --format hf")
    with working(f"Writing {folder}"):
        save_target(load_target(name, torch.float32), folder, dtype)
    out().print(str(folder), markup=False)


def _export_head(name: str, folder: Path, engine: Engine | None, dtype: torch.dtype, target: str | None) -> None:
    head = load_head(name, dtype=torch.float32)
    if engine and head.edge is not None:
        err().print("the edge term stays behind: no other engine knows it", style="dim")
    with working(f"Writing {folder}"):
        export_head(head, folder, engine, dtype, target)
    out().print(str(folder), markup=False)
    if engine:
        err().print(_start(engine, folder, head.head_config.depth, target or "TARGET"), style="dim", markup=False)


def _start(engine: Engine, folder: Path, depth: int, target: str) -> str:
    """The command that drafts chains with what was written."""
    if engine == "speculators":
        return shlex.join(["vllm", "serve", str(folder)])
    if engine == "sglang":
        drafts = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder)]
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *drafts])
    drafting = {"method": "dflash", "model": str(folder), "num_speculative_tokens": depth}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(drafting)])
