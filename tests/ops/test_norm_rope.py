"""Norms and rotations equal their formulas, and the kernels equal the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetspec.ops import rms_norm, rope, rotate, rotate_qkv, rotate_store, swiglu
from jetspec.types import KVPages
from tests.ops.test_agreement import Draw

EPS = 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(3, 5, 16), (1, 16), (16,)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_of_one_row_has_gradients() -> None:
    x, weight = torch.randn(1, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x.double(), weight.double()))
    rms_norm(x, weight, EPS).sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_rotation_is_by_the_angle_and_scores_depend_on_distance_alone() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    q, k = torch.randn(6), torch.randn(6)

    def at(x: Tensor, position: int) -> Tensor:
        return rotate(x[None, None], rope(torch.tensor([position]), inv_freq, 1.0, torch.float32))[0, 0]

    rotated = torch.view_as_complex(torch.stack((q[:3], q[3:]), -1)) * torch.exp(1j * 7 * inv_freq)
    torch.testing.assert_close(at(q, 7), torch.cat((rotated.real, rotated.imag)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(at(q, 12) @ at(k, 9), at(q, 3) @ at(k, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normalized_then_rotated_and_values_unchanged(normed: bool) -> None:
    draw = Draw(torch.float32, "cpu")
    qkv, tables, norm = draw.normal(2, 3, 8, 8), draw.tables(8, 2, 3), draw.norm(8) if normed else None
    q, k, v = rotate_qkv(qkv, 2, tables, norm)
    plain_q, plain_k, plain_v = qkv.split((4, 2, 2), -2)
    if norm is not None:
        plain_q, plain_k = rms_norm(plain_q, norm.q, EPS), rms_norm(plain_k, norm.k, EPS)
    torch.testing.assert_close(q, rotate(plain_q, tables))
    torch.testing.assert_close(k, rotate(plain_k, tables))
    assert torch.equal(v, plain_v)


@pytest.mark.parametrize("num_heads", [4, 0])
def test_keys_and_values_are_stored_in_their_slots(num_heads: int) -> None:
    draw = Draw(torch.float32, "cpu")
    qkv, tables, norm = draw.normal(5, num_heads + 4, 8), draw.tables(8, 5), draw.norm(8)
    pages, slot = KVPages(*torch.zeros(2, 4, 3, 2, 8)), torch.tensor([7, 0, 11, 4, 3])
    q, k, v = rotate_qkv(qkv, 2, tables, norm)
    assert torch.equal(rotate_store(qkv, 2, tables, norm, pages, slot), q)
    for stored, expected in ((pages.k, k), (pages.v, v)):
        assert torch.equal(stored.flatten(0, 1)[slot], expected)
        assert int(stored.flatten(0, 1).any(-1).any(-1).sum()) == len(slot)


def test_gate_of_swiglu_comes_first() -> None:
    gate, up = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), gate / (1 + torch.exp(-gate)) * up)
