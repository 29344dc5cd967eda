"""How prompts are read: as it is written, or captured once as CUDA graphs and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from jetspec.capture import GraphPool
from jetspec.config import EngineConfig
from jetspec.engine.chunk import Chunk, PackedChunks, pad
from jetspec.engine.graphs import batch_sizes
from jetspec.engine.round import Round

TOKEN_STEP = 32
MOST_TOKENS, MOST_CHUNKS = 2048, 64
"""The largest prefill that is captured. The launches of a larger one are shared by many tokens, and graphs keep the
memory that they work in."""


class Prefills(Protocol):
    """Something that reads prompts."""

    def launch(self, chunks: list[Chunk]) -> None: ...


class EagerPrefills:
    """Every prefill as it is written."""

    def __init__(self, round: Round) -> None:
        self.round = round

    def launch(self, chunks: list[Chunk]) -> None:
        self.round.prefill(PackedChunks.of(chunks, self.round.cache.device))


@dataclass(frozen=True)
class PrefillSizes:
    """Sizes to capture: numbers of tokens, and of chunks that they are of, ascending."""

    tokens: list[int]
    chunks: list[int]

    @classmethod
    def of(cls, config: EngineConfig) -> PrefillSizes:
        """Tokens in steps of at most a half, so that little is spent on padding. An empty chunk costs next to nothing,
        so their numbers are few."""
        most_tokens, most_chunks = min(config.prefill_chunk, MOST_TOKENS), min(config.max_batch, MOST_CHUNKS)
        chunks = [1]
        while chunks[-1] < most_chunks:
            chunks.append(min(4 * chunks[-1], most_chunks))
        return cls([TOKEN_STEP * size for size in batch_sizes(-(-most_tokens // TOKEN_STEP))], chunks)

    @property
    def most_padding(self) -> int:
        """Most tokens that are missing to the next size."""
        return max(after - before for before, after in pairwise([0, *self.tokens])) - 1

    def fitting(self, chunks: list[Chunk]) -> tuple[int, int] | None:
        """The smallest size for these chunks, or None if they are more than is captured."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if num_tokens > self.tokens[-1] or len(chunks) > self.chunks[-1]:
            return None
        return next(n for n in self.tokens if n >= num_tokens), next(n for n in self.chunks if n >= len(chunks))


@dataclass(frozen=True)
class CapturedPrefill:
    """One graph, and the chunks it reads."""

    chunks: PackedChunks
    graph: torch.cuda.CUDAGraph


class GraphPrefills:
    """A prefill is captured when chunks of its size first come up, and replayed from then on.

    Chunks are padded to the next captured size: the tokens that are missing are a text of the idle row, which is
    written to that row's pages and read by nobody. All that differs between two prefills of a size lies in one tensor,
    which is written before each replay; how its tokens are spread over the chunks is looked up on the device.
    """

    def __init__(self, round: Round, sizes: PrefillSizes, pool: GraphPool) -> None:
        self.round, self.sizes, self.pool = round, sizes, pool
        self.eager = EagerPrefills(round)
        self.graphs: dict[tuple[int, int], CapturedPrefill] = {}

    def launch(self, chunks: list[Chunk]) -> None:
        size = self.sizes.fitting(chunks)
        if size is None:
            return self.eager.launch(chunks)
        packed = self.pack(chunks, *size)
        if size not in self.graphs:
            self.graphs[size] = self.capture(packed)
        captured = self.graphs[size]
        captured.chunks.packed.copy_(packed.packed)
        captured.graph.replay()

    def pack(self, chunks: list[Chunk], num_tokens: int, num_chunks: int) -> PackedChunks:
        """Any chunk may have all of the tokens: graphs know nothing closer. The idle row has a chunk of its own."""
        idle = self.round.cache.idle_row
        assert idle is not None
        return PackedChunks.of(pad(chunks, num_tokens, num_chunks + 1, idle), self.pool.device, longest=num_tokens)

    def capture(self, chunks: PackedChunks) -> CapturedPrefill:
        """Record a prefill, whose own chunks serve the run before it: read twice, they leave what they leave once."""
        graph, _ = self.pool.capture(lambda: self.round.prefill(chunks))
        return CapturedPrefill(chunks, graph)
