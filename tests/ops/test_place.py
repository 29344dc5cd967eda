"""The kernel of `place` equals its reference."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor

import pytest
import torch

from jetspec.ops.kv_write import place_reference


def compare(batch: int, nodes: int, page_size: int, device: str) -> None:
    triton = importlib.import_module("jetspec.ops.kv_write_triton")
    generator = torch.Generator().manual_seed(batch + nodes)
    rows, width = batch + 3, 300
    pages = torch.randint(0, 1000, (rows, width), generator=generator)
    length = torch.randint(0, width * page_size - nodes + 1, (rows,), generator=generator)
    row = torch.randperm(rows, generator=generator)[:batch]
    depth = torch.randint(0, 16, (batch, nodes), generator=generator)
    pages, length, row = pages.to(device), length.to(device), row.to(device)
    depth = depth[:1].to(device).expand(batch, -1) if nodes == 16 else depth.to(device)
    result = triton.place_triton(pages, length, row, depth, page_size)
    for got, want in zip(result, place_reference(pages, length, row, depth, page_size), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("batch", "nodes", "page_size"), [(1, 1, 16), (3, 16, 1), (2, 300, 4)])
def test_kernel_equals_reference(interpreter: Executor, batch: int, nodes: int, page_size: int) -> None:
    interpreter.submit(compare, batch, nodes, page_size, "cpu").result()


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "nodes"), [(1, 128), (2048, 1), (64, 16)])
def test_kernel_on_a_gpu(batch: int, nodes: int) -> None:
    compare(batch, nodes, 16, "cuda")
