"""`serve check` and `serve rates`: server processes under load.

`check` looks for errors, leaks, wrong texts and starvation. `rates` measures throughput and latency at several rates,
with and without speculation: both servers get the same prompts at the same times, as a Poisson process.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import httpx
import pandas as pd
import typer

from benchmarks.load import GIVEN_UP, Load, Message, read_chats, send_load, summarize
from benchmarks.options import DEFAULT, Device, Dtype, Model, RecordFile, examples, numbers, with_options
from benchmarks.servers import COMPLETIONS, LEFT, STREAMED, ServerProcess, Timing, connect, follow
from jetspec.engine.llm import choose_device, choose_dtype
from jetspec.engine.runner import batch_sizes
from jetspec.record import current_commit, write_record

HANG_UPS = 0.1
"""Share of requests whose client disconnects early."""
FAIR = 0.5
"""Least share of the median client's requests that the slowest client must complete."""
WARM_UP_S = 1.0

SERVERS: dict[str, tuple[str, ...]] = {"speculative": (), "plain": ("--drafter", "none")}
"""Servers of `rates`, by the options in which they differ."""
PASSES = 2
"""Repeats of every batch size in the warm-up: the second time, prompts are found in the cache."""
BURST_S = 2.0
"""Length of the last load of the warm-up, which arrives like the timed ones."""
COLD_S = 300.0
"""Longest wait for a load of the warm-up, compilation included."""
MOST_OPEN = 400
"""Most connections at a time; requests beyond them wait, which counts."""
SHOWN_LOG = 2000
"""Characters shown of a failed server's log."""

app = typer.Typer(no_args_is_help=True)


# -- check


@dataclass
class Check:
    """Requests with their expected texts, and the problems found."""

    url: str
    bodies: list[dict[str, Any]]
    alone: list[str | None] = field(default_factory=list)
    """Answer to each request, sent alone."""
    problems: Counter[str] = field(default_factory=Counter)
    hang_ups: int = 0

    async def ask(self, http: httpx.AsyncClient, number: int, leave_after: int | None = None) -> str | None:
        """Streamed text of an answer. None: it failed, or the client left."""
        answer = Timing(time.perf_counter())
        await follow(http, COMPLETIONS, self.bodies[number], answer, leave_after)
        if answer.error == LEFT:
            self.hang_ups += 1
        elif answer.error is not None:
            self.problems[answer.error] += 1
        return answer.text if answer.error is None else None

    async def run_alone(self) -> None:
        async with connect(f"{self.url}/v1") as http:
            self.alone = [await self.ask(http, number) for number in range(len(self.bodies))]

    async def run_together(self, streams: int, seconds: float) -> pd.DataFrame:
        """Clients that send requests for so long: a row each with `asked`, `answered` and `tokens`."""
        end = time.monotonic() + seconds
        async with connect(f"{self.url}/v1") as http:
            return pd.DataFrame(await asyncio.gather(*(self.drive(http, client, end) for client in range(streams))))

    async def drive(self, http: httpx.AsyncClient, client: int, end: float) -> dict[str, int]:
        """Send all requests in turn, each client from another one on, so that their progress can be compared."""
        rng, asked, answered, tokens = random.Random(client), 0, 0, 0
        while time.monotonic() < end:
            number = (client + asked) % len(self.bodies)
            asked += 1
            text = await self.ask(http, number, rng.randrange(8) if rng.random() < HANG_UPS else None)
            if text is None:
                continue
            answered, tokens = answered + 1, tokens + self.bodies[number]["max_tokens"]
            if text != self.alone[number]:
                self.problems["an answer differs from the one alone"] += 1
        return {"asked": asked, "answered": answered, "tokens": tokens}


