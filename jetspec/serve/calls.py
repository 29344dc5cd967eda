"""Tool calls as chat templates define them: JSON between two tags, as the Qwen and Hermes families write it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from jetspec.engine.detokenize import overlap
from jetspec.serve.protocol import FunctionCall

BEGIN, END = "<tool_call>", "</tool_call>"
STRING = re.compile(r'"(?:[^"\\]|\\[^\x00-\x1f])*+"')
CONTROL = re.compile(r"[\x00-\x1f]")
CLOSING = re.compile(rf'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|(?P<end>{END})', re.DOTALL)
"""Strings, of which the last may be open, so that what is found of the tag is outside of them."""
SPACE = re.compile(r"[ \t\n\r]*")


def no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


JSON = json.JSONDecoder(parse_int=float, parse_constant=no_number)
"""Reads numbers of any length, but not NaN and its like."""


class ToolReader:
    """Splits an answer, as it comes, into what is said and what is called.

    A call that is cut off or is no valid JSON is handed on as text, tags included: nothing is lost. A closing tag in a
    string of a call is a part of that string, unless the string is never closed.
    """

    def __init__(self, inside: bool = False) -> None:
        """`inside`: the prompt ends with the opening tag."""
        self._rest = ""
        self._inside = inside
        self._opening = "" if inside else BEGIN
        self._space = ""
        """What stands between calls, or after them: it shows if words follow."""
        self.num_calls = 0
        self.is_cut = False
        """The text ended within a call."""

    def push(self, text: str, is_last: bool) -> tuple[str, list[FunctionCall]]:
        self._rest += text
        said, calls = "", []
        while True:
            before, found, after = self._split_call(is_last) if self._inside else self._rest.partition(BEGIN)
            if not found and not (is_last and self._inside):
                break
            self._rest = after
            if not self._inside:
                said, self._opening = said + before, BEGIN
            elif read := read_calls(before):
                calls += read
            else:
                said += self._opening + before + found
                self.is_cut = not found
            self._inside = not self._inside and bool(found)
        if not self._inside:
            keep = 0 if is_last else overlap(self._rest, (BEGIN,))
            said, self._rest = said + self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
        self.num_calls += len(calls)
        said, self._space = self._space + said, ""
        if self.num_calls and said.isspace():
            said, self._space = "", said
        return said, calls

    def _split_call(self, is_last: bool) -> tuple[str, str, str]:
        """What stands before, in and after the tag that closes a call."""
        for match in CLOSING.finditer(self._rest):
            if match["end"]:
                return self._rest[: match.start()], END, self._rest[match.end() :]
        return self._rest.partition(END) if is_last else (self._rest, "", "")


def read_calls(text: str) -> list[FunctionCall]:
    """One call, or a list of them; empty if it is neither.

    Arguments are handed on as they are written, for not every number is the same once it was read. Only control
    characters in strings are escaped, which models write as they are.
    """
    text = STRING.sub(lambda found: CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", found[0]), text.strip())
    try:
        whole = JSON.decode(text)
        places = [start for _, start, _ in members(text, 0)] if isinstance(whole, list) else [0]
        calls = [read_call(text, place) for place in places]
    except (ValueError, RecursionError):
        return []
    return calls


def read_call(text: str, place: int) -> FunctionCall:
    """The call that stands at this place of a JSON text. ValueError if it is none."""
    if text[place] != "{":
        raise ValueError("a call is an object")
    found = {name: text[start:end] for name, start, end in members(text, place)}
    name, arguments = JSON.decode(found.get("name", "0")), found.get("arguments", "")
    if not isinstance(name, str) or not arguments:
        raise ValueError("a call has a name and arguments")
    if arguments.startswith('"'):
        arguments = JSON.decode(arguments)
    for part in (name, arguments):
        part.encode()  # an escape may stand for what no text can hold
    return FunctionCall(name=name, arguments=arguments)


def members(text: str, place: int) -> Iterator[tuple[str, int, int]]:
    """The values of the object or list at this place of a JSON text: their names, where they begin and end."""
    is_object, name, place = text[place] == "{", "", after_space(text, place + 1)
    while text[place] not in "}]":
        if is_object:
            name, place = JSON.raw_decode(text, place)
            place = after_space(text, after_space(text, place) + 1)
        _, end = JSON.raw_decode(text, place)
        yield name, place, end
        place = after_space(text, end)
        if text[place] == ",":
            place = after_space(text, place + 1)


def after_space(text: str, place: int) -> int:
    found = SPACE.match(text, place)
    assert found is not None, "it may be empty"
    return found.end()
