"""A run learns, resumes at any step, and does not depend on the number of processes."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter as time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.multiprocessing.spawn import spawn

from jetspec.commands.train import asks_of, show_time, train_recipe
from jetspec.commands.train import score_head as decode_with
from jetspec.config import TreeConfig
from jetspec.models.head_format import load_head
from jetspec.models.heads import Head
from jetspec.record import current_commit
from jetspec.train.card import read_card
from jetspec.train.checkpoint import checkpoints, claimed
from jetspec.train.config import DataFile, LossConfig, OptimizerConfig
from jetspec.train.evaluate import score_head
from jetspec.train.log import RunLog
from jetspec.train.loss import DraftLoss
from jetspec.train.run import ROWS_FILE, foreign, make_trainer
from jetspec.train.trainer import Trainer, truncated
from jetspec.types import SamplingParams
from tests.engine.tiny import make_engine, run
from tests.train.tiny_model import write_model
from tests.train.tiny_run import SHAPE, TARGET, card_of, log_of, recipe, weights, write_answers, write_rows

KINDS = ("train", "validation", "decode")
PUBLISHED = [("export", 3), ("export", 6), ("score", 3), ("score", 6)]
"""Parts of a run after a checkpoint, and their steps."""
NO_REPORTS = '[1]\n"step"\nnull\n{}\n{"kind": "train", "step": "1"}\n'
"""Lines of JSON that are not reports of a step."""


def test_training_raises_accepted_tokens(tmp_path: Path) -> None:
    answers = write_answers(tmp_path / "answers.jsonl", 120)
    once: dict[str, Any] = {"steps": 60, "save_every": 60, "validate_every": 30}
    trainer = make_trainer(recipe(answers, tmp_path, **once, validation_rows=4), TARGET)
    before = trainer.validate()
    trainer.run()
    after = trainer.validate()
    assert after.loss < 0.7 * before.loss and after.chain > before.chain + 0.3
    head = load_head(tmp_path / "head", TARGET.config, dtype=torch.float32).requires_grad_(False)
    tree = TreeConfig(budget=5, width=1)
    prompts = [[5 + i, 6] for i in range(8)]
    done = run(make_engine(TARGET, "head", head, tree), prompts, SamplingParams(max_tokens=24))
    assert sum(c.stats.tokens_per_round for c in done) / 8 > 1.2


def interrupt(trainer: Trainer, part: str, step: int) -> None:
    """Ends a part of the run at a step, like Ctrl-C."""
    run_part = getattr(trainer, part)

    def interrupted(*args: Any) -> Any:
        if trainer.step == step:
            raise KeyboardInterrupt
        return run_part(*args)

    setattr(trainer, part, interrupted)


@pytest.mark.parametrize(
    ("part", "step", "optimizer"),
    [("train_step", 4, "adamw"), ("train_step", 5, "muon"), *((part, n, "adamw") for part, n in PUBLISHED)],
)
def test_killed_run_ends_like_a_whole_one(answers: Path, tmp_path: Path, part: str, step: int, optimizer: Any) -> None:
    """Steps after the last checkpoint are lost. Its head and its scores are made if they are missing."""
    scored = list[int]()

    def start(out: Path) -> Trainer:
        def score(head: Head) -> dict[str, float]:
            scored.append(trainer.step)
            return {"chain": float(head.fc.weight.sum())}

        config = recipe(answers, out, optimizer=OptimizerConfig(kind=optimizer, lr=5e-3))
        trainer = make_trainer(config, TARGET, score)
        return trainer

    whole, killed, again, done = map(start, (tmp_path / "whole", *[tmp_path / "part"] * 3))
    whole.run()
    interrupt(killed, part, step)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert again.resume() == step // 3 * 3
    again.run()
    assert done.resume() == 6
    done.run()
    assert scored == [3, 6, 3, 6], "each checkpoint of both runs is scored once, and a finished one not again"
    torch.testing.assert_close(weights(done), weights(whole), rtol=0, atol=0)
    expected, found = (load_head(tmp_path / out / "head").state_dict() for out in ("whole", "part"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert again.results.keys() == set(KINDS)
    for kind in ("validation", "decode"):
        assert again.results[kind] == whole.results[kind]
        assert [row["step"] for row in log_of(tmp_path / "part") if row["kind"] == kind] == [3, 6]
    chain = f"| decoding, tokens per round: chain | {whole.results['decode']['chain']:.3f} |"
    assert "| steps | 6 |" in card_of(tmp_path / "part") and chain in card_of(tmp_path / "part")


def test_every_checkpoint_exports_a_head_before_it_is_scored(answers: Path, tmp_path: Path) -> None:
    def score(head: Head) -> dict[str, float]:
        exported = load_head(tmp_path / "head", TARGET.config)
        for name, value in weights(trainer).items():
            assert torch.equal(head.get_parameter(name), value), name
            assert torch.equal(exported.get_parameter(name), value.bfloat16()), name
        return {"chain": 1.5}

    trainer = make_trainer(recipe(answers, tmp_path), TARGET, score)
    for step in (1, 2):
        trainer.train_step()
        trainer.save()
        assert f"| steps | {step} |" in card_of(tmp_path)
        assert "tokens per round: chain | 1.500 |" in card_of(tmp_path)
    assert load_head(tmp_path / "head").fc.weight.dtype == torch.bfloat16
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "head"}


def test_time_limit_ends_run_and_schedule(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances a second per reading, once per step. The second part resumes the first."""
    seconds = itertools.count()
    monkeypatch.setattr("jetspec.train.log.time", SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time))
    out = tmp_path / "out"
    config = recipe(answers, out, steps=1000, minutes=20 / 60, save_every=5)
    first = make_trainer(config, TARGET)
    interrupt(first, "export", 10)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again = make_trainer(config, TARGET)
    assert again.resume() == 10 and again.limit.used_s == 10
    again.run()
    assert again.step == 20 and (out / "head" / "README.md").exists()
    rows = log_of(out)
    rates = [row["lr"] for row in rows if row["kind"] == "train"]
    peak = rates.index(max(rates))
    assert len(rates) == 20 and peak < 3 and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.1 * config.optimizer.lr < 0.9 * config.optimizer.lr < max(rates)
    assert checkpoints(out / "checkpoints")[-1].name == "step-0000020"
    over = make_trainer(config, TARGET)
    over.resume()
    card = card_of(out)
    over.run()
    assert over.step == 20 and card_of(out) == card


