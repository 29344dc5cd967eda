"""Warm-up: compiles kernels and captures graphs before the first requests arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jetspec.engine.engine import Engine
from jetspec.types import SamplingParams

KINDS = (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, temperature=1.0))
"""Sampling of most requests. Other kinds capture their graphs at their first request."""
SALT = "warm-up"
"""Cache salt of warm-up prompts: no other request reuses their pages."""


@dataclass(frozen=True)
class WarmUpBatch:
    """Prompts that are decoded together."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams

    def run(self, engine: Engine) -> None:
        for prompt in self.prompts:
            engine.add(prompt, self.sampling, quiet=True, cache_salt=SALT)
        while engine.has_work:
            engine.step()


def warm_up_batches(engine: Engine, kinds: Sequence[SamplingParams] = KINDS) -> list[WarmUpBatch]:
    """One batch for every graph that requests of these kinds use; none for an engine without graphs."""
    return [*_rounds(engine, kinds), *_prefills(engine)] if engine.uses_graphs else []


def _rounds(engine: Engine, kinds: Sequence[SamplingParams]) -> Iterator[WarmUpBatch]:
    """Prompts of one token need no prefill, so all of them take part in the first round."""
    for sampling in kinds:
        yield from (WarmUpBatch([[0]] * size, sampling) for size in engine.runner.batch_sizes)


def _prefills(engine: Engine) -> Iterator[WarmUpBatch]:
    """The last token of a prompt is not prefilled. First tokens differ, so no prompt reuses the pages of another."""
    lengths = {min(size + 1, engine.max_len - 1) for size in engine.runner.prefill_sizes.tokens}
    yield from (WarmUpBatch([[i] * length], KINDS[0]) for i, length in enumerate(sorted(lengths)))
