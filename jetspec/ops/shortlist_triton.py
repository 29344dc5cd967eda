"""Triton kernels of `topk_logprob` and `shortlist`.

Top-k is selection without a sort. A row is cut into groups; the leader of a group is its maximum. A bound that at least
k leaders reach is reached by at least k tokens, so by all of the k best; and because groups are small, by few others.
Tokens that reach the bound pass, and are ranked by counting the better ones. Keys are unique (`_keys`), so neither the
set that passes nor the ranks depend on the order in which programs run.

Layout, contiguous: logits are (R, V), in chunks of CHUNK, and become log-odds as they are loaded; keys of leaders (R,
leaders), of passed tokens (R, capacity) with their count (R,); partial maxima and sums of exponentials (R, chunks);
results (R, k).

A shortlist takes the log-sum-exp of every parent, then the best log-probability of every token. Products of a few
parents with all successor vectors are bound by reading these vectors, so they are computed twice rather than stored.

Layout, contiguous: logits are (B, D, V), parents (B, D, P), gates (B, D, R), predecessor and successor vectors (V, R).
The vocabulary is split into chunks of `span` tokens, and a chunk into tiles. The rows of a program are DEPTHS * PARENTS
pairs of a depth and a parent; index P is "no parent". Partial maxima and sums are (B, chunks, D, P + 1).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import power_of_2_below
from jetspec.ops.noise_triton import gumbel, gumbel_at
from jetspec.ops.overlap_triton import LOWEST, fetch, launch, wait
from jetspec.ops.select import device_of
from jetspec.ops.shortlist import topk_logprob
from jetspec.types import ChoiceModel, EdgeFactors

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

# Below any key, and the upper half of the keys of -inf.
BOTTOM = tl.constexpr(-(1 << 63))
MINUS_INF = tl.constexpr(-0x7F800001)


class Passed(NamedTuple):
    """The best tokens of each row, at least k, and what the log-sum-exp of a row is made of."""

    key_RP: Tensor
    """Keys in any order, `count_R` of them."""
    count_R: Tensor
    top_RC: Tensor
    sum_RC: Tensor


def topk_logprob_triton(logits: Tensor, k: int, choice: ChoiceModel | None = None) -> tuple[Tensor, Tensor]:
    logits_RV = logits.reshape(-1, logits.shape[-1]).contiguous()
    R, device = len(logits_RV), logits.device
    tiling = FEW if R < MANY_ROWS else MANY
    passed = select_best(logits_RV, k, choice, logits.shape[-2] if R > 1 else 1)
    token_RK = torch.empty(R, k, dtype=torch.int64, device=device)
    logprob_RK = torch.empty_like(token_RK, dtype=torch.float32)
    num_chunks = passed.top_RC.shape[1]
    sizes = {"CHUNKS": triton.next_power_of_2(num_chunks), "OWN": tiling.OWN, "BLOCK": tiling.BLOCK}
    numbers = passed.key_RP.shape[1], num_chunks, k
    launch(_rank_kernel, (R, -(-(k + k // 8) // tiling.OWN)), *passed, token_RK, logprob_RK, *numbers, **sizes)
    shape = (*logits.shape[:-1], k)
    return token_RK.view(shape), logprob_RK.view(shape)


def select_best(logits_RV: Tensor, k: int, choice: ChoiceModel | None, rows_per_request: int) -> Passed:
    """Select the k best tokens of each row and few others."""
    R, V = logits_RV.shape
    programs = device_of(logits_RV.device).multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    tiling = FEW if R < MANY_ROWS else MANY
    group = power_of_2_below(min(MAX_GROUP, CHUNK, V // (LEADERS * k)))
    num_chunks = -(-V // CHUNK)
    num_leaders = num_chunks * (CHUNK // group)
    most_reaching = k + k // 8
    capacity = min(V, most_reaching * group)
    span = -(-num_chunks // max(1, programs // R))  # chunks per program of the second kernel

    entries, device = _entries(choice), logits_RV.device
    leader_RL = torch.empty(R, num_leaders, dtype=torch.int64, device=device)
    passed_RP = torch.empty(R, capacity, dtype=torch.int64, device=device)
    count_R = torch.empty(R, dtype=torch.int32, device=device)
    top_RC = torch.empty(R, num_chunks, dtype=torch.float32, device=device)
    sum_RC = torch.empty_like(top_RC)
    tensors, groups = (leader_RL, count_R, top_RC, sum_RC), {"GROUP": group, "GROUPS": CHUNK // group}
    launch(_leader_kernel, (R, num_chunks), logits_RV, entries, *tensors, rows_per_request, V, **groups)
    numbers = V, num_leaders, capacity, span, k, most_reaching
    sizes = {"LEADERS": triton.next_power_of_2(num_leaders), "CHUNK": CHUNK, "RUN": tiling.RUN, "num_warps": 8}
    grid = R, -(-num_chunks // span)
    launch(_pass_kernel, grid, logits_RV, entries, leader_RL, passed_RP, count_R, rows_per_request, *numbers, **sizes)
    return Passed(passed_RP, count_R, top_RC, sum_RC)


def _entries(choice: ChoiceModel | None) -> tuple[Any, ...]:
    """Return the tables of a choice model behind their strides between requests and depths, 0 where entries are
    shared."""
    if choice is None:
        return None, 0, 0, None, None, None, None, None
    c = choice
    tables = [c.temperature_BD, c.weight_BD, c.position_BD, c.bonus_BD, c.least_BD]
    if c.weight_BD is not None:  # all tables have the strides of the first
        D = max(x.shape[1] for x in tables if x is not None)
        tables = [None if x is None else x.expand(-1, D).contiguous() for x in tables]
    temperature, weight, position, *filters = tables
    assert temperature is not None
    if any(x is None for x in filters):
        filters = [None, None]
    step = temperature.stride(1) if temperature.shape[1] > 1 else 0
    return temperature, temperature.stride(0), step, weight, c.seed_B, position, *filters


@triton.jit
def _leader_kernel(
    logits_ptr,
    choice,
    leader_ptr,
    count_ptr,
    top_ptr,
    sum_ptr,
    rows_per_request,
    V,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Keys of the leaders of a chunk, and its part of the log-sum-exp. Group g is every GROUPS-th token from g."""
    wait(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # leaders
    group = tl.arange(0, GROUPS)
    token = chunk * GROUP * GROUPS + tl.arange(0, GROUP)[:, None] * GROUPS + group[None, :]
    logit = _load_odds(logits_ptr + row * V, choice, row, rows_per_request, token, chunk * GROUP * GROUPS, V)
    out = row * tl.num_programs(1) + chunk
    tl.store(leader_ptr + out * GROUPS + group, tl.max(_keys(logit, token, V), axis=0))
    if chunk == 0:
        tl.store(count_ptr + row, 0)

    # partial log-sum-exp
    top = tl.maximum(tl.max(logit), LOWEST)
    tl.store(top_ptr + out, top)
    tl.store(sum_ptr + out, tl.sum(tl.exp(logit - top)))


@triton.jit
def _pass_kernel(
    logits_ptr,
    choice,
    leader_ptr,
    passed_ptr,
    count_ptr,
    rows_per_request,
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
    start = tl.program_id(1) * span * CHUNK
    for block in range(start, tl.minimum(start + span * CHUNK, V), CHUNK):
        token = block + tl.arange(0, CHUNK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        key = _keys(_load_odds(logits_ptr, choice, row, rows_per_request, token, block, V), token, V)
        passes = (key >= bound) & (token < V)
        order = tl.cumsum(passes.to(tl.int32), axis=1)
        found = tl.max(order, axis=1)
        first = tl.atomic_add(count_ptr + row + tl.zeros_like(found), found, mask=found > 0, sem="relaxed")
        tl.store(passed_ptr + row * capacity + first[:, None] + order - 1, key, mask=passes)


@triton.jit
def _bound(leader, k, most_reaching):
    """Find by bisection a key that k to `most_reaching` leaders reach. BOTTOM if there are fewer than k.

    By turns between values, over which leaders are spread more evenly, and between keys, which bounds the steps.
    """
    is_possible = (leader >> 32) > MINUS_INF  # so not past the end
    reaching, high = tl.sum(is_possible.to(tl.int32)), tl.max(leader)
    low = tl.where(reaching >= k, tl.min(tl.where(is_possible, leader, high)), BOTTOM)
    reaching = tl.where(reaching >= k, reaching, most_reaching + 1)
    step = tl.zeros([], tl.int32)
    while (low < high) & (reaching > most_reaching):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        value = 0.5 * key_logits(low) + 0.5 * key_logits(high)
        between = ordered(value.to(tl.int32, bitcast=True)).to(tl.int64) << 32
        middle = tl.where((step % 2 == 0) & (between > low) & (between <= high), between, middle)
        step += 1
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
    _, log_sum = log_sum_exp(top_ptr + row * num_chunks, sum_ptr + row * num_chunks, num_chunks, CHUNKS)
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
        tl.store(logprob_ptr + row * k + rank, key_logits(own) - log_sum, mask=chosen)


@triton.jit
def log_sum_exp(top_ptr, sum_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Return the maximum and the log-sum-exp of a row, from the maximum of every chunk and its sum of exponentials
    relative to it."""
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(top_ptr + chunk, mask=chunk < num_chunks, other=LOWEST)
    part = tl.load(sum_ptr + chunk, mask=chunk < num_chunks, other=0.0)
    highest = tl.max(top)
    return highest, highest + tl.log(tl.sum(part * tl.exp(top - highest)))


@triton.jit
def _load_odds(logits_ptr, choice, row, rows_per_request, token, first, V):
    """Return the log-odds of tokens `first`, `first` + 1, .. in row-major order, -inf past the end. Rounded as torch
    does, and alike in all kernels."""
    temperature_ptr, stride, step, weight_ptr, seed_ptr, position_ptr, bonus_ptr, least_ptr = choice
    logit = tl.load(logits_ptr + token, mask=token < V, other=-float("inf")).to(tl.float32)
    if temperature_ptr is not None:
        request = row // rows_per_request
        entry = request * stride + row % rows_per_request * step
        logit = tl.div_rn(logit, tl.load(temperature_ptr + entry))
        if weight_ptr is not None:
            bonus = tl.zeros_like(logit)
            if bonus_ptr is not None:
                bonus = tl.where(logit >= tl.load(least_ptr + entry), tl.load(bonus_ptr + entry), 0.0)
            block = first // 4 + tl.arange(0, token.numel // 4)
            noise = gumbel(tl.load(seed_ptr + request), tl.load(position_ptr + entry), block)
            noise = tl.reshape(noise, token.shape)
            logit = tl.fma(tl.load(weight_ptr + entry) + tl.zeros_like(noise), noise, logit) + bonus
    return logit


@triton.jit
def _keys(wide, place, count):
    """Return keys: the order-preserving integer of a logit above the complement of its token, 32 bits each. NaN has the
    greatest key, as in torch; tokens past the end have the least."""
    bits = ordered(tl.where(wide == 0, 0.0, wide).to(tl.int32, bitcast=True))  # -0.0 equals 0.0
    bits = tl.where(wide == wide, bits, 0x7FFFFFFF)
    return tl.where(place < count, bits.to(tl.int64), -(1 << 31)) << 32 | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _tokens(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_logits(key):
    return ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def ordered(bits):
    """Map the bits of a float to an integer of the same order, and back: negative ones flip all bits but the sign."""
    return bits ^ ((bits >> 31) & ((1 << 31) - 1)).to(bits.dtype)


# -- shortlists

PROGRAMS = 1024
"""Programs, approximately, for the vocabulary of all requests: enough to fill a GPU. Each loads the parents first, so
more would do so more often for less work."""
PARENT_BYTES, TILE_BYTES = 32 * 1024, 16 * 1024
"""Most shared memory for the parents and for a tile of successors, so that several programs fit on a multiprocessor."""
MAX_PARENTS, MAX_TOKENS = 64, 64
"""Most rows and most tokens of a product: it is held in registers."""
GATHER_BLOCK = 256
"""Shortlisted tokens per program of the last kernel."""

LOG2_E = tl.constexpr(1.4426950408889634)


class Sizes(NamedTuple):
    """Depths, parents, ranks and their blocks, and tokens of a tile."""

    D: int
    P: int
    R: int
    RANKS: int
    DEPTHS: int
    PARENTS: int
    TILE: int


def shortlist_triton(
    logits_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors, count: int, choice: ChoiceModel | None
) -> tuple[Tensor, Tensor]:
    logits_BDV = logits_BDV.contiguous()
    best_BDV, lse_BD = best_logprob_triton(logits_BDV, root_B, parents_BDP, edge, choice)
    token_BDC = topk_logprob(best_BDV, count)[0]
    logprob_BDC = torch.empty_like(token_BDC, dtype=torch.float32)
    B, D, V = logits_BDV.shape
    grid, tensors = (B * D, triton.cdiv(count, GATHER_BLOCK)), (logits_BDV, token_BDC, lse_BD, _entries(choice))
    launch(_gather_logprob_kernel, grid, *tensors, logprob_BDC, V, count, D=D, BLOCK=GATHER_BLOCK)
    return token_BDC, logprob_BDC


def best_logprob_triton(
    logits_BDV: Tensor, root_B: Tensor, parents_BDP: Tensor, edge: EdgeFactors, choice: ChoiceModel | None
) -> tuple[Tensor, Tensor]:
    """Return the best log-probability of each token, (B, D, V), and the log-sum-exp without an edge, (B, D)."""
    (B, D, V), P, R = logits_BDV.shape, parents_BDP.shape[-1], edge.gate_BDR.shape[-1]
    ranks, parents = max(16, triton.next_power_of_2(R)), triton.next_power_of_2(P + 1)
    itemsize = edge.successor_VR.element_size()
    tile, depths = num_tokens(ranks, itemsize), num_depths(D, parents, ranks, itemsize)
    blocks = triton.cdiv(D, depths)
    span = triton.cdiv(triton.cdiv(V, tile) * blocks * B, PROGRAMS) * tile
    chunks = triton.cdiv(V, span)
    top_BCDQ = torch.empty(B, chunks, D, P + 1, dtype=torch.float32, device=logits_BDV.device)
    total_BCDQ, lse_QBD = torch.empty_like(top_BCDQ), top_BCDQ.new_empty(P + 1, B, D)
    best_BDV = top_BCDQ.new_empty(B, D, V)
    inputs = (
        *(logits_BDV, root_B.contiguous(), parents_BDP.contiguous(), _entries(choice)),
        *(edge.gate_BDR.contiguous(), edge.predecessor_VR.contiguous(), edge.successor_VR.contiguous()),
    )
    grid, numbers = (chunks, blocks, B), (V, span)
    options: dict[str, Any] = {"sizes": Sizes(D, P, R, ranks, depths, parents, tile)}
    # On Hopper, four warps feed 64 rows to the tensor cores.
    options["num_warps"] = 8 if depths * parents >= 128 else 4
    # Tiles in flight, as many as fit into the smallest GPUs, where fp32 numbers are split into several parts.
    options["num_stages"] = 3 if ranks * itemsize <= 128 else 2 if itemsize == 2 else 1
    launch(_children_kernel, grid, inputs, top_BCDQ, total_BCDQ, None, None, *numbers, **options)
    sums = top_BCDQ, total_BCDQ, lse_QBD, chunks
    launch(_sum_kernel, (P + 1, D, B), *sums, CHUNKS=triton.next_power_of_2(chunks))
    launch(_children_kernel, grid, inputs, None, None, lse_QBD, best_BDV, *numbers, **options)
    return best_BDV, lse_QBD[P]


def num_tokens(ranks: int, itemsize: int) -> int:
    """Return the tokens per tile."""
    return min(max(16, TILE_BYTES // (ranks * itemsize)), MAX_TOKENS)


def num_depths(D: int, parents: int, ranks: int, itemsize: int) -> int:
    """Return the depths per program: as many as fit, since every program reads all its tokens. At least two, for
    `_rows`."""
    rows = min(max(16, PARENT_BYTES // (ranks * itemsize)), MAX_PARENTS)
    return max(2, min(triton.cdiv(rows, parents), triton.next_power_of_2(D)))


@triton.jit
def _children_kernel(
    inputs,
    top_ptr,
    total_ptr,
    lse_ptr,
    best_ptr,
    V,
    span,
    sizes: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """One chunk of the vocabulary. Without log-sum-exps: the maximum logit of each row, and the sum of exponentials
    relative to it. With them: the log-probability of each token, maximized over the parents of a depth and none."""
    logits_ptr, root_ptr, parents_ptr, choice, gate_ptr, predecessor_ptr, successor_ptr = inputs
    D: tl.constexpr = sizes.D
    DEPTHS: tl.constexpr = sizes.DEPTHS
    PARENTS: tl.constexpr = sizes.PARENTS
    TILE: tl.constexpr = sizes.TILE
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    depth, parent = _rows(DEPTHS, PARENTS)
    if lse_ptr is None:
        top = tl.full([DEPTHS * PARENTS], LOWEST, tl.float32)
        total = tl.zeros([DEPTHS * PARENTS], tl.float32)
    own_depth = tl.program_id(1) * DEPTHS + tl.arange(0, DEPTHS)
    # prefetch successors, load parents
    _fetch_successors(successor_ptr, chunk * span, V, sizes.R, TILE, OVERLAP)
    wait(OVERLAP)
    gated = _gated((root_ptr, parents_ptr, gate_ptr, predecessor_ptr), row, depth, parent, sizes)
    if lse_ptr is not None:
        lse = tl.load(lse_ptr + (tl.minimum(parent, sizes.P) * tl.num_programs(2) + row) * D + tl.minimum(depth, D - 1))
    for start in range(chunk * span, tl.minimum(chunk * span + span, V), TILE):
        token = start + tl.arange(0, TILE)
        successor = _successors(successor_ptr, token, V, sizes)
        if choice[3] is None:
            logits = _load_logits(logits_ptr, choice, row, depth, token, V, D)
        else:
            odds = _load_odds_of_depths(logits_ptr, choice, row, own_depth, token, start, V, D)
            odds = tl.reshape(odds, [DEPTHS // 2, 1, 2, 1, TILE])
            odds = tl.broadcast_to(odds, [DEPTHS // 2, 2, 2, PARENTS // 2, TILE])  # in the order of `_rows`
            logits = tl.reshape(odds, [DEPTHS * PARENTS, TILE])
        # tensor cores; of fp32 factors with nearly fp32 precision
        z = tl.dot(gated, successor, logits, input_precision="tf32x3")
        if lse_ptr is None:
            # online log-sum-exp over the tiles
            higher = tl.maximum(top, tl.max(z, 1))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp2(z * LOG2_E - (higher * LOG2_E)[:, None]), 1)
            top = higher
        else:
            # maximize over the parents of each depth, in the order of `_rows`
            logprob = tl.reshape(z - lse[:, None], [DEPTHS // 2, 2, 2, PARENTS // 2, TILE])
            best = tl.reshape(tl.max(tl.max(logprob, 1), 2), [DEPTHS, TILE])
            place = (row * D + own_depth)[:, None] * V + token[None, :]
            tl.store(best_ptr + place, best, mask=(own_depth < D)[:, None] & (token < V)[None, :])
    if lse_ptr is None:
        # store partials
        out = ((row * tl.num_programs(0) + chunk) * D + depth) * (sizes.P + 1) + parent
        known = (depth < D) & (parent <= sizes.P)
        tl.store(top_ptr + out, top, mask=known)
        tl.store(total_ptr + out, total, mask=known)


@triton.jit
def _sum_kernel(top_ptr, total_ptr, lse_ptr, num_chunks, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr = False):
    """Log-sum-exp of one parent at one depth, from the partial sums of its chunks."""
    wait(OVERLAP)
    parent, depth, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Q, D, B = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    chunk = tl.arange(0, CHUNKS)
    place = ((row * num_chunks + chunk) * D + depth) * Q + parent
    top = tl.load(top_ptr + place, mask=chunk < num_chunks, other=LOWEST)
    total = tl.load(total_ptr + place, mask=chunk < num_chunks, other=0.0)
    highest = tl.max(top)
    tl.store(lse_ptr + (parent * B + row) * D + depth, highest + tl.log(tl.sum(total * tl.exp(top - highest))))


@triton.jit
def _gather_logprob_kernel(
    logits_ptr,
    token_ptr,
    lse_ptr,
    choice,
    out_ptr,
    V,
    count,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Log-probabilities, without an edge, of the shortlisted tokens of one depth."""
    wait(OVERLAP)
    level = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + level * count + place, mask=place < count, other=0)
    logit = tl.load(logits_ptr + level * V + token, mask=place < count, other=0.0).to(tl.float32)
    temperature_ptr, stride, step, weight_ptr, seed_ptr, position_ptr, bonus_ptr, least_ptr = choice
    if temperature_ptr is not None:
        row = level // D
        entry = row * stride + level % D * step
        logit /= tl.load(temperature_ptr + entry)
        if weight_ptr is not None:
            noise = gumbel_at(tl.load(seed_ptr + row), tl.load(position_ptr + entry), token)
            if bonus_ptr is not None:
                logit += tl.where(logit >= tl.load(least_ptr + entry), tl.load(bonus_ptr + entry), 0.0)
            logit += tl.load(weight_ptr + entry) * noise
    tl.store(out_ptr + level * count + place, logit - tl.load(lse_ptr + level), mask=place < count)


@triton.jit
def _rows(DEPTHS: tl.constexpr, PARENTS: tl.constexpr):
    """Return the depth and the parent of every row of a program. Parents from P on are "no parent".

    Two depths share a group of rows, each with half of its parents in the first half and the rest in the second. Tensor
    cores give rows i and i + 8 of 16 to the same thread, which then holds two parents of one depth and compares them
    without an exchange.
    """
    index = tl.arange(0, DEPTHS * PARENTS)
    half: tl.constexpr = PARENTS // 2
    low, high = index % PARENTS, index // PARENTS % 2
    depth = index // (2 * PARENTS) * 2 + low // half
    return tl.program_id(1) * DEPTHS + depth, high * half + low % half


@triton.jit
def _load_odds_of_depths(logits_ptr, choice, row, depth, token, first, V, D: tl.constexpr):
    """Return the log-odds of a tile of tokens from `first` at every depth, -inf past the end of the vocabulary."""
    temperature_ptr, stride, step, weight_ptr, seed_ptr, position_ptr, bonus_ptr, least_ptr = choice
    level = tl.minimum(depth, D - 1)
    entry = (row * stride + level * step)[:, None]
    place = (row * D + level)[:, None] * V + token[None, :]
    inside = tl.broadcast_to((token < V)[None, :], place.shape)
    logit = tl.load(logits_ptr + place, mask=inside, other=-float("inf")).to(tl.float32)
    logit = logit / tl.load(temperature_ptr + entry)
    block = (first // 4 + tl.arange(0, token.shape[0] // 4))[None, :]
    noise = gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + entry), block)
    if bonus_ptr is not None:
        logit += tl.where(logit >= tl.load(least_ptr + entry), tl.load(bonus_ptr + entry), 0.0)
    return logit + tl.load(weight_ptr + entry) * noise


@triton.jit
def _load_logits(logits_ptr, choice, row, depth, token, V, D: tl.constexpr):
    """Return the logits of a tile of tokens for every row, -inf past the end of the vocabulary."""
    temperature_ptr, stride, step, _, _, _, _, _ = choice
    place = (row * D + tl.minimum(depth, D - 1))[:, None] * V + token[None, :]
    inside = tl.broadcast_to((token < V)[None, :], place.shape)
    logit = tl.load(logits_ptr + place, mask=inside, other=-float("inf")).to(tl.float32)
    if temperature_ptr is not None:
        logit *= (1 / tl.load(temperature_ptr + row * stride + tl.minimum(depth, D - 1) * step))[:, None]
    return logit


@triton.jit
def _fetch_successors(successor_ptr, start, V, R: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """Prefetch the vectors of the program's first tile, which the preceding kernel does not write."""
    if OVERLAP and R % 8 == 0:
        own_bytes = tl.minimum(TILE, V - start) * R * (successor_ptr.dtype.element_ty.primitive_bitwidth // 8)
        fetch(successor_ptr + start.to(tl.int64) * R, own_bytes)


@triton.jit
def _successors(successor_ptr, token, V, sizes: tl.constexpr):
    """Return the successor vectors of a tile of tokens, (RANKS, TILE)."""
    rank = tl.arange(0, sizes.RANKS)
    place = tl.minimum(token, V - 1).to(tl.int64)[None, :] * sizes.R + rank[:, None]
    return tl.load(successor_ptr + place, mask=(rank < sizes.R)[:, None], other=0.0)


@triton.jit
def _gated(places, row, depth, parent, sizes: tl.constexpr):
    """Return the gated predecessor vectors of the rows: of the root at depth 0, else of the parent; 0 for none."""
    P: tl.constexpr = sizes.P
    R: tl.constexpr = sizes.R
    root_ptr, parents_ptr, gate_ptr, predecessor_ptr = places
    level = row * sizes.D + tl.minimum(depth, sizes.D - 1)
    previous = tl.load(parents_ptr + tl.maximum(level - 1, 0) * P + tl.minimum(parent, P - 1))
    token = tl.where(depth == 0, tl.load(root_ptr + row), previous)
    rank = tl.arange(0, sizes.RANKS)[None, :]
    inside = (parent < P)[:, None] & (rank < R)
    gate = tl.load(gate_ptr + level[:, None] * R + rank, mask=inside, other=0.0).to(tl.float32)
    vector = tl.load(predecessor_ptr + token.to(tl.int64)[:, None] * R + rank, mask=inside, other=0.0)
    return (vector.to(tl.float32) * gate).to(predecessor_ptr.dtype.element_ty)
