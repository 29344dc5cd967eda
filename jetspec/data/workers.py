"""Worker processes that answer prompts. The parent process sends prompts and receives rows."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from jetspec.data.prompts import BadPrompt, CutPrompt, Prompt
from jetspec.data.rows import Row, RunTally

Results = Generator[Row | BadPrompt | CutPrompt, None, None]
Answer = Callable[[Iterator[Prompt]], Results]
"""Turns prompts into rows, in any order. A `CutPrompt` comes with a row as well."""

EXIT_S = 10.0
"""Seconds that a worker may take to exit."""
PROMPTS_PER_MESSAGE = 8
"""Prompts sent to a worker at a time: few, so that workers finish at about the same time."""


def places(device: str, jobs: int | None) -> list[str]:
    """The device of each process: all GPUs in turn unless one is named; by default one process per GPU."""
    num_gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    names = [f"cuda:{i}" for i in range(num_gpus)] or ["cpu" if device == "auto" else device]
    return [names[i % len(names)] for i in range(jobs or len(names))]


def in_processes(places: Sequence[str]) -> str:
    return f"in {len(places)} process{'es' if len(places) > 1 else ''} on {', '.join(dict.fromkeys(places))}"


def answer_all(starts: Sequence[Callable[[], Answer]], prompts: Iterator[Prompt], tally: RunTally) -> Results:
    """Results of one answerer, or of several, each in a process of its own."""

    def timed() -> Iterator[Prompt]:
        tally.began = time.monotonic()  # the first prompt is taken once the models are loaded
        yield from prompts

    return starts[0]()(timed()) if len(starts) == 1 else answer_in_processes(starts, timed())


def answer_in_processes(starts: Sequence[Callable[[], Answer]], prompts: Iterator[Prompt]) -> Results:
    """Distributes prompts over worker processes, each with its own answerer, on their request."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(starts))
    workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        for start in starts:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(start, theirs, threads), daemon=True)
            process.start()
            theirs.close()  # the pipe then closes with the process
            workers[ours] = process
        open_ends = list(workers)
        while open_ends:
            for end in wait(open_ends):
                assert isinstance(end, Connection)
                message = _receive(end, workers[end])
                if isinstance(message, Exception):
                    raise message
                if message == "more":
                    end.send(list(islice(prompts, PROMPTS_PER_MESSAGE)))
                elif message == "done":
                    open_ends.remove(end)
                else:
                    yield message
        for worker in workers.values():
            worker.join(EXIT_S)
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join(EXIT_S)
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
    """Describes the exit status of a process. A negative one is the number of a signal."""
    if status >= 0:
        return f"status {status}; see above"
    name = {item.value: item.name for item in signal.Signals}.get(-status, f"signal {-status}")
    return f"killed by {name}" + ("; memory may have run out" if name == "SIGKILL" else "")


def _work(start: Callable[[], Answer], pipe: Connection, num_threads: int) -> None:
    """Main function of a worker. It ends when the pipe breaks because the parent is gone.

    It exits only after its GPU work is done: exiting earlier may kill other processes that share the GPU through MPS.
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
