"""Responses: first chunk, null fields, tool calls, text offsets, speed."""

from __future__ import annotations

import random
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.serve.response import ChatResponse, SpeedMeter, TextOffsets, Vocabulary
from jetspec.serve.worker import Job
from jetspec.types import Completion, RoundStats, SamplingParams, Update
from tests.serve.live import NAME, Gate, Live, events, streaming
from tests.train.tiny_model import byte_tokenizer


def test_first_chunk_comes_with_the_first_token(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks measure its time."""
    gate = Gate(live, monkeypatch)
    gate.open.clear()
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4}
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        pieces = response.iter_raw()
        threading.Timer(0.3, gate.open.set).start()
        next(pieces)
        assert gate.open.is_set(), "a chunk was sent before the first token"
        for _ in pieces:
            pass


def test_fields_that_openai_requires_are_null(live: Live) -> None:
    choice = live.chat(max_tokens=3).json()["choices"][0]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"} and choice["logprobs"] is None
    assert set(choice["message"]) == {"role", "content", "refusal"}
    for chunk in events(live.chat(max_tokens=3, stream=True)):
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
        assert None not in chunk["choices"][0]["delta"].values() and "usage" not in chunk and "jetspec" not in chunk
    with streaming(live, max_tokens=3) as response:
        for chunk in events(response):
            assert set(chunk["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


@pytest.mark.parametrize(("end", "finish"), [("</tool_call>", "tool_calls"), ("</tool_call><tool_call>{", "length")])
def test_cut_off_call_finishes_with_length(end: str, finish: str) -> None:
    answer = ChatResponse(Job([[1]], SamplingParams(), reads_tools=True), vocab(), NAME)
    text = '<tool_call>{"name": "clock", "arguments": {}}' + end
    answer.add(0, Update(0, [5], text, Completion(text, [5], "length", RoundStats())))
    (choice,) = answer.whole().model_dump()["choices"]
    assert choice["finish_reason"] == finish and len(choice["message"]["tool_calls"]) == 1


def vocab() -> Vocabulary:
    return Vocabulary(byte_tokenizer())


@given(st.text("aé漢🙂", max_size=20), st.randoms(use_true_random=False))
def test_text_offsets_are_those_of_the_text(text: str, chance: random.Random) -> None:
    """For any split of the bytes into tokens."""
    data, start, offsets = text.encode(), 0, TextOffsets()
    while start < len(data):
        size = chance.randint(1, 5)
        offset = offsets.next(data[start : start + size])
        assert offset == len(data[:start].decode(errors="ignore"))
        start += size


def test_speed_leaves_out_the_first_round() -> None:
    """A round of 50 tokens, then two of three tokens and a second each: three tokens per second."""
    meter, speeds = SpeedMeter(), []
    for second, count in enumerate((50, 3, 3)):
        speeds.append(meter.add(Update(0, [0] * count, ""), 100.0 + second))
    assert speeds == [0.0, 3.0, 3.0]


def test_whole_response_is_made_outside_the_event_loop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are made for streams only."""
    loop_thread, found = live.thread, list[Any]()
    whole = ChatResponse.whole

    def noted(self: ChatResponse) -> Any:
        found.append(threading.current_thread())
        return whole(self)

    monkeypatch.setattr(ChatResponse, "whole", noted)
    monkeypatch.setattr(ChatResponse, "chunk", lambda *given: found.append("a chunk"))
    assert live.chat(max_tokens=20, logprobs=True, top_logprobs=20).status_code == 200
    assert len(found) == 1 and found[0] is not loop_thread
