"""Tool calls are read the same however the text is cut, and nothing of an answer is lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.serve.errors import Refused
from jetspec.serve.protocol import FunctionCall
from jetspec.serve.tools import BEGIN, END, ToolReader, check_template, read_calls

CALL = json.dumps({"name": "add", "arguments": {"a": 1, "b": [2, "<"]}})
OTHER = json.dumps([{"name": "now", "arguments": {}}, {"name": "say", "arguments": '{"x": "é"}'}])
TEXTS = [
    "no calls, but a < and a <tool",
    f"{BEGIN}\n{CALL}\n{END}",
    f"Let me see. {BEGIN}{CALL}{END}\n{BEGIN}{OTHER}{END}",
    f"{BEGIN}{CALL}{END} and so on",
    f"cut {BEGIN}{CALL[:20]}",
    f"unclosed {BEGIN}{CALL}",
    f"bad {BEGIN}{{]}}{END} after",
    f"{BEGIN}{END}{BEGIN}{BEGIN}",
]


def read(pieces: list[str], inside: bool = False) -> tuple[str, list[FunctionCall]]:
    reader, said, calls = ToolReader(inside), "", list[FunctionCall]()
    for i, piece in enumerate(pieces):
        text, found = reader.push(piece, is_last=i == len(pieces) - 1)
        said, calls = said + text, calls + found
    return said, calls


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=8), st.booleans())
def test_pieces_read_as_the_whole(text: str, cuts: list[int], inside: bool) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    said, calls = read(pieces, inside)
    whole_said, whole_calls = read([text], inside)
    assert calls == whole_calls
    assert said.split() == whole_said.split()


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="<tol_ca/>ab{}", max_size=60))
def test_text_without_calls_is_handed_on(text: str) -> None:
    said, calls = read(list(text) or [""])
    assert not calls and said == text


def test_calls_are_found() -> None:
    said, calls = read(list(TEXTS[2]))
    assert said == "Let me see. "
    assert [call.name for call in calls] == ["add", "now", "say"]
    assert json.loads(calls[0].arguments) == {"a": 1, "b": [2, "<"]}
    assert calls[2].arguments == '{"x": "é"}'
    assert read([TEXTS[5]]) == ("unclosed ", read_calls(CALL))
    assert read([CALL], inside=True) == ("", read_calls(CALL))


@pytest.mark.parametrize("text", ["", "1", "null", "[1]", '{"name": 1, "arguments": {}}', '{"name": "f"}', "[" * 99999])
def test_what_is_no_call_is_none(text: str) -> None:
    assert read_calls(text) == []


def test_templates_without_tools_are_refused() -> None:
    check_template("{% if tools %}<tool_call>{% endif %}")
    for template in (None, "{{ messages }}", "{% if tools %}[TOOL_CALLS]{% endif %}"):
        with pytest.raises(Refused, match="tools"):
            check_template(template)
