"""The router and the mixture of experts against their formulas, and their kernels against the references."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.ops import Residual, Routed, add_linear, add_mixture, norm_linear, norm_route, rms_norm
from jetspec.ops.moe import route, route_reference
from jetspec.ops.select import force
from tests.kernels import compile_for_hopper

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
    """The residual, what experts are given, and their weights. Outputs are about 1. A third of the tokens chooses the
    first experts, so that some are crowded."""
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


def test_it_is_the_weighted_sum_of_its_experts() -> None:
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
    y = add_mixture(x, routed, torch.randn(4, 10, 6), torch.randn(4, 6, 5), norm, tap := torch.empty(2, 3, 6)).x
    assert y.shape == x.shape and torch.equal(tap, y)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.any() and router.grad is not None and router.grad.any()


def test_products_may_be_narrower_than_the_stream() -> None:
    x, norm = torch.randn(3, 6), torch.ones(6)
    with torch.autocast("cpu", torch.bfloat16):
        routed = norm_route(Residual(x), norm, EPS, torch.randn(4, 6), 2)
        y = add_mixture(x, routed, torch.randn(4, 10, 6), torch.randn(4, 6, 5)).x
    assert routed.weight_TK.dtype == y.dtype == torch.float32


def compare(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, tolerance: float) -> None:
    """A tap whose rows lie apart is written, and the norm that follows is begun where rows are few."""
    total, routed, gate_up, down = draw(*shape, dtype, device)
    norm = torch.randn(total.shape[1]).to(device, dtype)

    def run() -> tuple[Residual, Tensor]:
        taps = torch.zeros(len(total), 2, total.shape[1], device=device, dtype=dtype)
        residual = add_mixture(total.clone(), routed, gate_up, down, norm, taps[:, 1])
        assert torch.equal(taps[:, 1], residual.x) and not taps[:, 0].any()
        return residual, norm_linear(residual, norm, EPS, down[0].t().contiguous())

    with force("triton"):
        residual, next_product = run()
    with force("reference"):
        expected, expected_product = run()
    torch.testing.assert_close(residual.x, expected.x, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(next_product, expected_product, atol=4 * tolerance, rtol=4 * tolerance)
    can = total.shape[1] * total.itemsize % 16 == 0 and (dtype == torch.bfloat16 or device == "cpu")
    assert (residual.squares is not None) == (len(total) in range(2, 65) and can)


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
    import jetspec.ops.moe_triton as kernels

    tiling = kernels.Tiling(pairs, rows, depth, num_warps=4, num_stages=2, programs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_choose_tiling", lambda tokens, itemsize: tiling)
        compare((40, 4, 2, 40, 36), torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("pairs", [16, 32, 64])
@pytest.mark.parametrize(("rows", "depth"), [(32, 64), (64, 16)])
def test_tiles_of_every_size(interpreter: Executor, pairs: int, rows: int, depth: int) -> None:
    interpreter.submit(compare_tilings, pairs, rows, depth).result()


def check_groups(expert_TK: Tensor, num_experts: int, tile_size: int) -> None:
    import jetspec.ops.moe_triton as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "GROUP_BLOCK", 8)
        pair, tile_expert, num_tiles = kernels.group_pairs_triton(expert_TK, num_experts, tile_size)
    expert, none = expert_TK.flatten(), expert_TK.numel()
    assert int(num_tiles) == int((-(-torch.bincount(expert, minlength=num_experts) // tile_size)).sum())
    rows, of_tile = pair.view(-1, tile_size)[:num_tiles], tile_expert[:num_tiles]
    real = rows < none
    assert torch.equal(rows[real].long(), expert.argsort(stable=True))
    assert torch.equal(expert[rows[real].long()], of_tile[:, None].expand_as(rows)[real].long())
    assert bool((rows[~real] == none).all())


@pytest.mark.parametrize("tokens", [1, 3, 30])
@pytest.mark.parametrize("num_experts", [1, 5, 8])
@pytest.mark.parametrize("tile_size", [2, 4])
def test_groups_hold_every_pair_once(interpreter: Executor, tokens: int, num_experts: int, tile_size: int) -> None:
    expert_TK = torch.randint(num_experts, (tokens, 2))
    interpreter.submit(check_groups, expert_TK, num_experts, tile_size).result()


# -- the router


def tied_logits(rows: int, experts: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Few values among many experts; one row has but one, one has the least there is."""
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


