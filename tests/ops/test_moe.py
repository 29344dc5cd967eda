"""The router and the mixture of experts against their formulas, and their kernels against the references."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops import Residual, Routed, add_linear, add_mixture, norm_linear, norm_route
from jetspec.ops.moe import route, route_reference
from jetspec.ops.select import STAND_IN, force, without

EPS = 1e-5


def draw(
    tokens: int,
    experts: int,
    chosen: int,
    size: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Routed, Tensor, Tensor]:
    """The residual, the inputs of the experts, and their weights. Outputs are about 1. A third of the tokens chooses
    the first experts, so that some are crowded."""
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    total, x = normal(tokens, size), normal(tokens, size)
    gate_up, down = normal(experts, 2 * inner, size, scale=size**-0.5), normal(experts, size, inner, scale=inner**-0.5)
    score = torch.rand(tokens, experts, generator=generator, device=device)
    score[::3, :chosen] += 1
    weight, expert = score.topk(chosen, -1)
    return total, Routed(x, expert, (weight / weight.sum(-1, keepdim=True)).to(dtype)), gate_up, down


# -- the mixture


def test_the_mixture_is_the_weighted_sum_of_its_experts() -> None:
    total, (x, expert, weight), gate_up, down = draw(5, experts=4, chosen=2, size=6, inner=5)
    expected = total.clone()
    for token in range(5):
        for chosen, share in zip(expert[token], weight[token], strict=True):
            gate, up = (gate_up[chosen] @ x[token]).chunk(2)
            expected[token] += share * (down[chosen] @ (F.silu(gate) * up))
    y = add_mixture(total, Routed(x, expert, weight), gate_up, down).x
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


def test_gradients_flow_and_leading_dimensions_are_free() -> None:
    x, norm, router = torch.randn(2, 3, 6, requires_grad=True), torch.ones(6), torch.randn(4, 6, requires_grad=True)
    routed = norm_route(Residual(x), norm, EPS, router, 2)
    y = add_mixture(x, routed, torch.randn(4, 10, 6), torch.randn(4, 6, 5), tap := torch.empty(2, 3, 6)).x
    assert y.shape == x.shape and torch.equal(tap, y)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.any() and router.grad is not None and router.grad.any()


def test_products_may_be_narrower_than_the_residual() -> None:
    x, norm = torch.randn(3, 6), torch.ones(6)
    with torch.autocast("cpu", torch.bfloat16):
        routed = norm_route(Residual(x), norm, EPS, torch.randn(4, 6), 2)
        y = add_mixture(x, routed, torch.randn(4, 10, 6), torch.randn(4, 6, 5)).x
    assert routed.weight_TK.dtype == y.dtype == torch.float32


def compare(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, tolerance: float) -> None:
    """A tap whose rows lie apart is written."""
    total, routed, gate_up, down = draw(*shape, dtype, device)

    def run() -> Tensor:
        taps = torch.zeros(len(total), 2, total.shape[1], device=device, dtype=dtype)
        y = add_mixture(total.clone(), routed, gate_up, down, taps[:, 1]).x
        assert torch.equal(taps[:, 1], y) and not taps[:, 0].any()
        return y

    with force("triton"):
        got = run()
    with force("reference"):
        torch.testing.assert_close(got, run(), atol=tolerance, rtol=tolerance)


SHAPES = [
    (1, 4, 2, 16, 16),
    (0, 4, 2, 16, 16),
    (3, 5, 1, 200, 24),  # a sum deeper than a block
    (12, 3, 2, 18, 170),  # columns beyond a block, no power of two
    (30, 4, 3, 24, 12),  # tiles of 16 and of 32
    (64, 3, 2, 20, 12),  # full tiles
    (150, 4, 2, 520, 12),  # several tiles per expert, several parts of a row
]


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(interpreter: Executor, shape: tuple[int, int, int, int, int]) -> None:
    interpreter.submit(compare, shape, torch.float32, "cpu", 1e-5).result()


def compare_tilings(pairs: int, rows: int, depth: int) -> None:
    """Every program has several pieces of work."""
    import jetspec.ops.moe_triton as kernels

    tiling = kernels.Tiling(pairs, rows, depth, num_warps=4, num_stages=2, programs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "device_of", lambda device: STAND_IN._replace(multiprocessors=4))
        patch.setattr(kernels, "_choose_tiling", lambda tokens, itemsize: tiling)
        compare((40, 4, 2, 40, 36), torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("pairs", [16, 32, 64])
@pytest.mark.parametrize(("rows", "depth"), [(32, 64), (64, 16)])
def test_tiles_of_every_size(interpreter: Executor, pairs: int, rows: int, depth: int) -> None:
    interpreter.submit(compare_tilings, pairs, rows, depth).result()


# -- the router


def tied_logits(rows: int, experts: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Few distinct values among many experts; one row is constant, one has -inf."""
    logits = torch.randint(-3, 4, (rows, experts), device=device).to(dtype)
    logits[0] = 0.5
    logits[-1, ::2] = -float("inf")
    return logits


