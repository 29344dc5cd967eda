"""The kernel of products of 65 to 128 rows with a large weight, and of up to 1,024 rows with a small one.

It is written in Gluon, the language below Triton, and is warp-specialized. One producer warp copies blocks of both
factors to shared memory (TMA), the first weight blocks while the previous kernel still runs. Two consumer groups of
four warps multiply 64 rows each (wgmma). Barriers in shared memory mark each block as full or free, so that a tensor
core always has another block to multiply. Norms are spread over kernels as in `linear_triton`.

Layout: x (T, K), weight (N, K) or, gated, (2 N, K) with the gate first, out (T, N), all contiguous. A stage of shared
memory holds WARP_ROWS x WARP_INPUTS of x and SIDES * BLOCK_N x WARP_INPUTS of the weight, gate rows first. With split-K
neighbouring programs of the grid share the inputs: each has partial sums (tiles, SPLITS, 128, width) in fp32 in global
memory, waits for the others at a grid barrier, and adds up some of the rows. No more programs run than there are
multiprocessors, so that those that wait for each other run at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetspec.ops.fragments_gluon import grid_barrier
from jetspec.ops.layouts import (
    WARP_INPUTS,
    WARP_ROWS,
    WarpTiles,
    barrier_counters,
    is_small,
    small_weight_warp_tiles,
    warp_tiles,
    whole_tiles,
)
from jetspec.ops.linear_triton import Epilogue, TiledLinear
from jetspec.ops.overlap_triton import launch, wait
from jetspec.ops.select import device_of, enabled

BLOCK_M, BLOCK_K = gl.constexpr(WARP_ROWS), gl.constexpr(WARP_INPUTS)


class Sizes(NamedTuple):
    """Constants of the kernel: its tiles and blocks in flight, and those of the epilogue."""

    BLOCK_N: int
    HALF: bool
    SPLITS: int
    WIDTH: int
    """Outputs of a tile."""
    STAGES: int
    SIDES: int
    """Two, gate and up, if gated."""
    PARTS: int


def _plan(x_TK: Tensor, weight: Tensor, outputs: int, gated: bool, adds: bool) -> WarpTiles | None:
    multiprocessors = device_of(x_TK.device).multiprocessors
    if is_small(weight):
        return small_weight_warp_tiles(outputs, len(x_TK), multiprocessors)
    splits = adds and enabled("linear.split_k", x_TK.device)
    return warp_tiles(outputs, x_TK.shape[1] if splits else 0, multiprocessors)


def _launch(tiles: WarpTiles, x_TK: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    (T, N), K = out.shape, x_TK.shape[1]
    programs, row_tiles = triton.cdiv(N, tiles.width), triton.cdiv(T, WARP_ROWS)
    half_desc = _blocks(weight, tiles.BLOCK_N // 2) if tiles.HALF else None
    part, barrier = None, None
    if tiles.SPLITS > 1:
        assert row_tiles == 1, "programs that wait for each other run at once"
        part = x_TK.new_empty(programs, tiles.SPLITS, WARP_ROWS, tiles.width, dtype=torch.float32)
        barrier = barrier_counters(x_TK.device)
    sides = 2 if epilogue.gated else 1
    sizes = Sizes(*tiles, tiles.width, tiles.stages(epilogue.gated), sides, epilogue.parts)
    descriptors = _blocks(whole_tiles(x_TK, WARP_ROWS), WARP_ROWS), _blocks(weight, tiles.BLOCK_N), half_desc
    operands = part, barrier, epilogue.operands(out), K, epilogue.numbers(out)
    grid = programs * tiles.SPLITS, row_tiles
    launch(_warp_specialized_linear_kernel, grid, *descriptors, *operands, sizes=sizes, num_warps=4)


WARP_SPECIALIZED = TiledLinear(_plan, _launch)


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    shape = [rows, WARP_INPUTS]
    return TensorDescriptor.from_tensor(matrix, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))


@gluon.jit
def _warp_specialized_linear_kernel(
    x_desc,
    weight_desc,
    half_desc,
    part_ptr,
    barrier_ptr,
    operands,
    K,
    numbers,
    sizes: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """A tile of 128 rows and BLOCK_N (+ BLOCK_N / 2) outputs. With two sides, one product makes gate and up: a block of
    shared memory holds the weight rows of both, gate first."""
    bias_ptr, squares_ptr, total_ptr, out_ptr, next_norm_ptr, scaled_ptr, next_squares_ptr, tap_ptr = operands
    T, N, num_parts, tap_stride, eps = numbers
    STAGES: gl.constexpr = sizes.STAGES
    ROWS: gl.constexpr = sizes.SIDES * sizes.BLOCK_N
    dtype: gl.constexpr = x_desc.dtype
    x_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    blocks = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], weight_desc.layout)
    halves = blocks
    if sizes.HALF:
        halves = gl.allocate_shared_memory(dtype, [STAGES, ROWS // 2, BLOCK_K], half_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)

    tile, split = gl.program_id(0) // sizes.SPLITS, gl.program_id(0) % sizes.SPLITS
    run = gl.cdiv(gl.cdiv(K, BLOCK_K), sizes.SPLITS)
    steps = gl.maximum(gl.minimum(gl.cdiv(K, BLOCK_K) - split * run, run), 0)
    work = tile, split, split * run, steps, gl.program_id(1) * BLOCK_M

    shared = x_blocks, blocks, halves, full, free
    read = squares_ptr, num_parts, eps
    places = bias_ptr, out_ptr, next_norm_ptr, scaled_ptr, tap_ptr, tap_stride
    outside = read, places, total_ptr, next_squares_ptr, part_ptr, barrier_ptr, T, N, K
    gl.warp_specialize(
        [
            (_multiply, (shared, outside, work, sizes, OVERLAP, 0)),
            (_multiply, (shared, outside, work, sizes, OVERLAP, 1)),
            (_fetch, (x_desc, weight_desc, half_desc, shared, N, work, sizes, OVERLAP)),
        ],
        [4, 1],
        [168, 40],
    )


@gluon.jit
def _fetch(x_desc, weight_desc, half_desc, shared, N, work, sizes: gl.constexpr, OVERLAP: gl.constexpr):
    """The producer warp: copies all blocks in turn."""
    STAGES: gl.constexpr = sizes.STAGES
    x_blocks, _, _, full, free = shared
    tile, _, begin, steps, row = work
    # copy the first weight blocks: the previous kernel does not write them
    num_first = gl.minimum(steps, STAGES)
    for step in range(num_first):
        _fetch_weight(weight_desc, half_desc, shared, N, tile, begin + step, step, sizes)
    wait(OVERLAP)
    # copy the first blocks of x
    for step in range(num_first):
        column = (begin + step) * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(step), x_blocks.index(step))
    # copy further blocks as stages become free
    for step in range(STAGES, steps):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
        _fetch_weight(weight_desc, half_desc, shared, N, tile, begin + step, stage, sizes)
        column = (begin + step) * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(stage), x_blocks.index(stage))


@gluon.jit
def _fetch_weight(weight_desc, half_desc, shared, N, tile, block, stage, sizes: gl.constexpr):
    """Copies the weight of a block, after announcing the bytes that will arrive with x."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    SIDES: gl.constexpr = sizes.SIDES
    ROW: gl.constexpr = BLOCK_K * weight_desc.dtype.primitive_bitwidth // 8
    _, blocks, halves, full, _ = shared
    first, column = tile * sizes.WIDTH, block * BLOCK_K
    bar = full.index(stage)
    mbarrier.expect(bar, (BLOCK_M + SIDES * sizes.WIDTH) * ROW)
    for side in gl.static_range(SIDES):
        part = blocks.index(stage).slice(side * BLOCK_N, BLOCK_N)
        tma.async_copy_global_to_shared(weight_desc, [side * N + first, column], bar, part)
        if sizes.HALF:
            half = halves.index(stage).slice(side * BLOCK_N // 2, BLOCK_N // 2)
            tma.async_copy_global_to_shared(half_desc, [side * N + first + BLOCK_N, column], bar, half)


@gluon.jit
def _multiply(shared, outside, work, sizes: gl.constexpr, OVERLAP: gl.constexpr, GROUP: gl.constexpr):
    """A consumer group: the product of 64 rows, then the epilogue."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    STAGES: gl.constexpr = sizes.STAGES
    SPLITS: gl.constexpr = sizes.SPLITS
    COLUMNS: gl.constexpr = sizes.SIDES * BLOCK_N
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    # The epilogue has the layout of the product, or, with split-K, that of memory.
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, BLOCK_N // 32], [1, 32], [4, 1], [1, 0])
    own: gl.constexpr = mma if SPLITS == 1 else lines
    half_own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 16])
    rows: gl.constexpr = gl.SliceLayout(1, own)
    x_blocks, blocks, halves, full, free = shared
    read, places, total_ptr, next_squares_ptr, part_ptr, barrier_ptr, T, N, K = outside
    squares_ptr, num_parts, eps = read
    tile, split, _, steps, row = work
    wait(OVERLAP)
    # With split-K each program runs the epilogue of some of the rows.
    OWN: gl.constexpr = 64 // SPLITS
    first, first_token = tile * sizes.WIDTH, row + GROUP * 64 + split * OWN

    # prefetch the operands of the epilogue
    factor = gl.full([OWN], 1.0, gl.float32, rows)
    if squares_ptr is not None:
        square_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 2], [1, 0])
        part = gl.arange(0, sizes.PARTS, gl.SliceLayout(1, square_layout))[:, None]
        square_token = first_token + gl.arange(0, OWN, gl.SliceLayout(0, square_layout))[None, :]
        known = (part < num_parts) & (square_token < T)
        squares = gl.load(squares_ptr + part * T + square_token, mask=known, other=0.0)
        factor = gl.convert_layout(1 / gl.sqrt(gl.sum(squares, 0) / K + eps), rows)
    before = _load_before(total_ptr, first_token, first, T, N, OWN, BLOCK_N, own)
    half_before = before
    if sizes.HALF:
        half_before = _load_before(total_ptr, first_token, first + BLOCK_N, T, N, OWN, BLOCK_N // 2, half_own)

    # multiply block by block
    y = gl.zeros([64, COLUMNS], gl.float32, wide)
    half_y = gl.zeros([64, COLUMNS // 2], gl.float32, narrow)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        x = x_blocks.index(stage).slice(GROUP * 64, 64)
        y = warpgroup_mma(x, blocks.index(stage).permute((1, 0)), y, is_async=True)
        if sizes.HALF:
            half_y = warpgroup_mma(x, halves.index(stage).permute((1, 0)), half_y, is_async=True)
            y, half_y = warpgroup_mma_wait(num_outstanding=2, deps=(y, half_y))
        else:
            y = warpgroup_mma_wait(num_outstanding=1, deps=(y,))
        # The products of the previous block are complete: its stage is free.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > 0)
    if sizes.HALF:
        y, half_y = warpgroup_mma_wait(num_outstanding=0, deps=(y, half_y))
    else:
        y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))

    # epilogue: store, or add the partial sums of other splits, store and begin the next norm
    if next_squares_ptr is None:
        _store(y, factor, first_token, first, places, T, N, sizes.SIDES, BLOCK_N)
        if sizes.HALF:
            _store(half_y, factor, first_token, first + BLOCK_N, places, T, N, sizes.SIDES, BLOCK_N // 2)
    else:
        if SPLITS > 1:
            y = _add_splits(y, (part_ptr, barrier_ptr), tile * 2 + GROUP, split, BLOCK_N, SPLITS, wide, own)
        own_squares = _store_added(y, before, first_token, first, places, T, N, OWN, BLOCK_N, own)
        if sizes.HALF:
            half_squares = _store_added(
                half_y, half_before, first_token, first + BLOCK_N, places, T, N, OWN, BLOCK_N // 2, half_own
            )
            own_squares += gl.convert_layout(half_squares, rows)
        token = first_token + gl.arange(0, OWN, rows)
        gl.store(next_squares_ptr + tile * T + token, own_squares, mask=token < T)


@gluon.jit
def _add_splits(
    y, places, group, split, WIDTH: gl.constexpr, SPLITS: gl.constexpr, wide: gl.constexpr, own: gl.constexpr
):
    """Adds the partial sums of all splits, for some rows. Other multiprocessors wrote them, so they are loaded from the
    L2 cache."""
    part_ptr, barrier_ptr = places
    OWN: gl.constexpr = 64 // SPLITS
    # store partial sums
    row, column = _indices(0, 0, 64, WIDTH, wide)
    gl.store(part_ptr + ((group * SPLITS + split) * 64 + row) * WIDTH + column, y)
    grid_barrier(barrier_ptr + group, split, SPLITS)
    # add the partial sums of own rows
    own_row, own_column = _indices(split * OWN, 0, OWN, WIDTH, own)
    total = gl.zeros([OWN, WIDTH], gl.float32, own)
    for i in gl.static_range(SPLITS):
        part = ((group * SPLITS + i) * 64 + own_row) * WIDTH + own_column
        total += gl.load(part_ptr + part, cache_modifier=".cg")
    return total


@gluon.jit
def _store(y, factor, first_token, first, places, T, N, SIDES: gl.constexpr, WIDTH: gl.constexpr):
    """Stores outputs from `first` on of 64 rows, times `factor` of a norm; of two sides, gate and up side by side."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    bias_ptr, out_ptr, _, _, _, _ = places
    token, output = _indices(first_token, first, 64, WIDTH, layout)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    if SIDES == 2:
        gate, up = gl.split(gl.permute(gl.reshape(y, [64, 2, WIDTH]), [0, 2, 1]))
        gate, up = gl.convert_layout(gate, layout) * factor, gl.convert_layout(up, layout) * factor
        if bias_ptr is not None:
            gate += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
            up += gl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(gl.float32)
        out = gate / (1 + gl.exp(-gate)) * up
    else:
        out = y * factor
        if bias_ptr is not None:
            out += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
    place = token.to(gl.int64) * N + output
    gl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=(token < T) & (output < N))


