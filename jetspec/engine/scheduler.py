"""Scheduling: which requests are admitted, prefilled, decoded and preempted.

The scheduler owns the queue, the cache owns the pages, the engine owns the models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jetspec.engine.kv_cache import KVCache
from jetspec.interrupt import uninterrupted
from jetspec.types import Request, RequestState

JOIN_SHARE = 8
"""Waiting requests are admitted at once when they number at least this fraction of the running ones."""
QUANTUM = 256
"""Tokens by which a tenant without a row may fall behind one with a row."""


@dataclass(eq=False)
class Tenant:
    """A user with requests in the queue or in the batch."""

    served: float
    """Tokens of its prompts and answers, so that tenants can be compared; one that joins starts with the fewest of
    all."""
    waiting: deque[Request] = field(default_factory=deque)
    num_running: int = 0


class Scheduler:
    """Equal shares of the rows for all tenants; for the requests of one tenant, first come, first served.

    A request needs a row and pages for its tokens and `lookahead` more, which a round may write. Pages are allocated as
    the text grows. A running request is preempted for one of three reasons:

    - `_make_room`: a tenant waits that has fewer rows than its share, or none and was served less;
    - `reserve_capacity` finds no free page for the next round of an older request, or of the request itself;
    - a step was interrupted, and the engine restarts everything that was running.

    The youngest request of the tenant with most rows is preempted. It keeps its tokens and returns to the head of its
    tenant's queue. Its K and V are computed again when it is admitted, except for full pages that are still in the
    prefix cache.
    """

    def __init__(self, cache: KVCache, lookahead: int, prefill_chunk: int, max_admission_delay: int = 0) -> None:
        self.cache, self.lookahead, self.prefill_chunk = cache, lookahead, prefill_chunk
        self.max_admission_delay = max_admission_delay
        self.delayed_steps = 0
        self.tenants: dict[str, Tenant] = {}
        """Tenants with requests, by name."""
        self.running: dict[int, Request] = {}
        """Admitted requests by id, oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.tenants)

    @property
    def num_waiting(self) -> int:
        return sum(len(tenant.waiting) for tenant in list(self.tenants.values()))

    def add(self, request: Request) -> None:
        """Queues a request."""
        if request.tenant not in self.tenants:
            self.tenants[request.tenant] = Tenant(min((t.served for t in self.tenants.values()), default=0.0))
        self.tenants[request.tenant].waiting.append(request)

    def serve(self, request: Request, num_tokens: int) -> None:
        """Counts tokens that a request was given."""
        self.tenants[request.tenant].served += num_tokens

    @uninterrupted()
    def next_chunks(self) -> list[tuple[Request, int]]:
        """Admits requests, and splits one chunk of prompt tokens among those in prefill."""
        may_admit = self._may_admit()
        while may_admit and (tenant := self._next_tenant()) is not None and self._admit(tenant, tenant.waiting[0]):
            request = tenant.waiting.popleft()
            request.state = RequestState.PREFILL
            if not request.stats.rounds:
                request.stats.cached_tokens = request.num_cached
                self.serve(request, request.prompt_len - request.num_cached)
            self.running[request.id] = request
            tenant.num_running += 1
        chunks, left = [], self.prefill_chunk
        for request in self.running.values():
            if request.state is RequestState.PREFILL:
                count = min(len(request.tokens) - 1 - request.num_cached, left)
                if count > 0:
                    chunks.append((request, count))
                    left -= count
        return chunks

    def _next_tenant(self) -> Tenant | None:
        """The waiting tenant with the fewest rows; of equals, the one that was served least."""
        waiting = (tenant for tenant in self.tenants.values() if tenant.waiting)
        return min(waiting, key=lambda tenant: (tenant.num_running, tenant.served), default=None)

    def _admit(self, tenant: Tenant, request: Request) -> bool:
        """Admits a request, unless its prefix leader is still computing pages that it can share."""
        leader = request.prefix_leader
        if leader is not None and leader.state is RequestState.PREFILL and not leader.is_prefilled:
            return False
        request.prefix_leader = None
        while not self.cache.admit(request, self.lookahead):
            if not self._make_room(tenant):
                return False
        return True

    def _make_room(self, tenant: Tenant) -> bool:
        """Preempts a request of a tenant that has more than its share, or none if that is not fair."""
        others = [other for other in self.tenants.values() if other is not tenant and other.num_running]
        most = max(others, key=lambda other: (other.num_running, other.served), default=tenant)
        if most.num_running <= tenant.num_running + 1:
            most = max(others, key=lambda other: other.served, default=tenant)
            if tenant.num_running or most.served <= tenant.served + QUANTUM:
                return False
        self.preempt(self._youngest([most]))
        return True

    def _youngest(self, tenants: Iterable[Tenant]) -> Request:
        """The youngest running request of some tenants."""
        some = list(tenants)
        return next(r for r in reversed(self.running.values()) if self.tenants[r.tenant] in some)

    def _may_admit(self) -> bool:
        """True if waiting requests may join now. A prefill delays all running requests, so it should serve several."""
        joining = min(self.num_waiting, len(self.cache.free_rows))
        may_admit = joining * JOIN_SHARE >= len(self.running) or self.delayed_steps >= self.max_admission_delay
        self.delayed_steps = 0 if may_admit or not self.num_waiting else self.delayed_steps + 1
        return may_admit

    @uninterrupted()
    def next_batch(self) -> list[Request]:
        """Requests of the next round, each with pages for it. Preempts requests when pages run out."""
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
        """Allocates pages for a request's next round; preempts requests, and at last this one, if none are free."""
        while not self.cache.reserve(request, self.lookahead):
            most = max(tenant.num_running for tenant in self.tenants.values())
            youngest = self._youngest(tenant for tenant in self.tenants.values() if tenant.num_running == most)
            self.preempt(youngest)
            if youngest is request:
                return

    def preempt(self, request: Request) -> None:
        """Returns a running request to the head of its tenant's queue and frees its row and pages."""
        tenant = self.tenants[request.tenant]
        del self.running[request.id]
        tenant.num_running -= 1
        self.cache.release(request)
        request.state = RequestState.WAITING
        tenant.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Removes a finished or cancelled request, queued or running."""
        tenant = self.tenants[request.tenant]
        if request.state is RequestState.WAITING:
            tenant.waiting.remove(request)
        else:
            del self.running[request.id]
            tenant.num_running -= 1
            self.cache.release(request)
        if not tenant.waiting and not tenant.num_running:
            del self.tenants[request.tenant]
        request.state = RequestState.FINISHED
