"""Settings of trees and of the engine, as frozen dataclasses that check their values.

The docstring of a field is also its help text on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jetspec.aliases import accepts_old_names

Expand = Literal["optimal", "paper"]
Score = Literal["accum_logp", "entropy", "hybrid"]
DrafterName = Literal["head", "ngram", "none"]
Execution = Literal["auto", "eager", "graph"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

MAX_BATCH = 4096
MAX_BUDGET = 1024
MAX_WIDTH = 64
MAX_DEPTH = MAX_BUDGET - 1
MAX_SHORTLIST_PARENTS = 32
MAX_DRAFT_TEMPERATURE = 10
EAGLE3_DEPTH, EAGLE3_TAPS = 7, 3
"""Steps that an EAGLE-3 head is trained for by default, and target layers that it taps."""


@dataclass(frozen=True)
class BatchTree:
    """Smaller trees for large batches: the more requests share a round, the larger the share of it each node costs."""

    batch: int
    """Requests decoded together from which this tree applies."""
    budget: int
    """Most nodes in each tree, the anchor included."""
    depth: int | None = None
    """Longest drafted path. Default: as in the tree of smaller batches."""

    def __post_init__(self) -> None:
        _in_range("batch_trees batch", self.batch, 1, MAX_BATCH)
        TreeConfig(self.budget, depth=self.depth)

    @staticmethod
    def parse(text: str) -> tuple[BatchTree, ...]:
        """Parse BATCH:BUDGET[:DEPTH] entries, separated by commas; `none` for none."""
        if text == "none":
            return ()
        parts = [part.split(":") for part in text.split(",")]
        if not all(len(part) in (2, 3) and all(map(str.isdecimal, part)) for part in parts):
            raise ValueError(f"batch_trees is {text!r}; write BATCH:BUDGET[:DEPTH],... or none")
        return tuple(BatchTree(*map(int, part)) for part in parts)


@accepts_old_names("tree")
@dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree."""

    budget: int = 64
    """Most nodes in the tree, the anchor included, 1 to 1024. 1 is plain decoding. Default: 64; `LLM` on a CPU: 16."""
    width: int = 8
    """Most children of one node, 1 to 64; heads that draft level by level also expand this many nodes per level. 1 is
    a chain."""
    depth: int | None = None
    """Longest path below the anchor, in tokens, 1 to 1023. Default: the depth of the drafter."""
    expand: Expand = "optimal"
    """Expansion rule: `optimal` keeps the best nodes, `paper` all children of the best nodes (algorithm 1)."""
    score: Score = "accum_logp"
    """Ranking of paths: by log-probability (`accum_logp`), by the entropy of their depths (`entropy`), or both
    (`hybrid`)."""
    entropy_weight: float = 0.0
    """Weight of the entropy in the `hybrid` score, 0 or more."""
    draft_temperature: float = 0.8
    """Temperature of the draft for greedy requests, above 0 to 10; below 1 the most probable token counts for more.
    Sampled requests are drafted by the choice model of the head."""
    choice_model: bool = True
    """Draft sampled requests with the noise of their choices, which is known beforehand, and with weights that were
    fitted per head. False: at their own temperature, as if the noise were unknown."""
    refine_choices: bool = True
    """Refine these weights while decoding, for each sampling setting, by what the target chooses. False: they stay as
    they were fitted."""
    shortlist: int = 256
    """Candidate tokens per depth that the edge term of a head ranks, at least `width`. 0: the whole vocabulary."""
    shortlist_parents: int = 7
    """Most probable tokens of the previous depth for whose children the shortlist is chosen, 0 to 32. 0, which is
    the default of `LLM` on a CPU: it holds the most probable tokens of the depth, whatever their parent."""
    ngrams: bool = True
    """Also draft what followed earlier occurrences of the last tokens, where the head ranks by log-probability
    (`expand` and `score` unchanged). Default: true; `LLM` on a GPU: false."""
    batch_trees: tuple[BatchTree, ...] = ()
    """Smaller trees for larger batches, as BATCH:BUDGET[:DEPTH],... in rising order of the batch, or `none`. Default:
    none; `LLM` on a GPU: 8:32,24:16:8."""

    def __post_init__(self) -> None:
        _in_range("budget", self.budget, 1, MAX_BUDGET)
        _in_range("width", self.width, 1, MAX_WIDTH)
        if self.depth is not None:
            _in_range("depth", self.depth, 1, MAX_DEPTH)
        _one_of("expand", self.expand, ("optimal", "paper"))
        _one_of("score", self.score, ("accum_logp", "entropy", "hybrid"))
        if not isinstance(self.entropy_weight, int | float) or not self.entropy_weight >= 0:
            raise ValueError(f"entropy_weight is {self.entropy_weight!r}; it must be a number, 0 or more")
        if self.entropy_weight and self.score != "hybrid":
            raise ValueError(f"entropy_weight needs the score hybrid, not {self.score}")
        temperature = self.draft_temperature
        if not isinstance(temperature, int | float) or not 0 < temperature <= MAX_DRAFT_TEMPERATURE:
            raise ValueError(
                f"draft_temperature is {temperature!r}; it must be above 0 and at most {MAX_DRAFT_TEMPERATURE}"
            )
        _in_range("shortlist", self.shortlist, 0, 1 << 24)
        _in_range("shortlist_parents", self.shortlist_parents, 0, MAX_SHORTLIST_PARENTS)
        if self.shortlist and self.shortlist < self.width:
            raise ValueError(f"shortlist is {self.shortlist}; it must be at least the width, {self.width}")
        for name in ("ngrams", "choice_model", "refine_choices"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        batches = [each.batch for each in self.batch_trees]
        if batches != sorted(set(batches)):
            raise ValueError(f"batch_trees has batches {', '.join(map(str, batches))}; they must rise")

    @property
    def ranks_by_probability(self) -> bool:
        """Nodes are the most probable ones."""
        return (self.expand, self.score) == ("optimal", "accum_logp")

    def at(self, batch: int) -> TreeConfig:
        """Return the tree of each request in a batch of this size: never larger than `self`."""
        found = next((each for each in reversed(self.batch_trees) if each.batch <= batch), None)
        if found is None:
            return self
        depths = [depth for depth in (self.depth, found.depth) if depth is not None]
        return replace(self, budget=min(self.budget, found.budget), depth=min(depths, default=None), batch_trees=())


@accepts_old_names("engine")
@dataclass(frozen=True)
class EngineConfig:
    """Memory and scheduling of the engine. None of it changes the text."""

    max_batch: int = 8
    """Most requests decoded together, 1 to 4096; further ones are queued."""
    max_len: int | None = None
    """Longest sequence in tokens, prompt included. Default: the context length of the model."""
    page_size: int = 16
    """Tokens per page of the KV cache, 1 to 1024."""
    num_pages: int | None = None
    """Pages of the KV cache. Default: enough for `max_batch` sequences of `max_len` tokens, up to `cache_gb`."""
    cache_gb: float | None = None
    """Most memory of the KV cache in GB, when `num_pages` is not given. Default: 2 on a CPU, most of the free memory
    on a GPU."""
    prefill_chunk: int = 512
    """Most prompt tokens processed in one step."""
    prefix_cache: bool = True
    """Reuse the KV cache pages of prompts with a common prefix."""
    execution: Execution = "auto"
    """`graph` captures rounds and prefills as CUDA graphs and replays them, `eager` launches each kernel. `auto`, the
    default: graph on a GPU."""
    overlap_rounds: int | None = None
    """Rounds launched before the host has read the results of an earlier one, 0 to 8. Default: 1 with graphs, else 0.
    Always 0 with n-gram drafts, which need these results."""
    ngram_corpus: int = 0
    """Tokens of the most recent answers under a request's API key (in Python: `cache_salt`) in which its n-grams are
    looked up too, beside its own text. 0, the default: none. Needs a draft head."""
    max_admission_delay: int = 0
    """Most rounds that a queued request is held back so that several are prefilled together. 0, the default: none."""

    def __post_init__(self) -> None:
        _in_range("max_batch", self.max_batch, 1, MAX_BATCH)
        _in_range("page_size", self.page_size, 1, 1024)
        _in_range("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        _in_range("ngram_corpus", self.ngram_corpus, 0, 1 << 20)
        _in_range("max_admission_delay", self.max_admission_delay, 0, 1 << 20)
        _one_of("execution", self.execution, ("auto", "eager", "graph"))
        if self.overlap_rounds is not None:
            _in_range("overlap_rounds", self.overlap_rounds, 0, 8)
        if self.max_len is not None:
            _in_range("max_len", self.max_len, 2, 1 << 24)
        if self.num_pages is not None:
            _in_range("num_pages", self.num_pages, 1, 1 << 31)
        if self.cache_gb is not None and self.cache_gb <= 0:
            raise ValueError(f"cache_gb is {self.cache_gb}; it must be above 0")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
