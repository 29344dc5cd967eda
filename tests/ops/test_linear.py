from __future__ import annotations

import importlib
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from jetspec.ops import Residual, add_linear, layouts, norm_linear, norm_swiglu, rms_norm, select, swiglu
from jetspec.ops.layouts import MAX_BARRIER_PROGRAMS, barrier_counters
from jetspec.ops.linear import HAS_MKL_PACKING, can_pack, linear
from jetspec.ops.select import Device, Facts, force
from tests.gluon import Blocks, Interpreted

EPS = 1e-5


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9, 16, 17, 32, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_plain_product(rows: int, bias: bool, frozen: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 40, dtype=dtype)
    weight = nn.Parameter(torch.randn(24, 40, dtype=dtype), requires_grad=not frozen)
    b = torch.randn(24, dtype=dtype) if bias else None
    for _ in range(2):  # the second call uses the packed weight
        y = linear(x, weight, b)
        atol, rtol = (0.1, 0.02) if dtype == torch.bfloat16 else (1e-4, 1e-5)
        torch.testing.assert_close(y, F.linear(x, weight, b), atol=atol, rtol=rtol)


def test_trained_weights_are_never_packed() -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    x = torch.randn(8, 8)
    linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert not can_pack(weight)
    assert can_pack(nn.Parameter(weight.detach(), requires_grad=False)) == HAS_MKL_PACKING


def test_gradients_flow() -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    x = torch.randn(7, 8)
    linear(x, weight).square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * F.linear(x, weight).T @ x)


@pytest.mark.parametrize("rows", [(3,), (1,), (2, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_fused_products(rows: tuple[int, ...], biased: bool) -> None:
    x, norm, total = torch.randn(*rows, 8), torch.randn(8), torch.randn(*rows, 6)
    weight, bias = torch.randn(6, 8), torch.randn(6) if biased else None
    plain = F.linear(rms_norm(x, norm, EPS), weight, bias)
    torch.testing.assert_close(norm_linear(Residual(x), norm, EPS, weight, bias), plain)
    torch.testing.assert_close(norm_swiglu(Residual(x), norm, EPS, weight, bias), swiglu(plain))
    expected = total + F.linear(x, weight, bias)
    torch.testing.assert_close(add_linear(total.clone(), x, weight, bias).x, expected)
    total = torch.stack((total, total))
    with force("triton"):  # adds in place, for any number of axes
        found = add_linear(total, torch.stack((x, x)), weight, bias).x
    assert found.data_ptr() == total.data_ptr()
    torch.testing.assert_close(found, torch.stack((expected, expected)), atol=1e-5, rtol=1e-5)


def test_additions_do_not_overwrite_a_trained_residual() -> None:
    total, x = torch.randn(3, 6, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(6, 8, requires_grad=True)
    add_linear(total, x, weight).x.sum().backward()
    assert total.grad is not None and x.grad is not None and weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):  # products are narrower than the residual
        assert add_linear(total, x, weight).x.dtype == torch.float32


HOPPER = Device("cuda", (9, 0), 132, 228 * 1024)
PRODUCT = Facts(
    HOPPER, torch.bfloat16, rows=64, outputs=4096, inputs=4096, can_copy=True, can_fuse=True, can_add_in_place=True
)
"""Of a large weight."""
REGISTER_TILED, WARP_SPECIALIZED = "linear_register_tiled_gluon", "linear_warp_specialized_gluon"


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"rows": 1}, "vector"),
        ({"rows": 1, "one_dtype": False, "can_copy": False}, "in_place"),
        ({"rows": 2}, "ROWS"),
        ({}, "ROWS"),
        ({"can_fuse": False}, "in_place"),
        ({"can_copy": False}, "in_place"),
        ({"rows": 65}, "WARP_SPECIALIZED"),
        ({"rows": 128, "inputs": 12288, "split_inputs": 12288}, "WARP_SPECIALIZED"),
        ({"rows": 128, "outputs": 3040}, "in_place"),  # too few programs
        ({"rows": 129}, "in_place"),
        ({"rows": 65, "device": HOPPER._replace(capability=(10, 0))}, "in_place"),
        ({"rows": 64, "is_small": True}, "REGISTER_TILED"),
        ({"rows": 64, "is_small": True, "inputs": 6000}, "ROWS"),
        ({"rows": 65, "is_small": True}, "ROWS"),
        ({"rows": 129, "is_small": True}, "WARP_SPECIALIZED"),
        ({"rows": 1024, "is_small": True}, "WARP_SPECIALIZED"),
        ({"rows": 1025, "is_small": True}, "in_place"),
        ({"rows": 1025, "can_add_in_place": False}, None),
    ],
)
def test_selection(changes: dict[str, Any], kernel: str | None) -> None:
    pytest.importorskip("triton")
    found = select._first("add_linear", PRODUCT._replace(**changes))
    modules = {"REGISTER_TILED": REGISTER_TILED, "WARP_SPECIALIZED": WARP_SPECIALIZED}
    if kernel in ("vector", "in_place"):
        assert found is not None and kernel in found.__name__
    elif kernel:
        module = importlib.import_module(f"jetspec.ops.{modules.get(kernel, 'linear_triton')}")
        assert found == getattr(module, kernel).add_linear
    else:
        assert found is None


