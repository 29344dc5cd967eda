"""The kernel of products of more rows than a tile takes, with a large weight, which is read at the speed of the memory,
or of many rows with a small one.

It is written in Gluon, the language below Triton, where a program says which warps do what. One warp does nothing but
ask for blocks of both factors, the weight's first ones while the kernel ahead still runs; two groups of four multiply
what has arrived, half of the rows each. They tell each other by barriers in shared memory, so that nobody waits for
all: between two blocks a tensor core always has another one to do. Norms are spread over kernels as in `linear_triton`.

Every program reads up to 128 rows of x, as far as its own inputs go. Where there are many inputs, programs share them:
each has more outputs and fewer inputs, and in the end they wait for each other and add up, some rows each. No more of
them run than there are multiprocessors, and those that wait for each other are neighbours in the grid. Of more rows
each program takes some.
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

from jetspec.ops.counters import barrier_counters
from jetspec.ops.fragments_gluon import grid_barrier, wait
from jetspec.ops.overlap_triton import overlap
from jetspec.ops.rows import new_rows, whole_tiles

BLOCK_M = 128
"""Rows, 64 by each group of warps."""
BLOCK_K = 64
"""Columns of a block: a line of shared memory, 128 bytes of 16-bit numbers."""
PROGRAMS = 132
"""That run at once on Hopper: each fills a multiprocessor."""
ENOUGH_PROGRAMS = 96
"""To read a weight about as fast as all of them would."""
SPLITS = 4, 2
"""Programs that may share the inputs."""
MIN_DEPTH = 3072
"""Inputs that are worth a program of their own, with the adding up that it brings."""
STAGE_BYTES = 216 * 1024
"""Of its memory, for blocks on their way."""
MAX_STAGES = 10


class Pipe(NamedTuple):
    """Block sizes of the product."""

    BLOCK_N: int
    HALF: bool
    """Half as many outputs again."""
    SPLITS: int = 1
    """Programs that share the inputs."""

    @property
    def width(self) -> int:
        """Outputs of a program."""
        return self.BLOCK_N + self.BLOCK_N // 2 if self.HALF else self.BLOCK_N

    def stages(self, gated: bool) -> int:
        """Blocks on their way."""
        rows = BLOCK_M + (2 if gated else 1) * self.width
        return min(STAGE_BYTES // (rows * BLOCK_K * 2), MAX_STAGES)


WIDTHS = Pipe(32, False), Pipe(32, True), Pipe(64, False), Pipe(64, True), Pipe(128, False)


def find_pipe(outputs: int, depth: int = 0) -> Pipe | None:
    """One with which all programs run at once, and enough of them; None: there is none.

    `depth` inputs may be shared. If they are many, they must be: a library shares them, too.
    """
    shared = [splits for splits in SPLITS if depth >= splits * MIN_DEPTH]
    for splits in shared or (1,):
        for pipe in WIDTHS:
            whole = splits == 1 or not pipe.HALF
            if whole and ENOUGH_PROGRAMS <= triton.cdiv(outputs, pipe.width) * splits <= PROGRAMS:
                return pipe._replace(SPLITS=splits)
    return None


def find_small_pipe(outputs: int, rows: int) -> Pipe:
    """For a small weight, which all that take other rows read, too: the widest with which enough programs have work."""
    tiles = triton.cdiv(rows, BLOCK_M)
    wide = [pipe for pipe in WIDTHS if triton.cdiv(outputs, pipe.width) * tiles >= ENOUGH_PROGRAMS]
    return wide[-1] if wide else WIDTHS[0]


def piped_linear_gluon(
    pipe: Pipe,
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    """`rows_linear_triton` of more rows."""
    out = new_rows(len(x_TK), len(weight) // (2 if gated else 1), like=x_TK)
    _launch(pipe, x_TK, weight, bias, out, gated=gated, squares=squares, eps=eps)
    return out


def piped_add_linear_gluon(
    pipe: Pipe,
    total_TN: Tensor,
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`rows_add_linear_triton` of more rows."""
    T, N = total_TN.shape
    scaled = new_rows(T, N, like=total_TN)
    next_squares = torch.empty((triton.cdiv(N, pipe.width), T), dtype=torch.float32, device=total_TN.device)
    _launch(pipe, x_TK, weight, bias, total_TN, next_norm=norm, scaled=scaled, next_squares=next_squares, tap=tap)
    return scaled, next_squares


