"""The engine in a thread of its own. Handlers hand in tickets and await what comes of them.

Everything that touches the engine happens in this one thread, between two steps: so a request that joins or leaves
does so within a round, and the engine needs no locks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from jetspec.engine.engine import Engine
from jetspec.gc_control import freeze_objects
from jetspec.serve.errors import ApiError, failed, stopping, unread
from jetspec.types import SamplingParams, TreeLimits, Update

LONGEST_RETRY_S = 60
FORGETTING = 0.2
"""Weight of the latest answer in the mean time that answers take."""

MAX_UNREAD = 1 << 22
"""Tokens of finished answers that wait for their readers, with those of log-probabilities and traces: about 100 bytes
each."""

log = logging.getLogger("jetspec.serve")


@dataclass(frozen=True)
class Job:
    """Answers to one prompt that the engine is to write."""

    tokens: list[int]
    sampling: SamplingParams
    count: int = 1
    limits: TreeLimits | None = None
    trace: bool = False
    cache_salt: str = ""


class Watcher(Protocol):
    """Sees every update, in the engine's thread."""

    def joined(self, prompt_tokens: int) -> None: ...

    def saw(self, update: Update, waited_s: float, is_first: bool) -> None:
        """`waited_s` is the time since the update before, or since the request came."""


class RequestHandle:
    """The answers to one HTTP request, as the event loop sees them."""

    def __init__(
        self, jobs: Sequence[Job], leave: Callable[[RequestHandle], None], written: Callable[[RequestHandle], None]
    ) -> None:
        self.jobs = jobs
        self.num_answers = sum(job.count for job in jobs)
        self.num_tokens, self.num_rounds = 0, 0
        """Written so far, whether anybody has read it or not."""
        self.num_unread = 0
        """What `num_kept` counts of the updates that nobody has taken yet."""
        self.loop = asyncio.get_running_loop()
        self.arrived = time.perf_counter()
        self.joined: asyncio.Future[None] = self.loop.create_future()
        """Done once the engine has taken the jobs, or has refused one."""
        self._news: asyncio.Queue[tuple[int, Update] | ApiError | None] = asyncio.Queue()
        self._left, self._unwritten = self.num_answers, self.num_answers
        self._leave, self._written = leave, written

    @property
    def is_open(self) -> bool:
        return self._left > 0

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Which answer, and what is new of it, until all are complete. A ticket that was given back just ends."""
        while self.is_open:
            news = await self._news.get()
            if news is None:
                return
            if isinstance(news, ApiError):
                raise news
            index, update = news
            self._left -= update.completion is not None
            self.num_unread -= num_kept(update)
            yield index, update

    def give_back(self) -> None:
        """Nobody waits for the answers any more."""
        if self.is_open:
            self._left = 0
            self._news.put_nowait(None)
            self.joined.cancel()
            self._leave(self)

    def tell(self, news: list[tuple[int, Update]]) -> None:
        for index, update in news:
            self.num_tokens += len(update.token_ids)
            self.num_rounds += 1
            self.num_unread += num_kept(update)
            self._unwritten -= update.completion is not None
            self._news.put_nowait((index, update))
        if not self._unwritten:
            self._written(self)

    def forget(self, why: ApiError) -> None:
        """Drop what was not read yet. Who reads on is told why."""
        while not self._news.empty():
            self._news.get_nowait()
        self.num_unread = 0
        self._news.put_nowait(why)

    def refuse(self, why: ApiError) -> None:
        if not self.joined.done():
            self._left = 0
            self.joined.set_exception(why)
        self._news.put_nowait(why)


def num_kept(update: Update) -> int:
    """Tokens that an update holds."""
    traced = len(update.trace.tokens) if update.trace else 0
    return len(update.token_ids) + sum(len(entry.top) for entry in update.logprobs or []) + traced


@dataclass
class Place:
    """Where the updates of one engine request go. Lives in the engine's thread."""

    handle: RequestHandle
    index: int
    last_s: float
    is_first: bool = True


