"""Settings of `jetspec data`: answers, synthesized prompts, processes. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jetspec.config import EngineConfig
from jetspec.data.prompts import Prompt, Responses, stable_hash
from jetspec.files import read_text
from jetspec.settings import at_least, read_settings
from jetspec.types import SamplingParams

CPU_BATCH, GPU_BATCH = 8, 2048
MAX_ADMISSION_DELAY = 24
BUILTIN_FILE = Path(__file__).with_name("prefixes.yaml")
ID_START = "invented-"
"""Part of the file format, as is `invent/` in seeds: files of earlier releases resume with the same prompts."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Answers to prompts."""

    responses: Responses = "target"
    """Source of the answers: the target, or the data itself."""
    max_tokens: int = 512
    """Most tokens per answer."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most probable tokens up to this total probability."""
    seed: int = 0
    """The same seed gives the same rows."""
    max_len: int | None = None
    """Longest conversation in tokens. By default the model's context."""

    def __post_init__(self) -> None:
        self.sampling("")

    def sampling(self, id: str) -> SamplingParams:
        """Sampling parameters of a prompt. The seed depends on its id alone, so a row does not depend on the run."""
        seed = stable_hash(f"{self.seed}/{id}") >> 1
        return SamplingParams(self.temperature, self.top_p, max_tokens=self.max_tokens, seed=seed)


@dataclass(frozen=True)
class RegenerateConfig(AnswerOptions):
    """Settings that, with the prompts, determine the rows."""

    model: str

    def longest(self, context: int) -> int:
        return context if self.max_len is None else min(self.max_len, context)


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions:
    """Prompts that the target writes."""

    prefix: tuple[str, ...] = ()
    """First words of a prompt; repeatable, then used in turn. By default those of `prefixes`."""
    prefixes: str = "builtin"
    """builtin, the default: a built-in prefix, from sums to summaries, for every second prompt; none; or a file with
    one per line, where an empty line is a free prompt."""
    system: str | None = None
    """System message to steer by. It is not part of the output."""
    max_tokens: int = 256
    """Most tokens per prompt; longer ones are dropped."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy: one prompt per prefix."""
    top_p: float = 1.0
    """Sample from the most probable tokens up to this total probability."""
    seed: int = 0
    """The same seed gives the same prompts."""

    def __post_init__(self) -> None:
        if self.prefix and self.prefixes != "builtin":
            raise ValueError("prefix and prefixes exclude each other; set one")
        self.sampling("")

    def sampling(self, id: str, stop: tuple[str, ...] = ()) -> SamplingParams:
        """Sampling parameters of an attempt. Its seed differs from the one of its answer."""
        seed = stable_hash(f"invent/{self.seed}/{id}") >> 1
        return SamplingParams(self.temperature, self.top_p, max_tokens=self.max_tokens, seed=seed, stop=stop)


@dataclass(frozen=True)
class SynthesizeConfig(SynthesisOptions):
    """Settings that determine the prompts."""

    model: str

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """First words of the prompts, used in turn; after an empty one the target writes the whole prompt."""
        return self.prefix or read_prefixes(self.prefixes)

    def attempt(self, number: int) -> Prompt:
        """A prompt whose only turn is its prefix."""
        id = f"{ID_START}s{self.seed}-{number:06}"
        return Prompt(id, [self.openings[number % len(self.openings)]], [], self.system, id)


def builtin_prefixes() -> tuple[str, ...]:
    """Prefixes of all kinds in turn, so that any stretch is balanced. Every second one is empty: a free prompt."""
    kinds: dict[str, list[str]] = read_settings(BUILTIN_FILE)
    return tuple(one for row in zip(*kinds.values(), strict=True) for prefix in row for one in (prefix, ""))


def read_prefixes(name: str) -> tuple[str, ...]:
    """The prefixes `builtin` or `none`, or those of a text file: one per line, an empty line for a free prompt."""
    if name == "builtin":
        return builtin_prefixes()
    prefixes = ("",) if name == "none" else tuple(read_text(Path(name)).splitlines())
    if not prefixes:
        raise ValueError(f"{name} holds no prefixes")
    return prefixes


@dataclass(frozen=True)
class Machines:
    """Processes and batch of the target. Neither changes the rows, except for near ties in 16 bits."""

    jobs: int | None = None
    """Processes. By default one per GPU; more share it."""
    batch: int | None = None
    """Answers decoded together. By default 8 on a CPU, 2048 on a GPU."""

    def __post_init__(self) -> None:
        at_least(1, "jobs", self.jobs)

    def engine(self, device: str, max_len: int | None = None, most: int | None = None) -> EngineConfig:
        """Large chunks of many prompts, at most `most` together: throughput counts, not latency."""
        usual = CPU_BATCH if device == "cpu" else GPU_BATCH
        batch = usual if self.batch is None else self.batch
        batch = batch if most is None else min(batch, most)
        return EngineConfig(
            max_batch=batch,
            max_len=max_len,
            prefill_chunk=max(512, 16 * batch),
            prefix_cache=False,
            max_admission_delay=MAX_ADMISSION_DELAY,
        )
