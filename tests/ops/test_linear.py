from __future__ import annotations

import importlib
import re
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from jetspec.ops import Residual, add_linear, norm_linear, norm_swiglu, rms_norm, swiglu
from jetspec.ops.counters import MOST, barrier_counters
from jetspec.ops.linear import HAS_MKL_PACKING, can_pack, linear, pack
from jetspec.ops.select import force
from tests.gluon import Blocks, Interpreted
from tests.kernels import compile_for_hopper, fetches_early

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
    for _ in range(2):  # the second call meets whatever the first has kept
        y = linear(x, weight, b)
        atol, rtol = (0.1, 0.02) if dtype == torch.bfloat16 else (1e-4, 1e-5)
        torch.testing.assert_close(y, F.linear(x, weight, b), atol=atol, rtol=rtol)


def test_leading_dimensions_are_free() -> None:
    x, weight = torch.randn(2, 3, 5, 8), torch.randn(4, 8)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


def test_trained_weights_are_never_remembered() -> None:
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


def test_packing_ahead_changes_nothing() -> None:
    weight, x = nn.Parameter(torch.randn(6, 8), requires_grad=False), torch.randn(9, 8)
    pack(weight)
    assert hasattr(weight, "packed") == HAS_MKL_PACKING
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [(3,), (1,), (2, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_with_what_stands_around_them(rows: tuple[int, ...], biased: bool) -> None:
    x, norm, total = torch.randn(*rows, 8), torch.randn(8), torch.randn(*rows, 6)
    weight, bias = torch.randn(6, 8), torch.randn(6) if biased else None
    plain = F.linear(rms_norm(x, norm, EPS), weight, bias)
    torch.testing.assert_close(norm_linear(Residual(x), norm, EPS, weight, bias), plain)
    torch.testing.assert_close(norm_swiglu(Residual(x), norm, EPS, weight, bias), swiglu(plain))
    expected = total + F.linear(x, weight, bias)
    torch.testing.assert_close(add_linear(total.clone(), x, weight, bias).x, expected)
    total = torch.stack((total, total))
    with force("triton"):  # which adds in place, for any number of axes
        found = add_linear(total, torch.stack((x, x)), weight, bias).x
    assert found.data_ptr() == total.data_ptr()
    torch.testing.assert_close(found, torch.stack((expected, expected)), atol=1e-5, rtol=1e-5)


def test_additions_leave_a_stream_that_is_trained_alone() -> None:
    total, x = torch.randn(3, 6, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(6, 8, requires_grad=True)
    add_linear(total, x, weight).x.sum().backward()
    assert total.grad is not None and x.grad is not None and weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):  # products come narrower than the stream
        assert add_linear(total, x, weight).x.dtype == torch.float32


@pytest.mark.parametrize(
    ("capability", "kilobytes", "can"), [((9, 0), 228, True), ((8, 0), 164, False), ((12, 0), 100, False)]
)
def test_products_of_a_few_rows_need_the_copy_engine_and_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kilobytes: int, can: bool
) -> None:
    """Hopper has both, the generation before it no copy engine, and small GPUs after it too little memory."""
    pytest.importorskip("triton")
    module = importlib.import_module("jetspec.ops.linear_triton")
    properties = SimpleNamespace(shared_memory_per_multiprocessor=1024 * kilobytes)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert module._has_copy_engine.__wrapped__(torch.device("cuda")) == can


def test_half_precision_does_not_begin_a_norm() -> None:
    """Rows of a stream, times the weight of a norm, may be too large for it."""
    total, norm = torch.full((2, 8), 3e4, dtype=torch.float16), torch.full((8,), 4.0, dtype=torch.float16)
    x, weight = torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8, 8, dtype=torch.float16)
    with force("triton"):
        residual = add_linear(total.clone(), x, weight, next_norm=norm)
    assert residual.scaled is None and torch.equal(residual.x, total)


