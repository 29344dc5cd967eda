from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec import ops
from jetspec.config import Score, TreeConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.types import ChoiceModel
from tests.models.head_paged import (
    CAUSAL,
    HEADS,
    VOCAB,
    WINDOW,
    WINDOWED,
    Embedder,
    HeadPages,
    make_head,
    propose_densely,
    random_head,
)

TARGET = Embedder()
each_head = pytest.mark.parametrize("config", HEADS.values(), ids=HEADS.keys())


def random_taps(head: DraftHead, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, head.head_config.tap_size, generator=generator)


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@each_head
@settings(max_examples=6)
@given(pieces=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_cached_head_equals_head_recomputed_from_all_taps(config: HeadConfig, pieces: list[list[int]]) -> None:
    """For requests of any lengths, observed in any pieces with a draft after each; stale block rows are masked."""
    head = random_head(config)
    taps = [random_taps(head, sum(lengths), seed) for seed, lengths in enumerate(pieces)]
    cache = HeadPages(head, len(pieces))
    anchors = torch.arange(len(pieces)) + 3
    for step in range(max(map(len, pieces))):
        for row, lengths in enumerate(pieces):
            start, count = cache.lens[row], lengths[step] if step < len(lengths) else 0
            cache.observe(row, taps[row][start : start + count])
        drafted = cache.propose(head.block_tokens(anchors), TARGET)
        for row, anchor in enumerate(anchors):
            block = head.block_tokens(anchor[None])[0]
            fresh = propose_densely(head, block, taps[row][: cache.lens[row]], TARGET)
            assert_close(drafted[row], head.predicting(fresh))


@each_head
@pytest.mark.parametrize("slot", [1, 2, 4])
def test_slots_attend_as_the_mask_says(config: HeadConfig, slot: int) -> None:
    """A slot's input affects later slots, and earlier ones only in bidirectional heads."""
    head = random_head(config)
    cache = HeadPages(head, 1)
    cache.observe(0, random_taps(head, 6))
    block = head.block_tokens(torch.tensor([5]))
    changed = block.clone()
    changed[0, slot] = 7
    before, after = cache.propose(block, TARGET)[0], cache.propose(changed, TARGET)[0]
    differs = (before - after).abs().amax(-1) > 1e-4
    expected = torch.ones(config.block_size, dtype=torch.bool)
    if config.causal:
        expected[:slot] = False
    assert differs.tolist() == head.predicting(expected[:, None])[:, 0].tolist()


def test_mixed_head_is_causal_in_its_windows_only() -> None:
    config = HEADS["windowed_mixed"]
    assert config.causal_layers == (True, False, True)
    all_windows = replace(config, layers=replace(WINDOWED, windows=(WINDOW,) * 3))
    same_but_causal = replace(all_windows, causal=True, causal_windows=False)
    head, causal = random_head(all_windows), random_head(same_but_causal)
    taps, block = random_taps(head, 7), head.block_tokens(torch.tensor([5]))[0]
    assert_close(propose_densely(head, block, taps, TARGET), propose_densely(causal, block, taps, TARGET))


@each_head
def test_training_blocks_equal_inference_at_their_anchors(config: HeadConfig) -> None:
    """Each block attends to the context strictly before its anchor, and to no other block."""
    head = random_head(config)
    size, anchors, length = head.head_config.block_size, torch.tensor([0, 3, 4, 11]), 12
    taps, token = random_taps(head, length), torch.arange(length) + 2
    block = head.block_tokens(token[anchors])
    position = anchors[:, None] + torch.arange(size)
    owner = torch.arange(len(anchors)).repeat_interleave(size)
    sees_context = torch.arange(length) < anchors[owner][:, None]
    sees_slots = owner == owner[:, None]
    if head.head_config.causal:
        sees_slots &= position.flatten() <= position.flatten()[:, None]
    visible = torch.cat((sees_context, sees_slots), 1)
    states = head.forward_blocks(
        TARGET.embed(block.flatten()), position.flatten(), taps, torch.arange(length), visible
    ).unflatten(0, (-1, size))
    for i, anchor in enumerate(anchors):
        cache = HeadPages(head, 1)
        cache.observe(0, taps[:anchor])
        assert_close(head.predicting(states[i]), cache.propose(block[i][None], TARGET)[0])


@pytest.mark.parametrize("position", range(8))
def test_window_masks_old_context(position: int) -> None:
    """With a window in every layer, slot j attends to context from n + j - (W - 1) on."""
    config = replace(CAUSAL, layers=replace(WINDOWED, num_layers=1, windows=(WINDOW,)))
    head, n = random_head(config), 8
    taps, block = random_taps(head, n), head.block_tokens(torch.tensor([5]))[0]
    changed = taps.clone()
    changed[position] += 1
    difference = propose_densely(head, block, taps, TARGET) - propose_densely(head, block, changed, TARGET)
    seen = position >= n + torch.arange(config.block_size) - (WINDOW - 1)
    assert (difference.abs().amax(-1) > 1e-4).tolist() == seen.tolist()


@pytest.mark.parametrize("name", ["causal", "biased"])
def test_context_needs_no_input_norm_and_is_shared_by_layers(name: str) -> None:
    """K = rope(k_norm(W_k c)), V = W_v c with c = hidden_norm(fc(taps)), in every layer."""
    head = random_head(HEADS[name])
    c, taps, position = head.config, random_taps(head, 4), torch.arange(3, 7)
    fused = taps @ head.fc.weight.T
    row = fused / (fused.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * head.hidden_norm.weight
    angle = position[:, None] * c.rope.theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
    weights = head.context_weights()
    assert weights.norm is not None
    for i, (layer, kv) in enumerate(zip(head.layers, head.context(taps, weights).unbind(1), strict=True)):
        _, k, v = ops.rotate_qkv(kv, c.num_kv_heads, head.rope(position), weights.norm.layer(i))
        weight = dict(layer.named_parameters())
        _, w_k, w_v = weight["attention.qkv.weight"].split([32, 16, 16])
        _, b_k, b_v = weight.get("attention.qkv.bias", torch.zeros(64)).split([32, 16, 16])
        raw = (row @ w_k.T + b_k).view(4, 2, 8)
        normed = raw / (raw.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight["attention.k_norm.weight"]
        low, high = normed.chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        assert_close(k, torch.cat((low * cos - high * sin, high * cos + low * sin), -1))
        assert_close(v, (row @ w_v.T + b_v).view(4, 2, 8))


def test_adapter_maps_each_tap_before_concatenation() -> None:
    head = random_head(HEADS["adapter"])
    assert head.adapter is not None
    first, second = torch.randn(2, 4, 10)
    mapped = torch.cat((first @ head.adapter.weight.T, second @ head.adapter.weight.T), -1)
    plain = random_head(CAUSAL)
    plain.load_state_dict({k: v for k, v in head.state_dict().items() if k != "adapter.weight"})
    assert_close(head.fuse(torch.cat((first, second), -1)), plain.fuse(mapped))


@pytest.mark.parametrize("name", ["edge", "edge_without_gate", "edge_all_gate"])
def test_edge_term_is_its_formula(name: str) -> None:
    """E2 (E1[y] * (g0 + G h)) for every child c."""
    head = random_head(HEADS[name])
    edge, config = head.edge, head.head_config.edge
    assert edge is not None and config is not None
    hidden, parent = torch.randn(2, 4, 16), torch.randint(VOCAB, (2, 4))
    gate = torch.full((2, 4, config.rank), config.gate_bias)
    if edge.gate is not None:
        gate = gate + torch.einsum("rm,bdm->bdr", edge.gate.weight, hidden)
    expected = torch.einsum("bdr,bdr,vr->bdv", edge.predecessor[parent], gate, edge.successor)
    assert_close(edge(hidden, parent), expected)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("gate", [True, False])
def test_initial_edge_term_is_zero(gate: bool) -> None:
    head = make_head(CAUSAL, seed=3, edge=EdgeConfig(rank=6, gate=gate))
    assert head.edge is not None
    term = head.edge(torch.randn(4, 16), torch.arange(4))
    assert torch.equal(term, torch.zeros(4, VOCAB))
    with torch.no_grad():
        head.edge.successor[5] = 1.0
    assert head.edge(torch.randn(4, 16), torch.arange(4))[:, 5].abs().min() > 0, "E1 must start apart from zero"


@pytest.mark.parametrize(
    ("num_target_layers", "expected"),
    [(36, (1, 9, 17, 25, 33)), (48, (1, 12, 23, 34, 45)), (64, (1, 16, 31, 46, 61)), (30, (1, 8, 14, 20, 27))],
)
def test_default_taps_are_the_published_ones(num_target_layers: int, expected: tuple[int, ...]) -> None:
    assert default_tap_layers(5, num_target_layers) == expected
    assert default_tap_layers(1, num_target_layers) == (num_target_layers // 2,)


@pytest.mark.parametrize("shortlist_parents", [0, 2])
@pytest.mark.parametrize("edge", [True, False])
def test_draft_temperature_divides_the_logits(edge: bool, shortlist_parents: int) -> None:
    """Checks log-probabilities without and with a parent."""
    head = random_head(HEADS["edge"] if edge else CAUSAL)
    hidden_BDM, root_B = torch.randn(2, 3, CAUSAL.layers.hidden_size), torch.tensor([4, 5])
    temperature_B = torch.tensor([0.5, 2.0])
    tree = TreeConfig(width=4, shortlist=9, shortlist_parents=shortlist_parents)
    found = head.candidates(hidden_BDM, root_B, TARGET, tree, ChoiceModel(temperature_B[:, None]))
    logits_BDV = TARGET.logits(hidden_BDM) / temperature_B[:, None, None]
    assert_close(found.logprob_BDC, logits_BDV.log_softmax(-1).gather(-1, found.token_BDC))
    if head.edge is not None:
        token_B1K, logprob_B1K = found.children(1, root_B[:, None], 4)
        z_BV = logits_BDV[:, 0] + head.edge(hidden_BDM[:, 0], root_B) / temperature_B[:, None]
        ratio = (logprob_B1K - logprob_B1K[..., :1])[:, 0]
        assert_close(ratio, (z_BV.gather(1, token_B1K[:, 0]) - z_BV.gather(1, token_B1K[:, 0, :1])))


@pytest.mark.parametrize("score", get_args(Score))
def test_candidates_need_no_synchronisation(score: Score) -> None:
    """Rounds are captured as CUDA graphs; a meta tensor fails on any synchronisation."""
    head = random_head(replace(CAUSAL, edge=EdgeConfig(rank=4))).to("meta")
    target, hidden_BDM = Embedder(), torch.empty(2, 3, CAUSAL.layers.hidden_size, device="meta")
    target.embedding, target.matrix = target.embedding.to("meta"), target.matrix.to("meta")
    root_B, temperature_B1 = torch.empty(2, dtype=torch.long, device="meta"), torch.ones(2, 1, device="meta")
    found = head.candidates(
        hidden_BDM, root_B, target, TreeConfig(score=score, shortlist=9), ChoiceModel(temperature_B1)
    )
    assert found.token_BDC.shape == (2, 3, 9)
    assert (found.entropy_BD is None) == (score == "accum_logp")
