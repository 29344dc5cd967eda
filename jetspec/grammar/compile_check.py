"""Compiles grammars from clients in a child process first, with a limit on time and memory.

A small schema can take xgrammar hours, and only the end of its process stops it. Starting a process takes seconds, so
one child stays and forks: each grammar compiles in a fork of it. The result is too large to send back (up to hundreds
of megabytes), so a grammar that passes is compiled again by the caller.
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
"""Memory limit of a compiled grammar."""
NICENESS = 10
"""xgrammar compiles in many threads; the engine's process has priority."""
GRACE_S = 1.0
"""Time beyond the limit in which the child has to answer."""


class CompileChecker:
    """Child process that compiles one grammar at a time. It starts on first use, and again after it was killed."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._process: BaseProcess | None = None
        self._is_stopped = False

    def check(self, grammar: Grammar, limit_s: float) -> None:
        """Raise TimeoutError if compiling takes longer than `limit_s`, ValueError if it fails."""
        self.start()
        try:
            self._pipe.send((grammar, limit_s))
            is_answered = self._pipe.poll(limit_s + GRACE_S)
            is_late, why = self._pipe.recv() if is_answered else (True, "")
        except (EOFError, OSError):
            self._kill()
            if self._is_stopped:
                raise ChildProcessError("the process that checks grammars was stopped") from None
            raise ValueError(_too_large(grammar)) from None
        if not is_answered:
            self._kill()
        if is_late:
            raise TimeoutError
        if why:
            raise ValueError(why)

    def stop(self) -> None:
        """End the process for good. Thread-safe."""
        self._is_stopped = True
        if process := self._process:
            _end(process)

    def start(self) -> None:
        """Start the process unless it runs; this may take seconds."""
        if self._process is not None:
            return
        context = _context()
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_work, args=(self.grammars.vocabulary, child_end), daemon=True)
        self._process.start()
        child_end.close()  # so that the end of the process closes the pipe
        if self._is_stopped:
            _end(self._process)
        try:
            self._pipe.recv()
        except (EOFError, OSError):
            self._kill()
            raise ChildProcessError("the process that checks grammars did not start") from None

    def _kill(self) -> None:
        assert self._process is not None
        _end(self._process)
        self._process.join()
        self._process = None
        self._pipe.close()


def _context() -> SpawnContext | ForkServerContext:
    """A fork server with the imports done, where the system has it, else spawn. Never a fork of this process, which
    has threads and may hold a CUDA context."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "xgrammar"])
    return context


def _end(process: BaseProcess) -> None:
    """Kill a process and its forks."""
    with suppress(OSError, AttributeError):  # its group does not exist yet, or the system has no process groups
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()


def _work(vocabulary: tuple[list[bytes], int, frozenset[int]], pipe: Connection) -> None:
    """Main loop of the child. It ends when the parent's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    can_fork = hasattr(os, "fork")
    if can_fork:
        os.setpgid(0, 0)
        os.nice(NICENESS)
    grammars = Grammars(*vocabulary)
    pipe.send("ready")
    while True:
        try:
            grammar, limit_s = pipe.recv()
        except EOFError:
            return
        # Without fork, the parent kills this process at the limit.
        pipe.send(_check_in_fork(grammars, grammar, limit_s, pipe) if can_fork else (False, _check(grammars, grammar)))


def _check_in_fork(grammars: Grammars, grammar: Grammar, limit_s: float, pipe: Connection) -> tuple[bool, str]:
    """Returns (compiling took too long, reason of a failure). A timer signal ends the fork at the limit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pipe.close()
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            os.write(writer, _check(grammars, grammar).encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as result:
        why = result.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGALRM, _too_large(grammar)
    return False, why


def _check(grammars: Grammars, grammar: Grammar) -> str:
    """Compiles a grammar. Returns the reason why it cannot be used, or an empty text."""
    try:
        if grammars.compile(grammar).memory_size_bytes > MAX_BYTES:
            return _too_large(grammar)
    except ValueError as error:
        return str(error)
    except Exception:  # xgrammar fails in many ways on unusual grammars
        return f"the grammar ({grammar.kind}) cannot be used"
    return ""


def _too_large(grammar: Grammar) -> str:
    return f"the grammar ({grammar.kind}) cannot be used: it is too large or too complex"
