"""The distillation loss of drafted positions, computed together with the output matrix.

Logits are the largest tensors of training: a few thousand positions over a vocabulary of 152k take gigabytes, twice
with the teacher's. So rows go through in chunks. Within a chunk the gradient overwrites the student's logits and is
multiplied back to the states at once, which leaves backward nothing to do but scale.

R counts rows, one per drafted position, S the teacher's, of which several rows may share one; Q is the rank of the edge
term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetspec.ops.layouts import LossKind, RowScores

Implementation = Literal["auto", "reference", "triton"]

ScoreRows = Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, LossKind, float, bool], RowScores]
"""What `distill_loss_reference` states and a kernel may do faster."""
Student = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Hidden, edge, successor and output matrix."""

HAS_TRITON = find_spec("triton") is not None
CHUNK = 4096
"""RowScores at a time: enough to keep a GPU busy, and a gigabyte of logits over a vocabulary of 128k."""


@dataclass(frozen=True)
class DistillLoss:
    """A row of weight 0 is skipped: its numbers and its gradients are 0."""

    loss_sum: Tensor
    """Sum of weight * loss over the rows: what to differentiate. The caller divides by the sum of the weights, once
    micro-batches and devices are added up."""
    loss_R: Tensor
    hit_R: Tensor
    """Whether the student's best token is the label. Of equally good tokens the lowest is the best."""
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
    implementation: Implementation = "auto",
) -> DistillLoss:
    """How far the student's distribution q is from the teacher's p, or from the label, row by row.

        z = student_head hidden (+ successor edge)     q = softmax(z / T)
        u = lm_head teacher                            p = softmax(u / T)

        forward_kl   T^2 * sum p (log p - log q)
        reverse_kl   T^2 * sum q (log q - log p)
        sft          -log q(label), with T = 1 and no teacher

    A student without an output matrix of its own uses `lm_head`. RowScores that one state teaches may share it: with
    `teacher_of_R`, `teacher` has equally many states for every chunk, and a row is taught by that one of its chunk's.
    Gradients reach `hidden`, `edge`, `successor` and
    `student_head`; everything else is constant. The logits of at most `chunk` rows
    exist at a time, in autocast's dtype where it is on and otherwise in that of `hidden`; losses and probabilities
    are fp32 or wider. Every label is a token id, also where the weight is 0.
    """
    assert kind == "sft" or teacher_RM is not None
    assert (edge_RQ is None) == (successor_VQ is None)
    lesson = _Lesson(
        teacher_RM=None if kind == "sft" else teacher_RM,
        teacher_of_R=teacher_of_R,
        lm_head_VM=lm_head_VM,
        label_R=label_R,
        weight_R=weight_R,
        kind=kind,
        temperature=1.0 if kind == "sft" else temperature,
        chunk=chunk,
        score_rows=_pick(implementation, hidden_RM.device),
    )
    student = (hidden_RM, edge_RQ, successor_VQ, student_head_VM)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in student):
        return DistillLoss(*_DistillLoss.apply(*student, lesson))
    with torch.no_grad():
        return DistillLoss(*_score(student, [None] * len(student), lesson))


def label_prob(
    hidden_RM: Tensor,
    lm_head_VM: Tensor,
    label_R: Tensor,
    *,
    edge_RQ: Tensor | None = None,
    successor_VQ: Tensor | None = None,
    student_head_VM: Tensor | None = None,
    chunk: int = CHUNK,
    implementation: Implementation = "auto",
) -> Tensor:
    """q(label) per row at temperature 1, without gradient: for weights that depend on it."""
    weight_R = torch.ones(len(label_R), device=label_R.device)
    with torch.no_grad():
        return distill_loss(
            hidden_RM,
            None,
            lm_head_VM,
            label_R,
            weight_R,
            kind="sft",
            edge_RQ=edge_RQ,
            successor_VQ=successor_VQ,
            student_head_VM=student_head_VM,
            chunk=chunk,
            implementation=implementation,
        ).label_prob_R


