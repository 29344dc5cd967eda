"""Answering in several processes, which get prompts from the one that started them and give it rows."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from jetspec.data.prompts import BadPrompt, CutPrompt, Prompt
from jetspec.data.rows import Row

Results = Generator[Row | BadPrompt | CutPrompt, None, None]
Answer = Callable[[Iterator[Prompt]], Results]
"""Turns prompts into rows, in any order. A prompt that was cut has a row as well."""

LAST_WORDS_S = 10.0
"""How long a worker may take to end."""
HAND_OUT = 8
"""Prompts that a worker process gets at a time: few, so that none takes much more than it can answer at once."""


def answer_in_processes(starts: Sequence[Callable[[], Answer]], prompts: Iterator[Prompt]) -> Results:
    """Share prompts among worker processes, each with its own answerer, as they ask for more."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(starts))
    workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        for start in starts:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(start, theirs, threads), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            workers[ours] = process
        open_ends = list(workers)
        while open_ends:
            for end in wait(open_ends):
                assert isinstance(end, Connection)
                message = _receive(end, workers[end])
                if isinstance(message, Exception):
                    raise message
                if message == "more":
                    end.send(list(islice(prompts, HAND_OUT)))
                elif message == "done":
                    open_ends.remove(end)
                else:
                    yield message
        for worker in workers.values():
            worker.join(LAST_WORDS_S)
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join(LAST_WORDS_S)
            worker.kill()
            worker.join()


def _receive(end: Connection, process: multiprocessing.process.BaseProcess) -> Any:
    try:
        return end.recv()
    except (EOFError, ConnectionError):
        process.join()
        assert process.exitcode is not None
        raise ChildProcessError(f"a worker process ended early ({ending(process.exitcode)})") from None


def ending(status: int) -> str:
    """How a process ended, in words. Below 0 it was a signal, and the process had no time to say anything."""
    if status >= 0:
        return f"status {status}; see above"
    name = {item.value: item.name for item in signal.Signals}.get(-status, f"signal {-status}")
    return f"killed by {name}" + ("; memory may have run out" if name == "SIGKILL" else "")


def _work(start: Callable[[], Answer], pipe: Connection, num_threads: int) -> None:
    """A worker's life. When the parent is gone the pipe breaks, and the worker with it.

    It does not leave while a GPU works for it: that may end others, which share the GPU through MPS.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(num_threads)

    def prompts() -> Iterator[Prompt]:
        while True:
            pipe.send("more")
            batch = pipe.recv()
            if not batch:
                return
            yield from batch

    try:
        for result in start()(prompts()):
            pipe.send(result)
        pipe.send("done")
    except (EOFError, ConnectionError):
        return
    except (ValueError, OSError) as error:
        pipe.send(error)
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
