"""Batch and prefill sizes that are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jetspec.config import BatchTree, EngineConfig
from jetspec.engine.chunk import Chunk

TOKEN_STEP = 32
MAX_TOKENS, MAX_CHUNKS = 2048, 64
"""Largest prefill that is captured. In a larger one many tokens share each launch, and graphs hold their memory."""


def batch_sizes(max_batch: int, batch_trees: Sequence[BatchTree] = ()) -> list[int]:
    """Batch sizes to capture, ascending: every size up to 8, then steps of at most a half, which bounds the padding.

    The largest batch before each change of `batch_trees` is one of them, so that padding never makes trees smaller.
    """
    sizes, step = list(range(1, min(max_batch, 8) + 1)), 8
    while sizes[-1] < max_batch:
        sizes.append(min(max_batch, sizes[-1] + step // 2))
        if sizes[-1] >= 2 * step:
            step *= 2
    return sorted({*sizes, *(tree.batch - 1 for tree in batch_trees if 1 < tree.batch <= max_batch)})


@dataclass(frozen=True)
class PrefillSizes:
    """Numbers of tokens and numbers of chunks to capture prefills for, both ascending."""

    tokens: list[int]
    chunks: list[int]

    @classmethod
    def of(cls, config: EngineConfig) -> PrefillSizes:
        """Token counts in steps of at most a half. An empty chunk costs almost nothing, so chunk counts are few."""
        max_tokens, max_chunks = min(config.prefill_chunk, MAX_TOKENS), min(config.max_batch, MAX_CHUNKS)
        chunks = [1]
        while chunks[-1] < max_chunks:
            chunks.append(min(4 * chunks[-1], max_chunks))
        return cls([TOKEN_STEP * size for size in batch_sizes(-(-max_tokens // TOKEN_STEP))], chunks)

    @property
    def max_padding(self) -> int:
        """Largest number of padding tokens."""
        return max(after - before for before, after in pairwise([0, *self.tokens])) - 1

    def fitting(self, chunks: list[Chunk]) -> tuple[int, int] | None:
        """The smallest size for these chunks; None when no captured size is large enough."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if num_tokens > self.tokens[-1] or len(chunks) > self.chunks[-1]:
            return None
        return next(n for n in self.tokens if n >= num_tokens), next(n for n in self.chunks if n >= len(chunks))
