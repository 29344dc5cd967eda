"""The table of implementations: which kernel serves an operation, and what that choice was measured to buy.

`select` returns the first row of an operation whose condition holds, otherwise the plain torch reference. Conditions
depend on `Facts` alone: data types, sizes, alignment and the device. No other module chooses an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from jetspec.ops import layouts
from jetspec.types import KVPages, TreeBatch

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Literal["auto", "triton", "reference"]

HAS_TRITON = find_spec("triton") is not None


class Device(NamedTuple):
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


class Facts(NamedTuple):
    """Properties of a call that decide which kernel serves it."""

    device: Device
    dtype: torch.dtype
    one_dtype: bool = True
    """All inputs have that data type."""
    num_tokens: int = 0
    """Tokens of a list: of a top-k or of a shortlist."""
    rank: int = 0
    """Rank of an edge term."""
    rank_bytes: int = 0
    """Bytes of a number of its factors."""
    equal_distance: bool = True
    """Layers of a cache lie equally far apart."""

    # Matrix products
    rows: int = 0
    outputs: int = 0
    inputs: int = 0
    is_small: bool = False
    """The weight stays in the L2 cache: `SMALL_WEIGHT_BYTES`."""
    is_contiguous: bool = True
    """The weight."""
    can_copy: bool = False
    """The device has a copy engine (TMA), which can read all matrices, and shared memory for the blocks in flight."""
    gated: bool = False
    can_fuse: bool = False
    """A tiled kernel can fuse the operations around the product: see the readers of facts below."""
    split_inputs: int = 0
    """Inputs that programs may split (split-K)."""
    can_add_in_place: bool = False

    # Attention
    query_rows: int = 0
    """Queries of a request times query heads per key head."""
    key_heads: int = 0
    """Of all requests."""
    head_size: int = 0
    page_size: int = 0
    capacity: int = 0
    """Keys of a request that its page table holds."""
    groups: int = 1
    """Consumer groups of a warp-specialized program."""
    is_plain: bool = False
    """No window, no mix of trees and chains, no tokens left in flight by earlier forwards."""
    sees_all: bool = False
    """No hidden first positions."""

    @property
    def is_short(self) -> bool:
        """16 bits, for tensor cores."""
        return self.dtype.itemsize == 2

    @property
    def is_hopper(self) -> bool:
        """Tensor cores with a queue (wgmma), which later generations lack."""
        return self.device.is_cuda and self.device.capability[0] == 9


class Choice(NamedTuple):
    """One row of the table."""

    name: str
    kernel: str
    """`module:function`, in `jetspec.ops` where the module has no package. Imported when it is first chosen."""
    when: Callable[[Facts], bool] = lambda facts: True
    buys: str = ""
    """Share of a whole round that the row saves on an H200, from `benchmarks/kernel_choices.py`. Empty: not measured
    apart."""


one_dtype: Callable[[Facts], bool] = attrgetter("one_dtype")

MAX_TOPK = 2048
"""Longest list that the top-k kernels return."""
MAX_RANK = {2: 512, 4: 128}
"""Highest rank of an edge term that the shortlist kernels take, by the bytes of a number: a program holds all of it."""


def _is_short_list(facts: Facts) -> bool:
    return facts.num_tokens <= MAX_TOPK


def _has_short_factors(facts: Facts) -> bool:
    return _is_short_list(facts) and facts.rank <= MAX_RANK.get(facts.rank_bytes, 0)


FEW_ROWS = range(2, 65)
"""More rows would read the weight too often: a library passes tiles on between multiprocessors."""
SOME_ROWS = range(65, 129)
MANY_ROWS = range(129, 1025)
MAX_OUTPUTS = 32_768
"""Outputs of a bare product. More keep a library busy for so long that its launch does not matter."""


def _has_tiles(f: Facts) -> bool:
    return f.can_fuse and f.can_copy


def _takes_registers(f: Facts) -> bool:
    return f.device.is_cuda and _has_tiles(f) and layouts.register_tiles(f.inputs, f.gated) is not None


def _fills_gpu(f: Facts) -> bool:
    return layouts.warp_tiles(f.outputs, f.split_inputs, f.device.multiprocessors) is not None


def _takes_warps(f: Facts) -> bool:
    """A gated product also starts from rows that are normed by a kernel of their own."""
    return f.is_hopper and f.is_short and f.can_copy and (f.can_fuse or f.gated)


def _takes_register_tiled_attention(f: Facts) -> bool:
    has_fragments = f.device.is_cuda and f.device.capability >= (8, 0)  # earlier tensor cores take others
    fits = f.is_short and f.is_plain and f.head_size in (64, 128)
    is_few = f.query_rows <= layouts.FEW_QUERY_ROWS or layouts.is_narrow(f.query_rows, f.key_heads)
    tiles = layouts.num_tiles(f.query_rows, layouts.REGISTER_QUERIES) * f.key_heads
    return has_fragments and fits and is_few and tiles <= f.device.multiprocessors


def _takes_warp_specialized_attention(f: Facts) -> bool:
    """Enough tiles of queries, but no more than multiprocessors unless each has keys of its own. Pages start where the
    layout of shared memory repeats, every eight rows."""
    serves = f.is_hopper and f.is_short and f.is_plain and f.sees_all and f.is_contiguous
    fits = f.head_size in (64, 128) and f.page_size % 8 == 0 and layouts.WARP_KEYS % f.page_size == 0
    tiles = layouts.num_tiles(f.query_rows, f.groups * layouts.WARP_QUERIES)
    least = 32 if f.capacity < layouts.LONG_CONTEXT else 8  # the kernel has more to prepare than others
    is_enough = f.query_rows >= 33 and tiles * f.key_heads >= least
    return serves and fits and is_enough and (tiles == 1 or tiles * f.key_heads <= f.device.multiprocessors)


FUSED = (
    Choice(
        "linear.vector",
        "linear_triton:vector_{operation}",
        lambda f: f.rows == 1 and f.one_dtype and f.is_contiguous,
        "plain step: SmolLM2 2.2x, Qwen3-30B-A3B 20 %, Qwen3-8B 15 %",
    ),
    Choice(
        "linear.register_tiled",
        "linear_register_tiled_gluon:REGISTER_TILED.{operation}",
        lambda f: f.rows in FEW_ROWS and f.is_small and _takes_registers(f),
        "SmolLM2: plain steps of 32 requests 30 %, 32 nodes 27 %",
    ),
    Choice(
        "linear.rows",
        "linear_triton:ROWS.{operation}",
        lambda f: f.rows in FEW_ROWS and _has_tiles(f),
        "SmolLM2 32 nodes 78 %; Qwen3-8B 64 nodes 8 %; Qwen3-30B-A3B 4 %",
    ),
    Choice(
        "linear.rows.small_weight",
        "linear_triton:ROWS.{operation}",
        lambda f: f.rows in SOME_ROWS and f.is_small and _has_tiles(f),
        "SmolLM2 128 nodes 36 %",
    ),
    Choice(
        "linear.warp_specialized.small_weight",
        "linear_warp_specialized_gluon:WARP_SPECIALIZED.{operation}",
        lambda f: f.rows in MANY_ROWS and f.is_small and _takes_warps(f),
        "SmolLM2: 8 requests 26 %, 32 requests 19 %",
    ),
    Choice(
        "linear.warp_specialized.large_weight",
        "linear_warp_specialized_gluon:WARP_SPECIALIZED.{operation}",
        lambda f: f.rows in SOME_ROWS and not f.is_small and _takes_warps(f) and _fills_gpu(f),
        "Qwen3-8B 128 nodes 4 to 5 %",
    ),
)
"""Kernels of products, by the number of rows and the size of the weight. A bare product uses the first four."""

TABLE: dict[str, tuple[Choice, ...]] = {
    # Matrix products
    "linear": FUSED[:4],
    "norm_linear": FUSED,
    "add_linear": (*FUSED, Choice("linear.in_place", "linear:add_linear_in_place", lambda f: f.can_add_in_place)),
    # Mixture of experts
    "route": (Choice("route", "moe_triton:route_triton"),),
    "add_mixture": (Choice("add_mixture", "moe_triton:add_mixture_triton", lambda f: f.can_add_in_place),),
    # Attention
    "plan_attention": (Choice("tree_attention", "tree_attention:KernelPlan"),),
    "tree_attention": (
        Choice(
            "tree_attention.warp_specialized",
            "tree_attention_warp_specialized_gluon:attend",
            _takes_warp_specialized_attention,
            "SmolLM2 64 nodes, context 4096: 28 %; Qwen3-8B context 8192: 9 %",
        ),
        Choice(
            "tree_attention.register_tiled",
            "tree_attention_register_tiled_gluon:attend",
            _takes_register_tiled_attention,
            "SmolLM2 plain steps of 32 requests 20 %; Qwen3-8B plain step, context 8192: 15 %",
        ),
        Choice("tree_attention.portable", "tree_attention_triton:attend"),
    ),
    # Rows between the products of a layer
    "rms_norm": (Choice("rms_norm", "norm_rope_triton:rms_norm_triton", one_dtype),),
    "rope": (Choice("rope", "norm_rope_triton:rope_triton"),),
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
    "swiglu": (Choice("swiglu", "norm_rope_triton:swiglu_triton"),),
    # KV cache
    "store_kv": (Choice("store_kv", "kv_write_triton:store_kv_triton"),),
    "compact_kv": (Choice("compact_kv", "kv_write_triton:compact_kv_triton"),),
    "compact_rows": (Choice("compact_rows", "kv_write_triton:compact_rows_triton"),),
    "place": (Choice("place", "kv_write_triton:place_triton", buys="SmolLM2 3 to 5 %"),),
    # Drafting
    "topk_logprob": (Choice("topk_logprob", "shortlist_triton:topk_logprob_triton", _is_short_list),),
    "shortlist": (Choice("shortlist", "shortlist_triton:shortlist_triton", _has_short_factors),),
    "build_tree": (Choice("build_tree", "jetspec.tree.build_triton:build_tree_triton", _is_short_list),),
    # N-grams
    "match": (Choice("match", "jetspec.tree.ngrams_triton:match_triton"),),
    "merge": (Choice("merge", "jetspec.tree.ngrams_triton:merge_triton"),),
    "learn": (Choice("learn", "jetspec.tree.ngrams_triton:learn_triton"),),
    "append": (Choice("append", "jetspec.tree.ngrams_triton:append_triton"),),
    # Choices of the target
    "tally_choices": (Choice("tally_choices", "jetspec.tree.tally_triton:tally_choices_triton"),),
    # Acceptance
    "choose_nodes": (Choice("choose_nodes", "jetspec.tree.accept_triton:choose_nodes_triton"),),
    "least_kept": (Choice("least_kept", "jetspec.tree.accept_triton:least_kept_triton"),),
    "accept": (Choice("accept", "jetspec.tree.accept:accept_by_nodes"),),
    "walk": (Choice("walk", "jetspec.tree.accept_triton:walk_triton"),),
    # Training
    "distill_loss": (Choice("distill_loss", "distill_loss_triton:distill_loss_triton"),),
    # Host
    "copy_to_host": (Choice("copy_to_host", "transfer_triton:copy_to_host_triton"),),
    "note_time": (Choice("note_time", "transfer_triton:note_time_triton"),),
}

FEATURES: tuple[Choice, ...] = (
    Choice(
        "overlap",
        "overlap_triton",
        lambda f: f.device.is_cuda and f.device.capability >= (9, 0),
        "SmolLM2 45 %; Qwen3-8B 8 %",
    ),
    Choice("linear.half_tiles", "linear_triton", buys="Qwen3-8B 64 nodes 3 %"),
    Choice("linear.split_k", "linear_warp_specialized_gluon", buys="Qwen3-8B 128 nodes 0 to 2.5 %"),
    Choice(
        "tree_attention.two_groups",
        "tree_attention_warp_specialized_gluon",
        buys="Qwen3-8B 128 nodes, context 8192: 5 %",
    ),
)
"""Features of kernels that serve several operations: a kernel asks `enabled` for them."""

_forced: Kernels = "auto"
_without: frozenset[str] = frozenset()
_chosen: set[str] = set()
"""Names of rows that were chosen since the caches were last empty."""


def select(operation: str, reference: Callable[P, R], *inputs: Tensor, **facts: Any) -> Callable[P, R]:
    """Returns the implementation of an operation for some inputs: a kernel of the signature of `reference`, or that.

    The first input tells the device and the data type; `facts` are further fields of `Facts`.
    """
    if not uses_kernel(*inputs):
        return reference
    found = _first(operation, READERS.get(operation, _read)(*inputs, **facts))
    return reference if found is None else found


def operation(
    inputs: Callable[..., tuple[Tensor, ...]], facts: Callable[..., dict[str, Any]] = lambda *_, **__: {}
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a plain torch reference an operation of its name: kernels serve it where the table says so for `inputs` and
    `facts` of its arguments."""

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        @wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            kernel = select(reference.__name__, reference, *inputs(*args, **kwargs), **facts(*args, **kwargs))
            return kernel(*args, **kwargs)

        return call

    return decorate


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
    found = row.name not in _without and row.when(Facts(device, torch.bfloat16))
    if found:
        _chosen.add(row.name)
    return found


