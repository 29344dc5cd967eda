"""The kernel of `tree_attention` for trees with many queries, which are a matter of tensor cores.

It is written in Gluon, the language below Triton, and is warp-specialized. One producer warp copies pages of keys and
values to shared memory (TMA); one or two consumer groups of four warps multiply 64 query rows each (wgmma). The scores
of a block are multiplied while the softmax of the last block runs. Keys are split between programs, as in
`tree_attention_triton`; they wait for each other at a grid barrier, and each combines some rows.

No more programs run than there are multiprocessors, one each. Programs that wait for each other are neighbours in the
grid. A GPU starts programs in grid order, so even if it runs other work too, all but the last few have their neighbours
beside them, and end.

Layout: q and out (T, H, E), K and V pages (P, S, G, E), page table (B, P). A stage of shared memory holds BLOCK_N keys
in lines of 64 numbers (128 bytes): all lines of one half of the head, then those of the other.

The code is short on purpose: between two calls the weights of a layer evict it from the cache, so each call reads it
anew, as fast as it runs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetspec.ops.fragments_gluon import grid_barrier, index
from jetspec.ops.layouts import (
    LONG_WARP_KEYS,
    MAX_BARRIER_PROGRAMS,
    WARP_KEYS,
    WARP_QUERIES,
    barrier_counters,
    num_groups,
    num_tiles,
    power_of_2_below,
)
from jetspec.ops.overlap_triton import LOWEST, launch, wait
from jetspec.ops.select import device_of, enabled
from jetspec.ops.tree_attention import UNSPECIALIZED, Attention
from jetspec.types import KVPages, TreeBatch

STAGE_KEYS = {64: 512, 128: 384}
"""Keys in flight, by the size of a head."""
FEW_STAGE_KEYS = {64: 256, 128: 192}
"""Keys in flight where several programs share a multiprocessor and hide each other's latency."""
MIN_RUN = 512
"""Keys that pay for a split of their own, with the combination it needs."""
MAX_SPLITS = MAX_BARRIER_PROGRAMS
BLOCK_M = gl.constexpr(WARP_QUERIES)


class Sizes(NamedTuple):
    """Constants of the kernel: the shape of pages and heads, splits and consumer groups, keys of a block, and blocks in
    flight."""

    PAGE_SIZE: int
    G: int
    REPEAT: int
    E: int
    SPLITS: int
    GROUPS: int
    BLOCK_N: int
    STAGES: int


