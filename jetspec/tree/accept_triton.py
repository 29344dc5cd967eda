"""Triton kernels of acceptance: `choose_nodes`, the best token of every chunk of a row, then of the row, and `walk`,
one program per tree.

The filters need no sort: each keeps the tokens above some value. The best tokens of a row, in any order, nearly always
decide it; where they do not, it is found by bisection over the bits of a float.

Layout, contiguous: logits are (B * N, V); temperature, seed and the filters (B,), positions, thresholds and chosen
tokens (B * N,), the keys of the best tokens (B * N, capacity), those of the chunks (B * N, chunks). For the
walk, all int64: token, parent, depth and choice are (B, N), the path and the committed tokens (B, D + 1) with D =
`max_depth`, the length and the bonus (B,).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.noise_triton import gumbel
from jetspec.ops.overlap_triton import launch
from jetspec.ops.shortlist_triton import BOTTOM, key_logits, log_sum_exp, ordered, select_best
from jetspec.tree.draft_tree import Acceptance, DraftTree
from jetspec.types import ChoiceModel, RowSampling

CHUNK = 4096
"""Logits per program of the choice."""
BLOCK = 8192
"""Logits per load of a bisection."""
BEST, BEST_OF_MANY = 128, 64
"""Best tokens of a row, at least, among which thresholds are looked for, for few and for many rows."""
MANY_ROWS = 512
MAX_BEST = 2
"""Most tokens that are looked at, as a multiple of those."""
OTHERS = tl.constexpr(32)
"""Tokens that they are compared with at once."""
COLDEST = tl.constexpr(1e-6)
"""Least temperature: a draw at a lower one is the argmax anyway."""


def choose_nodes_triton(logits_BNV: Tensor, sampling: RowSampling, position_BN: Tensor) -> Tensor:
    B, N, V = logits_BNV.shape
    logits_BNV = logits_BNV.contiguous()
    chunk = min(CHUNK, max(4, triton.next_power_of_2(V)))
    num_chunks = -(-V // chunk)
    key_BNC = torch.empty(B, N, num_chunks, dtype=torch.int64, device=logits_BNV.device)
    token_BN = torch.empty(B, N, dtype=torch.int64, device=logits_BNV.device)
    threshold_BN = least_kept_triton(logits_BNV, sampling) if sampling.any_filtered else None
    tensors = logits_BNV, threshold_BN, position_BN.contiguous(), sampling.temperature_B, sampling.seed_B, key_BNC
    launch(_choose_nodes_kernel, (B * N, num_chunks), *tensors, N, V, SAMPLED=sampling.any_sampled, CHUNK=chunk)
    sizes = {"CHUNKS": triton.next_power_of_2(num_chunks), "num_warps": 1}
    launch(_best_chunk_kernel, (B * N,), key_BNC, token_BN, num_chunks, **sizes)
    return token_BN


def least_kept_triton(logits_BNV: Tensor, sampling: RowSampling) -> Tensor:
    B, N, V = logits_BNV.shape
    K = BEST if B * N < MANY_ROWS else BEST_OF_MANY
    logits_BNV = logits_BNV.contiguous()
    choice = ChoiceModel(sampling.temperature_B.clamp(min=COLDEST.value)[:, None])
    passed = select_best(logits_BNV.view(B * N, V), min(V, K), choice, N)
    threshold_BN = torch.empty(B, N, dtype=torch.float32, device=logits_BNV.device)
    filters = sampling.temperature_B, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B
    numbers = N, V, passed.key_RP.shape[1], passed.top_RC.shape[1]
    sizes = {
        "BEST": triton.next_power_of_2(MAX_BEST * K),
        "CHUNKS": triton.next_power_of_2(numbers[-1]),
        "num_warps": 8,
    }
    sizes["BLOCK"] = min(BLOCK, triton.next_power_of_2(V))
    launch(_threshold_kernel, (B * N,), logits_BNV, passed, *filters, threshold_BN, *numbers, **sizes)
    return threshold_BN


@triton.jit
def _choose_nodes_kernel(
    logits_ptr,
    threshold_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    key_ptr,
    N,
    V,
    SAMPLED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Best token of a chunk, as a key: the order-preserving integer of its value above the complement of the token."""
    # load logits
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_ptr + node * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    if SAMPLED:
        # temperature, filters, noise
        request = node // N
        temperature = tl.load(temperature_ptr + request)
        if temperature > 0:
            value = _scaled(value, temperature)
            if threshold_ptr is not None:
                value = tl.where(value < tl.load(threshold_ptr + node), -float("inf"), value)
            if (threshold_ptr is None) | (tl.max(value) > -float("inf")):  # filters leave nothing in most chunks
                seed, position = tl.load(seed_ptr + request), tl.load(position_ptr + node)
                value += gumbel(seed, position, chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4))
    # argmax of the chunk
    value = tl.where(value == 0, 0.0, value)  # -0 and 0 are equal
    key = ordered(value.to(tl.int32, bitcast=True)).to(tl.int64) << 32 | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(key_ptr + node * tl.num_programs(1) + chunk, tl.max(key))


