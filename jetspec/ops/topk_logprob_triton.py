"""The Triton kernels of `topk_logprob`: selection without a sort.

A row is cut into groups, and the best of a group is its leader. Where k leaders reach a bound, so do k tokens, hence
all of the k best; and as groups are small, little else does. What reaches it passes, and is ranked by counting: its
rank is the number of those that are better. Keys are unique (`_keys`), so neither what passes nor its rank depends on
the order in which programs run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait
from jetspec.ops.select import device_of

CHUNK = 4096
"""Logits that a program looks at at once."""
LEADERS = 3
"""At least so many groups per wanted token, if groups of one number allow: fewer let more than the best pass."""
MAX_GROUP = 128
PROGRAMS_PER_MULTIPROCESSOR = 3
"""Programs that run at once. Each program of a row computes its bound anew, so more would only repeat that."""
MANY_ROWS = 128
"""Which fill a GPU, however little of a row a program does at once."""


class Tiling(NamedTuple):
    RUN: int
    """Neighbours that a thread counts before it asks where to write those that passed."""
    OWN: int
    """Keys that one program of the last kernel ranks."""
    BLOCK: int
    """Keys that it compares them with at once."""


FEW, MANY = Tiling(RUN=8, OWN=16, BLOCK=256), Tiling(RUN=4, OWN=128, BLOCK=32)
"""For few rows, of which many programs each rank a little, and for many."""

# Stands for no logit. Finite, since the difference of two infinities is not a number.
LOWEST = tl.constexpr(-3.0e38)
# Below any key.
BOTTOM = tl.constexpr(-(1 << 63))


def topk_logprob_triton(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logits_RV = logits.reshape(-1, logits.shape[-1]).contiguous()
    R, V = logits_RV.shape
    programs = device_of(logits.device).multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    tiling = FEW if R < MANY_ROWS else MANY
    group = _group_size(V, k)
    num_chunks = -(-V // CHUNK)
    num_leaders = num_chunks * (CHUNK // group)
    most_reaching = k + k // 8
    capacity = min(V, most_reaching * group)
    span = -(-num_chunks // max(1, programs // R))  # chunks of a row that one program of the second kernel sees

    device = logits.device
    leader_RL = torch.empty(R, num_leaders, dtype=torch.int64, device=device)
    passed_RP = torch.empty(R, capacity, dtype=torch.int64, device=device)
    count_R = torch.empty(R, dtype=torch.int32, device=device)
    top_RC = torch.empty(R, num_chunks, dtype=torch.float32, device=device)
    sum_RC = torch.empty_like(top_RC)
    token_RK = torch.empty(R, k, dtype=torch.int64, device=device)
    logprob_RK = torch.empty_like(token_RK, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _leader_kernel[(R, num_chunks)](
            logits_RV,
            leader_RL,
            count_R,
            top_RC,
            sum_RC,
            V,
            GROUP=group,
            GROUPS=CHUNK // group,
            num_warps=4,
            **overlap(logits),
        )
        _pass_kernel[(R, -(-num_chunks // span))](
            logits_RV,
            leader_RL,
            passed_RP,
            count_R,
            V,
            num_leaders,
            capacity,
            span,
            k,
            most_reaching,
            LEADERS=triton.next_power_of_2(num_leaders),
            CHUNK=CHUNK,
            RUN=tiling.RUN,
            num_warps=8,
            **overlap(logits),
        )
        _rank_kernel[(R, -(-most_reaching // tiling.OWN))](
            passed_RP,
            count_R,
            top_RC,
            sum_RC,
            token_RK,
            logprob_RK,
            capacity,
            num_chunks,
            k,
            CHUNKS=triton.next_power_of_2(num_chunks),
            OWN=tiling.OWN,
            BLOCK=tiling.BLOCK,
            num_warps=4,
            **overlap(logits),
        )
    shape = (*logits.shape[:-1], k)
    return token_RK.view(shape), logprob_RK.view(shape)


def _group_size(V: int, k: int) -> int:
    """The largest power of two that leaves enough groups."""
    group = 1
    while 2 * group <= min(MAX_GROUP, CHUNK, V // (LEADERS * k)):
        group *= 2
    return group


@triton.jit
def _leader_kernel(
    logits_ptr,
    leader_ptr,
    count_ptr,
    top_ptr,
    sum_ptr,
    V,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """The keys of a chunk's leaders, and its part of the sum of exponentials. Group g is every GROUPS-th from g."""
    wait(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * V
    group = tl.arange(0, GROUPS)
    token = chunk * GROUP * GROUPS + tl.arange(0, GROUP)[:, None] * GROUPS + group[None, :]
    out = row * tl.num_programs(1) + chunk
    tl.store(leader_ptr + out * GROUPS + group, tl.max(_keys(logits_ptr, token, V), axis=0))
    if chunk == 0:
        tl.store(count_ptr + row, 0)

    logit = tl.load(logits_ptr + token, mask=token < V, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(logit), LOWEST)
    tl.store(top_ptr + out, top)
    tl.store(sum_ptr + out, tl.sum(tl.exp(logit - top)))


@triton.jit
def _pass_kernel(
    logits_ptr,
    leader_ptr,
    passed_ptr,
    count_ptr,
    V,
    num_leaders,
    capacity,
    span,
    k,
    most_reaching,
    LEADERS: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Find the bound of a row, and collect what passes it in `span` of its chunks, in any order."""
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, LEADERS)
    leader = tl.load(leader_ptr + row * num_leaders + number, mask=number < num_leaders, other=BOTTOM)
    bound = _bound(leader, k, most_reaching)

    logits_ptr += row * V
    start = tl.program_id(1) * span * CHUNK
    for at in range(start, tl.minimum(start + span * CHUNK, V), CHUNK):
        token = at + tl.arange(0, CHUNK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        key = _keys(logits_ptr, token, V)
        passes = (key >= bound) & (token < V)
        order = tl.cumsum(passes.to(tl.int32), axis=1)
        found = tl.max(order, axis=1)
        first = tl.atomic_add(count_ptr + row + tl.zeros_like(found), found, mask=found > 0, sem="relaxed")
        tl.store(passed_ptr + row * capacity + first[:, None] + order - 1, key, mask=passes)


@triton.jit
def _bound(leader, k, most_reaching):
    """A key that at least k leaders reach, and at most `most_reaching` do: by bisection. BOTTOM if there are fewer."""
    low, high = tl.full([], BOTTOM, tl.int64), tl.max(leader)
    reaching = most_reaching + 1
    while (low < high) & (reaching > most_reaching):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        count = tl.sum((leader >= middle).to(tl.int32))
        enough = count >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        reaching = tl.where(enough, count, reaching)
    return low


@triton.jit
def _rank_kernel(
    passed_ptr,
    count_ptr,
    top_ptr,
    sum_ptr,
    token_ptr,
    logprob_ptr,
    capacity,
    num_chunks,
    k,
    CHUNKS: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Write each key that passed to the place that it has among all of them, if that is one of the first k."""
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    passed_ptr += row * capacity
    count = tl.load(count_ptr + row)
    log_sum = _log_sum_exp(top_ptr + row * num_chunks, sum_ptr + row * num_chunks, num_chunks, CHUNKS)
    for start in range(tl.program_id(1) * OWN, count, tl.num_programs(1) * OWN):
        index = start + tl.arange(0, OWN)
        own = tl.load(passed_ptr + index, mask=index < count, other=BOTTOM)
        better = tl.zeros([OWN, BLOCK], tl.int32)
        for at in range(0, count, BLOCK):
            other = at + tl.arange(0, BLOCK)
            other = tl.load(passed_ptr + other, mask=other < count, other=BOTTOM)
            better += (other[None, :] > own[:, None]).to(tl.int32)
        rank = tl.sum(better, axis=1)
        chosen = (index < count) & (rank < k)
        tl.store(token_ptr + row * k + rank, _tokens(own), mask=chosen)
        tl.store(logprob_ptr + row * k + rank, _logits(own) - log_sum, mask=chosen)


@triton.jit
def _log_sum_exp(top_ptr, sum_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Of a row, from the greatest logit of every chunk and the sum of the exponentials of its distances to it."""
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(top_ptr + chunk, mask=chunk < num_chunks, other=LOWEST)
    part = tl.load(sum_ptr + chunk, mask=chunk < num_chunks, other=0.0)
    highest = tl.max(top)
    return highest + tl.log(tl.sum(part * tl.exp(top - highest)))


@triton.jit
def _keys(ptr, place, count):
    """Logits as integers of the same order, above the complements of their tokens: 32 bits each. Past the end is the
    least key. NaN is the greatest, as in torch."""
    wide = tl.load(ptr + place, mask=place < count, other=0.0).to(tl.float32)
    bits = _ordered(tl.where(wide == 0, 0.0, wide).to(tl.int32, bitcast=True))  # -0.0 equals 0.0
    bits = tl.where(wide == wide, bits, 0x7FFFFFFF)
    return tl.where(place < count, bits.to(tl.int64), -(1 << 31)) << 32 | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _tokens(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _logits(key):
    return _ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(bits):
    """Bits of a float to an integer of the same order, and back: below zero all but the sign turn over."""
    return bits ^ ((bits >> 31) & ((1 << 31) - 1)).to(bits.dtype)
