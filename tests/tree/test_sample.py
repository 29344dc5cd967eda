"""Noise is that of Philox, filters equal those of transformers, draws follow the filtered distribution."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jetspec.ops.noise import philox
from jetspec.ops.select import force
from jetspec.tree import choose_nodes, choose_token, filter_logits, gumbel
from jetspec.types import RowSampling, SamplingParams


def rows(*params: SamplingParams, seeds: list[int] | None = None) -> RowSampling:
    return RowSampling.of(list(params), seeds or list(range(len(params))), "cpu")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_equals_its_published_vectors(counter: list[int], key: list[int], words: list[int]) -> None:
    out = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in out] == words


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seed_B, position_B = torch.tensor([3, 3, 4, 3 + (1 << 40)]), torch.tensor([10, 11, 10, 10])
    noise_BV = gumbel(seed_B, position_B, 41)
    assert len({tuple(row) for row in noise_BV.tolist()}) == 4
    for row in range(4):
        alone_BV = gumbel(seed_B[row : row + 1], position_B[row : row + 1], 30)
        assert torch.equal(alone_BV[0], noise_BV[row, :30])


def test_the_largest_uniform_gives_finite_noise() -> None:
    """The word of token 57 under this seed is 2^32 - 34, which rounds to 2^32 in float32."""
    noise_V = gumbel(torch.tensor([306180]), torch.tensor([0]), 58)[0]
    assert noise_V.isfinite().all() and noise_V[57] == noise_V.min() < -2.8


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.3, 1.0, 2.5]),
            top_k=st.integers(0, 40),
            top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
            min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_filters_equal_those_of_transformers(seed: int, params: list[SamplingParams]) -> None:
    logits_BV = 3 * torch.randn(len(params), 33, generator=torch.Generator().manual_seed(seed))
    filtered_BV = filter_logits(logits_BV, rows(*params))
    for row, p in enumerate(params):
        warpers: list[Any] = [TemperatureLogitsWarper(p.temperature)]
        warpers += [TopKLogitsWarper(p.top_k)] if p.top_k else []
        warpers += [TopPLogitsWarper(p.top_p)] if p.top_p < 1 else []
        warpers += [MinPLogitsWarper(p.min_p)] if p.min_p else []
        expected_BV = logits_BV[row : row + 1]
        for warper in warpers:
            expected_BV = warper(None, expected_BV)
        torch.testing.assert_close(filtered_BV[row : row + 1], expected_BV)


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits_BV = torch.tensor([[2.0, 1.0, 2.0, 1.0, 0.0]])
    for p in (SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=0.1), SamplingParams(1.0, min_p=0.9)):
        assert filter_logits(logits_BV, rows(p)).isfinite().tolist() == [[True, False, True, False, False]]


def test_rows_choose_independently() -> None:
    rng = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(4, 50, generator=rng)
    params = [SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_p=0.5), SamplingParams(2.0, top_k=3)]
    position_B = torch.tensor([5, 6, 7, 8])
    together_B = choose_token(logits_BV, rows(*params), position_B)
    assert together_B[0] == logits_BV[0].argmax()
    for row, p in enumerate(params):
        alone = choose_token(logits_BV[row : row + 1], rows(p, seeds=[row]), position_B[row : row + 1])
        assert alone.item() == together_B[row]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6])
def test_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits_BV = 30 * torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    logits_BV[:, :10] = -torch.inf
    chosen_B = choose_token(logits_BV, rows(*[SamplingParams(temperature)] * 8), torch.arange(8))
    assert torch.equal(chosen_B, logits_BV.argmax(-1))


@pytest.mark.parametrize("params", [SamplingParams(0.8), SamplingParams(1.3, top_k=5, top_p=0.9, min_p=0.1)])
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    draws = 20_000
    logits_V = torch.randn(8, generator=torch.Generator().manual_seed(2))
    chosen_B = choose_token(logits_V.expand(draws, -1), rows(*[params] * draws), torch.full((draws,), 77))
    prob_V = filter_logits(logits_V[None], rows(params)).softmax(-1)[0]
    deviation_V = (chosen_B.bincount(minlength=8) / draws - prob_V).abs()
    assert (deviation_V <= 5 * (prob_V * (1 - prob_V) / draws).sqrt()).all()


def test_nodes_share_the_parameters_of_their_request() -> None:
    params = [SamplingParams(), SamplingParams(1.0, top_k=3), SamplingParams(0.7)]
    logits_BNV = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(3))
    position_BN = torch.arange(12).view(3, 4)
    together_BN = choose_nodes(logits_BNV, rows(*params), position_BN)
    for node in range(4):
        assert torch.equal(together_BN[:, node], choose_token(logits_BNV[:, node], rows(*params), position_BN[:, node]))


# ---- the kernels ----

MIXED = [SamplingParams(), SamplingParams(0.7), SamplingParams(1.5)]
FILTERED = [
    SamplingParams(),
    SamplingParams(1.3, top_k=5),
    SamplingParams(0.7, top_p=0.8),
    SamplingParams(1.0, min_p=0.1),
    SamplingParams(2.5, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(1e-9, top_p=1e-9),
]


def random_logits(num_rows: int, num_nodes: int, vocab: int, rounded: bool) -> torch.Tensor:
    """Return logits with -inf for some tokens; `rounded` makes ties, also at the bounds of the filters."""
    rng = torch.Generator().manual_seed(vocab)
    logits_BNV = 3 * torch.randn(num_rows, num_nodes, vocab, generator=rng)
    logits_BNV[torch.rand(logits_BNV.shape, generator=rng) < 0.2] = -torch.inf
    logits_BNV[..., vocab // 2] = 0
    return logits_BNV.round() if rounded else logits_BNV


def compare_choices(logits_BNV: torch.Tensor, params: list[SamplingParams], chunk: int = 0, block: int = 0) -> float:
    """Return the share of equal choices. `chunk` and `block` override the sizes of the kernel."""
    kernel: Any = importlib.import_module("jetspec.tree.accept_triton")
    kernel.CHUNK, kernel.BLOCK = chunk or kernel.CHUNK, block or kernel.BLOCK
    seeds = [((1 << 63) - 1) // (row + 1) for row in range(len(params))]  # both words of the key count
    sampling = RowSampling.of(params, seeds, logits_BNV.device)
    position_BN = 123_456 * torch.arange(logits_BNV[..., 0].numel(), device=logits_BNV.device)
    position_BN = position_BN.view(logits_BNV.shape[:2])
    with force("reference"):
        expected_BN = choose_nodes(logits_BNV, sampling, position_BN)
    with force("triton"):
        found_BN = choose_nodes(logits_BNV, sampling, position_BN)
    assert found_BN.dtype == expected_BN.dtype
    return float((found_BN == expected_BN).float().mean())


@pytest.mark.parametrize(("vocab", "chunk", "rounded"), [(2, 4, False), (33, 16, True), (64, 64, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_reference(
    interpreter: Executor, dtype: torch.dtype, vocab: int, chunk: int, rounded: bool
) -> None:
    for params in (MIXED, [SamplingParams()] * 3):
        logits_BNV = random_logits(3, 2, vocab, rounded).to(dtype)
        assert interpreter.submit(compare_choices, logits_BNV, params, chunk).result() == 1


def compare_thresholds(logits_BV: torch.Tensor, params: list[SamplingParams], best: int) -> None:
    kernel: Any = importlib.import_module("jetspec.tree.accept_triton")
    kernel.BLOCK, kernel.BEST = 32, best
    sampling = replace(rows(*params), any_filtered=True)
    threshold_B = kernel.least_kept_triton(logits_BV[:, None], sampling)[:, 0]
    for row, p in enumerate(params):
        filtered_V = filter_logits(logits_BV[row : row + 1], rows(p))[0]
        scaled_V = logits_BV[row] / max(p.temperature, 1e-6)
        kept_V = (scaled_V >= threshold_B[row]) & (scaled_V > -torch.inf)
        assert not p.temperature or torch.equal(kept_V, filtered_V > -torch.inf)


@pytest.mark.parametrize("params", [*FILTERED, SamplingParams(1.0, top_k=45), SamplingParams(3.0, top_k=6, top_p=0.99)])
@pytest.mark.parametrize(("rounded", "best"), [(False, 256), (False, 6), (True, 6)])
def test_kernel_finds_the_thresholds_of_the_filters(
    interpreter: Executor, params: SamplingParams, rounded: bool, best: int
) -> None:
    """The best tokens decide, or bisection does."""
    interpreter.submit(compare_thresholds, random_logits(1, 1, 50, rounded)[0], [params], best).result()


def test_kernel_applies_the_filters(interpreter: Executor) -> None:
    logits_BNV = random_logits(3, 1, 20, rounded=False)
    assert interpreter.submit(compare_choices, logits_BNV, FILTERED[:3], 16, 32).result() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [[SamplingParams()] * 6, MIXED * 2, FILTERED], ids=["greedy", "mixed", "filtered"])
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_kernel_on_a_gpu(vocab: int, params: list[SamplingParams], dtype: torch.dtype) -> None:
    """The last bits of sums and logarithms differ, which rarely changes a choice at the bound of a filter."""
    logits_BNV = 3 * torch.randn(6, 64, vocab, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    share = compare_choices(logits_BNV.to(dtype), params)
    assert share == 1 if params == [SamplingParams()] * 6 else share > 0.99
