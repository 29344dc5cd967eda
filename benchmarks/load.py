"""`load`: requests to an OpenAI-compatible server, and their latencies.

Requests arrive at random, a given number per second on average (a Poisson process), or one after the other on several
connections. Times are those of the client.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.options import examples, with_options
from benchmarks.plots import TIMES, draw_latencies
from benchmarks.servers import CHAT, STREAMED, Timing, connect, first_model, follow
from jetspec.commands.compare import DEMO_PROMPTS
from jetspec.commands.screen import err, out, write_json
from jetspec.data.prompts import read_questions
from jetspec.files import read_text
from jetspec.progress import progress_bar
from jetspec.record import write_record

PERCENTILES = (50, 95, 99)
GIVEN_UP = "not answered in time"

Message = dict[str, str]
EPILOG = examples(
    "load --requests 64 --concurrency 8",
    "load --url http://127.0.0.1:9000 --rate 4 --requests 400 --data questions.jsonl --out load.json",
)


@dataclass(frozen=True)
class Load:
    """A load: where, how many, how often, and the settings of each request."""

    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000"
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 64
    concurrency: Annotated[int, typer.Option(min=1, help="Most at a time.")] = 8
    rate: Annotated[float | None, typer.Option(help="Arrivals per second, at random; else as answers come.")] = None
    """Requests beyond `concurrency` wait, which counts. None: each connection sends one by one."""
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens per answer.")] = 128
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0
    budget: Annotated[int | None, typer.Option(help="Nodes of a tree, of a JetSpec server; 1 is plain.")] = None
    model: Annotated[str | None, typer.Option(help="By default the first that the server has.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the url is {self.url!r}; it begins with http:// or https://")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise ValueError(f"rate is {self.rate}; it must be positive")

    @property
    def api(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    def arrivals(self) -> list[float]:
        """Seconds after the start at which requests arrive."""
        if self.rate is None:
            return [0.0] * self.requests
        rng = random.Random(self.seed)
        return list(accumulate(rng.expovariate(self.rate) for _ in range(self.requests)))


@with_options(Load)
def load(
    plan: Load,
    data: Annotated[Path | None, typer.Option(help="Prompts: a .jsonl file; else three built-in ones.")] = None,
    api_key: Annotated[Path | None, typer.Option(help="File with a key in its first line.")] = None,
    to: Annotated[Path | None, typer.Option("--out", help="Record to write, with a plot beside it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Put an OpenAI-compatible server under load, and time it.

    Exit status 1: some requests failed.
    """
    if to is not None and not to.parent.is_dir():
        raise FileNotFoundError(f"{to.parent} is not a folder; create it first")
    chats = read_chats(data, plan.requests)
    key = read_key(api_key) if api_key else None
    with progress_bar(total=plan.requests, desc="requests", unit="request", leave=False) as bar:
        timings = asyncio.run(send_load(plan, chats, key, bar.update))
    summary = summarize(timings)
    if to is not None:
        rows = [times_of(timing) for timing in timings]
        write_record(to, {"load": asdict(plan), **summary, "timings": rows})
        if good := [row for row in rows if "error" not in row]:
            draw_latencies(good, to.with_suffix(".svg"))
    if as_json:
        write_json(summary)
    else:
        show(summary)
    if summary["failed"]:
        raise typer.Exit(1)


def read_key(path: Path) -> str:
    """API key of any server; only ours needs long ones."""
    lines = read_text(path).split()
    if not lines:
        raise ValueError(f"{path} holds no key; write it in the first line")
    return lines[0]


def read_chats(path: Path | None, count: int | None) -> list[list[Message]]:
    """First questions of a file's conversations, or the built-in ones."""
    if path is None:
        return [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS]
    chats = []
    for question in read_questions(path, count):
        system = [{"role": "system", "content": question.system}] if question.system else []
        chats.append([*system, {"role": "user", "content": question.turns[0]}])
    return chats


async def send_load(
    load: Load,
    chats: Sequence[list[Message]],
    key: str | None,
    done: Callable[[], object] = lambda: None,
    max_wait_s: float = math.inf,
) -> list[Timing]:
    """Send all requests, taking chats by turns. A request that fails is counted, not repeated; one without an answer so
    long after the last arrival is given up."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    shared = {"model": load.model or first_model(load.api, headers), "max_tokens": load.max_tokens}
    shared |= {"temperature": load.temperature, **STREAMED}
    if load.budget is not None:
        shared["jetspec"] = {"budget": load.budget}
    async with connect(load.api, load.concurrency, headers) as client:
        slots = asyncio.Semaphore(load.concurrency)
        began, arrivals = time.perf_counter(), load.arrivals()
        end = began + arrivals[-1] + max_wait_s

        async def one(number: int) -> Timing:
            timing = Timing(began + arrivals[number])  # a client that wakes up late is slow, and that counts
            await asyncio.sleep(max(0.0, timing.arrived - time.perf_counter()))
            try:
                async with asyncio.timeout(end - time.perf_counter()), slots:
                    if load.rate is None:
                        timing.arrived = time.perf_counter()
                    await follow(client, CHAT, {**shared, "messages": chats[number % len(chats)]}, timing)
            except TimeoutError:
                timing.error = GIVEN_UP
            done()
            return timing

        return await asyncio.gather(*(one(number) for number in range(load.requests)))


def times_of(timing: Timing) -> dict[str, Any]:
    """Milliseconds of a request, and its counts; or its error."""
    if timing.error is not None:
        return {"error": timing.error}
    tokens, rounds = timing.usage["completion_tokens"], timing.usage.get("jetspec", {}).get("rounds", 0)
    return {
        "first_token_ms": (timing.chunks[0] - timing.arrived) * 1000,
        "between_tokens_ms": (timing.chunks[-1] - timing.chunks[0]) / max(tokens - 1, 1) * 1000,
        "whole_ms": (timing.ended - timing.arrived) * 1000,
        "tokens": tokens,
        "rounds": rounds,
    }


def summarize(timings: Sequence[Timing]) -> dict[str, Any]:
    """Percentiles in milliseconds, throughput over the whole time, and errors by kind."""
    good = [timing for timing in timings if timing.error is None]
    errors = dict(Counter(timing.error for timing in timings if timing.error))
    summary: dict[str, Any] = {"requests": len(timings), "failed": len(timings) - len(good), "errors": errors}
    if not good:
        return summary
    rows, seconds = list(map(times_of, good)), max(t.ended for t in good) - min(t.arrived for t in good)
    tokens, rounds = (sum(row[name] for row in rows) for name in ("tokens", "rounds"))
    return summary | {
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_round": tokens / rounds if rounds else None,
        **{name: percentiles([row[name] for row in rows]) for name in TIMES},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def show(summary: dict[str, Any]) -> None:
    for error, count in summary["errors"].items():
        err().print(f"{count} × {error}", style="red", markup=False)
    if "seconds" not in summary:
        return
    table = Table("milliseconds", box=None)
    for p in PERCENTILES:
        table.add_column(f"p{p}", justify="right")
    for key, title in TIMES.items():
        table.add_row(title, *(f"{value:,.1f}" for value in summary[key].values()))
    out().print(table)
    speed = f"{summary['tokens_per_s']:,.1f} tokens/s · {summary['requests_per_s']:.2f} requests/s"
    per_round = summary["tokens_per_round"]
    out().print(speed + (f" · {per_round:.2f} tokens per round" if per_round else ""))
