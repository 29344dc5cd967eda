"""Fits of the choice model find the weights by which choices were made."""

from __future__ import annotations

import math

import torch

from jetspec.ops.noise import gumbel
from jetspec.train.choices import fit_choices, likeliest
from jetspec.types import SamplingParams
from tests.engine.tiny import make_engine, run, tiny_decoder, tiny_head


def test_weights_of_drawn_choices_are_found() -> None:
    """Random logits, noise and filters; choices drawn by known weights."""
    generator, true_3 = torch.Generator().manual_seed(0), torch.tensor([1.25, 0.6, 0.9])
    n, C = 6000, 30
    logit_nC = 2 * torch.randn(n, C, generator=generator)
    noise_nC = gumbel(torch.arange(n), torch.zeros(n, dtype=torch.long), C)
    kept_nC = (torch.rand(n, C, generator=generator) < 0.3).float()
    feature_nC3 = torch.stack((logit_nC, noise_nC, kept_nC), -1)
    taken_n1 = (feature_nC3 @ true_3).softmax(-1).multinomial(1, generator=generator)
    order_nC = torch.zeros(n, C).scatter_(1, taken_n1, 1.0).argsort(dim=1, descending=True, stable=True)
    found = likeliest([feature_nC3.gather(1, order_nC[..., None].expand(-1, -1, 3))])
    assert abs(1 / found.temperature - 1.25) < 0.1 and abs(found.noise - 0.6) < 0.1 and abs(found.kept - 0.9) < 0.15


def test_no_observations_leave_the_proposal() -> None:
    assert likeliest([]) == (1.0, 0.8, 0.0)


def test_heads_are_fitted_to_sampled_text() -> None:
    target = tiny_decoder()
    head = tiny_head(target, edge=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    for sampling in (SamplingParams(1.0, max_tokens=24), SamplingParams(0.7, top_k=5, max_tokens=24)):
        params = [SamplingParams(**{**vars(sampling), "seed": seed}) for seed in range(2)]
        done = run(make_engine(target), prompts, params)
        texts = [([*prompt, *c.token_ids], len(prompt)) for prompt, c in zip(prompts, done, strict=True)]
        fit = fit_choices(target, head, texts, sampling)
        assert len(fit.depths) == head.head_config.depth and 0 < fit.observations <= 48
        assert (fit.temperature, fit.top_k) == (sampling.temperature, sampling.top_k)
        assert all(math.isfinite(x) for weights in fit.depths for x in weights)
        assert fit.depths[0].noise > 0, "a random head knows little, the noise much"
