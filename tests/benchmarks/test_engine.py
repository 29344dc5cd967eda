"""Checks of the engine hold on a tiny model, and fail where something is broken."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks import engine as check
from benchmarks import soak
from benchmarks.lossless import FreshPass, find_differences, readings
from jetspec.engine.engine import Engine
from jetspec.engine.kv_cache import KVCache
from jetspec.engine.runner import Launched
from jetspec.engine.scheduler import Scheduler
from jetspec.train.choices import SETTINGS
from jetspec.types import Request
from tests.benchmarks.tiny_bench import invoke
from tests.engine.tiny import VOCAB, tiny_decoder, tiny_head
from tests.rerun import replay_all

TARGET = tiny_decoder()
MODELS = check.Models(TARGET, tiny_head(TARGET), eos_tokens=frozenset({7}))
TOKENS = 20


def some_prompts(count: int, longest: int = 12) -> dict[str, list[int]]:
    draw = random.Random(5)
    return {f"p{i}": [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for i in range(count)}


PROMPTS = some_prompts(8)


def broken_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance_only(self: KVCache, row_B: torch.Tensor, batch: object, verdict: Any) -> None:
        self.length_R.index_add_(0, row_B, verdict.length_B + 1)

    monkeypatch.setattr(KVCache, "compact", advance_only)


@pytest.mark.parametrize("replays", [False, True])
def test_soak(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all is captured, and the host reads a round while the next one runs."""
    if replays:
        replay_all(monkeypatch)
    results = check.check_soak(MODELS, some_prompts(6, 30), batch=4, budget=8, tokens=30, rounds=80)
    assert results["correct"], results["problems"]
    assert results["rounds"] >= 80 and results["caches_compared"] > 10
    assert min(results[event] for event in ("finished", "cancelled", "preempted")) > 0
    assert results["greedy_different"] == results["sampled_different"] == results["filtered_different"] == 0


def leaking_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def leak(self: Scheduler, request: Request) -> None:
        preempt(self, request)
        self.cache.pool.allocate(1)

    monkeypatch.setattr(Scheduler, "preempt", leak)


def leaking_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every round."""
    publish, kept = Engine._publish, list[Launched]()

    def leak(self: Engine, launched: Launched, rows: Any) -> None:
        kept.append(launched)
        publish(self, launched, rows)

    monkeypatch.setattr(Engine, "_publish", leak)


def leaking_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    monkeypatch.setattr(soak, "resident_bytes", lambda: next(count) * soak.HOST_SLACK_BYTES // 8)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (broken_compaction, "differs from the plain text"),
        (leaking_pages, "free, cached or held"),
        (leaking_objects, "more of Launched live than at rest"),
        (leaking_bytes, "bytes of resident memory"),
    ],
)
def test_the_soak_can_fail(damage: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)
    results = check.check_soak(MODELS, some_prompts(6, 30), batch=4, budget=8, tokens=24, rounds=30)
    assert not results["correct"] and any(problem in found for found in results["problems"])


@pytest.mark.gpu
def test_the_soak_on_a_gpu() -> None:
    target = tiny_decoder().cuda()
    models = check.Models(target, tiny_head(target).cuda())
    results = check.check_soak(models, some_prompts(6, 30), batch=4, budget=8, tokens=24, rounds=400)
    assert results["correct"], results["problems"]


# -- differences and noise


def test_a_difference_is_judged_by_a_fresh_pass_over_the_common_prefix() -> None:
    fresh = FreshPass(TARGET, None, 64)
    logits_V = fresh.logits([1, 2, 3, 4])[0]
    best, second, *_, worst = logits_V.argsort(descending=True).tolist()
    prompts, plain = {"x": [1, 2]}, {"x": [3, 4, best, 9]}
    (near,) = find_differences(prompts, plain, {"x": [3, 4, second, 8]}, [fresh.logits], 1e9)
    assert (near.place, near.plain, near.other) == (2, best, second)
    assert near.gap == pytest.approx(float(logits_V[best] - logits_V[second]))
    assert near.gap is not None and near.tie
    for limit, tie in ((near.gap, True), (near.gap * 0.99, False)):
        assert find_differences(prompts, plain, {"x": [3, 4, second]}, [fresh.logits], limit)[0].tie == tie
    (far,) = find_differences(prompts, {"x": [3, 4, second]}, {"x": [3, 4, worst]}, readings(fresh), 0.0)
    assert far.gap == pytest.approx(float(logits_V[best] - logits_V[worst])) == pytest.approx(far.least, abs=1e-4)
    (shorter,) = find_differences(prompts, plain, {"x": [3, 4]}, [fresh.logits], 1e9)
    assert shorter.gap is None and not shorter.tie
    assert find_differences(prompts, plain, plain, [fresh.logits], 1e9) == []


# -- the command


class Words:
    """Letters as tokens, and tokens as letters. Each message ends with a 0."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [token for message in messages for token in (*(ord(c) % VOCAB for c in message["content"]), 0)]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(VOCAB + token) for token in tokens)


