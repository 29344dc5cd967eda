"""Checks of the engine hold on a tiny model, and fail where something is broken."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import engine as check
from benchmarks import lossless, soak
from benchmarks.lossless import READINGS, FreshPass, Texts, find_differences, readings
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


def test_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is captured before it is timed, or it would decode all prompts again."""
    replay_all(monkeypatch)
    timed, decode = Counter[str](), check.decode

    def noted(*args: Any) -> check.Decoded:
        timed[args[-1]] += 1
        return decode(*args)

    sets: dict[str, Texts] = {"short": check.first(PROMPTS, 3), "long": {"x": [5] * 90, "y": [6] * 150}}
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with monkeypatch.context() as patch:
        patch.setattr(check, "decode", noted)
        began = time.perf_counter()
        results = check.check_speed(MODELS, sets, [4, 16], TOKENS, LlamaForCausalLM(config).eval(), 2)
    cells = list(product((1, 4, 16), sets))
    labels = {f"{name}, budget {budget}" for budget, name in cells}
    assert {label: timed[label] for label in labels} == dict.fromkeys(labels, 1)
    assert results["correct"] and results["transformers_prompts"] == 2
    assert [(run["budget"], run["set"]) for run in results["runs"]] == cells
    for run in results["runs"]:
        assert run["tokens_per_s"] > 0 and run["different"] == 0
        assert run["tokens_per_round"] == 1 if run["budget"] == 1 else run["tokens_per_round"] >= 1
        least, most = run["transformers_range"]
        assert (TOKENS - 1) / (time.perf_counter() - began) < least <= run["transformers_tokens_per_s"] <= most
        assert run["speedup_over_transformers"] * run["transformers_tokens_per_s"] == pytest.approx(run["tokens_per_s"])
    assert results["noise"]["trees"] < 1e-4 > results["noise"]["steps"]


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "STEADY_S", 0.0)
    trees = [check.Tree.read(word) for word in ("8", "8:2", "1")]
    results = check.check_batches(MODELS, PROMPTS, [1, 2, 4], trees, TOKENS, waves=2)
    assert results["correct"] and set(results["best_speedup"]) == {1, 2, 4}
    cells = [(run["budget"], run["depth"], run["batch"]) for run in results["runs"]]
    assert cells == [(*tree, batch) for tree in ((1, None), (8, None), (8, 2)) for batch in (1, 2, 4)]
    assert all(run["tokens_per_round"] <= 3 for run in results["runs"] if run["depth"])
    assert all(run["different"] == 0 and run["tokens_per_s"] > 0 for run in results["runs"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_are_measured_on_plain_texts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In 16 bits a place is read several times, in 32 once: there a gap is what it is."""
    monkeypatch.setattr(check, "NOISE_TEXTS", 4)
    monkeypatch.setattr(lossless, "NOISE_TOKENS", 8)
    models = check.Models(tiny_decoder().to(dtype), tiny_head(TARGET).to(dtype))
    plain = check.decode(models.engine(1, check.engine_config(PROMPTS, TOKENS, 4)), PROMPTS, TOKENS, 4).texts
    ties = check.Ties.measure(models, PROMPTS, plain, 8)
    assert ties.noise.positions == sum(len(text[:8]) for text in list(plain.values())[::2])
    is_exact = dtype == torch.float32
    assert len(ties.judges) == (1 if is_exact else 1 + READINGS) and is_exact == (ties.limit == check.STRICT_TIE)
    assert is_exact or ties.limit == max(ties.noise.steps, ties.noise.trees) > 0


def test_strict_in_16_bits_notices_a_broken_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise of its own excuses an engine."""
    broken_compaction(monkeypatch)
    target = tiny_decoder().to(torch.bfloat16)
    models = check.Models(target, tiny_head(target).to(torch.bfloat16))
    results = check.check_strict(models, PROMPTS, batch=4, budget=12, tokens=TOKENS)
    assert not results["correct"] and results["mistakes"] and results["widest_gap"] > results["tie_limit"]


@pytest.mark.parametrize("replays", [False, True])
def test_soak(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all is captured, and the host reads a round while the next one runs."""
    if replays:
        replay_all(monkeypatch)
    results = check.check_soak(MODELS, some_prompts(6, 30), batch=4, budget=8, tokens=30, rounds=120)
    assert results["correct"], results["problems"]
    assert results["rounds"] >= 120 and results["caches_compared"] > 10
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
def test_all_of_it_on_a_gpu() -> None:
    target = tiny_decoder().cuda()
    models = check.Models(target, tiny_head(target).cuda())
    assert check.check_strict(models, PROMPTS, batch=4, budget=12, tokens=TOKENS)["correct"]
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
    for name in {*check.SPEED_SETS, *check.SAMPLING_SETS}:
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
        "engine speed --tokens 8 --prompts 2 --budgets 4 --other-prompts 0",
        "engine batches --tokens 8 --batches 1,2 --trees 4 --waves 2",
        "engine strict --tokens 8 --prompts 7 --batch 3 --budget 4",
        "engine sampling --tokens 8 --prompts 1 --budgets 4 --repeats 1",
        "soak --tokens 30 --prompts 7 --batch 3 --budget 8 --rounds 80",
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
    assert record["holds"] == result.get("faster", True) == (done.exit_code == 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strict --data nowhere", "nowhere"),
        ("strict --data empty", "empty"),
        ("strict --budget 1", "--budget"),
        ("strict --shortlist 3", "shortlist"),
        ("strict --device abacus", "abacus"),
        ("strict --dtypes int3", "int3"),
        ("batches --trees 16:x", "16:x"),
        ("strict --out file/record.json", "file/record.json"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(
    words: str, said: str, tiny_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_files)
    monkeypatch.setattr(check, "load_target", lambda *_: pytest.fail("loaded"))
    Path("empty").mkdir()
    Path("file").touch()
    name, *rest = words.split()
    done = invoke("engine", name, "--head", "h", "--data", ".", "--out", "record.json", *rest)
    assert done.exit_code == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_result_is_kept_where_the_next_precision_fails(tiny_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_in_32_bits(models: check.Models, *_: Any) -> dict[str, Any]:
        if failing:
            raise MemoryError
        failing.append(True)
        return {"correct": True}

    failing: list[bool] = []
    monkeypatch.setattr(check, "check_strict", fail_in_32_bits)
    out = tiny_files / "record.json"
    words = ["engine", "strict", "--head", "h", "--data", tiny_files, "--out", out, "--device", "cpu", "--prompts", 3]
    assert invoke(*words).exit_code == 2
    record = json.loads(out.read_text())
    assert record["results"] == {"bfloat16": {"correct": True}}
    assert record["unfinished"] == ["float32"] and not record["holds"]
    failing.clear()
    assert invoke(*words, "--dtypes", "bfloat16").exit_code == 0
    record = json.loads(out.read_text())
    assert "unfinished" not in record and record["holds"]


def test_long_prompts_are_left_out(tiny_files: Path) -> None:
    files, count = sorted(tiny_files.glob("*.jsonl")), 5 * len({*check.SPEED_SETS, *check.SAMPLING_SETS})
    drawn = check.draw(files, count, Words())  # type: ignore[arg-type]
    assert len(drawn) == count and not any(name.endswith("-0") for name in drawn)
    assert list(check.draw(files, 4, Words())) == list(drawn)[:4]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{count} conversations"):
        check.draw(files, count + 1, Words())  # type: ignore[arg-type]


def test_later_turns_follow_what_plain_decoding_answered() -> None:
    """The second conversation has no second turn, and that of the third would be too long."""
    turns = {"a": ["one", "two", "three"], "b": ["four"], "c": ["five", "x" * check.LONGEST_PROMPT, "six"]}
    prompts = check.every_turn(MODELS, Words(), turns, TOKENS)  # type: ignore[arg-type]
    assert list(prompts) == ["a, turn 1", "b, turn 1", "c, turn 1", "a, turn 2", "a, turn 3"]
    config = check.engine_config(prompts, TOKENS, 1)
    for turn, said in enumerate(turns["a"][1:], 1):
        earlier = prompts[f"a, turn {turn}"]
        answer = check.decode(MODELS.engine(1, config), {"": earlier}, TOKENS, 1).texts[""]
        assert prompts[f"a, turn {turn + 1}"] == [*earlier, *answer, 0, *(ord(c) % VOCAB for c in said), 0]
