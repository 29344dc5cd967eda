"""The reference generates the text of transformers, with any tree and head, and the engine equals the reference."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig
from jetspec.models.hf_target import HFTarget
from jetspec.models.weights import load_decoder, open_model
from jetspec.reference import accept, commit, generate_reference, prefill, verify
from jetspec.tree import DraftTree, build_tree_reference
from jetspec.types import Completion, RowSampling, SamplingParams
from tests.models.head_paged import make_head

VOCAB, HIDDEN, NUM_LAYERS = 23, 16, 3
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.6,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=5)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    ),
}
HEAD = HeadConfig(
    DecoderConfig("qwen3", VOCAB, HIDDEN, 2, 4, 2, 4, 24, 128, qk_norm=True),
    tap_layers=(0, 1, 2),
    mask_token=22,
    block_size=6,
)
TREES = {
    "plain": TreeConfig(budget=1),
    "chain": TreeConfig(width=1, budget=6),
    "tree": TreeConfig(width=3, budget=16),
    "shallow": TreeConfig(width=8, budget=32, depth=2),
    "paper": TreeConfig(width=2, budget=12, expand="paper"),
    "hybrid": TreeConfig(width=3, budget=12, score="hybrid", entropy_weight=0.3),
    "entropy": TreeConfig(width=3, budget=12, score="entropy"),
    "wider_than_vocabulary": TreeConfig(width=40, budget=60),
}
HEADS = {
    "causal": HEAD,
    "bidirectional": replace(HEAD, causal=False),
    "edge": replace(HEAD, edge=EdgeConfig(rank=5)),
    "shifted": replace(HEAD, shifted=True),
    "windowed": replace(HEAD, layers=replace(HEAD.layers, windows=(3, None))),
}


def make_target(family: str) -> HFTarget:
    """Return a random model of varied text: a token suggests its neighbour, and the context often overrides that."""
    torch.manual_seed(1)
    model_class, config = FAMILIES[family]
    model: Any = model_class(config)
    direction = nn.functional.normalize(model.model.embed_tokens.weight.data, dim=-1)
    model.model.embed_tokens.weight.data = 8 * direction
    model.lm_head.weight.data = direction.roll(1, 0).contiguous()
    return HFTarget(model)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Iterator[HFTarget]:
    yield make_target(request.param)


@pytest.fixture(scope="module")
def llama() -> HFTarget:
    return make_target("llama")


def greedy(target: HFTarget, prompt: list[int], max_tokens: int, eos: int | None = None) -> list[int]:
    """Return the greedy text of transformers."""
    return transformers_text(target, tuple(prompt), max_tokens, eos).copy()


@functools.cache
def transformers_text(target: HFTarget, prompt: tuple[int, ...], max_tokens: int, eos: int | None) -> list[int]:
    ids, model = torch.tensor([prompt]), cast(Any, target.model)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos)
    return out[0, len(prompt) :].tolist()


def random_head(config: HeadConfig, seed: int = 0) -> DraftHead:
    head = make_head(config, seed)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.2)
    return head.requires_grad_(False)


class EchoHead(DraftHead):
    """Head that drafts a given text, wrong at one depth if asked to: its states are output rows of these tokens."""

    def __init__(self, target: HFTarget, text: list[int], wrong_depth: int | None = None) -> None:
        super().__init__(HEAD)
        self.text, self.wrong_depth = torch.tensor(text + [0] * HEAD.block_size), wrong_depth
        self.output: Tensor = cast(Any, target.model).lm_head.weight.detach()

    def forward_blocks(
        self, block: Tensor, block_position: Tensor, tap: Tensor, tap_position: Tensor, visible: Any
    ) -> Tensor:
        assert len(tap) == block_position[0], "the context ends right before the anchor"
        token = self.text[block_position]
        if self.wrong_depth is not None:
            token[self.wrong_depth] = (token[self.wrong_depth] + 1) % VOCAB
        return 20 * self.output[token]


@pytest.mark.parametrize(
    ("tree", "head"), [*((tree, "causal") for tree in TREES), *(("tree", head) for head in HEADS if head != "causal")]
)
def test_greedy_text_is_the_targets_own(tree: str, head: str, target: HFTarget) -> None:
    text = greedy(target, PROMPT, 40)
    assert len(set(text)) >= 8
    tokens, accepted = generate_reference(target, random_head(HEADS[head]), PROMPT, 16, TREES[tree])
    assert tokens == text[:16] and len(tokens) == len(accepted) + sum(accepted)


@pytest.mark.parametrize("name", ["chain", "tree", "paper"])
def test_drafts_of_the_right_text_are_accepted_to_full_depth(name: str, target: HFTarget) -> None:
    text = greedy(target, PROMPT, 30)
    tree = TREES[name]
    tokens, accepted = generate_reference(target, EchoHead(target, PROMPT + text), PROMPT, 24, tree)
    assert tokens == text[:24]
    assert accepted == [5, 5, 5, 5], "five drafts in every round, from the first"


@pytest.mark.parametrize("wrong_depth", [1, 3, 5, None])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=6)])
def test_chain_is_accepted_up_to_its_first_error(
    wrong_depth: int | None, sampling: SamplingParams, llama: HFTarget
) -> None:
    text, _ = generate_reference(llama, None, PROMPT, 40, TREES["plain"], sampling)
    head, length = EchoHead(llama, PROMPT + text, wrong_depth), wrong_depth or HEAD.block_size
    tokens, accepted = generate_reference(llama, head, PROMPT, 3 * length, TREES["chain"], sampling)
    assert tokens == text[: 3 * length] and accepted == [length - 1] * 3


@pytest.mark.parametrize("head_name", ["echo", "random", "none"])
def test_end_token_and_max_tokens_cut_a_round(head_name: str, llama: HFTarget) -> None:
    text = greedy(llama, PROMPT, 30)
    heads = {"echo": EchoHead(llama, PROMPT + text), "random": random_head(HEAD), "none": None}
    for length in (1, 4, 7):
        tokens, accepted = generate_reference(llama, heads[head_name], PROMPT, length, TREES["tree"])
        assert tokens == text[:length] and len(tokens) == len(accepted) + sum(accepted)
    eos = text[3]
    expected = text[: text.index(eos) + 1]
    tokens, accepted = generate_reference(llama, heads[head_name], PROMPT, 30, TREES["tree"], eos={eos})
    assert tokens == expected == greedy(llama, PROMPT, 30, eos)
    assert len(tokens) == len(accepted) + sum(accepted) and (head_name != "none" or not any(accepted))
    unending = SamplingParams(ignore_eos=True)
    assert generate_reference(llama, heads[head_name], PROMPT, 30, TREES["tree"], unending, {eos})[0] == text


def test_prompt_has_at_least_one_token(llama: HFTarget) -> None:
    for head in (random_head(HEAD), None):
        assert generate_reference(llama, head, [7], 12, TREES["tree"])[0] == greedy(llama, [7], 12)
    with pytest.raises(ValueError, match="prompt"):
        generate_reference(llama, None, [], 4, TREES["tree"])


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.05}])
def test_seed_fixes_the_text_whatever_the_tree(filters: dict[str, float], llama: HFTarget) -> None:
    texts = set()
    for seed in (11, 12):
        sampling = SamplingParams(temperature=1.3, seed=seed, **filters)  # type: ignore[arg-type]
        plain, _ = generate_reference(llama, None, PROMPT, 12, TREES["plain"], sampling)
        texts.add(tuple(plain))
        for config, tree in ((HEAD, "chain"), (HEAD, "tree"), (HEADS["edge"], "tree"), (HEADS["edge"], "paper")):
            tokens, _ = generate_reference(llama, random_head(config), PROMPT, 12, TREES[tree], sampling)
            assert tokens == plain
    assert len(texts) == 2, "seeds differ"


def test_cache_and_taps_after_rounds_equal_a_fresh_pass(target: HFTarget) -> None:
    """They hold all tokens but the anchor, with the K, V and taps of one pass over them."""
    head, tokens, cache = random_head(HEAD), list(PROMPT), target.new_cache()
    tap = prefill(target, head, tokens[:-1], cache)
    greedily = RowSampling.of([SamplingParams()], [0], "cpu")
    right = greedy(target, PROMPT, 40)
    for round_ in range(4):
        done = len(tokens) - len(PROMPT)
        tree = side_branches(tokens[-1], right[done : done + 1 + round_])
        logits, new_tap = verify(target, head, tree, cache)
        path, bonus = accept(tree, logits, len(tokens), greedily)
        assert len(path) == 2 + round_
        tap = commit(target, path, cache, tap, new_tap)
        tokens += [*tree.token_BN[0, path[1:]].tolist(), bonus]
        fresh = target.new_cache()
        fresh_tap = prefill(target, head, tokens[:-1], fresh)
        assert target.cached_len(cache) == len(tokens) - 1 == len(tap)
        torch.testing.assert_close(tap, fresh_tap, atol=1e-3, rtol=1e-3)
        for (k, v), (fresh_k, fresh_v) in zip(rows(cache), rows(fresh), strict=True):
            torch.testing.assert_close(k, fresh_k, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(v, fresh_v, atol=1e-3, rtol=1e-3)


def side_branches(anchor: int, right: list[int]) -> DraftTree:
    """Return a tree whose accepted path has a better-ranked wrong sibling at every depth."""

    def children(depth: int, parent: int) -> tuple[list[int], list[float]]:
        wrong = (right[depth - 1] + 1) % VOCAB
        return [wrong, right[depth - 1]], [-0.1, -0.2]

    return build_tree_reference(anchor, children, TreeConfig(width=2, budget=200), len(right))


def rows(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cast(Any, cache.layers)]


def test_taps_are_layer_outputs_before_the_final_norm(target: HFTarget) -> None:
    position = torch.arange(len(PROMPT))
    _, taps = target.forward(torch.tensor(PROMPT), position, position <= position[:, None], target.new_cache())
    out = target.model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert len(taps) == NUM_LAYERS
    for layer, tap in enumerate(taps[:-1]):
        torch.testing.assert_close(tap, out.hidden_states[layer + 1][0], atol=1e-5, rtol=1e-5)
    last = cast(Any, target.model).model.norm(taps[-1])
    torch.testing.assert_close(last, out.hidden_states[-1][0], atol=1e-5, rtol=1e-5)


def test_models_that_cannot_verify_trees_are_rejected() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation"):
        HFTarget(model)
    other = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    other.config.layer_types = ["linear_attention"] * NUM_LAYERS
    with pytest.raises(ValueError, match="linear_attention"):
        HFTarget(other)


@pytest.mark.parametrize("tree", ["plain", "chain", "tree", "shallow", "paper", "hybrid"])
@pytest.mark.parametrize(
    ("kind", "temperature"), [("causal", 0.0), ("bidirectional", 0.7), ("edge", 0.0), ("edge", 0.7)]
)
def test_engine_equals_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: HFTarget, kind: str, tree: str, temperature: float
) -> None:
    """Text, trees of all rounds and accepted lengths are equal."""
    cast(Any, llama.model).save_pretrained(tmp_path)
    head, sampling = random_head(HEADS[kind]), SamplingParams(temperature=temperature, seed=5, max_tokens=14)
    shape = replace(TREES[tree], draft_temperature=0.4, shortlist_parents=0, shortlist=VOCAB, ngrams=False)
    trees, traces, done = list[DraftTree](), list[tuple[list[int], ...]](), list[Completion]()
    config, decoder = EngineConfig(page_size=4, max_batch=1), load_decoder(open_model(tmp_path))
    engine = Engine(decoder, head, drafter="head", tree=shape, config=config)
    engine.add(PROMPT, sampling, trace=True)
    while not done:
        for update in engine.step():
            assert update.trace is not None
            traces.append((update.trace.tokens, update.trace.parents))
            done += [update.completion] if update.completion else []

    def recorded(*args: Any) -> DraftTree:
        trees.append(build_tree_reference(*args))
        return trees[-1]

    monkeypatch.setattr("jetspec.reference.build_tree_reference", recorded)
    tokens, accepted = generate_reference(llama, head, PROMPT, 14, shape, sampling)
    assert (done[0].token_ids, done[0].stats.accepted_lengths) == (tokens, accepted)
    assert traces == [(tree.token_BN[0].tolist(), tree.parent_BN[0].tolist()) for tree in trees]