@lru_cache(4096)
def _first(operation: str, facts: Facts) -> Callable[..., Any] | None:
    for row in TABLE[operation]:
        if row.name not in _without and row.when(facts):
            _chosen.add(row.name)
            return _load(row.kernel, operation)
    return None


def _load(kernel: str, operation: str) -> Callable[..., Any]:
    module, name = kernel.format(operation=operation).split(":")
    found: Callable[..., Any] = attrgetter(name)(import_module(module if "." in module else f"jetspec.ops.{module}"))
    return found


def rows() -> dict[str, Choice]:
    """Rows of the table by name. A row may serve several operations."""
    return {row.name: row for choices in (*TABLE.values(), FEATURES) for row in choices}


def _read(*inputs: Tensor, **facts: Any) -> Facts:
    first = inputs[0]
    return Facts(device_of(first.device), first.dtype, all(x.dtype == first.dtype for x in inputs), **facts)


def _read_product(x: Tensor, weight: Tensor, *others: Tensor, gated: bool = False, **facts: Any) -> Facts:
    device, dtype = device_of(x.device), x.dtype
    one_dtype = weight.dtype == dtype and all(y.dtype == dtype for y in others)
    # A CPU stands in for a device with a copy engine.
    has_engine = not device.is_cuda or (
        dtype.itemsize == 2 and device.capability >= (9, 0) and device.shared_memory > layouts.STAGE_BYTES
    )
    matrices = has_engine and layouts.can_copy(x) and layouts.can_copy(weight)
    return Facts(
        device,
        dtype,
        one_dtype,
        rows=x.numel() // x.shape[-1],
        outputs=len(weight) // (2 if gated else 1),
        inputs=weight.shape[1],
        is_small=layouts.is_small(weight),
        is_contiguous=weight.is_contiguous(),
        can_copy=one_dtype and matrices and all(y.is_contiguous() for y in others),
        gated=gated,
        **facts,
    )


