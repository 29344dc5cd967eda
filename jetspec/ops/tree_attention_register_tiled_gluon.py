"""The kernel of `tree_attention` for few queries, which are a matter of latency.

It is written in Gluon, the language below Triton, where a program sets which thread holds which element. Every warp has
keys of its own: it loads them straight into the registers of its tensor core, without shared memory, and keeps its own
softmax; at the end the warps of a program are combined. As long as its warps hold all keys at once, a tile of queries
takes one program, which waits once for the memory. More keys are split between programs, as in `tree_attention_triton`,
and a program loads its next keys as soon as the current scores are computed, before their values.

Layout: q (T, H, E), K and V pages (P, S, G, E), page table (B, P), out (T, H, E). A tile is 16 query rows of a request
and key head; scores are (WARPS, 16, C) with C keys per warp.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jetspec.ops.fragments_gluon import index
from jetspec.ops.layouts import REGISTER_QUERIES, counters, power_of_2_below
from jetspec.ops.overlap_triton import LOWEST, launch, wait
from jetspec.ops.select import device_of
from jetspec.ops.tree_attention import UNSPECIALIZED, Attention
from jetspec.types import KVPages, TreeBatch

MAX_SPLITS = 32
BLOCK_M = tl.constexpr(REGISTER_QUERIES)
AT_ONCE = tl.constexpr(128)
"""Numbers of other programs' results that a thread loads together: their latency dominates."""


class RegisterKeys(NamedTuple):
    """Warps of a program, and the keys of each at once: a multiple of 32, the bits of a mask word."""

    WARPS: int
    C: int


KEYS = {64: RegisterKeys(8, 64), 128: RegisterKeys(8, 32)}
"""By the size of a head."""


