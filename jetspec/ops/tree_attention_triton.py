"""The portable Triton kernel of `tree_attention`: flash decoding over pages.

A program takes a tile of queries of one request and key head, and a run of its keys. The query heads that share a key
head are rows of the same tile, so K and V are loaded once for all of them. Where tiles alone would leave the GPU idle,
keys are split between programs, and the last program to finish combines the partial results. Grids depend on shapes
only; lengths are read on the device, so that a captured launch serves requests of any length.

Layout: q and out (T, H, E), K and V pages (P, S, G, E), page table (B, P), masks (B, N, W) words of 32 bits. Partial
results are (tiles, SPLITS, BLOCK_M, BLOCK_E) in fp32, with a log-sum-exp per row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import FEW_QUERY_ROWS, counters, is_narrow, power_of_2_below
from jetspec.ops.overlap_triton import LOWEST, launch, wait
from jetspec.ops.select import device_of
from jetspec.ops.tree_attention import UNSPECIALIZED, Attention
from jetspec.types import KVPages, TreeBatch

WARPS_PER_MULTIPROCESSOR = 8
"""Their tiles take all registers."""
MAX_SPLITS = 32
MANY_ROWS = 1024
"""Queries to one key head."""
ENOUGH_MEMORY = 128 * 1024
"""Shared memory of a multiprocessor that holds every tile. Most consumer GPUs have less."""
MAX_SPLIT_QUERIES = 256
"""Longer chains are prefills: their tiles fill a GPU, and their partial results would not stay in its cache."""

AT_ONCE = tl.constexpr(2)


class Tiling(NamedTuple):
    """Block sizes and how to run them."""

    BLOCK_M: int
    """Query rows: (node, head in group) pairs, node by node."""
    BLOCK_N: int
    """Keys. A multiple of 32, the bits of a mask word."""
    BLOCK_E: int
    min_run: int
    """Key blocks that pay for a split of their own, with the combination it needs. With more than two such runs, all
    splits are used."""
    num_warps: int
    num_stages: int


def attend(
    q_THE: Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None, out: Tensor | None
) -> Tensor:
    """`tree_attention` of in-flight tokens. In a chain, token i of a request is at position cached + i."""
    call, layout, device = Attention.of(q_THE, pages, batch, scale, window, out), batch.layout, device_of(q_THE.device)
    tiling = _choose_tiling(call.rows, call.key_heads, q_THE.shape[2], q_THE.element_size())
    tiling = _fit(tiling, device.shared_memory)
    tiles = triton.cdiv(call.rows, tiling.BLOCK_M)
    programs, max_blocks = tiles * call.key_heads, triton.cdiv(call.capacity, tiling.BLOCK_N)
    fitting = device.multiprocessors * WARPS_PER_MULTIPROCESSOR // (programs * tiling.num_warps)
    splits = choose_splits(fitting, layout.max_queries, max_blocks // tiling.min_run)
    part, lse = call.partial(programs, splits, tiling.BLOCK_M, tiling.BLOCK_E)
    is_tree_B = None if call.ancestor is None else batch.is_tree_B
    finished = counters(q_THE.device) if splits > 1 else None
    tensors = pages.k, pages.v, batch.position_T, is_tree_B, call.operands(), part, lse, finished
    numbers = call.log2_scale, window or 0, layout.first_seen, layout.earlier, tiles
    strides = pages.k.stride(1), pages.k.stride(2), *call.strides()
    sizes = {"TREE": call.ancestor is not None, "WINDOWED": window is not None, "SPLITS": splits}
    sizes |= call.constants() | tiling._asdict()
    launch(_tree_attention_kernel, (programs, splits), *tensors, *numbers, *strides, **sizes)
    return call.out


def _choose_tiling(rows: int, key_heads: int, E: int, itemsize: int) -> Tiling:
    """Products of fp32 run outside the tensor cores, from registers, which hold smaller tiles. With few rows, small
    tiles give more programs."""
    block_e = max(16, triton.next_power_of_2(E))
    block_m = max(16, triton.next_power_of_2(rows))
    if itemsize > 2:
        return Tiling(min(block_m, 16), 32, block_e, min_run=2, num_warps=4, num_stages=2)
    if block_e > 128:
        return Tiling(min(block_m, 64), 64, block_e, min_run=2, num_warps=8, num_stages=2)
    if rows <= FEW_QUERY_ROWS or is_narrow(rows, key_heads):
        return Tiling(16, 128, block_e, min_run=1, num_warps=4, num_stages=2)
    if rows <= MANY_ROWS:
        return Tiling(64, 64, block_e, min_run=6, num_warps=4, num_stages=3)
    return Tiling(128, 64, block_e, min_run=3, num_warps=8, num_stages=3)


def _fit(tiling: Tiling, memory: int) -> Tiling:
    """Large tiles have fewer blocks in flight where shared memory is short."""
    if memory >= ENOUGH_MEMORY or tiling.BLOCK_M < 64:
        return tiling
    return tiling._replace(num_stages=tiling.num_stages - 1)


def choose_splits(fitting: int, max_queries: int, max_runs: int) -> int:
    """Runs of keys that fit on the GPU together. A power of two, so that nearby shapes share a compiled kernel."""
    if max_queries > MAX_SPLIT_QUERIES:
        return 1
    return power_of_2_below(min(fitting, MAX_SPLITS, max_runs))


@triton.jit(do_not_specialize=["window", "first_seen", "earlier", "tiles", "min_run", *UNSPECIALIZED])
def _tree_attention_kernel(
    k_ptr,
    v_ptr,
    position_ptr,
    is_tree_ptr,
    operands,
    part_ptr,
    lse_ptr,
    finished_ptr,
    scale,
    window,
    first_seen,
    earlier,
    tiles,
    kv_stride_slot,
    kv_stride_g,
    q_stride_t,
    q_stride_h,
    page_stride_b,
    ancestor_stride_b,
    ancestor_stride_n,
    W,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    G: tl.constexpr,
    REPEAT: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    min_run,
    OVERLAP: tl.constexpr = False,
):
    """One tile of queries over one run of key blocks.

    Keys of a request are numbered by their place in its pages. Keys below `shared`, the prefix from `first_seen` on,
    are visible to the whole tile, up to a window; keys from there to `end` are masked query by query. Each kind has
    blocks of its own, so that blocks of a tree start at a word of the mask. Both kinds share one loop: a second loop
    would start with an empty pipeline, which costs more than a block of keys. A chain has one kind, up to its diagonal.
    With a TREE, `is_tree_ptr` tells the requests that are chains.

    The previous kernel writes q and the K and V in flight, but not lengths, pages and masks. These are read while it
    still runs, and pages always one block ahead.
    """
    q_ptr, page_ptr, cached_ptr, start_ptr, ancestor_ptr, out_ptr = operands
    # read lengths. Late tiles of a chain see the most keys, so they start first; tiles that share keys are neighbours.
    tile = tiles - 1 - tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    split = tl.program_id(1)
    request = (pair // G).to(tl.int64)
    group = pair % G
    start = tl.load(start_ptr + request).to(tl.int64)
    count = (tl.load(start_ptr + request + 1) - start).to(tl.int32)
    cached = tl.load(cached_ptr + request).to(tl.int32)
    first_node = tile * BLOCK_M // REPEAT

    # Rows past the last node repeat it, and are not stored.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row // REPEAT < count
    node = tl.maximum(tl.minimum(row // REPEAT, count - 1), 0)
    token = start + node
    head = group * REPEAT + row % REPEAT
    is_tree = TREE
    if is_tree_ptr is not None:
        is_tree = tl.load(is_tree_ptr + request) != 0
    diagonal = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // REPEAT + 1, count)
    end = cached + tl.where(is_tree, earlier + count, diagonal)
    shared = tl.where(is_tree, cached, end)
    begin = first_seen
    if WINDOWED:
        position = tl.load(position_ptr + token).to(tl.int32) if TREE else cached + node
        hidden = position - window  # the last hidden position
        begin = tl.maximum(tl.min(hidden) + 1, first_seen)

    # choose the run of key blocks
    shared_blocks = tl.cdiv(tl.maximum(shared - begin, 0), BLOCK_N)
    num_blocks = shared_blocks + tl.cdiv(end - shared, BLOCK_N)
    clear = 0  # blocks without a mask
    if not WINDOWED:
        clear = tl.maximum(tl.where(is_tree, cached, cached + first_node + 1) - begin, 0) // BLOCK_N
    first, last, busy = 0, num_blocks, 1
    if SPLITS > 1:
        run = tl.where(num_blocks > 2 * min_run, tl.cdiv(num_blocks, SPLITS), min_run)
        busy = tl.maximum(tl.cdiv(num_blocks, run), 1)
        first = split * run
        last = tl.minimum(first + run, num_blocks)

    # look up the first slots
    page_ptr += request * page_stride_b
    key, limit = _keys(first, shared_blocks, begin, shared, end, BLOCK_N)
    slot = _slot(page_ptr, key, limit, PAGE_SIZE)
    wait(OVERLAP)
    if first_node >= count or split >= busy:  # the first split also writes a tile that sees no keys
        return

    # load Q tile
    k_ptr += group * kv_stride_g
    v_ptr += group * kv_stride_g
    q = _load_rows(q_ptr, token * q_stride_t + head * q_stride_h, E, BLOCK_E)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    for block in range(first, last):
        # look up the next slots
        next_key, next_limit = _keys(block + 1, shared_blocks, begin, shared, end, BLOCK_N)
        next_slot = _slot(page_ptr, next_key, next_limit, PAGE_SIZE)
        # load K tile, scores
        k = _load_rows(k_ptr, slot * kv_stride_slot, E, BLOCK_E)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        # mask
        if block >= clear:
            key, limit = _keys(block, shared_blocks, begin, shared, end, BLOCK_N)
            seen = key[None, :] < limit
            if TREE:
                bits_of = node
                if is_tree_ptr is not None:
                    bits_of = tl.where(is_tree, node, 0)  # a chain may be longer than there are bits
                words_ptr = ancestor_ptr + request * ancestor_stride_b + bits_of * ancestor_stride_n
                seen = seen & _ancestors(words_ptr, block - shared_blocks, W, BLOCK_M, BLOCK_N)
            if not TREE or is_tree_ptr is not None:
                seen = seen & (is_tree | (key[None, :] <= cached + node[:, None]))
            if WINDOWED:
                key_position = key
                if TREE:
                    flying = tl.maximum(tl.minimum(key, end - 1) - cached, 0)
                    flying_position = tl.load(position_ptr + start + flying, mask=key >= cached, other=0).to(tl.int32)
                    key_position = tl.where(key >= cached, flying_position, key)
                seen = seen & (key_position[None, :] > hidden[:, None])
            score = tl.where(seen, score, float("-inf"))
        # load V tile, online softmax
        v = _load_rows(v_ptr, slot * kv_stride_slot, E, BLOCK_E)
        top, total, acc = _add_block(score, v, scale, top, total, acc)
        slot = next_slot

    if SPLITS > 1:  # noqa: SIM102 (the outer condition is the compiler's)
        if busy > 1:
            # store partials
            mine = tl.program_id(0) * SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
            column = tl.arange(0, BLOCK_E)[None, :]
            divisor = tl.where(total > 0, total, 1.0)
            row_lse = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
            tl.store(lse_ptr + mine + split * BLOCK_M, row_lse)
            tl.store(part_ptr + (mine + split * BLOCK_M)[:, None] * BLOCK_E + column, acc / divisor[:, None])
            # count finished splits: all stores of a program come before its count, all loads of the last one after
            tl.debug_barrier()
            before = tl.atomic_add(finished_ptr + tl.program_id(0), 1, sem="acq_rel")
            if before < busy - 1:
                return
            tl.store(finished_ptr + tl.program_id(0), 0)
            # combine splits
            top, total, acc = _combine(lse_ptr, part_ptr, mine, column, busy, BLOCK_M, BLOCK_E)

    # store output
    divisor = tl.where(total > 0, total, 1.0)
    column = tl.arange(0, BLOCK_E)[None, :]
    place = (token * (G * REPEAT) + head)[:, None] * E + column
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask=exists[:, None] & (column < E))


@triton.jit
def _combine(lse_ptr, part_ptr, mine, column, busy, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The online softmax over the partials of all splits, each weighted by its sum of exponentials.

    Other multiprocessors wrote them, so they are loaded from the L2 cache, several at once.
    """
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for first in range(0, busy, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            split = first + i
            rows = mine + split * BLOCK_M
            lse = tl.load(lse_ptr + rows, mask=split < busy, other=float("-inf"), cache_modifier=".cg")
            place = rows[:, None] * BLOCK_E + column
            part = tl.load(part_ptr + place, mask=split < busy, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, lse)
            keep, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            acc = acc * keep[:, None] + part * weight[:, None]
            total = total * keep + weight
            top = new_top
    return top, total, acc


@triton.jit
def _add_block(score, v, scale, top, total, acc):
    """Adds one block of keys to the online softmax, relative to the highest score of each row. `scale` includes
    log2(e), since the hardware computes powers of two."""
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_top[:, None])
    keep = tl.exp2(top - new_top)
    acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new_top, total * keep + tl.sum(weight, 1), acc


