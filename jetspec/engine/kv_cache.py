"""Paged KV cache: one free list, page table and prefix cache for target and head, with separate storage.

The head caches the same positions as the target, so both share pages and lengths, and a prefix hit serves both.
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
from jetspec.tree import Acceptance, NgramTable
from jetspec.types import BatchLayout, KVPages, Request, TreeBatch

PageKey = tuple[int | str, tuple[int, ...]]


class PagePool:
    """Reference counts of pages, and the prefix cache. It holds page numbers only, no storage.

    A registered page is full, and found by its tokens and those before it. After its last user is gone it stays
    registered until it is evicted, least recently used first. Requests write only behind their shared prefix, so a
    shared page is never written to.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.users = [0] * num_pages
        self.prefix_cache = prefix_cache
        # A registered page is found by its own tokens and the serial number of the page before it, or the salt for the
        # first one. Serials are never reused, so pages behind an evicted one cannot be found.
        self.index: dict[PageKey, int] = {}
        self.key_of: dict[int, PageKey] = {}
        self.serial_of: dict[int, int] = {}
        self.next_serial = 1
        self.evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return len(self.free_pages) + len(self.evictable)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Takes pages, evicting registered ones if necessary. Returns None when there are not enough."""
        if count > self.num_available:
            return None
        while len(self.free_pages) < count:
            self._evict(next(iter(self.evictable)))
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.users[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drops a user of each page, the last page first, so that a prefix is evicted after its continuation."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                if page in self.key_of:
                    self.evictable[page] = None
                else:
                    self.free_pages.append(page)

    def register(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Registers the full pages of a sequence for requests with the same salt.

        A page with the same tokens as a registered one stays unregistered.
        """
        if not self.prefix_cache:
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

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Takes the registered pages of the longest prefix."""
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
            self.evictable.pop(page, None)
        return pages

    def _evict(self, page: int) -> None:
        del self.evictable[page], self.index[self.key_of.pop(page)], self.serial_of[page]
        self.free_pages.append(page)


class KVPool:
    """Storage of one model: K and V of all layers, and optionally one feature vector per slot."""

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
        self.feature_SM = zeros((num_pages * page_size, feature_size), dtype, device) if feature_size else None


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only once they are touched, on a CPU.

    `torch.zeros` writes all of them; NumPy takes cleared pages from the system. If that fails, torch raises its own
    out-of-memory error.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and size:
        with suppress(MemoryError):
            return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def page_bytes(configs: Sequence[DecoderConfig], page_size: int, dtype: torch.dtype, feature_size: int = 0) -> int:
    """Bytes of one page in all pools together."""
    rows = sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in configs)
    return (rows + feature_size) * page_size * dtype.itemsize


class KVCache:
    """Page table with one row per admitted request, over a page pool and the storage of target and head.

    `idle_len` adds an idle row that pads captured batches: it has its own pages for that many positions, and its length
    stays 0. `feature_size` is the size of the head's vector per position. `ngrams` keeps the texts on the device, each
    behind `ngram_corpus` tokens of earlier answers.
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
        ngrams: bool = False,
        ngram_corpus: int = 0,
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
        if ngrams:
            self.rows.ngrams = NgramTable(len(self.page_RP), width * page_size, device, ngram_corpus)
        self.length_R = self.rows.length_R
        self.new_pages: dict[tuple[int, int], int] = {}
        """Page table entries, by row and index, that are not on the device yet."""
        self.pages_of: list[list[int]] = [[] for _ in range(num_rows)]
        self.starts_cache: dict[tuple[int, int], Tensor] = {}
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def admit(self, request: Request, tokens_ahead: int) -> bool:
        """Gives a request a row, pages of its cached prefix, and pages for its other tokens and `tokens_ahead` more.

        Returns False when there is no free row or page. The anchor is never part of a cached prefix.
        """
        if not self.free_rows:
            return False
        pages = self.pool.match_prefix(request.tokens[:-1], request.cache_salt)
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
        """Allocates pages for the next positions of an admitted request. Returns False when there are too few."""
        if request.num_cached <= request.capacity:
            return True
        held = len(self.pages_of[request.row])
        pages = self.pool.allocate(self.pages_for(request.num_cached + tokens_ahead) - held)
        if pages is None:
            return False
        self._append(request, pages, tokens_ahead)
        return True

    def release(self, request: Request) -> None:
        """Frees a request's row and pages. Full pages stay registered in the prefix cache."""
        self._register(request)
        self.pool.release(self.pages_of[request.row])
        self.pages_of[request.row] = []
        self.free_rows.append(request.row)
        request.row, request.num_cached, request.row_epoch = -1, 0, request.row_epoch + 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def place(self, row_B: Tensor, token_BN: Tensor, depth_BN: Tensor, ancestor_BNW: Tensor | None) -> TreeBatch:
        """Places node j of each tree at position length + depth_j and in the slot of position length + j."""
        B, N = token_BN.shape
        at = ops.place(self.page_RP, self.length_R, row_B, depth_BN, self.page_size)
        layout = BatchLayout(at.page_BP, at.length_B, self.starts(B, N), self.page_size, N)
        return TreeBatch(token_BN.flatten(), at.position_BN.flatten(), at.slot_BN.flatten(), layout, ancestor_BNW)

    def starts(self, requests: int, count: int) -> Tensor:
        """0, count, 2 count, .., requests * count, cached per shape."""
        if (requests, count) not in self.starts_cache:
            self.starts_cache[requests, count] = torch.arange(0, requests * count + 1, count, device=self.device)
        return self.starts_cache[requests, count]

    def place_chunks(self, chunks: PackedChunks) -> TreeBatch:
        """Places the next tokens of some prompts, concatenated."""
        at = chunks.unpack()
        page_T = self.page_RP[at.row_T, at.position_T // self.page_size]
        slot_T = page_T * self.page_size + at.position_T % self.page_size
        page_BP, length_B = self.page_RP[at.row_B], self.length_R[at.row_B]
        layout = BatchLayout(page_BP, length_B, at.start_B1, self.page_size, chunks.longest)
        return TreeBatch(at.token_T, at.position_T, slot_T, layout, None)

    def place_path(self, batch: TreeBatch, path_BD1: Tensor) -> TreeBatch:
        """Places accepted paths in their final slots, those of the first nodes of the trees."""
        (B, num), length_B = path_BD1.shape, batch.layout.cached_len_B
        token_BD1 = batch.token_T.view(B, -1).gather(1, path_BD1)
        position_BD1 = length_B[:, None] + self.starts(num - 1, 1)
        slot_BD1 = batch.slot_T.view(B, -1)[:, :num]
        layout = replace(batch.layout, query_start_B1=self.starts(B, num), max_queries=num)
        return TreeBatch(token_BD1.flatten(), position_BD1.flatten(), slot_BD1.flatten(), layout, None)

    def compact(self, row_B: Tensor, batch: TreeBatch, verdict: Acceptance) -> None:
        """Copies K and V of the accepted path directly behind the cached tokens, and advances the lengths.

        Entries past the end of a path repeat its last node; their copies land behind the new length and are never read.
        Positions do not change, so neither do rotary embeddings.
        """
        num = verdict.path_BD1.shape[1]
        if num > 1:
            slot_BN = batch.slot_T.view(len(row_B), -1)
            ops.compact_kv(self.target.storage, slot_BN.gather(1, verdict.path_BD1), slot_BN[:, :num])
        self.length_R.index_add_(0, row_B, verdict.length_B + 1)
        if self.idle_row is not None:
            self.length_R[self.idle_row].zero_()

    def reset_idle_row(self) -> None:
        """Resets its length, which an interrupted round may have changed."""
        if self.idle_row is not None:
            self.rows.set(self.idle_row, length=0)

    @uninterrupted()
    def advance(self, request: Request, count: int) -> None:
        """Counts tokens that a prefill chunk has written."""
        request.num_cached += count
        self.rows.set(request.row, length=request.num_cached)
        if request.is_prefilled:
            self._register(request)

    def _register(self, request: Request) -> None:
        """Registers full pages. They are not written to again, so other requests may share them at once."""
        self.pool.register(request.tokens[: request.num_cached], self.pages_of[request.row], request.cache_salt)

    def _append(self, request: Request, pages: list[int], tokens_ahead: int) -> None:
        held = self.pages_of[request.row]
        self.new_pages.update({(request.row, place): page for place, page in enumerate(pages, len(held))})
        held.extend(pages)
        request.capacity = len(held) * self.page_size - tokens_ahead

    def flush(self) -> None:
        """Uploads changes by the host, before the next forward."""
        if self.new_pages:
            entries = [(row, place, page) for (row, place), page in self.new_pages.items()]
            row, place, page = upload(entries, torch.int64, self.device).unbind(1)
            self.page_RP[row, place] = page
            self.new_pages.clear()
        self.rows.flush()
