"""News for the host are written to places in turn, in graphs, too."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.dispatch import force
from jetspec.ops import post
from tests.kernels import compile_for_hopper


def post_several(size: int, dtype: torch.dtype, num_places: int, kernels: str) -> tuple[Tensor, int]:
    places, count_1 = torch.zeros(num_places, 2, size, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    with force(kernels):  # type: ignore[arg-type]
        for i in range(num_places + 1):
            post(torch.full((2, size), i + 1).to(dtype), places, count_1)
    return places, int(count_1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
@pytest.mark.parametrize(("size", "num_places"), [(18, 2), (1, 1), (700, 3)])
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_places_take_turns(interpreter: Executor, size: int, dtype: torch.dtype, num_places: int, kernels: str) -> None:
    places, count = interpreter.submit(post_several, size, dtype, num_places, kernels).result()
    assert count == num_places + 1
    expected = [num_places + 1, *range(2, num_places + 1)]
    assert [place.unique().tolist() for place in places] == [[news] for news in expected]


def test_kernel_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from jetspec.ops.post_triton import BLOCK, _post_kernel

    types = {"news_ptr": "*i64", "places_ptr": "*i64", "count_ptr": "*i64", "size": "i32", "num_places": "i32"}
    assert "st.global" in compile_for_hopper(_post_kernel, types, {"BLOCK": BLOCK}, num_warps=1)


@pytest.mark.gpu
def test_graphs_write_to_the_memory_of_the_host() -> None:
    """Nothing is launched but replays, and the host reads each while the next is written."""
    places, count_1 = torch.zeros(2, 3000, dtype=torch.int64).pin_memory(), torch.zeros(1).long().cuda()
    news = torch.zeros(3000, dtype=torch.int64, device="cuda")

    def run() -> None:
        news.add_(1)
        post(news, places, count_1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    count_1.zero_()
    events = [torch.cuda.Event() for _ in range(50)]
    for i, event in enumerate(events):
        graph.replay()
        event.record()
        if i:
            events[i - 1].synchronize()
            assert places[(i - 1) % 2].unique().tolist() == [i + 1]