def _read_linear(x: Tensor, weight: Tensor) -> Facts:
    return _read_product(x, weight, can_fuse=len(weight) <= MAX_OUTPUTS)


def _read_norm_linear(x: Tensor, weight: Tensor, norm: Tensor, gated: bool, is_begun: bool) -> Facts:
    """The product that wrote the rows may have begun the norm."""
    return _read_product(x, weight, norm, gated=gated, can_fuse=is_begun)


def _read_add_linear(x: Tensor, weight: Tensor, total: Tensor, next_norm: Tensor | None) -> Facts:
    """A norm cannot begin in float16: the sum times a weight, not yet divided, may overflow."""
    can_begin = (
        next_norm is not None
        and total.dtype == next_norm.dtype != torch.float16
        and layouts.can_copy(total)
        and uses_kernel(total, next_norm)
    )
    in_place = x.dtype == weight.dtype == total.dtype and total.is_contiguous()
    splits = weight.shape[1] if enabled("linear.split_k", x.device) else 0
    return _read_product(x, weight, total, can_fuse=can_begin, split_inputs=splits, can_add_in_place=in_place)


def _read_mixture(total: Tensor, x_TM: Tensor, *weights: Tensor) -> Facts:
    same = total.dtype == x_TM.dtype == weights[0].dtype and total.shape == x_TM.shape
    return _read(total, can_add_in_place=same and total.is_contiguous())


