"""EAGLE-3 trees in the engine follow the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.models.decoder import Decoder
from jetspec.models.eagle3 import Eagle3Head
from jetspec.types import RoundTrace, SamplingParams
from tests.engine.tiny import make_engine, tiny_decoder, tiny_eagle3
from tests.models.slow_eagle3 import slow_tree

TARGET = tiny_decoder()
ALONE = TreeConfig(ngrams=False)
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 8] * 3]


def paths(trace: RoundTrace) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(trace.tokens[1:], trace.parents[1:], strict=True):
        found.append((*found[parent], token))
    return dict(zip(found, trace.scores, strict=True))


def rounds(engine: Engine, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], RoundTrace]]:
    """Tokens before every round, and the trace of the round."""
    texts = {engine.add(p, SamplingParams(max_tokens=tokens), trace=True): list(p) for p in prompts}
    seen = []
    while engine.has_work:
        for update in engine.step():
            assert update.trace is not None
            seen.append((list(texts[update.request_id]), update.trace))
            texts[update.request_id] += update.token_ids
    return seen


def wrong_trees(head: Eagle3Head, target: Decoder, tree: TreeConfig, seen: list[tuple[list[int], RoundTrace]]) -> int:
    wrong = 0
    for text, trace in seen:
        depth = head.head_config.draft_depth(tree.depth)
        expected = slow_tree(head, target, text, tree.width, depth, tree.budget, tree.draft_temperature)
        found = paths(trace)
        same = expected.keys() == found.keys()
        wrong += not same or any(abs(found[path] - score) > 1e-4 for path, score in expected.items())
    return wrong


@pytest.mark.parametrize(
    ("tree", "draft_vocab", "norm_first"),
    [
        (replace(ALONE, budget=9, width=3), None, False),
        (replace(ALONE, budget=9, width=3), None, True),
        (replace(ALONE, budget=20, width=2, depth=5), 20, False),
        (replace(ALONE, budget=4, width=1), None, True),
        (replace(ALONE, budget=3, width=5), 4, False),
        (replace(ALONE, budget=60, width=3, depth=2), 7, True),
    ],
)
def test_eagle3_trees_match_the_definition(tree: TreeConfig, draft_vocab: int | None, norm_first: bool) -> None:
    head = tiny_eagle3(TARGET, draft_vocab=draft_vocab, norm_before_residual=norm_first)
    engine = make_engine(TARGET, "head", head, tree, EngineConfig(page_size=4, max_batch=2, prefill_chunk=3))
    seen = rounds(engine, PROMPTS, 4)
    assert wrong_trees(head, TARGET, tree, seen) == 0, seen[0][1]


@pytest.mark.parametrize("flag", ["norm_taps", "norm_each_tap", "norm_output", "five taps"])
def test_variants_of_eagle3_match_the_definition(flag: str) -> None:
    changes = {"tap_layers": (0, 0, 1, 1, 0)} if flag == "five taps" else {flag: True}
    head, generator = tiny_eagle3(TARGET, **changes), torch.Generator().manual_seed(1)
    for norm in (head.norm.weight, head.fc_norm, getattr(head.input_norm, "weight", None)):
        if norm is not None:
            norm.uniform_(0.5, 1.5, generator=generator)
    tree = replace(ALONE, budget=20, width=2, depth=4)
    seen = rounds(make_engine(TARGET, "head", head, tree, EngineConfig(page_size=4, max_batch=2)), PROMPTS, 4)
    assert wrong_trees(head, TARGET, tree, seen) == 0, seen[0][1]
