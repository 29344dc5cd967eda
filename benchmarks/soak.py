"""A long run with random arrivals, cancels and shortages of pages, checked for leaks and wrong texts."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.lossless import FreshPass, Texts, cached_rows, find_differences
from jetspec.engine.engine import Engine
from jetspec.engine.warm_up import warm_up_batches
from jetspec.progress import progress_bar
from jetspec.types import Completion, SamplingParams

KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=1),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=2),
}
PHASE = 250
"""Rounds of many arrivals, then as many of few: batches grow to their limit and become empty."""
BUSY, QUIET, CANCELS = 0.5, 0.02, 0.02
"""Chance per step that a request arrives in either phase, and that one is cancelled."""
QUEUE = 3
"""Requests at a time, as a multiple of the batch."""
CLOSE = 1e-3
"""Largest error of K and V, as a share of the largest value; those of another token are off by about 1."""
MOST_IDLE_STEPS = 200
"""Steps without a round after which the engine is stuck."""
SLACK_BYTES = 64 << 10
"""Device memory that need not be freed: the last uploads may differ by a few blocks of 512 bytes."""
HOST_SLACK_BYTES = 32 << 20
"""Growth of resident memory from the second quarter to the end: in 10,000 rounds, 6.5 KB in each. Smaller leaks show in
the number of objects."""

OWN = ("jetspec.engine", "jetspec.types")
"""Modules whose objects are counted."""

PlainTexts = Mapping[str, Mapping[str, Sequence[int]]]
"""Tokens by kind of sampling, then by name of the prompt."""


def run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


class Soak:
    """Random requests of all kinds, whose texts are compared with those of plain decoding."""

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
        self.resident: list[int] = []

    def run(self, rounds: int, checks: int) -> dict[str, Any]:
        """Run `rounds` rounds with `checks` checks in between."""
        self._warm_up()
        at_rest, bytes_at_rest = live_objects(self.engine), self._memory()
        count_calls(self.engine.runner, "launch_round", self.counts)
        count_calls(self.engine.scheduler, "preempt", self.counts)
        due = 0
        with progress_bar(total=rounds, desc="soak", unit="round", leave=False) as bar:
            while self.counts["launch_round"] < rounds and not self.is_stuck:
                self._arrivals_and_cancels()
                self._step()
                bar.update(self.counts["launch_round"] - bar.n)
                if self.counts["launch_round"] > due:
                    due += max(1, rounds // checks)
                    self._check_pages()
                    self._check_cache()
                    self.memory.append(self._memory())
                    self.resident.append(resident_bytes())
        while self.engine.has_work and not self.is_stuck:
            self._step()
        self._check_rest(at_rest, bytes_at_rest)
        return self._results(bytes_at_rest)

    def _warm_up(self) -> None:
        """Capture every graph and run every kernel, so that memory is constant from here on."""
        kinds = [replace(kind, max_tokens=1) for kind in KINDS.values()]
        for course in warm_up_batches(self.engine, kinds):
            course.run(self.engine)
        for lengths in joint_prefills(self.engine):
            for i, length in enumerate(lengths):
                salt = f"{i} of {lengths}"  # prompts share no pages
                self.engine.add([0] * (length + 1), SamplingParams(max_tokens=1), quiet=True, cache_salt=salt)
            run_out(self.engine)
        prompt = next(iter(self.prompts.values()))
        # A graph keeps something of the first batch of its kind: the last one, which the engine keeps, is no first.
        for kind in kinds:
            self.engine.add(prompt[:1], kind, quiet=True)
            run_out(self.engine)
        self.fresh.rows(prompt)

    def _arrivals_and_cancels(self) -> None:
        chance = QUIET if self.counts["launch_round"] // PHASE % 2 else BUSY
        has_capacity = QUEUE * len(self.engine.cache.pages_of) > len(self.engine.requests)
        if has_capacity and self.random.random() < chance:
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
        return self.idle_steps > MOST_IDLE_STEPS

    def _step(self) -> None:
        before = self.counts["launch_round"]
        for update in self.engine.step():
            if update.completion:
                self._check_text(*self.asked.pop(update.request_id), update.completion)
        is_idle = self.engine.has_work and self.counts["launch_round"] == before
        self.idle_steps = self.idle_steps + 1 if is_idle else 0

    def _check_text(self, name: str, kind: str, limit: int, done: Completion) -> None:
        """Compare a text with the plain one: greedy texts up to near ties; differences of sampled ones are counted."""
        self.counts["finished"] += 1
        expected = self.plain[kind][name][:limit]
        if done.token_ids == expected:
            return
        self.counts[f"{kind}_different"] += 1
        if kind == "greedy":
            (found,) = find_differences(
                self.prompts, {name: expected}, {name: done.token_ids}, [self.fresh.logits], self.tie
            )
            if found.tie:
                self.ties.append(vars(found))
            else:
                self.problems.append(f"{name} differs from the plain text: {found}")

    def _check_pages(self) -> None:
        """Check that every page is free, cached or held, and its users are counted right."""
        pool, held = self.engine.cache.pool, Counter(page for pages in self.engine.cache.pages_of for page in pages)
        places = [*pool.free_pages, *pool.evictable, *held]
        if sorted(places) != list(range(pool.num_pages)):
            self.problems.append(f"{len(places)} pages are free, cached or held; there are {pool.num_pages}")
        if any(held[page] != users for page, users in enumerate(pool.users)):
            self.problems.append("a page's users are miscounted")

    def _check_cache(self) -> None:
        """Compare the cache of one running request with a fresh pass over its tokens."""
        ready = [r for r in self.engine.scheduler.running.values() if r.is_prefilled and r.num_cached]
        if not ready:
            return
        request = self.random.choice(ready)
        held, expected = cached_rows(self.engine.cache, request), self.fresh.rows(request.tokens[: request.num_cached])
        # Largest error of K or V, as a share of the largest value of its layer.
        errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(held, expected, strict=True)]
        off = float(torch.stack(errors).max())
        self.worst_row = max(self.worst_row, off)
        self.counts["caches_compared"] += 1
        if not off < CLOSE:
            self.problems.append(f"the cache of a request of {request.num_cached} tokens is off by {off:.1e}")

    def _check_rest(self, at_rest: Counter[str], bytes_at_rest: int) -> None:
        """Check that an idle engine holds nothing."""
        engine, pool = self.engine, self.engine.cache.pool
        self._check_pages()
        if self.is_stuck:
            self.problems.append(f"{len(engine.requests)} requests wait and none runs")
        if engine.requests or engine.texts or engine.decode_began or engine.in_flight or self.asked:
            self.problems.append("the engine still holds requests that ended")
        if pool.num_available != pool.num_pages or len(engine.cache.free_rows) != len(engine.cache.pages_of):
            self.problems.append("pages or rows were not released")
        if (grown := resident_bytes() - self.settled_bytes) > HOST_SLACK_BYTES:
            self.problems.append(f"{grown} bytes of resident memory were taken after the second quarter")
        if not self.is_stuck:
            counted = self.counts.copy()
            self._warm_up()
            self.counts = counted
            for kind, more in sorted((live_objects(self.engine) - at_rest).items()):
                self.problems.append(f"{more} more of {kind} live than at rest")
            if (grown := self._memory() - bytes_at_rest) > SLACK_BYTES:
                self.problems.append(f"{grown} bytes of device memory were not released")
        for event in ("finished", "cancelled", "preempt"):
            if not self.counts[event]:
                self.problems.append(f"{event} never happened, and was not tested")

    @property
    def settled_bytes(self) -> int:
        """Largest resident memory of the second quarter."""
        return max(self.resident[len(self.resident) // 4 : len(self.resident) // 2 + 1])

    def _memory(self) -> int:
        """Bytes in use on the device; 0 on a CPU, which does not count them."""
        return torch.cuda.memory_allocated(self.engine.device) if self.engine.device.type == "cuda" else 0

    def _results(self, at_rest: int) -> dict[str, Any]:
        c = self.counts
        return {
            "correct": not self.problems,
            "problems": self.problems,
            "rounds": c["launch_round"],
            **{name: c[name] for name in ("joined", "finished", "cancelled")},
            "preempted": c["preempt"],
            **{f"{kind}_different": c[f"{kind}_different"] for kind in KINDS},
            "ties": self.ties,
            "caches_compared": c["caches_compared"],
            "largest_cache_error": self.worst_row,
            "device_bytes": {"at_rest": at_rest, "at_most": max(self.memory), "at_the_end": self._memory()},
            "host_bytes": {"second_quarter": self.settled_bytes, "at_the_end": resident_bytes()},
        }


def live_objects(engine: Engine) -> Counter[str]:
    """Objects of the engine by their class, and captured graphs."""
    gc.collect()
    kinds = (type(found) for found in gc.get_objects())
    found = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(OWN))
    found["captured graph"] = engine.graphs.num_captured if engine.graphs else 0
    return found


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def joint_prefills(engine: Engine) -> Iterator[list[int]]:
    """Lengths of prompts prefilled together, for every graph of several: the fewest prompts and tokens that need it,
    the first as long as possible, which takes the fewest pages."""
    if not engine.uses_graphs:
        return
    sizes, longest = engine.runner.prefill_sizes, engine.max_len - 2
    for (before, tokens), (fewer, most) in product(pairwise([0, *sizes.tokens]), pairwise(sizes.chunks)):
        count = max(fewer + 1, -(-(before + 1) // longest))
        if count <= min(most, tokens):
            yield spread_tokens(max(before + 1, count), count, longest)


def spread_tokens(tokens: int, count: int, longest: int) -> list[int]:
    """`count` numbers of at least 1 that sum to `tokens`, the first ones as large as possible."""
    lengths = []
    for others in reversed(range(count)):
        lengths.append(min(tokens - others, longest))
        tokens -= lengths[-1]
    return lengths


def count_calls(owner: object, method: str, counts: Counter[str]) -> None:
    original = getattr(owner, method)

    def counted(*args: object) -> object:
        counts[method] += 1
        return original(*args)

    setattr(owner, method, counted)
