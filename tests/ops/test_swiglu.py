"""SwiGLU equals its formula, and its kernel equals the reference."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.ops import swiglu
from jetspec.ops.select import force

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2**-6)])


def test_gate_comes_first() -> None:
    gate, up = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), gate / (1 + torch.exp(-gate)) * up)


def compare(gate_up: Tensor, tolerance: float) -> None:
    with force("triton"):
        y = swiglu(gate_up)
    with force("reference"):
        torch.testing.assert_close(y, swiglu(gate_up), atol=1e-6, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 10), (2, 2, 2100), (0, 8)])
def test_kernel_equals_reference(
    interpreter: Executor, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    interpreter.submit(compare, torch.randn(shape).to(dtype), tolerance).result()


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_kernel_on_a_gpu(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    compare(torch.randn(rows, 2 * 12288, device="cuda").to(dtype), tolerance)
