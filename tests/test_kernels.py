"""What tests are watched for, and interpreted kernels more than others."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor

import pytest
import torch

INNER = 5


def run_two_rows(read: int, written: int) -> None:
    """A kernel for two rows, with memory for so many."""
    kernels = importlib.import_module("jetspec.ops.swiglu_triton")
    kernels._swiglu_kernel[(2, 1)](torch.zeros(read, 2 * INNER), torch.zeros(written, INNER), INNER=INNER, BLOCK=8)


def test_lanes_that_are_masked_may_lie_anywhere(interpreter: Executor) -> None:
    interpreter.submit(run_two_rows, 2, 2).result()


@pytest.mark.parametrize(("read", "written"), [(1, 2), (2, 1)])
def test_no_kernel_leaves_its_tensors(interpreter: Executor, read: int, written: int) -> None:
    with pytest.raises(Exception, match="memory of no tensor"):
        interpreter.submit(run_two_rows, read, written).result()


def unwritten() -> torch.Tensor:
    return torch.empty(1000)


def test_what_nobody_wrote_is_no_number(interpreter: Executor) -> None:
    """But where there is a GPU, whose algorithms are to be those that users have."""
    found = unwritten().isnan().all(), interpreter.submit(unwritten).result().isnan().all()
    assert list(found) == [not torch.cuda.is_available()] * 2
