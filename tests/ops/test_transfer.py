"""What is posted arrives at the host as it was."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.ops import copy_to_host
from jetspec.ops.select import force
from tests.kernels import compile_for_hopper


def posted(news: Tensor, kernels: str) -> Tensor:
    place = torch.zeros(news.shape, dtype=news.dtype)
    with force(kernels):  # type: ignore[arg-type]
        copy_to_host(news, place)
    return place


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 18, 700])
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_arrives_as_it_was(interpreter: Executor, size: int, dtype: torch.dtype, kernels: str) -> None:
    news = torch.arange(6 * size).view(3, 2 * size).to(dtype)[:, ::2]
    assert torch.equal(interpreter.submit(posted, news, kernels).result(), news)


def test_kernel_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from jetspec.ops.transfer_triton import BLOCK, _copy_to_host_kernel

    types = {"source_ptr": "*i64", "target_ptr": "*i64", "size": "i32"}
    assert "st.global" in compile_for_hopper(_copy_to_host_kernel, types, {"BLOCK": BLOCK}, num_warps=4)


@pytest.mark.gpu
def test_the_host_reads_one_while_the_next_is_written() -> None:
    news = torch.zeros(3000, dtype=torch.int64, device="cuda")
    places = [torch.zeros(3000, dtype=torch.int64).pin_memory() for _ in range(50)]
    events = [torch.cuda.Event() for _ in places]
    for i, (place, event) in enumerate(zip(places, events, strict=True)):
        news.add_(1)
        copy_to_host(news, place)
        event.record()
        if i:
            events[i - 1].synchronize()
            assert places[i - 1].unique().tolist() == [i]