def attend(
    q_THE: Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None, out: Tensor | None
) -> Tensor:
    """`tree_attention` without windows and tokens of earlier forwards. A program fills a multiprocessor."""
    call, layout, E = Attention.of(q_THE, pages, batch, scale, window, out), batch.layout, q_THE.shape[2]
    keys, tiles = KEYS[E], triton.cdiv(call.rows, REGISTER_QUERIES)
    programs, most_runs = tiles * call.key_heads, triton.cdiv(call.capacity, keys.WARPS * keys.C)
    splits = power_of_2_below(min(device_of(q_THE.device).multiprocessors // programs, MAX_SPLITS, most_runs))
    part, lse = call.partial(programs, splits, REGISTER_QUERIES, E)
    tensors = pages.k, pages.v, call.operands(), part, lse, counters(q_THE.device)
    numbers = call.log2_scale, layout.first_seen, tiles, pages.k.stride(1), pages.k.stride(2), *call.strides()
    sizes = {"TREE": call.ancestor is not None, "SPLITS": splits, **call.constants(), **keys._asdict()}
    launch(_register_tiled_attention_kernel, (programs, splits), *tensors, *numbers, **sizes, num_warps=keys.WARPS)
    return call.out


@gluon.jit(do_not_specialize=["first_seen", "tiles", *UNSPECIALIZED])
def _register_tiled_attention_kernel(
    k_ptr,
    v_ptr,
    operands,
    part_ptr,
    lse_ptr,
    finished_ptr,
    scale,
    first_seen,
    tiles,
    kv_stride_slot,
    kv_stride_g,
    q_stride_t,
    q_stride_h,
    page_stride_b,
    ancestor_stride_b,
    ancestor_stride_n,
    W,
    TREE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    G: gl.constexpr,
    REPEAT: gl.constexpr,
    E: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
    C: gl.constexpr,
    OVERLAP: gl.constexpr = False,
):
    """One tile of queries over a run of chunks of C keys, WARPS chunks at a time.

    Chunks of the prefix come first, then those of the tree, which start at a word of the mask. Keys are numbered and
    masked as in `tree_attention_triton`.
    """
    q_ptr, page_ptr, cached_ptr, start_ptr, ancestor_ptr, out_ptr = operands
    scores: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK_M, 8])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, scores, 8)
    k_layout: gl.constexpr = gl.DotOperandLayout(1, scores, 8)
    v_layout: gl.constexpr = _value_layout(WARPS, C, E)
    per_thread: gl.constexpr = BLOCK_M * E // (32 * WARPS)
    lanes: gl.constexpr = E // per_thread
    many_results: gl.constexpr = gl.BlockedLayout([1, 1, per_thread], [1, 32 // lanes, lanes], [1, WARPS, 1], [2, 1, 0])
    results: gl.constexpr = gl.SliceLayout(0, many_results)

    # read lengths, choose the run of keys
    tile = tiles - 1 - gl.program_id(0) % tiles
    pair = gl.program_id(0) // tiles
    split = gl.program_id(1)
    request = (pair // G).to(gl.int64)
    group = pair % G
    start = gl.load(start_ptr + request).to(gl.int64)
    count = (gl.load(start_ptr + request + 1) - start).to(gl.int32)
    cached = gl.load(cached_ptr + request).to(gl.int32)
    end = cached + count
    if not TREE:
        end = cached + gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // REPEAT + 1, count)
    shared = cached if TREE else end
    shared_chunks = gl.cdiv(gl.maximum(shared - first_seen, 0), C)
    num_chunks = shared_chunks + gl.cdiv(end - shared, C)
    first, last, busy = 0, num_chunks, 1
    if SPLITS > 1:
        run = gl.maximum(gl.cdiv(num_chunks, SPLITS), WARPS)
        busy = gl.maximum(gl.cdiv(num_chunks, run), 1)
        first = split * run
        last = gl.minimum(first + run, num_chunks)

    # look up the first slots: the previous kernel does not write page tables
    page_ptr += request * page_stride_b
    kinds = shared_chunks, first_seen, shared, end
    k_slot = _slots(page_ptr, first, kinds, PAGE_SIZE, WARPS, C, gl.SliceLayout(1, k_layout))
    v_slot = _slots(page_ptr, first, kinds, PAGE_SIZE, WARPS, C, gl.SliceLayout(2, v_layout))
    wait(OVERLAP)
    if tile * BLOCK_M // REPEAT >= count or split >= busy:
        return

    # load Q tile: rows past the last node repeat it and are not stored
    node = _nodes(tile, count, REPEAT, scores)
    q_token = start + _nodes(tile, count, REPEAT, q_layout)
    q_head = group * REPEAT + (tile * BLOCK_M + index(BLOCK_M, 1, q_layout)) % REPEAT
    q_place = q_token * q_stride_t + q_head * q_stride_h + index(E, 2, q_layout)
    q = gl.load(q_ptr + q_place + 0 * index(WARPS, 0, q_layout))
    k_ptr += group * kv_stride_g
    v_ptr += group * kv_stride_g
    nothing = gl.zeros([WARPS, BLOCK_M, C], gl.float32, scores)
    top = gl.full([WARPS, BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(2, scores))
    total = gl.zeros([WARPS, BLOCK_M], gl.float32, gl.SliceLayout(2, scores))
    acc = gl.zeros([WARPS, BLOCK_M, E], gl.float32, scores)
    # load first K tile
    k_place = (k_slot * kv_stride_slot)[:, None, :] + index(E, 1, k_layout)
    k = gl.load(k_ptr + k_place)
    for block in range(first, last, WARPS):
        # load V tile, look up the next slots
        v = gl.load(v_ptr + (v_slot * kv_stride_slot)[:, :, None] + index(E, 2, v_layout))
        k_slot = _slots(page_ptr, block + WARPS, kinds, PAGE_SIZE, WARPS, C, gl.SliceLayout(1, k_layout))
        v_slot = _slots(page_ptr, block + WARPS, kinds, PAGE_SIZE, WARPS, C, gl.SliceLayout(2, v_layout))

        # mask
        chunk = block + index(WARPS, 0, scores)
        place = index(C, 2, scores)
        key, limit = _keys(chunk, place, kinds, C)
        seen = (key < limit) & (chunk < last)
        if TREE:
            words_ptr = ancestor_ptr + request * ancestor_stride_b + node * ancestor_stride_n
            seen = seen & ((chunk < shared_chunks) | _ancestors(words_ptr, chunk - shared_chunks, place, W, C))
        else:
            seen = seen & (key <= cached + node)
        # scores, load next K tile
        product = mma_v2(q, k, nothing)
        k_place = (k_slot * kv_stride_slot)[:, None, :] + index(E, 1, k_layout)
        k = gl.load(k_ptr + k_place, mask=block + WARPS < last, other=0.0)
        score = gl.where(seen, product * scale, float("-inf"))
        # online softmax
        new_top = gl.maximum(top, gl.max(score, 2))
        weight = gl.exp2(score - new_top[:, :, None])
        keep = gl.exp2(top - new_top)
        total = total * keep + gl.sum(weight, 2)
        top = new_top
        # weighted values
        p = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(0, scores, 2))
        v = gl.convert_layout(_transposed(v, E // 8), gl.DotOperandLayout(1, scores, 2))
        acc = mma_v2(p, v, acc * keep[:, :, None])

    # combine the warps
    tops = gl.convert_layout(top, gl.SliceLayout(2, many_results))
    totals = gl.convert_layout(total, gl.SliceLayout(2, many_results))
    best = gl.max(tops, 0)
    share = gl.exp2(tops - best[None, :])
    acc = gl.sum(gl.convert_layout(_transposed(acc, 8), many_results) * share[:, :, None], 0)
    rows: gl.constexpr = gl.SliceLayout(1, results)
    top, total = gl.convert_layout(best, rows), gl.convert_layout(gl.sum(totals * share, 0), rows)

    row = gl.arange(0, BLOCK_M, rows)
    column = gl.arange(0, E, gl.SliceLayout(0, results))[None, :]
    node_of_row = (tile * BLOCK_M + row) // REPEAT
    exists = node_of_row < count
    if SPLITS > 1:  # noqa: SIM102 (the outer condition is the compiler's)
        if busy > 1:
            # store partials
            mine = gl.program_id(0) * SPLITS * BLOCK_M + row
            divisor = gl.where(total > 0, total, 1.0)
            row_lse = gl.where(total > 0, top + gl.log2(divisor), float("-inf"))
            gl.store(lse_ptr + mine + split * BLOCK_M, row_lse)
            my_part_ptr = part_ptr + (mine + split * BLOCK_M)[:, None] * E + column
            gl.store(my_part_ptr, acc / divisor[:, None], mask=exists[:, None])
            # count finished splits: all stores of a program come before its count, all loads of the last one after
            tl.debug_barrier()
            before = gl.atomic_add(finished_ptr + gl.program_id(0), 1, sem="acq_rel")
            if before < busy - 1:
                return
            gl.store(finished_ptr + gl.program_id(0), 0)
            # combine splits
            together: gl.constexpr = min(SPLITS, AT_ONCE // per_thread)
            total, acc = _combine(lse_ptr, part_ptr, exists, busy, SPLITS, together, E, many_results)

    # store output
    head = group * REPEAT + (tile * BLOCK_M + row) % REPEAT
    out_place = ((start + node_of_row) * (G * REPEAT) + head)[:, None] * E + column
    out = acc / gl.where(total > 0, total, 1.0)[:, None]
    gl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=exists[:, None])


@gluon.constexpr_function
def _value_layout(WARPS, C, E):
    """Layout of values: the right operand of a tensor core, keys in pairs, except that a thread holds neighbouring
    columns where the operand has every eighth. So rows are loaded 16 bytes at a time; the columns of the product are
    put in order afterwards."""
    bits = [1 << i for i in range(E.bit_length() - 1)]
    own, shared = bits[:-3], bits[-3:]
    keys = [1 << i for i in range(C.bit_length() - 1)]
    registers = [[0, 0, e] for e in own] + [[0, key, 0] for key in keys if key not in (2, 4)]
    lanes = [[0, 2, 0], [0, 4, 0]] + [[0, 0, e] for e in shared]
    warps = [[1 << i, 0, 0] for i in range(WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS, C, E])


@gluon.jit
def _transposed(x, LENGTH: gl.constexpr):
    """Transposes each row, seen as a matrix with rows of LENGTH."""
    A: gl.constexpr = x.shape[0]
    B: gl.constexpr = x.shape[1]
    E: gl.constexpr = x.shape[2]
    return gl.reshape(gl.permute(gl.reshape(x, [A, B, E // LENGTH, LENGTH]), [0, 1, 3, 2]), [A, B, E])


@gluon.jit
def _nodes(tile, count, REPEAT: gl.constexpr, layout: gl.constexpr):
    row = tile * BLOCK_M + index(BLOCK_M, 1, layout)
    return gl.maximum(gl.minimum(row // REPEAT, count - 1), 0)


@gluon.jit
def _keys(chunk, place, kinds, C: gl.constexpr):
    """Numbers of keys at places of chunks, and the end of their kind: prefix or tree."""
    shared_chunks, begin, shared, end = kinds
    is_shared = chunk < shared_chunks
    first = gl.where(is_shared, begin + chunk * C, shared + (chunk - shared_chunks) * C)
    return first + place, gl.where(is_shared, shared, end)


@gluon.jit
def _slots(page_ptr, block, kinds, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Slots of the keys of the next chunks, (WARPS, C). Keys past the end of their kind have the slot of its last key,
    and are masked."""
    chunk = block + gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    key, limit = _keys(chunk, gl.arange(0, C, gl.SliceLayout(0, layout))[None, :], kinds, C)
    key = gl.maximum(gl.minimum(key, limit - 1), 0)
    return gl.load(page_ptr + key // PAGE_SIZE).to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE


@gluon.jit
def _ancestors(words_ptr, chunk, place, W, C: gl.constexpr):
    """True for the nodes of a chunk that a row sees, by the bits of its mask."""
    number = chunk * (C // 32)
    word = gl.load(words_ptr + number, mask=(number >= 0) & (number < W), other=0)
    if C == 64:
        second = gl.load(words_ptr + number + 1, mask=(number >= 0) & (number + 1 < W), other=0)
        word = gl.where(place < 32, word, second)
    return (word >> (place % 32)) & 1 != 0


@gluon.jit
def _combine(
    lse_ptr, part_ptr, exists, busy, SPLITS: gl.constexpr, TOGETHER: gl.constexpr, E: gl.constexpr, layout: gl.constexpr
):
    """The online softmax over the partials of all splits, as in `tree_attention_triton`, for the rows that exist."""
    results: gl.constexpr = gl.SliceLayout(0, layout)
    top = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(1, results))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, results))
    acc = gl.zeros([BLOCK_M, E], gl.float32, results)
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    for first in range(0, busy, TOGETHER):
        split = first + gl.arange(0, TOGETHER, gl.SliceLayout(1, rows))[:, None]
        row = (gl.program_id(0) * SPLITS + split) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, rows))[None, :]
        asked = gl.convert_layout(exists, gl.SliceLayout(0, rows))[None, :] & (split < busy)
        lse = gl.load(lse_ptr + row, mask=asked, other=float("-inf"), cache_modifier=".cg")
        part_place = row[:, :, None] * E + index(E, 2, layout)
        part = gl.load(part_ptr + part_place, mask=asked[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.convert_layout(gl.max(lse, 0), gl.SliceLayout(1, results)))
        keep = gl.exp2(top - new_top)
        weight = gl.exp2(lse - gl.convert_layout(new_top, gl.SliceLayout(0, rows))[None, :])
        acc = acc * keep[:, None] + gl.sum(part * weight[:, :, None], 0)
        total = total * keep + gl.convert_layout(gl.sum(weight, 0), gl.SliceLayout(1, results))
        top = new_top
    return total, acc
