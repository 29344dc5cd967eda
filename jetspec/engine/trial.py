"""Grammars of strangers, tried in another process first.

A small schema can be hours of work for the grammar library, and nothing ends that work but the end of its process. What
it made is too large to be sent here (it may be hundreds of megabytes), so what passes is then compiled once more.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from jetspec.engine.constraint import Grammars
from jetspec.types import Grammar

MAX_BYTES = 64 << 20
"""Memory that a compiled grammar may take."""
TOO_LARGE = "it is too large or too intricate"


class Trial:
    """A process that compiles one grammar after the other. It starts when it is needed, the first time or again."""

    def __init__(self, grammars: Grammars, limit_s: float) -> None:
        self.grammars, self.limit_s = grammars, limit_s
        self._process: BaseProcess | None = None
        self._is_stopped = False

    def run(self, grammar: Grammar) -> None:
        """Raise TimeoutError if compiling takes too long, ValueError if it fails. Only its own time counts."""
        if self._process is None:
            self._start()
        try:
            self._end.send(grammar)
            if not self._end.poll(self.limit_s):
                raise TimeoutError
            why = self._end.recv()
        except TimeoutError:
            self._kill()
            raise
        except (EOFError, OSError):
            self._kill()
            if self._is_stopped:
                raise ChildProcessError("the process that tries grammars was stopped") from None
            raise ValueError(f"the grammar ({grammar.kind}) cannot be used: {TOO_LARGE}") from None
        if why:
            raise ValueError(why)

    def stop(self) -> None:
        """End the process for good, whatever it does. Any thread may call this."""
        self._is_stopped = True
        if process := self._process:
            process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self.grammars.vocabulary, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        if self._is_stopped:
            self._process.kill()
        try:
            self._end.recv()
        except (EOFError, OSError):
            self._kill()
            raise ChildProcessError("the process that tries grammars did not start") from None

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._process = None
        self._end.close()


def _work(vocabulary: tuple[list[bytes], int, frozenset[int]], end: Connection) -> None:
    """The life of the process. When the parent is gone the pipe breaks, and the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grammars = Grammars(*vocabulary)
    end.send("ready")
    while True:
        try:
            grammar = end.recv()
        except EOFError:
            return
        why = ""
        try:
            if grammars.compile(grammar).memory_size_bytes > MAX_BYTES:
                why = f"the grammar ({grammar.kind}) cannot be used: {TOO_LARGE}"
        except ValueError as error:
            why = str(error)
        except Exception:  # whatever a grammar of strange form may lead to
            why = f"the grammar ({grammar.kind}) cannot be used"
        end.send(why)
