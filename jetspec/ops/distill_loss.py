"""Distillation loss of drafted positions, fused with the output projection.

Logits are the largest tensors of training: a few thousand positions over a vocabulary of 152k take gigabytes, twice
with the teacher's. So rows are processed in chunks. Within a chunk the gradient overwrites the student's logits and is
multiplied back to the states at once; backward only scales.

R: rows, one per drafted position. S: rows of the teacher; several rows of the student may share one. Q: rank of the
edge term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetspec.ops.layouts import LossKind, RowScores
from jetspec.ops.select import select

CHUNK = 4096
"""Rows per chunk: enough to keep a GPU busy, and a gigabyte of logits over a vocabulary of 128k."""


_Factors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Hidden, edge, successor and output matrix."""


class Student(TypedDict, total=False):
    """Inputs of `distill_loss` from a head, besides its states."""

    edge_RQ: Tensor | None
    successor_VQ: Tensor | None
    student_head_VM: Tensor | None


@dataclass(frozen=True)
class DistillLoss:
    """Loss and statistics per row. Rows of weight 0 are skipped: their values and gradients are 0."""

    loss_sum: Tensor
    """Sum of weight * loss over the rows, the only differentiable value. The caller divides it by the sum of weights
    over all micro-batches and devices."""
    loss_R: Tensor
    hit_R: Tensor
    """True where the student's most probable token, the lowest of equals, is the label."""
    label_prob_R: Tensor
    """q(label), at the temperature of the loss."""


def distill_loss(
    hidden_RM: Tensor,
    teacher_RM: Tensor | None,
    lm_head_VM: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    *,
    kind: LossKind = "forward_kl",
    temperature: float = 1.0,
    edge_RQ: Tensor | None = None,
    successor_VQ: Tensor | None = None,
    student_head_VM: Tensor | None = None,
    teacher_of_R: Tensor | None = None,
    chunk: int = CHUNK,
) -> DistillLoss:
    """Compute the divergence of the student's distribution q from the teacher's p, or from the label, for every row.

        z = student_head hidden (+ successor edge)     q = softmax(z / T)
        u = lm_head teacher                            p = softmax(u / T)

        forward_kl   T^2 * sum p (log p - log q)
        reverse_kl   T^2 * sum q (log q - log p)
        sft          -log q(label), with T = 1 and no teacher

    The student uses `lm_head` unless it has an output matrix of its own. With `teacher_of_R`, rows share states of the
    teacher: `teacher` holds equally many for every chunk, and `teacher_of_R` indexes those of the row's chunk.

    Gradients reach `hidden`, `edge`, `successor` and `student_head`; all other inputs are constants. The logits of at
    most `chunk` rows exist at a time, in the dtype of autocast where enabled, else of `hidden`; losses and
    probabilities are at least fp32. Every label is a token id, also where the weight is 0.
    """
    assert kind == "sft" or teacher_RM is not None
    assert (edge_RQ is None) == (successor_VQ is None)
    if kind == "sft":
        teacher_RM, temperature = None, 1.0
    objective = _Objective(teacher_RM, teacher_of_R, lm_head_VM, label_R, weight_R, kind, temperature, chunk)
    student = (hidden_RM, edge_RQ, successor_VQ, student_head_VM)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in student):
        return DistillLoss(*_DistillLoss.apply(*student, objective))
    with torch.no_grad():
        return DistillLoss(*_score(student, [None] * len(student), objective))


def label_prob(
    hidden_RM: Tensor, lm_head_VM: Tensor, label_R: Tensor, *, chunk: int = CHUNK, **student: Unpack[Student]
) -> Tensor:
    """Return q(label) per row at temperature 1, without gradient: for weights that depend on it."""
    one_R = torch.ones(len(label_R), device=label_R.device)
    with torch.no_grad():
        result = distill_loss(hidden_RM, None, lm_head_VM, label_R, one_R, kind="sft", chunk=chunk, **student)
    return result.label_prob_R


def distill_loss_reference(
    z_RV: Tensor,
    u_SV: Tensor | None,
    teacher_of_R: Tensor | None,
    label_R: Tensor,
    weight_R: Tensor,
    kind: LossKind,
    temperature: float,
    with_grad: bool,
) -> RowScores:
    """Score rows of logits against the teacher's row of the same index, or that of `teacher_of_R`.

    With `with_grad`, `z_RV` becomes d(weight * loss) / dz. The divergence is T^2 times a function of z / T, so its
    slope is multiplied by T.
    """
    skipped_R = weight_R == 0
    log_q = _log_softmax(z_RV, temperature)
    label_logprob_R = log_q.gather(1, label_R[:, None])[:, 0]
    hit_R = (z_RV.argmax(-1) == label_R) & ~skipped_R
    if u_SV is None:
        loss_R, slope = -label_logprob_R, log_q.exp()
        slope[torch.arange(len(label_R), device=label_R.device), label_R] -= 1
    else:
        diverge = _forward_kl if kind == "forward_kl" else _reverse_kl
        log_p = _log_softmax(u_SV, temperature)
        loss_R, slope = diverge(log_p if teacher_of_R is None else log_p[teacher_of_R], log_q)
    if with_grad:
        z_RV.copy_(weight_R[:, None] * (temperature * slope)).masked_fill_(skipped_R[:, None], 0)
    loss_R = temperature**2 * loss_R.masked_fill(skipped_R, 0)
    return loss_R, hit_R, label_logprob_R.exp().masked_fill(skipped_R, 0)


