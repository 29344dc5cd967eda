"""A training pass over packed blocks equals the decoding pass at each anchor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.config import EngineConfig
from jetspec.data.corpus import Document, PackedBatch, PackedData
from jetspec.models.decoder import Decoder, Hidden
from jetspec.models.draft_head import DraftHead
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.heads import Head
from jetspec.train.blocks import Drafts, choose_anchors, document_mask, lay_out
from jetspec.train.config import LossConfig
from jetspec.train.loss import HeadWithLoss, block_states, chain_states
from jetspec.types import SamplingParams
from tests.engine.tiny import VOCAB, make_engine, randomize, tiny_decoder, tiny_eagle3, tiny_head

TARGET = tiny_decoder()


def documents(seed: int = 0) -> list[Document]:
    generator = np.random.default_rng(seed)
    made = []
    for size, prompt in ((14, 4), (11, 3), (17, 9)):
        written = np.arange(size) >= prompt
        made.append(Document(generator.integers(4, 40, size), written))
    return made


def packed(row_len: int = 32) -> PackedBatch:
    data = PackedData(documents(), row_len, seed=0)
    return data.batch(0, data.rows_per_pass)


def captured(target: Decoder, batch: PackedBatch, taps: tuple[int, ...]) -> Hidden:
    return target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)


def trained_states(target: Decoder, head: DraftHead, batch: PackedBatch, blocks: Drafts) -> torch.Tensor:
    return block_states(head, target, batch, blocks, captured(target, batch, head.head_config.tap_layers))


def decoded_states(target: Decoder, head: DraftHead, tokens: list[int]) -> torch.Tensor:
    """States of the engine's head with the last of `tokens` as the anchor."""
    engine = make_engine(target, "head", head, config=EngineConfig(page_size=4, prefill_chunk=5))
    engine.add(tokens, SamplingParams())
    request = next(iter(engine.requests.values()))
    while not request.is_prefilled or request.row < 0:
        engine._prefill(engine.scheduler.next_chunks())
    engine.cache.flush()
    anchor = torch.tensor([tokens[-1]])
    slots = torch.arange(head.head_config.block_size)[None]
    block = engine.cache.place(torch.tensor([request.row]), head.block_tokens(anchor), slots, None)
    assert engine.cache.head is not None
    return head.propose(block, target, engine.cache.head.layers)[0]


def variant(name: str) -> DraftHead:
    """A head with the properties in its name."""
    words = name.split()
    config = tiny_head(TARGET, edge="edge" in words, causal="bidirectional" not in words).head_config
    windows = (5, None) if "windows" in words else ()
    config = replace(config, layers=replace(config.layers, windows=windows), shifted="shifted" in words)
    size = TARGET.config.hidden_size if "adapter" in words else None
    config = replace(config, causal_windows="causal" in words, target_hidden_size=size)
    return randomize(DraftHead(config), 3, 0.3)


