"""Who runs next. The scheduler owns the queue; the cache owns the pages; the engine owns the models."""

from __future__ import annotations

from collections import deque

from jetspec.engine.kv_cache import KVCache
from jetspec.types import Request, RequestState


class Scheduler:
    """First come, first served. When pages run out the youngest request gives way and starts again later."""

    def __init__(self, cache: KVCache, lookahead: int, prefill_chunk: int) -> None:
        self.cache, self.lookahead, self.prefill_chunk = cache, lookahead, prefill_chunk
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        """Admitted requests by id, oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def next_chunks(self) -> list[tuple[Request, int]]:
        """Admit what fits, and share one chunk of prompt tokens among those that still need some."""
        while self.waiting and self.cache.admit(self.waiting[0], self.lookahead):
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

    def next_batch(self) -> list[Request]:
        """The requests for the next round, each with room for it; the youngest are sent back to make room."""
        batch = []
        for request in list(self.running.values()):
            if request.id in self.running and request.is_prefilled and self.make_room(request):
                request.state = RequestState.DECODE
                batch.append(request)
        return batch

    def make_room(self, request: Request) -> bool:
        """Find room for a request's next round; False when it is itself the youngest and had to give way."""
        while not self.cache.reserve(request, self.lookahead):
            youngest = next(reversed(self.running.values()))
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

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