def _launch(
    pipe: Pipe,
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    squares: Tensor | None = None,
    eps: float = 0.0,
    next_norm: Tensor | None = None,
    scaled: Tensor | None = None,
    next_squares: Tensor | None = None,
    tap: Tensor | None = None,
) -> None:
    (T, K), N = x_TK.shape, out.shape[1]
    tiles, row_tiles = triton.cdiv(N, pipe.width), triton.cdiv(T, BLOCK_M)
    part, met = None, None
    if pipe.SPLITS > 1:
        assert row_tiles == 1, "those that wait for each other run at once"
        part = x_TK.new_empty(tiles, pipe.SPLITS, BLOCK_M, pipe.width, dtype=torch.float32)
        met = barrier_counters(x_TK.device)
    with torch.cuda.device_of(x_TK):
        _piped_linear_kernel[(tiles * pipe.SPLITS, row_tiles)](
            _blocks(whole_tiles(x_TK, BLOCK_M), BLOCK_M),
            _blocks(weight, pipe.BLOCK_N),
            _blocks(weight, pipe.BLOCK_N // 2) if pipe.HALF else None,
            bias,
            squares,
            out,
            next_norm,
            scaled,
            next_squares,
            tap,
            part,
            met,
            T,
            N,
            K,
            0 if squares is None else len(squares),
            0 if tap is None else tap.stride(0),
            eps,
            GATED=gated,
            PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
            BLOCK_M=BLOCK_M,
            BLOCK_K=BLOCK_K,
            STAGES=pipe.stages(gated),
            num_warps=4,
            **pipe._asdict(),
            **overlap(x_TK),
        )


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    shape = [rows, BLOCK_K]
    return TensorDescriptor.from_tensor(matrix, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))