def vector_problem(outputs: int, inputs: int, biased: bool, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    torch.manual_seed(outputs)
    made = [torch.randn(shape) for shape in ((1, inputs), (inputs,), (outputs, inputs), (1, outputs))]
    made[2] *= inputs**-0.5
    made = [tensor.to(device, dtype) for tensor in made]
    bias = torch.randn(outputs).to(device, dtype) if biased else None
    return [*made, bias]


def compare_vector(outputs: int, inputs: int, biased: bool, dtype: torch.dtype, device: str, tolerance: float) -> None:
    x, norm, weight, total, bias = vector_problem(outputs, inputs, biased, dtype, device)
    assert x is not None and norm is not None and weight is not None and total is not None

    def run() -> list[Tensor]:
        return [
            linear(x, weight, bias),
            norm_linear(Residual(x), norm, EPS, weight, bias),
            norm_swiglu(Residual(x), norm, EPS, weight, bias),
            add_linear(total.clone(), x, weight, bias).x,
        ]

    with force("triton"):
        got = run()
    with force("reference"):
        want = run()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (10, 1024), (36, 1500), (2, 3), (6, 9000)])
@pytest.mark.parametrize("biased", [True, False])
def test_kernel_of_a_single_row(interpreter: Executor, outputs: int, inputs: int, biased: bool) -> None:
    interpreter.submit(compare_vector, outputs, inputs, biased, torch.float32, "cpu", 1e-5).result()


