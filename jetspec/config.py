"""Every setting, as frozen dataclasses. Checked once, here; trusted everywhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jetspec.aliases import accepts_old_names

Expand = Literal["optimal", "paper"]
Score = Literal["accum_logp", "entropy", "hybrid"]
DrafterName = Literal["head", "ngram", "none"]
Execution = Literal["auto", "eager", "graph"]

MAX_BATCH = 4096
MAX_BUDGET = 1024
MAX_WIDTH = 64
MAX_DEPTH = MAX_BUDGET - 1
MAX_SHORTLIST_PARENTS = 32
MAX_DRAFT_TEMPERATURE = 10


@dataclass(frozen=True)
class BatchTree:
    """Smaller trees from so many requests on: the more there are, the more of a round each node costs."""

    batch: int
    """Requests decoded together."""
    budget: int
    depth: int | None = None
    """Of what a head drafts."""

    def __post_init__(self) -> None:
        _in_range("the batch of a shrink", self.batch, 1, MAX_BATCH)
        TreeConfig(self.budget, depth=self.depth)

    @staticmethod
    def parse(text: str) -> tuple[BatchTree, ...]:
        """BATCH:BUDGET or BATCH:BUDGET:DEPTH, separated by commas; `none` for none."""
        if text == "none":
            return ()
        parts = [part.split(":") for part in text.split(",")]
        if not all(len(part) in (2, 3) and all(map(str.isdecimal, part)) for part in parts):
            raise ValueError(
                f"shrink is {text!r}; write BATCH:BUDGET or BATCH:BUDGET:DEPTH, with commas between, or none"
            )
        return tuple(BatchTree(*map(int, part)) for part in parts)


@accepts_old_names("tree")
@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft tree. `budget=1` is plain decoding, `width=1` is a chain."""

    budget: int = 64
    """Most nodes in the tree, the anchor included."""
    width: int = 8
    """Most children of one node. Heads that draft level by level go on from so many nodes of a level."""
    depth: int | None = None
    """Longest path below the anchor. None: as deep as the drafter reaches."""
    expand: Expand = "optimal"
    """`optimal` keeps the best nodes; `paper` keeps all children of the best nodes (algorithm 1)."""
    score: Score = "accum_logp"
    """What a path is ranked by: log-probability, entropy of its depths, or both."""
    entropy_weight: float = 0.0
    """Weight of the entropy in the `hybrid` score."""
    draft_temperature: float = 0.8
    """Temperature at which a head drafts for greedy requests. A head learns how likely the target's tokens are; the
    likeliest is the text more often than that. Sampled requests are drafted at their own temperature."""
    shortlist: int = 256
    """Tokens per depth that an edge term may re-rank. 0: the whole vocabulary."""
    shortlist_parents: int = 7
    """Tokens of the depth before whose likely children make the shortlist. 0: it is what the head says of the depth
    alone, whatever comes before."""
    batch_trees: tuple[BatchTree, ...] = ()
    """Smaller trees for larger batches."""

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
            raise ValueError(f"entropy_weight only counts in the hybrid score, not in {self.score}")
        if (
            not isinstance(self.draft_temperature, int | float)
            or not 0 < self.draft_temperature <= MAX_DRAFT_TEMPERATURE
        ):
            raise ValueError(
                f"heat is {self.draft_temperature!r}; it must be above 0, and at most {MAX_DRAFT_TEMPERATURE}"
            )
        _in_range("shortlist", self.shortlist, 0, 1 << 24)
        _in_range("shortlist_parents", self.shortlist_parents, 0, MAX_SHORTLIST_PARENTS)
        if self.shortlist and self.shortlist < self.width:
            raise ValueError(f"shortlist {self.shortlist} is narrower than width {self.width}")
        batches = [each.batch for each in self.batch_trees]
        if batches != sorted(set(batches)):
            raise ValueError(f"shrink names batches of {', '.join(map(str, batches))}; name each once, in order")

    def at(self, batch: int) -> TreeConfig:
        """The tree of each of so many requests that are decoded together: never a larger one."""
        found = next((each for each in reversed(self.batch_trees) if each.batch <= batch), None)
        if found is None:
            return self
        depths = [depth for depth in (self.depth, found.depth) if depth is not None]
        return replace(self, budget=min(self.budget, found.budget), depth=min(depths, default=None), batch_trees=())


@accepts_old_names("engine")
@dataclass(frozen=True)
class EngineConfig:
    """How the engine spends memory and time. None of it changes the text."""

    max_batch: int = 8
    """Requests decoded together; more wait in the queue."""
    max_len: int | None = None
    """Longest sequence, prompt included. None: the model's own context."""
    page_size: int = 16
    """Positions per page of the KV cache."""
    num_pages: int | None = None
    """Pages in the pool. None: enough for every row of the batch to reach `max_len`, up to `cache_gb`."""
    cache_gb: float | None = None
    """Most memory that the KV cache takes when `num_pages` is not given. None: 2 on a CPU, most of what is free
    on a GPU."""
    prefill_chunk: int = 512
    """Prompt tokens processed in one step."""
    prefix_cache: bool = True
    """Reuse the pages of prompts that start alike."""
    execution: Execution = "auto"
    """`graph` captures rounds and prefills once and replays them on the GPU, with nothing for the host to do; `eager`
    runs them as they are written. Auto: graph on a GPU."""
    overlap_rounds: int | None = None
    """Rounds that start before the host has read an earlier one. None: 1 with graphs, else 0, as always with n-grams:
    they are looked up in what was read."""
    max_admission_delay: int = 0
    """Rounds that a waiting request may be held back, so that more of them are prefilled together."""

    def __post_init__(self) -> None:
        _in_range("max_batch", self.max_batch, 1, MAX_BATCH)
        _in_range("page_size", self.page_size, 1, 1024)
        _in_range("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        _in_range("max_admission_delay", self.max_admission_delay, 0, 1 << 20)
        _one_of("execution", self.execution, ("auto", "eager", "graph"))
        if self.overlap_rounds is not None:
            _in_range("overlap_rounds", self.overlap_rounds, 0, 8)
        if self.max_len is not None:
            _in_range("max_len", self.max_len, 2, 1 << 24)
        if self.num_pages is not None:
            _in_range("num_pages", self.num_pages, 1, 1 << 31)
        if self.cache_gb is not None and self.cache_gb <= 0:
            raise ValueError(f"cache_gb is {self.cache_gb}; it must be positive")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
