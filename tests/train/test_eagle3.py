"""An EAGLE-3 head is trained with the pass of decoding: on its own states, over its own vocabulary."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from jetspec.config import TreeConfig
from jetspec.data.corpus import Document, Documents, PackedBatch
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head
from jetspec.models.heads import load_any_head
from jetspec.models.masked_attention import make_block_mask
from jetspec.train.blocks import choose_anchors, document_mask, lay_out
from jetspec.train.config import HeadShape, LossConfig, TrainConfig
from jetspec.train.evaluate import make_trees, rounds_of, score_head
from jetspec.train.loss import DraftLoss, chain_states, unrolled_loss
from jetspec.train.run import frequent_tokens, make_trainer
from jetspec.types import SamplingParams
from tests.engine.tiny import VOCAB, make_engine, randomize, run, tiny_eagle3
from tests.models.slow_eagle3 import state_after
from tests.train.test_trainer import TARGET, write_answers
from tests.train.test_trainer import recipe as block_recipe

CPU = torch.device("cpu")


def packed() -> PackedBatch:
    """Two documents a row, the first with a prompt of three tokens, and padding."""
    generator = torch.Generator().manual_seed(4)
    token = torch.randint(0, VOCAB, (2, 26), generator=generator)
    document = torch.tensor([0] * 12 + [1] * 10 + [-1] * 4).repeat(2, 1)
    position = torch.tensor([*range(12), *range(10), *[0] * 4]).repeat(2, 1)
    written = (document >= 0) & (position >= torch.where(document == 0, 3, 1))
    return PackedBatch(token, position, document, written)


def states(head: Eagle3Head, batch: PackedBatch, anchors: int = 12) -> tuple[Any, Tensor]:
    anchor, valid = choose_anchors(batch, anchors, torch.Generator().manual_seed(0))
    drafts = lay_out(batch, anchor, valid, head.head_config)
    taps = head.head_config.tap_layers
    seen = TARGET.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)
    return drafts, chain_states(head, TARGET, batch, drafts, seen)


@pytest.mark.parametrize("norm_first", [False, True])
def test_training_pass_equals_decoding(norm_first: bool) -> None:
    """Compares every anchor and step with a reference pass over the text and the chain so far."""
    head, batch = tiny_eagle3(TARGET, depth=3, norm_before_residual=norm_first), packed()
    drafts, found = states(head, batch)
    checked = 0
    for row, draft, step in drafts.valid_RAD.nonzero().tolist():
        anchor, start = int(drafts.end_RA[row, draft]), int(drafts.start_RA[row, draft])
        text = batch.token_RT[row].tolist()
        expected = state_after(head, TARGET, text[start : anchor + 1], text[anchor + 1 : anchor + 1 + step])
        torch.testing.assert_close(found[row, draft, step], expected, atol=1e-5, rtol=5e-5)
        assert drafts.label_RAD[row, draft, step] == text[anchor + 1 + step]
        checked += 1
    assert checked > 40


def test_drafts_start_after_the_first_token() -> None:
    batch = packed()
    anchor = torch.arange(26).repeat(2, 1)
    drafts = lay_out(batch, anchor, torch.ones_like(anchor, dtype=torch.bool), tiny_eagle3(TARGET, depth=3).head_config)
    assert not drafts.valid_RAD[batch.position_RT == 0].any()
    assert drafts.valid_RAD[batch.position_RT == 1].any()


def test_loss_equals_the_one_of_full_logits() -> None:
    head, batch = tiny_eagle3(TARGET, depth=3, draft_vocab=20).requires_grad_(True), packed()
    drafts, hidden = states(head, batch)
    seen = TARGET.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), head.head_config.tap_layers)
    loss = unrolled_loss(head, TARGET, batch, drafts, seen, LossConfig(gamma=4.5))
    loss.loss_sum.backward()
    found = {name: p.grad for name, p in head.named_parameters()}
    head.zero_grad()

    q = head.lm_head(hidden).log_softmax(-1)
    teacher = TARGET.logits(seen.hidden_TM.flatten(0, 1))[drafts.source_RAD][..., head.token_of].log_softmax(-1)
    known = torch.isin(drafts.label_RAD, head.token_of)
    weight = drafts.valid_RAD * known * torch.exp(-torch.arange(3) / 4.5)
    expected = (F.kl_div(q, teacher, reduction="none", log_target=True).sum(-1) * weight).sum()
    torch.testing.assert_close(loss.loss_sum, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.weight_sum, weight.sum())
    assert not known[drafts.valid_RAD].all()
    expected.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_labels_outside_the_vocabulary_count_as_wrong() -> None:
    head, batch = tiny_eagle3(TARGET, depth=2, draft_vocab=1), packed()
    drafts, _ = states(head, batch)
    seen = TARGET.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), head.head_config.tap_layers)
    loss = unrolled_loss(head, TARGET, batch, drafts, seen, LossConfig(dpace=0.5))
    assert torch.equal(loss.reach_D, drafts.valid_RAD.sum((0, 1)))
    right = drafts.label_RAD[..., 0] == head.token_of[0]
    assert loss.hit_D[0] == (right & drafts.valid_RAD[..., 0]).sum() < loss.reach_D[0]


def wide_models(device: torch.device) -> tuple[Decoder, Eagle3Head]:
    """Models with heads of size 16, the smallest of FlexAttention's kernels."""
    shape = DecoderConfig("llama", VOCAB, 32, 3, 4, 2, 16, 48, max_len=128)
    target = randomize(Decoder(shape), 1, 0.3)
    head = randomize(Eagle3Head(Eagle3Config(replace(shape, num_layers=1), (0, 1, 2), VOCAB, 4)), 2, 0.2)
    return target.to(device), head.to(device).requires_grad_(True)