def attend(
    q_THE: Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None, out: Tensor | None
) -> Tensor:
    """`tree_attention` without windows, tokens of earlier forwards and hidden first positions."""
    call, E = Attention.of(q_THE, pages, batch, scale, window, out), q_THE.shape[2]
    multiprocessors = device_of(q_THE.device).multiprocessors
    groups = num_groups(call.rows, call.capacity) if enabled("tree_attention.two_groups", q_THE.device) else 1
    tiles = num_tiles(call.rows, groups * WARP_QUERIES)
    block_n = WARP_KEYS if groups == 1 else LONG_WARP_KEYS
    programs, most_runs = tiles * call.key_heads, triton.cdiv(call.capacity, MIN_RUN)
    splits = power_of_2_below(min(multiprocessors // programs, MAX_SPLITS, most_runs))
    is_shared = tiles == 1 and programs > multiprocessors
    stage_keys = (FEW_STAGE_KEYS if is_shared else STAGE_KEYS)[E]
    part, lse = call.partial(programs * groups, splits, WARP_QUERIES, E)
    blocks = {"SPLITS": splits, "GROUPS": groups, "BLOCK_N": block_n, "STAGES": stage_keys // block_n}
    sizes = Sizes(**call.constants(), **blocks)
    tensors = _pages(pages.k), _pages(pages.v), call.operands(), part, lse, barrier_counters(q_THE.device)
    slots = len(pages.k) * batch.layout.page_size
    numbers = call.log2_scale, tiles, slots, *call.strides(), MIN_RUN // block_n
    grid = (programs * splits,)
    launch(_warp_specialized_attention_kernel, grid, *tensors, *numbers, sizes=sizes, num_warps=WARP_QUERIES // 16)
    return call.out


def _pages(x_PSGE: Tensor) -> TensorDescriptor:
    """Descriptor of a page's tokens: 64 numbers each, a line of shared memory of 128 bytes."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x_PSGE.dtype]
    shape = [x_PSGE.shape[1], 64]
    rows = x_PSGE.flatten(2).flatten(0, 1)
    return TensorDescriptor.from_tensor(rows, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))


@gluon.jit(do_not_specialize=["tiles", "slots", "min_run", *UNSPECIALIZED])
def _warp_specialized_attention_kernel(
    k_desc,
    v_desc,
    operands,
    part_ptr,
    lse_ptr,
    barrier_ptr,
    scale,
    tiles,
    slots,
    q_stride_t,
    q_stride_h,
    page_stride_b,
    ancestor_stride_b,
    ancestor_stride_n,
    W,
    min_run,
    sizes: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """One tile of queries over a run of key blocks, of the prefix and of the tree alike.

    The previous kernel writes q and the K and V in flight, but not lengths, pages and masks.
    """
    q_ptr, page_ptr, cached_ptr, start_ptr, ancestor_ptr, out_ptr = operands
    # read lengths, choose the run of key blocks
    HALVES: gl.constexpr = sizes.E // 64
    SPLITS: gl.constexpr = sizes.SPLITS
    GROUPS: gl.constexpr = sizes.GROUPS
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    STAGES: gl.constexpr = sizes.STAGES
    dtype: gl.constexpr = k_desc.dtype
    number, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    tile = number % tiles
    pair = number // tiles
    request = (pair // sizes.G).to(gl.int64)
    group = pair % sizes.G
    start = gl.load(start_ptr + request).to(gl.int64)
    count = (gl.load(start_ptr + request + 1) - start).to(gl.int32)
    cached = gl.load(cached_ptr + request).to(gl.int32)
    end = cached + count
    num_blocks = gl.cdiv(end, BLOCK_N)
    run = gl.maximum(gl.cdiv(num_blocks, SPLITS), min_run)
    # Few keys are not split: each program takes the rows of one consumer group, with its first group.
    apart = (SPLITS > 1) & (GROUPS > 1) & (num_blocks <= 2 * min_run)
    run = gl.where(apart, 2 * min_run, run)
    busy = gl.cdiv(num_blocks, run)
    first = gl.where(apart & (split < GROUPS), 0, split * run)
    steps = gl.maximum(gl.minimum(num_blocks - first, run), 0)
    if (tile * GROUPS + gl.where(apart, split, 0)) * BLOCK_M // sizes.REPEAT >= count:
        steps = 0 * steps

    # allocate stages and barriers
    q_blocks = gl.allocate_shared_memory(dtype, [GROUPS, BLOCK_M, sizes.E], k_desc.layout)
    k_blocks = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, 64], k_desc.layout)
    v_blocks = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, 64], k_desc.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=GROUPS)
        mbarrier.init(v_free.index(stage), count=GROUPS)

    # start the producer warp and the consumer groups
    shared = q_blocks, k_blocks, v_blocks, k_full, v_full, k_free, v_free
    if ancestor_ptr is not None:
        ancestor_ptr += request * ancestor_stride_b
    places = q_ptr, ancestor_ptr, out_ptr, part_ptr, lse_ptr, barrier_ptr
    numbers = scale, q_stride_t, q_stride_h, ancestor_stride_n, W
    work = number, split, busy, tile, group, start, count, cached, first, steps, apart
    pages = page_ptr + request * page_stride_b, slots
    copied = k_desc, v_desc, pages, shared, group, first, steps, end, apart
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (shared, places, numbers, work, sizes, OVERLAP, 0)),
                (_attend, (shared, places, numbers, work, sizes, OVERLAP, 1)),
                (_fetch, (copied, sizes, OVERLAP)),
            ],
            [4, 1],
            [216, 40],
        )
    else:
        gl.warp_specialize(
            [(_attend, (shared, places, numbers, work, sizes, OVERLAP, 0)), (_fetch, (copied, sizes, OVERLAP))],
            [1],
            [40],
        )


@gluon.jit
def _fetch(work, sizes: gl.constexpr, OVERLAP: gl.constexpr):
    """The producer warp: copies all blocks in turn, and looks up the pages of the next block ahead. It frees stages on
    behalf of a consumer group without rows."""
    PAGE_SIZE: gl.constexpr = sizes.PAGE_SIZE
    PAGES: gl.constexpr = sizes.BLOCK_N // PAGE_SIZE
    STAGES: gl.constexpr = sizes.STAGES
    k_desc, v_desc, pages, shared, group, first, steps, end, apart = work
    _, k_blocks, v_blocks, k_full, v_full, k_free, v_free = shared
    slots = _slots(pages, first * PAGES, end, PAGE_SIZE, PAGES)
    wait(OVERLAP)
    for step in range(steps):
        stage, parity = step % STAGES, (step // STAGES + 1) & 1
        next_slots = _slots(pages, (first + step + 1) * PAGES, end, PAGE_SIZE, PAGES)
        if sizes.GROUPS > 1:
            mbarrier.arrive(k_free.index(stage), pred=apart & (step >= STAGES))
            mbarrier.arrive(v_free.index(stage), pred=apart & (step >= STAGES))
        # load K block, load V block
        mbarrier.wait(k_free.index(stage), parity)
        _fetch_block(k_desc, slots, k_blocks, k_full, stage, group, PAGES, sizes.E)
        mbarrier.wait(v_free.index(stage), parity)
        _fetch_block(v_desc, slots, v_blocks, v_full, stage, group, PAGES, sizes.E)
        slots = next_slots


@gluon.jit
def _slots(pages, page, end, PAGE_SIZE: gl.constexpr, PAGES: gl.constexpr):
    """First slots of some pages. Pages behind the last one start past the cache, where copies read zeros."""
    page_ptr, behind = pages
    last = (end - 1) // PAGE_SIZE
    slots = ()
    for i in gl.static_range(PAGES):
        slot = gl.load(page_ptr + gl.maximum(gl.minimum(page + i, last), 0)).to(gl.int32) * PAGE_SIZE
        found = (gl.where(page + i <= last, slot, behind),)
        slots = slots + found  # type: ignore[assignment]
    return slots


@gluon.jit
def _fetch_block(desc, slots, blocks, full, stage, group, PAGES: gl.constexpr, E: gl.constexpr):
    """Copies the pages that begin at `slots`, each in halves of a head."""
    HALVES: gl.constexpr = E // 64
    bar, places = full.index(stage), _as_pages(blocks, PAGES)
    mbarrier.expect(bar, blocks.shape[1] * E * desc.dtype.primitive_bitwidth // 8)
    for i in gl.static_range(PAGES):
        for half in gl.static_range(HALVES):
            place = places.index((stage * HALVES + half) * PAGES + i)
            tma.async_copy_global_to_shared(desc, [slots[i], group * E + half * 64], bar, place)


@gluon.jit
def _as_pages(blocks, PAGES: gl.constexpr):
    """The same memory, page by page."""
    shape: gl.constexpr = [blocks.shape[0] * PAGES, blocks.shape[1] // PAGES, blocks.shape[2]]
    return blocks._reinterpret(blocks.dtype, shape, blocks.layout)


@gluon.jit
def _attend(shared, places, numbers, work, sizes: gl.constexpr, OVERLAP: gl.constexpr, GROUP: gl.constexpr):
    """A consumer group: all of its rows. Every step multiplies the values of the previous step; the first one
    multiplies by zeros."""
    REPEAT: gl.constexpr = sizes.REPEAT
    E: gl.constexpr = sizes.E
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    STAGES: gl.constexpr = sizes.STAGES
    HALVES: gl.constexpr = E // 64
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, BLOCK_N, 16])
    outputs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, E, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, outputs, 2)
    q_blocks, k_halves, v_halves, k_full, v_full, k_free, v_free = shared
    q_ptr, ancestor_ptr, _, _, _, _ = places
    scale, q_stride_t, q_stride_h, ancestor_stride_n, W = numbers
    _, split, _, tile, group, start, count, cached, first, steps, apart = work
    dtype: gl.constexpr = q_blocks.dtype
    k_blocks = k_halves._reinterpret(dtype, [STAGES, BLOCK_N, E], k_halves.layout)
    v_blocks = v_halves._reinterpret(dtype, [STAGES, BLOCK_N, E], v_halves.layout)
    first_row = (tile * sizes.GROUPS + gl.where(apart, split, GROUP)) * BLOCK_M
    wait(OVERLAP)
    if (steps > 0) & ((GROUP == 0) | (apart == 0)):
        # load Q tile: rows past the last node repeat it and are not stored
        q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [BLOCK_M // 16, 1], [1, 0])
        row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, q_layout))
        token = start + gl.minimum(row // REPEAT, count - 1)
        q_place = token * q_stride_t + (group * REPEAT + row % REPEAT) * q_stride_h
        q = gl.load(q_ptr + q_place[:, None] + gl.arange(0, E, gl.SliceLayout(0, q_layout))[None, :])
        q_blocks.index(GROUP).store(q)
        fence_async_shared()
        tl.debug_barrier()

        node = gl.minimum((first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))) // REPEAT, count - 1)
        words_ptr = None
        if ancestor_ptr is not None:
            words_ptr = ancestor_ptr + node.to(gl.int64) * ancestor_stride_n
        top = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(1, scores))
        total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
        acc = gl.zeros([BLOCK_M, E], gl.float32, outputs)
        p = gl.zeros([BLOCK_M, BLOCK_N], dtype, weights)
        for step in range(steps):
            stage, parity = step % STAGES, (step // STAGES) & 1
            # scores
            mbarrier.wait(k_full.index(stage), parity)
            s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
            k = k_blocks.index(stage).permute((1, 0))
            s = warpgroup_mma(q_blocks.index(GROUP), k, s, use_acc=False, is_async=True)
            if step == steps - 1:
                mbarrier.wait(v_full.index(stage), parity)
                length = cached + count - (first + step) * BLOCK_N
                _clear_rest(v_halves, stage * HALVES, length, sizes)
            # weighted values of the previous block
            before = gl.maximum(step - 1, 0)
            mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
            acc = warpgroup_mma(p, v_blocks.index(before % STAGES), acc, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_free.index(stage))
            # mask
            if (first + step + 1) * BLOCK_N > cached:
                s = _mask(s, words_ptr, node, (first + step) * BLOCK_N - cached, count, W, BLOCK_N, scores)
            # online softmax. The condition always holds, which keeps the compiler from scheduling it after the wait.
            weight, keep = s, top
            if step < cached + count:
                new_top = gl.maximum(top, gl.max(s, 1) * scale)
                weight = gl.exp2(s * scale - new_top[:, None])
                keep = gl.exp2(top - new_top)
                total = total * keep + gl.sum(weight, 1)
                top = new_top
            kept = gl.convert_layout(keep, gl.SliceLayout(1, outputs))[:, None]
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,)) * kept
            mbarrier.arrive(v_free.index(before % STAGES), pred=step > 0)
            p = gl.convert_layout(weight.to(dtype), weights)

        # weighted values of the last block
        acc = warpgroup_mma(p, v_blocks.index((steps - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        _finish(acc, top, total, first_row, places, work, sizes, GROUP)


@gluon.jit
def _clear_rest(v_blocks, block, length, sizes: gl.constexpr):
    """Zeroes the values behind the last node in its page: they may be NaN, which a weight of 0 would not remove."""
    PAGE_SIZE: gl.constexpr = sizes.PAGE_SIZE
    HALVES: gl.constexpr = sizes.E // 64
    if length % PAGE_SIZE != 0 and length < sizes.BLOCK_N:
        PAGES: gl.constexpr = sizes.BLOCK_N // PAGE_SIZE
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [BLOCK_M // 16, 1], [1, 0])
        exists = gl.arange(0, PAGE_SIZE, gl.SliceLayout(1, layout))[:, None] < length % PAGE_SIZE
        pages = _as_pages(v_blocks, PAGES)
        for half in gl.static_range(HALVES):
            page = pages.index((block + half) * PAGES + length // PAGE_SIZE)
            v = page.load(layout)
            page.store(gl.where(exists, v, gl.zeros([PAGE_SIZE, 64], v.dtype, layout)))
        fence_async_shared()
        tl.debug_barrier()


@gluon.jit
def _mask(s, words_ptr, node, bit, count, W, BLOCK_N: gl.constexpr, scores: gl.constexpr):
    """Masks the scores of nodes from `bit` on, negative in the prefix: a query sees all of the prefix, and nodes by the
    bits of its mask, of which a block may begin anywhere in a word."""
    # A thread holds two neighbours of every eight columns, so the bits are shifted to the end of each byte first.
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))[None, :]
    number, shift = bit >> 5, bit & 31
    bits = gl.zeros(s.shape, gl.int32, scores)
    word = _word(words_ptr, node, number, count, W)
    for i in gl.static_range(BLOCK_N // 32):
        next_word = _word(words_ptr, node, number + i + 1, count, W)
        some = (((word & 0xFFFFFFFF) | (next_word << 32)) >> shift).to(gl.int32)
        bits = gl.where(column // 32 == i, some[:, None] >> (column % 8), bits)
        word = next_word
    return gl.where((bits >> (column // 8 % 4 * 8)) & 1 != 0, s, float("-inf"))


@gluon.jit
def _word(words_ptr, node, number, count, W):
    """A word of the mask of each row; in a chain a node sees the nodes up to itself. Bits of the prefix, before the
    first node, are set; bits behind the last node are not."""
    if words_ptr is None:
        word, end = -1, node + 1
    else:
        word, end = gl.load(words_ptr + gl.minimum(gl.maximum(number, 0), W - 1)).to(gl.int64), count
    known = gl.minimum(gl.maximum(end - number * 32, 0), 32).to(gl.int64)
    return gl.where(number < 0, -1, word & ((1 << known) - 1))


@gluon.jit
def _finish(acc, top, total, first_row, places, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Stores the output, or the partials of a split, and combines some rows once all splits have stored theirs."""
    REPEAT: gl.constexpr = sizes.REPEAT
    E: gl.constexpr = sizes.E
    SPLITS: gl.constexpr = sizes.SPLITS
    outputs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, E, 16])
    _, _, out_ptr, part_ptr, lse_ptr, barrier_ptr = places
    number, split, busy, _, group, start, count, _, _, _, _ = work
    number = number * sizes.GROUPS + GROUP
    top = gl.convert_layout(top, gl.SliceLayout(1, outputs))
    total = gl.convert_layout(total, gl.SliceLayout(1, outputs))
    divisor = gl.where(total > 0, total, 1.0)
    acc = acc * (1 / divisor)[:, None]
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, outputs))
    column = gl.arange(0, E, gl.SliceLayout(0, outputs))[None, :]
    # store output
    if busy == 1:
        out_place = _places_of_rows(first_row + row, start, group, sizes)[:, None] + column
        exists = ((first_row + row) // REPEAT < count)[:, None]
        gl.store(out_ptr + out_place, acc.to(out_ptr.dtype.element_ty), mask=exists)
    elif SPLITS > 1:
        # store partials
        part = (number * SPLITS + split) * BLOCK_M + row
        gl.store(lse_ptr + part, gl.where(total > 0, top + gl.log2(divisor), float("-inf")))
        gl.store(part_ptr + part[:, None] * E + column, acc)
        grid_barrier(barrier_ptr + number, split, busy)
        # combine splits, store output
        ROWS: gl.constexpr = BLOCK_M // SPLITS
        parts: gl.constexpr = gl.BlockedLayout([SPLITS, 1, E // 32], [1, 1, 32], [1, BLOCK_M // 16, 1], [2, 1, 0])
        for chunk in range(split, SPLITS, busy):
            found = _combine(lse_ptr, part_ptr, number, chunk * ROWS, busy, sizes, parts)
            some = first_row + chunk * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(0, parts)))
            some_place = _places_of_rows(some, start, group, sizes)[:, None]
            some_column = gl.arange(0, E, gl.SliceLayout(0, gl.SliceLayout(0, parts)))[None, :]
            inside = (some // REPEAT < count)[:, None]
            gl.store(out_ptr + some_place + some_column, found.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _places_of_rows(row, start, group, sizes: gl.constexpr):
    REPEAT: gl.constexpr = sizes.REPEAT
    return ((start + row // REPEAT) * (sizes.G * REPEAT) + group * REPEAT + row % REPEAT) * sizes.E


@gluon.jit
def _combine(lse_ptr, part_ptr, number, first, busy, sizes: gl.constexpr, parts: gl.constexpr):
    """Rows of a tile from `first` on: the partials of all splits, each weighted by its sum of exponentials.

    Other multiprocessors wrote them, so they are loaded from the L2 cache, all at once.
    """
    SPLITS: gl.constexpr = sizes.SPLITS
    split = index(SPLITS, 0, parts)
    part = (number * SPLITS + split) * BLOCK_M + first + index(BLOCK_M // SPLITS, 1, parts)
    lse = gl.load(lse_ptr + part, mask=split < busy, other=float("-inf"), cache_modifier=".cg")
    values_ptr = part_ptr + part * sizes.E + index(sizes.E, 2, parts)
    values = gl.load(values_ptr, mask=split < busy, other=0.0, cache_modifier=".cg")
    weight = gl.exp2(lse - gl.maximum(gl.max(lse, 0), LOWEST)[None, :, :])
    total = gl.sum(weight, 0)
    return gl.sum(values * weight, 0) * (1 / gl.where(total > 0, total, 1.0))
