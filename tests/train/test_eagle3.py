"""An EAGLE-3 head is trained with the pass of decoding: on its own states, over its own vocabulary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.data.corpus import Document, Documents, PackedBatch
from jetspec.models.decoder import Hidden
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.heads import load_any_head
from jetspec.train.blocks import choose_anchors, document_mask, lay_out
from jetspec.train.config import HeadShape, LossConfig, TrainConfig
from jetspec.train.evaluate import make_trees, rounds_of, score_head
from jetspec.train.loss import HeadWithLoss, Metrics, chain_states
from jetspec.train.run import frequent_tokens, make_trainer
from jetspec.train.trainer import Trainer
from jetspec.types import SamplingParams
from tests.engine.tiny import VOCAB, make_engine, run, tiny_eagle3
from tests.models.slow_eagle3 import state_after
from tests.train.test_evaluate import documents_of
from tests.train.tiny_run import TARGET, card_of, packed
from tests.train.tiny_run import recipe as block_recipe


def states(head: Eagle3Head, batch: PackedBatch, anchors: int = 12) -> tuple[Any, Hidden, Tensor]:
    anchor, valid = choose_anchors(batch, anchors, torch.Generator().manual_seed(0))
    drafts = lay_out(batch, anchor, valid, head.head_config)
    taps = head.head_config.tap_layers
    seen = TARGET.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)
    return drafts, seen, chain_states(head, TARGET, batch, drafts, seen)


@pytest.mark.parametrize("norm_first", [False, True])
def test_training_pass_equals_decoding(norm_first: bool) -> None:
    """Compares every anchor and step with a reference pass over the text and the chain so far."""
    head, batch = tiny_eagle3(TARGET, depth=3, norm_before_residual=norm_first), packed(2, 26, VOCAB)
    drafts, _, found = states(head, batch)
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
    batch = packed(2, 26, VOCAB)
    anchor = torch.arange(26).repeat(2, 1)
    drafts = lay_out(batch, anchor, torch.ones_like(anchor, dtype=torch.bool), tiny_eagle3(TARGET, depth=3).head_config)
    assert not drafts.valid_RAD[batch.position_RT == 0].any()
    assert drafts.valid_RAD[batch.position_RT == 1].any()


def test_labels_outside_the_vocabulary_count_as_wrong() -> None:
    head, batch = tiny_eagle3(TARGET, depth=2, draft_vocab=1), packed(2, 26, VOCAB)
    drafts, seen, _ = states(head, batch)
    loss = HeadWithLoss(head, LossConfig(dpace=0.5))(TARGET, batch, drafts, seen)
    assert torch.equal(loss.reach_D, drafts.valid_RAD.sum((0, 1)))
    right = drafts.label_RAD[..., 0] == head.token_of[0]
    assert loss.hit_D[0] == (right & drafts.valid_RAD[..., 0]).sum() < loss.reach_D[0]


def test_vocabulary_is_the_most_frequent_tokens() -> None:
    rng = np.random.default_rng(0)
    made = [Document(rng.zipf(1.5, 30).clip(max=40), rng.random(30) < 0.7) for _ in range(20)]
    documents = Documents.join([(0, document) for document in made]).take(np.array([*range(20), 3, 3]))
    counts = Counter(int(t) for d in [*made, made[3], made[3]] for t in d.tokens[d.written])
    expected = sorted(range(41), key=lambda token: (-counts[token], token))[:9]
    assert frequent_tokens(documents, 9).tolist() == sorted(expected)
    assert frequent_tokens(documents, 60).tolist() == list(range(60))  # some ids never occur


def recipe(answers: Path, out: Path, **changes: Any) -> TrainConfig:
    head = HeadShape(kind="eagle3", tap_layers=(0, 1, 2), depth=4, draft_vocab=40)
    return block_recipe(answers, out, **{"head": head, "anchors": 24, **changes})


@pytest.fixture(scope="module")
def finished(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Metrics, Path]:
    """A trainer after its run, its metrics before, and its folder."""
    out = tmp_path_factory.mktemp("run")
    trainer = make_trainer(recipe(answers, out, steps=60, save_every=60, validate_every=30), TARGET)
    before = trainer.validate()
    trainer.run()
    return trainer, before, out


def tokens_per_round(head: Eagle3Head) -> float:
    prompts = [[5 + i, 6] for i in range(8)]
    engine = make_engine(TARGET, "head", head, TreeConfig(budget=12, width=3))
    done = run(engine, prompts, SamplingParams(max_tokens=24))
    return sum(c.stats.tokens_per_round for c in done) / 8


def test_training_raises_accepted_tokens(
    answers: Path, finished: tuple[Trainer, Metrics, Path], tmp_path: Path
) -> None:
    trainer, before, out = finished
    after = trainer.validate()
    assert after.loss < 0.7 * before.loss and after.chain > before.chain + 0.3
    head = load_any_head(out / "head", TARGET.config, dtype=torch.float32)
    assert isinstance(head, Eagle3Head) and isinstance(trainer.head, Eagle3Head)
    assert torch.equal(head.token_of, trainer.head.token_of) and len(head.token_of) == 40
    fresh = make_trainer(recipe(answers, tmp_path), TARGET).head
    assert isinstance(fresh, Eagle3Head)
    assert tokens_per_round(head) > tokens_per_round(fresh.requires_grad_(False)) + 0.3
    card = card_of(out)
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


@pytest.mark.parametrize("tree", [TreeConfig(width=3), TreeConfig(width=2, depth=6)])
def test_teacher_forced_rounds_equal_decoding(finished: tuple[Trainer, Metrics, Path], tree: TreeConfig) -> None:
    trained = load_any_head(finished[2] / "head", TARGET.config, dtype=torch.float32)
    prompts, budgets = [[5], [7, 11, 3], [9, 9, 30, 2, 17, 8]], ("chain", "2", "7", "30")
    documents = documents_of(TARGET, prompts, [20] * 3)
    score = score_head(TARGET, trained, documents, budgets, tree)
    assert score.tokens_per_round["30"] > 1.3
    for name, setting in make_trees(budgets, tree, trained.head_config.draft_depth(tree.depth)).items():
        done = run(make_engine(TARGET, "head", trained, setting), prompts, SamplingParams(max_tokens=20))
        assert score.rounds[name] == [c.stats.accepted_lengths for c in done], name
    right = (score.rank_AD == 0).long().cumprod(1).sum(1)  # correct tokens of a chain
    assert score.rounds["chain"] == [list(rounds_of(part.tolist())) for part in right.split(20)]