def distill_loss_reference(
    z_RV: Tensor,
    u_SV: Tensor | None,
    teacher_of_R: Tensor | None,
    label_R: Tensor,
    weight_R: Tensor,
    kind: LossKind,
    temperature: float,
    want_grad: bool,
) -> RowScores:
    """Score rows of logits, against the teacher's row of the same number or the one that `teacher_of_R` says. With
    `want_grad`, `z_RV` becomes d(weight * loss) / dz.

    The divergence is a function of z / T and is multiplied by T^2, so its slope is multiplied by T.
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
    if want_grad:
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
class _Lesson:
    """What a student learns from, and how: all that gets no gradient."""

    teacher_RM: Tensor | None
    teacher_of_R: Tensor | None
    lm_head_VM: Tensor
    label_R: Tensor
    weight_R: Tensor
    kind: LossKind
    temperature: float
    chunk: int
    score_rows: ScoreRows

    def teachers(self, rows: slice) -> Tensor | None:
        """Those of a chunk."""
        if self.teacher_RM is None or self.teacher_of_R is None:
            return None if self.teacher_RM is None else self.teacher_RM[rows]
        chunks = math.ceil(len(self.label_R) / self.chunk)
        return self.teacher_RM.unflatten(0, (chunks, -1))[rows.start // self.chunk]


@dataclass(frozen=True)
class _Logits:
    """The student's logits as one product x w^T: states and edges lie side by side, as their matrices do.

    Each part has columns of its own, and may want its gradients: dx in `dx_RK`, whose columns end where those of x do,
    and dw in a tensor of the part's.
    """

    x_RK: Tensor
    w_VK: Tensor
    dx_RK: Tensor | None
    dws: list[tuple[slice, Tensor]]

    @property
    def wants_grad(self) -> bool:
        return self.dx_RK is not None or bool(self.dws)


class _DistillLoss(torch.autograd.Function):
    """Gradients are made in forward, while the logits exist. The loss is a scalar, so backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RM: Tensor,
        edge_RQ: Tensor | None,
        successor_VQ: Tensor | None,
        student_head_VM: Tensor | None,
        lesson: _Lesson,
    ) -> tuple[Tensor, ...]:
        student = (hidden_RM, edge_RQ, successor_VQ, student_head_VM)
        wanted = zip(student, ctx.needs_input_grad[: len(student)], strict=True)
        grads = [torch.zeros_like(x, dtype=_at_least_fp32(x)) if x is not None and want else None for x, want in wanted]
        loss_sum, *rows = _score(student, grads, lesson)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(*rows)
        return loss_sum, *rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if grad is None else grad_sum * grad for grad in ctx.saved_tensors), None


def _score(student: Student, grads: Sequence[Tensor | None], lesson: _Lesson) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted sum, then `RowScores`. Fills those of the student's gradients that are not None."""
    hidden, (d_hidden, d_edge, _, _) = student[0], grads
    dtype = _compute_dtype(hidden)
    lesson = replace(lesson, lm_head_VM=lesson.lm_head_VM.to(dtype))
    logits = _side_by_side(student, grads, lesson.lm_head_VM)

    loss_R = torch.empty(len(hidden), dtype=_at_least_fp32(hidden), device=hidden.device)
    hit_R, label_prob_R = torch.empty_like(loss_R, dtype=torch.bool), torch.empty_like(loss_R)
    for start in range(0, len(hidden), lesson.chunk):
        rows = slice(start, start + lesson.chunk)
        loss_R[rows], hit_R[rows], label_prob_R[rows] = _score_chunk(rows, logits, lesson)
    if logits.dx_RK is not None:
        width = 0 if d_hidden is None else d_hidden.shape[1]
        for grad, found in ((d_hidden, logits.dx_RK[:, :width]), (d_edge, logits.dx_RK[:, width:])):
            if grad is not None:
                grad.copy_(found)
    return (lesson.weight_R * loss_R).sum(), loss_R, hit_R, label_prob_R


def _side_by_side(student: Student, grads: Sequence[Tensor | None], lm_head_VM: Tensor) -> _Logits:
    (hidden, edge, successor, head), (d_hidden, d_edge, d_successor, d_head) = student, grads
    M, dtype = hidden.shape[1], lm_head_VM.dtype
    x, w = hidden.to(dtype), lm_head_VM if head is None else head.to(dtype)
    if edge is not None and successor is not None:
        x, w = torch.cat((x, edge.to(dtype)), 1), torch.cat((w, successor.to(dtype)), 1)
    width = x.shape[1] if d_hidden is not None else x.shape[1] - M if d_edge is not None else 0
    parts = ((slice(0, M), d_head), (slice(M, None), d_successor))
    return _Logits(
        x, w, x.new_empty(len(x), width) if width else None, [(at, dw) for at, dw in parts if dw is not None]
    )


def _score_chunk(rows: slice, logits: _Logits, lesson: _Lesson) -> RowScores:
    """A function of its own, so that the logits of a chunk are gone before those of the next are made."""
    x_RK, w_VK = logits.x_RK[rows], logits.w_VK
    z_RV = x_RK @ w_VK.T
    teacher_SM, teacher_of_R = lesson.teachers(rows), lesson.teacher_of_R
    u_SV = None if teacher_SM is None else teacher_SM.to(z_RV.dtype) @ lesson.lm_head_VM.T

    scores = lesson.score_rows(
        z_RV,
        u_SV,
        None if teacher_of_R is None else teacher_of_R[rows],
        lesson.label_R[rows],
        lesson.weight_R[rows],
        lesson.kind,
        lesson.temperature,
        logits.wants_grad,
    )
    if logits.dx_RK is not None:
        torch.mm(z_RV, w_VK[:, -logits.dx_RK.shape[1] :], out=logits.dx_RK[rows])
    for columns, dw in logits.dws:
        dw.add_(z_RV.T @ x_RK[:, columns])
    return scores


def _pick(implementation: Implementation, device: torch.device) -> ScoreRows:
    if implementation == "auto":
        implementation = "triton" if HAS_TRITON and device.type == "cuda" else "reference"
    if implementation == "reference":
        return distill_loss_reference
    from jetspec.ops.distill_loss_triton import distill_loss_triton

    return distill_loss_triton


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
