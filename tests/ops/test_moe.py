"""The router and the mixture of experts against their formulas, and their kernels against the references."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops import Residual, Routed, add_linear, add_mixture, norm_linear, norm_route
from jetspec.ops.moe import route
from jetspec.ops.select import STAND_IN, force, without
from tests.ops.test_agreement import Draw, agree, mix, mixture

EPS = 1e-5
FLOATS = Draw(torch.float32, "cpu")


# -- the mixture


def test_the_mixture_is_the_weighted_sum_of_its_experts() -> None:
    total, (x, expert, weight), gate_up, down = mixture(FLOATS, 5, experts=4, chosen=2, size=6, inner=5)
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


def compare_tilings(pairs: int, rows: int, depth: int) -> None:
    """Every program has several pieces of work."""
    import jetspec.ops.moe_triton as kernels

    tiling = kernels.Tiling(pairs, rows, depth, num_warps=4, num_stages=2, programs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "device_of", lambda device: STAND_IN._replace(multiprocessors=4))
        patch.setattr(kernels, "_choose_tiling", lambda tokens, itemsize: tiling)
        agree(mix, (40, 4, 2, 40, 36), torch.float32, "cpu")


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
def test_kernels_that_start_early_wait_for_each_other() -> None:
    """Layers in a row, in a graph, give the results of kernels that do not overlap."""
    torch.manual_seed(0)
    weights = [mixture(Draw(torch.bfloat16, "cuda"), tokens, 128, 8, 2048, 768)[2:] for tokens in range(3)]
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
