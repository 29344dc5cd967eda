"""Work that a GPU does again and again, captured once as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

R = TypeVar("R")


class GraphPool:
    """Makes CUDA graphs. They share their memory, because only one runs at a time, and the stream that they are made
    on, because libraries keep a workspace for each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.num_captured = 0

    def capture(self, run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
        """A graph of what `run` does, and what it returns, which every replay writes anew. It runs once before that, so
        that kernels are compiled and lasting tensors made outside the graph. Other threads may use the GPU meanwhile,
        but nobody collects what another engine left: a graph or an event cannot end while one is made."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self.memory, stream=self.stream, capture_error_mode="thread_local")
        with without_collection(), capture:
            result = run()
        self.num_captured += 1
        return graph, result


@contextmanager
def without_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
