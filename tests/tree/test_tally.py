"""Tallied choices give the derivatives of their log-likelihood, and the kernel equals the reference."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from jetspec.config import TreeConfig
from jetspec.ops.noise import gumbel
from jetspec.tree import SUMS, Acceptance, DraftTree, Drawn, build_tree, tally_choices, walk
from tests.tree.test_build import VOCAB, random_candidates

DEPTH = 4


def random_round(seed: int, device: str = "cpu") -> tuple[Drawn, DraftTree, Acceptance]:
    """Requests of three settings, the first of them greedy, of which most choose what is in their trees."""
    rng = torch.Generator().manual_seed(seed)
    candidates = random_candidates(seed, 6, DEPTH, VOCAB, ties=False, own=True)
    tree = build_tree(torch.arange(6) % VOCAB, candidates, TreeConfig(budget=24, width=3), DEPTH)
    verdict = walk(tree, torch.randint(VOCAB, tree.token_BN.shape, generator=rng))
    weight_SD = torch.rand(3, DEPTH, generator=rng)
    drawn = Drawn(torch.tensor([0, 1, 2, 1, 2, 1]), torch.arange(6) << 40, torch.arange(6) * 1000, weight_SD)
    moved: dict[str, Any] = {k: v.to(device) for k, v in vars(tree).items() if torch.is_tensor(v)}
    verdict = Acceptance(*(x.to(device) for x in vars(verdict).values()))
    return Drawn(*(x.to(device) for x in drawn)), replace(tree, **moved), verdict


def compare(device: str = "cpu") -> None:
    kernel = importlib.import_module("jetspec.tree.tally_triton").tally_choices_triton
    for seed in range(5):
        drawn, tree, verdict = random_round(seed, device)
        found, expected = torch.zeros(2, 3, DEPTH, SUMS, device=device)
        kernel(found, drawn, tree, verdict)
        tally_choices.__wrapped__(expected, drawn, tree, verdict)  # type: ignore[attr-defined]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_kernel_equals_reference(interpreter: Executor) -> None:
    interpreter.submit(compare).result()


@pytest.mark.gpu
def test_kernel_on_a_gpu() -> None:
    compare("cuda")


def log_likelihood(weight_2: torch.Tensor, drawn: Drawn, tree: DraftTree, verdict: Acceptance) -> torch.Tensor:
    """Of the choices of the second entry at depth 1, by the scale of the logits and the weight of the noise."""
    assert tree.score_BN is not None
    total = 0 * weight_2.sum()
    for row in (drawn.entry_B == 1).nonzero()[:, 0].tolist():
        children = [n for n in range(1, int(tree.size_B[row])) if tree.parent_BN[row, n] == 0]
        token = tree.token_BN[row, children]
        noise = gumbel(drawn.seed_B[row, None], drawn.cached_len_B[row, None] + 1, VOCAB)[0, token]
        logit = tree.score_BN[row, children] - drawn.weight_SD[1, 0] * noise
        taken = token == verdict.token_BD1[row, 0]
        total = total + (weight_2[0] * logit + weight_2[1] * noise).log_softmax(0)[taken].sum()
    return total


def test_sums_are_derivatives_of_the_log_likelihood() -> None:
    counted = 0
    for seed in range(8):
        found = drawn, tree, verdict = random_round(seed)
        tally_SDX = torch.zeros(3, DEPTH, SUMS)
        tally_choices(tally_SDX, drawn, tree, verdict)
        number, *sums = tally_SDX[1, 0].tolist()
        weight_2 = torch.stack((torch.tensor(1.0), drawn.weight_SD[1, 0])).requires_grad_()
        (gradient_2,) = torch.autograd.grad(log_likelihood(weight_2, *found), weight_2)
        curvature_22 = -torch.autograd.functional.hessian(
            partial(log_likelihood, drawn=drawn, tree=tree, verdict=verdict), weight_2.detach()
        )
        torch.testing.assert_close(torch.tensor(sums[:2]), gradient_2, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(torch.tensor(sums[2:]), curvature_22.flatten()[[0, 1, 3]], atol=1e-5, rtol=1e-4)
        assert not tally_SDX[0].any()
        counted += int(number)
    assert counted > 5
