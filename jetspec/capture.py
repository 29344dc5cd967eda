"""CUDA graphs: capture a function of device tensors once for each input shape, and replay it from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar
from weakref import WeakSet

import torch

from jetspec.gc_control import pause_collection

R = TypeVar("R")

STREAMS = 32
"""Streams of a device in torch, which assigns them in rotation."""


class GraphPool:
    """Captures CUDA graphs that share one memory pool and one stream. Only one graph of a pool runs at a time.

    Libraries keep a workspace per stream, and torch frees it with the first graph of that stream that is destroyed. So
    all graphs of a pool are destroyed together, and no two live pools share a stream.
    """

    in_use: ClassVar[WeakSet[GraphPool]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, torch.cuda.graph_pool_handle()
        self.stream = self._free_stream()
        self.num_captured = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.in_use.add(self)

    def _free_stream(self) -> torch.cuda.Stream:
        """Returns a stream of no other pool, or any stream when there are more pools than streams."""
        taken = {pool.stream.cuda_stream for pool in self.in_use}
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(self.device)
            if stream.cuda_stream not in taken:
                break
        return stream

    def capture(self, run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
        """Captures `run`. Returns the graph and the result of `run`, which each replay overwrites.

        `run` is called once before the capture, so that kernels are compiled and persistent tensors are allocated
        outside the graph. Other threads may use the GPU meanwhile. The garbage collector is paused: no graph or event
        may be destroyed during a capture.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                run()
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        self.graphs.append(graph)  # a capture that fails leaves a graph, too
        capture = torch.cuda.graph(graph, pool=self.memory, stream=self.stream, capture_error_mode="thread_local")
        with pause_collection(), capture:
            result = run()
        self.num_captured += 1
        return graph, result


class DeviceTensors(Protocol):
    """Tensors of a fixed size. A tensor is one, too."""

    def copy_(self, source: Self, /) -> Any:
        """Overwrites the tensors in place by those of `source`."""


Inputs = TypeVar("Inputs", bound=DeviceTensors)
Output = TypeVar("Output")


@dataclass(frozen=True)
class Captured(Generic[Inputs, Output]):
    """A graph with the tensors that it reads and those that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    output: Output


class CapturedFn(Generic[Inputs, Output]):
    """A function of device tensors, captured for each key at its first call and replayed from then on.

    Two inputs of the same key have the same shapes, and all that `run` does besides reading them is the same. The
    output of a captured key is overwritten by the next call with that key. With `pool` None every call runs eagerly.
    """

    def __init__(self, run: Callable[[Inputs], Output], pool: GraphPool | None) -> None:
        self.run, self.pool = run, pool
        self.captured: dict[Hashable, Captured[Inputs, Output]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self.captured

    def __call__(self, key: Hashable, inputs: Inputs) -> Output:
        """The output for `inputs`. Those of the first call become the graph's own and must not be reused."""
        if self.pool is None:
            return self.run(inputs)
        self.load(key, inputs)
        return self.replay(key)

    def load(self, key: Hashable, inputs: Inputs) -> None:
        """Copies `inputs` to the tensors that a graph reads. Captures the graph if there is none."""
        if key not in self.captured:
            self.capture(key, inputs)
        self.captured[key].inputs.copy_(inputs)

    def capture(self, key: Hashable, inputs: Inputs) -> None:
        """Captures a key ahead of its first call. `run` is called with `inputs`, which become the graph's own."""
        assert self.pool is not None
        graph, output = self.pool.capture(lambda: self.run(inputs))
        self.captured[key] = Captured(graph, inputs, output)

    def replay(self, key: Hashable) -> Output:
        """The output for the inputs that the graph of a key holds."""
        captured = self.captured[key]
        captured.graph.replay()
        return captured.output