@triton.jit
def _keys(block, shared_blocks, begin, shared, end, BLOCK_N: tl.constexpr):
    """Numbers of the keys of a block, and the end of their kind: prefix or tree."""
    is_shared = block < shared_blocks
    first = tl.where(is_shared, begin + block * BLOCK_N, shared + (block - shared_blocks) * BLOCK_N)
    return first + tl.arange(0, BLOCK_N), tl.where(is_shared, shared, end)


@triton.jit
def _ancestors(words_ptr, block, W, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """True for the keys of a block that a row sees, by the bits of its mask: all of the prefix, whose blocks are
    negative."""
    lane = tl.arange(0, BLOCK_N)[None, :]
    words = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for i in tl.static_range(BLOCK_N // 32):
        place = block * (BLOCK_N // 32) + i
        word = tl.load(words_ptr + place, mask=(place >= 0) & (place < W), other=0)
        words = tl.where(lane // 32 == i, word[:, None], words)
    return (block < 0) | ((words >> (lane % 32)) & 1 != 0)


@triton.jit
def _slot(page_ptr, key, end, PAGE_SIZE: tl.constexpr):
    """Slots of keys. Keys from `end` on have the slot of the last one, and are masked."""
    key = tl.maximum(tl.minimum(key, end - 1), 0)
    return tl.load(page_ptr + key // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE


@triton.jit
def _load_rows(ptr, offset, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Loads rows of E numbers, padded with zeros."""
    column = tl.arange(0, BLOCK_E)[None, :]
    if E == BLOCK_E:
        return tl.load(ptr + offset[:, None] + column)
    else:
        return tl.load(ptr + offset[:, None] + column, mask=column < E, other=0.0)
