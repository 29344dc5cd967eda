"""A server under load at several rates, with and without speculation: how much it answers, how soon. Writes a record.

Both servers get the same prompts at the same times, as a Poisson process. Each first gets batches of every size, so
that what is compiled or captured for one is ready before anything is timed.

    python -m benchmarks.check_rates --data questions --seconds 20 --out docs/results/serve_rates_h200.json
    python -m benchmarks.plot_rates --record docs/results/serve_rates_h200.json --page docs/serving.md \\
        --plots docs/plots
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

from benchmarks.check_serve import ServerProcess
from benchmarks.command_load import read_chats
from benchmarks.load import GIVEN_UP, Load, Message, Part, Timing, send_load, summarize
from benchmarks.plot_rates import fill_page
from jetspec.engine.llm import DTYPES, choose_device, choose_dtype
from jetspec.engine.sizes import batch_sizes
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import current_commit, write_record

SERVERS: dict[str, tuple[str, ...]] = {"speculative": (), "plain": ("--drafter", "none")}
"""The options in which they differ."""
RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
PASSES = 2
"""Times that the warm-up sends every size of batch: the second time, prompts are found in the cache."""
BURST_S = 2.0
"""Length of its last load, which arrives as those that are timed."""
COLD_S = 300.0
"""Longest that a load of it may take; the first waits for everything to be compiled."""
HEAD_START_S = 0.2
"""Time that a load takes to reach the processes that send it, so that they begin together."""
MOST_OPEN = 400
"""Connections at a time, within what servers and systems allow. Who comes beyond them waits, and that counts."""
SHOWN_LOG = 2000
"""Characters of the log of a server that is dead or dumb."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name, folder or GGUF file")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--dtype", default="auto", help=f"one of {', '.join(DTYPES)}")
    parser.add_argument("--max-batch", type=int, default=32, help="answers that a server writes together")
    parser.add_argument(
        "--server-option", action="append", default=[], metavar="WORDS", help='of jetspec serve, as "--budget 32"'
    )
    parser.add_argument("--data", type=Path, help="prompts: JSONL with `turns`, or a folder; by default built-in ones")
    parser.add_argument("--rates", type=read_rates, default=RATES, help="requests per second, separated by commas")
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals, per rate")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for answers after the last arrival")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--clients", type=int, default=4, help="processes that send: one alone may be the slower side")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, and of the order of prompts")
    parser.add_argument("--out", type=Path, required=True, help="where the record goes, anew after every rate")
    parser.add_argument("--page", type=Path, help="page whose marks are filled from the record")
    parser.add_argument("--plots", type=Path, default=Path("docs/plots"), help="folder for the page's picture")
    args = parser.parse_args(words)
    try:
        run = Run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    run.measure()
    if args.page:
        fill_page(args.out, args.page, args.plots)
    raise SystemExit(1 if run.problems else 0)


def read_rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(word) for word in text.split(","))
    if min(rates) <= 0:
        raise ValueError("rates are positive")
    return rates


@dataclass(frozen=True)
class Course:
    """What comes at one rate, whatever answers."""

    rate: float | None
    """None: all at once."""
    chats: list[list[Message]]


