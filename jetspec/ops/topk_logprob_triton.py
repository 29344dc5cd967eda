"""Triton kernels of `topk_logprob`: selection without a sort.

A row is cut into groups; the leader of a group is its maximum. A bound that at least k leaders reach is reached by at
least k tokens, so by all of the k best; and because groups are small, by few others. Tokens that reach the bound pass,
and are ranked by counting the better ones. Keys are unique (`_keys`), so neither the set that passes nor the ranks
depend on the order in which programs run.

Layout, contiguous: logits are (R, V), in chunks of CHUNK, and divided by a temperature as they are loaded; keys of
leaders (R, leaders), of passed tokens (R, capacity) with their count (R,); partial maxima and sums of exponentials (R,
chunks); results (R, k).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import power_of_2_below
from jetspec.ops.overlap_triton import overlap, wait
from jetspec.ops.select import device_of

CHUNK = 4096
"""Logits per load of a program."""
LEADERS = 3
"""Fewest groups per requested token, as far as the vocabulary allows: with fewer groups more tokens pass."""
MAX_GROUP = 128
"""Most logits per group."""
PROGRAMS_PER_MULTIPROCESSOR = 3
"""Programs that run at once. Every program computes the bound of its row, so more would only repeat that work."""
MANY_ROWS = 128
"""Rows that fill a GPU with one program each."""


class Tiling(NamedTuple):
    """Block sizes of the second and the third kernel."""

    RUN: int
    """Adjacent tokens of a thread, for which it reserves output slots with one atomic."""
    OWN: int
    """Keys ranked by one program."""
    BLOCK: int
    """Keys compared with them at once."""


FEW, MANY = Tiling(RUN=8, OWN=16, BLOCK=256), Tiling(RUN=4, OWN=128, BLOCK=32)
"""Tilings for few rows, with many programs per row, and for many rows."""

# Stands for no logit. Finite, since the difference of two infinities is NaN.
LOWEST = tl.constexpr(-3.0e38)
# Below any key.
BOTTOM = tl.constexpr(-(1 << 63))


def topk_logprob_triton(logits: Tensor, k: int, temperature_B: Tensor | None) -> tuple[Tensor, Tensor]:
    logits_RV = logits.reshape(-1, logits.shape[-1]).contiguous()
    R, V = logits_RV.shape
    programs = device_of(logits.device).multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    tiling = FEW if R < MANY_ROWS else MANY
    group = power_of_2_below(min(MAX_GROUP, CHUNK, V // (LEADERS * k)))
    num_chunks = -(-V // CHUNK)
    num_leaders = num_chunks * (CHUNK // group)
    most_reaching = k + k // 8
    capacity = min(V, most_reaching * group)
    span = -(-num_chunks // max(1, programs // R))  # chunks per program of the second kernel

    # Rows of a request share a temperature; one temperature may serve all requests, by a stride of 0.
    scale = temperature_B, 0 if temperature_B is None else temperature_B.stride(0), logits.shape[-2] if R > 1 else 1

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
            *(logits_RV, leader_RL, count_R, top_RC, sum_RC, *scale, V),
            GROUP=group,
            GROUPS=CHUNK // group,
            num_warps=4,
            **overlap(logits),
        )
        sizes = {"LEADERS": triton.next_power_of_2(num_leaders), "CHUNK": CHUNK, "RUN": tiling.RUN}
        _pass_kernel[(R, -(-num_chunks // span))](
            *(logits_RV, leader_RL, passed_RP, count_R, *scale, V, num_leaders, capacity, span, k, most_reaching),
            num_warps=8,
            **sizes,
            **overlap(logits),
        )
        sizes = {"CHUNKS": triton.next_power_of_2(num_chunks), "OWN": tiling.OWN, "BLOCK": tiling.BLOCK}
        _rank_kernel[(R, -(-most_reaching // tiling.OWN))](
            *(passed_RP, count_R, top_RC, sum_RC, token_RK, logprob_RK, capacity, num_chunks, k),
            num_warps=4,
            **sizes,
            **overlap(logits),
        )
    shape = (*logits.shape[:-1], k)
    return token_RK.view(shape), logprob_RK.view(shape)


@triton.jit
def _leader_kernel(
    logits_ptr,
    leader_ptr,
    count_ptr,
    top_ptr,
    sum_ptr,
    temperature_ptr,
    temperature_stride,
    rows_per_temperature,
    V,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Keys of the leaders of a chunk, and its part of the log-sum-exp. Group g is every GROUPS-th token from g."""
    wait(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * V
    request = row // rows_per_temperature * temperature_stride
    # leaders
    group = tl.arange(0, GROUPS)
    token = chunk * GROUP * GROUPS + tl.arange(0, GROUP)[:, None] * GROUPS + group[None, :]
    out = row * tl.num_programs(1) + chunk
    tl.store(leader_ptr + out * GROUPS + group, tl.max(_keys(logits_ptr, token, V, temperature_ptr, request), axis=0))
    if chunk == 0:
        tl.store(count_ptr + row, 0)

    # partial log-sum-exp
    logit = tl.load(logits_ptr + token, mask=token < V, other=-float("inf")).to(tl.float32)
    logit = _scaled(logit, temperature_ptr, request)
    top = tl.maximum(tl.max(logit), LOWEST)
    tl.store(top_ptr + out, top)
    tl.store(sum_ptr + out, tl.sum(tl.exp(logit - top)))


@triton.jit
def _pass_kernel(
    logits_ptr,
    leader_ptr,
    passed_ptr,
    count_ptr,
    temperature_ptr,
    temperature_stride,
    rows_per_temperature,
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
    """Bound of a row, and the keys that reach it in `span` of its chunks, in any order."""
    # bound
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, LEADERS)
    leader = tl.load(leader_ptr + row * num_leaders + number, mask=number < num_leaders, other=BOTTOM)
    bound = _bound(leader, k, most_reaching)

    # collect keys
    logits_ptr += row * V
    request = row // rows_per_temperature * temperature_stride
    start = tl.program_id(1) * span * CHUNK
    for block in range(start, tl.minimum(start + span * CHUNK, V), CHUNK):
        token = block + tl.arange(0, CHUNK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        key = _keys(logits_ptr, token, V, temperature_ptr, request)
        passes = (key >= bound) & (token < V)
        order = tl.cumsum(passes.to(tl.int32), axis=1)
        found = tl.max(order, axis=1)
        first = tl.atomic_add(count_ptr + row + tl.zeros_like(found), found, mask=found > 0, sem="relaxed")
        tl.store(passed_ptr + row * capacity + first[:, None] + order - 1, key, mask=passes)


@triton.jit
def _bound(leader, k, most_reaching):
    """Find by bisection a key that k to `most_reaching` leaders reach. BOTTOM if there are fewer than k."""
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
    """Rank of each passed key among all of them; those of rank below k are results."""
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    passed_ptr += row * capacity
    count = tl.load(count_ptr + row)
    log_sum = _log_sum_exp(top_ptr + row * num_chunks, sum_ptr + row * num_chunks, num_chunks, CHUNKS)
    for start in range(tl.program_id(1) * OWN, count, tl.num_programs(1) * OWN):
        index = start + tl.arange(0, OWN)
        own = tl.load(passed_ptr + index, mask=index < count, other=BOTTOM)
        # count better keys
        better = tl.zeros([OWN, BLOCK], tl.int32)
        for first in range(0, count, BLOCK):
            other = first + tl.arange(0, BLOCK)
            other = tl.load(passed_ptr + other, mask=other < count, other=BOTTOM)
            better += (other[None, :] > own[:, None]).to(tl.int32)
        # store the first k
        rank = tl.sum(better, axis=1)
        chosen = (index < count) & (rank < k)
        tl.store(token_ptr + row * k + rank, _tokens(own), mask=chosen)
        tl.store(logprob_ptr + row * k + rank, _logits(own) - log_sum, mask=chosen)


@triton.jit
def _log_sum_exp(top_ptr, sum_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Return the log-sum-exp of a row, from the maximum of every chunk and its sum of exponentials relative to it."""
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(top_ptr + chunk, mask=chunk < num_chunks, other=LOWEST)
    part = tl.load(sum_ptr + chunk, mask=chunk < num_chunks, other=0.0)
    highest = tl.max(top)
    return highest + tl.log(tl.sum(part * tl.exp(top - highest)))


@triton.jit
def _scaled(logit, temperature_ptr, place):
    """Divide by a temperature, rounded as torch does; without temperatures return the input."""
    if temperature_ptr is not None:
        logit = tl.div_rn(logit, tl.load(temperature_ptr + place))
    return logit


@triton.jit
def _keys(ptr, place, count, temperature_ptr, request):
    """Return keys: the order-preserving integer of a logit above the complement of its token, 32 bits each. NaN has the
    greatest key, as in torch; tokens past the end have the least."""
    wide = tl.load(ptr + place, mask=place < count, other=0.0).to(tl.float32)
    wide = _scaled(wide, temperature_ptr, request)
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
    """Map the bits of a float to an integer of the same order, and back: negative ones flip all bits but the sign."""
    return bits ^ ((bits >> 31) & ((1 << 31) - 1)).to(bits.dtype)
