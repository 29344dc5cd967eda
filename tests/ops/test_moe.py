"""The mixture of experts against its formula, and its kernels against the reference."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.dispatch import force
from jetspec.ops import mixture
from tests.kernels import compile_for_hopper

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(
    tokens: int,
    experts: int,
    chosen: int,
    size: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Outputs are about 1. A third of the tokens chooses the first experts, so that some are crowded."""
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    x = normal(tokens, size)
    gate_up, down = normal(experts, 2 * inner, size, scale=size**-0.5), normal(experts, size, inner, scale=inner**-0.5)
    score = torch.rand(tokens, experts, generator=generator, device=device)
    score[::3, :chosen] += 1
    weight, expert = score.topk(chosen, -1)
    return x, gate_up, down, expert, (weight / weight.sum(-1, keepdim=True)).to(dtype)


def test_it_is_the_weighted_sum_of_its_experts() -> None:
    x, gate_up, down, expert, weight = draw(5, experts=4, chosen=2, size=6, inner=5)
    expected = torch.zeros_like(x)
    for token in range(5):
        for chosen, share in zip(expert[token], weight[token], strict=True):
            gate, up = (gate_up[chosen] @ x[token]).chunk(2)
            expected[token] += share * (down[chosen] @ (F.silu(gate) * up))
    torch.testing.assert_close(mixture(x, gate_up, down, expert, weight), expected, atol=1e-5, rtol=1e-5)


def compare(inputs: Inputs, tolerance: float) -> None:
    with force("triton"):
        y = mixture(*inputs)
    with force("reference"):
        torch.testing.assert_close(y, mixture(*inputs), atol=tolerance, rtol=tolerance)


SHAPES = [
    (1, 4, 2, 16, 16),
    (0, 4, 2, 16, 16),
    (3, 5, 1, 200, 24),  # a sum deeper than a block
    (12, 3, 2, 18, 70),  # columns beyond a block, no power of two
    (80, 4, 2, 20, 12),  # many pairs per expert
    (40, 4, 1, 20, 12),  # several tiles per expert
]


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(interpreter: Executor, shape: tuple[int, int, int, int, int]) -> None:
    interpreter.submit(compare, draw(*shape), 1e-5).result()


def check_groups(expert_TK: Tensor, num_experts: int, tile_size: int) -> None:
    import jetspec.ops.moe_triton as kernels

    kernels.GROUP_BLOCK = 8
    pair, tile_expert = kernels.group_pairs_triton(expert_TK, num_experts, tile_size)
    expert, none = expert_TK.flatten(), expert_TK.numel()
    used = tile_expert >= 0
    assert torch.equal(used, used.sort(descending=True).values)
    rows = pair.view(-1, tile_size)[used]
    real = rows < none
    assert torch.equal(rows[real].long(), expert.argsort(stable=True))
    assert torch.equal(expert[rows[real].long()], tile_expert[used][:, None].expand_as(rows)[real].long())
    tiles = -(-torch.bincount(expert, minlength=num_experts) // tile_size)
    assert int(used.sum()) == int(tiles.sum())
    assert bool((rows[~real] == none).all())


@pytest.mark.parametrize("tokens", [1, 3, 30])
@pytest.mark.parametrize("num_experts", [1, 5, 8])
@pytest.mark.parametrize("tile_size", [2, 4])
def test_groups_hold_every_pair_once(interpreter: Executor, tokens: int, num_experts: int, tile_size: int) -> None:
    expert_TK = torch.randint(num_experts, (tokens, 2))
    interpreter.submit(check_groups, expert_TK, num_experts, tile_size).result()


POINTERS = {"pair_ptr": "*i32", "tile_expert_ptr": "*i32", "expert_ptr": "*i64", "num_pairs": "i32", "num_tiles": "i32"}


@pytest.mark.parametrize("experts", [8, 128])
def test_grouping_compiles_without_a_gpu(experts: int) -> None:
    from jetspec.ops.moe_triton import FEW, GROUP_BLOCK, _group_pairs_kernel

    constants = {"TILE": FEW.pairs, "BINS": experts, "BLOCK": GROUP_BLOCK}
    assert "st.global" in compile_for_hopper(_group_pairs_kernel, POINTERS, constants)


@pytest.mark.parametrize(("name", "dtype"), [("FEW", "*bf16"), ("FEW", "*fp32"), ("MANY", "*bf16")])
def test_products_compile_without_a_gpu(name: str, dtype: str) -> None:
    import jetspec.ops.moe_triton as kernels

    blocks = getattr(kernels, name)
    sizes: dict[str, Any] = {"M": 2048, "INNER": 768, "PAIRS": blocks.pairs, "DEPTH": blocks.depth}
    numbers = ("x_ptr", "gate_up_ptr", "gated_ptr", "down_ptr", "weight_ptr", "out_ptr")
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    for kernel, constants in (
        (kernels._gate_up_kernel, {"K": 8, "OUT": blocks.out}),
        (kernels._down_kernel, {"OUT": 2 * blocks.out}),
    ):
        ptx = compile_for_hopper(kernel, dict.fromkeys(numbers, dtype) | POINTERS, sizes | constants, **options)
        assert ("mma" in ptx) == (dtype == "*bf16")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("tokens", [1, 64, 1500])
def test_kernel_on_a_gpu(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    compare(draw(tokens, 128, 8, 2048, 768, dtype, "cuda"), tolerance)