class Clients:
    """Processes that send a load together. One is busy with some thousand pieces of text per second."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def send(self, load: Load, chats: list[list[Message]], patience_s: float) -> tuple[list[Timing], float]:
        """What became of each request, and how busy the busiest process was: near 1, it measured itself."""
        began = time.perf_counter() + HEAD_START_S
        parts = [Part(first, self.count, began, patience_s) for first in range(self.count)]
        sent = [self._pool.submit(send_part, load, chats, part) for part in parts]
        timings = [Timing(began)] * load.requests
        busy = []
        for part, future in zip(parts, sent, strict=True):
            timings[part.first :: part.step], share = future.result()
            busy.append(share)
        return timings, max(busy)


def send_part(load: Load, chats: list[list[Message]], part: Part) -> tuple[list[Timing], float]:
    """Send a part of a load, and say for which share of the time this kept the process busy."""
    wall, busy = time.perf_counter(), time.process_time()
    timings = asyncio.run(send_load(load, chats, None, part=part))
    return timings, (time.process_time() - busy) / (time.perf_counter() - wall)


class Run:
    """Both servers at every rate, and the record of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.commit = args, current_commit()
        if args.seconds <= 0 or args.clients < 1:
            raise ValueError("seconds must be positive, and there must be a client")
        device = choose_device(args.device)
        dtype = choose_dtype(args.dtype, device)
        self.is_exact = dtype.itemsize == 4
        """Whether there are no near ties, so that both must write the same."""
        chats = read_chats(args.data, None)
        random.Random(args.seed).shuffle(chats)
        prompts = cycle(chats)
        self.warm_up = list(warm_up_courses(prompts, args.max_batch, max(args.rates)))
        self.courses = [Course(rate, list(islice(prompts, max(1, round(rate * args.seconds))))) for rate in args.rates]
        self.texts: dict[str, dict[str, list[str | None]]] = {name: {} for name in SERVERS}
        self.problems: list[str] = []
        self.record: dict[str, Any] = {
            "model": Path(args.model).name,
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "data": args.data.name if args.data else "built-in",
            "prompts": len(chats),
            **{name: getattr(args, name) for name in ("max_batch", "seconds", "max_tokens", "clients", "seed")},
            "servers": {name: {} for name in SERVERS},
            "texts": {},
            "problems": self.problems,
        }

    def measure(self) -> None:
        with Clients(self.args.clients) as clients:
            for name in SERVERS:
                try:
                    with ServerProcess(self.args.model, *self.options(name)) as server:
                        self.measure_server(name, server, clients)
                except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
                    self.fail(f"{name}: {error}")

    def options(self, name: str) -> list[str]:
        """A queue without a practical end: who waits long is to be seen, not refused."""
        args = self.args
        given = [word for words in args.server_option for word in shlex.split(words)]
        queue = ["--max-batch", str(args.max_batch), "--max-queue", str(MOST_OPEN)]
        return ["--device", args.device, "--dtype", args.dtype, *queue, *given, *SERVERS[name]]

    def measure_server(self, name: str, server: ServerProcess, clients: Clients) -> None:
        began = time.perf_counter()
        for course in self.warm_up:
            timings, _ = self.send(course, server, clients, COLD_S)
            check_alive(server, timings)
        models = httpx.get(f"{server.url}/v1/models", timeout=self.args.max_admission_delay).json()
        warm_up_s = time.perf_counter() - began
        print(f"{name}: warm after {warm_up_s:.0f} s", flush=True)
        rates: dict[str, Any] = {}
        self.record["servers"][name] = {
            "options": self.options(name),
            **models["data"][0]["jetspec"],
            "warm_up_s": warm_up_s,
            "rates": rates,
        }
        for course in self.courses:
            timings, client_busy = self.send(course, server, clients, self.args.max_admission_delay)
            rate = f"{course.rate:g}"
            rates[rate] = {**summarize(timings), **behind(timings), "client_busy": client_busy}
            self.texts[name][rate] = [None if t.error else t.text for t in timings]
            self.compare(rate)
            print(f"{name}, {rate} requests/s: {describe(rates[rate])}", flush=True)
            if failed := {why: n for why, n in rates[rate]["errors"].items() if why != GIVEN_UP}:
                self.problems.append(f"{name}, {rate} requests/s: {failed}")
            check_alive(server, timings)
            self.save()

    def send(
        self, course: Course, server: ServerProcess, clients: Clients, patience_s: float
    ) -> tuple[list[Timing], float]:
        """One load. A server that dies in it makes its requests fail, so nobody waits for ever."""
        count, args = len(course.chats), self.args
        most = -(-min(count, MOST_OPEN) // clients.count)
        load = Load(server.url, count, most, course.rate, args.max_tokens, 0.0, None, server.model, args.seed)
        return clients.send(load, course.chats, patience_s)

    def compare(self, rate: str) -> None:
        """Count the requests that both answered, and those of them with another text."""
        if any(rate not in texts for texts in self.texts.values()):
            return
        answers = zip(*(texts[rate] for texts in self.texts.values()), strict=True)
        both = [texts for texts in answers if None not in texts]
        different = sum(len(set(texts)) > 1 for texts in both)
        self.record["texts"][rate] = {"compared": len(both), "different": different}
        if different and self.is_exact:
            self.problems.append(f"{rate} requests/s: {different} of {len(both)} texts differ")

    def fail(self, problem: str) -> None:
        print(problem, flush=True)
        self.problems.append(problem)
        self.save()

    def save(self) -> None:
        write_record(self.args.out, self.record, self.commit)


def warm_up_courses(prompts: Iterator[list[Message]], max_batch: int, rate: float) -> Iterator[Course]:
    """Every size of batch that a server captures, then some seconds as they will come."""
    chats = list(islice(prompts, max_batch))
    for size in batch_sizes(max_batch) * PASSES:
        yield Course(None, chats[:size])
    yield Course(rate, list(islice(prompts, max(1, round(rate * BURST_S)))))


def check_alive(server: ServerProcess, timings: Sequence[Timing]) -> None:
    """Nothing more is sent to a server that is gone, or that will not answer any more."""
    errors = {timing.error for timing in timings}
    if server.process.poll() is not None:
        what = f"the server died with status {server.process.returncode}"
    elif errors == {GIVEN_UP}:
        what = "the server does not answer"
    elif None not in errors and httpx.get(f"{server.url}/health").is_error:
        what = "the server's engine failed"
    else:
        return
    raise RuntimeError(f"{what}\n{server.log.strip()[-SHOWN_LOG:]}")


def behind(timings: Sequence[Timing]) -> dict[str, Any]:
    """Where the server stood when the last request came: answers begun, requests without a token, time to the end."""
    last = max(timing.arrived for timing in timings)
    earlier = [t for t in timings if t.arrived < last and t.error in (None, GIVEN_UP)]
    left = [t for t in earlier if t.error or t.ended > last]
    waiting = [t for t in left if not t.chunks or t.chunks[0] > last]
    return {
        "begun_at_the_end": len(left) - len(waiting),
        "waiting_at_the_end": len(waiting),
        "given_up": sum(t.error == GIVEN_UP for t in timings),
        "drain_s": max((t.ended - last for t in timings if t.error is None), default=None),
    }


def describe(rate: dict[str, Any]) -> str:
    left = f"{rate['waiting_at_the_end']} waiting at the end, {rate['failed']} of {rate['requests']} failed"
    if "seconds" not in rate:
        return left
    first, between = rate["first_token_ms"]["p50"], rate["between_tokens_ms"]["p50"]
    return f"{rate['tokens_per_s']:,.0f} tokens/s, first token {first:.0f} ms, between {between:.1f} ms, {left}"


if __name__ == "__main__":
    main()
