"""A long run with random arrivals, cancels and shortages of pages, watched for leaks and for wrong text."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from jetspec.bench.precision import FreshPass, Texts, cached_rows, find_differences
from jetspec.engine.engine import Engine
from jetspec.engine.graphs import batch_sizes
from jetspec.types import Completion, Request, SamplingParams

KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=1),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=2),
}
PHASE = 250
"""Rounds of many arrivals, then as many of few: batches grow to their limit and shrink to nothing."""
BUSY, QUIET, CANCELS = 0.5, 0.02, 0.02
"""Chance per step that a request arrives in either phase, and that one is cancelled."""
QUEUE = 3
"""Requests at a time, as a multiple of the batch."""
CLOSE = 1e-3
"""K and V may be off from a fresh pass by this share of the largest; those of another token are off by about 1."""
PATIENCE = 200
"""Steps without a round after which requests are taken to wait for ever."""
SLACK_BYTES = 1 << 20

PlainTexts = Mapping[str, Mapping[str, Sequence[int]]]
"""Tokens by kind of sampling, then by name of the prompt."""


def plain_texts(engine: Engine, prompts: Texts, tokens: int) -> PlainTexts:
    """What plain decoding makes of each prompt, under each kind of sampling."""
    return {kind: _complete(engine, prompts, replace(params, max_tokens=tokens)) for kind, params in KINDS.items()}


def _complete(engine: Engine, prompts: Texts, sampling: SamplingParams) -> dict[str, list[int]]:
    name_of = {engine.add(prompt, sampling, quiet=True): name for name, prompt in prompts.items()}
    done = {}
    while engine.has_work:
        done.update({name_of[u.request_id]: u.completion.token_ids for u in engine.step() if u.completion})
    return done


class Soak:
    """Requests of all kinds come and go; what they write is compared with what plain decoding wrote."""

    def __init__(
        self, engine: Engine, prompts: Texts, plain: PlainTexts, fresh: FreshPass, tokens: int, tie: float
    ) -> None:
        self.engine, self.prompts, self.plain, self.fresh = engine, prompts, plain, fresh
        self.tokens, self.tie = tokens, tie
        self.random = random.Random(0)
        self.asked: dict[int, tuple[str, str, int]] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.ties: list[dict[str, Any]] = []
        self.worst_row = 0.0
        self.idle_steps = 0
        self.memory: list[int] = []

    def run(self, rounds: int, checks: int) -> dict[str, Any]:
        """So many rounds, looked at in between so many times."""
        self._warm_up()
        gc.collect()
        count_calls(self.engine.rounds, "launch", self.counts)
        count_calls(self.engine.scheduler, "preempt", self.counts)
        at_rest = self._memory()
        due = 0
        with tqdm(total=rounds, desc="soak", unit="round", leave=False) as bar:
            while self.counts["launch"] < rounds and not self.is_stuck:
                self._arrivals_and_cancels()
                self._step()
                bar.update(self.counts["launch"] - bar.n)
                if self.counts["launch"] > due:
                    due += max(1, rounds // checks)
                    self._check_pages()
                    self._check_cache()
                    self.memory.append(self._memory())
        while self.engine.has_work and not self.is_stuck:
            self._step()
        self._check_rest(at_rest)
        return self._results(at_rest)

    def _warm_up(self) -> None:
        """Capture every graph and touch every kernel, so that memory should stay as it is from here on."""
        prompt = next(iter(self.prompts.values()))
        for params in KINDS.values():
            for size in batch_sizes(len(self.engine.cache.pages_of)):
                alike = {str(i): prompt[:1] for i in range(size)}
                _complete(self.engine, alike, replace(params, max_tokens=1))
        self.fresh.rows(prompt)

    def _arrivals_and_cancels(self) -> None:
        chance = QUIET if self.counts["launch"] // PHASE % 2 else BUSY
        room = QUEUE * len(self.engine.cache.pages_of) > len(self.engine.requests)
        if room and self.random.random() < chance:
            name, kind = self.random.choice(list(self.prompts)), self.random.choice(list(KINDS))
            limit = self.random.randint(1, self.tokens)
            request_id = self.engine.add(self.prompts[name], replace(KINDS[kind], max_tokens=limit), quiet=True)
            self.asked[request_id] = name, kind, limit
            self.counts["joined"] += 1
        if self.engine.requests and self.random.random() < CANCELS:
            request_id = self.random.choice(list(self.engine.requests))
            self.engine.cancel(request_id)
            del self.asked[request_id]
            self.counts["cancelled"] += 1

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait for ever."""
        return self.idle_steps > PATIENCE

    def _step(self) -> None:
        before = self.counts["launch"]
        for update in self.engine.step():
            if update.completion:
                self._check_text(*self.asked.pop(update.request_id), update.completion)
        is_idle = self.engine.has_work and self.counts["launch"] == before
        self.idle_steps = self.idle_steps + 1 if is_idle else 0

    def _check_text(self, name: str, kind: str, limit: int, done: Completion) -> None:
        """A greedy text must be the plain one up to near ties. Sampled ones share its seed; theirs are counted."""
        self.counts["finished"] += 1
        expected = self.plain[kind][name][:limit]
        if done.token_ids == expected:
            return
        self.counts[f"{kind}_different"] += 1
        if kind == "greedy":
            (found,) = find_differences(self.prompts, {name: expected}, {name: done.token_ids}, [self.fresh], self.tie)
            if found.is_tie(self.tie):
                self.ties.append(vars(found))
            else:
                self.problems.append(f"{name} differs from the plain text: {found}")

    def _check_pages(self) -> None:
        """Every page is free, remembered or held, and is held as often as it is listed."""
        pool, held = self.engine.cache.pool, Counter(page for pages in self.engine.cache.pages_of for page in pages)
        places = [*pool.free_pages, *pool.unused, *held]
        if sorted(places) != list(range(pool.num_pages)):
            self.problems.append(f"{len(places)} pages are free, remembered or held; there are {pool.num_pages}")
        if any(held[page] != users for page, users in enumerate(pool.users)):
            self.problems.append("a page's users are miscounted")

    def _check_cache(self) -> None:
        """The cache of one request that runs holds what a fresh pass over its tokens leaves."""
        ready = [r for r in self.engine.scheduler.running.values() if r.is_prefilled and r.num_cached]
        if not ready:
            return
        request = self.random.choice(ready)
        off = self._row_error(request)
        self.worst_row = max(self.worst_row, off)
        self.counts["caches_compared"] += 1
        if not off < CLOSE:
            self.problems.append(f"the cache of a request of {request.num_cached} tokens is off by {off:.1e}")

    def _row_error(self, request: Request) -> float:
        """The largest error of a K or V, as a share of the largest value of its layer."""
        held, expected = cached_rows(self.engine.cache, request), self.fresh.rows(request.tokens[: request.num_cached])
        off = [(a - b).abs().max() / b.abs().max() for a, b in zip(held, expected, strict=True)]
        return float(torch.stack(off).max())

    def _check_rest(self, at_rest: int) -> None:
        """With nothing left to do, nothing is held."""
        engine, pool = self.engine, self.engine.cache.pool
        gc.collect()
        self._check_pages()
        if self.is_stuck:
            self.problems.append(f"{len(engine.requests)} requests wait and nobody runs")
        if engine.requests or engine.texts or engine.decode_began or engine.in_flight or self.asked:
            self.problems.append("the engine still knows requests that ended")
        if pool.num_available != pool.num_pages or len(engine.cache.free_rows) != len(engine.cache.pages_of):
            self.problems.append("pages or rows did not come back")
        if (grown := self._memory() - at_rest) > SLACK_BYTES:
            self.problems.append(f"{grown} bytes of device memory did not come back")
        for event in ("finished", "cancelled", "preempt"):
            if not self.counts[event]:
                self.problems.append(f"nothing was put to the test: {event} never happened")

    def _memory(self) -> int:
        """Bytes in use on the device; 0 on a CPU, which does not count them."""
        return torch.cuda.memory_allocated(self.engine.device) if self.engine.device.type == "cuda" else 0

    def _results(self, at_rest: int) -> dict[str, Any]:
        c = self.counts
        return {
            "correct": not self.problems,
            "problems": self.problems,
            "rounds": c["launch"],
            **{name: c[name] for name in ("joined", "finished", "cancelled")},
            "preempted": c["preempt"],
            **{f"{kind}_different": c[f"{kind}_different"] for kind in KINDS},
            "ties": self.ties,
            "caches_compared": c["caches_compared"],
            "largest_cache_error": self.worst_row,
            "device_bytes": {"at_rest": at_rest, "at_most": max(self.memory), "at_the_end": self._memory()},
        }


def count_calls(owner: object, method: str, counts: Counter[str]) -> None:
    """From now on, count how often an object's method is called."""
    original = getattr(owner, method)

    def counted(*args: object) -> object:
        counts[method] += 1
        return original(*args)

    setattr(owner, method, counted)
