from __future__ import annotations

import importlib
from concurrent.futures import Executor

import pytest
import torch
from torch import nn

from jetspec.ops.layouts import TILE, new_rows, whole_tiles
from jetspec.ops.select import force

EPS = 1e-6


def test_a_whole_tile_includes_the_memory_behind_the_rows() -> None:
    memory = torch.randn(100, 8)
    x = memory[10:27]
    assert torch.equal(whole_tiles(x, 16), memory[10:42])
    assert torch.equal(whole_tiles(x[:16], 16), memory[10:26]), "whole already"
    assert torch.equal(whole_tiles(memory[90:97], 64), memory[90:]), "memory ends"


def test_a_whole_tile_ends_with_memory_that_holds_part_of_a_row() -> None:
    memory = torch.randn(100)
    x = memory[:36].view(9, 4)
    assert whole_tiles(memory[2:38].view(9, 4), 64).shape == (24, 4)
    assert whole_tiles(x, 64).shape == (25, 4)


@pytest.mark.parametrize(("rows", "width"), [(5, 96), (17, 96), (40, 160)])
def test_padding_does_not_change_products(interpreter: Executor, rows: int, width: int) -> None:
    """Products read the padding, and no result depends on it."""
    interpreter.submit(compare_padding, rows, width).result()


def compare_padding(rows: int, width: int) -> None:
    """Padding of NaN, and no padding."""
    kernels = importlib.import_module("jetspec.ops.linear_triton")
    torch.manual_seed(0)
    x, weight, norm = torch.randn(rows, width), torch.randn(2 * width, width), torch.randn(2 * width)
    memory = torch.full((2 * TILE, width), float("nan"))
    memory[:rows] = x
    total, found = torch.randn(rows, 2 * width), []
    with force("triton"):
        for y in (memory[:rows], x):
            product = kernels.ROWS.linear(y, weight, None)
            found.append([product, *kernels.ROWS.add_linear(total.clone(), y, weight, None, norm, None)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


def test_only_rows_on_a_gpu_are_padded() -> None:
    x = torch.zeros(3, 4)
    assert new_rows(3, 4, like=x).untyped_storage().nbytes() == x.untyped_storage().nbytes()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 17, 64, 65, 100, 128, 129])
def test_rows_on_a_gpu_are_padded(rows: int) -> None:
    x = torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16)
    made = new_rows(rows, 8, like=x)
    assert made.shape == (rows, 8) and made.dtype == x.dtype and made.is_contiguous()
    assert len(whole_tiles(made, TILE)) == (rows if rows > 128 else -(-rows // TILE) * TILE)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 17, 33, 63, 65, 127])
def test_outputs_of_products_are_padded_on_a_gpu(rows: int) -> None:
    """The next product reads them in whole tiles."""
    products = importlib.import_module("jetspec.ops.linear")
    torch.manual_seed(rows)
    size, inner = 4096, 12288

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to("cuda", torch.bfloat16)

    total, norm = made(rows, size), made(size)
    residual = products.add_linear(total, made(rows, size), made(size, size), None, norm, None)
    gated = products.norm_swiglu(residual, norm, EPS, weight := made(2 * inner, size))
    for x in (residual.scaled, gated):
        assert len(whole_tiles(x, TILE)) % TILE == 0
    gate, rest = nn.functional.linear(products.rms_norm(residual.x, norm, EPS).float(), weight.float()).chunk(2, -1)
    torch.testing.assert_close(gated.float(), nn.functional.silu(gate) * rest, atol=2e-2, rtol=2e-2)
