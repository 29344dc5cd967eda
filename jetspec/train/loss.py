"""The training loss: states of the head, weights of the positions, distillation, and hit rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetspec import ops
from jetspec.data.corpus import PackedBatch
from jetspec.models.decoder import Decoder, Hidden
from jetspec.models.draft_head import DraftHead
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.heads import Head
from jetspec.ops.distill_loss import Student
from jetspec.ops.select import force
from jetspec.train.blocks import Blocks, Drafts, block_mask, draft_mask
from jetspec.train.config import LossConfig


@dataclass(frozen=True)
class Metrics:
    """Results of a step or a validation. `chain` is the expected tokens per round of a chain: correct slots + 1."""

    loss: float
    chain: float
    hit_rate: list[float]
    """Per depth: share of the blocks with a label there that are correct up to it."""
    positions: int


class DraftLoss(NamedTuple):
    """Sums over drafts. Passes, micro-batches and devices are added up before dividing."""

    loss_sum: Tensor
    weight_sum: Tensor
    num_blocks: Tensor
    hit_D: Tensor
    """Drafts whose slot k and all before it are correct."""
    reach_D: Tensor
    """Drafts with a label at slot k."""

    def map(self, change: Callable[[Tensor], Tensor]) -> DraftLoss:
        return DraftLoss(*map(change, self))

    @staticmethod
    def add_up(parts: Iterable[DraftLoss], across: bool) -> DraftLoss:
        """The detached sum of `parts`, over all processes if `across`."""
        rows = [torch.cat([x.detach().double().flatten() for x in part]) for part in parts]
        total = torch.stack(rows).sum(0)
        if across and dist.is_initialized():
            dist.all_reduce(total)
        depth = (len(total) - 3) // 2
        return DraftLoss(*total[:3], *total[3:].split(depth))

    def metrics(self) -> Metrics:
        """The metrics as numbers. Waits for the device."""
        hits, reach = self.hit_D.tolist(), self.reach_D.tolist()
        return Metrics(
            loss=float(self.loss_sum / self.weight_sum),
            chain=1 + sum(hits) / max(1.0, float(self.num_blocks)),
            hit_rate=[h / r if r else 0.0 for h, r in zip(hits, reach, strict=True)],
            positions=int(sum(reach)),
        )


class HeadWithLoss(nn.Module):
    """A head with its loss: everything that backward passes through, as one module that can be sharded."""

    def __init__(self, head: Head, config: LossConfig) -> None:
        super().__init__()
        self.head, self.config = head, config

    def forward(self, target: Decoder, batch: PackedBatch, drafts: Drafts, states: Hidden) -> DraftLoss:
        if isinstance(self.head, Eagle3Head):
            return unrolled_loss(self.head, target, batch, drafts, states, self.config)
        assert isinstance(drafts, Blocks)
        return block_loss(self.head, target, batch, drafts, states, self.config)


def block_loss(
    head: DraftHead, target: Decoder, batch: PackedBatch, blocks: Blocks, states: Hidden, config: LossConfig
) -> DraftLoss:
    """Loss of one pass over all blocks. The teacher of slot k at anchor a is the target's row at a + k - 1."""
    at = blocks.drafted_P
    hidden = block_states(head, target, batch, blocks, states).flatten(0, 2).index_select(0, at)
    edge = successor = None
    if head.edge is not None:
        parent = batch.token_RT.flatten()[blocks.source_RAD.flatten()[at]]
        edge = nn.functional.embedding(parent, head.edge.predecessor) * head.edge.gates(hidden)
        successor = head.edge.successor
    label = blocks.label_RAD.flatten()[at]
    return distil(hidden, label, blocks, target.lm_head, states, config, edge_RQ=edge, successor_VQ=successor)


