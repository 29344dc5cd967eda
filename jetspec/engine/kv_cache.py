"""Where K and V live: one free list and one page table for target and head, a pool of storage for each.

The head keeps its context at the same positions as the target keeps its own, so pages, lengths and the prefix
cache are shared and a prefix hit always brings both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from jetspec import ops
from jetspec.models.decoder import DecoderConfig
from jetspec.tree import Acceptance
from jetspec.types import BatchLayout, KVPages, Request, TreeBatch


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
        # A remembered page is found by the serial number of the page before it and its own tokens. Serials are
        # never reused, so pages behind a forgotten one cannot be reached by mistake.
        self.index: dict[tuple[int, tuple[int, ...]], int] = {}
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
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

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of a sequence recallable. A page whose content is known already stays anonymous."""
        if not self.remembers:
            return
        serial = 0
        for i in range(len(tokens) // self.page_size):
            key = (serial, tuple(tokens[i * self.page_size : (i + 1) * self.page_size]))
            page = self.index.get(key)
            if page is None:
                page = pages[i]
                self.index[key], self.key_of[page] = page, key
                self.serial_of[page] = self.next_serial
                self.next_serial += 1
            serial = self.serial_of[page]

    def recall(self, tokens: Sequence[int]) -> list[int]:
        """The remembered pages of the longest known prefix, taken into use."""
        pages: list[int] = []
        serial = 0
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self.index.get((serial, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            pages.append(page)
            serial = self.serial_of[page]
        for page in pages:
            self.users[page] += 1
            self.unused.pop(page, None)
        return pages

    def _forget(self, page: int) -> None:
        del self.unused[page], self.index[self.key_of.pop(page)], self.serial_of[page]
        self.free_pages.append(page)


class KVPool:
    """Storage for one model's K and V in all layers."""

    def __init__(
        self, config: DecoderConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2, config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(KVPages(k, v) for k, v in zip(*self.storage, strict=True))


def page_bytes(configs: Sequence[DecoderConfig], page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page over all pools."""
    rows = sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in configs)
    return rows * page_size * dtype.itemsize


class KVCache:
    """Rows of a page table, one per admitted request, over a page pool and the storage of target and head."""

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
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.target = KVPool(target, num_pages, page_size, dtype, device)
        self.head = KVPool(head, num_pages, page_size, dtype, device) if head is not None else None
        self.pool = PagePool(num_pages, page_size, prefix_cache)
        self.page_RP = torch.zeros(num_rows, -(-row_len // page_size), dtype=torch.int64, device=device)
        self.length_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # Entries of the two tables that changed on the host; written all at once before the next forward.
        self.new_pages: dict[tuple[int, int], int] = {}
        self.new_lengths: dict[int, int] = {}
        self.pages_of: list[list[int]] = [[] for _ in range(num_rows)]
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def admit(self, request: Request, tokens_ahead: int) -> bool:
        """Give a request a row, the pages of its known prefix, and room for all its tokens and some ahead.

        The anchor is never taken from the prefix cache: it is not in any cache.
        """
        if not self.free_rows:
            return False
        pages = self.pool.recall(request.tokens[:-1])
        missing = self.pages_for(len(request.tokens) - 1 + tokens_ahead) - len(pages)
        fresh = self.pool.allocate(missing)
        if fresh is None:
            self.pool.release(pages)
            return False
        request.row = self.free_rows.pop()
        request.num_cached = len(pages) * self.page_size
        self.new_lengths[request.row] = request.num_cached
        self.pages_of[request.row] = []
        self._append(request.row, pages + fresh)
        return True

    def reserve(self, request: Request, tokens_ahead: int) -> bool:
        """Make room for the next positions of an admitted request, or say no."""
        needed, held = request.num_cached + tokens_ahead, len(self.pages_of[request.row])
        if needed <= held * self.page_size:
            return True
        pages = self.pool.allocate(self.pages_for(needed) - held)
        if pages is None:
            return False
        self._append(request.row, pages)
        return True

    def release(self, request: Request) -> None:
        """Take a request's row back; its full pages stay recallable."""
        pages = self.pages_of[request.row]
        self.pool.remember(request.tokens[: request.num_cached], pages)
        self.pool.release(pages)
        self.pages_of[request.row] = []
        self.free_rows.append(request.row)
        request.row, request.num_cached = -1, 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def place(self, row_B: Tensor, token_BN: Tensor, depth_BN: Tensor, ancestor_BNW: Tensor | None) -> TreeBatch:
        """Node j of each tree goes to position length + depth_j and to the slot of position length + j."""
        self._write_tables()
        B, N = token_BN.shape
        length_B, page_BP = self.length_R[row_B], self.page_RP[row_B]
        index_BN = length_B[:, None] + torch.arange(N, device=self.device)
        layout = BatchLayout(page_BP, length_B, torch.arange(B + 1, device=self.device) * N, self.page_size, N)
        position_BN = length_B[:, None] + depth_BN
        return TreeBatch(
            token_BN.flatten(), position_BN.flatten(), self._slot(page_BP, index_BN).flatten(), layout, ancestor_BNW
        )

    def place_chunks(self, chunks: Sequence[tuple[Request, int]]) -> TreeBatch:
        """The next tokens of some prompts, ragged, one behind the other."""
        self._write_tables()
        token: list[int] = []
        position: list[int] = []
        row: list[int] = []
        starts = [0]
        for request, count in chunks:
            first, end = request.num_cached, request.num_cached + count
            token += request.tokens[first:end]
            position += range(first, end)
            row += [request.row] * count
            starts.append(len(token))
        token_T, position_T, row_T = torch.tensor([token, position, row], device=self.device)
        page_T = self.page_RP[row_T, position_T // self.page_size]
        slot_T = page_T * self.page_size + position_T % self.page_size
        row_B = torch.tensor([request.row for request, _ in chunks], device=self.device)
        start_B1 = torch.tensor(starts, device=self.device)
        longest = max(count for _, count in chunks)
        layout = BatchLayout(self.page_RP[row_B], self.length_R[row_B], start_B1, self.page_size, longest)
        return TreeBatch(token_T, position_T, slot_T, layout, None)

    def path_slots(self, batch: TreeBatch, num: int) -> tuple[Tensor, Tensor]:
        """Positions and slots that the accepted path of each request ends up in, (B, num)."""
        layout = batch.layout
        position = layout.cached_len_B[:, None] + torch.arange(num, device=self.device)
        return position, self._slot(layout.page_BP, position)

    def compact(self, row_B: Tensor, batch: TreeBatch, verdict: Acceptance) -> None:
        """Move the accepted path's K/V down behind the prefix and advance the lengths.

        Entries of the path past its end repeat its last node: their copies land behind the new length, where
        nothing looks. Positions are unchanged by the move, so no rotation is redone.
        """
        num = verdict.path_BD1.shape[1]
        if num > 1:
            slot_BN = batch.slot_T.view(len(row_B), -1)
            source = slot_BN.gather(1, verdict.path_BD1)
            ops.compact_kv(self.target.storage, source.flatten(), self.path_slots(batch, num)[1].flatten())
        self.length_R.index_add_(0, row_B, verdict.length_B + 1)

    def advance(self, request: Request, count: int) -> None:
        """Count tokens that a prefill chunk has stored."""
        request.num_cached += count
        self.new_lengths[request.row] = request.num_cached

    def _append(self, row: int, pages: list[int]) -> None:
        held = self.pages_of[row]
        self.new_pages.update({(row, place): page for place, page in enumerate(pages, len(held))})
        held.extend(pages)

    def _write_tables(self) -> None:
        if self.new_pages:
            entries = [(row, place, page) for (row, place), page in self.new_pages.items()]
            row, place, page = torch.tensor(entries, device=self.device).unbind(1)
            self.page_RP[row, place] = page
            self.new_pages.clear()
        if self.new_lengths:
            row, length = torch.tensor(list(self.new_lengths.items()), device=self.device).unbind(1)
            self.length_R[row] = length
            self.new_lengths.clear()

    def _slot(self, page_BP: Tensor, index_BN: Tensor) -> Tensor:
        return page_BP.gather(1, index_BN // self.page_size) * self.page_size + index_BN % self.page_size
