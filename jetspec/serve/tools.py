"""Tool calls in generated text: JSON between two tags, as the chat templates of Qwen and Hermes models define them.

One rule decides what a call is, for calls that a completion makes and for calls in a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from jetspec.engine.detokenize import overlap
from jetspec.grammar.bounds import depth_of
from jetspec.grammar.tools import BEGIN, END
from jetspec.serve.protocol import MAX_CALLS, FunctionCall

MAX_DEPTH = 64
"""Nesting depth of the arguments of a call."""
MAX_DIGITS = 4300
"""Digits that Python converts to an int; longer integers become floats."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
CONTROL = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
"""A control character, or an escape, which is left alone."""
MARK = re.compile(rf'({BEGIN}|{END}|"|\\)')
"""Tags, and the characters that begin and end a string of a call."""
SPACE = re.compile(r"[ \t\n\r]*")


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


JSON = json.JSONDecoder(parse_int=_parse_int, parse_constant=_refuse_constant)
"""Accepts integers of any length; refuses NaN and infinities."""


def read_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call. Raises ValueError unless they are a JSON object of bounded depth."""
    try:
        text.encode()  # fails for a lone surrogate, which an escape in an enclosing JSON text can produce
        value = JSON.decode(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    if depth_of(value) > MAX_DEPTH:
        raise ValueError(f"the arguments of a call are nested deeper than {MAX_DEPTH}")
    return value


def template_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call for the chat template, without lone surrogates. An empty text is an empty object."""
    whole = json.dumps(read_arguments(text or "{}"), ensure_ascii=False)
    arguments: dict[str, Any] = json.loads(whole.encode(errors="replace"))
    return arguments


class ToolReader:
    """Splits generated text, as it arrives, into content and tool calls, in linear time.

    A call that is cut off or invalid stays content, tags included. A closing tag inside a string of a call belongs to
    the string, unless the string is never closed: then every tag closes a call.
    """

    def __init__(self, in_call: bool = False) -> None:
        """`in_call`: the prompt ends with the opening tag."""
        self._rest = ""
        """End of the text that may be the beginning of a tag."""
        self._call: list[str] | None = [] if in_call else None
        """Pieces of the call that is being read."""
        self._in_string, self._is_escaped, self._ignores_strings = False, False, False
        self._opening = "" if in_call else BEGIN
        self._space = ""
        """White space between or behind calls: it is content only if other text follows."""
        self.num_calls = 0
        self.is_cut = False
        """The text ended inside a call."""

    def push(self, text: str, is_last: bool) -> tuple[str, list[FunctionCall]]:
        content, calls = "", list[FunctionCall]()
        text = self._rest + text
        end = len(text) - (0 if is_last else overlap(text, (BEGIN, END)))
        self._rest = text[end:]
        for is_call, part, closing in self._parts(text[:end], is_last):
            found = read_calls(part) if is_call else []
            if found and self.num_calls + len(found) <= MAX_CALLS:
                calls += found
                self.num_calls += len(found)
            elif is_call:
                content += self._opening + part + closing
                self.is_cut = not closing
            else:
                content += part
            if is_call:
                self._opening = BEGIN
        content, self._space = self._space + content, ""
        if self.num_calls and content.isspace():
            content, self._space = "", content
        return content, calls

    def _parts(self, text: str, is_last: bool) -> Iterator[tuple[bool, str, str]]:
        """Yields the complete parts: (is a call, text, closing tag)."""
        for piece in filter(None, MARK.split(text)):
            if self._call is None:
                if piece == BEGIN:
                    self._call, self._in_string = [], False
                else:
                    yield False, piece, ""
            elif piece == END and (self._ignores_strings or not self._in_string):
                call, self._call = "".join(self._call), None
                yield True, call, END
            else:
                self._call.append(piece)
                if self._is_escaped:
                    self._is_escaped = False
                elif piece == "\\":
                    self._is_escaped = self._in_string
                elif piece == '"':
                    self._in_string = not self._in_string
        if is_last and self._call is not None:
            call, closing, rest = "".join(self._call).partition(END)
            self._call, self._ignores_strings = None, True
            yield True, call, closing
            yield from self._parts(rest, is_last)


def read_calls(text: str) -> list[FunctionCall]:
    """Returns the call, or the list of calls, in a JSON text; an empty list if it is neither.

    Arguments are returned as written: some numbers change when they are parsed. Only raw control characters in strings,
    which models do write, are escaped.
    """
    text = STRING.sub(lambda string: CONTROL.sub(_escape, string[0]), text.strip())
    try:
        whole = JSON.decode(text)
        places = [start for _, start, _ in _members(text, 0)] if isinstance(whole, list) else [0]
        return [_read_call(text, place) for place in places]
    except (ValueError, RecursionError):
        return []


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith("\\") else f"\\u{ord(match[0]):04x}"


def _read_call(text: str, place: int) -> FunctionCall:
    """Returns the call at this place of a JSON text. Raises ValueError if a message could not hold it."""
    if text[place] != "{":
        raise ValueError("a call is an object")
    members = {name: text[start:end] for name, start, end in _members(text, place)}
    arguments = members.get("arguments", "")
    if arguments.startswith('"'):
        arguments = JSON.decode(arguments)
    read_arguments(arguments)
    return FunctionCall(name=JSON.decode(members.get("name", "null")), arguments=arguments)


def _members(text: str, place: int) -> Iterator[tuple[str, int, int]]:
    """Yields (name, start, end) of the values in the object or list at this place of a JSON text."""
    is_object, name, place = text[place] == "{", "", _skip_space(text, place + 1)
    while text[place] not in "}]":
        if is_object:
            name, place = JSON.raw_decode(text, place)
            place = _skip_space(text, _skip_space(text, place) + 1)
        _, end = JSON.raw_decode(text, place)
        yield name, place, end
        place = _skip_space(text, end)
        if text[place] == ",":
            place = _skip_space(text, place + 1)


def _skip_space(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match is not None, "the pattern matches the empty text"
    return match.end()
