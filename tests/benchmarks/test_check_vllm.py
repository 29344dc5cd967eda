"""What the script prepares and compares; the engines themselves need a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import check_vllm
from benchmarks.check_vllm import QUESTIONS, Folders, compared, judged, prepare, run
from jetspec.models.export import ParsedHead, read_vllm
from jetspec.models.families import config_from_hf
from jetspec.models.head_format import check_fits, read_config
from jetspec.profile.shapes import SHAPES


def test_a_shape_is_a_target_a_head_and_a_chain_that_fit_each_other(tmp_path: Path) -> None:
    prepare(tmp_path, "qwen3-8b", torch.bfloat16)
    folders = Folders(tmp_path, is_random=True)
    target = config_from_hf(json.loads((Path(folders.target) / "config.json").read_text()))
    head = read_config(Path(folders.head))
    assert target == SHAPES["qwen3-8b"] and check_fits(head, target) == []
    assert read_vllm(json.loads((Path(folders.chain) / "config.json").read_text())) == ParsedHead.expected(head)
    assert all(0 <= token < target.vocab_size for prompt in folders.prompts() for token in prompt)


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


def test_what_was_measured_is_not_measured_again_unless_asked_otherwise(tmp_path: Path) -> None:
    def args(tokens: int) -> Any:
        return SimpleNamespace(batches="1,2", tokens=tokens, repeats=3, width=8, eager=False, compile=False)

    out = tmp_path / "plain.json"
    assert check_vllm.measured(out, args(64)) is None
    out.write_text(json.dumps({"method": "plain", "asked": check_vllm.asked_for(args(64))}))
    assert check_vllm.measured(out, args(64)) == json.loads(out.read_text())
    assert check_vllm.measured(out, args(128)) is None


def test_every_run_asks_other_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a rate is of all of them together."""
    (tmp_path / "prompts.json").write_text(json.dumps([[i] for i in range(5)]))
    asked: list[list[int]] = []

    def fake_run(_: Any, prompts: list[list[int]], tokens: int) -> check_vllm.Timing:
        if tokens == 64:
            asked.append([prompt[0] for prompt in prompts])
        seconds, steps = float(len(asked)), 10 * len(asked)
        return check_vllm.Timing({str(i): prompt for i, prompt in enumerate(prompts)}, seconds, steps, 64)

    monkeypatch.setattr(check_vllm, "start", lambda *_: None)
    monkeypatch.setattr(check_vllm, "run", fake_run)
    args: Any = SimpleNamespace(batches="2", tokens=64, repeats=3, width=8, eager=False, compile=False)
    found = check_vllm.measure(Folders(tmp_path, False), "32", [2], args)
    assert asked == [[0, 1], [2, 3], [4, 0]] and found["texts"] == [[0], [1]]
    (row,) = found["batches"]
    assert row["tokens_per_s"] == 3 * 64 / (1 + 2 + 3) and row["tokens_per_step"] == 3 * 64 / (10 + 20 + 30) / 2


def test_where_texts_part_vllm_alone_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps([[7], [8]]))
    results: list[dict[str, Any]] = [
        {"method": "plain", "texts": [[1, 2, 3], [4, 5, 6]]},
        {"method": "32", "texts": [[1, 2, 3], [4, 9, 6]]},
        {"method": "64", "texts": [[0, 2, 3], [4, 5, 6]]},
        {"method": "128", "error": "no memory"},
    ]
    monkeypatch.setattr(check_vllm, "run_method", lambda *_: {"gaps": [0.25, None]})
    judged(results, tmp_path, SimpleNamespace(shape=None))  # type: ignore[arg-type]
    assert json.loads((tmp_path / QUESTIONS).read_text()) == [[[8, 4], [5, 9]], [[7], [1, 0]]]
    found = [result["differences"] for result in results]
    assert found == [[], [{"text": 1, "token": 1, "gap": 0.25}], [{"text": 0, "token": 0, "gap": None}], []]


def test_the_gap_is_that_of_the_two_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / QUESTIONS).write_text(json.dumps([[[8, 4], [5, 9]], [[7], [1, 0]]]))
    best = {5: SimpleNamespace(logprob=-1.0), 9: SimpleNamespace(logprob=-1.5), 1: SimpleNamespace(logprob=-2.0)}
    answer = SimpleNamespace(outputs=[SimpleNamespace(logprobs=[best])])
    monkeypatch.setattr(check_vllm, "start", lambda *_: SimpleNamespace(generate=lambda *_, **__: [answer] * 2))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    assert check_vllm.judge(Folders(tmp_path, False), SimpleNamespace()) == [0.5, None]  # type: ignore[arg-type]


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
