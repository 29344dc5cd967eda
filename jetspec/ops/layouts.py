"""Types that an operation's front door and its kernels share. This module imports no other module of `ops`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from jetspec.types import KVPages

RotaryTables = tuple[Tensor, Tensor]
"""Cos and signed sin of some positions, (..., 1, E) each: the second is negative in its first half."""
LossKind = Literal["forward_kl", "reverse_kl", "sft"]
RowScores = tuple[Tensor, Tensor, Tensor]
"""Loss, hit and label probability, (R,) each."""


class Residual(NamedTuple):
    """Rows of the residual stream. A product that wrote them may have begun the next RMS norm: see `add_linear`."""

    x: Tensor
    scaled: Tensor | None = None
    """The rows times the weight of the norm, not yet divided."""
    squares: Tensor | None = None
    """(parts, rows): sums of squares over parts of each row."""


@dataclass(frozen=True)
class HeadNorm:
    """RMS norms over single heads of q and of k: weights (E,) each, or (L, E) of several layers."""

    q: Tensor
    k: Tensor
    eps: float

    @classmethod
    def joined(cls, norms: Sequence[HeadNorm]) -> HeadNorm:
        return cls(torch.stack([n.q for n in norms]), torch.stack([n.k for n in norms]), norms[0].eps)

    def layer(self, i: int) -> HeadNorm:
        return HeadNorm(self.q[i], self.k[i], self.eps)


@dataclass(frozen=True)
class SlotRows:
    """Layers stored apart, each with a row per slot: (slots, size). K and V of a slot may share its row."""

    rows_L: tuple[Tensor, ...]
    address_L: Tensor
    """Addresses of the layers, for a kernel that serves all of them."""

    @classmethod
    def of(cls, layers: Iterable[Tensor]) -> SlotRows:
        rows_L = tuple(layers)
        assert all(rows.is_contiguous() and rows.shape[1] == rows_L[0].shape[1] for rows in rows_L)
        address_L = torch.tensor([rows.data_ptr() for rows in rows_L], dtype=torch.int64, device=rows_L[0].device)
        return cls(rows_L, address_L)


class Placement(NamedTuple):
    """Positions and slots of the nodes of B trees, with the page tables and lengths of their requests."""

    page_BP: Tensor
    length_B: Tensor
    position_BN: Tensor
    """length + depth: siblings share a position."""
    slot_BN: Tensor
    """Slot of position length + node: nodes never share a slot."""


def equal_distance(pages_L: Sequence[KVPages]) -> int | None:
    """Elements between the storage of one layer and the next, where they are as many for all, for K and for V."""
    starts = [(pages.k.data_ptr(), pages.v.data_ptr()) for pages in pages_L]
    steps = {(k - before_k, v - before_v) for (before_k, before_v), (k, v) in pairwise(starts)} or {(0, 0)}
    k, v = steps.pop()
    return k // pages_L[0].k.element_size() if not steps and k == v else None
