"""Warm-up: compiles kernels and captures graphs before the first requests arrive."""

from __future__ import annotations

from collections.abc import Sequence
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
    if not engine.uses_graphs:
        return []
    # Prompts of one token need no prefill, so all of them take part in the first round.
    batches = [WarmUpBatch([[0]] * size, sampling) for sampling in kinds for size in engine.runner.batch_sizes]
    # The last token of a prompt is not prefilled. First tokens differ, so no prompt reuses the pages of another.
    lengths = {min(size + 1, engine.max_len - 1) for size in engine.runner.prefill_sizes.tokens}
    return batches + [WarmUpBatch([[i] * length], KINDS[0]) for i, length in enumerate(sorted(lengths))]
