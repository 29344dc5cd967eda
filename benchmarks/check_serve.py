"""Many clients at once on a server process: no error, no leak, no wrong text, nobody left behind. Writes a record.

Every answer is greedy and must equal the answer to the same request alone; every few requests a client hangs up in
the middle. At the end, pages, threads and file descriptors must be back where they were.

    python -m benchmarks.check_serve --seconds 120 --streams 64 --out docs/results/serve_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from jetspec.record import current_commit, write_record

HANG_UPS = 0.1
"""Share of requests whose client leaves in the middle."""
FAIR = 0.5
"""The slowest lane must get through at least this share of the median lane's requests."""
WARM_UP_S = 1.0
REST_S = 20.0
"""Time that the server has to come to rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--model", help="a name, folder or GGUF file; by default a tiny random one")
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    args = parser.parse_args()

    commit = current_commit()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(tiny_model(Path(folder)))
        results = check(model, args.streams, args.seconds)
    write_record(args.out, {"model": args.model or "tiny", **results}, commit)
    print(json.dumps(results))
    raise SystemExit(1 if results["problems"] else 0)


def tiny_model(folder: Path) -> Path:
    """Two random layers over bytes, as the tests use them."""
    from tests.train.tiny_model import write_model

    return write_model(folder / "tiny")


class ServerProcess:
    """`jetspec serve` as a process of its own, on a free port. Its log goes to a file: nobody reads a pipe."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "jetspec", "serve", "--model", model, "--port", "0", *options]
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self._log)

    def __enter__(self) -> ServerProcess:
        while self.process.poll() is None:
            if found := re.search(r"Serving (\S+) at (http://\S+)/v1", self.log):
                self.model, self.url = found.groups()
                return self
            time.sleep(0.05)
        raise RuntimeError(self.log)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def footprint(self) -> dict[str, int]:
        """What must not grow."""
        proc = Path(f"/proc/{self.process.pid}")
        metrics = httpx.get(f"{self.url}/metrics", headers={"Connection": "close"}).text
        pages = re.search(r"^jetspec:pages_in_use (\S+)", metrics, re.MULTILINE)
        assert pages is not None
        return {
            "pages": int(float(pages[1])),
            "threads": len(list((proc / "task").iterdir())),
            "files": len(list((proc / "fd").iterdir())),
        }


@dataclass
class Lane:
    """A client that asks again and again."""

    number: int
    asked: int = 0
    answered: int = 0
    tokens: int = 0


@dataclass
class Check:
    """One run: the requests, what each answers alone, and what went wrong."""

    url: str
    model: str
    bodies: list[dict[str, Any]]
    alone: list[str] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    hang_ups: int = 0

    async def ask(self, client: httpx.AsyncClient, number: int, leave_after: int | None = None) -> str | None:
        """The streamed text of an answer; None when it failed or was left in the middle."""
        pieces: list[str] = []
        async with client.stream("POST", "/v1/completions", json=self.bodies[number]) as answer:
            if answer.status_code != 200:
                self.problems[f"status {answer.status_code}"] += 1
                return None
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        self.problems[chunk["error"]["message"]] += 1
                        return None
                    pieces.append(chunk["choices"][0]["text"])
                if leave_after is not None and len(pieces) > leave_after:
                    self.hang_ups += 1
                    return None
        self.problems["a stream without an end"] += 1
        return None

    async def run_alone(self) -> None:
        async with self.client() as client:
            self.alone = [await self.ask(client, number) or "" for number in range(len(self.bodies))]

    async def run_together(self, lanes: Sequence[Lane], seconds: float) -> None:
        end = time.monotonic() + seconds
        async with self.client() as client:
            await asyncio.gather(*(self.drive(client, lane, end) for lane in lanes))

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits)

    async def drive(self, client: httpx.AsyncClient, lane: Lane, end: float) -> None:
        """All lanes ask the same requests, each from another one on, so that their progress can be compared."""
        rng = random.Random(lane.number)
        while time.monotonic() < end:
            number = (lane.number + lane.asked) % len(self.bodies)
            lane.asked += 1
            try:
                text = await self.ask(client, number, rng.randrange(8) if rng.random() < HANG_UPS else None)
            except httpx.HTTPError as error:
                self.problems[type(error).__name__] += 1
                continue
            if text is None:
                continue
            lane.answered += 1
            lane.tokens += self.bodies[number]["max_tokens"]
            if text != self.alone[number]:
                self.problems["an answer differs from the one alone"] += 1


def requests_for(model: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy requests of many lengths, some of which begin alike. They end at their limit, so work can be compared."""
    rng = random.Random(seed)
    shared = "".join(rng.choices("abcdefgh ", k=40))
    bodies = []
    for _ in range(count):
        own = "".join(rng.choices("abcdefghij ", k=rng.randint(1, 60)))
        bodies.append(
            {
                "model": model,
                "prompt": rng.choice((shared, "")) + own,
                "max_tokens": rng.randint(4, 48),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
    return bodies


def check(model: str, streams: int, seconds: float, num_requests: int = 40) -> dict[str, Any]:
    with ServerProcess(model, "--max-batch", "16", "--max-queue", str(streams)) as server:
        run = Check(server.url, server.model, requests_for(server.model, num_requests))
        asyncio.run(run.run_alone())
        asyncio.run(run.run_together([Lane(number) for number in range(streams)], WARM_UP_S))
        before = rest(server, {"pages": 0})
        lanes = [Lane(number) for number in range(streams)]
        asyncio.run(run.run_together(lanes, seconds))
        after = rest(server, before)
    asked = sorted(lane.asked for lane in lanes)
    for name, value in after.items():
        if value > before[name]:
            run.problems[f"{value - before[name]} {name} did not come back"] += 1
    if asked[0] < FAIR * statistics.median(asked):
        run.problems["a lane was left behind"] += 1
    return {
        "streams": streams,
        "seconds": seconds,
        "answers": sum(lane.answered for lane in lanes),
        "hang_ups": run.hang_ups,
        "tokens_per_s": sum(lane.tokens for lane in lanes) / seconds,
        "requests_of_slowest_lane": asked[0],
        "requests_of_median_lane": statistics.median(asked),
        "before": before,
        "after": after,
        "problems": dict(run.problems),
    }


def rest(server: ServerProcess, before: dict[str, int]) -> dict[str, int]:
    """The footprint once nothing more comes back."""
    deadline = time.monotonic() + REST_S
    while True:
        now = server.footprint()
        if all(now[name] <= most for name, most in before.items()) or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


if __name__ == "__main__":
    main()