def test_files_may_be_repeated(answers: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(answers.read_text().splitlines(keepends=True)[:4]))
    data = (str(answers), DataFile(str(other), times=3))
    trainer = make_trainer(recipe(answers, tmp_path, data=data, validation_rows=0), TARGET)
    seen = Counter(tuple(document.tokens.tolist()) for document in trainer.data.documents)
    assert sorted(seen.values()) == [1] * 36 + [4] * 4
    trainer.export()
    card = card_of(tmp_path)
    assert "| data: other.jsonl | 4 rows, each 3 times per pass |" in card


def test_validation_compiles_nothing_new(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters  # here, as other tests start processes that import this module

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


def test_old_checkpoints_are_removed_and_incomplete_ones_ignored(answers: Path, tmp_path: Path) -> None:
    trainer = make_trainer(recipe(answers, tmp_path, save_every=1, keep=2), TARGET)
    trainer.run()
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoints(folder)] == ["step-0000005", "step-0000006"]
    (folder / ".step-0000009.1.new").mkdir()
    assert make_trainer(recipe(answers, tmp_path), TARGET).resume() == 6


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("state.safetensors", "short", ""),
        ("state.json", "", "Expecting value"),
        ("state.json", "[]", "list"),
        ("state.json", "{}", r"state\.json lacks step, optimizers, config, time"),
        ("state.json", '{"step": 1, "optimizers": [], "config": null, "time": {}}', r"state\.json lacks config"),
    ],
)
def test_damaged_checkpoint_is_named(
    answers: Path, one_step: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints" / "step-0000001"
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{folder} is damaged \(.*{said}"):
        make_trainer(recipe(answers, tmp_path), TARGET).resume()


def test_full_disk_leaves_no_checkpoint(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(recipe(answers, tmp_path), TARGET)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("jetspec.models.tensor_files.save_file", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save()
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3, 4])])
def test_log_drops_later_steps(step: int, kept: list[int], tmp_path: Path) -> None:
    before = RunLog(tmp_path)
    for number in range(1, 5):
        before.write("train", number, {"loss": 1.0})
    with before.path.open("a") as file:
        file.write(f'{NO_REPORTS}{{"kind": "tra')
    RunLog(tmp_path, step).write("train", step + 1, {"loss": 0.5})
    rows = [json.loads(line) for line in before.path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*kept, step + 1] and rows[-1]["loss"] == 0.5


