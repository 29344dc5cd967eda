"""Tool calls are read the same for any split of the text, and no text is lost."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.grammar.tools import BEGIN, END
from jetspec.serve.builder import template_message
from jetspec.serve.protocol import MAX_CALLS, FunctionCall, Message
from jetspec.serve.tools import ToolReader, read_calls

CALL = json.dumps({"name": "add", "arguments": {"a": 1, "b": [2, "<"]}})
OTHER = json.dumps([{"name": "now", "arguments": {}}, {"name": "say", "arguments": '{"x": "é"}'}])
QUOTING = json.dumps({"name": "say", "arguments": {"a": f'\\"{END}\\', "b": END}})
TEXTS = [
    "no calls, but a < and a <tool",
    f"{BEGIN}\n{CALL}\n{END}",
    f"Let me see. {BEGIN}{CALL}{END}\n{BEGIN}{OTHER}{END}",
    f"{BEGIN}{CALL}{END} and so on",
    f"cut {BEGIN}{CALL[:20]}",
    f"unclosed {BEGIN}{CALL}",
    f"bad {BEGIN}{{]}}{END} after",
    f"{BEGIN}{END}{BEGIN}{BEGIN}",
    f"{BEGIN}{QUOTING}{END} and {BEGIN}{CALL}{END}",
    f'open {BEGIN}{{"name": "x{END} and {BEGIN}{CALL}{END}',
    f'{BEGIN}{{"name": "x\\\\{END}',
    f'{BEGIN}{{"name": "x\\"{END} {BEGIN}\\"{END}{BEGIN}{CALL}{END} {BEGIN}',
]


def read(pieces: list[str], inside: bool = False) -> tuple[str, list[FunctionCall]]:
    reader, content, calls = ToolReader(inside), "", list[FunctionCall]()
    for i, piece in enumerate(pieces):
        text, found = reader.push(piece, is_last=i == len(pieces) - 1)
        content, calls = content + text, calls + found
    return content, calls


@settings(max_examples=200)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=8), st.booleans())
def test_split_text_reads_like_the_whole(text: str, cuts: list[int], inside: bool) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    content, calls = read(pieces, inside)
    whole_said, whole_calls = read([text], inside)
    assert calls == whole_calls
    assert content.strip() == whole_said.strip()


@settings(max_examples=100)
@given(st.text(alphabet="<tol_ca/>ab{}", max_size=60))
def test_text_without_calls_is_unchanged(text: str) -> None:
    content, calls = read(list(text) or [""])
    assert not calls and content == text


def test_calls_are_found() -> None:
    content, calls = read(list(TEXTS[2]))
    assert content == "Let me see. "
    assert [call.name for call in calls] == ["add", "now", "say"]
    assert json.loads(calls[0].arguments) == {"a": 1, "b": [2, "<"]}
    assert calls[2].arguments == '{"x": "é"}'
    assert read([TEXTS[5]]) == ("unclosed ", read_calls(CALL))
    assert read([CALL], inside=True) == ("", read_calls(CALL))


def test_tag_in_a_string_does_not_close_the_call() -> None:
    content, calls = read(list(TEXTS[8]))
    assert content == " and" and calls == read_calls(QUOTING) + read_calls(CALL)
    assert json.loads(calls[0].arguments)["b"] == END
    content, calls = read(list(TEXTS[9]))
    assert calls == read_calls(CALL), "text after an unclosed string is read"
    assert read(list(TEXTS[10])) == (TEXTS[10], [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1e999, "y": -0.10, "z": ' + "9" * 5000 + "}", None),
        ('{ "s" :\n"\\ud800", "t": []}', None),
        ('{"s": "a\tb\n",\t"t": "\x00\\n"}', '{"s": "a\\u0009b\\u000a",\t"t": "\\u0000\\n"}'),
        ("{}", None),
    ],
)
def test_arguments_are_returned_as_written(arguments: str, expected: str | None) -> None:
    """Except raw control characters, which become escapes."""
    once = f'{{"name": "f", "arguments": {arguments}}}'
    for text in (once, f"\n[{once}, {once} ]\n", f'{{"arguments":{arguments} , "name":"f"}}'):
        calls = read_calls(text)
        assert {(call.name, call.arguments) for call in calls} == {("f", expected or arguments)}
        assert calls[0].model_dump_json()


@pytest.mark.parametrize(
    ("begin", "piece", "end"),
    [
        ('{"name": "f", "arguments": {"a": "', "text", '"}}' + END),
        ('{"name": "f", "arguments": {"a": ["', '","<', '"]}}' + END),
        ("", '\\"' + END + BEGIN, ""),
        ("", f'"{END}" {BEGIN}', '"'),
        ("", "<too", END),
    ],
)
def test_calls_are_read_in_linear_time(begin: str, piece: str, end: str) -> None:
    def seconds(length: int) -> float:
        began = time.process_time()
        read([BEGIN, begin, *[piece] * (length // len(piece)), end])
        return time.process_time() - began

    short, long = (min(seconds(length) for _ in range(3)) for length in (25_000, 100_000))
    assert long < 10 * short


@settings(max_examples=300)
@given(
    st.text(alphabet="f_.- é\n", max_size=3) | st.just("f" * 65),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=5,
    ),
    st.booleans(),
)
def test_call_can_be_sent_back_in_a_message(name: str, arguments: Any, is_text: bool) -> None:
    """A call has a valid function name and an object as its arguments."""
    written = json.dumps(arguments)
    text = json.dumps({"name": name, "arguments": written if is_text else arguments})
    calls = read_calls(text)
    is_object = isinstance(arguments, dict) and not re.search("NaN|Infinity", written)
    assert bool(calls) == (is_object and bool(re.fullmatch("[a-z_.-]{1,64}", name)))
    for call in calls:
        assert json.loads(call.arguments) == arguments
        content = sent_back([call])
        json.dumps(content, ensure_ascii=False).encode()


def sent_back(calls: list[FunctionCall]) -> dict[str, Any]:
    """The chat template's message of a completion with these calls."""
    made = [{"id": "1", "type": "function", "function": call.model_dump()} for call in calls]
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": made})
    return template_message(message, "messages.0")


