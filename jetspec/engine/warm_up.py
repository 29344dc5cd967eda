"""What first requests would wait for, done ahead of them: kernels are compiled and graphs captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jetspec.engine.engine import Engine
from jetspec.engine.graphs import GraphRounds
from jetspec.engine.prefill import GraphPrefills
from jetspec.types import SamplingParams

KINDS = (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, temperature=1.0))
"""What most requests ask for. Others capture a graph of their own when they first come."""
SALT = "warm-up"
"""Keeps the prompts of a warm-up from being found by others."""


@dataclass(frozen=True)
class Course:
    """Prompts that join together."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams

    def run(self, engine: Engine) -> None:
        for prompt in self.prompts:
            engine.add(prompt, self.sampling, quiet=True, cache_salt=SALT)
        while engine.has_work:
            engine.step()


def courses(engine: Engine, kinds: Sequence[SamplingParams] = KINDS) -> list[Course]:
    """One for every graph that requests of these kinds need. None where rounds are not captured."""
    return [*_batches(engine, kinds), *_prompts(engine)]


def _batches(engine: Engine, kinds: Sequence[SamplingParams]) -> Iterator[Course]:
    """Prompts of one token have nothing to prefill: all are in the first round."""
    if isinstance(engine.rounds, GraphRounds):
        for sampling in kinds:
            yield from (Course([[0]] * size, sampling) for size in engine.rounds.sizes)


def _prompts(engine: Engine) -> Iterator[Course]:
    """The last token of a prompt is not prefilled. No two prompts begin alike, so that none finds another's pages."""
    if isinstance(engine.prefills, GraphPrefills):
        lengths = {min(size + 1, engine.max_len - 1) for size in engine.prefills.sizes.tokens}
        yield from (Course([[i] * length], KINDS[0]) for i, length in enumerate(sorted(lengths)))