@triton.jit
def _best_chunk_kernel(key_ptr, token_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Best token of a row, from the keys of its chunks."""
    node = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    key = tl.load(key_ptr + node * num_chunks + chunk, mask=chunk < num_chunks, other=-(1 << 63))
    tl.store(token_ptr + node, 0x7FFFFFFF - (tl.max(key) & 0x7FFFFFFF))


@triton.jit
def _threshold_kernel(
    logits_ptr,
    passed,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    threshold_ptr,
    N,
    V,
    capacity,
    num_chunks,
    BEST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least value of a row that top-k, then top-p, then min-p keep, without the sort of `filter_logits`.

    top-p keeps a value t if the values from the k-th largest up to t hold more than 1 - p of the mass. Both conditions
    are monotone in t.
    """
    node = tl.program_id(0).to(tl.int64)
    request = node // N
    temperature = tl.load(temperature_ptr + request)
    if temperature <= 0:
        tl.store(threshold_ptr + node, -float("inf"))
        return
    top_k, top_p, min_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request), tl.load(min_p_ptr + request)
    # best tokens, in any order
    key_ptr, count_ptr, top_ptr, sum_ptr = passed
    key_ptr += node * capacity
    count = tl.load(count_ptr + node)
    index = tl.arange(0, BEST)
    is_best = index < count
    key = tl.load(key_ptr + index, mask=is_best, other=BOTTOM)
    value = tl.where(is_best, key_logits(key), -float("inf"))
    last = tl.min(tl.where(is_best, value, float("inf")))
    top, log_sum = log_sum_exp(top_ptr + node * num_chunks, sum_ptr + node * num_chunks, num_chunks, CHUNKS)

    # top-k: the largest value that so many reach
    is_limited = (top_k > 0) & (top_k < V)
    kth = -float("inf")
    if is_limited:
        reaching = tl.zeros([BEST], tl.int32)
        for first in range(0, tl.minimum(count, BEST), OTHERS):
            other = _load_keys(key_ptr, first, count)
            reaching += tl.sum((key_logits(other)[None, :] >= value[:, None]).to(tl.int32), axis=1)
        kth = tl.max(tl.where(reaching >= top_k, value, -float("inf")))
    # top-p: the least value above which there is less than p
    least = kth
    if top_p < 1:
        prob = tl.where(is_best & (value >= kth), tl.exp(value - log_sum), 0.0)
        total = tl.where(is_limited, tl.sum(prob), 1.0)
        above = tl.zeros([BEST], tl.float32)
        for first in range(0, tl.minimum(count, BEST), OTHERS):
            other = _load_keys(key_ptr, first, count)
            of_other = tl.exp(key_logits(other) - log_sum)
            above += tl.sum(tl.where(other[None, :] > key[:, None], of_other[None, :], 0.0), axis=1)
        is_kept = is_best & (value >= kth) & ((value == top) | (total - above > (1 - top_p) * total))
        least = tl.min(tl.where(is_kept, value, float("inf")))
    # tokens beyond the best decide nothing: there are none, or all that may be kept are above the last
    knows_top_k = (top_k <= count) & ((top_p >= 1) | (kth > last))
    knows_all = (count == V) | (last == -float("inf"))
    is_decided = knows_all | tl.where(is_limited, knows_top_k, (top_p >= 1) | (least > last))
    if (not is_decided) | (count > BEST):
        least = _bisected(logits_ptr + node * V, temperature, top_k, top_p, top, V, tl.arange(0, BLOCK))
    # min-p
    if min_p > 0:
        least = tl.maximum(least, top + tl.log(min_p))
    tl.store(threshold_ptr + node, least)


@triton.jit
def _load_keys(key_ptr, first, count):
    """Load some of the best tokens. Past the end their value is NaN, which is above nothing."""
    index = first + tl.arange(0, OTHERS)
    return tl.load(key_ptr + index, mask=index < count, other=BOTTOM)


