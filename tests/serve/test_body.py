"""Bodies: wrong ones are refused in words, and none takes the server long."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.clock import is_fast
from tests.serve.live import NAME, Live

MODEL = b'{"model": "tiny", '
PARTS = b'"messages": [{"role": "user", "content": [%s]}]}'
SIZE = 3_800_000


def many(entry: bytes) -> bytes:
    """As many entries as a body may hold."""
    return b",".join([entry] * (SIZE // (len(entry) + 1)))


def fields(name: bytes) -> bytes:
    return b",".join(b'"%s%d": 0' % (name, i) for i in range(SIZE // 14))


def few_fields(name: bytes) -> bytes:
    return b",".join(b'"%s%d": 0' % (name, i) for i in range(30_000))


HUGE: list[tuple[str, Callable[[], bytes]]] = [
    ("completions", lambda: b'"prompt": [%s]}' % many(b'""')),
    ("completions", lambda: b'"prompt": [%s]}' % many(b"1")),
    ("completions", lambda: b'"prompt": [%s, ""]}' % many(b"1")),
    ("completions", lambda: b'"prompt": [%s]}' % many(b"[]")),
    ("completions", lambda: b'"prompt": "a", "stop": [%s]}' % many(b"1")),
    ("completions", lambda: b'"prompt": "a", "logit_bias": {%s}}' % fields(b"x")),
    ("completions", lambda: b'"prompt": "a", "logit_bias": {%s}}' % few_fields(b"x")),
    ("chat/completions", lambda: PARTS % many(b"1")),
    ("chat/completions", lambda: PARTS % many(b"{}")),
    ("chat/completions", lambda: PARTS % many(b'{"type":"text","text":""}')),
    ("chat/completions", lambda: b'"messages": [%s]}' % many(b"1")),
    ("chat/completions", lambda: b'"messages": [%s]}' % many(b'{"role":"user","content":"x"}')),
    ("chat/completions", lambda: b'"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % many(b"1")),
    ("chat/completions", lambda: b'"messages": [], %s}' % fields(b"x")),
    ("chat/completions", lambda: b'"messages": [], %s}' % few_fields(b"x")),
]


@pytest.mark.parametrize("number", range(len(HUGE)))
def test_no_body_keeps_others_waiting(live: Live, number: int) -> None:
    """Each of these is wrong in a million places or right in too many. Others are answered meanwhile."""
    path, make = HUGE[number]
    body = MODEL + make()
    assert is_fast(lambda: longest_wait(live, path, body), 2), "several times what it takes on an idle machine"


def longest_wait(live: Live, path: str, body: bytes) -> float:
    """For the answer to a body that is refused, or of others meanwhile for theirs."""
    begun, done, waits = threading.Event(), threading.Event(), []

    def others() -> None:
        with httpx.Client(timeout=60) as client:
            while not done.is_set():
                began = time.monotonic()
                client.get(f"{live.url}/health")
                waits.append(time.monotonic() - began)
                begun.set()

    watching = threading.Thread(target=others)
    watching.start()
    assert begun.wait(60)
    began = time.monotonic()
    response = post(live, body, path)
    took = time.monotonic() - began
    done.set()
    watching.join()
    assert response.status_code == 400 and len(response.content) < 1000
    return max(took, *waits)


def post(live: Live, body: bytes, path: str = "completions", kind: str = "application/json") -> httpx.Response:
    return httpx.post(f"{live.url}/v1/{path}", content=body, headers={"Content-Type": kind}, timeout=60)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "not valid JSON, at character 1"),
        (b"", None, "not valid JSON, at character 0"),
        (b'{"model": "\xff"}', None, "not UTF-8, at byte 11"),
        (b'{"model": NaN}', None, "NaN"),
        (b'{"n": ' + b"9" * 5000 + b"}", None, "too long"),
        (b"[" * 100_000, None, "nested too deeply"),
        (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', "prompt", "given twice"),
        (b'{"model": "tiny", "prompt": [-1]}', "prompt.0", "greater than or equal to 0"),
        (b'{"model": "tiny", "prompt": [true, 1]}', "prompt.0", "integer"),
        (b'{"model": "tiny", "prompt": ["a", 1]}', "prompt.1", "string"),
        (b'{"model": "tiny", "prompt": [[1], 2]}', "prompt.1", "list"),
        (b'{"model": "tiny", "prompt": [[1], [-2]]}', "prompt.1.0", "greater than or equal to 0"),
        (b'{"model": "tiny", "prompt": []}', "prompt", "at least 1"),
        (b'{"model": "tiny", "prompt": 5}', "prompt", "string"),
        (b'{"model": "tiny", "prompt": [%s]}' % b",".join([b'"a"'] * 17), "prompt", "at most 16"),
        (b'{"model": "tiny", "prompt": [%s]}' % b",".join([b"[1]"] * 17), "prompt", "at most 16"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"1": -100, "01": 100}}', "logit_bias", "match"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"1": -100, "1": 100}}', "1", "given twice"),
    ],
)
def test_a_wrong_body_is_told_what_is_wrong(live: Live, body: bytes, param: str | None, words: str) -> None:
    response = post(live, body)
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"]
    assert error["param"] == param or (param == "logit_bias" and error["param"].startswith(param))


def test_places_name_no_classes(live: Live) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = live.chat(messages=[{"role": "user", "content": [part]}]).json()["error"]
    assert error["param"] == "messages.0.content.0.image_url" and "TextPart" not in error["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "", "application/jsonx"])
def test_another_content_type_is_named(live: Live, kind: str) -> None:
    body = json.dumps({"model": NAME, "prompt": "a"}).encode()
    response = post(live, body, kind=kind)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Content-Type must be application/json"
    assert post(live, body, kind="application/json; charset=utf-8").status_code == 200


@pytest.mark.parametrize(
    ("asked", "is_taken"),
    [
        ({"repetition_penalty": 1.0}, True),
        ({"repetition_penalty": 1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"repetition_penalty": True}, False),
        ({"best_of": 1, "echo": False, "suffix": None}, True),
        ({"echo": 0}, False),
        ({"best_of": 2}, False),
        ({"top_k": -1, "min_p": 0, "repetition_penalty": 1}, True),
    ],
)
def test_what_changes_nothing_may_be_sent(live: Live, asked: dict[str, Any], is_taken: bool) -> None:
    """As `vllm bench serve` and others do, whatever they want. With another value the same fields are refused."""
    response = live.post(**asked, stream=True, stream_options={"include_usage": True}, logprobs=None)
    if is_taken:
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        (name,) = asked
        assert response.json()["error"]["message"] == f"{name} is not supported"


def test_an_answer_may_be_handed_back_as_it_came(live: Live) -> None:
    """OpenAI's own answers have more fields than we read, with nothing in them."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    messages = [{"role": "user", "content": "?"}, answer, {"role": "user", "content": "?"}]
    assert live.chat(messages=messages, max_tokens=2).status_code == 200
    answer["annotations"] = [{"type": "url_citation"}]
    assert live.chat(messages=messages, max_tokens=2).json()["error"]["param"] == "messages.1.annotations"


def test_two_limits_must_agree(live: Live) -> None:
    assert live.chat(max_tokens=3, max_completion_tokens=3).json()["usage"]["completion_tokens"] <= 3
    error = live.chat(max_tokens=3, max_completion_tokens=12).json()["error"]
    assert error["param"] == "max_tokens" and "max_completion_tokens is 12" in error["message"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([CALLING, {"role": "tool", "content": "noon", "tool_call_id": "call_1"}], None),
        ([CALLING, {"role": "tool", "content": "noon"}], "messages.1"),
        ([CALLING, {"role": "tool", "content": "noon", "tool_call_id": "call_2"}], "messages.1.tool_call_id"),
        ([{"role": "tool", "content": "noon", "tool_call_id": "call_1"}, CALLING], "messages.0.tool_call_id"),
        ([{"role": "user", "content": "?", "tool_call_id": "call_1"}], "messages.0"),
    ],
)
def test_a_tool_answers_a_call(
    live: Live, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], param: str | None
) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% if tools %}<tool_call>{% endif %}{% endfor %}"
    monkeypatch.setattr(live.llm.tokenizer, "chat_template", template)
    response = live.chat(messages=messages, max_tokens=2)
    if param is None:
        assert response.status_code == 200
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
