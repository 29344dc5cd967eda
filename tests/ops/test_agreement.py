"""Kernels equal their references: interpreted on a CPU, and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec import ops
from jetspec.ops import HeadNorm, Routed
from jetspec.ops.moe import route
from jetspec.ops.select import force
from jetspec.types import KVPages

EPS = 1e-5
FP32, BF16 = torch.float32, torch.bfloat16
Run = Callable[[], tuple[Tensor, ...]]


class Draw:
    """Random tensors of a type and device."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=self.generator)).to(self.device, self.dtype)

    def ints(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator).to(self.device)

    def order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator).to(self.device)

    def norm(self, *shape: int) -> HeadNorm:
        return HeadNorm(self.normal(*shape), self.normal(*shape), EPS)

    def tables(self, size: int, *shape: int) -> tuple[Tensor, Tensor]:
        inv_freq = 10_000 ** (-torch.arange(0, size, 2, device=self.device) / size)
        return ops.rope(self.ints(40_000, *shape), inv_freq, 1.25, self.dtype)


def rms_norm(draw: Draw, *shape: int) -> Run:
    x, weight = draw.normal(*shape), draw.normal(shape[-1])
    return lambda: (ops.rms_norm(x, weight, EPS),)


def swiglu(draw: Draw, *shape: int) -> Run:
    gate_up = draw.normal(*shape)
    return lambda: (ops.swiglu(gate_up),)


def rope(draw: Draw, size: int, *shape: int) -> Run:
    return lambda: Draw(draw.dtype, draw.device).tables(size, *shape)


def rotate(draw: Draw, heads: int, kv_heads: int, size: int, normed: bool, *lead: int) -> Run:
    """`rotate_qkv` and, for (T, X, E), `rotate_store`."""
    qkv, tables = draw.normal(*lead, heads + 2 * kv_heads, size), draw.tables(size, *lead)
    norm, slots = draw.norm(size) if normed else None, lead[0] + 3
    slot = draw.order(slots)[: lead[0]]

    def run() -> tuple[Tensor, ...]:
        out = ops.rotate_qkv(qkv, kv_heads, tables, norm)
        if len(lead) > 1:
            return out
        pages = KVPages(*torch.zeros(2, slots, 1, kv_heads, size, device=draw.device, dtype=draw.dtype))
        return *out, ops.rotate_store(qkv, kv_heads, tables, norm, pages, slot), pages.k, pages.v

    return run


def rotate_layers(draw: Draw, normed: bool, *places: int) -> Run:
    """Layers at equal and at unequal distances."""
    tokens, layers, kv_heads, size, slots = 5, len(places), 2, 8, 9
    kv, tables = draw.normal(tokens, layers, 2 * kv_heads, size), draw.tables(size, tokens)
    norm, slot = draw.norm(layers, size) if normed else None, draw.order(slots)[:tokens]

    def run() -> tuple[Tensor, ...]:
        storage = torch.zeros(2, 2 * layers, slots, 1, kv_heads, size, device=draw.device, dtype=draw.dtype)
        pages = [KVPages(storage[0, i], storage[1, i]) for i in places]
        ops.rotate_store_layers(kv, tables, norm, pages, slot)
        assert storage.any()
        return (storage,)

    return run


def store(draw: Draw, tokens: int, heads: int, size: int) -> Run:
    """K in rows of its own, V as a slice of wider rows."""
    storage = draw.normal(2, 64, 16, heads, size)
    k, v = draw.normal(tokens, heads, size), draw.normal(tokens, 3 * heads, size)[:, 2 * heads :]
    slot = draw.order(1024)[:tokens]

    def run() -> tuple[Tensor, ...]:
        ops.store_kv(pages := KVPages(*storage.clone()), k, v, slot)
        return pages.k, pages.v

    return run