def route_nothing(experts: int) -> None:
    logits = torch.randn(3, experts)
    logits[1] = float("nan")
    logits[2, 1] = float("nan")
    with force("triton"):
        expert, weight = route(logits, 3, True, torch.float32)
    assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) <= max(row) < experts for row in expert.tolist())
    assert 1 not in expert[2] and weight[1].isnan().all() and not weight[::2].isnan().any()


def test_what_is_not_a_number_still_has_experts(interpreter: Executor) -> None:
    interpreter.submit(route_nothing, 6).result()


def compare_norm_routes(
    rows: int, size: int, experts: int, chosen: int, dtype: torch.dtype, device: str, tolerance: float
) -> None:
    """Behind a product that has begun the norm where rows are few. Logits are far enough apart for any rounding."""
    torch.manual_seed(rows)
    total, x, norm = (torch.randn(s).to(device, dtype) for s in ((rows, size), (rows, size), (size,)))
    weight = (torch.randn(size, size) * size**-0.5).to(device, dtype)
    router = torch.randn(experts, size).to(device, dtype)

    def run() -> tuple[Residual, Routed]:
        residual = add_linear(total.clone(), x, weight, None, norm)
        return residual, norm_route(residual, norm, EPS, router, chosen)

    with force("triton"):
        residual, routed = run()
    assert (residual.squares is not None) == (rows > 1)
    with force("reference"):
        expected_x = rms_norm(residual.x, norm, EPS)
        expert, expected_weight = route(F.linear(expected_x, router), chosen, True, dtype)
    torch.testing.assert_close(routed.x_TM, expected_x, atol=tolerance, rtol=tolerance)
    same = (routed.expert_TK == expert).float().mean()
    assert same == 1 if dtype == torch.float32 else same > 0.9
    if dtype == torch.float32:
        torch.testing.assert_close(routed.weight_TK, expected_weight, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize(
    ("rows", "size", "experts", "chosen"), [(2, 40, 5, 2), (20, 200, 130, 3), (64, 136, 64, 8), (1, 24, 4, 2)]
)
def test_norm_and_router_equal_reference(
    interpreter: Executor, rows: int, size: int, experts: int, chosen: int
) -> None:
    shape = rows, size, experts, chosen
    interpreter.submit(compare_norm_routes, *shape, torch.float32, "cpu", 1e-5).result()


# -- the compiler's view

POINTERS = {"pair_ptr": "*i32", "tile_expert_ptr": "*i32", "num_tiles_ptr": "*i32", "expert_ptr": "*i64"}
NUMBERS = dict.fromkeys(("num_pairs", "T", "tap_stride", "num_parts"), "i32") | {"eps": "fp32"}
TENSORS = ("x_ptr", "gate_up_ptr", "gated_ptr", "down_ptr", "weight_ptr", "out_ptr", "total_ptr", "choice_ptr")
OTHERS = ("next_norm_ptr", "scaled_ptr", "tap_ptr", "router_ptr")


def compiled(kernel: Any, constants: dict[str, Any], dtype: str = "*bf16", **options: int) -> str:
    types = dict.fromkeys((*TENSORS, *OTHERS), dtype) | POINTERS | NUMBERS
    return compile_for_hopper(kernel, types, constants, **options)


@pytest.mark.parametrize("experts", [8, 128])
def test_grouping_compiles_for_hopper(experts: int) -> None:
    from jetspec.ops.moe_triton import GROUP_BLOCK, _group_pairs_kernel

    assert "st.global" in compiled(_group_pairs_kernel, {"TILE": 64, "BINS": experts, "BLOCK": GROUP_BLOCK})


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "*bf16"), (16, "*bf16"), (64, "*bf16"), (64, "*fp32")])
def test_products_compile_for_hopper(tokens: int, dtype: str) -> None:
    """Weights go from the copies to the tensor cores' own queue, however few pairs there are."""
    import jetspec.ops.moe_triton as kernels

    narrow = dtype == "*bf16"
    tiling = kernels._choose_tiling(tokens, 2 if narrow else 4)._asdict() | {"M": 2048, "INNER": 768}
    options = {name: tiling.pop(name) for name in ("num_warps", "num_stages", "programs")}
    del options["programs"]
    for kernel, more in ((kernels._gate_up_kernel, {"K": 8}), (kernels._down_kernel, {})):
        ptx = compiled(kernel, tiling | more, dtype, **options)
        assert "cp.async" in ptx and ("wgmma" in ptx) == narrow


