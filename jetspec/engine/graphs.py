"""How rounds are run: as they are written, or captured once as CUDA graphs and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from jetspec.engine.drafter import RoundState
from jetspec.engine.round import Round, RoundResult
from jetspec.engine.rows import upload
from jetspec.types import Request, TreeLimits

Drafting = Literal["whole", "limited", "none"]
"""What a batch wants of the drafter: its trees, trees of which some are cut to a request's limits, or nothing."""


def drafting_for(limits: list[TreeLimits | None]) -> Drafting:
    if limits and all(limit is not None and limit.budget == 1 for limit in limits):
        return "none"
    return "limited" if any(limits) else "whole"


@dataclass(frozen=True, eq=False)
class Lineup:
    """The requests of a round, and what stays the same while nobody joins or leaves."""

    requests: list[Request]
    rows: list[int]
    moves: list[int]
    any_sampled: bool
    any_filtered: bool
    wants_trace: bool
    drafting: Drafting

    @staticmethod
    def of(requests: list[Request]) -> Lineup:
        params = {id(request.sampling): request.sampling for request in requests}.values()
        return Lineup(
            requests,
            rows=[request.row for request in requests],
            moves=[request.moves for request in requests],
            any_sampled=any(p.temperature > 0 for p in params),
            any_filtered=any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
            wants_trace=any(request.want_trace for request in requests),
            drafting=drafting_for([request.limits for request in requests]),
        )

    def is_of(self, requests: list[Request]) -> bool:
        """Whether these are the same requests, each still in the row it had."""
        return requests == self.requests and self.moves == [request.moves for request in requests]


@dataclass(frozen=True)
class Launched:
    """A round under way. `result` is the device's: with graphs it holds until the next launch."""

    lineup: Lineup
    result: RoundResult
    packed: Tensor
    arrived: torch.cuda.Event | None = None

    def read(self) -> list[list[int]]:
        """Per request: draft tokens kept, nodes of the tree, then the committed tokens, the last one repeated to the
        end of the row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.packed[: len(self.lineup.requests)].tolist()


class Rounds(Protocol):
    """Something that runs rounds."""

    def launch(self, lineup: Lineup) -> Launched: ...


class EagerRounds:
    """Every round as it is written."""

    def __init__(self, round: Round) -> None:
        self.round, self.lineup = round, Lineup.of([])

    def launch(self, lineup: Lineup) -> Launched:
        rows = self.round.cache.rows
        if lineup is not self.lineup:
            self.lineup, self.row_B = lineup, upload(lineup.rows, torch.int64, rows.device)
        sampling = rows.sampling(self.row_B, lineup.any_sampled, lineup.any_filtered)
        limits = rows.limits(self.row_B) if lineup.drafting == "limited" else None
        state = RoundState(
            self.row_B, rows.anchor_R[self.row_B], sampling, lineup.requests, limits, lineup.drafting == "none"
        )
        result = self.round(state)
        return Launched(lineup, result, result.packed_BD3)


@dataclass
class Captured:
    """One graph: the rows it reads, and what it leaves."""

    row_B: Tensor
    graph: torch.cuda.CUDAGraph
    result: RoundResult
    packed: Tensor
    lineup: Lineup | None = field(default=None)


class GraphRounds:
    """A round is captured when a batch of its size first comes up, and replayed from then on.

    A batch is padded to the next captured size with the cache's idle row. All graphs share their memory, because
    only one runs at a time.
    """

    def __init__(self, round: Round, max_batch: int) -> None:
        self.round, self.device = round, round.cache.device
        self.sizes = batch_sizes(max_batch)
        self.graphs: dict[tuple[int, bool, bool, Drafting], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def launch(self, lineup: Lineup) -> Launched:
        size = next(size for size in self.sizes if size >= len(lineup.rows))
        key = (size, lineup.any_sampled, lineup.any_filtered, lineup.drafting)
        if key not in self.graphs:
            self.graphs[key] = self.capture(*key)
        captured = self.graphs[key]
        if captured.lineup is not lineup:
            idle = self.round.cache.idle_row
            rows = lineup.rows + [idle] * (size - len(lineup.rows))
            captured.row_B.copy_(upload(rows, torch.int64, self.device))
            captured.lineup = lineup
        captured.graph.replay()
        packed = torch.empty(captured.packed.shape, dtype=torch.int64, pin_memory=True)
        packed.copy_(captured.packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launched(lineup, captured.result, packed, arrived)

    def capture(self, size: int, any_sampled: bool, any_filtered: bool, drafting: Drafting) -> Captured:
        """Record a round. Nothing but idle rows take part, so the runs that warm it up leave no trace."""
        assert self.round.cache.idle_row is not None
        row_B = torch.full((size,), self.round.cache.idle_row, device=self.device)
        rows = self.round.cache.rows

        def run() -> tuple[RoundResult, Tensor]:
            sampling = rows.sampling(row_B, any_sampled, any_filtered)
            limits = rows.limits(row_B) if drafting == "limited" else None
            result = self.round(RoundState(row_B, rows.anchor_R[row_B], sampling, [], limits, drafting == "none"))
            return result, result.packed_BD3

        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result, packed = run()
        return Captured(row_B, graph, result, packed)


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes to capture: all small ones, then steps of at most a half, so that little is spent on padding."""
    sizes, step = list(range(1, min(max_batch, 8) + 1)), 8
    while sizes[-1] < max_batch:
        sizes.append(min(max_batch, sizes[-1] + step // 2))
        if sizes[-1] >= 2 * step:
            step *= 2
    return sizes
