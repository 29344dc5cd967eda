"""Types, buffers, sizes and tilings that operations, their kernels and `select.py` share. No other module of `ops` is
imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
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


def copied(residual: Residual, tap: Tensor | None) -> Residual:
    """Copies the rows to `tap`, if given."""
    if tap is not None:
        tap.copy_(residual.x)
    return residual


class Routed(NamedTuple):
    """Inputs of the experts. Tokens are rows, whatever shape they had, with K choices each, the best first."""

    x_TM: Tensor
    expert_TK: Tensor
    weight_TK: Tensor


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


# -- buffers
#
# Past the end of a matrix the copy engine (TMA) fills in zeros, which takes longer than to read. So buffers are padded
# to a tile multiple, and tiled reads include the padding. Its contents are arbitrary: each row of a product depends on
# its own row alone. By counters in global memory the programs of a kernel synchronize. Kernels that run one after the
# other on one stream of a device share them.

TILE = 64
MAX_ROWS = 128
"""More rows are read in several tiles, most of which are whole."""
COUNT = 4096
MAX_BARRIER_PROGRAMS = 32
"""Programs of a grid barrier, at most. A power of two, so that multiples of it stay multiples when a counter
overflows."""


def new_rows(rows: int, *sizes: int, like: Tensor) -> Tensor:
    """Returns uninitialized rows with the type and device of `like`, padded to whole tiles on a GPU."""
    padded = rows + -rows % TILE if like.is_cuda and 1 < rows <= MAX_ROWS else rows
    return torch.empty((padded, *sizes), dtype=like.dtype, device=like.device)[:rows]


def whole_tiles(x_TK: Tensor, tile: int) -> Tensor:
    """Returns the rows with the memory behind them, up to the end of a tile or of their storage."""
    T, K = x_TK.shape
    available = (x_TK.untyped_storage().nbytes() // x_TK.itemsize - x_TK.storage_offset()) // K
    return x_TK.as_strided((min(T + -T % tile, available), K), (K, 1))


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros before and after every kernel."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)


@cache
def barrier_counters(device: torch.device) -> Tensor:
    """Multiples of `MAX_BARRIER_PROGRAMS` before and after every kernel."""
    return torch.zeros(COUNT, dtype=torch.int32, device=device)


# -- matrix products

SMALL_WEIGHT_BYTES = 8 * 2**20
"""A product with a smaller weight is a matter of latency: the cache holds it, so that it can be prefetched, and be read
once for every 64 rows."""


def is_small(weight: Tensor) -> bool:
    return weight.nbytes <= SMALL_WEIGHT_BYTES


def can_copy(x: Tensor) -> bool:
    """Returns true if the copy engine (TMA) can read a matrix: its rows start at multiples of 16 bytes."""
    return x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def power_of_2_below(n: int) -> int:
    """The largest power of two up to n, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


STAGE_BYTES = 225 * 1024
"""Shared memory of the blocks in flight, for a few rows."""

REGISTER_BLOCK = 16
"""Rows, and outputs, of a program of the register-tiled product."""
MAX_COLUMNS = 352
"""Inputs of a warp: registers hold them for 16 rows and 16 outputs, or half as many for gated outputs."""
MAX_PARTS = 3


class RegisterTiles(NamedTuple):
    """Inputs of each warp of the register-tiled product: C1 of the first, C2 of what is left, then C3, all powers of
    two. Together they may exceed the inputs."""

    WARPS: int
    C1: int
    C2: int = 0
    C3: int = 0

    @property
    def width(self) -> int:
        return REGISTER_BLOCK


