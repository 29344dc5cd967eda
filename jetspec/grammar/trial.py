"""Grammars of strangers, tried in another process first.

A small schema can be hours of work for the grammar library, and nothing ends that work but the end of its process. A
process takes seconds to start, so there is one that only forks: each grammar is tried in a copy of it, and a bad one
costs no more than its time. What was made is too large to be sent here (it may be hundreds of megabytes), so what
passes is then compiled once more.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from jetspec.grammar.constraint import Grammars
from jetspec.types import Grammar

MAX_BYTES = 64 << 20
"""Memory that a compiled grammar may take."""
TOO_LARGE = "it is too large or too intricate"
NICENESS = 10
"""The library compiles in many threads, and the engine is to have a core before all of them."""
GRACE_S = 1.0
"""What the process has beyond the time of a grammar to say how it went."""


class Trial:
    """A process that tries one grammar after the other. It starts when it is needed, the first time or again."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._process: BaseProcess | None = None
        self._is_stopped = False

    def run(self, grammar: Grammar, limit_s: float) -> None:
        """Raise TimeoutError if compiling takes too long, ValueError if it fails. Only its own time counts."""
        self.start()
        try:
            self._end.send((grammar, limit_s))
            if not self._end.poll(limit_s + GRACE_S):
                self._kill()
                raise TimeoutError
            is_late, why = self._end.recv()
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self._kill()
            if self._is_stopped:
                raise ChildProcessError("the process that tries grammars was stopped") from None
            raise ValueError(_unusable(grammar, TOO_LARGE)) from None
        if is_late:
            raise TimeoutError
        if why:
            raise ValueError(why)

    def stop(self) -> None:
        """End the process for good, whatever it does. Any thread may call this."""
        self._is_stopped = True
        if process := self._process:
            _end(process)

    def start(self) -> None:
        """Have a process that is ready; this may take seconds."""
        if self._process is not None:
            return
        context = _context()
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self.grammars.vocabulary, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        if self._is_stopped:
            _end(self._process)
        try:
            self._end.recv()
        except (EOFError, OSError):
            self._kill()
            raise ChildProcessError("the process that tries grammars did not start") from None

    def _kill(self) -> None:
        assert self._process is not None
        _end(self._process)
        self._process.join()
        self._process = None
        self._end.close()


def _context() -> SpawnContext | ForkServerContext:
    """How the process starts: as a copy of one that has loaded what it needs, where there are copies, so that another
    is there at once. Never as a copy of this one, which has threads and may have a GPU."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "xgrammar"])
    return context


def _end(process: BaseProcess) -> None:
    """With its copies."""
    with suppress(OSError, AttributeError):  # it has not come so far, or there are no groups of processes
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()


def _work(vocabulary: tuple[list[bytes], int, frozenset[int]], end: Connection) -> None:
    """The life of the process. When the parent is gone the pipe breaks, and the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "fork"):
        os.setpgid(0, 0)
        os.nice(NICENESS)
    grammars = Grammars(*vocabulary)
    end.send("ready")
    while True:
        try:
            grammar, limit_s = end.recv()
        except EOFError:
            return
        # Where there are no copies of processes, the parent ends this one.
        end.send(
            _try_in_copy(grammars, grammar, limit_s, end) if hasattr(os, "fork") else (False, _try(grammars, grammar))
        )


def _try_in_copy(grammars: Grammars, grammar: Grammar, limit_s: float, end: Connection) -> tuple[bool, str]:
    """Whether compiling took too long, and otherwise what is wrong with the grammar. The copy's own clock ends it."""
    ours, theirs = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            end.close()
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            os.write(theirs, _try(grammars, grammar).encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        why = pipe.read().decode(errors="replace")
    _, status = os.waitpid(copy, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGALRM, _unusable(grammar, TOO_LARGE)
    return False, why


def _try(grammars: Grammars, grammar: Grammar) -> str:
    """What is wrong with a grammar, if anything."""
    try:
        if grammars.compile(grammar).memory_size_bytes > MAX_BYTES:
            return _unusable(grammar, TOO_LARGE)
    except ValueError as error:
        return str(error)
    except Exception:  # whatever a grammar of strange form may lead to
        return f"the grammar ({grammar.kind}) cannot be used"
    return ""


def _unusable(grammar: Grammar, why: str) -> str:
    return f"the grammar ({grammar.kind}) cannot be used: {why}"
