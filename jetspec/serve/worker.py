"""The engine's thread. The event loop submits jobs to it and awaits their updates.

Only this thread touches the engine, between two steps. A request therefore joins or leaves within a round, and the
engine needs no locks.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from jetspec.engine.engine import Engine
from jetspec.gc_control import freeze_objects
from jetspec.serve.errors import ApiError, client_disconnected, engine_failed, read_too_slowly, shutting_down
from jetspec.serve.log import log
from jetspec.serve.metrics import Metrics
from jetspec.types import SamplingParams, TreeLimits, Update

MAX_RETRY_S = 60
MEAN_WEIGHT = 0.2
"""Weight of the latest request in the running mean of request times."""
MAX_UNREAD = 1 << 22
"""Size limit, in tokens of about 100 bytes, of unread updates of finished requests. Tokens of log-probabilities and
traces count too."""


@dataclass(frozen=True)
class Job:
    """Prompts of one request, with `count` completions each, and how their text is read."""

    prompts: list[list[int]]
    sampling: SamplingParams
    count: int = 1
    limits: TreeLimits | None = None
    trace: bool = False
    cache_salt: str = ""
    tenant: str = ""
    shows_logprobs: bool = False
    reads_tools: bool = False
    """Completions may contain tool calls."""
    in_call: bool = False
    """Completions begin inside a tool call."""

    @property
    def num_completions(self) -> int:
        return len(self.prompts) * self.count

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


Item = tuple[int, Update] | ApiError | Literal["admitted", "closed"]


class RequestHandle:
    """The completions of one HTTP request, as the event loop sees them."""

    def __init__(self, job: Job, worker: EngineThread) -> None:
        self.job, self._worker = job, worker
        self.num_tokens, self.num_rounds = 0, 0
        """Generated so far, read or not."""
        self.num_unread = 0
        """Size of the unread updates, as `update_size` counts it."""
        self.loop = asyncio.get_running_loop()
        self.arrival_s = time.perf_counter()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self.put = self._queue.put_nowait
        self._unread = self._unfinished = job.num_completions
        """Completions whose last update is not read, not generated."""

    def put_threadsafe(self, item: Item) -> None:
        self.loop.call_soon_threadsafe(self.put, item)

    async def wait_admitted(self) -> None:
        """Wait until the engine has accepted the job. Raises ApiError if it was refused or the request is closed."""
        item = await self._queue.get()
        if item != "admitted":
            raise item if isinstance(item, ApiError) else client_disconnected()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yields (completion index, update) until all completions are finished or the request is closed."""
        while self._unread > 0:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            if isinstance(item, str):
                return
            index, update = item
            self._unread -= update.completion is not None
            self.num_unread -= update_size(update)
            yield index, update

    def close(self) -> None:
        """Release the request, finished or not."""
        if self._unread > 0:
            self._unread = 0
            self.put("closed")
            self._worker.drop(self)
        self._worker.release(self)

    def deliver(self, updates: list[tuple[int, Update]]) -> None:
        for index, update in updates:
            self.num_tokens += len(update.token_ids)
            self.num_rounds += 1
            self.num_unread += update_size(update)
            self._unfinished -= update.completion is not None
            self.put((index, update))
        if not self._unfinished:
            self._worker.on_finished(self)

    def discard_unread(self, error: ApiError) -> None:
        """Drop the unread updates; the reader gets the error instead."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.num_unread = 0
        self.put(error)


def update_size(update: Update) -> int:
    """Tokens in an update, those of log-probabilities and traces included."""
    traced = len(update.trace.tokens) if update.trace else 0
    return len(update.token_ids) + sum(len(entry.top) for entry in update.logprobs or []) + traced


@dataclass
class Sink:
    """Destination of one engine request's updates. Used in the engine's thread only."""

    handle: RequestHandle
    index: int
    last_s: float
    """Time of the latest update, or of the arrival."""
    is_first: bool = True


class EngineThread:
    """Runs engine steps while there is work, and delivers updates to the handles."""

    def __init__(self, engine: Engine, metrics: Metrics, max_batch: int, max_queue: int) -> None:
        self.engine, self.metrics = engine, metrics
        self.max_batch, self.max_open = max_batch, max_batch + max_queue
        self.failure: BaseException | None = None
        self.is_stopping = False
        self._open: dict[RequestHandle, None] = {}
        """Unfinished requests. Used in the event loop only."""
        self._unread: dict[RequestHandle, None] = {}
        """Finished requests that are still being read, oldest first. They take no place in the queue, so a slow reader
        delays no other request; beyond `MAX_UNREAD` the oldest are discarded."""
        self._mean_s = 1.0
        self._sinks: dict[int, Sink] = {}
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    # Called in the event loop.

    @property
    def num_open(self) -> int:
        return sum(handle.job.num_completions for handle in self._open)

    @property
    def is_ready(self) -> bool:
        return self._thread.is_alive() and not (self.failure or self.is_stopping) and self.num_open < self.max_open

    def submit(self, job: Job) -> RequestHandle:
        """Queue a job. Raises ApiError if the engine has failed, the server shuts down or the queue is full."""
        if self.failure:
            raise engine_failed()
        if self.is_stopping:
            raise shutting_down()
        handle, count = RequestHandle(job, self), job.num_completions
        if count > self.max_open:
            raise ApiError(f"the request has {count} completions; batch and queue hold {self.max_open}")
        if self.num_open + count > self.max_open:
            raise ApiError(
                "the queue is full; try again later", status=429, code="queue_full", retry_after=self._retry_after()
            )
        self._open[handle] = None
        self._commands.put(partial(self._join, handle))
        return handle

    def release(self, handle: RequestHandle) -> None:
        """Free the place of a request in the queue, and that of its unread updates."""
        self._open.pop(handle, None)
        self._unread.pop(handle, None)

    def abort_all(self, error: ApiError) -> None:
        for handle in list(self._open):
            self.drop(handle)
            handle.put(error)

    def drop(self, handle: RequestHandle) -> None:
        """Cancel a request in the engine."""
        self._commands.put(partial(self._cancel, handle))

    def on_finished(self, handle: RequestHandle) -> None:
        """Free the places of a request whose completions are all generated."""
        if handle not in self._open:
            return
        del self._open[handle]
        self._mean_s += MEAN_WEIGHT * (time.perf_counter() - handle.arrival_s - self._mean_s)
        self._unread[handle] = None
        while sum(handle.num_unread for handle in self._unread) > MAX_UNREAD:
            oldest = next(iter(self._unread))
            del self._unread[oldest]
            oldest.discard_unread(read_too_slowly())

    def _retry_after(self) -> int:
        """Estimated seconds until a place in the queue is free."""
        waiting = max(self.num_open - self.max_batch, 1)
        return max(1, min(MAX_RETRY_S, math.ceil(waiting / self.max_batch * self._mean_s)))

    # Called in the engine's thread.

    def _run(self) -> None:
        try:
            with freeze_objects(self.max_batch):
                while self._run_commands():
                    if self.engine.has_work:
                        self._deliver(self.engine.step())
        except BaseException as error:
            self.failure = error
            log.error("engine failed", exc_info=error)
            for sink in self._sinks.values():
                sink.handle.put_threadsafe(engine_failed())
            self._sinks.clear()
            while command := self._commands.get():  # requests submitted meanwhile
                command()

    def _run_commands(self) -> bool:
        """Run queued commands; wait for one if the engine is idle. Returns False at the stop command."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _join(self, handle: RequestHandle) -> None:
        if self.failure:
            handle.put_threadsafe(engine_failed())
            return
        job, ids = handle.job, list[int]()
        own = {"cache_salt": job.cache_salt, "tenant": job.tenant}
        options: dict[str, Any] = {"limits": job.limits, "trace": job.trace, **own}
        try:
            for tokens in job.prompts:
                ids += self.engine.add_several(tokens, job.sampling, job.count, **options)
        except Exception as error:
            failed = ApiError(str(error))
            if not isinstance(error, ValueError):
                log.error("a request could not be started", exc_info=error)
                failed = ApiError("this request could not be started", status=500, code="request_failed")
            handle.put_threadsafe(failed)
            for request_id in self.engine.requests.keys() - self._sinks.keys():
                self.engine.cancel(request_id)
            return
        for index, request_id in enumerate(ids):
            self._sinks[request_id] = Sink(handle, index, handle.arrival_s)
        self.metrics.on_admission(job.prompt_tokens)
        handle.put_threadsafe("admitted")

    def _cancel(self, handle: RequestHandle) -> None:
        for request_id in [id for id, sink in self._sinks.items() if sink.handle is handle]:
            del self._sinks[request_id]
            self.engine.cancel(request_id)

    def _deliver(self, updates: list[Update]) -> None:
        """Send each handle one message per step, however many completions it has."""
        now = time.perf_counter()
        messages: dict[RequestHandle, list[tuple[int, Update]]] = {}
        for update in updates:
            sink = self._sinks[update.request_id]
            is_sampled = sink.handle.job.sampling.is_sampled
            self.metrics.on_update(update, now - sink.last_s, sink.is_first, is_sampled)
            sink.last_s, sink.is_first = now, False
            messages.setdefault(sink.handle, []).append((sink.index, update))
            if update.completion:
                del self._sinks[update.request_id]
        for handle, items in messages.items():
            handle.loop.call_soon_threadsafe(handle.deliver, items)
