"""Estimates the time that answering prompts takes, from a few answers that are discarded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jetspec.data.prompts import Prompt
from jetspec.data.regenerate import Answerer, RegenerateConfig, regenerate
from jetspec.data.rows import Row

WARM_UP_TOKENS, PROBE_TOKENS = 4, 64
"""Most tokens of an answer before the clock starts, and of a timed one."""


@dataclass(frozen=True)
class Probe:
    """Timing of a few answers of at most `PROBE_TOKENS` tokens."""

    prompts: int
    tokens: int
    ends: int
    """Answers that ended before the limit."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def answer_tokens(self, most: int) -> float:
        """Expected tokens of an answer of at most `most`, with the same probability to end at every token."""
        chance = self.ends / self.tokens
        return (1 - (1 - chance) ** most) / chance if chance else most

    def seconds_for(self, answers: int, most: int, devices: int) -> float:
        """Estimated seconds for so many answers of at most `most` tokens."""
        return answers * self.answer_tokens(most) / (self.tokens_per_s * devices)


def probe(answerer: Answerer, config: RegenerateConfig, prompts: Sequence[Prompt], batch: int) -> Probe | None:
    """Times a full batch of prompts, spread evenly over all. Returns None if none of them can be answered."""
    some = list(prompts[:: max(1, len(prompts) // batch)][:batch])

    def answers(most: int) -> list[Row]:
        short = replace(config, max_tokens=min(most, config.max_tokens))
        return [row for row in regenerate(answerer, short, iter(some)) if isinstance(row, Row)]

    answers(WARM_UP_TOKENS)
    began = time.perf_counter()
    rows = answers(PROBE_TOKENS)
    seconds = time.perf_counter() - began
    tokens, ends = sum(row.num_written for row in rows), sum(row.finish.count("stop") for row in rows)
    return Probe(len(rows), tokens, ends, seconds) if tokens else None
