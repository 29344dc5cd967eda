"""Where K and V live: one free list and one page table for target and head, a pool of storage for each.

The head keeps its context at the same positions as the target keeps its own, so pages, lengths and the prefix
cache are shared and a prefix hit always brings both.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from jetspec import ops
from jetspec.engine.chunk import PackedChunks
from jetspec.engine.rows import RowTable
from jetspec.interrupt import uninterrupted
from jetspec.models.decoder import DecoderConfig
from jetspec.ops.transfer import upload
from jetspec.tree import Acceptance
from jetspec.types import BatchLayout, KVPages, Request, TreeBatch

PageKey = tuple[int | str, tuple[int, ...]]


class PagePool:
    """Which pages are free, in use or remembered. Numbers only, no storage.

    A remembered page holds the K/V of a full page of known tokens after a known prefix. It stays recallable after
    its last user is gone, until its room is needed; the longest unused goes first. Shared pages are full, and
    requests write only behind their prefix, so nobody ever writes to a page that others read.
    """

    def __init__(self, num_pages: int, page_size: int, remember: bool = True) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.users = [0] * num_pages
        self.remembers = remember
        # A remembered page is found by its own tokens and the serial number of the page before it, or the salt if it
        # is the first. Serials are never reused, so pages behind a forgotten one cannot be reached by mistake.
        self.index: dict[PageKey, int] = {}
        self.key_of: dict[int, PageKey] = {}
        self.serial_of: dict[int, int] = {}
        self.next_serial = 1
        self.unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return len(self.free_pages) + len(self.unused)

    def allocate(self, count: int) -> list[int] | None:
        """Take pages, forgetting remembered ones if need be; None when there are not enough."""
        if count > self.num_available:
            return None
        while len(self.free_pages) < count:
            self._forget(next(iter(self.unused)))
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.users[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The last page goes first, so that a prefix outlives what follows it."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                if page in self.key_of:
                    self.unused[page] = None
                else:
                    self.free_pages.append(page)

    def remember(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Make the full pages of a sequence recallable by those who know the salt.

        A page whose content is known already stays anonymous.
        """
        if not self.remembers:
            return
        before: int | str = salt
        for i in range(len(tokens) // self.page_size):
            key = (before, tuple(tokens[i * self.page_size : (i + 1) * self.page_size]))
            page = self.index.get(key)
            if page is None:
                page = pages[i]
                self.index[key], self.key_of[page] = page, key
                self.serial_of[page] = self.next_serial
                self.next_serial += 1
            before = self.serial_of[page]

    def recall(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The remembered pages of the longest known prefix, taken into use."""
        pages: list[int] = []
        before: int | str = salt
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self.index.get((before, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            pages.append(page)
            before = self.serial_of[page]
        for page in pages:
            self.users[page] += 1
            self.unused.pop(page, None)
        return pages

    def _forget(self, page: int) -> None:
        del self.unused[page], self.index[self.key_of.pop(page)], self.serial_of[page]
        self.free_pages.append(page)


class KVPool:
    """Storage for one model's K and V in all layers, and for a feature of each position where it wants one."""

    def __init__(
        self,
        config: DecoderConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_size: int = 0,
    ) -> None:
        shape = (2, config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.storage = zeros(shape, dtype, device)
        self.layers = tuple(KVPages(k, v) for k, v in zip(*self.storage, strict=True))
        self.feature_SM = None
        """By slot."""
        if feature_size:
            self.feature_SM = zeros((num_pages * page_size, feature_size), dtype, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room of which little may ever be used: on a CPU it takes memory, and the time to clear it, as it is touched.

    `torch.zeros` writes all of it. NumPy asks the system for memory that is clear already; where there is none, torch
    is left to say so, as everywhere else.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and size:
        with suppress(MemoryError):
            return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def page_bytes(configs: Sequence[DecoderConfig], page_size: int, dtype: torch.dtype, feature_size: int = 0) -> int:
    """Memory of one page over all pools."""
    rows = sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in configs)
    return (rows + feature_size) * page_size * dtype.itemsize


class KVCache:
    """Rows of a page table, one per admitted request, over a page pool and the storage of target and head.

    With `idle_len` there is one row more, for the places of a padded batch that nobody takes: it has pages of its
    own for so many positions, which nobody else reads, and its length stays 0. With `feature_size` the head's storage
    has room for a vector of that size per position.
    """

    def __init__(
        self,
        target: DecoderConfig,
        head: DecoderConfig | None,
        *,
        num_rows: int,
        row_len: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        prefix_cache: bool,
        feature_size: int = 0,
        idle_len: int = 0,
    ) -> None:
        self.page_size = page_size
        self.device = device
        idle_pages = self.pages_for(idle_len)
        self.target = KVPool(target, num_pages + idle_pages, page_size, dtype, device)
        self.head = None
        if head is not None:
            self.head = KVPool(head, num_pages + idle_pages, page_size, dtype, device, feature_size)
        self.pool = PagePool(num_pages, page_size, prefix_cache)
        self.idle_row = num_rows if idle_len else None
        width = max(self.pages_for(row_len), idle_pages)
        self.page_RP = torch.zeros(num_rows + bool(idle_len), width, dtype=torch.int64, device=device)
        if idle_len:
            self.page_RP[num_rows, :idle_pages] = torch.arange(num_pages, num_pages + idle_pages)
        self.rows = RowTable(len(self.page_RP), target.vocab_size, device)
        # Entries of the page table that changed on the host.
        self.new_pages: dict[tuple[int, int], int] = {}
        self.pages_of: list[list[int]] = [[] for _ in range(num_rows)]
        self.known_starts: dict[tuple[int, int], Tensor] = {}
        self.free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def length_R(self) -> Tensor:
        return self.rows.length_R

    def admit(self, request: Request, tokens_ahead: int) -> bool:
        """Give a request a row, the pages of its known prefix, and room for all its tokens and some ahead.

        The anchor is never taken from the prefix cache: it is not in any cache.
        """
        if not self.free_rows:
            return False
        pages = self.pool.recall(request.tokens[:-1], request.cache_salt)
        missing = self.pages_for(len(request.tokens) - 1 + tokens_ahead) - len(pages)
        fresh = self.pool.allocate(missing)
        if fresh is None:
            self.pool.release(pages)
            return False
        request.row = self.free_rows.pop()
        request.num_cached = len(pages) * self.page_size
        request.row_epoch += 1
        self.rows.enter(request)
        self.pages_of[request.row] = []
        self._append(request, pages + fresh, tokens_ahead)
        return True

    def reserve(self, request: Request, tokens_ahead: int) -> bool:
        """Make room for the next positions of an admitted request, or say no."""
        if request.num_cached <= request.capacity:
            return True
        held = len(self.pages_of[request.row])
        pages = self.pool.allocate(self.pages_for(request.num_cached + tokens_ahead) - held)
        if pages is None:
            return False
        self._append(request, pages, tokens_ahead)
        return True

    def release(self, request: Request) -> None:
        """Take a request's row back; its full pages stay recallable."""
        self._remember(request)
        self.pool.release(self.pages_of[request.row])
        self.pages_of[request.row] = []
        self.free_rows.append(request.row)
        request.row, request.num_cached, request.row_epoch = -1, 0, request.row_epoch + 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def place(self, row_B: Tensor, token_BN: Tensor, depth_BN: Tensor, ancestor_BNW: Tensor | None) -> TreeBatch:
        """Node j of each tree goes to position length + depth_j and to the slot of position length + j."""
        B, N = token_BN.shape
        at = ops.place(self.page_RP, self.length_R, row_B, depth_BN, self.page_size)
        layout = BatchLayout(at.page_BP, at.length_B, self.starts(B, N), self.page_size, N)
        return TreeBatch(token_BN.flatten(), at.position_BN.flatten(), at.slot_BN.flatten(), layout, ancestor_BNW)

    def starts(self, requests: int, count: int) -> Tensor:
        """0, count, 2 count, .., requests * count: made once for all rounds of a shape."""
        if (requests, count) not in self.known_starts:
            self.known_starts[requests, count] = torch.arange(0, requests * count + 1, count, device=self.device)
        return self.known_starts[requests, count]

    def place_chunks(self, chunks: PackedChunks) -> TreeBatch:
        """The next tokens of some prompts, ragged, one behind the other."""
        at = chunks.unpack()
        page_T = self.page_RP[at.row_T, at.position_T // self.page_size]
        slot_T = page_T * self.page_size + at.position_T % self.page_size
        page_BP, length_B = self.page_RP[at.row_B], self.length_R[at.row_B]
        layout = BatchLayout(page_BP, length_B, at.start_B1, self.page_size, chunks.longest)
        return TreeBatch(at.token_T, at.position_T, slot_T, layout, None)

    def place_path(self, batch: TreeBatch, path_BD1: Tensor) -> TreeBatch:
        """The accepted paths of placed trees, where they end up: in the slots of the trees' first nodes."""
        (B, num), length_B = path_BD1.shape, batch.layout.cached_len_B
        token_BD1 = batch.token_T.view(B, -1).gather(1, path_BD1)
        position_BD1 = length_B[:, None] + self.starts(num - 1, 1)
        slot_BD1 = batch.slot_T.view(B, -1)[:, :num]
        layout = replace(batch.layout, query_start_B1=self.starts(B, num), max_queries=num)
        return TreeBatch(token_BD1.flatten(), position_BD1.flatten(), slot_BD1.flatten(), layout, None)

    def compact(self, row_B: Tensor, batch: TreeBatch, verdict: Acceptance) -> None:
        """Move the accepted path's K/V down behind the prefix and advance the lengths.

        Entries of the path past its end repeat its last node: their copies land behind the new length, where
        nothing looks. Positions are unchanged by the move, so no rotation is redone.
        """
        num = verdict.path_BD1.shape[1]
        if num > 1:
            slot_BN = batch.slot_T.view(len(row_B), -1)
            ops.compact_kv(self.target.storage, slot_BN.gather(1, verdict.path_BD1), slot_BN[:, :num])
        self.length_R.index_add_(0, row_B, verdict.length_B + 1)
        if self.idle_row is not None:
            self.length_R[self.idle_row].zero_()

    def empty_idle_row(self) -> None:
        """What a round that was broken off may have left of it."""
        if self.idle_row is not None:
            self.rows.set(self.idle_row, length=0)

    @uninterrupted()
    def advance(self, request: Request, count: int) -> None:
        """Count tokens that a prefill chunk has stored."""
        request.num_cached += count
        self.rows.set(request.row, length=request.num_cached)
        if request.is_prefilled:
            self._remember(request)

    def _remember(self, request: Request) -> None:
        """Full pages are not written to again, so others may read them while the request goes on."""
        self.pool.remember(request.tokens[: request.num_cached], self.pages_of[request.row], request.cache_salt)

    def _append(self, request: Request, pages: list[int], tokens_ahead: int) -> None:
        held = self.pages_of[request.row]
        self.new_pages.update({(request.row, place): page for place, page in enumerate(pages, len(held))})
        held.extend(pages)
        request.capacity = len(held) * self.page_size - tokens_ahead

    def flush(self) -> None:
        """Write what the host changed to the device, before the next forward."""
        if self.new_pages:
            entries = [(row, place, page) for (row, place), page in self.new_pages.items()]
            row, place, page = upload(entries, torch.int64, self.device).unbind(1)
            self.page_RP[row, place] = page
            self.new_pages.clear()
        self.rows.flush()
