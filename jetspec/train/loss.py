"""From blocks to a number: states of the slots, weights of the positions, distillation, and what was right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec import ops
from jetspec.models.decoder import Decoder, Hidden
from jetspec.models.draft_head import DraftHead
from jetspec.train.blocks import Blocks
from jetspec.train.config import LossConfig
from jetspec.train.data import PackedBatch


@dataclass(frozen=True)
class DraftLoss:
    """Sums, so that micro-batches and devices can be added up before dividing."""

    loss_sum: Tensor
    weight_sum: Tensor
    hit_D: Tensor
    """Blocks whose slot k is right, and all before it."""
    reach_D: Tensor
    """Blocks that have a label at slot k."""
    num_blocks: Tensor

    @staticmethod
    def names() -> tuple[str, ...]:
        return "weight_sum", "hit_D", "reach_D", "num_blocks"


def draft_loss(
    head: DraftHead, target: Decoder, batch: PackedBatch, blocks: Blocks, seen: Hidden, config: LossConfig
) -> DraftLoss:
    """One pass of the head over all blocks. Slot k at anchor a is taught by the target's row at a + k - 1."""
    assert seen.tap_TX is not None
    embedded = target.embed(blocks.token_RQ).to(head.norm.weight.dtype)
    states = head.forward_blocks(embedded, blocks.position_RQ, seen.tap_TX, batch.position_RT, blocks.visible_RQK)
    R, A, D = blocks.valid_RAD.shape
    slots = head.predicting(states.view(R, A, -1, states.shape[-1]))

    row, block, depth = blocks.valid_RAD.nonzero(as_tuple=True)
    hidden, label = slots[row, block, depth], blocks.label_RAD[row, block, depth]
    source = blocks.source_RAD[row, block, depth]
    edge = successor = None
    if head.edge is not None:
        parent = batch.token_RT[row, source]
        edge, successor = head.edge.predecessor[parent] * head.edge.gates(hidden), head.edge.successor

    weight = position_weights(D, config, hidden.device)[depth]
    if config.dpace is not None:
        prob = torch.zeros(R, A, D, device=hidden.device)
        prob[row, block, depth] = ops.label_prob(hidden, target.lm_head, label, edge_RQ=edge, successor_VQ=successor)
        weight = stakes(prob, blocks.valid_RAD, config.dpace)[row, block, depth]
    result = ops.distill_loss(
        hidden,
        seen.hidden_TM[row, source],
        target.lm_head,
        label,
        weight,
        kind=config.kind,
        temperature=config.temperature,
        edge_RQ=edge,
        successor_VQ=successor,
    )
    hit = torch.zeros(R, A, D, dtype=torch.long, device=hidden.device)
    hit[row, block, depth] = result.hit_R.long()
    return DraftLoss(
        loss_sum=result.loss_sum,
        weight_sum=weight.sum(),
        hit_D=hit.cumprod(-1).sum((0, 1)).double(),
        reach_D=blocks.valid_RAD.sum((0, 1)).double(),
        num_blocks=blocks.valid_RAD[..., 0].sum().double(),
    )


def position_weights(depth: int, config: LossConfig, device: torch.device) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1..D; ones without gamma."""
    k = torch.arange(depth, device=device, dtype=torch.float32)
    return torch.ones_like(k) if config.gamma is None else torch.exp(-k / config.gamma)


def stakes(prob_RAD: Tensor, valid_RAD: Tensor, smoothing: float) -> Tensor:
    """D-PACE: a slot weighs the accepted prefixes that pass through it, from smoothed probabilities of the labels."""
    accepted = ((1 - smoothing) * prob_RAD + smoothing).cumprod(-1) * valid_RAD
    return accepted.flip(-1).cumsum(-1).flip(-1)
