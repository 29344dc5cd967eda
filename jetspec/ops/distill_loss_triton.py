"""Triton kernel of `distill_loss`: one program scores one row of logits.

Layout, contiguous: logits of the student are (R, V), of the teacher (S, V); labels, weights and results are (R,). The
gradient overwrites the student's logits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetspec.ops.layouts import LossKind, RowScores
from jetspec.ops.overlap_triton import LOWEST, launch

BLOCK = 1024


def distill_loss_triton(
    z_RV: Tensor,
    u_SV: Tensor | None,
    teacher_of_R: Tensor | None,
    label_R: Tensor,
    weight_R: Tensor,
    kind: LossKind,
    temperature: float,
    with_grad: bool,
) -> RowScores:
    R, V = z_RV.shape
    assert z_RV.is_contiguous() and (u_SV is None or u_SV.is_contiguous())
    loss_R = torch.zeros(R, dtype=torch.float32, device=z_RV.device)
    hit_R, label_prob_R = torch.zeros_like(loss_R, dtype=torch.bool), torch.zeros_like(loss_R)
    teacher_of_R = None if teacher_of_R is None else teacher_of_R.contiguous()
    rows = z_RV, u_SV, teacher_of_R, label_R.contiguous(), weight_R.contiguous(), loss_R, hit_R, label_prob_R
    sizes = {"BLOCK": min(BLOCK, triton.next_power_of_2(V)), "num_warps": 8}
    launch(_distill_loss_kernel, (R,), *rows, V, temperature, KIND=kind, WITH_GRAD=with_grad, **sizes)
    return loss_R, hit_R, label_prob_R


@triton.jit
def _distill_loss_kernel(
    z_ptr,
    u_ptr,
    teacher_of_ptr,
    label_ptr,
    weight_ptr,
    loss_ptr,
    hit_ptr,
    label_prob_ptr,
    V,
    temperature,
    KIND: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pass 1 computes all statistics and the loss of a row; pass 2 reads it again and overwrites z with the gradient.

    Sums of exponentials are kept per lane, relative to the lane's maximum so far, and combined once after the loop. The
    mean of u - z under p (of z - u under q) is one more such sum, so pass 1 yields the loss too.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    if KIND != "sft":
        u_ptr += V * (row if teacher_of_ptr is None else tl.load(teacher_of_ptr + row).to(tl.int64))
    lane = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + row)

    # skipped row: zero gradient
    if weight == 0:
        if WITH_GRAD:
            for start in range(0, V, BLOCK):
                index = start + lane
                tl.store(z_ptr + index, tl.zeros([BLOCK], tl.float32), mask=index < V)
    else:
        # pass 1: online sums
        scale = 1 / temperature
        z_top = tl.full([BLOCK], LOWEST, tl.float32)
        z_sum = tl.zeros([BLOCK], tl.float32)
        best = tl.zeros([BLOCK], tl.int32)
        u_top = tl.full([BLOCK], LOWEST, tl.float32)
        u_sum = tl.zeros([BLOCK], tl.float32)
        gap_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            index = start + lane
            z = _load(z_ptr, index, V, scale)
            best = tl.where(z > z_top, index, best)
            z_top, keep, add = _online_sum(z_top, z)
            z_sum = z_sum * keep + add
            if KIND != "sft":
                u = _load(u_ptr, index, V, scale)
                if KIND == "reverse_kl":
                    gap_sum = gap_sum * keep + add * (z - u)
                u_top, keep, add = _online_sum(u_top, u)
                u_sum = u_sum * keep + add
                if KIND == "forward_kl":
                    gap_sum = gap_sum * keep + add * (u - z)

        # combine lanes: loss, hit, label probability
        label = tl.load(label_ptr + row)
        z_max, z_log = _log_sum(z_top, z_sum)
        label_logprob = tl.load(z_ptr + label).to(tl.float32) * scale - z_max - z_log
        if KIND == "sft":
            loss = -label_logprob
        else:
            u_max, u_log = _log_sum(u_top, u_sum)
            shift = (z_max - u_max) + (z_log - u_log)
            if KIND == "forward_kl":
                loss = tl.sum(gap_sum * tl.exp(u_top - u_max - u_log)) + shift
            else:
                loss = tl.sum(gap_sum * tl.exp(z_top - z_max - z_log)) - shift
        winner = tl.min(tl.where(z_top == z_max, best, V))
        tl.store(loss_ptr + row, loss * temperature * temperature)
        tl.store(hit_ptr + row, winner == label)
        tl.store(label_prob_ptr + row, tl.exp(label_logprob))

        # pass 2: gradient
        if WITH_GRAD:
            for start in range(0, V, BLOCK):
                index = start + lane
                log_q = _load(z_ptr, index, V, scale) - z_max - z_log
                if KIND == "sft":
                    slope = tl.exp(log_q) - tl.where(index == label, 1.0, 0.0)
                else:
                    log_p = _load(u_ptr, index, V, scale) - u_max - u_log
                    if KIND == "forward_kl":
                        slope = tl.exp(log_q) - tl.exp(log_p)
                    else:
                        slope = tl.exp(log_q) * (log_q - log_p - loss)
                tl.store(z_ptr + index, weight * temperature * slope, mask=index < V)


@triton.jit
def _load(ptr, index, V, scale):
    logit = tl.load(ptr + index, mask=index < V, other=0.0).to(tl.float32) * scale
    return tl.where(index < V, logit, LOWEST)


@triton.jit
def _online_sum(top, x):
    """Return the new maximum per lane, the factor of its sum so far, and the term of x. One of the last two is 1."""
    decay = tl.exp(-tl.abs(x - top))
    return tl.maximum(top, x), tl.where(x > top, decay, 1.0), tl.where(x > top, 1.0, decay)


@triton.jit
def _log_sum(top, total):
    """Return the two terms of a log-sum-exp, whose sum would round away bits of the smaller."""
    highest = tl.max(top)
    return highest, tl.log(tl.sum(total * tl.exp(top - highest)))
