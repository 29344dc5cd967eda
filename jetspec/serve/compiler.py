"""The grammars of requests, made before the engine needs them, where they keep nobody else waiting for long."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from jetspec.engine.constraint import Grammars
from jetspec.engine.llm import LLM
from jetspec.engine.trial import Trial
from jetspec.serve.errors import Refused, stopping
from jetspec.types import Grammar

COMPILE_S = 5.0
"""Longest that making a grammar of a schema may take."""
WAIT_S = 15.0
"""Longest that a schema waits for those of others."""


class Compiler:
    """Compiles one grammar at a time, in a thread, after a trial in another process that can be ended."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "compile")
        self._trial: Trial | None = None
        self._is_stopped = False

    async def compile(self, grammar: Grammar, param: str) -> Grammar:
        """The grammar with what was made of it, which the engine then only takes."""
        known = self._trial and self._trial.grammars.find(grammar)
        if known is not None:
            return replace(grammar, compiled=known)
        try:
            await asyncio.wait_for(self._turn.acquire(), WAIT_S)
        except TimeoutError:
            why = "the schemas of others are being read; try again later"
            raise Refused(why, status=503, code="schemas_busy", retry_after=math.ceil(COMPILE_S)) from None
        try:
            compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            return replace(grammar, compiled=await compiling)
        except TimeoutError:
            raise Refused(f"the schema takes longer than {COMPILE_S:g} s to read", param=param) from None
        except ValueError as error:
            raise Refused(str(error), param=param) from error
        except Exception:
            if self._is_stopped:
                raise stopping() from None
            raise
        finally:
            self._turn.release()

    def stop(self) -> None:
        """End the process, and the thread after what it is at: it passed the trial, so that is not long."""
        self._is_stopped = True
        if self._trial:
            self._trial.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> object:
        """In the thread."""
        if self._trial is None:
            self._trial = Trial(self.llm.grammars, COMPILE_S)  # this reads the vocabulary
        grammars: Grammars = self._trial.grammars
        if grammar.source and grammars.find(grammar) is None:
            self._trial.run(grammar)
        return grammars.compile(grammar)