@pytest.mark.parametrize(
    ("capability", "kilobytes", "can"), [((9, 0), 228, True), ((8, 0), 164, False), ((12, 0), 100, False)]
)
def test_tiles_need_the_copy_engine_and_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kilobytes: int, can: bool
) -> None:
    """Hopper has both, the generation before it no copy engine, and small GPUs after it too little memory."""
    device = Device("cuda", capability, 132, 1024 * kilobytes)
    monkeypatch.setattr(select, "device_of", lambda _: device)
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    assert select._read_linear(x, x).can_copy == can
    assert not select._read_linear(x[:, 1:], x[:, 1:]).can_copy, "rows must start at multiples of 16 bytes"
    assert not select._read_linear(x.float(), x.float()).can_copy, "tensor cores take 16 bits"


def test_half_precision_does_not_begin_a_norm() -> None:
    """The residual times the weight of a norm may overflow."""
    total, norm = torch.full((2, 8), 3e4, dtype=torch.float16), torch.full((8,), 4.0, dtype=torch.float16)
    x, weight = torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8, 8, dtype=torch.float16)
    with force("triton"):
        residual = add_linear(total.clone(), x, weight, next_norm=norm)
    assert residual.scaled is None and torch.equal(residual.x, total)


def compare_rows(
    rows: int, size: int, inner: int, biased: bool, dtype: torch.dtype, device: str, kernel: Any = None
) -> None:
    """The products of a layer, each reading the output of the one before, by the chosen kernels or by one of them."""
    torch.manual_seed(rows)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to(device, dtype)

    total, x, norm = made(rows, size), made(rows, inner), made(size)
    first, second = made(size, inner, scale=inner**-0.5), made(2 * inner, size, scale=size**-0.5)
    bias = made(max(2 * inner, size)) if biased else None

    def run(products: Any) -> tuple[Residual, list[Tensor]]:
        taps = torch.zeros(rows, 2, size, device=device, dtype=dtype)
        residual = products.add_linear(total.clone(), x, first, None if bias is None else bias[:size], norm, taps[:, 1])
        assert torch.equal(taps[:, 1], residual.x) and not taps[:, 0].any()
        second_bias = None if bias is None else bias[: 2 * inner]
        read = [products.norm_linear(residual, norm, EPS, second, second_bias, gated) for gated in (False, True)]
        return residual, [residual.x, *read, products.linear(x, first, None)]

    front = importlib.import_module("jetspec.ops.linear")
    with force("triton"):
        residual, got = run(kernel or front)
    with force("reference"):
        _, want = run(front)
    if kernel or (1 < rows <= 128 and size * dtype.itemsize % 16 == 0):
        assert residual.squares is not None and residual.squares.shape[1] == rows
    else:
        assert residual.squares is None
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=4 * tolerance, rtol=tolerance)


