"""A run learns, can be stopped anywhere, and does not depend on how many processes share it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from jetspec.config import EngineConfig, TreeConfig
from jetspec.models.head_format import load_head
from jetspec.train.checkpoint import checkpoints
from jetspec.train.config import HeadShape, LossConfig, OptimizerConfig, TrainConfig
from jetspec.train.run import make_trainer
from jetspec.train.trainer import Trainer
from jetspec.types import SamplingParams
from tests.engine.tiny import make_engine, run, tiny_decoder

TARGET = tiny_decoder(spread=0.15)
SHAPE = HeadShape(num_layers=2, block_size=5, tap_layers=(0, 1), mask_token=2, edge_rank=4)


def write_answers(path: Path, count: int = 40) -> Path:
    """Prompts answered by the tiny target."""
    prompts = [[5 + i % 40, 6 + i // 7] for i in range(count)]
    done = run(make_engine(TARGET, config=EngineConfig(max_batch=20)), prompts, SamplingParams(max_tokens=24))
    rows = [{"token_ids": p + c.token_ids, "spans": [[2, 26]]} for p, c in zip(prompts, done, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("data") / "answers.jsonl")


def recipe(answers: Path, out: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        data=(str(answers),),
        out=str(out),
        head=SHAPE,
        optimizer=OptimizerConfig(lr=5e-3),
        steps=6,
        rows=2,
        row_len=60,
        anchors=8,
        validation_rows=2,
        save_every=3,
        validate_every=3,
        log_every=1,
        dtype="float32",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.head.named_parameters()}


def test_training_makes_the_head_draft_better(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, steps=120), TARGET)
    before = trainer.validate()
    trainer.run()
    after = trainer.validate()
    assert after.loss < 0.7 * before.loss and after.chain > before.chain + 0.3
    head = load_head(tmp_path / "head", TARGET.config, dtype=torch.float32).requires_grad_(False)
    tree = TreeConfig(budget=5, width=1)
    prompts = [[5 + i, 6] for i in range(8)]
    done = run(make_engine(TARGET, "head", head, tree), prompts, SamplingParams(max_tokens=24))
    assert sum(c.stats.tokens_per_round for c in done) / 8 > 1.2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_killed_ends_with_the_same_weights(answers: Path, tmp_path: Path, optimizer: str) -> None:
    config = recipe(answers, tmp_path / "a", optimizer=OptimizerConfig(kind=optimizer))  # type: ignore[arg-type]
    whole = make_trainer(config, TARGET)
    whole.run()

    killed = make_trainer(replace(config, out=str(tmp_path / "b")), TARGET)
    for _ in range(5):  # two steps past the checkpoint are lost
        killed.train_step()
        if killed.step == 3:
            killed.save()
    again = make_trainer(replace(config, out=str(tmp_path / "b")), TARGET)
    assert again.resume() == 3
    again.run()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name


def test_old_checkpoints_go_and_half_written_ones_do_not_count(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, save_every=1, keep=2), TARGET)
    trainer.run()
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoints(folder)] == ["step-0000005", "step-0000006"]
    (folder / ".writing-1").mkdir()
    assert make_trainer(recipe(answers, tmp_path), TARGET).resume() == 6
    (folder / "step-0000006" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        make_trainer(recipe(answers, tmp_path), TARGET).resume()


def test_a_full_disk_leaves_no_checkpoint(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(recipe(answers, tmp_path), TARGET)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jetspec.train.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def curve(rank: int, world: int, answers: str, out: str, accumulate: int, result: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=world)
    trainer = make_trainer(recipe(Path(answers), Path(out), accumulate=accumulate), TARGET)
    losses = [trainer.train_step().loss for _ in range(4)]
    if rank == 0:
        Path(result).write_text(json.dumps(losses))
    if world > 1:
        dist.destroy_process_group()


def test_two_processes_give_the_curve_of_one_with_twice_the_accumulation(answers: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    curve(0, 1, str(answers), str(tmp_path / "one"), 2, str(one))
    spawn(curve, (2, str(answers), str(tmp_path / "two"), 1, str(two)), nprocs=2)
    assert json.loads(two.read_text()) == pytest.approx(json.loads(one.read_text()), rel=1e-5)


def test_only_the_edge_term_moves_when_asked(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, train_only_edge=True), TARGET)
    before = weights(trainer)
    for _ in range(3):
        trainer.train_step()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved == {"edge.predecessor", "edge.successor", "edge.gate.weight"}


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(kind="sft"),
        LossConfig(kind="reverse_kl"),
        LossConfig(gamma=3.0),
        LossConfig(dpace=0.5),
        LossConfig(temperature=2.0),
    ],
)
def test_every_loss_learns(answers: Path, tmp_path: Path, loss: LossConfig) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, loss=loss, steps=40), TARGET)
    before = trainer.validate().loss
    for _ in range(40):
        trainer.train_step()
    assert trainer.validate().loss < before


def test_validation_rows_are_kept_out_of_training(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path), TARGET)
    assert trainer.validation is not None
    held = trainer.validation.token_RT
    kept_out = {tuple(held[r][trainer.validation.document_RT[r] == 0].tolist()) for r in range(len(held))}
    trained = {tuple(document.tokens.tolist()) for document in trainer.data.documents}
    assert kept_out and not kept_out & trained


def test_positions_outside_the_vocabulary_are_refused(answers: Path, tmp_path: Path) -> None:
    small = tiny_decoder(vocab=8)
    with pytest.raises(ValueError, match="vocabulary of 8"):
        make_trainer(recipe(answers, tmp_path), small)