def register_tiles(inputs: int, gated: bool) -> RegisterTiles | None:
    """Tiles of the fewest warps that hold all inputs. None if no number of warps does, or if rows do not start at
    multiples of 16 bytes."""
    most = MAX_COLUMNS // 2 if gated else MAX_COLUMNS
    for warps in (4, 8, 16):
        for own in range(-(-inputs // (16 * warps)) * 16, most + 1, 16):
            parts = [1 << bit for bit in reversed(range(own.bit_length())) if own >> bit & 1]
            if len(parts) <= MAX_PARTS and inputs % 8 == 0:
                return RegisterTiles(warps, *parts)
    return None


WARP_ROWS, WARP_INPUTS = 128, 64
"""Rows of a tile of the warp-specialized product, 64 per consumer group, and inputs of a block: 128 bytes of 16-bit
numbers, a line of shared memory."""
WARP_STAGE_BYTES = 216 * 1024
"""Shared memory of its blocks in flight."""
WARP_STAGES = 10
SPLITS = 4, 2
MIN_SPLIT_INPUTS = 3072
"""Inputs that pay for a split of their own, with the reduction it needs."""


class WarpTiles(NamedTuple):
    """Block sizes of the warp-specialized product."""

    BLOCK_N: int
    HALF: bool
    """Adds half as many outputs."""
    SPLITS: int = 1
    """Programs that share the inputs (split-K)."""

    @property
    def width(self) -> int:
        return self.BLOCK_N + self.BLOCK_N // 2 if self.HALF else self.BLOCK_N

    def stages(self, gated: bool) -> int:
        """Blocks in flight."""
        rows = WARP_ROWS + (2 if gated else 1) * self.width
        return min(WARP_STAGE_BYTES // (rows * WARP_INPUTS * 2), WARP_STAGES)


WARP_WIDTHS = tuple(WarpTiles(*width) for width in ((32, False), (32, True), (64, False), (64, True), (128, False)))


def enough_programs(multiprocessors: int) -> int:
    """Programs that read a weight about as fast as one on every multiprocessor: 96 of 132."""
    return multiprocessors * 8 // 11


def warp_tiles(outputs: int, split_inputs: int, multiprocessors: int) -> WarpTiles | None:
    """Tiles of a large weight with which all programs run at once and fill the GPU, or None.

    `split_inputs` may be split over programs. If they are many, they must be: a library splits them, too.
    """
    for splits in [count for count in SPLITS if split_inputs >= count * MIN_SPLIT_INPUTS] or (1,):
        for tiles in WARP_WIDTHS:
            whole = splits == 1 or not tiles.HALF
            programs = -(-outputs // tiles.width) * splits
            if whole and enough_programs(multiprocessors) <= programs <= multiprocessors:
                return tiles._replace(SPLITS=splits)
    return None


def small_weight_warp_tiles(outputs: int, rows: int, multiprocessors: int) -> WarpTiles:
    """The widest tiles of a small weight that fill the GPU. All programs of other rows read the same weight."""
    row_tiles, enough = -(-rows // WARP_ROWS), enough_programs(multiprocessors)
    wide = [tiles for tiles in WARP_WIDTHS if -(-outputs // tiles.width) * row_tiles >= enough]
    return wide[-1] if wide else WARP_WIDTHS[0]


# -- attention

FEW_QUERY_ROWS = 64
"""Query rows of a request, with few of which small tiles are used."""
REGISTER_QUERIES = 16
"""Query rows of a register-tiled program."""
WARP_QUERIES = 64
"""Query rows of a consumer group of warps."""
WARP_KEYS, LONG_WARP_KEYS = 64, 128
"""Keys of a block, for one consumer group and for two."""
LONG_CONTEXT = 8192
"""Keys of a request from which on repeated reads of them matter. A captured launch serves all lengths, so the capacity
of the page table counts."""
MANY_QUERY_ROWS = 512
"""Query rows that fill large tiles."""


def num_tiles(rows: int, size: int) -> int:
    return -(-rows // size)


def is_narrow(query_rows: int, key_heads: int) -> bool:
    """Returns true if tiles of 64 rows would leave most multiprocessors idle."""
    return num_tiles(query_rows, 64) * key_heads < 16


def num_groups(query_rows: int, capacity: int) -> int:
    """Consumer groups of a warp-specialized program. Two of them read the keys half as often as two programs would, and
    keep the tensor cores busy in turn. With few keys more programs are faster."""
    return 2 if capacity >= LONG_CONTEXT and query_rows >= MANY_QUERY_ROWS else 1
