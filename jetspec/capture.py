"""Work that a GPU does again and again, captured once as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeVar
from weakref import WeakSet

import torch

R = TypeVar("R")

STREAMS = 32
"""That torch has, and hands out in turn."""


class GraphPool:
    """Makes CUDA graphs. They share their memory, because only one runs at a time, and the stream that they are made
    on, because libraries keep a workspace for each.

    torch frees that workspace with the first graph of a stream that ends. So all graphs of a pool end together, and no
    pool has the stream of another that is in use.
    """

    in_use: ClassVar[WeakSet[GraphPool]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, torch.cuda.graph_pool_handle()
        self.stream = self._free_stream()
        self.num_captured = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.in_use.add(self)

    def _free_stream(self) -> torch.cuda.Stream:
        """Any, if more pools are in use than there are streams."""
        taken = {pool.stream.cuda_stream for pool in self.in_use}
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(self.device)
            if stream.cuda_stream not in taken:
                break
        return stream

    def capture(self, run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
        """A graph of what `run` does, and what it returns, which every replay writes anew. It runs once before that, so
        that kernels are compiled and lasting tensors made outside the graph. Other threads may use the GPU meanwhile,
        but nobody collects what another engine left: a graph or an event cannot end while one is made."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                run()
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        self.graphs.append(graph)  # also one that is never finished
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