VARIANTS = ["causal", "bidirectional", "edge", "bidirectional edge", "shifted", "shifted bidirectional", "adapter"]
VARIANTS += ["windows", "windows bidirectional", "causal windows bidirectional"]


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_training_equals_decoding_at_every_anchor(name: str) -> None:
    head, batch = variant(name), packed()
    anchors, valid = choose_anchors(batch, 100, torch.Generator().manual_seed(0))
    assert int(valid.sum()) == sum(int(d.written.sum()) for d in documents())
    states = trained_states(TARGET, head, batch, lay_out(batch, anchors, valid, head.head_config))
    for row, block in valid.nonzero().tolist():
        at = int(anchors[row, block])
        start = at - int(batch.position_RT[row, at])
        expected = decoded_states(TARGET, head, batch.token_RT[row, start : at + 1].tolist())
        torch.testing.assert_close(states[row, block], expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_labels_sources_and_weights() -> None:
    head, batch = tiny_head(TARGET), packed()
    anchors, valid = choose_anchors(batch, 100, torch.Generator().manual_seed(0))
    blocks = lay_out(batch, anchors, valid, head.head_config)
    for row, block in valid.nonzero().tolist():
        at = int(anchors[row, block])
        document = batch.document_RT[row]
        for k in range(1, head.head_config.depth + 1):
            inside = at + k < 32 and bool(document[at + k] == document[at]) and bool(batch.written_RT[row, at + k])
            assert bool(blocks.valid_RAD[row, block, k - 1]) == inside
            if inside:
                assert int(blocks.label_RAD[row, block, k - 1]) == int(batch.token_RT[row, at + k])
                assert int(blocks.source_RAD[row, block, k - 1]) == 32 * row + at + k - 1
    assert not blocks.valid_RAD[~valid].any()


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("multiple", [1, 16])
def test_sources_of_predictions_are_deduplicated(chunk: int, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.ops.CHUNK", chunk)
    batch = packed()
    anchors, valid = choose_anchors(batch, 100, torch.Generator().manual_seed(0))
    drafts = lay_out(batch, anchors, valid, tiny_head(TARGET).head_config, multiple)
    chunk_P = torch.arange(len(drafts.drafted_P)) // chunk
    found = drafts.teacher_CS[chunk_P, drafts.teacher_P][drafts.taught_P]
    taught = drafts.drafted_P[drafts.taught_P]
    assert torch.equal(found, drafts.source_RAD.flatten()[taught])
    assert torch.equal(taught.sort().values, drafts.valid_RAD.flatten().nonzero()[:, 0])
    sizes = [len(drafts.teacher_P[chunk_P == i].unique()) for i in range(len(drafts.teacher_CS))]
    sources = [len(drafts.teacher_CS[i, drafts.teacher_P[chunk_P == i]].unique()) for i in range(len(sizes))]
    assert sizes == sources
    step = max(1, multiple // 2)
    assert drafts.teacher_CS.shape[1] == -(-max(sizes) // step) * step


@pytest.mark.parametrize("name", ["causal", "bidirectional", "edge", "eagle3"])
@pytest.mark.parametrize("chunk", [5, 4096])
def test_loss_equals_the_one_of_full_logits(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher of a prediction is the target's distribution at the token before it, over the head's vocabulary."""
    monkeypatch.setattr("jetspec.ops.CHUNK", chunk)
    made: Head = tiny_eagle3(TARGET, depth=3, draft_vocab=20) if name == "eagle3" else variant(name)
    head, batch = made.requires_grad_(True), packed()
    anchors = choose_anchors(batch, 6, torch.Generator().manual_seed(0))
    drafts = lay_out(batch, *anchors, head.head_config, multiple=16)
    with torch.no_grad():
        seen = captured(TARGET, batch, head.head_config.tap_layers)
    loss = HeadWithLoss(head, LossConfig(gamma=4.5))(TARGET, batch, drafts, seen)
    loss.loss_sum.backward()
    found = {name: p.grad for name, p in head.named_parameters()}
    head.zero_grad()

    if isinstance(head, Eagle3Head):
        logits, vocabulary = head.lm_head(chain_states(head, TARGET, batch, drafts, seen)), head.token_of
    else:
        assert isinstance(head, DraftHead)
        hidden = block_states(head, TARGET, batch, drafts, seen)
        logits, vocabulary = TARGET.logits(hidden), torch.arange(VOCAB)
        if head.edge is not None:
            parent = batch.token_RT.flatten()[drafts.source_RAD]
            logits = logits + (head.edge.predecessor[parent] * head.edge.gates(hidden)) @ head.edge.successor.T
    teacher = TARGET.logits(seen.hidden_TM.flatten(0, 1))[drafts.source_RAD][..., vocabulary].log_softmax(-1)
    known = torch.isin(drafts.label_RAD, vocabulary)
    assert known[drafts.valid_RAD].all() == (name != "eagle3")
    weight = drafts.valid_RAD * known * torch.exp(-torch.arange(drafts.valid_RAD.shape[-1]) / 4.5)
    loss_RAD = F.kl_div(logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)
    expected = (loss_RAD * weight).sum()
    torch.testing.assert_close(loss.loss_sum, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.weight_sum, weight.sum())
    hit = (vocabulary[logits.argmax(-1)] == drafts.label_RAD) & drafts.valid_RAD
    assert torch.equal(loss.hit_D, hit.long().cumprod(-1).sum((0, 1)))
    expected.backward()
    for key, parameter in head.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("multiple", [1, 16])
def test_batch_without_answers_has_no_predictions(multiple: int) -> None:
    batch = packed()
    batch = replace(batch, written_RT=torch.zeros_like(batch.written_RT))
    drafts = lay_out(batch, *choose_anchors(batch, 3, torch.Generator()), tiny_head(TARGET).head_config, multiple)
    assert not drafts.taught_P.any() and len(drafts.teacher_P) == len(drafts.drafted_P) == multiple // 16 * 16


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(1, 12))
def test_anchors_are_distinct_sorted_and_before_written_tokens(seed: int, count: int) -> None:
    batch = packed()
    anchors, valid = choose_anchors(batch, count, torch.Generator().manual_seed(seed))
    for row in range(len(anchors)):
        chosen = anchors[row, valid[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert all(bool(batch.written_RT[row, a + 1]) for a in chosen)
        assert all(bool(batch.document_RT[row, a] == batch.document_RT[row, a + 1]) for a in chosen)


@torch.inference_mode()
def test_dense_target_equals_each_document_alone() -> None:
    batch = packed()
    seen = captured(TARGET, batch, (1,))
    for row in range(len(batch.token_RT)):
        for document in range(int(batch.document_RT[row].max()) + 1):
            inside = batch.document_RT[row] == document
            token = batch.token_RT[row, inside]
            causal = torch.ones(len(token), len(token), dtype=torch.bool).tril()
            alone = TARGET.forward_dense(token[None], torch.arange(len(token))[None], causal[None], (1,))
            torch.testing.assert_close(seen.hidden_TM[row, inside], alone.hidden_TM[0], atol=1e-5, rtol=1e-5)