@gluon.jit
def _store_added(
    y, before, first_token, first, places, T, N, ROWS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Stores outputs from `first` on of some rows, added to the residual `before`, and begins the next norm. Returns
    the sums of squares of the stored rows."""
    bias_ptr, out_ptr, next_norm_ptr, scaled_ptr, tap_ptr, tap_stride = places
    token, output = _indices(first_token, first, ROWS, WIDTH, layout)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
    rounded = (y + before).to(out_ptr.dtype.element_ty)
    inside, place = (token < T) & (output < N), token.to(gl.int64) * N + output
    gl.store(out_ptr + place, rounded, mask=inside)
    if tap_ptr is not None:
        gl.store(tap_ptr + token.to(gl.int64) * tap_stride + output, rounded, mask=inside)
    wide = gl.where(inside, rounded.to(gl.float32), 0.0)
    norm = gl.load(next_norm_ptr + output, mask=output < N, other=0.0).to(gl.float32)
    gl.store(scaled_ptr + place, (wide * norm).to(scaled_ptr.dtype.element_ty), mask=inside)
    return gl.sum(wide * wide, 1)


@gluon.jit
def _load_before(total_ptr, first_token, first, T, N, ROWS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Loads the residual, if there is one."""
    if total_ptr is None:
        return gl.full([1, 1], 0.0, gl.float32, layout)
    else:
        token, output = _indices(first_token, first, ROWS, WIDTH, layout)
        place = token.to(gl.int64) * N + output
        return gl.load(total_ptr + place, mask=(token < T) & (output < N), other=0.0).to(gl.float32)


@gluon.jit
def _indices(first_token, first, ROWS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    token = first_token + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    return token, first + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
