"""The command line that starts vLLM with trees. Nothing here imports vLLM."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from typing import NoReturn

from jetspec.config import TreeConfig
from jetspec.integrations.vllm import OPTIONS, WORKER
from jetspec.integrations.vllm.options import head_refusals, say
from jetspec.models.head_format import read_config
from jetspec.models.hub import resolve, shipped_head

CAPTURED_TREES = 16
"""Requests that decode together in a captured pass; larger batches run as they are written."""


def serve_command(model: str, head: str, tree: TreeConfig, more: Sequence[str] = ()) -> list[str]:
    """`vllm serve` for a target, which vLLM finds by itself, and a head, with options of vLLM's own behind."""
    folder = shipped_head(head) or resolve(head)
    say(head_refusals(read_config(folder), tree))
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": tree.budget - 1}
    shape: dict[str, object] = {"width": tree.width}
    if tree.depth is not None:
        shape["depth"] = tree.depth
    return [
        *("vllm", "serve", model),
        *("--worker-cls", WORKER),
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps({OPTIONS: shape})),
        *_graphs(tree, more),
        *more,
    ]


def _graphs(tree: TreeConfig, more: Sequence[str]) -> list[str]:
    """vLLM captures passes of up to 512 rows unless told otherwise, which is not many trees."""
    if any(word.startswith(("--max-cudagraph", "--cudagraph", "--compilation-config", "-O")) for word in more):
        return []
    return ["--max-cudagraph-capture-size", str(max(512, CAPTURED_TREES * tree.budget))]


def run_command(command: list[str]) -> NoReturn:
    """Become vLLM."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no {command[0]} on the path: pip install 'jetspec[vllm]'")
    os.execvp(command[0], command)
