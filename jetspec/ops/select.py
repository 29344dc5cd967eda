"""The table of implementations: which kernel serves an operation, and what that choice was measured to buy.

`select` returns the first row of an operation whose condition holds, otherwise the plain torch reference. Conditions
depend on `Facts` alone: data types, sizes, alignment and the device. No other module chooses an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Literal["auto", "triton", "reference"]

HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True)
class Device:
    """Properties of a device that choices and launch grids depend on."""

    type: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    """Bytes per multiprocessor."""

    @property
    def is_cuda(self) -> bool:
        return self.type == "cuda"


STAND_IN = Device("cpu", (9, 0), 132, 228 * 1024)
"""Properties of an H200, for kernels that are interpreted on a CPU or compiled without a GPU."""


@cache
def device_of(device: torch.device) -> Device:
    """Properties of a device, read once."""
    if device.type != "cuda":
        return STAND_IN
    found = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    return Device("cuda", capability, found.multi_processor_count, found.shared_memory_per_multiprocessor)


@dataclass(frozen=True)
class Facts:
    """Properties of a call that decide which kernel serves it."""

    device: Device
    dtype: torch.dtype
    one_dtype: bool = True
    """All inputs have that data type."""
    count: int = 0
    """Tokens of a list: of a top-k or of a shortlist."""
    rank: int = 0
    """Rank of an edge term."""
    rank_bytes: int = 0
    """Bytes of a number of its factors."""
    equal_distance: bool = True
    """Layers of a cache lie equally far apart."""


class Choice(NamedTuple):
    """One row of the table."""

    name: str
    kernel: str
    """`module:function`, in `jetspec.ops` where the module has no package. Imported when it is first chosen."""
    when: Callable[[Facts], bool]
    buys: str = ""
    """Share of a whole round that the row saves on an H200, from `benchmarks/kernel_choices.py`. Empty: not measured
    apart."""


def always(facts: Facts) -> bool:
    return True


def one_dtype(facts: Facts) -> bool:
    return facts.one_dtype


MAX_TOPK = 2048
"""Longest list that the top-k kernels return."""
MAX_RANK = {2: 512, 4: 128}
"""Highest rank of an edge term that the shortlist kernels take, by the bytes of a number: a program holds all of it."""


def _has_short_factors(facts: Facts) -> bool:
    return facts.count <= MAX_TOPK and facts.rank <= MAX_RANK.get(facts.rank_bytes, 0)


TABLE: dict[str, tuple[Choice, ...]] = {
    # Rows between the products of a layer
    "rms_norm": (Choice("rms_norm", "norm_rope_triton:rms_norm_triton", one_dtype),),
    "rope": (Choice("rope", "norm_rope_triton:rope_triton", always),),
    "rotate_qkv": (Choice("rotate_qkv", "norm_rope_triton:rotate_qkv_triton", one_dtype),),
    "rotate_store": (Choice("rotate_store", "norm_rope_triton:rotate_store_triton", one_dtype),),
    "rotate_store_layers": (
        Choice(
            "rotate_store_layers",
            "norm_rope_triton:rotate_store_layers_triton",
            lambda f: f.one_dtype and f.equal_distance,
            "SmolLM2 2 to 3 %",
        ),
    ),
    "swiglu": (Choice("swiglu", "swiglu_triton:swiglu_triton", always),),
    # KV cache
    "store_kv": (Choice("store_kv", "kv_write_triton:store_kv_triton", always),),
    "compact_kv": (Choice("compact_kv", "kv_write_triton:compact_kv_triton", always),),
    "compact_rows": (Choice("compact_rows", "kv_write_triton:compact_rows_triton", always),),
    "place": (Choice("place", "place_triton:place_triton", always, "SmolLM2 3 to 5 %"),),
    # Drafting
    "topk_logprob": (Choice("topk_logprob", "topk_logprob_triton:topk_logprob_triton", lambda f: f.count <= MAX_TOPK),),
    "shortlist": (Choice("shortlist", "shortlist_triton:shortlist_triton", _has_short_factors),),
    "build_tree": (Choice("build_tree", "jetspec.tree.build_triton:build_tree_triton", lambda f: f.count <= MAX_TOPK),),
    # Acceptance
    "choose_nodes": (Choice("choose_nodes", "jetspec.tree.sample_triton:choose_nodes_triton", always),),
    "accept": (Choice("accept", "jetspec.tree.accept:accept_by_nodes", always),),
    "walk": (Choice("walk", "jetspec.tree.accept_triton:accept_triton", always),),
    # Training
    "distill_loss": (Choice("distill_loss", "distill_loss_triton:distill_loss_triton", always),),
    # Host
    "copy_to_host": (Choice("copy_to_host", "transfer_triton:copy_to_host_triton", always),),
    "note_time": (Choice("note_time", "clock_triton:note_time_triton", always),),
}

FEATURES: tuple[Choice, ...] = (
    Choice(
        "overlap",
        "overlap_triton",
        lambda f: f.device.is_cuda and f.device.capability >= (9, 0),
        "SmolLM2 45 %; Qwen3-8B 8 %",
    ),
)
"""Features of kernels that serve several operations: a kernel asks `enabled` for them."""

_forced: Kernels = "auto"
_without: frozenset[str] = frozenset()


def select(operation: str, reference: Callable[P, R], *inputs: Tensor, **facts: Any) -> Callable[P, R]:
    """Returns the implementation of an operation for some inputs: a kernel of the signature of `reference`, or that.

    The first input tells the device and the data type; `facts` are further fields of `Facts`.
    """
    if not uses_kernel(*inputs):
        return reference
    first = inputs[0]
    same = all(x.dtype == first.dtype for x in inputs)
    found = _first(operation, Facts(device_of(first.device), first.dtype, same, **facts))
    return reference if found is None else found


def uses_kernel(*inputs: Tensor) -> bool:
    """Returns true where kernels may serve these inputs: on a GPU with triton, unless autograd needs a gradient, since
    kernels have no backward."""
    if _forced != "auto":
        return _forced == "triton"
    if not HAS_TRITON or not inputs[0].is_cuda:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def enabled(feature: str, device: torch.device) -> bool:
    """Returns true where a feature of kernels is used on a device."""
    return _enabled(feature, device_of(device))


@cache
def _enabled(feature: str, device: Device) -> bool:
    (row,) = (row for row in FEATURES if row.name == feature)
    return row.name not in _without and row.when(Facts(device, torch.bfloat16))


@cache
def _first(operation: str, facts: Facts) -> Callable[..., Any] | None:
    for row in TABLE[operation]:
        if row.name not in _without and row.when(facts):
            return _load(row.kernel, operation)
    return None


def _load(kernel: str, operation: str) -> Callable[..., Any]:
    module, name = kernel.format(operation=operation).split(":")
    found: Callable[..., Any] = attrgetter(name)(import_module(module if "." in module else f"jetspec.ops.{module}"))
    return found


def rows() -> dict[str, Choice]:
    """Rows of the table by name. A row may serve several operations."""
    return {row.name: row for choices in (*TABLE.values(), FEATURES) for row in choices}


@contextmanager
def force(kernels: Kernels) -> Iterator[None]:
    """Runs the references on a GPU, or the kernels on a CPU under Triton's interpreter."""
    global _forced
    before, _forced = _forced, kernels
    try:
        yield
    finally:
        _forced = before


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leaves rows of the table out, to measure what they buy."""
    if unknown := set(names) - rows().keys():
        raise ValueError(f"no row of the table is called {', '.join(sorted(unknown))}")
    before = _without
    _leave_out(before | set(names))
    try:
        yield
    finally:
        _leave_out(before)


def _leave_out(names: frozenset[str]) -> None:
    global _without
    _without = names
    _first.cache_clear()
    _enabled.cache_clear()