def loss_and_gradients(
    target: Decoder, head: Eagle3Head, seed: int, device: torch.device
) -> tuple[DraftLoss, dict[str, Tensor | None]]:
    """The loss of one batch, and its gradients."""
    host = packed()
    anchors = choose_anchors(host, 9, torch.Generator().manual_seed(seed))
    drafts = lay_out(host, *anchors, head.head_config).to(device)
    batch = host.to(device)
    with torch.no_grad():
        taps = head.head_config.tap_layers
        seen = target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)
    head.zero_grad()
    result = unrolled_loss(head, target, batch, drafts, seen, LossConfig())
    result.loss_sum.backward()
    return result, {name: p.grad for name, p in head.named_parameters()}


def test_compiled_steps_share_a_graph_and_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = wide_models(CPU)
    plain = [loss_and_gradients(target, head, seed, CPU) for seed in range(2)]
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr("jetspec.train.blocks.make_visible", make_block_mask)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    head.layer.compile(backend=counter, dynamic=False)
    fast = [loss_and_gradients(target, head, seed, CPU) for seed in range(2)]
    assert counter.frame_count == 1
    for (loss, grads), (expected, expected_grads) in zip(fast, plain, strict=True):
        torch.testing.assert_close(loss.loss_sum, expected.loss_sum, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_compiled_training_on_a_gpu_follows_the_cpu() -> None:
    target, head = wide_models(CPU)
    expected, expected_grads = loss_and_gradients(target, head, 0, CPU)
    cuda = torch.device("cuda")
    target, head = wide_models(cuda)
    head.layer.compile(dynamic=False)
    loss, grads = loss_and_gradients(target, head, 0, cuda)
    torch.testing.assert_close(loss.loss_sum.cpu(), expected.loss_sum, atol=1e-3, rtol=1e-4)
    for name, grad in grads.items():
        assert grad is not None
        torch.testing.assert_close(grad.cpu(), expected_grads[name], atol=1e-3, rtol=1e-3)


def test_vocabulary_is_the_most_frequent_tokens() -> None:
    rng = np.random.default_rng(0)
    made = [Document(rng.zipf(1.5, 30).clip(max=40), rng.random(30) < 0.7) for _ in range(20)]
    documents = Documents.join([(0, document) for document in made]).take(np.array([*range(20), 3, 3]))
    counts = Counter(int(t) for d in [*made, made[3], made[3]] for t in d.tokens[d.written])
    expected = sorted(range(41), key=lambda token: (-counts[token], token))[:9]
    assert frequent_tokens(documents, 9).tolist() == sorted(expected)
    assert frequent_tokens(documents, 60).tolist() == list(range(60))  # some ids never occur


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("data") / "answers.jsonl", 80)


def recipe(answers: Path, out: Path, **changes: Any) -> TrainConfig:
    head = HeadShape(kind="eagle3", tap_layers=(0, 1, 2), depth=4, draft_vocab=40)
    return block_recipe(answers, out, **{"head": head, "anchors": 24, **changes})


