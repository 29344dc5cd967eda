"""Drafts to train on: their anchors, attention masks and labels.

The block at anchor a is [x_a, MASK, ..] at positions a, a + 1, ..; its slots attend to the context strictly before a,
as in decoding, where the anchor's own tap does not exist yet. Masks, which compare every query with every key, have
operands of 32 bits: that takes half the time of 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetspec import ops
from jetspec.data.corpus import OnDevice, PackedBatch
from jetspec.models.draft_head import HeadConfig
from jetspec.models.eagle3 import Eagle3Config
from jetspec.models.masked_attention import Visible, make_visible


@dataclass(frozen=True)
class Drafts(OnDevice):
    """A drafts per row, each of the D tokens after its anchor.

    Made on the host, where the number of valid predictions is known without waiting for a device.
    """

    start_RA: Tensor
    """Index in the row of the first token of the anchor's document."""
    end_RA: Tensor
    """Index in the row of the anchor. A draft attends to the tokens before it; padding attends to none."""
    source_RAD: Tensor
    """Index over all rows of the token before the predicted one: the teacher's row, and the edge term's parent."""
    label_RAD: Tensor
    valid_RAD: Tensor
    drafted_P: Tensor
    """Flat indices of `valid_RAD`: the predictions with a loss, sorted by source. Padding is 0."""
    taught_P: Tensor
    """False at the padding of `drafted_P`."""
    teacher_CS: Tensor
    """Sources of each chunk of `drafted_P`, without repetitions, then padding."""
    teacher_P: Tensor
    """Index of the source of a prediction in its chunk."""


def document_mask(batch: PackedBatch) -> Visible:
    """Attention of the target in a packed row: the own document, up to the query."""
    (R, T), position_RT = batch.token_RT.shape, batch.position_RT.int()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= query - position_RT[row, query])

    return make_visible(sees, R, T, T, position_RT.device)


def block_mask(batch: PackedBatch, drafts: Drafts, head: HeadConfig) -> Visible:
    """Attention of a slot: of the T context rows those of its document before the anchor, and its own block."""
    (R, A), T, size, causal = drafts.end_RA.shape, batch.token_RT.shape[1], head.block_size, head.causal
    start_RA, end_RA = drafts.start_RA.int(), drafts.end_RA.int()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // size
        first = T + block * size
        last = T + query if causal else first + size - 1
        context = (key >= start_RA[row, block]) & (key < end_RA[row, block])
        return context | ((key >= first) & (key <= last))

    return make_visible(sees, R, A * size, T + A * size, start_RA.device)


def draft_mask(batch: PackedBatch, drafts: Drafts) -> Visible:
    """Attention of autoregressive drafts to the text: the document before the anchor, without its first token, which
    has no feature before it."""
    (R, A), T = drafts.end_RA.shape, batch.token_RT.shape[1]
    start_RA, end_RA = drafts.start_RA.int(), drafts.end_RA.int()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key > start_RA[row, query]) & (key < end_RA[row, query])

    return make_visible(sees, R, A, T, drafts.end_RA.device)


def choose_anchors(batch: PackedBatch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Up to `count` anchors per row, sampled uniformly from the tokens before a written one; sorted, with a validity
    mask. Decoding starts from the token before the first written one."""
    document, written = batch.document_RT, batch.written_RT
    possible = torch.zeros_like(written)
    possible[:, :-1] = written[:, 1:] & (document[:, 1:] == document[:, :-1]) & (document[:, :-1] >= 0)
    draw = torch.rand(possible.shape, generator=generator)
    count = min(count, possible.shape[1])
    score, anchor = torch.where(possible, draw, -1.0).topk(count, dim=1)
    anchor, order = torch.where(score >= 0, anchor, possible.shape[1] - 1).sort(dim=1)
    return anchor, score.gather(1, order) >= 0


def lay_out(
    batch: PackedBatch, anchor_RA: Tensor, valid_RA: Tensor, head: HeadConfig | Eagle3Config, multiple: int = 1
) -> Drafts:
    """Drafts of a head. Predictions are padded to a multiple of `multiple`, so that few sizes occur.

    An autoregressive head needs a feature before the anchor, so none of its drafts starts at a document's first token.
    """
    (R, T), (_, A), D = batch.token_RT.shape, anchor_RA.shape, head.depth
    if isinstance(head, Eagle3Config):
        valid_RA = valid_RA & (batch.position_RT.gather(1, anchor_RA) > 0)
    index = anchor_RA[..., None] + torch.arange(D)
    label_at = (index + 1).clamp(max=T - 1).flatten(1)
    document_RA, position_RA = (x.gather(1, anchor_RA) for x in (batch.document_RT, batch.position_RT))
    same = batch.document_RT.gather(1, label_at).view(R, A, D) == document_RA[..., None]
    fits = (index + 1 < T) & same & batch.written_RT.gather(1, label_at).view(R, A, D)
    valid = (fits & valid_RA[..., None]).long().cumprod(-1).bool()  # a draft ends at its first invalid label
    source = index.clamp(max=T - 1) + T * torch.arange(R)[:, None, None]
    drafted = valid.flatten().nonzero()[:, 0]
    source_P, order = source.flatten()[drafted].sort(stable=True)
    padding = (0, max(1, math.ceil(len(drafted) / multiple)) * multiple - len(drafted) if multiple > 1 else 0)
    last = int(source_P[-1]) if len(source_P) else 0
    teacher_CS, teacher_P = share_teachers(
        nn.functional.pad(source_P, padding, value=last), ops.CHUNK, max(1, multiple // 2)
    )
    return Drafts(
        start_RA=torch.where(valid_RA, anchor_RA - position_RA, 0),
        end_RA=torch.where(valid_RA, anchor_RA, 0),
        source_RAD=source,
        label_RAD=batch.token_RT.gather(1, label_at).view(R, A, D),
        valid_RAD=valid,
        drafted_P=nn.functional.pad(drafted[order], padding),
        taught_P=nn.functional.pad(torch.ones_like(drafted, dtype=torch.bool), padding),
        teacher_CS=teacher_CS,
        teacher_P=teacher_P,
    )


def share_teachers(source_P: Tensor, chunk: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Deduplicates sorted sources: those of each chunk once, padded to a multiple of `multiple`, and for every source
    its index in its chunk."""
    found = [part_P.unique_consecutive(return_inverse=True) for part_P in source_P.split(chunk)]
    teacher_CS = nn.utils.rnn.pad_sequence([teacher_S for teacher_S, _ in found], batch_first=True)
    padding = -teacher_CS.shape[1] % multiple
    return nn.functional.pad(teacher_CS, (0, padding)), torch.cat([place_P for _, place_P in found])