class EngineThread:
    """Runs an engine's steps while there is work, and tells tickets what became of them."""

    def __init__(self, engine: Engine, watcher: Watcher, max_batch: int, max_queue: int) -> None:
        self.engine, self.watcher = engine, watcher
        self.max_batch, self.max_open = max_batch, max_batch + max_queue
        self.failure: BaseException | None = None
        self.is_stopping = False
        self._open: dict[RequestHandle, int] = {}
        """Tickets that the engine works for, and their answers; known to the event loop only."""
        self._unread: dict[RequestHandle, None] = {}
        """Tickets that the engine is done with and that are still being read, the oldest first. They have no place in
        the queue, so a slow reader keeps nobody waiting. But they are in memory: beyond `MAX_UNREAD`, the oldest are
        forgotten."""
        self._mean_s = 1.0
        self._places: dict[int, Place] = {}
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._orders.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    # Called by the event loop.

    @property
    def num_open(self) -> int:
        return sum(self._open.values())

    @property
    def is_ready(self) -> bool:
        return self._thread.is_alive() and not (self.failure or self.is_stopping) and self.num_open < self.max_open

    def submit(self, jobs: Sequence[Job]) -> RequestHandle:
        """Queue jobs, or refuse them at once: the engine has failed, the server stops, or the queue is full."""
        if self.failure:
            raise failed()
        if self.is_stopping:
            raise stopping()
        handle = RequestHandle(jobs, self._give_back, self._written)
        wanted = handle.num_answers
        if wanted > self.max_open:
            raise ApiError(f"this request wants {wanted} answers; at most {self.max_open} can wait at a time")
        if self.num_open + wanted > self.max_open:
            raise ApiError(
                "the queue is full; try again later", status=429, code="queue_full", retry_after=self._retry_after()
            )
        self._open[handle] = wanted
        self._orders.put(partial(self._join, handle))
        return handle

    def close(self, handle: RequestHandle) -> None:
        """Be done with a ticket, finished or not."""
        handle.give_back()
        self._open.pop(handle, None)
        self._unread.pop(handle, None)

    def refuse_all(self, why: ApiError) -> None:
        for handle in list(self._open):
            self._give_back(handle)
            handle.refuse(why)

    def _give_back(self, handle: RequestHandle) -> None:
        self._orders.put(partial(self._drop, handle))

    def _written(self, handle: RequestHandle) -> None:
        """The engine is done with a ticket: its places are free."""
        if self._open.pop(handle, None) is None:
            return
        self._mean_s += FORGETTING * (time.perf_counter() - handle.arrived - self._mean_s)
        self._unread[handle] = None
        while sum(handle.num_unread for handle in self._unread) > MAX_UNREAD:
            oldest = next(iter(self._unread))
            del self._unread[oldest]
            oldest.forget(unread())

    def _retry_after(self) -> int:
        """About when a place in the queue will be free."""
        waiting = max(self.num_open - self.max_batch, 1)
        return max(1, min(LONGEST_RETRY_S, math.ceil(waiting / self.max_batch * self._mean_s)))

    # Called in the engine's thread.

    def _run(self) -> None:
        try:
            with freeze_objects(self.max_batch):
                while self._obey():
                    if self.engine.has_work:
                        self._deliver(self.engine.step())
        except BaseException as error:
            self.failure = error
            log.error("engine failed", exc_info=error)
            for place in self._places.values():
                self._tell(place.handle, partial(place.handle.refuse, failed()))
            self._places.clear()
            while order := self._orders.get():  # tickets that came in meanwhile
                order()

    def _obey(self) -> bool:
        """Carry out what was ordered; wait for an order when there is nothing else to do. False: stop."""
        while not (self._orders.empty() and self.engine.has_work):
            order = self._orders.get()
            if order is None:
                return False
            order()
        return True

    def _join(self, handle: RequestHandle) -> None:
        if self.failure:
            self._tell(handle, partial(handle.refuse, failed()))
            return
        try:
            ids = [request_id for job in handle.jobs for request_id in self._add(job)]
        except Exception as error:
            self._tell(handle, partial(handle.refuse, _refusal(error)))
            for request_id in self.engine.requests.keys() - self._places.keys():
                self.engine.cancel(request_id)
            return
        for index, request_id in enumerate(ids):
            self._places[request_id] = Place(handle, index, handle.arrived)
        self.watcher.joined(sum(len(job.tokens) for job in handle.jobs))
        self._tell(handle, partial(_set_done, handle.joined))

    def _add(self, job: Job) -> list[int]:
        return self.engine.add_several(
            job.tokens, job.sampling, job.count, limits=job.limits, trace=job.trace, cache_salt=job.cache_salt
        )

    def _drop(self, handle: RequestHandle) -> None:
        for request_id in [id for id, place in self._places.items() if place.handle is handle]:
            del self._places[request_id]
            self.engine.cancel(request_id)

    def _deliver(self, updates: list[Update]) -> None:
        """One message per ticket and step, however many answers it has."""
        now = time.perf_counter()
        news: dict[RequestHandle, list[tuple[int, Update]]] = {}
        for update in updates:
            place = self._places[update.request_id]
            self.watcher.saw(update, now - place.last_s, place.is_first)
            place.last_s, place.is_first = now, False
            news.setdefault(place.handle, []).append((place.index, update))
            if update.completion:
                del self._places[update.request_id]
        for handle, items in news.items():
            self._tell(handle, partial(handle.tell, items))

    @staticmethod
    def _tell(handle: RequestHandle, call: Callable[[], None]) -> None:
        handle.loop.call_soon_threadsafe(call)


def _refusal(error: Exception) -> ApiError:
    """What is said of a request that the engine did not take."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueError):
        return ApiError(str(error))
    log.error("a request could not be started", exc_info=error)
    return ApiError("this request could not be started", status=500, code="request_failed")


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
