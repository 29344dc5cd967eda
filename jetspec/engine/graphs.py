"""How rounds are run: as they are written, or captured once as CUDA graphs and replayed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jetspec import ops
from jetspec.engine.drafter import RoundState
from jetspec.engine.round import Round, RoundResult
from jetspec.engine.rows import Download, RowTable, upload
from jetspec.graph_pool import GraphPool
from jetspec.types import Request, Wants


@dataclass(frozen=True, eq=False)
class Lineup:
    """The requests of a round, and what stays the same while nobody joins or leaves."""

    requests: list[Request]
    rows: list[int]
    moves: list[int]
    wants: Wants
    is_constrained: bool
    """Somebody's next tokens depend on a look at the tree."""
    waits: bool
    """Nothing may start before the host has read this round: a constraint must follow the text, and a trace is drawn
    from the device's own result, which the next round overwrites."""

    @staticmethod
    def of(requests: list[Request]) -> Lineup:
        is_constrained = any(request.constraint for request in requests)
        return Lineup(
            requests,
            rows=[request.row for request in requests],
            moves=[request.moves for request in requests],
            wants=Wants.of((r.sampling for r in requests), [r.limits for r in requests]),
            is_constrained=is_constrained,
            waits=is_constrained or any(request.want_trace for request in requests),
        )

    def is_of(self, requests: list[Request]) -> bool:
        """Whether these are the same requests, each still in the row it had."""
        return requests == self.requests and self.moves == [request.moves for request in requests]


@dataclass(frozen=True)
class Launched:
    """A round under way. `result` is the device's: with graphs it holds until the next launch."""

    lineup: Lineup
    result: RoundResult
    packed: Download

    def read(self) -> list[tuple[int, list[int], list[float]]]:
        """Per request: nodes of the tree, the committed tokens, and their log-probabilities as `PathLogprobs` packs
        them."""
        width = 2 + self.result.token_BD1.shape[1]
        packed = self.packed.read()[: len(self.lineup.requests)]
        rows = zip(packed[:, :width].long().tolist(), packed[:, width:].tolist(), strict=True)
        return [(size, tokens[: length + 1], logprobs) for (length, size, *tokens), logprobs in rows]


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
        result = self.round(round_state(rows, self.row_B, lineup.wants, lineup.requests))
        return Launched(lineup, result, Download.of(result.packed))


def round_state(rows: RowTable, row_B: Tensor, wants: Wants, requests: list[Request]) -> RoundState:
    limits = rows.limits(row_B) if wants.drafting == "limited" else None
    return RoundState(row_B, rows.anchor_R[row_B], rows.sampling(row_B, wants), requests, wants, limits)


class Mail:
    """What a graph leaves to the host, in the host's own memory: nothing is copied between two rounds. Rounds that are
    under way at the same time write to places of their own. The memory is there until all of them are over: nobody
    else knows that the device writes to it."""

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.num_places, self.num_posted = num_places, 0
        self.count_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.places: Tensor | None = None
        self.last = deque[Download](maxlen=1)
        weakref.finalize(self, read_all, self.last)

    def post(self, packed: Tensor) -> None:
        """Part of what is captured."""
        if self.places is None:
            shape = (self.num_places, *packed.shape)
            self.places = torch.empty(shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
        ops.post(packed, self.places, self.count_1)

    def agree(self) -> None:
        """The device counts what the host does: not what was posted while a graph was made, or broken off by Ctrl-C."""
        self.count_1.fill_(self.num_posted)

    def next(self) -> Download:
        """What a replay writes that has just been launched."""
        assert self.places is not None
        place = self.places[self.num_posted % self.num_places]
        self.num_posted += 1
        self.last.append(download := Download(place, self.count_1.device))
        return download


def read_all(downloads: Iterable[Download]) -> None:
    for download in downloads:
        download.read()


@dataclass
class Captured:
    """One graph: the rows it reads, and what it leaves."""

    row_B: Tensor
    graph: torch.cuda.CUDAGraph
    result: RoundResult
    mail: Mail
    rows: list[int]
    """What `row_B` holds."""


class GraphRounds:
    """A round is captured when a batch of its size first comes up, with the trees of that size, and replayed from then
    on.

    A batch is padded to the next captured size with the cache's idle row. A batch with constraints needs the host in
    the middle of a round, so it runs as written.
    """

    def __init__(self, round: Round, max_batch: int, pool: GraphPool, ahead: int) -> None:
        self.round, self.pool, self.ahead = round, pool, ahead
        self.sizes = batch_sizes(max_batch)
        self.eager = EagerRounds(round)
        self.graphs: dict[tuple[int, Wants], Captured] = {}

    def launch(self, lineup: Lineup) -> Launched:
        if lineup.is_constrained:
            return self.eager.launch(lineup)
        size = next(size for size in self.sizes if size >= len(lineup.rows))
        key = (size, lineup.wants)
        if key not in self.graphs:
            self.graphs[key] = self.capture(*key)
        captured = self.graphs[key]
        assert self.round.cache.idle_row is not None
        rows = lineup.rows + [self.round.cache.idle_row] * (size - len(lineup.rows))
        if captured.rows != rows:
            captured.row_B.copy_(upload(rows, torch.int64, self.pool.device))
            captured.rows = rows
        try:
            captured.graph.replay()
            packed = captured.mail.next()
        except BaseException:
            captured.mail.agree()
            raise
        return Launched(lineup, captured.result, packed)

    def capture(self, size: int, wants: Wants) -> Captured:
        """Record a round. Nothing but idle rows take part, so the run before it leaves no trace."""
        assert self.round.cache.idle_row is not None
        idle = [self.round.cache.idle_row] * size
        row_B, rows = upload(idle, torch.int64, self.pool.device), self.round.cache.rows

        mail = Mail(self.ahead + 1, self.pool.device)

        def run() -> RoundResult:
            result = self.round(round_state(rows, row_B, wants, []))
            mail.post(result.packed)
            return result

        graph, result = self.pool.capture(run)
        mail.agree()
        return Captured(row_B, graph, result, mail, idle)


def batch_sizes(max_batch: int) -> list[int]:
    """Sizes to capture: all small ones, then steps of at most a half, so that little is spent on padding."""
    sizes, step = list(range(1, min(max_batch, 8) + 1)), 8
    while sizes[-1] < max_batch:
        sizes.append(min(max_batch, sizes[-1] + step // 2))
        if sizes[-1] >= 2 * step:
            step *= 2
    return sizes