def tokens_per_round(head: Eagle3Head) -> float:
    prompts = [[5 + i, 6] for i in range(8)]
    engine = make_engine(TARGET, "head", head, TreeConfig(budget=12, width=3))
    done = run(engine, prompts, SamplingParams(max_tokens=24))
    return sum(c.stats.tokens_per_round for c in done) / 8


def test_training_raises_accepted_tokens(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, steps=60), TARGET)
    before = trainer.validate()
    trainer.run()
    after = trainer.validate()
    assert after.loss < 0.7 * before.loss and after.chain > before.chain + 0.3
    head = load_any_head(tmp_path / "head", TARGET.config, dtype=torch.float32)
    assert isinstance(head, Eagle3Head) and isinstance(trainer.head, Eagle3Head)
    assert torch.equal(head.token_of, trainer.head.token_of) and len(head.token_of) == 40
    fresh = make_trainer(recipe(answers, tmp_path / "fresh"), TARGET).head
    assert isinstance(fresh, Eagle3Head)
    assert tokens_per_round(head) > tokens_per_round(fresh.requires_grad_(False)) + 0.3
    card = (tmp_path / "head" / "README.md").read_text()
    assert "EAGLE-3" in card and "40 of 48" in card and "24 chains each" in card
    assert "validation, teacher-forced: tree_64" in card


def test_training_starts_from_a_trained_head(answers: Path, tmp_path: Path) -> None:
    first = make_trainer(recipe(answers, tmp_path / "a"), TARGET)
    first.export()
    start = str(tmp_path / "a" / "head")
    again = make_trainer(recipe(answers, tmp_path / "b", start=start, head=HeadShape(kind="eagle3")), TARGET)
    for name, value in first.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], value.bfloat16().to(value.dtype)), name
    with pytest.raises(ValueError, match=r"head\.kind"):
        make_trainer(recipe(answers, tmp_path / "c", start=start, head=HeadShape()), TARGET)
    with pytest.raises(ValueError, match=r"head\.depth is 9, but 4"):
        make_trainer(recipe(answers, tmp_path / "c", start=start, head=HeadShape(kind="eagle3", depth=9)), TARGET)


def test_head_that_does_not_fit_is_refused(answers: Path, tmp_path: Path) -> None:
    shape = HeadShape(kind="eagle3")
    with pytest.raises(ValueError, match=r"head\.tap_layers"):
        make_trainer(recipe(answers, tmp_path, head=shape), TARGET)
    shape = HeadShape(kind="eagle3", tap_layers=(0, 1, 2), draft_vocab=1000)
    with pytest.raises(ValueError, match=r"head\.draft_vocab is 1000"):
        make_trainer(recipe(answers, tmp_path, head=shape), TARGET)


@pytest.fixture(scope="module")
def trained(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    trainer = make_trainer(recipe(answers, tmp_path_factory.mktemp("run"), steps=40), TARGET)
    for _ in range(40):
        trainer.train_step()
    assert isinstance(trainer.head, Eagle3Head)
    return trainer.head.requires_grad_(False)


@pytest.mark.parametrize("tree", [TreeConfig(width=3), TreeConfig(width=2, depth=6)])
def test_teacher_forced_rounds_equal_decoding(trained: Eagle3Head, tree: TreeConfig) -> None:
    prompts, budgets = [[5], [7, 11, 3], [9, 9, 30, 2, 17, 8]], ("chain", "2", "7", "30")
    documents = []
    for prompt in prompts:
        tokens = [*prompt, *run(make_engine(TARGET), [prompt], SamplingParams(max_tokens=20))[0].token_ids]
        documents.append(Document(np.array(tokens), np.arange(len(tokens)) >= len(prompt)))
    score = score_head(TARGET, trained, documents, budgets, tree)
    assert score.tokens_per_round["30"] > 1.3
    for name, setting in make_trees(budgets, tree, trained.head_config.draft_depth(tree.depth)).items():
        done = run(make_engine(TARGET, "head", trained, setting), prompts, SamplingParams(max_tokens=20))
        assert score.rounds[name] == [c.stats.accepted_lengths for c in done], name
    right = (score.rank_AD == 0).long().cumprod(1).sum(1)  # correct tokens of a chain
    assert score.rounds["chain"] == [list(rounds_of(part.tolist())) for part in right.split(20)]
