"""Sampling follows the target's distribution with every drafter. The same test fails for a biased acceptance."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

import jetspec.engine.round as round_module
from jetspec.config import EngineConfig, TreeConfig
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.tree import Acceptance, DraftTree, accept
from jetspec.types import SamplingParams
from tests.engine.tiny import make_engine, next_logits, run, tiny_decoder, tiny_head

VOCAB, LENGTH, DRAWS = 4, 3, 4_000
PROMPT = [1, 3, 0, 2]
TARGET = tiny_decoder(vocab=VOCAB, layers=2, spread=0.25)


def probabilities(target: Decoder, temperature: float) -> torch.Tensor:
    """Joint distribution of the next LENGTH tokens, (V, V, V), from plain forward passes."""
    law = torch.ones(1)
    prefixes: list[list[int]] = [[]]
    for _ in range(LENGTH):
        rows = torch.stack([next_token_law(target, PROMPT + prefix, temperature) for prefix in prefixes])
        law = (law[:, None] * rows).flatten()
        prefixes = [[*prefix, token] for prefix in prefixes for token in range(VOCAB)]
    return law


def next_token_law(target: Decoder, tokens: list[int], temperature: float) -> torch.Tensor:
    return (next_logits(target, tokens) / temperature).softmax(-1)


def p_value(head: DraftHead, temperature: float, draws: int) -> float:
    config = EngineConfig(page_size=8, max_batch=1000, max_len=16, prefix_cache=False)
    engine = make_engine(TARGET, "head", head, TreeConfig(budget=7, width=2, depth=3), config)
    params = [SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=seed) for seed in range(draws)]
    seen = Counter(tuple(c.token_ids) for c in run(engine, [PROMPT] * draws, params))
    law = probabilities(TARGET, temperature)
    counts = [seen[(i // VOCAB**2, i // VOCAB % VOCAB, i % VOCAB)] for i in range(VOCAB**LENGTH)]
    return float(chisquare(counts, law.double().numpy() / law.double().sum().item() * draws).pvalue)


def adversary(target: Decoder) -> DraftHead:
    """A head that is confident of tokens that the target finds unlikely."""
    head = tiny_head(target, block=4)
    head.norm.weight.mul_(-20)
    return head


@pytest.mark.parametrize("make", [lambda t: tiny_head(t, block=4, edge=True), adversary], ids=["random", "adversarial"])
def test_joint_distribution_of_three_tokens(make) -> None:  # type: ignore[no-untyped-def]
    assert p_value(make(TARGET), 1.0, DRAWS) > 0.001


def test_a_biased_acceptance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting the first child one time in ten, whatever the target sampled, fails the test."""
    honest = accept

    def biased(tree: DraftTree, logits_BNV, sampling, cached_len_B) -> Acceptance:  # type: ignore[no-untyped-def]
        verdict = honest(tree, logits_BNV, sampling, cached_len_B)
        lucky = (verdict.length_B == 0) & (sampling.seed_B % 10 == 0)
        path = verdict.path_BD1.clone()
        path[:, 1:] = torch.where(lucky[:, None], 1, path[:, 1:])
        return Acceptance.of(tree, path, torch.where(lucky, 1, verdict.length_B), verdict.bonus_B)

    monkeypatch.setattr(round_module, "accept", biased)
    assert p_value(tiny_head(TARGET, block=4), 1.0, DRAWS) < 1e-6