def test_calls_of_any_number_and_size_can_be_sent_back() -> None:
    number = '{"a": [1e999, ' + "9" * 5000 + "]}"
    assert sent_back(read_calls(f'{{"name": "f", "arguments": {number}}}'))
    content, calls = read([f"{BEGIN}{CALL}{END}"] * (MAX_CALLS + 1))
    assert len(calls) == MAX_CALLS and content.strip() == f"{BEGIN}{CALL}{END}"
    assert sent_back(calls)["tool_calls"][-1]["function"]["name"] == "add"


def test_arguments_may_be_empty() -> None:
    content = sent_back([FunctionCall(name="now", arguments="")])
    assert content["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


WRONG = [
    *("", "1", "null", "[]", "[1]", "[" * 99999, f"{CALL} {CALL}", f"[{CALL}", f"[{CALL}, 1]"),
    '{"name": 1, "arguments": {}}',
    '{"name": "f"}',
    '{"name": "f", "arguments": NaN}',
    '{"name": "f", "arguments": {"a": "\\\n"}}',
    '{"name": "f", "arguments": "\\ud800"}',
    '{"name": "\\ud800", "arguments": {}}',
    r'{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}',
    '{"name": "f", "arguments": ""}',
    '{"name": "f", "arguments": {"a": ' + "[" * 65 + "]" * 65 + "}}",
    '{"name": "f", "arguments": {"a": ' + "[" * 800 + "]" * 800 + "}}",
]


@pytest.mark.parametrize("text", WRONG)
def test_invalid_calls_are_refused(text: str) -> None:
    assert read_calls(text) == []