def compare_rows(rows: int, size: int, inner: int, biased: bool, dtype: torch.dtype, device: str) -> None:
    """The products of a layer, each reading what the one before it left."""
    torch.manual_seed(rows)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to(device, dtype)

    total, x, norm = made(rows, size), made(rows, inner), made(size)
    first, second = made(size, inner, scale=inner**-0.5), made(2 * inner, size, scale=size**-0.5)
    bias = made(max(2 * inner, size)) if biased else None

    def run() -> tuple[Residual, list[Tensor]]:
        taps = torch.zeros(rows, 2, size, device=device, dtype=dtype)
        residual = add_linear(total.clone(), x, first, None if bias is None else bias[:size], norm, taps[:, 1])
        assert torch.equal(taps[:, 1], residual.x) and not taps[:, 0].any()
        second_bias = None if bias is None else bias[: 2 * inner]
        read = (
            norm_linear(residual, norm, EPS, second, second_bias),
            norm_swiglu(residual, norm, EPS, second, second_bias),
        )
        return residual, [residual.x, *read, linear(x, first)]

    with force("triton"):
        residual, got = run()
    with force("reference"):
        _, want = run()
    if rows <= 128 and size * dtype.itemsize % 16 == 0:
        assert residual.squares is not None and residual.squares.shape[1] == rows
    else:
        assert residual.squares is None
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize(("rows", "size", "inner"), [(2, 40, 96), (16, 72, 40), (33, 64, 300), (128, 32, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_kernel_of_a_few_rows(interpreter: Executor, rows: int, size: int, inner: int, biased: bool) -> None:
    interpreter.submit(compare_rows, rows, size, inner, biased, torch.float32, "cpu").result()


def compare_sizes(rows: int, size: int, inner: int) -> None:
    """The first product's weight is small, the second's is not."""
    module = importlib.import_module("jetspec.ops.linear_triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALL_BYTES", size * inner * 4)
        compare_rows(rows, size, inner, True, torch.float32, "cpu")


@pytest.mark.parametrize("rows", [64, 65, 129])
def test_a_norm_that_was_begun_is_finished_by_whom_it_suits(interpreter: Executor, rows: int) -> None:
    interpreter.submit(compare_sizes, rows, 40, 24).result()


def compare_tilings(rows: int, size: int, inner: int, half: bool) -> None:
    module = importlib.import_module("jetspec.ops.linear_triton")

    def choose(rows: int, outputs: int, gated: bool) -> Any:
        return module.RowTiling(max(16, min(rows, 32)), 32, half, 16, num_warps=4, num_stages=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_choose_tiling", choose)
        compare_rows(rows, size, inner, True, torch.float32, "cpu")


@pytest.mark.parametrize(("rows", "size", "inner"), [(16, 72, 40), (64, 100, 152)])
@pytest.mark.parametrize("half", [True, False])
def test_tiles_of_a_few_rows(interpreter: Executor, rows: int, size: int, inner: int, half: bool) -> None:
    interpreter.submit(compare_tilings, rows, size, inner, half).result()


@pytest.mark.parametrize("gated", [True, False])
@given(rows=st.integers(17, 128), outputs=st.integers(1, 32_768))
def test_a_multiprocessor_reads_as_little_as_it_can(rows: int, outputs: int, gated: bool) -> None:
    """Of x and of the weight, in all its tiles, one after the other."""
    module = importlib.import_module("jetspec.ops.linear_triton")

    def rows_read(width: int) -> int:
        tiles = -(-outputs // width) * -(-rows // 64)
        return -(-tiles // module.PROGRAMS) * (64 + (2 if gated else 1) * width)

    assert rows_read(module._choose_tiling(rows, outputs, gated).width) == min(map(rows_read, (32, 48, 64, 96)))


@pytest.mark.parametrize(("rows", "outputs", "width"), [(64, 5120, 48), (64, 6144, 48), (64, 4096, 32), (16, 6144, 96)])
def test_widths_of_tiles(rows: int, outputs: int, width: int) -> None:
    """160 narrow tiles would be more than run at once, and the last 28 would run alone."""
    assert importlib.import_module("jetspec.ops.linear_triton")._choose_tiling(rows, outputs, False).width == width


SLICED = [(64, 576, 1536), (48, 576, 1408), (16, 576, 2880), (33, 1024, 2048), (17, 56, 24), (2, 72, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "size", "inner"),
    [(16, 4096, 12288), (63, 4096, 4096), (5, 20, 8), *((rows, 576, 1536) for rows in (80, 96, 112, 128)), *SLICED],
)
@pytest.mark.parametrize("biased", [True, False])
def test_kernel_of_a_few_rows_on_a_gpu(rows: int, size: int, inner: int, biased: bool) -> None:
    compare_rows(rows, size, inner, biased, torch.bfloat16, "cuda")


@pytest.mark.parametrize("gated", [True, False])
@given(columns=st.integers(1, 6000))
def test_slices_hold_all_columns(columns: int, gated: bool) -> None:
    slices = gluon_kernels().find_slices(columns, gated)
    if slices is None:
        assert columns % 8 or columns > (2816 if gated else 5632)
        return
    parts = [part for part in slices[1:] if part]
    assert all(part >= 16 and part & (part - 1) == 0 for part in parts) and columns % 8 == 0
    missing = columns - slices.WARPS * (sum(parts) - parts[-1])
    assert 0 < missing <= slices.WARPS * parts[-1]


def gluon_kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("jetspec.ops.linear_gluon")


@pytest.mark.parametrize(
    ("columns", "reads"), sorted({(size, True) for _, size, _ in SLICED} | {(inner, False) for *_, inner in SLICED})
)
def test_sliced_kernel_compiles_for_hopper(columns: int, reads: bool) -> None:
    """As the first product of an MLP, or as the last. The weight is loaded before the kernel waits, the rows are after
    it, and both go to the tensor cores directly."""
    module = gluon_kernels()
    slices = module.find_slices(columns, reads)
    types = dict.fromkeys(("x_ptr", "weight_ptr", "total_ptr", "out_ptr", "next_norm_ptr", "scaled_ptr"), "*bf16")
    types |= dict.fromkeys(("bias_ptr", "tap_ptr"), "*bf16") | {"eps": "fp32"}
    types |= dict.fromkeys(("T", "N", "num_parts", "tap_stride"), "i32")
    absent = ("total", "next_norm", "scaled", "next_squares", "tap") if reads else ("squares",)
    constants = {"K": columns, "GATED": reads, "PARTS": 64 if reads else 1, "BLOCK_M": 16, "BLOCK_N": 16}
    constants |= {f"{name}_ptr": None for name in absent} | slices._asdict()
    ptx = compile_for_hopper(module._sliced_linear_kernel, types, constants, num_warps=slices.WARPS)
    before, after = ptx.split("griddepcontrol.wait")
    weights = 4 if reads else 2  # of 8 outputs each, beside 16 rows
    steps = slices.C1 // 16 + slices.C2 // 16 + slices.C3 // 16
    assert before.count("mma.sync") == 0 and after.count("mma.sync") == weights * steps
    assert loaded_registers(before) >= 2 * weights * steps and loaded_registers(after) >= 4 * steps


@pytest.mark.parametrize(("rows", "size", "inner"), [(33, 72, 96), (16, 40, 1408), (2, 24, 16), (17, 200, 576)])
@pytest.mark.parametrize("biased", [True, False])
def test_sliced_kernel(monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, biased: bool) -> None:
    """The products of a layer, as `test_kernel_of_a_few_rows`; what a GPU would run is interpreted."""
    module, tiles = gluon_kernels(), importlib.import_module("jetspec.ops.linear_triton")
    kernel = Interpreted(module._sliced_linear_kernel)
    monkeypatch.setattr(module, "_sliced_linear_kernel", kernel)
    monkeypatch.setattr(tiles, "_choose_plan", lambda x, weight, n, gated: module.find_slices(x.shape[1], gated))
    compare_rows(rows, size, inner, biased, torch.float32, "cpu")
    assert len(kernel.grids) == 4


PIPED = [(65, 4096, 12288), (128, 4096, 14336), (100, 4096, 4096)]
"""Rows of large weights, of a layer's size and an MLP's."""


def piped_kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("jetspec.ops.linear_piped_gluon")


@pytest.mark.parametrize("outputs", [3072, 4096, 6144, 12288, 14336, 16896])
def test_every_program_of_a_piped_product_runs_at_once(outputs: int) -> None:
    module = piped_kernels()
    pipe = module.find_pipe(outputs)
    assert module.ENOUGH_PROGRAMS <= -(-outputs // pipe.width) <= module.PROGRAMS and pipe.SPLITS == 1
    assert 3 <= pipe.stages(True) <= pipe.stages(False) <= module.MAX_STAGES


@pytest.mark.parametrize(("outputs", "depth"), [(4096, 12288), (4096, 4096), (2048, 6144), (3072, 100)])
def test_every_program_of_a_shared_product_runs_at_once(outputs: int, depth: int) -> None:
    """Those that wait for each other must, and none has too little to do."""
    module = piped_kernels()
    pipe = module.find_pipe(outputs, depth)
    assert module.ENOUGH_PROGRAMS <= -(-outputs // pipe.width) * pipe.SPLITS <= module.PROGRAMS
    assert pipe.SPLITS == 1 or (depth // pipe.SPLITS >= module.MIN_DEPTH and not pipe.HALF)
    assert pipe.SPLITS > 1 or depth < 2 * module.MIN_DEPTH


@pytest.mark.parametrize(("outputs", "depth"), [(96, 0), (3040, 0), (16897, 0), (5120, 25600)])
def test_products_that_do_not_fill_a_gpu_once_are_not_piped(outputs: int, depth: int) -> None:
    assert piped_kernels().find_pipe(outputs, depth) is None


@pytest.mark.parametrize(("outputs", "rows"), [(576, 129), (576, 1024), (960, 1024), (1536, 1024), (1536, 4096)])
def test_piped_products_with_a_small_weight_fill_a_gpu_if_they_can(outputs: int, rows: int) -> None:
    module = piped_kernels()
    pipe, tiles = module.find_small_pipe(outputs, rows), -(-rows // module.BLOCK_M)
    programs = {width: -(-outputs // width.width) * tiles for width in module.WIDTHS}
    assert pipe.SPLITS == 1 and programs[pipe] >= min(module.ENOUGH_PROGRAMS, max(programs.values()))
    assert all(programs[wider] < module.ENOUGH_PROGRAMS for wider in module.WIDTHS if wider.width > pipe.width)


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("plain", 4096), ("plain", 14336), ("gated", 12288), ("gated", 14336), ("added", 4096), ("shared", 4096)],
)
def test_piped_kernel_compiles_for_hopper(kind: str, outputs: int) -> None:
    """As the first product of attention or of an MLP, or as the last. The weight is asked for before the kernel
    waits."""
    module, gated, added = piped_kernels(), kind == "gated", kind in {"added", "shared"}
    pipe = module.find_pipe(outputs, 14336 if kind == "shared" else 0)
    assert (pipe.SPLITS > 1) == (kind == "shared")

    def blocks(rows: int) -> str:
        shape, language = [rows, module.BLOCK_K], module.gl
        layout = language.NVMMASharedLayout.get_default_for(shape, language.bfloat16)
        return f"tensordesc<bf16[{rows}, {module.BLOCK_K}],{layout!r}>"

    types = {"x_desc": blocks(module.BLOCK_M), "weight_desc": blocks(pipe.BLOCK_N), "eps": "fp32"}
    types |= {"half_desc": blocks(pipe.BLOCK_N // 2)} | dict.fromkeys(("T", "N", "K", "num_parts", "tap_stride"), "i32")
    types |= dict.fromkeys(("bias_ptr", "out_ptr", "next_norm_ptr", "scaled_ptr", "tap_ptr"), "*bf16")
    constants = {"BLOCK_M": module.BLOCK_M, "BLOCK_K": module.BLOCK_K, "STAGES": pipe.stages(gated), **pipe._asdict()}
    absent = {"squares"} if added else {"next_norm", "scaled", "next_squares", "tap"}
    absent |= set() if kind == "shared" else {"part", "met"}
    types |= {"met_ptr": "*i32"}
    constants |= {"GATED": gated, "PARTS": 1 if added else 128, **{f"{name}_ptr": None for name in absent}}
    constants |= {} if pipe.HALF else {"half_desc": None}
    ptx = compile_for_hopper(module._piped_linear_kernel, types, constants, num_warps=4)
    assert "setmaxnreg" in ptx and "wgmma.wait_group" in ptx
    assert ptx.index("cp.async.bulk.tensor") < ptx.rindex("griddepcontrol.wait")
    assert ptx.count("wgmma.mma_async") == 2 * (2 if pipe.HALF else 1) * (module.BLOCK_K // 16)


@pytest.mark.parametrize(("rows", "size", "inner"), [(70, 72, 200), (128, 136, 300), (65, 200, 64), (300, 64, 96)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_piped_kernel(
    monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, biased: bool, half: bool
) -> None:
    """The end of attention and the start of an MLP, or the end of one and the start of attention. What a GPU would run
    is interpreted, by threads that wait for each other."""
    module = piped_kernels()
    kernel = Interpreted(module._piped_linear_kernel)
    monkeypatch.setattr(module, "_piped_linear_kernel", kernel)
    monkeypatch.setattr(module, "_blocks", lambda matrix, rows: Blocks(matrix, (rows, module.BLOCK_K)))
    monkeypatch.setattr(module, "MAX_STAGES", 3)
    pipe = module.Pipe(32, half)
    torch.manual_seed(rows)
    total, x, norm = torch.randn(rows, size), torch.randn(rows, inner), torch.randn(size)
    first, second = inner**-0.5 * torch.randn(size, inner), size**-0.5 * torch.randn(2 * inner, size)
    first_bias, second_bias = (torch.randn(size), torch.randn(2 * inner)) if biased else (None, None)
    taps = torch.zeros(rows, 2, size)
    want = total + nn.functional.linear(x, first, first_bias)
    scaled, squares = module.piped_add_linear_gluon(pipe, total, x, first, first_bias, norm, taps[:, 1])
    torch.testing.assert_close(total, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(taps[:, 1], total) and not taps[:, 0].any()
    normed = rms_norm(want, norm, EPS)
    product = nn.functional.linear(normed, second, second_bias)
    for gated, expected in ((True, swiglu(product)), (False, product)):
        got = module.piped_linear_gluon(pipe, scaled, second, second_bias, squares=squares, eps=EPS, gated=gated)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        got = module.piped_linear_gluon(pipe, normed, second, second_bias, gated=gated)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    programs = [-(-outputs // pipe.width) for outputs in (size, inner, inner, 2 * inner, 2 * inner)]
    assert kernel.grids == [(count, -(-rows // 128)) for count in programs]


@pytest.mark.parametrize(("rows", "size", "inner"), [(70, 72, 400), (128, 136, 1000), (65, 64, 90)])
@pytest.mark.parametrize("splits", [2, 4])
def test_programs_that_share_the_inputs_of_a_piped_product_add_up(
    monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, splits: int
) -> None:
    """Also where there are fewer inputs than programs to share them. They leave no trace for those that come next, not
    even as their counters overflow."""
    module = piped_kernels()
    kernel = Interpreted(module._piped_linear_kernel, together=True)
    monkeypatch.setattr(module, "_piped_linear_kernel", kernel)
    monkeypatch.setattr(module, "_blocks", lambda matrix, rows: Blocks(matrix, (rows, module.BLOCK_K)))
    monkeypatch.setattr(module, "MAX_STAGES", 3)
    torch.manual_seed(rows)
    total, x, norm, bias = torch.randn(rows, size), torch.randn(rows, inner), torch.randn(size), torch.randn(size)
    weight = inner**-0.5 * torch.randn(size, inner)
    for before in (0, MOST, 2**31 - MOST):
        barrier_counters(x.device).fill_(before)
        want, tap = total + nn.functional.linear(x, weight, bias), torch.empty_like(total)
        scaled, squares = module.piped_add_linear_gluon(
            module.Pipe(32, False, splits), total, x, weight, bias, norm, tap
        )
        torch.testing.assert_close(total, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scaled, want * norm, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(squares.sum(0), want.square().sum(1), atol=1e-4, rtol=1e-5)
        assert torch.equal(tap, total) and not (barrier_counters(x.device) % MOST).any()
    assert kernel.grids == [(splits * -(-size // 32), 1)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "size", "inner"), [*PIPED, *((rows, 576, 1536) for rows in (129, 520, 800, 1000))])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_piped_kernel_on_a_gpu(rows: int, size: int, inner: int, biased: bool, dtype: torch.dtype) -> None:
    """The end of attention and the start of an MLP, then its end and the start of attention, for rows between those
    that a tile takes and those that a library is better at. In float16 no norm is begun."""
    products = importlib.import_module("jetspec.ops.linear")
    torch.manual_seed(rows)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to("cuda", dtype)

    def wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())

    norm, tolerance = made(size), 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9
    starts: list[tuple[Any, Any]] = [(norm_swiglu, swiglu), (norm_linear, lambda y: y)]
    for width, (start, meant) in zip((size, inner), starts, strict=True):
        total, x = made(rows, size), made(rows, width)
        first, second = made(size, width, scale=width**-0.5), made(2 * inner, size, scale=size**-0.5)
        second = second if start is norm_swiglu else second[:inner]
        first_bias, second_bias = (made(size), made(len(second))) if biased else (None, None)
        assert products._find_pipe(x, first, size, width) and products._find_pipe(total, second, inner)
        assert not products._find_pipe(x[:64], first, size)
        want = total.float() + wide(x, first, first_bias)
        residual = add_linear(total, x, first, first_bias, norm)
        assert (residual.scaled is None) == (dtype == torch.float16)
        torch.testing.assert_close(
            residual.x.float(), want, atol=4 * tolerance, rtol=tolerance
        )  # a bias is added before
        expected = meant(wide(rms_norm(residual.x, norm, EPS), second, second_bias))
        got = start(residual, norm, EPS, second, second_bias)
        off = 6 * tolerance  # what a norm rounds is multiplied by a gate
        torch.testing.assert_close(got.float(), expected, atol=off, rtol=2 * tolerance)


def loaded_registers(ptx: str) -> int:
    """32 bits each, by loads of them alone."""
    found = re.findall(r"ld\.global(?:\.\w+)*?(?:\.(v[24]))?\.b32", ptx)
    return sum(int(vector[1:]) if vector else 1 for vector in found)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("reads", [True, False])
def test_kernel_of_a_few_rows_compiles_for_hopper(rows: int, reads: bool) -> None:
    """As the first product of an MLP, or as the last. Wide products go through the tensor cores' own queue."""
    module = importlib.import_module("jetspec.ops.linear_triton")
    kernel, tiling = module._rows_linear_kernel, module._choose_tiling(rows, 12288 if reads else 4096, reads)._asdict()
    options = {name: tiling.pop(name) for name in ("num_warps", "num_stages")}
    block = {"x_desc": tiling["BLOCK_M"], "weight_desc": tiling["BLOCK_N"], "half_desc": tiling["BLOCK_N"] // 2}
    types = {name: f"tensordesc<bf16[{size}, {tiling['BLOCK_K']}]>" for name, size in block.items()}
    types |= dict.fromkeys(("total_ptr", "out_ptr", "next_norm_ptr", "scaled_ptr"), "*bf16") | {"eps": "fp32"}
    types |= dict.fromkeys(("T", "N", "K", "num_parts", "tap_stride"), "i32") | {
        "tap_ptr": "*bf16",
        "weight_ptr": "*bf16",
    }
    absent = ("total", "next_norm", "scaled", "next_squares", "tap") if reads else ("squares",)
    constants = {"EARLY": True, "GATED": reads, "PARTS": 128 if reads else 1, "bias_ptr": None} | {
        f"{n}_ptr": None for n in absent
    }
    constants |= {} if tiling["HALF"] else {"half_desc": None}
    ptx = compile_for_hopper(kernel, types, {**constants, **tiling}, **options)
    assert "cp.async.bulk.tensor" in ptx and ("wgmma" in ptx) == (rows >= 64) and fetches_early(ptx)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (960, 576), (4096, 12288)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_kernel_on_a_gpu(outputs: int, inputs: int, dtype: torch.dtype, tolerance: float) -> None:
    compare_vector(outputs, inputs, False, dtype, "cuda", tolerance)


@pytest.mark.gpu
def test_residuals_are_added_in_place_on_a_gpu() -> None:
    total, x, weight = (torch.randn(s, device="cuda") for s in ((64, 96), (64, 128), (96, 128)))
    expected = total + F.linear(x, weight)
    with torch.no_grad():
        out = add_linear(total, x, weight).x
    assert out.data_ptr() == total.data_ptr()
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("gated", [True, False])
def test_kernel_compiles_for_hopper(gated: bool) -> None:
    pytest.importorskip("triton")
    kernel = importlib.import_module("jetspec.ops.linear_triton")._vector_linear_kernel
    types = dict.fromkeys(kernel.arg_names, "*bf16") | {"N": "i32", "eps": "fp32"}
    constants = {"K": 4096, "GATED": gated, "BLOCK_N": 4 if gated else 8, "BLOCK_K": 1024, "bias_ptr": None}
    ptx = compile_for_hopper(kernel, types, constants, num_warps=4)
    assert ptx.index("ld.global") < ptx.index("griddepcontrol.wait")  # the weight