def requests_for(model: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy requests of many lengths, some with a common prefix. They end at their limit, so work can be compared."""
    rng = random.Random(seed)
    shared = "".join(rng.choices("abcdefgh ", k=40))
    greedy = {"model": model, "temperature": 0, "ignore_eos": True, **STREAMED}
    bodies = []
    for _ in range(count):
        own = "".join(rng.choices("abcdefghij ", k=rng.randint(1, 60)))
        bodies.append({**greedy, "prompt": rng.choice((shared, "")) + own, "max_tokens": rng.randint(4, 48)})
    return bodies


def check(model: str, streams: int, seconds: float, num_requests: int = 40) -> dict[str, Any]:
    """Run a server under load and compare its answers and footprint with those at rest."""
    with ServerProcess(model, "--max-batch", "16", "--max-queue", str(streams)) as server:
        run = Check(server.url, requests_for(server.model, num_requests))
        asyncio.run(run.run_alone())
        asyncio.run(run.run_together(streams, WARM_UP_S))
        before = server.settled({"pages": 0})
        clients = asyncio.run(run.run_together(streams, seconds))
        after = server.settled(before)
    slowest, median = int(clients.asked.min()), float(clients.asked.median())
    for name, value in after.items():
        if value > before[name]:
            run.problems[f"{value - before[name]} {name} were not released"] += 1
    if slowest < FAIR * median:
        run.problems["a client was starved"] += 1
    return {
        "streams": streams,
        "seconds": seconds,
        "answers": int(clients.answered.sum()),
        "hang_ups": run.hang_ups,
        "tokens_per_s": int(clients.tokens.sum()) / seconds,
        "requests_of_slowest_lane": slowest,
        "requests_of_median_lane": median,
        "before": before,
        "after": after,
        "problems": dict(run.problems),
    }


@app.command("check", epilog=examples("serve check --seconds 120 --streams 64 --out docs/results/serve_cpu.json"))
def check_server(
    out: RecordFile,
    seconds: Annotated[float, typer.Option(help="Length of the load.")] = 120,
    streams: Annotated[int, typer.Option(min=1, help="Clients at the same time.")] = 64,
    model: Annotated[str | None, typer.Option(help="Name, folder or GGUF file; by default a tiny random one.")] = None,
) -> None:
    """Put many clients on a server: no error, no leak, no wrong text, no starved client.

    Every greedy answer must equal the answer to the same request alone; some clients disconnect early. At the end,
    pages, threads and file descriptors must be released. Exit status 1: problems were found.
    """
    commit = current_commit()
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            from tests.train.tiny_model import write_model

            results = check(str(write_model(Path(folder) / "tiny")), streams, seconds)
        else:
            results = check(model, streams, seconds)
    write_record(out, {"model": model or "tiny", **results}, commit)
    print(json.dumps(results))
    if results["problems"]:
        raise typer.Exit(1)


# -- rates


@dataclass(frozen=True)
class Phase:
    """Requests at one rate, the same for all servers."""

    rate: float | None
    """None: all at once."""
    chats: list[list[Message]]


def send_share(load: Load, chats: list[list[Message]], max_wait_s: float) -> tuple[list[Timing], float]:
    """Send the share of a process; timings, and its CPU share."""
    wall, busy = time.perf_counter(), time.process_time()
    timings = asyncio.run(send_load(load, chats, None, max_wait_s=max_wait_s))
    return timings, (time.process_time() - busy) / (time.perf_counter() - wall)


@dataclass
class Rates:
    """Both servers at every rate, and the record of it."""

    out: RecordFile
    model: Model = DEFAULT
    device: Device = "auto"
    dtype: Dtype = "auto"
    max_batch: Annotated[int, typer.Option(min=1, help="Answers that a server writes together.")] = 32
    server_option: Annotated[list[str] | None, typer.Option(help='Options of jetspec serve, as "--budget 32".')] = None
    data: Annotated[Path | None, typer.Option(help="Prompts: JSONL file or folder; by default built-in.")] = None
    rates: Annotated[str, typer.Option(help="Requests per second, separated by commas.")] = "1,2,4,8,16,32"
    seconds: Annotated[float, typer.Option(help="Seconds of arrivals per rate.")] = 20
    max_wait: Annotated[float, typer.Option(help="Seconds to wait for answers after the last arrival.")] = 60
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256
    clients: Annotated[int, typer.Option(min=1, help="Sending processes: one alone may be the slower side.")] = 4
    seed: Annotated[int, typer.Option(help="Seed of arrivals, and of the order of prompts.")] = 0

    def __post_init__(self) -> None:
        self.commit, per_s = current_commit(), numbers(self.rates, float, 1e-6, "--rates")
        if self.seconds <= 0:
            raise ValueError("seconds must be positive")
        device = choose_device(self.device)
        dtype = choose_dtype(self.dtype, device)
        self.is_exact = dtype.itemsize == 4  # no near ties, so both must write the same
        chats = read_chats(self.data, None)
        random.Random(self.seed).shuffle(chats)
        prompts = cycle(chats)
        self.warm_up = list(warm_up_phases(prompts, self.max_batch, max(per_s)))
        self.phases = [Phase(rate, list(islice(prompts, max(1, round(rate * self.seconds))))) for rate in per_s]
        self.texts: dict[str, dict[str, list[str | None]]] = {name: {} for name in SERVERS}
        self.problems: list[str] = []
        self.record: dict[str, Any] = {
            "model": Path(self.model).name,
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "data": self.data.name if self.data else "built-in",
            "prompts": len(chats),
            **{name: getattr(self, name) for name in ("max_batch", "seconds", "max_tokens", "clients", "seed")},
            "servers": {name: {} for name in SERVERS},
            "texts": {},
            "problems": self.problems,
        }

    def measure(self) -> None:
        """Measure both servers. Several processes send: one handles some thousand pieces of text per second."""
        with ProcessPoolExecutor(self.clients, mp_context=get_context("spawn")) as senders:
            for name in SERVERS:
                try:
                    with ServerProcess(self.model, *self.options(name)) as server:
                        self.measure_server(name, server, senders)
                except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: {error}", flush=True)
                    self.problems.append(f"{name}: {error}")
                    self.save()

    def options(self, name: str) -> list[str]:
        """Options of a server. Its queue is long enough that requests wait instead of being refused."""
        given = [word for words in self.server_option or () for word in shlex.split(words)]
        queue = ["--max-batch", str(self.max_batch), "--max-queue", str(MOST_OPEN)]
        return ["--device", self.device, "--dtype", self.dtype, *queue, *given, *SERVERS[name]]

    def measure_server(self, name: str, server: ServerProcess, senders: ProcessPoolExecutor) -> None:
        began = time.perf_counter()
        for phase in self.warm_up:
            timings, _ = self.send(phase, server, senders, COLD_S)
            check_alive(server, timings)
        models = httpx.get(f"{server.url}/v1/models", timeout=self.max_wait).json()
        warm_up_s = time.perf_counter() - began
        print(f"{name}: warm after {warm_up_s:.0f} s", flush=True)
        rates: dict[str, Any] = {}
        about = {"options": self.options(name), **models["data"][0]["jetspec"], "warm_up_s": warm_up_s}
        self.record["servers"][name] = {**about, "rates": rates}
        for phase in self.phases:
            timings, client_busy = self.send(phase, server, senders, self.max_wait)
            rate = f"{phase.rate:g}"
            rates[rate] = {**summarize(timings), **backlog(timings), "client_busy": client_busy}
            self.texts[name][rate] = [None if t.error else t.text for t in timings]
            self.compare(rate)
            print(f"{name}, {rate} requests/s: {describe(rates[rate])}", flush=True)
            if failed := {error: n for error, n in rates[rate]["errors"].items() if error != GIVEN_UP}:
                self.problems.append(f"{name}, {rate} requests/s: {failed}")
            check_alive(server, timings)
            self.save()

    def send(
        self, phase: Phase, server: ServerProcess, senders: ProcessPoolExecutor, max_wait_s: float
    ) -> tuple[list[Timing], float]:
        """Timings of one load, and the largest CPU share of a sending process: near 1, the senders limit the rate.

        Shares of a Poisson process are Poisson processes. If the server dies, its requests fail.
        """
        count, sent = len(phase.chats), []
        for number in range(min(self.clients, count)):
            chats, rate = phase.chats[number :: self.clients], phase.rate and phase.rate / self.clients
            most, seed = -(-min(count, MOST_OPEN) // self.clients), self.seed + number
            load = Load(server.url, len(chats), most, rate, self.max_tokens, 0.0, None, server.model, seed)
            sent.append(senders.submit(send_share, load, chats, max_wait_s))
        timings, busy = [Timing(0.0)] * count, [future.result()[1] for future in sent]
        for number, future in enumerate(sent):
            timings[number :: self.clients] = future.result()[0]
        return timings, max(busy)

    def compare(self, rate: str) -> None:
        if any(rate not in texts for texts in self.texts.values()):
            return
        answers = zip(*(texts[rate] for texts in self.texts.values()), strict=True)
        both = [texts for texts in answers if None not in texts]
        different = sum(len(set(texts)) > 1 for texts in both)
        self.record["texts"][rate] = {"compared": len(both), "different": different}
        if different and self.is_exact:
            self.problems.append(f"{rate} requests/s: {different} of {len(both)} texts differ")

    def save(self) -> None:
        write_record(self.out, self.record, self.commit)


def warm_up_phases(prompts: Iterator[list[Message]], max_batch: int, rate: float) -> Iterator[Phase]:
    """Every batch size that a server captures, then some seconds at the highest rate."""
    chats = list(islice(prompts, max_batch))
    for size in batch_sizes(max_batch) * PASSES:
        yield Phase(None, chats[:size])
    yield Phase(rate, list(islice(prompts, max(1, round(rate * BURST_S)))))


def check_alive(server: ServerProcess, timings: Sequence[Timing]) -> None:
    """Raise if the server died or does not answer any more."""
    errors = {timing.error for timing in timings}
    if server.process.poll() is not None:
        problem = f"the server died with status {server.process.returncode}"
    elif errors == {GIVEN_UP}:
        problem = "the server does not answer"
    elif None not in errors and httpx.get(f"{server.url}/health").is_error:
        problem = "the server's engine failed"
    else:
        return
    raise RuntimeError(f"{problem}\n{server.log.strip()[-SHOWN_LOG:]}")


def backlog(timings: Sequence[Timing]) -> dict[str, Any]:
    """Unfinished requests when the last one arrived: answers begun, requests without a token, time to the end."""
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


@app.command("rates", epilog=examples("serve rates --data questions --out docs/results/serve_rates_h200.json"))
@with_options(Rates)
def measure_rates(run: Rates) -> None:
    """Measure throughput and latency at several rates, with and without speculation.

    Each server first gets batches of every size, so that nothing is compiled while it is timed. The record is written
    after every rate; `pages` makes the table and the plot of it. Exit status 1: a request failed, or texts differ.
    """
    run.measure()
    if run.problems:
        raise typer.Exit(1)