def _log_softmax(logits_RV: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits_RV.to(_at_least_fp32(logits_RV)) / temperature, -1)


def _forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), log_q.exp() - p


def _reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    q, gap = log_q.exp(), log_q - log_p
    loss_R = (q * gap).sum(-1)
    return loss_R, q * (gap - loss_R[:, None])


@dataclass(frozen=True)
class _Objective:
    """Constants of the loss: inputs without gradients, and its parameters."""

    teacher_RM: Tensor | None
    teacher_of_R: Tensor | None
    lm_head_VM: Tensor
    label_R: Tensor
    weight_R: Tensor
    kind: LossKind
    temperature: float
    chunk: int

    def teachers(self, rows: slice) -> Tensor | None:
        """Return the teacher states of a chunk."""
        if self.teacher_RM is None or self.teacher_of_R is None:
            return None if self.teacher_RM is None else self.teacher_RM[rows]
        chunks = math.ceil(len(self.label_R) / self.chunk)
        return self.teacher_RM.unflatten(0, (chunks, -1))[rows.start // self.chunk]


class _DistillLoss(torch.autograd.Function):
    """Computes gradients in forward, while the logits exist. The loss is a scalar, so backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RM: Tensor,
        edge_RQ: Tensor | None,
        successor_VQ: Tensor | None,
        student_head_VM: Tensor | None,
        objective: _Objective,
    ) -> tuple[Tensor, ...]:
        student = (hidden_RM, edge_RQ, successor_VQ, student_head_VM)
        needed = zip(student, ctx.needs_input_grad[: len(student)], strict=True)
        grads = [torch.zeros_like(x, dtype=_at_least_fp32(x)) if x is not None and need else None for x, need in needed]
        loss_sum, *rows = _score(student, grads, objective)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(*rows)
        return loss_sum, *rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if grad is None else grad_sum * grad for grad in ctx.saved_tensors), None


def _score(
    student: _Factors, grads: Sequence[Tensor | None], objective: _Objective
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted sum, then `RowScores`. Fill the gradients of the student that are not None."""
    (hidden, edge, successor, head), (d_hidden, d_edge, d_successor, d_head) = student, grads
    M, dtype = hidden.shape[1], _compute_dtype(hidden)
    objective = replace(objective, lm_head_VM=objective.lm_head_VM.to(dtype))
    # The logits are x w^T, where x concatenates states and edges, and w their matrices.
    x, w = hidden.to(dtype), objective.lm_head_VM if head is None else head.to(dtype)
    if edge is not None and successor is not None:
        x, w = torch.cat((x, edge.to(dtype)), 1), torch.cat((w, successor.to(dtype)), 1)
    width = x.shape[1] if d_hidden is not None else x.shape[1] - M if d_edge is not None else 0
    dx = x.new_empty(len(x), width) if width else None  # of the last columns of x
    dws = [(at, dw) for at, dw in ((slice(0, M), d_head), (slice(M, None), d_successor)) if dw is not None]

    loss_R = torch.empty(len(hidden), dtype=_at_least_fp32(hidden), device=hidden.device)
    hit_R, label_prob_R = torch.empty_like(loss_R, dtype=torch.bool), torch.empty_like(loss_R)
    for start in range(0, len(hidden), objective.chunk):
        rows = slice(start, start + objective.chunk)
        loss_R[rows], hit_R[rows], label_prob_R[rows] = _score_chunk(rows, x, w, dx, dws, objective)
    if dx is not None:
        columns = 0 if d_hidden is None else M
        for grad, found in ((d_hidden, dx[:, :columns]), (d_edge, dx[:, columns:])):
            if grad is not None:
                grad.copy_(found)
    return (objective.weight_R * loss_R).sum(), loss_R, hit_R, label_prob_R


def _score_chunk(
    rows: slice, x: Tensor, w: Tensor, dx: Tensor | None, dws: list[tuple[slice, Tensor]], objective: _Objective
) -> RowScores:
    """Score one chunk. A separate function, so that its logits are freed before those of the next are allocated."""
    z_RV = x[rows] @ w.T
    teacher_SM, teacher_of_R = objective.teachers(rows), objective.teacher_of_R
    u_SV = None if teacher_SM is None else teacher_SM.to(z_RV.dtype) @ objective.lm_head_VM.T

    labels = None if teacher_of_R is None else teacher_of_R[rows], objective.label_R[rows], objective.weight_R[rows]
    kernel, with_grad = select("distill_loss", distill_loss_reference, z_RV), dx is not None or bool(dws)
    scores = kernel(z_RV, u_SV, *labels, objective.kind, objective.temperature, with_grad)
    if dx is not None:
        torch.mm(z_RV, w[:, -dx.shape[1] :], out=dx[rows])
    for columns, dw in dws:
        dw.add_(z_RV.T @ x[rows, columns])
    return scores


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
