"""Scheduling: which requests are admitted, prefilled, decoded and preempted.

The scheduler owns the queue, the cache owns the pages, the engine owns the models.
"""

from __future__ import annotations

from collections import deque

from jetspec.engine.kv_cache import KVCache
from jetspec.interrupt import uninterrupted
from jetspec.types import Request, RequestState

JOIN_SHARE = 8
"""Waiting requests are admitted at once when they number at least this fraction of the running ones."""


class Scheduler:
    """First come, first served, with preemption of the youngest request.

    A request needs a row and pages for its tokens and `lookahead` more, which a round may write. Pages are allocated as
    the text grows. A running request is preempted for one of two reasons:

    - `reserve_capacity` finds no free page for the next round of an older request, or of the request itself;
    - a step was interrupted, and the engine restarts everything that was running.

    A preempted request keeps its tokens and returns to the head of the queue. Its K and V are computed again when it is
    admitted, except for full pages that are still in the prefix cache.
    """

    def __init__(self, cache: KVCache, lookahead: int, prefill_chunk: int, max_admission_delay: int = 0) -> None:
        self.cache, self.lookahead, self.prefill_chunk = cache, lookahead, prefill_chunk
        self.max_admission_delay = max_admission_delay
        self.delayed_steps = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        """Admitted requests by id, oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @uninterrupted()
    def next_chunks(self) -> list[tuple[Request, int]]:
        """Admits requests, and splits one chunk of prompt tokens among those in prefill."""
        may_admit = self._may_admit()
        while self.waiting and may_admit and self._admit(self.waiting[0]):
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
        """Admits a request, unless its prefix leader is still computing pages that it can share."""
        leader = request.prefix_leader
        if leader is not None and leader.state is RequestState.PREFILL and not leader.is_prefilled:
            return False
        request.prefix_leader = None
        return self.cache.admit(request, self.lookahead)

    def _may_admit(self) -> bool:
        """True if waiting requests may join now. A prefill delays all running requests, so it should serve several."""
        joining = min(len(self.waiting), len(self.cache.free_rows))
        may_admit = joining * JOIN_SHARE >= len(self.running) or self.delayed_steps >= self.max_admission_delay
        self.delayed_steps = 0 if may_admit or not self.waiting else self.delayed_steps + 1
        return may_admit

    @uninterrupted()
    def next_batch(self) -> list[Request]:
        """Requests of the next round, each with pages for it. Preempts the youngest when pages run out."""
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
        """Allocates pages for a request's next round; preempts the youngest requests, and at last this one, if none
        are free."""
        while not self.cache.reserve(request, self.lookahead):
            youngest = next(reversed(self.running.values()))
            self.preempt(youngest)
            if youngest is request:
                return

    def preempt(self, request: Request) -> None:
        """Returns a running request to the head of the queue and frees its row and pages."""
        del self.running[request.id]
        self.cache.release(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Removes a finished or cancelled request, queued or running."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request.id]
            self.cache.release(request)
        request.state = RequestState.FINISHED
