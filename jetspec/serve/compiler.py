"""Compiles the grammars of requests before the engine needs them, with limits on time and a fair order of clients."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from jetspec.engine.llm import LLM
from jetspec.grammar.compile_check import CompileChecker
from jetspec.serve.errors import ApiError, shutting_down
from jetspec.types import Grammar

COMPILE_S = 5.0
"""Time limit for compiling a grammar."""
QUICK_S = 0.5
"""Time limit of the first attempt, so that slow grammars do not delay a quick one."""
WAIT_S = 15.0
"""Time limit for waiting behind the grammars of other requests."""
DEBT = 10.0
"""Seconds that a client comes after others, per second of compiling for it."""
MAX_FAILED, FAILED_S = 1024, 600.0
"""Number of too slow grammars that are remembered, and for how long: the machine may have been busy."""


class Waiter:
    """A request that waits for the lock, or has it."""

    def __init__(self, client: str, is_slow: bool) -> None:
        self.client, self.is_slow, self.turn = client, is_slow, asyncio.Event()


class FairLock:
    """A lock that goes next to the client that has used the least compile time of late.

    Of one client, grammars known to be slow come after those that may be quick.
    """

    def __init__(self) -> None:
        self._holder: Waiter | None = None
        self._waiters: list[Waiter] = []
        self._debts: dict[str, float] = {}
        """Client -> time until which it comes after others."""

    @asynccontextmanager
    async def hold(self, client: str, is_slow: bool = False) -> AsyncIterator[None]:
        waiter = Waiter(client, is_slow)
        self._waiters.append(waiter)
        self._pass_on()
        try:
            try:
                async with asyncio.timeout(WAIT_S):
                    await waiter.turn.wait()
            except TimeoutError:
                if waiter in self._waiters:  # else the turn came at the same moment
                    # Each grammar before this one, and the current one, may use its whole time limit.
                    retry_after = math.ceil((1 + self._in_order().index(waiter)) * COMPILE_S)
                    why = "grammars of other requests are being compiled; try again later"
                    raise ApiError(why, status=503, code="schemas_busy", retry_after=retry_after) from None
            yield
        finally:
            if self._holder is waiter:
                self._holder = None
            else:
                self._waiters.remove(waiter)
            self._pass_on()

    def charge(self, client: str, seconds: float) -> None:
        now = time.monotonic()
        self._debts[client] = max(self._debts.get(client, now), now) + DEBT * seconds

    def _in_order(self) -> list[Waiter]:
        """The waiters, next one first; equal ones in order of arrival."""
        now = time.monotonic()
        self._debts = {client: until for client, until in self._debts.items() if until > now}
        return sorted(self._waiters, key=lambda one: (self._debts.get(one.client, now), one.is_slow))

    def _pass_on(self) -> None:
        """Give a free lock to the next waiter."""
        if self._holder is None and self._waiters:
            self._holder = self._in_order()[0]
            self._waiters.remove(self._holder)
            self._holder.turn.set()


class Compiler:
    """Compiles one grammar at a time in a thread, after a check in another process that can be killed."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._lock = FairLock()
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        """Digest of a too slow grammar -> time until which it is refused, oldest first."""
        self._thread = ThreadPoolExecutor(1, "compile")
        self._checker: CompileChecker | None = None
        self._is_stopped = False

    async def compile(self, grammar: Grammar, param: str, client: str) -> Grammar:
        """Returns the grammar with its compiled form. Raises ApiError about the field `param` if that fails."""
        self._refuse_failed(grammar, param)
        if self._checker and (known := self._checker.grammars.find(grammar)) is not None:
            return replace(grammar, compiled=known)
        try:
            with suppress(TimeoutError):
                return await self._compile_in_turn(grammar, param, client, QUICK_S)
            return await self._compile_in_turn(grammar, param, client, COMPILE_S)
        except TimeoutError:
            self._failed[_digest(grammar)] = time.monotonic() + FAILED_S
            while len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
            raise _too_slow(param) from None

    async def _compile_in_turn(self, grammar: Grammar, param: str, client: str, limit_s: float) -> Grammar:
        async with self._lock.hold(client, is_slow=limit_s > QUICK_S):
            self._refuse_failed(grammar, param)  # an equal one may have failed meanwhile
            loop, start_s = asyncio.get_running_loop(), math.inf
            try:
                await loop.run_in_executor(self._thread, self._start, grammar)
                start_s = time.monotonic()
                compiled = await loop.run_in_executor(self._thread, self._compile, grammar, limit_s)
                return replace(grammar, compiled=compiled)
            except TimeoutError:
                raise
            except ValueError as error:
                raise ApiError(str(error), param=param) from error
            except Exception:
                if self._is_stopped:
                    raise shutting_down() from None
                raise
            finally:
                self._lock.charge(client, max(0.0, time.monotonic() - start_s))

    def _refuse_failed(self, grammar: Grammar, param: str) -> None:
        if self._failed and self._failed.get(_digest(grammar), 0.0) > time.monotonic():
            raise _too_slow(param)

    def stop(self) -> None:
        """Kill the process. The thread ends after its current grammar, which has passed the check and is quick."""
        self._is_stopped = True
        if self._checker:
            self._checker.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, grammar: Grammar) -> None:
        """Runs in the thread. On first use it loads the vocabulary, here and in the process."""
        if self._checker is None:
            self._checker = CompileChecker(self.llm.grammars)
        if grammar.source:
            self._checker.start()

    def _compile(self, grammar: Grammar, limit_s: float) -> object:
        """Runs in the thread."""
        assert self._checker is not None
        if grammar.source and self._checker.grammars.find(grammar) is None:
            self._checker.check(grammar, limit_s)
        return self._checker.grammars.compile(grammar)


def _too_slow(param: str) -> ApiError:
    return ApiError(f"the schema takes longer than {COMPILE_S:g} s to compile", param=param)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind} {grammar.source}".encode(errors="replace")).digest()
