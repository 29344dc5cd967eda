"""Fits of the choice model of a head: weights per depth under which sampled text of the target is most likely; and how
well the probabilities of draft trees hold.

The noise of the text is known, so at every position the tokens that compete are known with all that they depend on. The
log-likelihood of softmax(a x + b g + k f) is concave in the weights: x is a logit of the head, given the true parent, g
the noise, f whether the filters keep the token of the head's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.engine.engine import Engine
from jetspec.models.choices import Fit, Weights
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.ops.noise import gumbel
from jetspec.progress import progress_bar
from jetspec.train.evaluate import BEYOND, Reading, next_tokens
from jetspec.tree import Candidates, least_kept
from jetspec.types import ChoiceModel, RoundTrace, RowSampling, SamplingParams

SETTINGS = (
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(0.7, top_p=0.8, top_k=20),
    SamplingParams(1.0, top_p=0.8, top_k=20),
    SamplingParams(1.0, min_p=0.1),
)
"""Sampling settings that heads are fitted for."""
PROPOSAL = Weights(1.0, 0.8)
"""Choice model by which the competing tokens are selected."""
COMPETING = 512
"""Tokens of a depth that compete."""
DEPTHS = (1, 2, 4, 8, 16)
"""First depths of the groups in which probabilities are compared."""
STRIDE = 3
"""Every so many positions of a text are anchors."""
ANCHORS = 8
"""Anchors that are drafted at once."""
STEPS, PRIOR, LEAST_SCALE = 12, 1.0, 0.05
"""Newton steps, observations that the weights of `PROPOSAL` count for, and the least weight of a logit."""


@torch.inference_mode()
def fit_choices(
    target: Decoder, head: DraftHead, texts: Sequence[tuple[Sequence[int], int]], sampling: SamplingParams
) -> Fit:
    """Fits the weights of every depth to texts that were sampled with `sampling`.

    A text is its tokens with the number of those that were given. Its seed is its index.
    """
    observed: list[list[Tensor]] = [[] for _ in range(head.head_config.depth)]
    bar = progress_bar(enumerate(texts), total=len(texts), desc="fitting", unit="text", disable=False)
    for seed, (tokens, given) in bar:
        for depth, found in _observe(target, head, tokens, given, seed, sampling):
            observed[depth - 1].append(found)
    depths, number = tuple(map(likeliest, observed)), sum(map(len, observed[0]))
    return Fit(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, depths, number)


@dataclass(frozen=True)
class Reliability:
    """Nodes below accepted ones, by group of depths and decile of their probability: their number, the sum of their
    probabilities, and how many the target chose."""

    count_G10: np.ndarray
    predicted_G10: np.ndarray
    taken_G10: np.ndarray

    @classmethod
    def of(cls, traces: Iterable[RoundTrace]) -> Reliability:
        tables = np.zeros((3, len(DEPTHS), 10))
        for trace in traces:
            depth_N, on_path = [0] * len(trace.parents), set(trace.path)
            for node, parent in list(enumerate(trace.parents))[1:]:
                depth_N[node] = depth_N[parent] + 1
                if parent in on_path:
                    prob = math.exp(min(trace.logprobs[node], 0.0))
                    group = sum(depth_N[node] >= first for first in DEPTHS) - 1
                    tables[:, group, min(int(prob * 10), 9)] += 1, prob, node in on_path
        return cls(*tables)

    def to_dict(self) -> dict[str, Any]:
        return {"first_depths": list(DEPTHS), **{name: table.tolist() for name, table in vars(self).items()}}


def decode_traced(
    engine: Engine, prompts: Iterable[Sequence[int]], sampling: SamplingParams
) -> tuple[float, Reliability]:
    """Decodes prompts, each with its index as seed. Returns the tokens per round, and the reliability of the trees."""
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, replace(sampling, seed=seed), trace=True)
    traces, tokens = [], 0
    while engine.has_work:
        for update in engine.step():
            assert update.trace is not None
            traces.append(update.trace)
            tokens += len(update.token_ids)
    return tokens / len(traces), Reliability.of(traces)


def likeliest(parts: Sequence[Tensor]) -> Weights:
    """Returns the weights under which choices are likeliest, by Newton's method.

    Each part is (n, C, 3): the features x, g and f of the tokens that competed for n choices, the chosen one first.
    """
    start_3 = torch.tensor([1 / PROPOSAL.temperature, PROPOSAL.noise, PROPOSAL.kept], dtype=torch.float64)
    weight_3 = start_3.clone()
    feature_nC3 = torch.cat(list(parts)).double() if parts else torch.zeros(0, 1, 3, dtype=torch.float64)
    for _ in range(STEPS):
        prob_nC1 = (feature_nC3 @ weight_3).softmax(-1)[..., None]
        mean_n3 = (prob_nC1 * feature_nC3).sum(1)
        gradient_3 = (feature_nC3[:, 0] - mean_n3).sum(0) - PRIOR * (weight_3 - start_3)
        spread_nC3 = (feature_nC3 - mean_n3[:, None]) * prob_nC1.sqrt()
        curvature_33 = torch.einsum("nci,ncj->ij", spread_nC3, spread_nC3) + PRIOR * torch.eye(3).double()
        step_3 = torch.linalg.solve(curvature_33, gradient_3)
        weight_3 = weight_3 + step_3 * min(1.0, 1.0 / float(step_3.abs().max().clamp(min=1e-9)))
    scale, noise, kept = weight_3.tolist()
    return Weights(1 / max(scale, LEAST_SCALE), noise, kept)


def _observe(
    target: Decoder, head: DraftHead, tokens: Sequence[int], given: int, seed: int, sampling: SamplingParams
) -> Iterator[tuple[int, Tensor]]:
    """Yields a depth and the observations of some anchors at it."""
    reading, depth = Reading(target, head, np.asarray(tokens)), head.head_config.depth
    V, device = head.config.vocab_size, reading.token_T.device
    tree = TreeConfig(budget=2, width=1, depth=depth, shortlist=min(COMPETING, V), shortlist_parents=0)
    position_P = torch.arange(given, len(tokens), device=device)
    seed_P = torch.full_like(position_P, seed)
    noise_PV = torch.cat([gumbel(seed_P[i : i + 16], position_P[i : i + 16], V) for i in range(0, len(position_P), 16)])
    for first in range(given - 1, len(tokens) - 1, STRIDE * ANCHORS):
        at_B = torch.arange(first, min(first + STRIDE * ANCHORS, len(tokens) - 1), STRIDE, device=device)
        position_BD = at_B[:, None] + torch.arange(1, depth + 1, device=device)
        entry_BD = torch.ones_like(position_BD, dtype=torch.float32)
        proposal = ChoiceModel(PROPOSAL.temperature * entry_BD, PROPOSAL.noise * entry_BD)
        proposal = replace(proposal, seed_B=torch.full_like(at_B, seed), position_BD=position_BD)
        found = reading.draft(at_B, tree, proposal)
        next_BD = next_tokens(reading.token_T, at_B, torch.full_like(at_B, len(tokens)), depth)
        parent_BD = torch.cat((reading.token_T[at_B, None], next_BD[:, :-1]), 1)
        for d in range(1, depth + 1):
            yield d, _features(found, d, parent_BD, next_BD, noise_PV, position_BD - given, sampling)


def _features(
    found: Candidates,
    depth: int,
    parent_BD: Tensor,
    next_BD: Tensor,
    noise_PV: Tensor,
    place_BD: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """Features of the tokens that compete at a depth, for the anchors whose taken token is among them."""
    known_B = next_BD[:, depth - 1] != BEYOND
    token_BC, logprob_BC = (
        x[:, 0] for x in found.children(depth, parent_BD[:, depth - 1, None].clamp(min=0), COMPETING)
    )
    noise_BV = noise_PV[place_BD[:, depth - 1].clamp(max=len(noise_PV) - 1)]
    alone_BC = found.logprob_BDC[:, depth - 1] - PROPOSAL.noise * noise_BV.gather(1, found.token_BDC[:, depth - 1])
    noise_BC = noise_BV.gather(1, token_BC)
    logit_BC = PROPOSAL.temperature * (logprob_BC - PROPOSAL.noise * noise_BC)
    kept_BC = torch.zeros_like(logit_BC)
    if sampling.is_filtered:
        filters = RowSampling.of([sampling] * len(token_BC), [0] * len(token_BC), token_BC.device)
        logits_B1C = (PROPOSAL.temperature * alone_BC)[:, None]
        bound_B1 = least_kept(logits_B1C, filters)
        is_kept_BC = logits_B1C[:, 0] / sampling.temperature >= bound_B1
        kept_token_BC = torch.where(is_kept_BC, found.token_BDC[:, depth - 1], -1)
        kept_BC = (token_BC[:, :, None] == kept_token_BC[:, None]).any(-1).float()
    is_taken_BC = token_BC == next_BD[:, depth - 1, None]
    usable_B = known_B & is_taken_BC.any(1)
    order_BC = is_taken_BC.int().argsort(dim=1, descending=True, stable=True)
    feature_BC3 = torch.stack((logit_BC, noise_BC, kept_BC), -1)
    feature_BC3 = feature_BC3.gather(1, order_BC[..., None].expand(-1, -1, 3))[usable_B]
    finite_BC = feature_BC3[..., 0].isfinite()
    return torch.where(
        finite_BC[..., None], feature_BC3, torch.tensor([-1e4, 0.0, 0.0], device=feature_BC3.device)
    ).cpu()
