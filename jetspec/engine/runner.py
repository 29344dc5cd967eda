"""Launches rounds and prefills, eagerly or as CUDA graphs, which are captured for a few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from jetspec.capture import CapturedFn, GraphPool
from jetspec.config import BatchTree, EngineConfig
from jetspec.engine.chunk import Chunk, PackedChunks, pad
from jetspec.engine.drafter import RoundState
from jetspec.engine.round import Round, RoundResult
from jetspec.ops.transfer import Download, upload
from jetspec.types import Request, RoundFeatures

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


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """Requests of a decode batch, with values cached until its membership changes."""

    requests: list[Request]
    rows: list[int]
    row_epoch: list[int]
    features: RoundFeatures
    is_constrained: bool
    """A request has a grammar, so the host computes masks in the middle of the round."""
    is_synchronous: bool
    """The host reads each round before the next starts: a constraint follows the committed text, and a trace is read
    from the device's result, which the next round overwrites."""

    @staticmethod
    def of(requests: list[Request]) -> DecodeBatch:
        is_constrained = any(request.constraint for request in requests)
        return DecodeBatch(
            requests,
            rows=[request.row for request in requests],
            row_epoch=[request.row_epoch for request in requests],
            features=RoundFeatures.of((r.sampling for r in requests), [r.limits for r in requests]),
            is_constrained=is_constrained,
            is_synchronous=is_constrained or any(request.traced for request in requests),
        )

    def is_of(self, requests: list[Request]) -> bool:
        """True if the batch has exactly these requests, each still in its row."""
        return requests == self.requests and self.row_epoch == [request.row_epoch for request in requests]


RoundRow = tuple[int, int, list[int], list[float]]
"""Result of one request: nodes in its tree, accepted tokens of n-grams alone, committed tokens, log-probabilities as
packed by `PathLogprobs`."""


@dataclass(frozen=True)
class Launched:
    """A round in flight. `result` is on the device; that of a captured round is valid until the next launch."""

    decode_batch: DecodeBatch
    result: RoundResult
    packed: Download

    def read(self) -> list[RoundRow]:
        """Waits for the round and returns its results on the host."""
        first = 2 if self.result.by_ngrams_B is None else 3
        width = first + self.result.verdict.token_BD1.shape[1]
        packed = self.packed.read()[: len(self.decode_batch.requests)]
        rows = zip(packed[:, :width].long().tolist(), packed[:, width:].tolist(), strict=True)
        return [(r[1], r[2] if first == 3 else 0, r[first : first + r[0] + 1], logprobs) for r, logprobs in rows]


@dataclass(frozen=True, eq=False)
class RoundInputs:
    """Inputs of a round: rows on the device, and what a captured round fixes."""

    row_B: Tensor
    features: RoundFeatures
    requests: list[Request]
    """Empty for a captured round."""

    def copy_(self, source: RoundInputs) -> None:
        self.row_B.copy_(source.row_B)


def run_round(round: Round, inputs: RoundInputs) -> tuple[RoundResult, Tensor]:
    state = RoundState.of(round.cache.rows, inputs.row_B, inputs.features, inputs.requests)
    result = round(state)
    return result, result.packed


RoundKey = tuple[int, RoundFeatures]


class Runner:
    """Launches the rounds and prefills of an engine. With a `pool` they are captured as CUDA graphs on first use.

    Captured batches have fixed sizes, so inputs are padded with the cache's idle row: its pages are written and never
    read. A batch with constraints runs eagerly, because the host takes part in its rounds. So does a prefill that is
    larger than any captured size.
    """

    def __init__(self, round: Round, config: EngineConfig, pool: GraphPool | None) -> None:
        self.round, self.device, self.idle_row = round, round.cache.device, round.cache.idle_row
        self.batch_sizes = batch_sizes(config.max_batch, round.drafter.tree.batch_trees)
        self.prefill_sizes = PrefillSizes.of(config)
        self.rounds = CapturedFn(partial(run_round, round), pool)  # a bound method would be a reference cycle
        self.prefills = CapturedFn(round.prefill, pool)
        self.decode_batch: DecodeBatch | None = None
        """The batch whose rows are on the device."""

    def launch_round(self, decode_batch: DecodeBatch) -> Launched:
        """Starts a round. Rows are uploaded only when the batch has changed."""
        key = self._round_key(decode_batch)
        if decode_batch is not self.decode_batch:
            self.decode_batch = None  # in case the upload is interrupted
            self._load(decode_batch, key)
            self.decode_batch = decode_batch
        result, packed = self.rounds.run(self.inputs) if key is None else self.rounds.replay(key)
        return Launched(decode_batch, result, Download(packed))

    def launch_prefill(self, chunks: list[Chunk]) -> None:
        size = None if self.prefills.pool is None else self.prefill_sizes.fitting(chunks)
        if size is None:
            self.round.prefill(PackedChunks.of(chunks, self.device))
            return
        num_tokens, num_chunks = size
        assert self.idle_row is not None
        # The idle row has a chunk of its own. Any chunk may have all tokens: a graph is not specific to their lengths.
        padded = pad(chunks, num_tokens, num_chunks + 1, self.idle_row)
        self.prefills(size, PackedChunks.of(padded, self.device, longest=num_tokens))

    def capture_round(self, size: int, features: RoundFeatures) -> None:
        """Captures the rounds of a batch size. Only idle rows take part, so the run before it has no effect."""
        assert self.idle_row is not None
        self.rounds.capture((size, features), self._inputs([self.idle_row] * size, features, []))

    def _round_key(self, decode_batch: DecodeBatch) -> RoundKey | None:
        """The graph that runs a batch; None: it runs eagerly."""
        if self.rounds.pool is None or decode_batch.is_constrained:
            return None
        return next(size for size in self.batch_sizes if size >= len(decode_batch.rows)), decode_batch.features

    def _load(self, decode_batch: DecodeBatch, key: RoundKey | None) -> None:
        """Puts the rows of a batch on the device, for a graph into its own inputs."""
        rows, features = decode_batch.rows, decode_batch.features
        if key is None:
            self.inputs = self._inputs(rows, features, decode_batch.requests)
            return
        if key not in self.rounds:
            self.capture_round(*key)
        assert self.idle_row is not None
        self.rounds.load(key, self._inputs(rows + [self.idle_row] * (key[0] - len(rows)), features, []))

    def _inputs(self, rows: list[int], features: RoundFeatures, requests: list[Request]) -> RoundInputs:
        return RoundInputs(upload(rows, torch.int64, self.device), features, requests)