def test_other_data_is_refused_on_resume(answers: Path, tmp_path: Path) -> None:
    lines = answers.read_text().splitlines(keepends=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(lines))
    config = recipe(data, tmp_path / "out")
    make_trainer(config, TARGET).save()
    assert make_trainer(config, TARGET).resume() == 0
    for changed in (lines[:-2], lines[::-1]):
        data.write_text("".join(changed))
        with pytest.raises(ValueError, match="conversations"):
            make_trainer(config, TARGET).resume()


def test_answers_of_another_model_are_reported(tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    assert foreign(str(data), "mine") is None
    Path(f"{data}.meta.json").write_text(json.dumps({"settings": {"model": "other"}}))
    assert "answered by other, not by mine" in (foreign(str(data), "/somewhere/mine") or "")
    assert foreign(str(data), "/somewhere/other") is None


def test_scores_are_compared_at_one_step(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Covers a checkpoint without validation."""
    config = recipe(answers, tmp_path, steps=4, validate_every=3, save_every=2, validation_rows=2)
    trainer = make_trainer(config, TARGET, lambda head: {"chain": 1.0, "tree_64": 9.0})
    lengths = iter([2.0, 3.0, 4.0])
    trainer.tree_lengths = lambda: {"tree_64": next(lengths)}  # type: ignore[method-assign]
    trainer.run()
    said = [line for line in capsys.readouterr().out.splitlines() if "teacher-forced" in line]
    for line, step, forced, gap in zip(said, (2, 4), ("2.00", "4.00"), ("+7.00", "+5.00"), strict=True):
        assert f"step {step}:" in line and all(word in line for word in ("chain 1.00", "tree_64 9.00", forced, gap))


@pytest.fixture(scope="module")
def one_step(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run after one step."""
    out = tmp_path_factory.mktemp("one_step")
    trainer = make_trainer(recipe(answers, out), TARGET)
    trainer.train_step()
    trainer.save()
    return out


OTHER_RUNS: dict[str, dict[str, Any]] = {
    "head.block_size": {"head": replace(SHAPE, block_size=4)},
    "model": {"model": "other"},
    "seed": {"seed": 1, "anchors": 4},
    "loss.gamma": {"loss": LossConfig(gamma=3.0)},
    "rows x accumulate x processes": {"accumulate": 2},
    "dtype": {"dtype": "auto"},
    "--set steps=9": {"steps": 9},
}


@pytest.mark.parametrize("name", [*OTHER_RUNS, "data", "start .* and train_only_edge"])
def test_another_recipe_is_refused_on_resume(name: str, answers: Path, one_step: Path) -> None:
    changes = OTHER_RUNS.get(name, {"start": str(one_step / "head"), "train_only_edge": True})
    changes = {"data": (DataFile(str(answers), times=2),)} if name == "data" else changes
    trainer = make_trainer(recipe(answers, one_step, **changes), TARGET)
    before = weights(trainer)
    with pytest.raises(ValueError, match=name):
        trainer.resume()
    assert all(torch.equal(value, before[key]) for key, value in weights(trainer).items())


def test_settings_without_effect_on_the_result_may_change(answers: Path, one_step: Path) -> None:
    changes = {"minutes": 1.0, "log_every": 2, "validate_every": 2, "save_every": 2, "keep": 1}
    same = {"rows": 1, "accumulate": 2, "anchors_at_once": 3, "parallel": "fsdp", "compile": False, "score": False}
    data = (DataFile(str(answers)),)
    assert make_trainer(recipe(answers, one_step, data=data, **changes, **same), TARGET).resume() == 1


def test_another_length_is_taken_from_an_override(
    answers: Path, one_step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_trainer(recipe(answers, one_step, steps=9), TARGET).resume(["steps"]) == 1
    said = capsys.readouterr().err
    assert "9" in said and "learning rate" in said and said.count("\n") == 1
    assert make_trainer(recipe(answers, one_step), TARGET).resume(["steps"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("saved", "every", "said"), [(False, 100, "weights are not finite at step 3"), (True, 1, "nan at step 2.*--fresh")]
)
def test_what_is_not_finite_is_not_saved(answers: Path, tmp_path: Path, saved: bool, every: int, said: str) -> None:
    """After a checkpoint the message names `--fresh`."""
    trainer = make_trainer(recipe(answers, tmp_path, log_every=every, validate_every=100), TARGET)
    if saved:
        trainer.train_step()
        trainer.save()
    with torch.no_grad():
        trainer.head.fc.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=said):
        trainer.run()
    assert (tmp_path / "head").exists() == saved
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-0000001"] * saved


def write_recipe(folder: Path, answers: Path, more: str = "") -> tuple[Path, Path]:
    """A recipe file, and its output folder. It names a model that does not exist."""
    out, file = folder / "out", folder / "recipe.yaml"
    file.write_text(f"model: {folder / 'no such model'}\ndata: [{answers}{more}]\nout: {out}\n")
    return file, out


def test_folder_holds_one_run_at_a_time(answers: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "recipe.yaml"
    file.write_text(f"data: [{answers}]\nout: {out}\n")
    with claimed(out), pytest.raises(ValueError, match=str(out)):
        train_recipe(file, (), fresh=True, dry_run=False)
    for left in (out / "checkpoints" / ".writing-7", out / ".head.7.new", out / ".head.7.old", out / "head"):
        left.mkdir(parents=True)
    with claimed(out):
        assert sorted(path.name for path in out.rglob("*")) == [".lock", "checkpoints", "head"]


def test_unwritable_head_is_reported_before_the_load(answers: Path, tmp_path: Path) -> None:
    file, out = write_recipe(tmp_path, answers)
    (out / "head").mkdir(parents=True)
    (out / "head" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes\.txt"):
        train_recipe(file, (), fresh=False, dry_run=False)


@pytest.mark.parametrize("name", ["none.jsonl", "folder"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_missing_data_is_reported_before_the_load(answers: Path, tmp_path: Path, name: str, dry_run: bool) -> None:
    data = tmp_path / name
    (tmp_path / "folder").mkdir()
    file, out = write_recipe(tmp_path, answers, f", {{path: {data}, times: 2}}")
    with pytest.raises(ValueError, match=f"^data names {data}"):
        train_recipe(file, (), fresh=False, dry_run=dry_run)
    assert not out.exists()


def test_dry_run_times_validations_and_checkpoints(
    answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(answers, tmp_path, steps=40, validate_every=10, save_every=20, validation_rows=2)
    trainer = make_trainer(config, TARGET, lambda head: {})
    monkeypatch.setattr("jetspec.commands.train.seconds_of", lambda *_: 30.0)
    show_time(config, trainer)
    said = " ".join(capsys.readouterr().err.split())
    assert "23.0 minutes" in said, "40 + 4 + 2 half minutes"
    show_time(replace(config, minutes=9.0), make_trainer(replace(config, minutes=9.0), TARGET))
    assert "9.0 minutes" in " ".join(capsys.readouterr().err.split()), "of the limit"


def test_command_trains_and_resumes(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, out, file = write_model(tmp_path / "model"), tmp_path / "out", tmp_path / "recipe.yaml"
    head = {"num_layers": 1, "block_size": 4, "tap_layers": [0, 1], "mask_token": 200}
    sizes = {"steps": 4, "rows": 2, "row_len": 20, "anchors": 4, "validation_rows": 1, "save_every": 1}
    paths = {"model": str(model), "data": [str(answers)], "out": str(out)}
    file.write_text(json.dumps({**paths, "head": head, **sizes, "score": False, "dtype": "float32", "device": "cpu"}))

    train_recipe(file, (), fresh=False, dry_run=True)
    said = capfd.readouterr().err
    assert "0.0 minutes for what is left. Nothing was written." in said
    assert "the processor, no GPU, float32" in said
    assert not out.exists()

    step = Trainer.train_step

    def interrupted(trainer: Trainer) -> DraftLoss:
        if trainer.step == 2:
            raise KeyboardInterrupt
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_recipe(file, (), fresh=False, dry_run=False)
    assert re.search(r"stopped at step 2.* checkpoint .*step 2", capfd.readouterr().err, re.DOTALL)
    monkeypatch.undo()
    train_recipe(file, (), fresh=False, dry_run=False)
    assert "| steps | 4 |" in card_of(out)
    assert f"all of them are listed in {out / ROWS_FILE}\n" in capfd.readouterr().err
    assert len((out / ROWS_FILE).read_text().splitlines()) == 40


def test_card_names_a_licence_for_the_default_target_only(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/jetspec", "train", "a recipe.yaml"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    trainer = make_trainer(recipe(answers, tmp_path, model="someone/else"), TARGET)
    trainer.limit.used_s = 90
    trainer.export()
    card = card_of(tmp_path)
    assert "icense" not in card and "base_model: someone/else" in card
    assert read_card(card, "Origin")["command"] == "jetspec train 'a recipe.yaml'"
    assert read_card(card, "Origin")["commit"] == (current_commit() or "unknown")
    assert "| command | `jetspec train 'a recipe.yaml'` |" in card and "| time | 1.5 minutes |" in card


def train_in_two_parts(answers: Path, out: Path, changes: dict[str, Any]) -> list[float]:
    """Losses of a run that is resumed once."""
    config = recipe(answers, out, **changes)
    first = make_trainer(config, TARGET)
    losses = [first.train_step().metrics().loss for _ in range(3)]
    first.save()
    if dist.is_initialized():
        dist.barrier()
    again = make_trainer(config, TARGET)
    assert again.resume() == 3
    losses += [again.validate().loss]
    losses += [again.train_step().metrics().loss for _ in range(2)]
    losses += [again.validate().loss]
    again.run()  # to the end, with a validation before the last save
    assert again.step == config.steps
    return losses


def train_as_one_of_two(rank: int, answers: Path, runs: dict[Path, dict[str, Any]]) -> None:
    """Writes the losses of every run to its folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{answers}.meet", rank=rank, world_size=2)
    for out, changes in runs.items():
        losses = train_in_two_parts(answers, out, changes)
        if rank == 0:
            (out / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def test_two_processes_equal_one_with_twice_the_accumulation(answers: Path, tmp_path: Path) -> None:
    """All runs share two processes, whose start takes longer than the training."""
    optimizers = {kind: OptimizerConfig(kind=kind, lr=5e-3, clip=0.5) for kind in ("adamw", "muon")}
    ways = [("ddp", "adamw"), ("fsdp", "adamw"), ("fsdp", "muon")]
    both: dict[str, Any] = {"accumulate": 2, "anchors_at_once": 4}
    runs = {tmp_path / f"{way}-{kind}": {**both, "parallel": way, "optimizer": optimizers[kind]} for way, kind in ways}
    spawn(train_as_one_of_two, (answers, runs), nprocs=2)
    one = {
        kind: train_in_two_parts(answers, tmp_path / kind, {"accumulate": 4, "optimizer": optimizer})
        for kind, optimizer in optimizers.items()
    }
    for way, kind in ways:
        out = tmp_path / f"{way}-{kind}"
        two = json.loads((out / "losses.json").read_text())
        assert two == pytest.approx(one[kind], rel=1e-2 if kind == "muon" else 1e-5), out.name  # muon iterates in bf16
        if kind == "adamw":
            alone, shared = (load_head(folder / "head", TARGET.config) for folder in (tmp_path / kind, out))
            for name, value in alone.named_parameters():
                torch.testing.assert_close(shared.get_parameter(name), value, atol=1e-3, rtol=2e-2)


def test_train_only_edge_freezes_the_rest(answers: Path, tmp_path: Path) -> None:
    make_trainer(recipe(answers, tmp_path), TARGET).export()
    trainer = make_trainer(recipe(answers, tmp_path, start=str(tmp_path / "head"), train_only_edge=True), TARGET)
    before = weights(trainer)
    for _ in range(3):
        trainer.train_step()
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert changed == {"edge.predecessor", "edge.successor", "edge.gate.weight"}


LEARNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DSpark": ({"shifted": True, "causal": False, "edge_gate": "none"}, {"kind": "reverse_kl", "temperature": 2.0}),
    "DFlash2": ({"causal": False, "edge_gate": "alone", "conv_taps": 2}, {"dpace": 0.5}),
    "JetSpec": ({}, {"kind": "sft", "gamma": 3.0}),
}
"""Shapes of heads, and losses."""


@pytest.mark.parametrize("name", LEARNING)
def test_every_kind_of_head_and_loss_learns(answers: Path, tmp_path: Path, name: str) -> None:
    """Every weight changes, the loss falls, and the written head drafts the target's text."""
    shape, loss = LEARNING[name]
    once: dict[str, Any] = {"steps": 40, "save_every": 40, "validate_every": 40}
    config = recipe(answers, tmp_path, head=replace(SHAPE, **shape), loss=LossConfig(**loss), **once)
    trainer = make_trainer(config, TARGET)
    start, before = weights(trainer), trainer.validate().loss
    trainer.run()
    assert trainer.validate().loss < before
    assert not [name for name, value in weights(trainer).items() if torch.equal(value, start[name])]
    head = load_head(tmp_path / "head", TARGET.config, dtype=torch.float32)
    prompts, sampling = [[5 + i, 6] for i in range(4)], SamplingParams(max_tokens=24)
    drafted = run(make_engine(TARGET, "head", head, TreeConfig(budget=8)), prompts, sampling)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in run(make_engine(TARGET), prompts, sampling)]


def test_groups_of_anchors_give_the_same_step(answers: Path, tmp_path: Path) -> None:
    whole, parts = (make_trainer(recipe(answers, tmp_path, anchors_at_once=n), TARGET) for n in (8, 3))
    for _ in range(3):
        expected, found = whole.train_step(), parts.train_step()
        sums, others = (torch.cat([x.flatten() for x in part]) for part in (expected, found))
        torch.testing.assert_close(others, sums, atol=1e-6, rtol=1e-6)  # float32 sums in another order
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, atol=1e-4, rtol=1e-3)


def test_reports_and_card_hold_the_results(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, list[tuple[float, int]]] = {}

    class Board:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            shown.setdefault(name, []).append((value, step))

        def flush(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    make_trainer(recipe(answers, tmp_path), TARGET, lambda head: {"chain": 1.5, "tree_64": 2.25}).run()
    rows = log_of(tmp_path)
    expected_rows = [(kind, step) for step in range(1, 7) for kind in (KINDS if step % 3 == 0 else KINDS[:1])]
    assert [(row["kind"], row["step"]) for row in rows] == expected_rows
    last = {row["kind"]: row for row in rows}
    assert last["validation"]["tree_64"] >= last["validation"]["chain"] - 0.5
    assert shown["train/loss"] == [(row["loss"], row["step"]) for row in rows if row["kind"] == "train"]
    assert [shown[f"validation/hit_rate/{k}"][-1][0] for k in (1, 2, 3, 4)] == last["validation"]["hit_rate"]

    card = card_of(tmp_path)
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
        "| command | `",
    ):
        assert expected in card
    assert str(tmp_path) not in card


def test_decoding_and_teacher_forcing_use_the_same_documents(answers: Path, tmp_path: Path) -> None:
    """Both exclude sampled text. The trees of a validation are those of the evaluation."""
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    rng = random.Random(0)
    for row in rows[::2]:
        row["token_ids"][2:] = rng.choices(range(5, 45), k=24)
    mixed = write_rows(tmp_path / "mixed.jsonl", rows)
    trainer = make_trainer(recipe(mixed, tmp_path / "run", steps=30, validation_rows=6), TARGET)
    for _ in range(30):
        trainer.train_step()
    assert trainer.validation is not None
    documents = list(trainer.validation.documents())
    assert 0 < len(trainer.greedy) < len(documents)
    written = {tuple(row["token_ids"]) for row in rows[1::2]}
    assert {tuple(document.tokens.tolist()) for document in trainer.greedy} <= written
    forced = score_head(TARGET, trainer.head, trainer.greedy, ["64"], TreeConfig()).tokens_per_round["64"]
    target = SimpleNamespace(decoder=TARGET, eos_tokens=frozenset())
    decoded = decode_with(target, trainer.head, asks_of(trainer.decoded_documents))  # type: ignore[arg-type]
    assert trainer.tree_lengths()["tree_64"] == pytest.approx(forced) == decoded["tree_64"] > 1.2
    del trainer.decoded_documents
    trainer.greedy = []
    assert len(asks_of(trainer.decoded_documents)) == min(len(documents), 8), "any if none are greedy"
    short = truncated(documents[0], 5)
    assert int(short.written.sum()) == 5 and len(short.tokens) == 7


def test_passes_are_freed_after_backward(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the number of groups."""
    trainer = make_trainer(recipe(answers, tmp_path, anchors=8, anchors_at_once=2), TARGET)
    draft = trainer.passes._draft
    seen: list[weakref.ref[torch.Tensor]] = []

    def watched(*args: Any) -> DraftLoss:
        assert all(old() is None for old in seen)
        part = draft(*args)
        seen.append(weakref.ref(part.loss_sum))
        return part

    monkeypatch.setattr(trainer.passes, "_draft", watched)
    trainer.train_step()
    assert len(seen) == 4
