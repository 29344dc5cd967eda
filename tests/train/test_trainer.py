"""A run learns, can be stopped anywhere, and does not depend on how many processes share it."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter as time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.multiprocessing.spawn import spawn

from jetspec.config import EngineConfig, TreeConfig
from jetspec.models.head_format import load_head
from jetspec.train.checkpoint import checkpoints
from jetspec.train.config import DataFile, HeadShape, LossConfig, OptimizerConfig, TrainConfig
from jetspec.train.evaluate import score_head
from jetspec.train.run import make_trainer
from jetspec.train.trainer import Trainer, cut
from jetspec.types import SamplingParams
from tests.engine.tiny import make_engine, run, tiny_decoder

TARGET = tiny_decoder(spread=0.15)
KINDS = ("train", "validation", "decode")
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


def test_every_save_leaves_a_head_to_use(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path), TARGET)
    for step in (1, 2):
        trainer.train_step()
        trainer.save()
        head = load_head(tmp_path / "head", TARGET.config)
        for name, value in weights(trainer).items():
            assert head.get_parameter(name).dtype == torch.bfloat16
            assert torch.equal(head.get_parameter(name), value.bfloat16()), name
        assert f"| steps | {step} |" in (tmp_path / "head" / "README.md").read_text()


def test_a_run_ends_with_its_time_and_anneals_by_then(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the clock takes a second, and happens at every step. The second part goes on from the first."""
    seconds = itertools.count()
    monkeypatch.setattr("jetspec.train.clock.time", SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time))
    out = tmp_path / "out"
    config = recipe(answers, out, steps=1000, minutes=20 / 60, save_every=5)
    first = make_trainer(config, TARGET)
    monkeypatch.setattr(first, "export", stop_at(first, 10))
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again = make_trainer(config, TARGET)
    assert again.resume() == 10 and again.limit.used_s == 10
    again.run()
    assert again.step == 20 and (out / "head" / "README.md").exists()
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if row["kind"] == "train"]
    peak = rates.index(max(rates))
    assert len(rates) == 20 and peak < 3 and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.1 * config.optimizer.lr < 0.9 * config.optimizer.lr < max(rates)
    assert checkpoints(out / "checkpoints")[-1].name == "step-0000020"
    over = make_trainer(config, TARGET)
    over.resume()
    card = (out / "head" / "README.md").read_text()
    over.run()
    assert over.step == 20 and (out / "head" / "README.md").read_text() == card


def stop_at(trainer: Trainer, step: int) -> Callable[[], None]:
    """An export that is killed at a step."""

    def export() -> None:
        if trainer.step == step:
            raise KeyboardInterrupt

    return export


def test_some_files_are_seen_more_often(answers: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(answers.read_text().splitlines(keepends=True)[:4]))
    data = (str(answers), DataFile(str(other), times=3))
    trainer = make_trainer(recipe(answers, tmp_path, data=data, validation_rows=0), TARGET)
    seen = Counter(tuple(document.tokens.tolist()) for document in trainer.data.documents)
    assert sorted(seen.values()) == [1] * 36 + [4] * 4
    trainer.export()
    card = (tmp_path / "head" / "README.md").read_text()
    assert "| data: other.jsonl | 4 rows, each 3 times per pass |" in card


def test_validation_compiles_nothing_new(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **options: compile_layer(layer, backend="eager", **options)
    )
    trainer = make_trainer(recipe(answers, tmp_path, compile=True, validation_rows=1), TARGET)
    graphs = []
    for step in (trainer.train_step, trainer.validate, trainer.train_step):
        step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1


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


