"""The Triton kernels of `topk_logprob`: the best of every chunk of a row, then the best of these."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.overlap_triton import overlap, wait

CHUNK = 4096
"""Logits that one program of the first kernel looks at."""
GROUP = 8
"""Numbers of which only the best is sorted at first."""
SHORT_PLACES = 1 << 15
"""Places that fit beside a number of 16 bits in a key of 32."""

# Stands for no logit. Finite, since the difference of two infinities is not a number.
LOWEST = tl.constexpr(-3.0e38)


def topk_logprob_triton(logits: Tensor, k: int, temperature_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Heat changes no order, so numbers are sorted as they are, in the few bits that they have."""
    logits_RV = logits.reshape(-1, logits.shape[-1]).contiguous()
    R, V = logits_RV.shape
    padded_k = max(2, triton.next_power_of_2(k))
    chunk = max(min(CHUNK, triton.next_power_of_2(V)), padded_k * GROUP)
    num_chunks = -(-V // chunk)
    merged_groups = max(padded_k, triton.next_power_of_2(-(-num_chunks * padded_k // GROUP)))
    is_short = logits.element_size() == 2 and GROUP * merged_groups <= SHORT_PLACES
    value_RX = logits_RV.new_empty(R, num_chunks * padded_k)
    token_RX = torch.empty_like(value_RX, dtype=torch.int32)
    top_RC = torch.empty(R, num_chunks, dtype=torch.float32, device=logits.device)
    sum_RC = torch.empty_like(top_RC)
    token_RK = torch.empty(R, k, dtype=torch.int64, device=logits.device)
    logprob_RK = torch.empty_like(token_RK, dtype=torch.float32)
    rows_per_temperature = 1 if temperature_B is None else R // len(temperature_B)
    temperature_stride = (
        0 if temperature_B is None else temperature_B.stride(0)
    )  # 0 where one number serves all requests
    with torch.cuda.device_of(logits):
        _topk_chunk_kernel[(R, num_chunks)](
            logits_RV,
            temperature_B,
            value_RX,
            token_RX,
            top_RC,
            sum_RC,
            V,
            rows_per_temperature,
            temperature_stride,
            K=padded_k,
            GROUP=GROUP,
            GROUPS=chunk // GROUP,
            SHORT=is_short,
            num_warps=4,
            **overlap(logits),
        )
        _topk_merge_kernel[(R,)](
            temperature_B,
            value_RX,
            token_RX,
            top_RC,
            sum_RC,
            token_RK,
            logprob_RK,
            num_chunks,
            k,
            rows_per_temperature,
            temperature_stride,
            K=padded_k,
            GROUP=GROUP,
            GROUPS=merged_groups,
            CHUNKS=triton.next_power_of_2(num_chunks),
            SHORT=is_short,
            num_warps=4 if padded_k <= 16 else 8,
            **overlap(logits),
        )
    shape = (*logits.shape[:-1], k)
    return token_RK.view(shape), logprob_RK.view(shape)


@triton.jit
def _topk_chunk_kernel(
    logits_ptr,
    temperature_ptr,
    value_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    V,
    rows_per_temperature,
    temperature_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHORT: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """The K best of a chunk, and its part of the sum of exponentials."""
    wait(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * GROUP * GROUPS
    logits_ptr += row * V + start
    left = V - start

    index = tl.arange(0, GROUP * GROUPS)
    logit = tl.load(logits_ptr + index, mask=index < left, other=-float("inf")).to(tl.float32)
    logit = _cool(logit, temperature_ptr, row, rows_per_temperature, temperature_stride)
    top = tl.maximum(tl.max(logit), LOWEST)
    out = row * tl.num_programs(1) + chunk
    tl.store(top_ptr + out, top)
    tl.store(sum_ptr + out, tl.sum(tl.exp(logit - top)))

    value, place = _best(logits_ptr, left, K, GROUP, GROUPS, SHORT)
    rank = tl.arange(0, K)
    tl.store(value_ptr + out * K + rank, tl.where(place < left, value, -float("inf")))
    tl.store(token_ptr + out * K + rank, start + place)


@triton.jit
def _topk_merge_kernel(
    temperature_ptr,
    value_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    best_token_ptr,
    logprob_ptr,
    num_chunks,
    k,
    rows_per_temperature,
    temperature_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHORT: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """The best of what a row's chunks found, and the logarithm of its sum of exponentials."""
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    log_sum = log_sum_exp(top_ptr + row * num_chunks, sum_ptr + row * num_chunks, num_chunks, CHUNKS)
    found = row * num_chunks * K
    value, place = _best(value_ptr + found, num_chunks * K, K, GROUP, GROUPS, SHORT)
    rank = tl.arange(0, K)
    token = tl.load(token_ptr + found + place, mask=rank < k, other=0)
    tl.store(best_token_ptr + row * k + rank, token, mask=rank < k)
    logit = _cool(value, temperature_ptr, row, rows_per_temperature, temperature_stride)
    tl.store(logprob_ptr + row * k + rank, logit - log_sum, mask=rank < k)


@triton.jit
def _cool(logit, temperature_ptr, row, rows_per_temperature, temperature_stride):
    """Divided by the heat of a row, if there is one."""
    if temperature_ptr is not None:
        logit /= tl.load(temperature_ptr + row // rows_per_temperature * temperature_stride)
    return logit


@triton.jit
def _best(ptr, count, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SHORT: tl.constexpr):
    """The K greatest of `count` numbers and their places, sorted; of equals the first, so that chunks stay in order.

    Sorting is the costly part, so it sees few numbers: the K best lie in the K groups with the best leaders. Group g
    is every GROUPS-th number from g.
    """
    member = tl.arange(0, GROUP)
    leader = tl.max(keys(ptr, member[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :], count, SHORT), axis=0)
    group = places(tl.topk(leader, K), SHORT) % GROUPS
    key = keys(ptr, member[None, :] * GROUPS + group[:, None], count, SHORT)
    key = tl.topk(tl.reshape(key, [K * GROUP]), K)
    return values(key, ptr.dtype.element_ty, SHORT), places(key, SHORT)


@triton.jit
def log_sum_exp(top_ptr, sum_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Of a row, from the greatest logit of every chunk and the sum of the exponentials of its distances to it."""
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(top_ptr + chunk, mask=chunk < num_chunks, other=LOWEST)
    part = tl.load(sum_ptr + chunk, mask=chunk < num_chunks, other=0.0)
    highest = tl.max(top)
    return highest + tl.log(tl.sum(part * tl.exp(top - highest)))


@triton.jit
def keys(ptr, place, count, SHORT: tl.constexpr):
    """A number, as an integer of the same order, above the complement of its place. Past the end it is the least,
    and what is no number is the greatest, as in torch.

    Numbers of 16 bits leave room for the place in 32: SHORT keys, which are sorted in half the time.
    """
    value = tl.load(ptr + place, mask=place < count, other=0.0)
    wide = value.to(tl.float32)
    real, zero = place < count, wide == 0  # one zero, not two
    if SHORT:
        bits = _ordered(tl.where(zero, tl.zeros_like(value), value).to(tl.int16, bitcast=True), 15).to(tl.int32)
        bits = tl.where(wide == wide, bits, 0x7FFF)
        return tl.where(real, bits, -(1 << 16)) << 15 | (0x7FFF - place)
    else:
        bits = _ordered(tl.where(zero, 0.0, wide).to(tl.int32, bitcast=True), 31)
        bits = tl.where(wide == wide, bits, 0x7FFFFFFF)
        return tl.where(real, bits.to(tl.int64), -(1 << 31)) << 32 | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def places(key, SHORT: tl.constexpr):
    return 0x7FFF - (key & 0x7FFF).to(tl.int32) if SHORT else 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def values(key, dtype: tl.constexpr, SHORT: tl.constexpr):
    """The numbers of keys. `dtype` is theirs if the keys are short."""
    if SHORT:
        return _ordered((key >> 15).to(tl.int16), 15).to(dtype, bitcast=True).to(tl.float32)
    else:
        return _ordered((key >> 32).to(tl.int32), 31).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(bits, SIGN: tl.constexpr):
    """Bits of a float to an integer of the same order, and back: below zero all but the sign turn over."""
    return bits ^ ((bits >> SIGN) & ((1 << SIGN) - 1)).to(bits.dtype)
