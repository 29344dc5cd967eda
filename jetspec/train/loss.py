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
from jetspec.train.blocks import Drafts, block_mask, draft_mask
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
        """Loss of one pass over all drafts. The teacher of slot k at anchor a is the target's row at a + k - 1.

        A head with its own vocabulary is compared with the teacher over that. Labels outside of it have no loss.
        """
        head, at, student = self.head, drafts.drafted_P, Student()
        teacher_head: Tensor = target.lm_head
        label = drafts.label_RAD.flatten()[at]
        if isinstance(head, Eagle3Head):
            hidden = chain_states(head, target, batch, drafts, states).flatten(0, 2).index_select(0, at)
            vocabulary = head.token_of
            number = torch.arange(len(vocabulary), device=vocabulary.device)
            own_of = vocabulary.new_full((target.config.vocab_size,), -1).scatter(0, vocabulary, number)
            label = own_of[label]
            if len(vocabulary) != len(teacher_head):
                teacher_head = teacher_head[vocabulary]
            student["student_head_VM"] = head.lm_head.weight
        else:
            assert isinstance(head, DraftHead)
            hidden = block_states(head, target, batch, drafts, states).flatten(0, 2).index_select(0, at)
            if head.edge is not None:
                parent = batch.token_RT.flatten()[drafts.source_RAD.flatten()[at]]
                student["edge_RQ"] = nn.functional.embedding(parent, head.edge.predecessor) * head.edge.gates(hidden)
                student["successor_VQ"] = head.edge.successor
        return distil(hidden, label, drafts, teacher_head, states, self.config, **student)


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


def block_states(head: DraftHead, target: Decoder, batch: PackedBatch, drafts: Drafts, states: Hidden) -> Tensor:
    """States of the predicting slots, (R, A, D, M), from one pass over the blocks of all drafts, slot by slot."""
    assert states.tap_TX is not None
    anchor_RA, position_RA = (x.gather(1, drafts.end_RA) for x in (batch.token_RT, batch.position_RT))
    S = head.head_config.block_size
    token_RQ = head.block_tokens(anchor_RA.flatten()).view(len(anchor_RA), -1)
    position_RQ = (position_RA[..., None] + torch.arange(S, device=anchor_RA.device)).flatten(1)
    embedded = target.embed(token_RQ).to(head.norm.weight.dtype)
    if torch.is_grad_enabled() and head.fc.weight.requires_grad:
        embedded.requires_grad_()  # unused, but it makes the first layer compile like the others
    visible = block_mask(batch, drafts, head.head_config)
    with force("reference"):  # also without gradients: a compiled layer fuses the same operations
        hidden = head.forward_blocks(embedded, position_RQ, states.tap_TX, batch.position_RT, visible)
    return head.predicting(hidden.unflatten(1, (-1, S)))


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
