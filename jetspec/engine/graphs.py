"""How rounds are run: as they are written, or captured once as CUDA graphs and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jetspec.capture import GraphPool
from jetspec.config import BatchTree
from jetspec.engine.drafter import RoundState
from jetspec.engine.round import Round, RoundResult
from jetspec.engine.rows import RowTable
from jetspec.ops.transfer import Download, upload
from jetspec.types import Request, RoundFeatures


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """The requests of a round, and what stays the same while nobody joins or leaves."""

    requests: list[Request]
    rows: list[int]
    row_epoch: list[int]
    features: RoundFeatures
    is_constrained: bool
    """Somebody's next tokens depend on a look at the tree."""
    waits: bool
    """Nothing may start before the host has read this round: a constraint must follow the text, and a trace is drawn
    from the device's own result, which the next round overwrites."""

    @staticmethod
    def of(requests: list[Request]) -> DecodeBatch:
        is_constrained = any(request.constraint for request in requests)
        return DecodeBatch(
            requests,
            rows=[request.row for request in requests],
            row_epoch=[request.row_epoch for request in requests],
            features=RoundFeatures.of((r.sampling for r in requests), [r.limits for r in requests]),
            is_constrained=is_constrained,
            waits=is_constrained or any(request.traced for request in requests),
        )

    def is_of(self, requests: list[Request]) -> bool:
        """Whether these are the same requests, each still in the row it had."""
        return requests == self.requests and self.row_epoch == [request.row_epoch for request in requests]


RoundRow = tuple[int, list[int], list[float]]
"""Of a request: nodes of the tree, the committed tokens, and their log-probabilities as `PathLogprobs` packs them."""


@dataclass(frozen=True)
class Launched:
    """A round under way. `result` is the device's: with graphs it holds until the next launch."""

    decode_batch: DecodeBatch
    result: RoundResult
    packed: Download

    def read(self) -> list[RoundRow]:
        width = 2 + self.result.verdict.token_BD1.shape[1]
        packed = self.packed.read()[: len(self.decode_batch.requests)]
        rows = zip(packed[:, :width].long().tolist(), packed[:, width:].tolist(), strict=True)
        return [(size, tokens[: length + 1], logprobs) for (length, size, *tokens), logprobs in rows]


class Rounds(Protocol):
    """Something that runs rounds."""

    def launch(self, decode_batch: DecodeBatch) -> Launched: ...


class EagerRounds:
    """Every round as it is written."""

    def __init__(self, round: Round) -> None:
        self.round, self.decode_batch = round, DecodeBatch.of([])

    def launch(self, decode_batch: DecodeBatch) -> Launched:
        rows = self.round.cache.rows
        if decode_batch is not self.decode_batch:
            self.decode_batch, self.row_B = decode_batch, upload(decode_batch.rows, torch.int64, rows.device)
        result = self.round(round_state(rows, self.row_B, decode_batch.features, decode_batch.requests))
        return Launched(decode_batch, result, Download(result.packed))


def round_state(rows: RowTable, row_B: Tensor, features: RoundFeatures, requests: list[Request]) -> RoundState:
    limits = rows.limits(row_B) if features.drafting == "limited" else None
    return RoundState(row_B, rows.anchor_R[row_B], rows.sampling(row_B, features), requests, features, limits)


@dataclass
class Captured:
    """One graph: the rows it reads, and what it leaves."""

    row_B: Tensor
    graph: torch.cuda.CUDAGraph
    result: RoundResult
    packed: Tensor
    rows: list[int]
    """What `row_B` holds."""


class GraphRounds:
    """A round is captured when a batch of its size first comes up, with the trees of that size, and replayed from then
    on.

    A batch is padded to the next captured size with the cache's idle row. A batch with constraints needs the host in
    the middle of a round, so it runs as written.
    """

    def __init__(self, round: Round, max_batch: int, pool: GraphPool) -> None:
        self.round, self.pool = round, pool
        self.sizes = batch_sizes(max_batch, round.drafter.tree.batch_trees)
        self.eager = EagerRounds(round)
        self.graphs: dict[tuple[int, RoundFeatures], Captured] = {}

    def launch(self, decode_batch: DecodeBatch) -> Launched:
        if decode_batch.is_constrained:
            return self.eager.launch(decode_batch)
        size = next(size for size in self.sizes if size >= len(decode_batch.rows))
        key = (size, decode_batch.features)
        if key not in self.graphs:
            self.graphs[key] = self.capture(*key)
        captured = self.graphs[key]
        assert self.round.cache.idle_row is not None
        rows = decode_batch.rows + [self.round.cache.idle_row] * (size - len(decode_batch.rows))
        if captured.rows != rows:
            captured.rows = []  # known again when they are there
            captured.row_B.copy_(upload(rows, torch.int64, self.pool.device))
            captured.rows = rows
        captured.graph.replay()
        return Launched(decode_batch, captured.result, Download(captured.packed))

    def capture(self, size: int, features: RoundFeatures) -> Captured:
        """Record a round. Nothing but idle rows take part, so the run before it leaves no trace."""
        assert self.round.cache.idle_row is not None
        idle = [self.round.cache.idle_row] * size
        row_B, rows = upload(idle, torch.int64, self.pool.device), self.round.cache.rows

        def run() -> tuple[RoundResult, Tensor]:
            result = self.round(round_state(rows, row_B, features, []))
            return result, result.packed

        graph, (result, packed) = self.pool.capture(run)
        return Captured(row_B, graph, result, packed, idle)


def batch_sizes(max_batch: int, batch_trees: Sequence[BatchTree] = ()) -> list[int]:
    """Sizes to capture: all small ones, then steps of at most a half, so that little is spent on padding; and the last
    before trees shrink, which padding is no reason for."""
    sizes, step = list(range(1, min(max_batch, 8) + 1)), 8
    while sizes[-1] < max_batch:
        sizes.append(min(max_batch, sizes[-1] + step // 2))
        if sizes[-1] >= 2 * step:
            step *= 2
    return sorted(
        {*sizes, *(batch_trees.batch - 1 for batch_trees in batch_trees if 1 < batch_trees.batch <= max_batch)}
    )
