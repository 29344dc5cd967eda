"""Operands of the attention kernels, which differ in how they tile queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from jetspec.ops.buffers import new_rows
from jetspec.types import KVPages, TreeBatch


@dataclass(frozen=True)
class Attention:
    """One call. Query rows of a request are (node, query head of the key head) pairs, node by node."""

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
        assert ancestor is not None or not (layout.earlier or layout.first_seen), "a chain is of one forward, sees all"
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
        """q_stride_t, q_stride_h, page_stride_b, ancestor_stride_b, ancestor_stride_n, W."""
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
