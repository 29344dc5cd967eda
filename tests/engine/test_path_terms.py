"""Trees of heads of other layouts: the text is plain decoding's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from jetspec.config import EngineConfig, Execution, TreeConfig
from jetspec.models.block_conv import ConvConfig
from jetspec.models.choices import ChoiceFits, Fit, Weights
from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig
from jetspec.models.heads import Head
from jetspec.models.path_terms import PathConfig
from jetspec.types import SamplingParams
from tests.engine.tiny import VOCAB, Texts, make_engine, plain, randomize, run, tiny_decoder, tiny_eagle3, tiny_peagle

TARGET = tiny_decoder()
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 8] * 9, list(range(30))]
TEXTS = Texts(TARGET, PROMPTS)
GREEDY = SamplingParams(max_tokens=12)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=5)
EDGE = EdgeConfig(rank=8, gate=False)
HEADS: dict[str, dict[str, Any]] = {
    "gated": {"path": PathConfig("gated", 8)},
    "recurrent": {"path": PathConfig("recurrent", 8), "shifted": True},
    "recurrent, fill-in": {"path": PathConfig("recurrent", 8)},
    "gru": {"path": PathConfig("gru", 8, inner=12, first_depth=2), "shifted": True},
    "mixed": {"path": PathConfig("mixed", 8, inner=16)},
    "mixed, anchor first": {"path": PathConfig("mixed", 8, inner=16), "shifted": True},
    "corrected": {"path": PathConfig("corrected", 32, inner=16), "fused_taps": True},
    "convolved": {"conv": ConvConfig(2, 8), "edge": EdgeConfig(8, True, 0.0, candidates=6)},
    "confident": {"edge": EDGE, "confidence": "state_and_parent", "shifted": True},
    "confident, gated": {"path": PathConfig("gated", 8), "confidence": "state_and_parent"},
    "confident, plain": {"confidence": "state"},
    "reduced": {"draft_vocab_size": 20, "edge": EDGE},
    "scaled": {"embedding_scale": 2.0, "output_scale": 0.5, "softcap": 3.0, "edge": EDGE},
    "normed last tap": {"tap_layers": (0, 2), "last_tap": "normed"},
    "eagle3, reduced": {"eagle3": {"draft_vocab": 20, "norm_before_residual": True}},
    "eagle3, taps together": {"eagle3": {"norm_taps": True, "norm_output": True}},
    "eagle3, five taps": {"eagle3": {"norm_each_tap": True, "tap_layers": (0, 0, 1, 1, 0)}},
    "peagle": {"peagle": {"norm_each_tap": True}},
    "peagle of one layer": {"peagle": {"layers": 1, "norm_before_residual": True}},
}
each_head = pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS.keys())


CHOICES = ChoiceFits((Fit(1.0, depths=(Weights(0.9, 0.8, 0.5), Weights(1.2, -0.4))),))


def path_head(changes: dict[str, Any]) -> Head:
    """A head with a choice model, for sampled text."""
    head = make_head(changes)
    head.choices = CHOICES
    return head


def make_head(changes: dict[str, Any]) -> Head:
    for kind, make in (("eagle3", tiny_eagle3), ("peagle", tiny_peagle)):
        if kind in changes:
            return make(TARGET, **changes[kind])
    layers = DecoderConfig("qwen3", VOCAB, 32, 2, 4, 2, 8, 64, max_len=256, qk_norm=True)
    settings: dict[str, Any] = {"tap_layers": (0, 1), "block_size": 6, "causal": False, "mask_token": 2, **changes}
    head = randomize(DraftHead(HeadConfig(layers, **settings)), 3, 0.3)
    if head.token_of is not None:
        head.token_of.copy_(torch.arange(20) * 2)
    return head


@each_head
@pytest.mark.parametrize(("budget", "sampling"), [(16, SEEDED), (64, GREEDY)], ids=["16, seeded", "64"])
def test_text_is_that_of_plain_decoding(changes: dict[str, Any], budget: int, sampling: SamplingParams) -> None:
    tree = TreeConfig(budget=budget, width=4)
    engine = make_engine(TARGET, "head", path_head(changes), tree, EngineConfig(page_size=4, max_batch=3))
    assert [c.token_ids for c in run(engine, PROMPTS, sampling)] == TEXTS[sampling]


@each_head
def test_trees_do_not_depend_on_the_batch(changes: dict[str, Any]) -> None:
    """A request's trees are those of the request alone, so its number of rounds is as well."""
    head, tree, sampling = path_head(changes), TreeConfig(budget=24, width=3), SamplingParams(max_tokens=8)

    def trees(max_batch: int) -> list[list[tuple[list[int], list[int]]]]:
        engine = make_engine(TARGET, "head", head, tree, EngineConfig(page_size=4, max_batch=max_batch))
        seen: dict[int, list[tuple[list[int], list[int]]]] = {}
        for prompt in PROMPTS:
            seen[engine.add(prompt, sampling, trace=True)] = []
        while engine.has_work:
            for update in engine.step():
                if update.trace is not None:
                    seen[update.request_id].append((update.trace.tokens, update.trace.parents))
        return list(seen.values())

    assert trees(1) == trees(4)


@pytest.mark.gpu
@each_head
def test_captured_rounds_write_the_same_text(changes: dict[str, Any]) -> None:
    target, head = copy.deepcopy(TARGET).cuda(), path_head(changes).cuda()
    tree, sampling = TreeConfig(budget=32, width=4), SamplingParams(max_tokens=20)

    def texts(execution: Execution) -> list[list[int]]:
        engine = make_engine(target, "head", head, tree, EngineConfig(max_batch=3, execution=execution))
        return [c.token_ids for c in run(engine, PROMPTS, sampling)]

    assert texts("graph") == texts("eager") == plain(target, PROMPTS, sampling)