def unrolled_loss(
    head: Eagle3Head, target: Decoder, batch: PackedBatch, drafts: Drafts, states: Hidden, config: LossConfig
) -> DraftLoss:
    """Loss of an autoregressive head, unrolled on its own states, as in decoding, along the target's tokens.

    Teacher and head are compared over the head's vocabulary. Labels outside of it have no loss.
    """
    at, vocabulary = drafts.drafted_P, head.token_of
    hidden = chain_states(head, target, batch, drafts, states).flatten(0, 2).index_select(0, at)
    number = torch.arange(len(vocabulary), device=vocabulary.device)
    own_of = vocabulary.new_full((target.config.vocab_size,), -1).scatter(0, vocabulary, number)
    label = own_of[drafts.label_RAD.flatten()[at]]
    teacher_head = target.lm_head if len(vocabulary) == len(target.lm_head) else target.lm_head[vocabulary]
    own_head = head.lm_head.weight
    return distil(hidden, label, drafts, teacher_head, states, config, student_head_VM=own_head)


def distil(
    hidden: Tensor,
    label: Tensor,
    drafts: Drafts,
    teacher_head: Tensor,
    states: Hidden,
    config: LossConfig,
    **student: Unpack[Student],
) -> DraftLoss:
    """The loss from the states of the predictions. A label below 0 has no loss and counts as wrong."""
    at, valid, known = drafts.drafted_P, drafts.valid_RAD, (label >= 0) & drafts.taught_P
    label = label.clamp(min=0)
    weight_RAD = torch.ones(valid.shape, device=hidden.device)
    if config.gamma is not None:
        weight_RAD = weight_RAD * torch.exp(-torch.arange(valid.shape[-1], device=hidden.device) / config.gamma)
    if config.dpace is not None:  # the expected accepted prefixes through a slot
        prob = _spread(ops.label_prob(hidden, teacher_head, label, **student) * known, at, valid)
        accepted = ((1 - config.dpace) * prob + config.dpace).cumprod(-1) * valid
        weight_RAD = accepted.flip(-1).cumsum(-1).flip(-1)
    weight = weight_RAD.flatten()[at] * known
    result = ops.distill_loss(
        hidden,
        states.hidden_TM.flatten(0, 1)[drafts.teacher_CS.flatten()],
        teacher_head,
        label,
        weight,
        kind=config.kind,
        temperature=config.temperature,
        teacher_of_R=drafts.teacher_P,
        chunk=ops.CHUNK,  # as laid out
        **student,
    )
    return DraftLoss(
        loss_sum=result.loss_sum,
        weight_sum=weight.sum(),
        num_blocks=valid[..., 0].sum(),
        hit_D=_spread(result.hit_R.long(), at, valid).cumprod(-1).sum((0, 1)),
        reach_D=valid.sum((0, 1)),
    )


def block_states(head: DraftHead, target: Decoder, batch: PackedBatch, blocks: Blocks, states: Hidden) -> Tensor:
    """States of the predicting slots, (R, A, D, M), from one pass over all blocks."""
    assert states.tap_TX is not None
    embedded = target.embed(blocks.token_RQ).to(head.norm.weight.dtype)
    if torch.is_grad_enabled() and head.fc.weight.requires_grad:
        embedded.requires_grad_()  # unused, but it makes the first layer compile like the others
    visible = block_mask(batch, blocks, head.head_config)
    with force("reference"):  # also without gradients: a compiled layer fuses the same operations
        hidden = head.forward_blocks(embedded, blocks.position_RQ, states.tap_TX, batch.position_RT, visible)
    return head.predicting(hidden.unflatten(1, (-1, head.head_config.block_size)))


def chain_states(head: Eagle3Head, target: Decoder, batch: PackedBatch, drafts: Drafts, states: Hidden) -> Tensor:
    """States of every step of every draft, (R, A, D, M)."""
    assert states.tap_TX is not None
    drafted_RAD = batch.token_RT.flatten()[drafts.source_RAD]
    embedded, drafted = (head.embed(x, target).to(head.norm.weight.dtype) for x in (batch.token_RT, drafted_RAD))
    visible = draft_mask(batch, drafts)
    with force("reference"):
        return head.forward_unrolled(embedded, states.tap_TX, batch.position_RT, drafts.end_RA, drafted, visible)


def _spread(value_P: Tensor, at_P: Tensor, valid_RAD: Tensor) -> Tensor:
    """Values of the predictions at their indices, zeros elsewhere. Values of padding must be 0."""
    return value_P.new_zeros(valid_RAD.numel()).index_add(0, at_P, value_P).view(valid_RAD.shape)
