from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jetspec.ops.linear import HAS_MKL_PACKING, can_pack, linear, pack


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9, 16, 17, 32, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_plain_product(rows: int, bias: bool, frozen: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 40, dtype=dtype)
    weight = nn.Parameter(torch.randn(24, 40, dtype=dtype), requires_grad=not frozen)
    b = torch.randn(24, dtype=dtype) if bias else None
    for _ in range(2):  # the second call meets whatever the first has kept
        y = linear(x, weight, b)
        atol, rtol = (0.1, 0.02) if dtype == torch.bfloat16 else (1e-4, 1e-5)
        torch.testing.assert_close(y, F.linear(x, weight, b), atol=atol, rtol=rtol)


def test_leading_dimensions_are_free() -> None:
    x, weight = torch.randn(2, 3, 5, 8), torch.randn(4, 8)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


def test_trained_weights_are_never_remembered() -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    x = torch.randn(8, 8)
    linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert not can_pack(weight)
    assert can_pack(nn.Parameter(weight.detach(), requires_grad=False)) == HAS_MKL_PACKING


def test_gradients_flow() -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    x = torch.randn(7, 8)
    linear(x, weight).square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * F.linear(x, weight).T @ x)


def test_packing_ahead_changes_nothing() -> None:
    weight, x = nn.Parameter(torch.randn(6, 8), requires_grad=False), torch.randn(9, 8)
    pack(weight)
    assert hasattr(weight, "packed") == HAS_MKL_PACKING
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