@pytest.fixture
def tiny_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Prompts in a folder, and tiny models in place of any that are loaded."""
    target = SimpleNamespace(decoder=TARGET, tokenizer=Words(), eos_tokens=frozenset())
    monkeypatch.setattr(check, "load_target", lambda *_: target)
    monkeypatch.setattr(check, "load_head", lambda *_: MODELS.head)
    for name in check.SAMPLING_SETS:
        turns = ["w" * (check.LONGEST_PROMPT + 1), *(f"{name} {i} of some words" for i in range(5))]
        lines = [json.dumps({"id": f"{name}-{i}", "turns": [turn]}) for i, turn in enumerate(turns)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SETTINGS", SETTINGS[2:3])


def test_sampled_texts_are_plain_ones_in_every_setting(few_settings: None) -> None:
    results = check.check_sampling(MODELS, check.first(PROMPTS, 2), [4], 8, repeats=2)
    rows = pd.DataFrame(results["rows"]).set_index(["setting", "budget", "choice_model"])
    assert results["correct"] and len(rows) == 3 * 2
    assert (rows["same_text"] == rows["total"]).all() and rows.loc[("greedy", 1, False)].speedup == 1
    assert (rows.tokens_per_round >= 1).all() and (rows.tokens_per_s > 0).all()


@pytest.mark.parametrize(
    "words",
    [
        "engine sampling --tokens 8 --prompts 1 --budgets 4 --repeats 1",
        "soak --tokens 30 --prompts 7 --batch 3 --budget 8 --rounds 50",
    ],
    ids=lambda words: words.removeprefix("engine ").split()[0],
)
def test_a_command_writes_a_record(words: str, tiny_files: Path, few_settings: None) -> None:
    out = tiny_files / "made" / "record.json"
    paths = ["--head", "folder/some-head", "--data", tiny_files, "--out", out]
    done = invoke(*words.split(), *paths, "--dtypes", "float32", "--device", "cpu")
    record = json.loads(out.read_text())
    result = record["results"]["float32"]
    assert words.removeprefix("engine ").startswith(record["check"]) and record["head"] == "some-head"
    assert record["hardware"] and f"--tokens {record['max_tokens']}" in words and result["correct"], result
    assert record["holds"] and done.exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data nowhere", "nowhere"),
        ("--data empty", "empty"),
        ("--budget 1", "--budget"),
        ("--shortlist 3", "shortlist"),
        ("--device abacus", "abacus"),
        ("--dtypes int3", "int3"),
        ("--out file/record.json", "file/record.json"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(
    words: str, said: str, tiny_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_files)
    monkeypatch.setattr(check, "load_target", lambda *_: pytest.fail("loaded"))
    Path("empty").mkdir()
    Path("file").touch()
    done = invoke("soak", "--head", "h", "--data", ".", "--out", "record.json", *words.split())
    assert done.exit_code == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_result_is_kept_where_the_next_precision_fails(tiny_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_in_32_bits(models: check.Models, *_: Any) -> dict[str, Any]:
        if failing:
            raise MemoryError
        failing.append(True)
        return {"correct": True}

    failing: list[bool] = []
    monkeypatch.setattr(check, "check_soak", fail_in_32_bits)
    out = tiny_files / "record.json"
    words = ["soak", "--head", "h", "--data", tiny_files, "--out", out, "--device", "cpu", "--prompts", 3]
    assert invoke(*words, "--dtypes", "bfloat16,float32").exit_code == 2
    record = json.loads(out.read_text())
    assert record["results"] == {"bfloat16": {"correct": True}}
    assert record["unfinished"] == ["float32"] and not record["holds"]
    failing.clear()
    assert invoke(*words, "--dtypes", "bfloat16").exit_code == 0
    record = json.loads(out.read_text())
    assert "unfinished" not in record and record["holds"]


def test_long_prompts_are_left_out(tiny_files: Path) -> None:
    files, count = sorted(tiny_files.glob("*.jsonl")), 5 * len(check.SAMPLING_SETS)
    drawn = check.draw(files, count, Words())  # type: ignore[arg-type]
    assert len(drawn) == count and not any(name.endswith("-0") for name in drawn)
    assert list(check.draw(files, 4, Words())) == list(drawn)[:4]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{count} conversations"):
        check.draw(files, count + 1, Words())  # type: ignore[arg-type]


@pytest.mark.parametrize("gone", ["engine speed --head h", "engine batches", "engine strict -x", "cpu-speed --out o"])
def test_commands_that_left_name_a_recipe(gone: str) -> None:
    done = invoke(*gone.split())
    (recipe,) = re.findall(r"run (benchmarks/recipes/\w+.yaml)", done.stderr)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and Path(recipe).exists()
