"""Who runs next. The scheduler owns the queue; the cache owns the pages; the engine owns the models."""

from __future__ import annotations

from collections import deque

from jetspec.engine.kv_cache import KVCache
from jetspec.interrupt import uninterrupted
from jetspec.types import Request, RequestState

JOIN_SHARE = 8
"""Requests that join together are enough when they are this fraction of those that run."""


class Scheduler:
    """First come, first served. When pages run out the youngest request gives way and starts again later."""

    def __init__(self, cache: KVCache, lookahead: int, prefill_chunk: int, max_admission_delay: int = 0) -> None:
        self.cache, self.lookahead, self.prefill_chunk, self.max_admission_delay = (
            cache,
            lookahead,
            prefill_chunk,
            max_admission_delay,
        )
        self.held_back = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        """Admitted requests by id, oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @uninterrupted()
    def next_chunks(self) -> list[tuple[Request, int]]:
        """Admit what fits, and share one chunk of prompt tokens among those that still need some."""
        opens = self._opens()
        while self.waiting and opens and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            request.state = RequestState.PREFILL
            if not request.stats.rounds:
                request.stats.cached_tokens = request.num_cached
            self.running[request.id] = request
        chunks, left = [], self.prefill_chunk
        for request in self.running.values():
            if request.state is RequestState.PREFILL:
                count = min(len(request.tokens) - 1 - request.num_cached, left)
                if count > 0:
                    chunks.append((request, count))
                    left -= count
        return chunks

    def _admit(self, request: Request) -> bool:
        """Let a request in, unless a twin is just computing the pages that it could share."""
        if request.prefix_leader is not None:
            if request.prefix_leader.state is RequestState.PREFILL and not request.prefix_leader.is_prefilled:
                return False
            request.prefix_leader = None
        return self.cache.admit(request, self.lookahead)

    def _opens(self) -> bool:
        """Whether those in line may come in. All that run wait for a prefill, so it should serve several."""
        joining = min(len(self.waiting), len(self.cache.free_rows))
        opens = joining * JOIN_SHARE >= len(self.running) or self.held_back >= self.max_admission_delay
        self.held_back = 0 if opens or not self.waiting else self.held_back + 1
        return opens

    @uninterrupted()
    def next_batch(self) -> list[Request]:
        """The requests for the next round, each with room for it; the youngest are sent back to make room."""
        if any(request.num_cached > request.capacity for request in self.running.values()):
            for request in list(self.running.values()):
                if request.id in self.running and request.is_prefilled:
                    self.reserve_capacity(request)
        decode = RequestState.DECODE
        batch = [request for request in self.running.values() if request.state is decode or request.is_prefilled]
        for request in batch:
            request.state = decode
        return batch

    def reserve_capacity(self, request: Request) -> None:
        """Find room for a request's next round. When it is itself the youngest it has to give way."""
        while not self.cache.reserve(request, self.lookahead):
            youngest = next(reversed(self.running.values()))
            self.preempt(youngest)
            if youngest is request:
                return

    def preempt(self, request: Request) -> None:
        """Send a request back to the head of the queue. Its tokens stay; their K/V will be computed again."""
        del self.running[request.id]
        self.cache.release(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a finished or cancelled request out, wherever it is."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request.id]
            self.cache.release(request)
        request.state = RequestState.FINISHED
