"""Checks of all tests: unwritten memory is NaN, and interpreted kernels access only their tensors."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor

import pytest
import torch

INNER = 5


def run_two_rows(read: int, written: int) -> None:
    """Runs a kernel of two rows, with memory for a given number of rows."""
    kernels = importlib.import_module("jetspec.ops.norm_rope_triton")
    kernels._swiglu_kernel[(2, 1)](torch.zeros(read, 2 * INNER), torch.zeros(written, INNER), INNER=INNER, BLOCK=8)


def test_masked_lanes_may_be_out_of_bounds(interpreter: Executor) -> None:
    interpreter.submit(run_two_rows, 2, 2).result()


@pytest.mark.parametrize(("read", "written"), [(1, 2), (2, 1)])
def test_kernels_access_only_their_tensors(interpreter: Executor, read: int, written: int) -> None:
    with pytest.raises(Exception, match="memory of no tensor"):
        interpreter.submit(run_two_rows, read, written).result()


def unwritten() -> torch.Tensor:
    return torch.empty(1000)


def test_unwritten_memory_is_nan(interpreter: Executor) -> None:
    """Except on a GPU, where filling memory would change the algorithms that users get."""
    found = unwritten().isnan().all(), interpreter.submit(unwritten).result().isnan().all()
    assert list(found) == [not torch.cuda.is_available()] * 2