@pytest.mark.parametrize("begins", [True, False])
def test_the_sum_compiles_for_hopper(begins: bool) -> None:
    from jetspec.ops.moe_triton import ADD_BLOCK, _add_choices_kernel

    absent = {} if begins else dict.fromkeys(("next_norm_ptr", "scaled_ptr", "squares_ptr", "tap_ptr"))
    ptx = compiled(_add_choices_kernel, {"K": 8, "M": 2048, "BLOCK": ADD_BLOCK, **absent})
    assert not begins or ptx.index("ld.global") < ptx.index("griddepcontrol.wait")  # the norm's weight


@pytest.mark.parametrize("experts", [128, 512])
@pytest.mark.parametrize("begun", [True, False])
def test_router_compiles_for_hopper(experts: int, begun: bool) -> None:
    import jetspec.ops.route_triton as kernels

    if begun:
        constants = {"M": 2048, "E": experts, "TOKENS": 64}
        blocks = {"EXPERTS": kernels.ROUTER_EXPERTS, "DEPTH": kernels.ROUTER_DEPTH}
        ptx = compiled(kernels._router_kernel, constants | blocks)
        assert ptx.index("ld.global") < ptx.index("griddepcontrol.wait")  # the weight
    absent = {} if begun else dict.fromkeys(("scaled_ptr", "squares_ptr", "x_ptr"))
    sizes = {"E": experts, "EXPERTS": experts, "CHOSEN": 8, "NORMALIZE": True, "SLICES": 16 if begun else 1}
    sizes["OTHERS"] = kernels.RANK_TABLE // experts
    rows = {"M": 2048, "BLOCK": 2048, "PARTS": 128} if begun else {"M": 1, "BLOCK": 1, "PARTS": 1}
    assert "st.global" in compiled(kernels._choose_kernel, sizes | rows | absent)


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
@pytest.mark.parametrize("rows", [1, 2, 33, 64])
def test_norm_and_router_on_a_gpu(rows: int) -> None:
    compare_norm_routes(rows, 2048, 128, 8, torch.bfloat16, "cuda", 2**-6)


@pytest.mark.gpu
def test_kernels_that_start_early_wait_for_each_other() -> None:
    """Layers in a row, in a graph, give what they give when no kernel starts before the one before it has ended."""
    from jetspec.ops import linear_triton, moe_triton, route_triton

    torch.manual_seed(0)
    weights = [draw(tokens, 128, 8, 2048, 768, torch.bfloat16, "cuda")[2:] for tokens in range(3)]
    x, norm = torch.randn(64, 2048).to("cuda", torch.bfloat16), torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    square, router = (torch.randn(n, 2048).mul(0.02).to("cuda", torch.bfloat16) for n in (2048, 128))

    def run() -> Tensor:
        residual = add_linear(x.clone(), x, square, None, norm)
        for gate_up, down in weights * 4:
            residual = add_mixture(residual.x, norm_route(residual, norm, EPS, router, 8), gate_up, down, norm)
            residual = add_linear(residual.x, norm_linear(residual, norm, EPS, square), square, None, norm)
        return residual.x

    with torch.inference_mode():
        with pytest.MonkeyPatch.context() as patch:
            for module in (linear_triton, moe_triton, route_triton):
                patch.setattr(module, "overlap", lambda x: {"OVERLAP": False})
            expected = run().clone()
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(5):
            graph.replay()
            assert torch.equal(found, expected)