def compact(draw: Draw, rows: int, num: int, heads: int, size: int) -> Run:
    """Each row reads and writes a range of its own, as after a round: the last node of a path is repeated; some slots
    are both source and target, some are equal. Then a cycle."""
    pool, own = draw.normal(2, 2, 6, 32, heads, size), 192 // rows
    source = torch.stack([draw.order(own)[:num].sort().values for _ in range(rows)])
    source[:, num // 2 :] = source[:, num // 2, None]
    target, start = torch.arange(num, device=draw.device), own * torch.arange(rows, device=draw.device)[:, None]

    def run() -> tuple[Tensor, ...]:
        ops.compact_kv(path := pool.clone(), start + source, start + target)
        ops.compact_kv(cycle := pool.clone(), target[None], target[None].roll(1, 1))
        return path, cycle

    return run


def place(draw: Draw, batch: int, nodes: int, page_size: int) -> Run:
    """All requests of 16 nodes share their depths."""
    pages, row = draw.ints(1000, batch + 3, 300), draw.order(batch + 3)[:batch]
    length, depth = draw.ints(300 * page_size - nodes + 1, batch + 3), draw.ints(16, batch, nodes)
    depth = depth[:1].expand(batch, -1) if nodes == 16 else depth
    return lambda: ops.place(pages, length, row, depth, page_size)


def choose_experts(draw: Draw, rows: int, experts: int, chosen: int) -> Run:
    """Random logits, then few distinct values among many experts: one row is constant, one has -inf."""
    tied = draw.ints(7, rows, experts).to(draw.dtype)
    tied[0], tied[-1, ::2] = 0.5, -torch.inf
    many = draw.normal(rows, experts), tied
    return lambda: tuple(x for logits in many for n in (True, False) for x in route(logits, chosen, n, draw.dtype))


def mixture(
    draw: Draw, tokens: int, experts: int, chosen: int, size: int, inner: int
) -> tuple[Tensor, Routed, Tensor, Tensor]:
    """The residual, the inputs of the experts, and their weights. Outputs are about 1. A third of the tokens chooses
    the first experts, so that some are crowded."""
    total, x = draw.normal(tokens, size), draw.normal(tokens, size)
    gate_up = draw.normal(experts, 2 * inner, size, scale=size**-0.5)
    down = draw.normal(experts, size, inner, scale=inner**-0.5)
    score = draw.normal(tokens, experts).float().sigmoid()
    score[::3, :chosen] += 1
    weight, expert = score.topk(chosen, -1)
    return total, Routed(x, expert, (weight / weight.sum(-1, keepdim=True)).to(draw.dtype)), gate_up, down


def mix(draw: Draw, tokens: int, *sizes: int) -> Run:
    """A tap whose rows lie apart is written."""
    total, routed, gate_up, down = mixture(draw, tokens, *sizes)

    def run() -> tuple[Tensor, ...]:
        taps = torch.zeros(tokens, 2, total.shape[1], device=draw.device, dtype=draw.dtype)
        y = ops.add_mixture(total.clone(), routed, gate_up, down, taps[:, 1]).x
        assert torch.equal(taps[:, 1], y) and not taps[:, 0].any()
        return (y,)

    return run


def copy(draw: Draw, size: int) -> Run:
    source = draw.normal(3, 2 * size)[:, ::2]

    def run() -> tuple[Tensor, ...]:
        ops.copy_to_host(source, target := torch.zeros(3, size, dtype=draw.dtype))
        return (target,)

    return run


GPU_SIZES = [(1, 576), (700, 576), (5001, 576), (1, 4096), (700, 4096), (5001, 4096)]
HEADS = [
    (count, *rest)
    for heads, *rest in ((32, 8, 128, True), (9, 3, 64, False), (32, 8, 80, False))
    for count in (heads, 0)
]
SMALL: dict[Callable[..., Run], list[Any]] = {
    rms_norm: [(1, 16), (3, 2, 18), (0, 16)],
    swiglu: [(3, 10), (2, 2, 2100), (0, 8)],
    rope: [(size, *shape) for size in (8, 10) for shape in ((1,), (2, 5), (0,))],
    rotate: [
        (*shape[:3], normed, *shape[3:])
        for normed in (True, False)
        for shape in ((9, 3, 8, 1), (0, 2, 2, 3), (2, 1, 16, 2, 2), (3, 1, 10, 3), (2, 1, 16, 0))
    ],
    rotate_layers: [(normed, *places) for normed in (True, False) for places in ((0, 2, 4), (0, 3, 4))],
    store: [(0, 3, 64), (1, 1, 2), (9, 3, 64)],
    compact: [(1, 1, 1, 2), (1, 7, 3, 64), (3, 4, 3, 64)],
    place: [(1, 1, 16), (3, 16, 1), (2, 300, 4)],
    choose_experts: [(1, 4, 1), (3, 5, 5), (7, 128, 8), (2, 133, 3)],
    copy: [(1,), (18,), (700,)],
}
"""Arguments for the interpreter."""
EXPERTS = [
    (1, 4, 2, 16, 16),
    (0, 4, 2, 16, 16),
    (3, 5, 1, 200, 24),  # a sum deeper than a block
    (12, 3, 2, 18, 170),  # columns beyond a block, no power of two
    (30, 4, 3, 24, 12),  # tiles of 16 and of 32
    (64, 3, 2, 20, 12),  # full tiles
    (150, 4, 2, 520, 12),  # several tiles per expert, several parts of a row
]
LARGE: dict[Callable[..., Run], list[Any]] = {
    rms_norm: GPU_SIZES,
    swiglu: [(rows, 24576) for rows in (1, 64, 3000)],
    rope: [(size, rows) for size in (128, 80) for rows in (1, 700)],
    rotate: [(*heads, tokens) for heads in HEADS for tokens in (1, 700, 5000)],
    rotate_layers: SMALL[rotate_layers],
    store: [(tokens, heads, size) for tokens in (1, 700) for heads, size in ((8, 128), (3, 64))],
    compact: [(*path, *heads) for path in ((1, 17), (8, 17), (3, 64)) for heads in ((8, 128), (3, 64))],
    place: [(1, 128, 16), (2048, 1, 16), (64, 16, 16)],
    choose_experts: [(rows, experts, 8) for rows in (1, 64, 700) for experts in (60, 128, 512)],
    mix: [(tokens, 128, 8, 2048, 768) for tokens in (1, 2, 16, 17, 64, 65, 1500)],
}
TOLERANCE = {FP32: 1e-5, BF16: 2**-6}
"""In bf16 the references round more often than the kernels: they differ by a few units in the last place."""


def agree(make: Callable[..., Run], shape: Any, dtype: torch.dtype, device: str, many: bool = False) -> None:
    """Compares an operation by the kernel, with the launch sizes of many tokens or its own, and by the reference."""
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr("jetspec.ops.norm_rope_triton.MANY_TOKENS", 1)
        with force("reference"):
            run = make(Draw(dtype, device), *shape)
            want = run()
        with force("triton"):
            got = run()
    off = (2e-5 if dtype == FP32 else 0.05) if make is mix and device == "cuda" else TOLERANCE[dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=off, rtol=off)


def cases(table: dict[Callable[..., Run], list[Any]]) -> Any:
    found = [(make, shape) for make, shapes in table.items() for shape in shapes]
    names = [f"{make.__name__}-{'-'.join(map(str, shape))}" for make, shape in found]
    return pytest.mark.parametrize(("make", "shape"), found, ids=names)


@cases(SMALL)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kernel_equals_reference(interpreter: Executor, make: Any, shape: Any, dtype: torch.dtype) -> None:
    interpreter.submit(agree, make, shape, dtype, "cpu").result()


@pytest.mark.parametrize("shape", EXPERTS)
def test_experts_equal_reference(interpreter: Executor, shape: Any) -> None:
    interpreter.submit(agree, mix, shape, FP32, "cpu").result()


@cases({rms_norm: [(1, 40), (7, 64), (2, 5000)], rotate: [(12, 4, 16, True, rows) for rows in (1, 7)]})
def test_launch_sizes_for_many_tokens_equal_reference(interpreter: Executor, make: Any, shape: Any) -> None:
    interpreter.submit(agree, make, shape, FP32, "cpu", many=True).result()


@pytest.mark.gpu
@cases(LARGE)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kernel_on_a_gpu(make: Any, shape: Any, dtype: torch.dtype) -> None:
    agree(make, shape, dtype, "cuda")
