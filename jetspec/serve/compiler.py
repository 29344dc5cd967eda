"""The grammars of requests, made before the engine needs them, where they keep nobody else waiting for long."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from jetspec.engine.llm import LLM
from jetspec.grammar.compile_check import CompileChecker
from jetspec.grammar.constraint import Grammars
from jetspec.serve.errors import ApiError, stopping
from jetspec.types import Grammar

COMPILE_S = 5.0
"""Longest that making a grammar of a schema may take."""
QUICK_S = 0.5
"""What a schema has at first, so that many that take long do not hold up one that does not."""
WAIT_S = 15.0
"""Longest that a schema waits for those of others."""
DEBT = 10.0
"""For every second of compiling a client stands so many seconds behind others."""
MAX_FAILED, FAILED_S = 1024, 600.0
"""Schemas that took too long and are not tried again, and for how long: the machine may have been busy."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """Somebody who wants a turn."""

    client: str
    is_slow: bool
    turn: asyncio.Future[None]


class Turns:
    """One at a time, and next whoever has used least of late: many bad schemas of one client keep back its own.

    Of one client, what is known to take long comes after what may be quick.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[Waiting] = []
        self._debts: dict[str, float] = {}
        """Until when clients stand behind others."""

    @asynccontextmanager
    async def of(self, client: str, is_slow: bool = False) -> AsyncIterator[None]:
        if self._is_taken:
            await self._wait(Waiting(client, is_slow, asyncio.get_running_loop().create_future()))
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def charge(self, client: str, seconds: float) -> None:
        now = time.monotonic()
        self._debts[client] = max(self._debts.get(client, now), now) + DEBT * seconds

    async def _wait(self, here: Waiting) -> None:
        self._waiting.append(here)
        try:
            async with asyncio.timeout(WAIT_S):
                await here.turn
        except BaseException as error:
            if not here.turn.cancelled():  # it came at the same moment
                self._pass_on()
            if isinstance(error, TimeoutError):
                raise busy(self._in_order().index(here)) from None
            raise
        finally:
            self._waiting.remove(here)

    def _in_order(self) -> list[Waiting]:
        """Who waits, the next one first; of equals, who came first."""
        now = time.monotonic()
        self._debts = {client: until for client, until in self._debts.items() if until > now}
        return sorted(self._waiting, key=lambda one: (self._debts.get(one.client, now), one.is_slow))

    def _pass_on(self) -> None:
        turns = [one.turn for one in self._in_order() if not one.turn.done()]
        self._is_taken = bool(turns)
        if turns:
            turns[0].set_result(None)


def busy(num_ahead: int) -> ApiError:
    """All of those ahead, and the one at work, may take as long as they are let."""
    why = "the schemas of others are being read; try again later"
    return ApiError(why, status=503, code="schemas_busy", retry_after=math.ceil((1 + num_ahead) * COMPILE_S))


class Compiler:
    """Compiles one grammar at a time, in a thread, after a trial in another process that can be ended."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._turns = Turns()
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        """Digests of grammars that took too long, the oldest first, and until when that is remembered."""
        self._thread = ThreadPoolExecutor(1, "compile")
        self._checker: CompileChecker | None = None
        self._is_stopped = False

    async def compile(self, grammar: Grammar, param: str, client: str) -> Grammar:
        """The grammar with what was made of it, which the engine then only takes."""
        self._refuse_failed(grammar, param)
        if (known := self._find(grammar)) is not None:
            return replace(grammar, compiled=known)
        try:
            with suppress(TimeoutError):
                return await self._compile_in_turn(grammar, param, client, QUICK_S)
            return await self._compile_in_turn(grammar, param, client, COMPILE_S)
        except TimeoutError:
            self._failed[_digest(grammar)] = time.monotonic() + FAILED_S
            while len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
            raise too_slow(param) from None

    async def _compile_in_turn(self, grammar: Grammar, param: str, client: str, limit_s: float) -> Grammar:
        async with self._turns.of(client, is_slow=limit_s > QUICK_S):
            self._refuse_failed(grammar, param)  # it may have been sent many times
            loop, began = asyncio.get_running_loop(), math.inf
            try:
                await loop.run_in_executor(self._thread, self._start, grammar)
                began = time.monotonic()
                made = await loop.run_in_executor(self._thread, self._compile, grammar, limit_s)
                return replace(grammar, compiled=made)
            except TimeoutError:
                raise
            except ValueError as error:
                raise ApiError(str(error), param=param) from error
            except Exception:
                if self._is_stopped:
                    raise stopping() from None
                raise
            finally:
                self._turns.charge(client, max(0.0, time.monotonic() - began))

    def _refuse_failed(self, grammar: Grammar, param: str) -> None:
        if self._failed and self._failed.get(_digest(grammar), 0.0) > time.monotonic():
            raise too_slow(param)

    def _find(self, grammar: Grammar) -> object | None:
        return self._checker.grammars.find(grammar) if self._checker else None

    def stop(self) -> None:
        """End the process, and the thread after what it is at: it passed the trial, so that is not long."""
        self._is_stopped = True
        if self._checker:
            self._checker.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, grammar: Grammar) -> None:
        """In the thread. The first time this reads the vocabulary, here and in the other process."""
        if self._checker is None:
            self._checker = CompileChecker(self.llm.grammars)
        if grammar.source:
            self._checker.start()

    def _compile(self, grammar: Grammar, limit_s: float) -> object:
        """In the thread."""
        assert self._checker is not None
        grammars: Grammars = self._checker.grammars
        if grammar.source and grammars.find(grammar) is None:
            self._checker.check(grammar, limit_s)
        return grammars.compile(grammar)


def too_slow(param: str) -> ApiError:
    return ApiError(f"the schema takes longer than {COMPILE_S:g} s to read", param=param)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind} {grammar.source}".encode(errors="replace")).digest()
