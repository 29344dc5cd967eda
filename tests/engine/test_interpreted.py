"""The engine with all Triton kernels, run by Triton's interpreter."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch

from jetspec.config import EngineConfig, TreeConfig
from jetspec.models.heads import Head
from jetspec.ops.select import force
from jetspec.types import Completion, SamplingParams
from tests.engine.tiny import make_engine, run, tiny_decoder, tiny_eagle3, tiny_head, tiny_peagle

PROMPTS = [[1, 2, 3], [9]]


def decode(who: str, sampling: SamplingParams) -> list[Completion]:
    target = tiny_decoder(vocab=20, layers=2)
    head: Head | None = tiny_head(target, edge=who == "edge", block=3)
    if who == "none":
        head = None
    elif who == "eagle3":
        head = tiny_eagle3(target, draft_vocab=9, depth=2)
    elif who == "peagle":
        head = tiny_peagle(target, draft_vocab=9, depth=2)
    tree = TreeConfig(budget=4, width=3, shortlist=8)
    config = EngineConfig(page_size=4, overlap_rounds=1)
    return run(make_engine(target, "head" if head else "none", head, tree, config), PROMPTS, sampling)


def compare(who: str, sampling: SamplingParams) -> None:
    torch.set_num_threads(1)
    expected = decode(who, sampling)
    with force("triton"):
        done = decode(who, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert [c.stats.accepted_lengths for c in done] == [c.stats.accepted_lengths for c in expected]
    for completion, other in zip(done, expected, strict=True):
        for found, right in zip(completion.logprobs or (), other.logprobs or (), strict=True):
            assert [t for t, _ in found.top] == [t for t, _ in right.top]
            assert abs(found.logprob - right.logprob) < 1e-4


GREEDY = SamplingParams(max_tokens=2)
SAMPLED = SamplingParams(max_tokens=2, temperature=0.9, top_k=9, top_p=0.95, min_p=0.01, seed=5)
PENALIZED = SamplingParams(max_tokens=2, frequency_penalty=1.5, presence_penalty=0.5, logit_bias={4: 2}, logprobs=2)


@pytest.mark.parametrize(
    ("who", "sampling"),
    [
        ("none", GREEDY),
        ("eagle3", GREEDY),
        ("peagle", GREEDY),
        ("head", SAMPLED),
        ("edge", PENALIZED),
    ],
)
def test_kernels_decode_like_references(interpreter: Executor, who: str, sampling: SamplingParams) -> None:
    interpreter.submit(compare, who, sampling).result()