def curve(rank: int, world: int, answers: str, out: str, changes: dict[str, Any], result: str) -> None:
    """Losses of a run in two parts, the second from the checkpoint of the first."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=world)
    config = recipe(Path(answers), Path(out), **changes)
    first = make_trainer(config, TARGET)
    losses = [first.train_step().metrics().loss for _ in range(3)]
    first.save()
    if world > 1:
        dist.barrier()
    again = make_trainer(config, TARGET)
    assert again.resume() == 3
    losses += [again.validate().loss]
    losses += [again.train_step().metrics().loss for _ in range(2)]
    losses += [again.validate().loss]
    again.export()
    if rank == 0:
        Path(result).write_text(json.dumps(losses))
    if world > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize(("parallel", "optimizer"), [("ddp", "adamw"), ("fsdp", "adamw"), ("fsdp", "muon")])
def test_two_processes_give_the_curve_of_one_with_twice_the_accumulation(
    answers: Path, tmp_path: Path, parallel: str, optimizer: str
) -> None:
    def losses(name: str, world: int, **changes: Any) -> list[float]:
        result = tmp_path / f"{name}.json"
        changes |= {"optimizer": OptimizerConfig(kind=optimizer, lr=5e-3, clip=0.5)}  # type: ignore[arg-type]
        inputs = (world, str(answers), str(tmp_path / name), changes, str(result))
        if world == 1:
            curve(0, *inputs)
        else:
            spawn(curve, inputs, nprocs=world)
        return list(json.loads(result.read_text()))

    one = losses("one", 1, accumulate=4)
    two = losses("two", 2, accumulate=2, parallel=parallel, anchors_at_once=4)
    if optimizer == "muon":  # iterates in bf16
        assert two == pytest.approx(one, rel=1e-2)
        return
    assert two == pytest.approx(one, rel=1e-5)
    alone, shared = (load_head(tmp_path / name / "head", TARGET.config) for name in ("one", "two"))
    for name, value in alone.named_parameters():
        torch.testing.assert_close(shared.get_parameter(name), value, atol=1e-3, rtol=2e-2)


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


def test_more_anchors_take_more_passes_and_learn_the_same(answers: Path, tmp_path: Path) -> None:
    whole, parts = (make_trainer(recipe(answers, tmp_path, anchors_at_once=n), TARGET) for n in (8, 3))
    for _ in range(3):
        expected, found = whole.train_step(), parts.train_step()
        torch.testing.assert_close(torch.cat([x.flatten() for x in found]), torch.cat([x.flatten() for x in expected]))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, atol=1e-4, rtol=1e-3)


def test_a_run_reports_what_it_reached(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, list[tuple[float, int]]] = {}

    class Board:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            shown.setdefault(name, []).append((value, step))

        def flush(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    make_trainer(recipe(answers, tmp_path), TARGET, lambda head: {"chain": 1.5, "tree_64": 2.25}).run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    kinds = [(row["kind"], row["step"]) for row in rows]
    assert kinds == [("train", 1), ("train", 2), *[(k, 3) for k in KINDS], ("train", 4), ("train", 5)] + [
        (k, 6) for k in KINDS
    ]
    last = {row["kind"]: row for row in rows}
    assert last["validation"]["tree_64"] >= last["validation"]["chain"] - 0.5
    assert shown["train/loss"] == [(row["loss"], row["step"]) for row in rows if row["kind"] == "train"]
    assert [value for value, step in (shown[f"validation/hit_rate/{k}"][-1] for k in (1, 2, 3, 4))] == last[
        "validation"
    ]["hit_rate"]

    card = (tmp_path / "head" / "README.md").read_text()
    for expected in (
        "base_model: smollm2-135m-instruct",
        "license: apache-2.0",
        "| data: answers.jsonl | 40 rows |",
        "| conversations per pass | 36 |",
        "| steps | 6 |",
        "| loss | forward kl |",
        "| edge rank | 4 |",
        f"| validation, teacher-forced: loss | {last['validation']['loss']:.3f} |",
        f"| validation, teacher-forced: tree_64 | {last['validation']['tree_64']:.3f} |",
        "| decoding, tokens per round: tree_64 | 2.250 |",
        "| commit | ",
        "| command | `python ",
    ):
        assert expected in card
    assert str(tmp_path) not in card


def test_teacher_forced_trees_are_those_of_the_evaluation(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, steps=30), TARGET)
    for _ in range(30):
        trainer.train_step()
    assert trainer.validation is not None
    documents = list(trainer.validation.documents())
    score = score_head(TARGET, trainer.head, documents, ["64"], TreeConfig())
    assert trainer.tree_lengths() == pytest.approx({"tree_64": score.tokens_per_round["64"]})
    assert score.tokens_per_round["64"] > 1.3
    short = cut(documents[0], 5)
    assert int(short.written.sum()) == 5 and len(short.tokens) == 7


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
