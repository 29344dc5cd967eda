"""Preparation and comparison of vLLM runs; the engines themselves need a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm
from benchmarks.vllm import QUESTIONS, Options, compared, judged, prepare, run
from jetspec.models.export import properties, read_vllm
from jetspec.models.families import config_from_hf
from jetspec.models.head_format import check_fits, read_config
from jetspec.profile.shapes import SHAPES


def make_options(work: Path, **changes: Any) -> Options:
    return Options(work, **{"batches": "2", "tokens": 64, "repeats": 3, "limit": 1.0, **changes})


def with_prompts(options: Options, prompts: list[list[int]]) -> Options:
    options.root.mkdir(parents=True)
    (options.root / "prompts.json").write_text(json.dumps(prompts))
    return options


def test_a_shape_is_a_target_a_head_and_a_chain_that_fit_each_other(tmp_path: Path) -> None:
    options = make_options(tmp_path, shape="qwen3-8b")
    prepare(options)
    target = config_from_hf(json.loads((options.root / "target" / "config.json").read_text()))
    head = read_config(options.root / "head")
    assert target == SHAPES["qwen3-8b"] and check_fits(head, target) == []
    chain = json.loads((options.root / "chain" / "config.json").read_text())
    assert read_vllm(chain) == properties(head)
    assert all(0 <= token < target.vocab_size for prompt in options.prompts() for token in prompt)


def test_methods_are_compared_with_plain_decoding() -> None:
    def result(method: str, rate: float, texts: list[list[int]]) -> dict[str, Any]:
        return {"method": method, "batches": [{"batch": 2, "tokens_per_s": rate}], "texts": texts}

    results = [
        result("plain", 10.0, [[1], [2]]),
        result("32", 25.0, [[1], [3]]),
        {"method": "64", "error": "no memory"},
    ]
    plain, trees, failed = compared(results)
    assert plain["same_texts"] == 1 and trees["same_texts"] == 0.5
    assert trees["batches"][0]["speedup"] == 2.5 and failed["error"] == "no memory"
    assert "texts" in results[0] and "texts" not in plain


def test_a_result_is_reused_for_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = with_prompts(make_options(tmp_path), [])
    before = {"method": "plain", "asked": options.asked}
    (options.root / "plain.json").write_text(json.dumps(before))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert vllm.run_method("plain", options) == before
    assert "error" in vllm.run_method("plain", make_options(tmp_path, tokens=128))


def test_a_process_gets_the_same_options(tmp_path: Path) -> None:
    words = vllm.words_of(make_options(tmp_path, eager=True, shape="qwen3-8b"))
    assert words[words.index("--shape") + 1] == "qwen3-8b" and "--eager" in words and "--compile" not in words


def test_every_run_answers_other_questions_and_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = with_prompts(make_options(tmp_path), [[i] for i in range(5)])
    asked: list[list[int]] = []

    def fake_run(_: Any, prompts: list[list[int]], tokens: int) -> vllm.Timing:
        if tokens == 64:
            asked.append([prompt[0] for prompt in prompts])
        seconds, steps = float(len(asked)), 10 * len(asked)
        return vllm.Timing({str(i): prompt for i, prompt in enumerate(prompts)}, seconds, steps, 64)

    monkeypatch.setattr(vllm, "start", lambda *_: None)
    monkeypatch.setattr(vllm, "run", fake_run)
    found = vllm.measure(options, "32")
    assert asked == [[0, 1], [2, 3], [4, 0]] and found["texts"] == [[0], [1]]
    (row,) = found["batches"]
    assert row["tokens_per_s"] == 3 * 64 / (1 + 2 + 3) and row["tokens_per_step"] == 3 * 64 / (10 + 20 + 30) / 2


def test_vllm_alone_judges_where_texts_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = with_prompts(make_options(tmp_path), [[7], [8]])
    results: list[dict[str, Any]] = [
        {"method": "plain", "texts": [[1, 2, 3], [4, 5, 6]]},
        {"method": "32", "texts": [[1, 2, 3], [4, 9, 6]]},
        {"method": "64", "texts": [[0, 2, 3], [4, 5, 6]]},
        {"method": "128", "error": "no memory"},
    ]
    monkeypatch.setattr(vllm, "run_method", lambda *_: {"gaps": [0.25, None]})
    judged(results, options)
    assert json.loads((options.root / QUESTIONS).read_text()) == [[[8, 4], [5, 9]], [[7], [1, 0]]]
    found = [result["differences"] for result in results]
    assert found == [[], [{"text": 1, "token": 1, "gap": 0.25}], [{"text": 0, "token": 0, "gap": None}], []]


class Engine:
    """Two requests, one of which is prefilled a step later and ends a step earlier."""

    def __init__(self) -> None:
        self.steps = iter([{0: 1}, {0: 3, 1: 1}, {0: 5, 1: 3}, {0: 6, 1: 4}, {1: 5}, {1: 6}])
        self.names: list[str] = []
        self.left = 6

    def add_request(self, name: str, prompt: object, params: object) -> None:
        self.names.append(name)

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[Any]:
        self.left -= 1
        return [
            SimpleNamespace(
                request_id=self.names[i], outputs=[SimpleNamespace(token_ids=list(range(n)))], finished=n == 6
            )
            for i, n in next(self.steps).items()
        ]


def test_a_batch_is_timed_while_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    timing = run(SimpleNamespace(llm_engine=Engine()), [[1], [2]], 6)
    assert (timing.steps, timing.tokens) == (1, 4)
    assert timing.texts == {"0": list(range(6)), "1": list(range(6))}
