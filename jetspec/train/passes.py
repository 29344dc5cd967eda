"""How the passes of a step are run: as they are written, or captured once as CUDA graphs and replayed.

A step launches thousands of kernels. Where the batch is small, a host takes longer to launch them than a GPU to run
them; a graph is launched at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from jetspec.capture import GraphPool
from jetspec.data.corpus import OnDevice, PackedBatch
from jetspec.models.decoder import Hidden
from jetspec.train.blocks import Drafts
from jetspec.train.loss import DraftLoss

Input = TypeVar("Input", bound=OnDevice)
Output = TypeVar("Output")


class Work(Protocol):
    """What there is to run."""

    device: torch.device

    def capture_states(self, batch: PackedBatch) -> Hidden:
        """The target's states of a batch."""

    def draft(self, batch: PackedBatch, drafts: Drafts, seen: Hidden) -> DraftLoss: ...


class Passes(Protocol):
    @property
    def num_captured(self) -> int:
        """Graphs, so far."""

    def look(self, batch: PackedBatch) -> None:
        """Let the target see a batch, of which the drafts after it are."""

    def teach(self, drafts: Drafts) -> DraftLoss:
        """Add the gradient of some drafts to what the weights have; returns the loss without it."""

    def score(self, drafts: Drafts) -> DraftLoss:
        """The loss alone. Gradients mean nothing afterwards."""


class EagerPasses:
    """Every pass as it is written."""

    num_captured = 0

    def __init__(self, work: Work) -> None:
        self.work = work

    def look(self, batch: PackedBatch) -> None:
        self.batch = batch.to(self.work.device)
        self.seen = self.work.capture_states(self.batch)

    def teach(self, drafts: Drafts) -> DraftLoss:
        part = self.work.draft(self.batch, drafts.to(self.work.device), self.seen)
        part.loss_sum.backward()
        return part.map(Tensor.detach)

    def score(self, drafts: Drafts) -> DraftLoss:
        return self.work.draft(self.batch, drafts.to(self.work.device), self.seen).map(Tensor.detach)


@dataclass
class Captured(Generic[Input, Output]):
    """One graph: what it reads, and what it leaves."""

    input: Input
    graph: Any
    output: Output

    def replay(self, input: Input) -> Output:
        self.input.copy_(input)
        self.graph.replay()
        return self.output


class GraphPasses:
    """A pass is captured when one of its sizes first comes up, and replayed from then on.

    Weights keep their gradients in place, to which every replay adds: to all together, since one by one, as backward
    does it, most are too small for a GPU. The target's states stay where they are between its graph and those of the
    drafts, which read them there.
    """

    def __init__(self, work: Work, parameters: list[nn.Parameter], pool: GraphPool) -> None:
        self.work, self.parameters, self.pool = work, parameters, pool
        self.looks: dict[Any, Captured[PackedBatch, Hidden]] = {}
        self.lessons: dict[Any, Captured[Drafts, DraftLoss]] = {}
        self.totals: list[Tensor] = []
        """Gradients, where graphs add to them."""

    @property
    def num_captured(self) -> int:
        return len(self.looks) + len(self.lessons)

    def look(self, batch: PackedBatch) -> None:
        self.size = batch.shapes
        if self.size not in self.looks:
            here = batch.to(self.work.device)
            self.looks[self.size] = Captured(here, *self.pool.capture(lambda: self.work.capture_states(here)))
        self.looks[self.size].replay(batch)

    def teach(self, drafts: Drafts) -> DraftLoss:
        size = (self.size, drafts.shapes)
        if size not in self.lessons:
            self.lessons[size] = self._capture(drafts)
        pairs = zip(self.parameters, self.totals, strict=True)
        assert all(parameter.grad is total for parameter, total in pairs), "a graph adds to gradients that are gone"
        return self.lessons[size].replay(drafts).map(Tensor.clone)

    def score(self, drafts: Drafts) -> DraftLoss:
        """By the same graph: another one would need as much memory again."""
        return self.teach(drafts)

    def _capture(self, drafts: Drafts) -> Captured[Drafts, DraftLoss]:
        """Capturing takes a run that counts for nothing: gradients are then as they were."""
        here, looked = drafts.to(self.work.device), self.looks[self.size]
        totals = self.totals = [self._total(parameter) for parameter in self.parameters]
        before = [total.clone() for total in totals]

        def run() -> DraftLoss:
            part = self.work.draft(looked.input, here, looked.output)
            found = torch.autograd.grad(part.loss_sum, self.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(totals, found)
            return part.map(Tensor.detach)

        graph, part = self.pool.capture(run)
        torch._foreach_copy_(totals, before)
        return Captured(here, graph, part)

    @staticmethod
    def _total(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
