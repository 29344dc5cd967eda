"""Noise is the published generator's; filters are those everyone uses; draws follow the filtered law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jetspec.tree import choose_token, filter_logits, gumbel
from jetspec.tree.sample import philox
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
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    out = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in out] == words


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seed_B, position_B = torch.tensor([3, 3, 4, 3 + (1 << 40)]), torch.tensor([10, 11, 10, 10])
    noise_BV = gumbel(seed_B, position_B, 41)
    assert len({tuple(row) for row in noise_BV.tolist()}) == 4
    for row in range(4):
        alone_BV = gumbel(seed_B[row : row + 1], position_B[row : row + 1], 30)
        assert torch.equal(alone_BV[0], noise_BV[row, :30])


def test_noise_is_finite_and_gumbel() -> None:
    noise = gumbel(torch.arange(50), torch.arange(50), 4001).flatten()
    assert noise.isfinite().all()
    cdf = torch.exp(-torch.exp(-noise.double())).sort().values
    expected = (torch.arange(len(cdf)) + 0.5) / len(cdf)
    assert (cdf - expected).abs().max() < 2 / len(cdf) ** 0.5


def test_the_largest_uniform_gives_finite_noise() -> None:
    """This seed's word for token 57 is 2^32 - 34, which rounds to 2^32 in float32."""
    noise_V = gumbel(torch.tensor([306180]), torch.tensor([0]), 58)[0]
    assert noise_V.isfinite().all() and noise_V[57] == noise_V.min() < -2.8


@settings(max_examples=80, deadline=None)
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
def test_filters_are_the_usual_ones(seed: int, params: list[SamplingParams]) -> None:
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
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits_BV = 30 * torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    logits_BV[:, :10] = -torch.inf
    chosen_B = choose_token(logits_BV, rows(*[SamplingParams(temperature)] * 8), torch.arange(8))
    assert torch.equal(chosen_B, logits_BV.argmax(-1))


@pytest.mark.parametrize("params", [SamplingParams(0.8), SamplingParams(1.3, top_k=5, top_p=0.9, min_p=0.1)])
def test_draws_follow_the_filtered_law(params: SamplingParams) -> None:
    draws = 20_000
    logits_V = torch.randn(8, generator=torch.Generator().manual_seed(2))
    chosen_B = choose_token(logits_V.expand(draws, -1), rows(*[params] * draws), torch.full((draws,), 77))
    prob_V = filter_logits(logits_V[None], rows(params)).softmax(-1)[0]
    deviation_V = (chosen_B.bincount(minlength=8) / draws - prob_V).abs()
    assert (deviation_V <= 5 * (prob_V * (1 - prob_V) / draws).sqrt()).all()
