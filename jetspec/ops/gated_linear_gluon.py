"""The kernel of a product with gates of more rows than a tile takes, whose large weight is read at the speed of the
memory, and which is gated in passing.

It is written in Gluon, the language below Triton, where a program says which warps do what. One warp does nothing but
ask for blocks of both factors, the weight's first ones while the kernel ahead still runs; two groups of four multiply
what has arrived, half of the rows each. They tell each other by barriers in shared memory, so that nobody waits for
all: between two blocks a tensor core always has another one to do.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetspec.ops.fragments_gluon import wait
from jetspec.ops.overlap_triton import overlap

BLOCK_M = 128
"""Rows, 64 by each group of warps."""
BLOCK_K = 64
"""Columns of a block: a line of shared memory, 128 bytes of 16-bit numbers."""
PROGRAMS = 132
"""That run at once on Hopper: each fills a multiprocessor."""
STAGE_BYTES = 216 * 1024
"""Of its memory, for blocks on their way."""


class Gates(NamedTuple):
    """Block sizes of the product."""

    BLOCK_N: int
    HALF: bool
    """Half as many outputs again."""

    @property
    def width(self) -> int:
        """Outputs of a program."""
        return self.BLOCK_N + self.BLOCK_N // 2 if self.HALF else self.BLOCK_N

    @property
    def stages(self) -> int:
        """Blocks on their way."""
        return STAGE_BYTES // ((BLOCK_M + 2 * self.width) * BLOCK_K * 2)


WIDTHS = Gates(32, False), Gates(32, True), Gates(64, False), Gates(64, True), Gates(128, False)


def find_gates(outputs: int) -> Gates | None:
    """The narrowest with which all programs run at once, so that all take part; None: there is none."""
    return next((gates for gates in WIDTHS if triton.cdiv(outputs, gates.width) <= PROGRAMS), None)


def gated_linear_gluon(gates: Gates, x_TK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`swiglu` of at most 128 rows times a weight that holds the rows of the gate, then those of the rest."""
    (T, K), N = x_TK.shape, len(weight) // 2
    out = x_TK.new_empty(T, N)
    with torch.cuda.device_of(x_TK):
        _gated_linear_kernel[(triton.cdiv(N, gates.width),)](
            _blocks(x_TK, BLOCK_M),
            _blocks(weight, gates.BLOCK_N),
            _blocks(weight, gates.BLOCK_N // 2) if gates.HALF else None,
            bias,
            out,
            T,
            N,
            K,
            BLOCK_M=BLOCK_M,
            BLOCK_K=BLOCK_K,
            STAGES=gates.stages,
            num_warps=4,
            **gates._asdict(),
            **overlap(x_TK),
        )
    return out


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    shape = [rows, BLOCK_K]
    return TensorDescriptor.from_tensor(matrix, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))


@gluon.jit
def _gated_linear_kernel(
    x_desc,
    weight_desc,
    half_desc,
    bias_ptr,
    out_ptr,
    T,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """Some outputs of all rows. Rows of gates lie before those of the rest in one block of shared memory, so that one
    product makes both."""
    dtype: gl.constexpr = x_desc.dtype
    x_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    blocks = gl.allocate_shared_memory(dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], weight_desc.layout)
    halves = blocks
    if HALF:
        halves = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], half_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)

    sizes: gl.constexpr = (BLOCK_M, BLOCK_N, HALF, BLOCK_K, STAGES, OVERLAP)
    shared = x_blocks, blocks, halves, full, free
    outside = bias_ptr, out_ptr, T, N, K
    gl.warp_specialize(
        [
            (_multiply_first, (shared, outside, sizes)),
            (_multiply_second, (shared, outside, sizes)),
            (_fetch, (x_desc, weight_desc, half_desc, shared, N, K, sizes)),
        ],
        [4, 1],
        [168, 40],
    )


@gluon.jit
def _fetch(x_desc, weight_desc, half_desc, shared, N, K, sizes: gl.constexpr):
    """Ask for all blocks in turn. Those of the weight are older than the kernel ahead."""
    BLOCK_K: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    x_blocks, _, _, full, free = shared
    ahead = gl.minimum(gl.cdiv(K, BLOCK_K), STAGES)
    for step in range(ahead):
        _fetch_weight(weight_desc, half_desc, shared, N, step, step, sizes)
    wait(sizes[5])
    for step in range(ahead):
        tma.async_copy_global_to_shared(x_desc, [0, step * BLOCK_K], full.index(step), x_blocks.index(step))
    for step in range(STAGES, gl.cdiv(K, BLOCK_K)):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
        _fetch_weight(weight_desc, half_desc, shared, N, step, stage, sizes)
        tma.async_copy_global_to_shared(x_desc, [0, step * BLOCK_K], full.index(stage), x_blocks.index(stage))