@triton.jit
def _bisected(row_ptr, temperature, top_k, top_p, top, V, lane):
    """Return the least value that top-k, then top-p keep, by bisection over the integers that are ordered like
    floats."""
    BLOCK: tl.constexpr = lane.shape[0]
    # top-k
    kth = -float("inf")
    if (top_k > 0) & (top_k < V):
        low, high = _bits(kth), _bits(top)  # at least k values from `low` up
        while low < high:
            middle = (low + high + 1) >> 1
            bound = _float(middle)
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, V, BLOCK):
                value = _scaled_block(row_ptr, start + lane, V, temperature)
                count += ((value >= bound) & (start + lane < V)).to(tl.int32)
            enough = tl.sum(count) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        kth = _float(low)

    # top-p
    least = kth
    if top_p < 1:
        dropped_mass = (1 - top_p) * _mass(row_ptr, V, temperature, kth, top, top, lane)
        low, high = _bits(kth), _bits(top)  # `high` is kept
        while low < high:
            middle = (low + high) >> 1
            enough = _mass(row_ptr, V, temperature, kth, _float(middle), top, lane) > dropped_mass
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        least = _float(low)
    return least


@triton.jit
def _mass(row_ptr, V, temperature, low, high, top, lane):
    """Return the sum of exp(x - top) over the values x from `low` to `high`."""
    total = tl.zeros_like(lane).to(tl.float32)
    for start in range(0, V, lane.shape[0]):
        value = _scaled_block(row_ptr, start + lane, V, temperature)
        total += tl.where((value >= low) & (value <= high), tl.exp(value - top), 0.0)
    return tl.sum(total)


@triton.jit
def _scaled_block(row_ptr, index, V, temperature):
    return _scaled(tl.load(row_ptr + index, mask=index < V, other=-float("inf")).to(tl.float32), temperature)


@triton.jit
def _scaled(logit, temperature):
    return tl.div_rn(logit, tl.zeros_like(logit) + tl.maximum(temperature, COLDEST))


@triton.jit
def _bits(value):
    """Return a float as an integer of the same order, wide enough to add two of them."""
    return ordered(value.to(tl.int32, bitcast=True)).to(tl.int64)


@triton.jit
def _float(bits):
    return ordered(bits.to(tl.int32)).to(tl.float32, bitcast=True)


def walk_triton(tree: DraftTree, choice_BN: Tensor) -> Acceptance:
    """`choice_BN` holds the target's token after every node."""
    B, N = choice_BN.shape
    path_BD1 = choice_BN.new_empty(B, tree.max_depth + 1)
    token_BD1 = torch.empty_like(path_BD1)
    length_B, bonus_B = choice_BN.new_empty(B), choice_BN.new_empty(B)
    nodes = [x.contiguous() for x in (tree.token_BN, tree.parent_BN, tree.depth_BN, choice_BN)]
    sizes = {"NODES": triton.next_power_of_2(N), "num_warps": 1 if N <= 256 else 4}
    launch(_accept_kernel, (B,), *nodes, path_BD1, token_BD1, length_B, bonus_B, N, tree.max_depth, **sizes)
    return Acceptance(path_BD1, length_B, bonus_B, token_BD1)


@triton.jit
def _accept_kernel(
    token_ptr,
    parent_ptr,
    depth_ptr,
    choice_ptr,
    path_ptr,
    committed_ptr,
    length_ptr,
    bonus_ptr,
    N,
    max_depth,
    NODES: tl.constexpr,
):
    """Step to the child that carries the choice, `max_depth + 1` times; past the last child the node stays the same.

    The choice after the current node is the next committed token: a draft token if a child carries it, else the bonus.
    """
    # load the tree
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    token = tl.load(token_ptr + row * N + node, mask=node < N, other=-1)
    parent = tl.load(parent_ptr + row * N + node, mask=node < N, other=-1)
    # Padding and the root have depth 0, so they never count as children.
    is_child = tl.load(depth_ptr + row * N + node, mask=node < N, other=0) > 0

    # walk
    current = tl.zeros([], tl.int32)
    length = tl.zeros([], tl.int32)
    for step in range(max_depth + 1):
        choice = tl.load(choice_ptr + row * N + current)
        out = row * (max_depth + 1) + step
        tl.store(path_ptr + out, current)
        tl.store(committed_ptr + out, choice)
        child = tl.min(tl.where(is_child & (parent == current) & (token == choice), node, NODES))
        length += (child < NODES).to(tl.int32)
        current = tl.where(child < NODES, child, current)

    # store length and bonus
    tl.store(length_ptr + row, length)
    tl.store(bonus_ptr + row, tl.load(choice_ptr + row * N + current))