ONE_ROW = [(1, *sizes) for sizes in ((24, 40), (10, 1024), (36, 1500), (2, 3), (6, 9000), (9000, 2))]
"""Long rows among them."""


@pytest.mark.parametrize(("rows", "size", "inner"), [*ONE_ROW, (2, 40, 96), (16, 72, 40), (33, 64, 300), (128, 32, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_kernel_of_a_few_rows(interpreter: Executor, rows: int, size: int, inner: int, biased: bool) -> None:
    interpreter.submit(compare_rows, rows, size, inner, biased, torch.float32, "cpu").result()


def compare_patched(name: str, value: Any, rows: int, size: int, inner: int) -> None:
    """With another value of a name of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, value)
        compare_rows(rows, size, inner, True, torch.float32, "cpu")


@pytest.mark.parametrize("rows", [64, 65, 129])
def test_any_product_finishes_a_norm_that_was_begun(interpreter: Executor, rows: int) -> None:
    """The first product's weight is small, the second's is not."""
    name = "jetspec.ops.layouts.SMALL_WEIGHT_BYTES"
    interpreter.submit(compare_patched, name, 40 * 24 * 4, rows, 40, 24).result()


@pytest.mark.parametrize(("rows", "size", "inner"), [(16, 72, 40), (64, 100, 152)])
@pytest.mark.parametrize("half", [True, False])
def test_tiles_of_a_few_rows(interpreter: Executor, rows: int, size: int, inner: int, half: bool) -> None:
    tiles = (max(16, min(rows, 32)), 32, half, 16, 4, 2)
    interpreter.submit(compare_tiles, tiles, rows, size, inner).result()


def compare_tiles(tiles: tuple[Any, ...], *sizes: int) -> None:
    module = importlib.import_module("jetspec.ops.linear_triton")
    compare_patched("jetspec.ops.linear_triton.choose_row_tiles", lambda *_: module.RowTiles(*tiles), *sizes)


@pytest.mark.parametrize("gated", [True, False])
@given(rows=st.integers(17, 128), outputs=st.integers(1, 32_768), count=st.integers(20, 200))
def test_a_multiprocessor_reads_as_little_as_it_can(gated: bool, rows: int, outputs: int, count: int) -> None:
    """Of x and of the weight, in all its tiles, one after the other."""
    pytest.importorskip("triton")
    module = importlib.import_module("jetspec.ops.linear_triton")

    def rows_read(width: int) -> int:
        tiles = -(-outputs // width) * -(-rows // 64)
        return -(-tiles // count) * (64 + (2 if gated else 1) * width)

    chosen = module.choose_row_tiles(rows, outputs, gated, count)
    assert rows_read(chosen.width) == min(map(rows_read, (32, 48, 64, 96)))


REGISTER_SHAPES = [(64, 576, 1536), (48, 576, 1408), (16, 576, 2880), (33, 1024, 2048), (17, 56, 24), (2, 72, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "size", "inner"),
    [
        (1, 4096, 12288),
        (1, 576, 960),
        (16, 4096, 12288),
        (63, 4096, 4096),
        (5, 20, 8),
        *((rows, 576, 1536) for rows in (80, 96, 112, 128)),
        *REGISTER_SHAPES,
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_kernel_of_a_few_rows_on_a_gpu(rows: int, size: int, inner: int, biased: bool) -> None:
    compare_rows(rows, size, inner, biased, torch.bfloat16, "cuda")
    if rows == 1:
        compare_rows(rows, size, inner, biased, torch.float32, "cuda")


@pytest.mark.parametrize("gated", [True, False])
@given(inputs=st.integers(1, 6000))
def test_register_tiles_hold_all_inputs(gated: bool, inputs: int) -> None:
    tiles = layouts.register_tiles(inputs, gated)
    if tiles is None:
        assert inputs % 8 or inputs > (2816 if gated else 5632)
        return
    parts = [part for part in tiles[1:] if part]
    assert all(part >= 16 and part & (part - 1) == 0 for part in parts) and inputs % 8 == 0
    missing = inputs - tiles.WARPS * (sum(parts) - parts[-1])
    assert 0 < missing <= tiles.WARPS * parts[-1]


def gluon_kernel(name: str) -> Any:
    pytest.importorskip("triton")
    return importlib.import_module(f"jetspec.ops.{name}")


@pytest.mark.parametrize(("rows", "size", "inner"), [(33, 72, 96), (16, 40, 1408), (2, 24, 16), (17, 200, 576)])
@pytest.mark.parametrize("biased", [True, False])
def test_register_tiled_kernel(monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, biased: bool) -> None:
    """The products of a layer; the code of the GPU is interpreted."""
    module = gluon_kernel(REGISTER_TILED)
    kernel = Interpreted(module._register_tiled_linear_kernel)
    monkeypatch.setattr(module, "_register_tiled_linear_kernel", kernel)
    compare_rows(rows, size, inner, biased, torch.float32, "cpu", module.REGISTER_TILED)
    assert len(kernel.grids) == 4


WARP_SHAPES = [(65, 4096, 12288), (128, 4096, 14336), (100, 4096, 4096)]
"""Rows of large weights, of a layer's size and an MLP's."""


@given(outputs=st.integers(1, 20_000), inputs=st.integers(0, 30_000), count=st.integers(20, 200))
def test_programs_of_a_large_weight_run_at_once(outputs: int, inputs: int, count: int) -> None:
    """Programs that wait for each other must, and each has enough inputs."""
    tiles = layouts.warp_tiles(outputs, inputs, count)
    if tiles is None:
        return
    assert layouts.enough_programs(count) <= -(-outputs // tiles.width) * tiles.SPLITS <= count
    assert tiles.SPLITS == 1 or (inputs // tiles.SPLITS >= layouts.MIN_SPLIT_INPUTS and not tiles.HALF)
    assert tiles.SPLITS > 1 or inputs < 2 * layouts.MIN_SPLIT_INPUTS
    assert 3 <= tiles.stages(True) <= tiles.stages(False) <= layouts.WARP_STAGES


@given(outputs=st.integers(1, 4000), rows=st.integers(129, 4096), count=st.integers(20, 200))
def test_programs_of_a_small_weight_fill_a_gpu_if_they_can(outputs: int, rows: int, count: int) -> None:
    chosen, enough = layouts.small_weight_warp_tiles(outputs, rows, count), layouts.enough_programs(count)
    programs = {tiles: -(-outputs // tiles.width) * -(-rows // 128) for tiles in layouts.WARP_WIDTHS}
    assert chosen.SPLITS == 1 and programs[chosen] >= min(enough, max(programs.values()))
    assert all(programs[wider] < enough for wider in layouts.WARP_WIDTHS if wider.width > chosen.width)


def interpret_warp_specialized(
    monkeypatch: pytest.MonkeyPatch, tiles: layouts.WarpTiles, together: bool = False
) -> tuple[Any, Any]:
    """The warp-specialized products with some tiles, interpreted by threads, and the kernel."""
    module = gluon_kernel(WARP_SPECIALIZED)
    kernel = Interpreted(module._warp_specialized_linear_kernel, together)
    monkeypatch.setattr(module, "_warp_specialized_linear_kernel", kernel)
    monkeypatch.setattr(module, "_blocks", lambda matrix, rows: Blocks(matrix, (rows, layouts.WARP_INPUTS)))
    monkeypatch.setattr(layouts, "WARP_STAGES", 3)
    return replace(module.WARP_SPECIALIZED, plan=lambda *_: tiles), kernel


@pytest.mark.parametrize(("rows", "size", "inner"), [(70, 72, 200), (128, 136, 300), (300, 64, 96)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_warp_specialized_kernel(
    monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, biased: bool, half: bool
) -> None:
    """The products of a layer, then the start of an MLP from rows that are normed already."""
    tiles = layouts.WarpTiles(32, half)
    products, kernel = interpret_warp_specialized(monkeypatch, tiles)
    compare_rows(rows, size, inner, biased, torch.float32, "cpu", products)
    x, norm, weight = torch.randn(rows, size), torch.randn(size), size**-0.5 * torch.randn(2 * inner, size)
    got = products.norm_linear(Residual(x), norm, EPS, weight, None, True)
    torch.testing.assert_close(got, swiglu(F.linear(rms_norm(x, norm, EPS), weight)), atol=1e-5, rtol=1e-4)
    programs = [-(-outputs // tiles.width) for outputs in (size, 2 * inner, inner, size, inner)]
    assert kernel.grids == [(count, -(-rows // 128)) for count in programs]


@pytest.mark.parametrize(("rows", "size", "inner"), [(70, 72, 400), (128, 136, 1000), (65, 64, 90)])
@pytest.mark.parametrize("splits", [2, 4])
def test_splits_of_a_warp_specialized_product_add_up(
    monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, splits: int
) -> None:
    """Also where there are fewer blocks of inputs than splits. Counters are multiples afterwards, even as they
    overflow."""
    products, kernel = interpret_warp_specialized(monkeypatch, layouts.WarpTiles(32, False, splits), together=True)
    torch.manual_seed(rows)
    total, x, norm, bias = torch.randn(rows, size), torch.randn(rows, inner), torch.randn(size), torch.randn(size)
    weight = inner**-0.5 * torch.randn(size, inner)
    for before in (0, MAX_BARRIER_PROGRAMS, 2**31 - MAX_BARRIER_PROGRAMS):
        barrier_counters(x.device).fill_(before)
        want, tap = total + F.linear(x, weight, bias), torch.empty_like(total)
        _, scaled, squares = products.add_linear(total, x, weight, bias, norm, tap)
        torch.testing.assert_close(total, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scaled, want * norm, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(squares.sum(0), want.square().sum(1), atol=1e-4, rtol=1e-5)
        assert torch.equal(tap, total) and not (barrier_counters(x.device) % MAX_BARRIER_PROGRAMS).any()
    assert kernel.grids == [(splits * -(-size // 32), 1)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "size", "inner"), [*WARP_SHAPES, *((rows, 576, 1536) for rows in (129, 520, 800, 1000))]
)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_warp_specialized_kernel_on_a_gpu(rows: int, size: int, inner: int, biased: bool, dtype: torch.dtype) -> None:
    """The end of attention and the start of an MLP, then its end and the start of attention. In float16 no norm is
    begun."""
    kernels = gluon_kernel(WARP_SPECIALIZED).WARP_SPECIALIZED
    torch.manual_seed(rows)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to("cuda", dtype)

    def wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    norm, tolerance = made(size), 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9
    starts: list[tuple[Any, Any]] = [(norm_swiglu, swiglu), (norm_linear, lambda y: y)]
    for width, (start, meant) in zip((size, inner), starts, strict=True):
        total, x = made(rows, size), made(rows, width)
        first, second = made(size, width, scale=width**-0.5), made(2 * inner, size, scale=size**-0.5)
        second = second if start is norm_swiglu else second[:inner]
        first_bias, second_bias = (made(size), made(len(second))) if biased else (None, None)
        if dtype == torch.bfloat16:
            assert select._first("add_linear", select._read_add_linear(x, first, total, norm)) == kernels.add_linear
        want = total.float() + wide(x, first, first_bias)
        residual = add_linear(total, x, first, first_bias, norm)
        assert (residual.scaled is None) == (dtype == torch.float16)
        torch.testing.assert_close(residual.x.float(), want, atol=4 * tolerance, rtol=tolerance)
        expected = meant(wide(rms_norm(residual.x, norm, EPS), second, second_bias))
        got = start(residual, norm, EPS, second, second_bias)
        off = 6 * tolerance  # what a norm rounds is multiplied by a gate
        torch.testing.assert_close(got.float(), expected, atol=off, rtol=2 * tolerance)
