"""Anchored blocks: where drafts start, what each slot sees, and what it should say.

The block at anchor a is [x_a, MASK, ..] at positions a, a + 1, ..; its slots see the context strictly before a, as
they will when decoding, where the anchor's own tap does not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.models.draft_head import HeadConfig
from jetspec.train.data import PackedBatch


@dataclass(frozen=True)
class Blocks:
    """A blocks per row of S slots each, laid out slot by slot: Q = A * S. D depths per block are predicted."""

    token_RQ: Tensor
    position_RQ: Tensor
    visible_RQK: Tensor
    """What each slot sees of the T context rows, then of the Q slots."""
    source_RAD: Tensor
    """Index in the row of the token before the predicted one: the teacher's row, and the edge term's parent."""
    label_RAD: Tensor
    valid_RAD: Tensor


def causal_documents(batch: PackedBatch) -> Tensor:
    """What a target sees in a packed row, (R, T, T): earlier tokens of its own document."""
    index = torch.arange(batch.token_RT.shape[1], device=batch.token_RT.device)
    same = batch.document_RT[:, :, None] == batch.document_RT[:, None]
    return same & (index <= index[:, None])


def choose_anchors(batch: PackedBatch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Up to `count` anchors per row, drawn evenly among the tokens before a written one; sorted, with a validity mask.

    The token before the first written one is the anchor that decoding starts from.
    """
    document, written = batch.document_RT, batch.written_RT
    possible = torch.zeros_like(written)
    possible[:, :-1] = written[:, 1:] & (document[:, 1:] == document[:, :-1]) & (document[:, :-1] >= 0)
    draw = torch.rand(possible.shape, generator=generator).to(possible.device)
    count = min(count, possible.shape[1])
    score, anchor = torch.where(possible, draw, -1.0).topk(count, dim=1)
    anchor, order = torch.where(score >= 0, anchor, possible.shape[1] - 1).sort(dim=1)
    return anchor, score.gather(1, order) >= 0


def lay_out(batch: PackedBatch, anchor_RA: Tensor, valid_RA: Tensor, head: HeadConfig) -> Blocks:
    R, T = batch.token_RT.shape
    A, S, D = anchor_RA.shape[1], head.block_size, head.depth
    device = anchor_RA.device
    slot_S = torch.arange(S, device=device)

    token = torch.full((R, A, S), head.mask_token, device=device)
    token[:, :, 0] = batch.token_RT.gather(1, anchor_RA)
    position = batch.position_RT.gather(1, anchor_RA)[..., None] + slot_S

    document_RA = batch.document_RT.gather(1, anchor_RA)
    source = anchor_RA[..., None] + torch.arange(D, device=device)
    label_at = (source + 1).clamp(max=T - 1)
    flat = label_at.flatten(1)
    same = batch.document_RT.gather(1, flat).view(R, A, D) == document_RA[..., None]
    fits = (source + 1 < T) & same & batch.written_RT.gather(1, flat).view(R, A, D)
    valid = (fits & valid_RA[..., None]).long().cumprod(-1).bool()  # a block ends at its first invalid label
    return Blocks(
        token_RQ=token.flatten(1),
        position_RQ=position.flatten(1),
        visible_RQK=_visible(batch, anchor_RA, valid_RA, document_RA, head.causal, S),
        source_RAD=source.clamp(max=T - 1),
        label_RAD=batch.token_RT.gather(1, flat).view(R, A, D),
        valid_RAD=valid,
    )


def _visible(
    batch: PackedBatch, anchor_RA: Tensor, valid_RA: Tensor, document_RA: Tensor, causal: bool, S: int
) -> Tensor:
    (R, A), T, device = anchor_RA.shape, batch.token_RT.shape[1], anchor_RA.device
    index = torch.arange(T, device=device)
    before = (index < anchor_RA[..., None]) & (batch.document_RT[:, None] == document_RA[..., None])
    context = (before & valid_RA[..., None])[:, :, None].expand(R, A, S, T).reshape(R, A * S, T)
    slot = torch.arange(A * S, device=device)
    within = (slot // S)[:, None] == slot // S
    if causal:
        within = within & (slot <= slot[:, None])
    return torch.cat((context, within.expand(R, -1, -1)), -1)
