"""Forward and backward passes of a training step: run eagerly, or captured once as CUDA graphs and replayed.

A step launches thousands of kernels. With small batches the launches take longer than the kernels; a graph is launched
at once.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from jetspec.capture import CapturedFn, GraphPool
from jetspec.data.corpus import PackedBatch
from jetspec.models.decoder import Decoder, Hidden
from jetspec.train.blocks import Drafts, document_mask
from jetspec.train.loss import DraftLoss, HeadWithLoss


class Passes:
    """Passes of a step. `encode` runs the target on a batch; `backward` and `score` run the head on its drafts.

    With a pool a pass is captured at the first call with its sizes. Gradients then stay in place, and each replay adds
    to all of them at once: one by one, as in an eager backward, most are too small for a GPU. The target's states stay
    in place, too, where the graphs of the drafts read them.
    """

    def __init__(self, model: HeadWithLoss, target: Decoder, pool: GraphPool | None) -> None:
        self.model, self.target, self.pool = model, target, pool
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.totals: list[Tensor] = []
        """Gradients that graphs add to."""
        self._encode = CapturedFn(self.target_states, pool)
        self._backward = CapturedFn(self._draft_backward, pool)

    @property
    def num_captured(self) -> int:
        return 0 if self.pool is None else self.pool.num_captured

    def encode(self, batch: PackedBatch) -> None:
        """Runs the target on a batch, for the calls of `backward` or `score` that follow."""
        self.size = batch.shapes
        if self.pool is None or self.size not in self._encode:
            batch = batch.to(self.device)
        self.states = self._encode(self.size, batch)
        self.batch = batch if self.pool is None else self._encode.captured[self.size].inputs

    def backward(self, drafts: Drafts) -> DraftLoss:
        """Adds the gradient of some drafts to that of the weights; returns their loss, detached."""
        key = (self.size, drafts.shapes)
        if self.pool is None:
            return self._backward(key, drafts.to(self.device))
        if key not in self._backward:
            self._capture_backward(key, drafts)
        pairs = zip(self.parameters, self.totals, strict=True)
        assert all(parameter.grad is total for parameter, total in pairs), "graphs add to gradients in place"
        return self._backward(key, drafts).map(Tensor.clone)

    def score(self, drafts: Drafts) -> DraftLoss:
        """The loss of some drafts. Gradients are undefined afterwards: a graph without them would take its own memory,
        so that of `backward` is replayed."""
        if self.pool is not None:
            return self.backward(drafts)
        return self._draft(drafts.to(self.device)).map(Tensor.detach)

    def zero_gradients(self) -> None:
        """Graphs add to gradients in place; eager passes allocate new ones."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.pool is not None and grads:
            torch._foreach_zero_(grads)
        elif self.pool is None:
            for parameter in self.parameters:
                parameter.grad = None

    def sync_gradients(self, enabled: bool) -> None:
        """Sets whether a backward reduces sharded gradients across processes. The last one of a step has to."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)

    @torch.no_grad()
    def target_states(self, batch: PackedBatch) -> Hidden:
        """States of the target, shared by all drafts of a batch."""
        taps = self.model.head.head_config.tap_layers
        return self.target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)

    def _draft(self, drafts: Drafts) -> DraftLoss:
        with nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype):
            loss: DraftLoss = self.model(self.target, self.batch, drafts, self.states)
        return loss

    def _draft_backward(self, drafts: Drafts) -> DraftLoss:
        loss = self._draft(drafts)
        if self.pool is None:
            loss.loss_sum.backward()
        else:
            found = torch.autograd.grad(loss.loss_sum, self.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(self.totals, found)
        return loss.map(Tensor.detach)

    def _capture_backward(self, key: Any, drafts: Drafts) -> None:
        """Captures a pass. Gradients are restored afterwards, because a capture runs the pass once."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.totals = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        before = [total.clone() for total in self.totals]
        self._backward.capture(key, drafts.to(self.device))
        torch._foreach_copy_(self.totals, before)