def _read_attention(token_T: Tensor, q_THE: Tensor, pages: KVPages, batch: TreeBatch, window: int | None) -> Facts:
    (_, H, E), (_, size, G, _), layout = q_THE.shape, pages.k.shape, batch.layout
    rows, capacity = layout.max_queries * (H // G), layout.page_BP.shape[1] * layout.page_size
    return Facts(
        device_of(q_THE.device),
        q_THE.dtype,
        query_rows=rows,
        groups=layouts.num_groups(rows, capacity) if enabled("tree_attention.two_groups", q_THE.device) else 1,
        key_heads=len(layout.cached_len_B) * G,
        head_size=E,
        page_size=size,
        capacity=capacity,
        is_plain=window is None and batch.is_tree_B is None and not layout.earlier,
        sees_all=not layout.first_seen,
        is_contiguous=pages.k.is_contiguous() and pages.v.is_contiguous(),
    )


READERS: dict[str, Callable[..., Facts]] = {
    "linear": _read_linear,
    "norm_linear": _read_norm_linear,
    "add_linear": _read_add_linear,
    "add_mixture": _read_mixture,
    "tree_attention": _read_attention,
}


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
def watch() -> Iterator[set[str]]:
    """Collects the names of the rows that are chosen meanwhile."""
    _leave_out(_without)
    _chosen.clear()
    yield _chosen


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