@gluon.jit
def _piped_linear_kernel(
    x_desc,
    weight_desc,
    half_desc,
    bias_ptr,
    squares_ptr,
    out_ptr,
    next_norm_ptr,
    scaled_ptr,
    next_squares_ptr,
    tap_ptr,
    part_ptr,
    met_ptr,
    T,
    N,
    K,
    num_parts,
    tap_stride,
    eps,
    GATED: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HALF: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """Some outputs of some rows: GATED, where rows of gates lie before those of the rest in one block of shared memory,
    so that one product makes both; if there is a next norm, added to what is there, and the start of that norm."""
    SIDES: gl.constexpr = 2 if GATED else 1
    dtype: gl.constexpr = x_desc.dtype
    x_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    blocks = gl.allocate_shared_memory(dtype, [STAGES, SIDES * BLOCK_N, BLOCK_K], weight_desc.layout)
    halves = blocks
    if HALF:
        halves = gl.allocate_shared_memory(dtype, [STAGES, SIDES * BLOCK_N // 2, BLOCK_K], half_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)

    tile, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    run = gl.cdiv(gl.cdiv(K, BLOCK_K), SPLITS)
    steps = gl.maximum(gl.minimum(gl.cdiv(K, BLOCK_K) - split * run, run), 0)
    work = tile, split, split * run, steps, gl.program_id(1) * BLOCK_M

    sizes: gl.constexpr = (BLOCK_M, BLOCK_N, HALF, BLOCK_K, STAGES, OVERLAP, GATED, PARTS, SPLITS)
    shared = x_blocks, blocks, halves, full, free
    read = squares_ptr, num_parts, eps
    places = bias_ptr, out_ptr, next_norm_ptr, scaled_ptr, tap_ptr, tap_stride
    outside = read, places, next_squares_ptr, part_ptr, met_ptr, T, N, K
    gl.warp_specialize(
        [
            (_multiply_first, (shared, outside, work, sizes)),
            (_multiply_second, (shared, outside, work, sizes)),
            (_fetch, (x_desc, weight_desc, half_desc, shared, N, work, sizes)),
        ],
        [4, 1],
        [168, 40],
    )


@gluon.jit
def _fetch(x_desc, weight_desc, half_desc, shared, N, work, sizes: gl.constexpr):
    """Ask for all blocks in turn. Those of the weight are older than the kernel ahead."""
    BLOCK_K: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    x_blocks, _, _, full, free = shared
    tile, _, begin, steps, row = work
    next_start = gl.minimum(steps, STAGES)
    for step in range(next_start):
        _fetch_weight(weight_desc, half_desc, shared, N, tile, begin + step, step, sizes)
    wait(sizes[5])
    for step in range(next_start):
        column = (begin + step) * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(step), x_blocks.index(step))
    for step in range(STAGES, steps):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
        _fetch_weight(weight_desc, half_desc, shared, N, tile, begin + step, stage, sizes)
        column = (begin + step) * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(stage), x_blocks.index(stage))


@gluon.jit
def _fetch_weight(weight_desc, half_desc, shared, N, tile, block, stage, sizes: gl.constexpr):
    """Its part of a block, after saying how much will arrive with x."""
    BLOCK_M: gl.constexpr = sizes[0]
    BLOCK_N: gl.constexpr = sizes[1]
    HALF: gl.constexpr = sizes[2]
    BLOCK_K: gl.constexpr = sizes[3]
    SIDES: gl.constexpr = 2 if sizes[6] else 1
    WIDTH: gl.constexpr = BLOCK_N + BLOCK_N // 2 if HALF else BLOCK_N
    ROW: gl.constexpr = BLOCK_K * weight_desc.dtype.primitive_bitwidth // 8
    _, blocks, halves, full, _ = shared
    first, column = tile * WIDTH, block * BLOCK_K
    bar = full.index(stage)
    mbarrier.expect(bar, (BLOCK_M + SIDES * WIDTH) * ROW)
    for side in gl.static_range(SIDES):
        part = blocks.index(stage).slice(side * BLOCK_N, BLOCK_N)
        tma.async_copy_global_to_shared(weight_desc, [side * N + first, column], bar, part)
        if HALF:
            half = halves.index(stage).slice(side * BLOCK_N // 2, BLOCK_N // 2)
            tma.async_copy_global_to_shared(half_desc, [side * N + first + BLOCK_N, column], bar, half)


@gluon.jit
def _multiply_first(shared, outside, work, sizes: gl.constexpr):
    _multiply(shared, outside, work, sizes, 0)


@gluon.jit
def _multiply_second(shared, outside, work, sizes: gl.constexpr):
    _multiply(shared, outside, work, sizes, 1)


@gluon.jit
def _multiply(shared, outside, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """64 rows by one group of warps: the product, then what stands behind it."""
    BLOCK_N: gl.constexpr = sizes[1]
    HALF: gl.constexpr = sizes[2]
    STAGES: gl.constexpr = sizes[4]
    GATED: gl.constexpr = sizes[6]
    PARTS: gl.constexpr = sizes[7]
    SPLITS: gl.constexpr = sizes[8]
    SIDES: gl.constexpr = 2 if GATED else 1
    WIDTH: gl.constexpr = BLOCK_N + BLOCK_N // 2 if HALF else BLOCK_N
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDES * BLOCK_N, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDES * BLOCK_N // 2, 16])
    # Rows that are ended lie as in the product, or, of a shared one, as in memory.
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, BLOCK_N // 32], [1, 32], [4, 1], [1, 0])
    own: gl.constexpr = mma if SPLITS == 1 else lines
    half_own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 16])
    rows: gl.constexpr = gl.SliceLayout(1, own)
    x_blocks, blocks, halves, full, free = shared
    read, places, next_squares_ptr, part_ptr, met_ptr, T, N, K = outside
    squares_ptr, num_parts, eps = read
    tile, split, _, steps, row = work
    wait(sizes[5])
    # Where programs share the inputs, each ends some of the rows.
    OWN: gl.constexpr = 64 // SPLITS
    first, first_token = tile * WIDTH, row + GROUP * 64 + split * OWN

    # What the end needs is asked for now.
    factor = gl.full([OWN], 1.0, gl.float32, rows)
    if squares_ptr is not None:
        square_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 2], [1, 0])
        part = gl.arange(0, PARTS, gl.SliceLayout(1, square_layout))[:, None]
        square_token = first_token + gl.arange(0, OWN, gl.SliceLayout(0, square_layout))[None, :]
        known = (part < num_parts) & (square_token < T)
        squares = gl.load(squares_ptr + part * T + square_token, mask=known, other=0.0)
        factor = gl.convert_layout(1 / gl.sqrt(gl.sum(squares, 0) / K + eps), rows)
    before = _load_before(places, first_token, first, T, N, OWN, BLOCK_N, own)
    half_before = before
    if HALF:
        half_before = _load_before(places, first_token, first + BLOCK_N, T, N, OWN, BLOCK_N // 2, half_own)

    y = gl.zeros([64, SIDES * BLOCK_N], gl.float32, wide)
    half_y = gl.zeros([64, SIDES * BLOCK_N // 2], gl.float32, narrow)
    for step in range(steps):
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
    if HALF:
        y, half_y = warpgroup_mma_wait(num_outstanding=0, deps=(y, half_y))
    else:
        y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))

    if next_squares_ptr is None:
        _store(y, factor, first_token, first, places, T, N, GATED, BLOCK_N)
        if HALF:
            _store(half_y, factor, first_token, first + BLOCK_N, places, T, N, GATED, BLOCK_N // 2)
    else:
        if SPLITS > 1:
            y = _add_up(y, part_ptr, met_ptr, tile * 2 + GROUP, split, BLOCK_N, SPLITS, wide, own)
        own_squares = _store_added(y, before, first_token, first, places, T, N, OWN, BLOCK_N, own)
        if HALF:
            half_squares = _store_added(
                half_y, half_before, first_token, first + BLOCK_N, places, T, N, OWN, BLOCK_N // 2, half_own
            )
            own_squares += gl.convert_layout(half_squares, rows)
        token = first_token + gl.arange(0, OWN, rows)
        gl.store(next_squares_ptr + tile * T + token, own_squares, mask=token < T)


@gluon.jit
def _add_up(
    y,
    part_ptr,
    met_ptr,
    group,
    split,
    WIDTH: gl.constexpr,
    SPLITS: gl.constexpr,
    wide: gl.constexpr,
    own: gl.constexpr,
):
    """Some rows of what all programs that share the inputs have found. They were written by other multiprocessors, so
    they are read from the cache that all share."""
    OWN: gl.constexpr = 64 // SPLITS
    row, column = _indices(0, 0, 64, WIDTH, wide)
    gl.store(part_ptr + ((group * SPLITS + split) * 64 + row) * WIDTH + column, y)
    grid_barrier(met_ptr + group, split, SPLITS)
    own_row, own_column = _indices(split * OWN, 0, OWN, WIDTH, own)
    total = gl.zeros([OWN, WIDTH], gl.float32, own)
    for i in gl.static_range(SPLITS):
        part = ((group * SPLITS + i) * 64 + own_row) * WIDTH + own_column
        total += gl.load(part_ptr + part, cache_modifier=".cg")
    return total


@gluon.jit
def _store(y, factor, first_token, first, places, T, N, GATED: gl.constexpr, WIDTH: gl.constexpr):
    """Outputs from `first` on of 64 rows, which a norm divides; GATED, from gates and the rest side by side."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    bias_ptr, out_ptr, _, _, _, _ = places
    token, output = _indices(first_token, first, 64, WIDTH, layout)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    if GATED:
        gate, rest = gl.split(gl.permute(gl.reshape(y, [64, 2, WIDTH]), [0, 2, 1]))
        gate, rest = gl.convert_layout(gate, layout) * factor, gl.convert_layout(rest, layout) * factor
        if bias_ptr is not None:
            gate += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
            rest += gl.load(bias_ptr + N + output, mask=output < N, other=0.0).to(gl.float32)
        out = gate / (1 + gl.exp(-gate)) * rest
    else:
        out = y * factor
        if bias_ptr is not None:
            out += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
    place = token.to(gl.int64) * N + output
    gl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=(token < T) & (output < N))


@gluon.jit
def _store_added(
    y,
    before,
    first_token,
    first,
    places,
    T,
    N,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    layout: gl.constexpr,
):
    """Outputs from `first` on of some rows, added to what was there `before`, and the start of the norm that comes
    next. Returns their sums of squares."""
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
def _load_before(places, first_token, first, T, N, ROWS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """What is added to, if there is a next norm."""
    if places[2] is None:
        return gl.full([1, 1], 0.0, gl.float32, layout)
    else:
        token, output = _indices(first_token, first, ROWS, WIDTH, layout)
        place = token.to(gl.int64) * N + output
        return gl.load(places[1] + place, mask=(token < T) & (output < N), other=0.0).to(gl.float32)


@gluon.jit
def _indices(first_token, first, ROWS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    token = first_token + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    return token, first + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