@pytest.mark.parametrize("normalize", [True, False])
def test_the_best_experts_are_chosen_and_of_ties_the_lowest(normalize: bool) -> None:
    logits = tied_logits(6, 9, torch.float32)
    expert, weight = route(logits, 4, normalize, torch.float32)
    chance = logits.softmax(-1)
    for row in range(6):
        best = sorted(range(9), key=lambda e: (-float(logits[row, e]), e))[:4]
        assert expert[row].tolist() == best
        share = chance[row, best]
        torch.testing.assert_close(weight[row], share / share.sum() if normalize else share)


def compare_routes(rows: int, experts: int, chosen: int, dtype: torch.dtype, device: str) -> None:
    for logits in (tied_logits(rows, experts, dtype, device), torch.randn(rows, experts).to(device, dtype)):
        for normalize in (True, False):
            with force("triton"):
                expert, weight = route(logits, chosen, normalize, dtype)
            expected_expert, expected_weight = route_reference(logits, chosen, normalize, dtype)
            assert torch.equal(expert, expected_expert)
            torch.testing.assert_close(weight, expected_weight)


@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 4, 1), (3, 5, 5), (7, 128, 8), (2, 133, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_equals_reference(
    interpreter: Executor, rows: int, experts: int, chosen: int, dtype: torch.dtype
) -> None:
    interpreter.submit(compare_routes, rows, experts, chosen, dtype, "cpu").result()


def route_nan(experts: int) -> None:
    logits = torch.randn(3, experts)
    logits[1] = float("nan")
    logits[2, 1] = float("nan")
    with force("triton"):
        expert, weight = route(logits, 3, True, torch.float32)
    assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) <= max(row) < experts for row in expert.tolist())
    assert 1 not in expert[2] and weight[1].isnan().all() and not weight[::2].isnan().any()


def test_nan_logits_still_have_experts(interpreter: Executor) -> None:
    interpreter.submit(route_nan, 6).result()


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65, 1500])
def test_kernel_on_a_gpu(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    compare((tokens, 128, 8, 2048, 768), dtype, "cuda", tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 700])
@pytest.mark.parametrize("experts", [60, 128, 512])
def test_router_on_a_gpu(rows: int, experts: int) -> None:
    compare_routes(rows, experts, 8, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_kernels_that_start_early_wait_for_each_other() -> None:
    """Layers in a row, in a graph, give the results of kernels that do not overlap."""
    torch.manual_seed(0)
    weights = [draw(tokens, 128, 8, 2048, 768, torch.bfloat16, "cuda")[2:] for tokens in range(3)]
    x, norm = torch.randn(64, 2048).to("cuda", torch.bfloat16), torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    square, router = (torch.randn(n, 2048).mul(0.02).to("cuda", torch.bfloat16) for n in (2048, 128))

    def run() -> Tensor:
        residual = add_linear(x.clone(), x, square, None, norm)
        for gate_up, down in weights * 4:
            residual = add_mixture(residual.x, norm_route(residual, norm, EPS, router, 8), gate_up, down)
            residual = add_linear(residual.x, norm_linear(residual, norm, EPS, square), square, None, norm)
        return residual.x

    with torch.inference_mode():
        with without("overlap"):
            expected = run().clone()
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(5):
            graph.replay()
            assert torch.equal(found, expected)
