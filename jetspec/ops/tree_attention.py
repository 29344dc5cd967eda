"""Attention of in-flight tokens over their request's cached prefix and their own ancestors.

One operation serves every forward: a prefill chunk is a chain, a plain step a tree of one node, the head's block a
chain (or, bidirectional, a clique), a draft a tree. Indices and masks depend on the batch alone: they are planned once
per forward and shared by all layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops.layouts import new_rows
from jetspec.ops.select import select
from jetspec.types import KVPages, TreeBatch


@dataclass(frozen=True)
class KernelPlan:
    """Plan of the kernels, which compute on the device all that the reference plans on the host."""

    batch: TreeBatch


@dataclass(frozen=True)
class RequestGroup:
    """Requests with equally many queries (Q), padded to the same number of keys (J)."""

    queries: slice | Tensor
    """Their tokens in the batch."""
    keys: slice | Tensor
    """Slots of their keys, (requests, J), prefix first, then the in-flight tokens. A slice: one request's, in place."""
    seen: Tensor
    """(requests, Q, J): prefix and ancestors, no padding."""
    query_position: Tensor
    key_position: Tensor | None
    """None where earlier forwards left tokens in flight, whose positions are unknown."""

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the addend of the scores, (requests, 1, repeat * Q, J), or None if all is seen."""
        seen = self.seen
        if window is not None:
            assert self.key_position is not None, "positions of tokens of earlier forwards are unknown"
            seen = seen & (self.key_position[:, None] > self.query_position[:, :, None] - window)
        if bool(seen.all()):
            return None
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return mask.repeat(1, repeat, 1)[:, None]


@dataclass(frozen=True)
class AttentionPlan:
    groups: list[RequestGroup]
    masks: dict[tuple[int | None, int, torch.dtype], list[Tensor | None]] = field(default_factory=dict)

    def masks_for(self, window: int | None, repeat: int, dtype: torch.dtype) -> list[Tensor | None]:
        """Returns the masks of the groups, each repeated for the query heads that share a key head."""
        key = (window, repeat, dtype)
        if key not in self.masks:
            self.masks[key] = [group.mask(window, repeat, dtype) for group in self.groups]
        return self.masks[key]


Plan = AttentionPlan | KernelPlan


def plan_attention(batch: TreeBatch) -> Plan:
    return select("plan_attention", plan_attention_reference, batch.token_T)(batch)


def plan_attention_reference(batch: TreeBatch) -> Plan:
    starts = batch.layout.query_start_B1.tolist()
    rows_of = defaultdict(list)
    for row, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            rows_of[end - start].append(row)
    return AttentionPlan([_plan_group(batch, rows, count) for count, rows in rows_of.items()])


def tree_attention(
    q_THE: Tensor, pages: KVPages, plan: Plan, scale: float, window: int | None, out: Tensor | None = None
) -> Tensor:
    """softmax(scale * q k + mask) v per request; `pages` already hold the in-flight K and V.

    A query at position p sees keys at positions above p - window. The result is written to `out`, if given.
    """
    if isinstance(plan, AttentionPlan):
        result = tree_attention_reference(q_THE, pages, plan, scale, window)
        return result if out is None else out.copy_(result)
    batch = plan.batch
    facts = {"q_THE": q_THE, "pages": pages, "batch": batch, "window": window}
    kernel = select("tree_attention", _attend_unplanned, batch.token_T, **facts)
    return kernel(q_THE, pages, batch, scale, window, out)


def _attend_unplanned(
    q_THE: Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None, out: Tensor | None
) -> Tensor:
    return tree_attention(q_THE, pages, plan_attention_reference(batch), scale, window, out)


def tree_attention_reference(
    q_THE: Tensor, pages: KVPages, plan: AttentionPlan, scale: float, window: int | None
) -> Tensor:
    """One product per group of requests. Query heads that share a key head are further queries of it."""
    masks = plan.masks_for(window, q_THE.shape[1] // pages.k.shape[2], q_THE.dtype)
    if len(plan.groups) == 1:
        return _attend_group(q_THE, pages, plan.groups[0], masks[0], scale)
    out = torch.empty_like(q_THE)
    for group, mask in zip(plan.groups, masks, strict=True):
        out[group.queries] = _attend_group(q_THE[group.queries], pages, group, mask, scale)
    return out


def _attend_group(q_THE: Tensor, pages: KVPages, group: RequestGroup, mask: Tensor | None, scale: float) -> Tensor:
    (_, H, E), G, (requests, count, _) = q_THE.shape, pages.k.shape[2], group.seen.shape
    q = q_THE.view(requests, count, G, H // G, E).permute(0, 2, 3, 1, 4).reshape(requests, G, -1, E)
    k = pages.k.flatten(0, 1)[group.keys].view(requests, -1, G, E).transpose(1, 2)
    v = pages.v.flatten(0, 1)[group.keys].view(requests, -1, G, E).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.view(requests, G, H // G, count, E).permute(0, 3, 1, 2, 4).reshape(-1, H, E)


def _plan_group(batch: TreeBatch, rows: list[int], count: int) -> RequestGroup:
    layout, device = batch.layout, batch.token_T.device
    row = torch.tensor(rows, device=device)
    token = layout.query_start_B1[row, None] + torch.arange(count, device=device)
    position, cached = batch.position_T[token], layout.cached_len_B[row, None]
    in_flight_count = layout.earlier + count
    index = torch.arange(int(cached.max()) + in_flight_count, device=device)
    slot = layout.page_BP[row[:, None], index // layout.page_size] * layout.page_size + index % layout.page_size

    node = (index - cached).clamp(0, in_flight_count - 1)
    in_flight = index >= cached
    visible = _visible(batch, row, count, in_flight_count).expand(len(rows), -1, -1)
    ancestor = visible.gather(2, node[:, None].expand(-1, count, -1))
    has_bits = row.new_full(row.shape, batch.ancestor_BNW is not None, dtype=torch.bool)
    is_tree = has_bits if batch.is_tree_B is None else batch.is_tree_B[row]
    exists = ((index >= layout.first_seen) | (in_flight & is_tree[:, None])) & (index < cached + in_flight_count)
    seen = (ancestor | ~in_flight[:, None]) & exists[:, None]
    key_position = None if layout.earlier else torch.where(in_flight, position.gather(1, node), index)
    return RequestGroup(_as_slice(token.flatten()), _as_slice(slot.flatten()), seen, position, key_position)


def _visible(batch: TreeBatch, row: Tensor, count: int, in_flight_count: int) -> Tensor:
    """Returns which tokens in flight each token of this forward sees: those of a chain, or by the bits."""
    chain = torch.ones(1, count, count, dtype=torch.bool, device=row.device).tril_()
    if batch.ancestor_BNW is None:
        assert count == in_flight_count, "a chain belongs to one forward"
        return chain
    bits = batch.ancestor_BNW[row, :count]
    if batch.is_tree_B is not None:  # chains may have more tokens than there are bits
        bits = F.pad(bits, (0, -(-count // 32) - bits.shape[2], 0, count - bits.shape[1]))
    bit = torch.arange(in_flight_count, device=row.device)
    words = bits[:, :, bit // 32]
    visible = (words >> (bit % 32).to(words.dtype)) & 1 != 0
    return visible if batch.is_tree_B is None else torch.where(batch.is_tree_B[row, None, None], visible, chain)


def _as_slice(index: Tensor) -> slice | Tensor:
    """Returns a slice of neighbouring indices, so that they are read in place. Others are gathered."""
    first, last = int(index[0]), int(index[-1])
    if last - first == len(index) - 1 and bool((index.diff() == 1).all()):
        return slice(first, last + 1)
    return index


UNSPECIALIZED = "page_stride_b", "ancestor_stride_b", "ancestor_stride_n", "W"
"""Arguments of every kernel for whose values none is compiled anew."""


@dataclass(frozen=True)
class Attention:
    """Operands of the kernels, which differ in how they tile queries and keys. Query rows of a request are (node, query
    head of the key head) pairs, node by node."""

    q_THE: Tensor
    pages: KVPages
    batch: TreeBatch
    out: Tensor
    log2_scale: float
    """Includes log2(e): powers of two are what the hardware computes."""

    @classmethod
    def of(
        cls, q_THE: Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None, out: Tensor | None
    ) -> Attention:
        layout = batch.layout
        out = new_rows(*q_THE.shape, like=q_THE) if out is None else out
        call = cls(q_THE, pages, batch, out, scale * math.log2(math.e))
        ancestor, page_BP = call.ancestor, layout.page_BP
        assert ancestor is not None or not layout.earlier, "a chain is of one forward"
        assert window is None or not layout.earlier, "positions of tokens of earlier forwards are unknown"
        assert q_THE.stride(2) == pages.k.stride(3) == 1
        assert pages.k.stride() == pages.v.stride() and pages.k.stride(0) == pages.k.shape[1] * pages.k.stride(1)
        assert page_BP.shape[1] == 1 or page_BP.stride(1) == 1
        assert ancestor is None or ancestor.shape[2] == 1 or ancestor.stride(2) == 1
        assert out.is_contiguous() and out.shape == q_THE.shape
        return call

    @cached_property
    def ancestor(self) -> Tensor | None:
        """Masks of the trees. A lone node sees the prefix and itself, as in a chain, whose kernel needs no bits."""
        layout = self.batch.layout
        is_lone = layout.max_queries == 1 and not layout.earlier and not layout.first_seen
        return None if is_lone else self.batch.ancestor_BNW

    @property
    def repeat(self) -> int:
        """Query heads of a key head."""
        return self.q_THE.shape[1] // self.pages.k.shape[2]

    @property
    def rows(self) -> int:
        """Query rows of a request to a key head."""
        return self.batch.layout.max_queries * self.repeat

    @property
    def key_heads(self) -> int:
        """Of all requests."""
        return len(self.batch.layout.cached_len_B) * self.pages.k.shape[2]

    @property
    def capacity(self) -> int:
        """Keys of a request that its page table holds."""
        return self.batch.layout.page_BP.shape[1] * self.batch.layout.page_size

    def operands(self) -> tuple[Tensor | None, ...]:
        """Pointers of every kernel, in order: q, page, cached, start, ancestor, out."""
        layout = self.batch.layout
        return self.q_THE, layout.page_BP, layout.cached_len_B, layout.query_start_B1, self.ancestor, self.out

    def strides(self) -> tuple[int, ...]:
        """q_stride_t, q_stride_h, then those of `UNSPECIALIZED`."""
        bits = (0, 0, 0) if self.ancestor is None else (*self.ancestor.stride()[:2], self.ancestor.shape[2])
        return *self.q_THE.stride()[:2], self.batch.layout.page_BP.stride(0), *bits

    def constants(self) -> dict[str, Any]:
        _, _, G, E = self.pages.k.shape
        return {"PAGE_SIZE": self.batch.layout.page_size, "G": G, "REPEAT": self.repeat, "E": E}

    def partial(self, tiles: int, splits: int, rows: int, size: int) -> tuple[Tensor | None, Tensor | None]:
        """Buffers for the partial outputs of splits and their log-sum-exps, if keys are split."""
        if splits == 1:
            return None, None
        part = self.q_THE.new_empty(tiles, splits, rows, size, dtype=torch.float32)
        return part, self.q_THE.new_empty(tiles, splits, rows, dtype=torch.float32)