@gluon.jit
def _fetch_weight(weight_desc, half_desc, shared, N, step, stage, sizes: gl.constexpr):
    """Its part of a block, after saying how much will arrive with x."""
    BLOCK_M: gl.constexpr = sizes[0]
    BLOCK_N: gl.constexpr = sizes[1]
    HALF: gl.constexpr = sizes[2]
    BLOCK_K: gl.constexpr = sizes[3]
    WIDTH: gl.constexpr = BLOCK_N + BLOCK_N // 2 if HALF else BLOCK_N
    ROW: gl.constexpr = BLOCK_K * weight_desc.dtype.primitive_bitwidth // 8
    _, blocks, halves, full, _ = shared
    first, column = gl.program_id(0) * WIDTH, step * BLOCK_K
    bar = full.index(stage)
    mbarrier.expect(bar, (BLOCK_M + 2 * WIDTH) * ROW)
    for side in gl.static_range(2):
        block = blocks.index(stage).slice(side * BLOCK_N, BLOCK_N)
        tma.async_copy_global_to_shared(weight_desc, [side * N + first, column], bar, block)
        if HALF:
            half = halves.index(stage).slice(side * BLOCK_N // 2, BLOCK_N // 2)
            tma.async_copy_global_to_shared(half_desc, [side * N + first + BLOCK_N, column], bar, half)


@gluon.jit
def _multiply_first(shared, outside, sizes: gl.constexpr):
    _multiply(shared, outside, sizes, 0)


@gluon.jit
def _multiply_second(shared, outside, sizes: gl.constexpr):
    _multiply(shared, outside, sizes, 1)


@gluon.jit
def _multiply(shared, outside, sizes: gl.constexpr, GROUP: gl.constexpr):
    """64 rows by one group of warps."""
    BLOCK_N: gl.constexpr = sizes[1]
    HALF: gl.constexpr = sizes[2]
    BLOCK_K: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    WIDTH: gl.constexpr = BLOCK_N + BLOCK_N // 2 if HALF else BLOCK_N
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    x_blocks, blocks, halves, full, free = shared
    _, _, _, _, K = outside
    wait(sizes[5])
    y = gl.zeros([64, 2 * BLOCK_N], gl.float32, wide)
    half_y = gl.zeros([64, BLOCK_N], gl.float32, narrow)
    for step in range(gl.cdiv(K, BLOCK_K)):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        x = x_blocks.index(stage).slice(GROUP * 64, 64)
        y = warpgroup_mma(x, blocks.index(stage).permute((1, 0)), y, is_async=True)
        if HALF:
            half_y = warpgroup_mma(x, halves.index(stage).permute((1, 0)), half_y, is_async=True)
            y, half_y = warpgroup_mma_wait(num_outstanding=2, deps=(y, half_y))
        else:
            y = warpgroup_mma_wait(num_outstanding=1, deps=(y,))
        # The products of the block before are done, and its place is free.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > 0)

    first = gl.program_id(0) * WIDTH
    if HALF:
        y, half_y = warpgroup_mma_wait(num_outstanding=0, deps=(y, half_y))
        _store_gated(half_y, GROUP * 64, first + BLOCK_N, outside, BLOCK_N // 2)
    else:
        y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
    _store_gated(y, GROUP * 64, first, outside, BLOCK_N)


@gluon.jit
def _store_gated(y, first_token, first, outside, WIDTH: gl.constexpr):
    """Outputs from `first` on of 64 rows, from gates and the rest side by side."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    bias_ptr, out_ptr, T, N, _ = outside
    token = first_token + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    output = first + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    gate, rest = gl.split(gl.permute(gl.reshape(y, [64, 2, WIDTH]), [0, 2, 1]))
    gate, rest = gl.convert_layout(gate, layout), gl.convert_layout(rest, layout)
    if bias_ptr is not None:
        gate += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
        rest += gl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(gl.float32)
    out = gate / (1 + gl.exp(-gate)) * rest
    place = token.to(gl.int64) * N + output
    gl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=(token < T) & (output < N))
