"""CUDA graphs of the draft. vLLM captures the target's pass; the draft after it is captured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a draft: hidden states of committed tokens, and the position and pages of each request."""

    tap_TX: Tensor
    position_T: Tensor
    slot_T: Tensor
    page_BP: Tensor
    anchor_B: Tensor
    length_B: Tensor
    temperature_B: Tensor
    state_B: Tensor

    @classmethod
    def idle(
        cls,
        num_requests: int,
        *,
        path: int,
        tap_size: int,
        pages: int,
        unused_state: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DraftInputs:
        """Padding requests: they write to page 0 and to an unused tree."""

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        rows = num_requests * path
        return cls(
            tap_TX=torch.zeros(rows, tap_size, dtype=dtype, device=device),
            position_T=numbers(rows),
            slot_T=numbers(rows),
            page_BP=torch.zeros(num_requests, pages, dtype=torch.int32, device=device),
            anchor_B=numbers(num_requests),
            length_B=numbers(num_requests),
            temperature_B=torch.ones(num_requests, dtype=torch.float32, device=device),
            state_B=torch.full((num_requests,), unused_state, device=device),
        )

    def first(self, count: int) -> DraftInputs:
        """Inputs of the first `count` requests; all requests have the same number of rows."""
        path = len(self.position_T) // len(self.anchor_B)
        cut = {field.name: getattr(self, field.name) for field in fields(self)}
        return DraftInputs(
            **{name: x[: count * path if name.endswith(("_T", "_TX")) else count] for name, x in cut.items()}
        )


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: DraftInputs
    token_BN: Tensor


class DraftGraphs:
    """One graph per captured batch size. A batch is padded to the next size with idle requests."""

    def __init__(self, draft: Callable[[DraftInputs], Tensor], idle: DraftInputs, largest: int) -> None:
        self.idle, self.largest = idle, largest
        self.inputs = replace(idle, **{field.name: getattr(idle, field.name).clone() for field in fields(idle)})
        self.pool = torch.cuda.graph_pool_handle()
        self.captured = {size: self.capture(draft, size) for size in reversed(batch_sizes(largest))}

    def capture(self, draft: Callable[[DraftInputs], Tensor], size: int) -> Captured:
        inputs, graph = self.inputs.first(size), torch.cuda.CUDAGraph()
        draft(inputs)  # compiles kernels outside the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool):
            token_BN = draft(inputs)
        return Captured(graph, inputs, token_BN)

    def run(self, inputs: DraftInputs) -> Tensor:
        """Draft tokens of a batch, valid until the next run."""
        count = len(inputs.anchor_B)
        size = next(size for size in sorted(self.captured) if size >= count)
        captured = self.captured[size]
        for field in fields(inputs):
            given, kept = getattr(inputs, field.name), getattr(captured.inputs, field.name)
            kept[: len(given)].copy_(given)
            if size > count:
                kept[len(given) :].copy_(getattr(self.idle, field.name)[len(given) : len(kept)])
        captured.graph.replay()
        return captured.token_BN[:count]


def batch_sizes(largest: int) -> list[int]:
    """Captured batch sizes: powers of two, and the largest."""
    return sorted({largest, *(1 << i for i in range(largest.bit_length()) if 1 << i < largest)})
