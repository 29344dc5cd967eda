"""Tool calls as chat templates define them: JSON between two tags, as the Qwen and Hermes families write it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jetspec.engine.detokenize import overlap
from jetspec.grammar.tools import BEGIN, END
from jetspec.serve.arguments import JSON, read_arguments
from jetspec.serve.protocol import MAX_CALLS, CalledFunction, FunctionCall

STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
CONTROL = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
"""Control characters, and what follows a backslash, which is left alone."""
OUTSIDE = re.compile(rf'"|{END}')
IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)
SPACE = re.compile(r"[ \t\n\r]*")


class CallScanner:
    """Looks for the tag that closes a call, in text that comes in pieces, and looks at each character once.

    A closing tag in a string of the call is a part of that string.
    """

    def __init__(self) -> None:
        self._settled: list[str] = []
        self._rest = ""
        """The end of the text, in which a tag or an escape may have begun."""
        self._in_string = False

    def push(self, text: str) -> tuple[str, str, str] | None:
        """What stands before the tag, the tag, and what stands after it, once it is there."""
        text, place = self._rest + text, 0
        while True:
            if self._in_string:
                found = IN_STRING.match(text, place)
                assert found is not None, "it may be empty"
                place = found.end()
                if not text.startswith('"', place):  # the end, but for a backslash
                    break
                self._in_string, place = False, place + 1
            found = OUTSIDE.search(text, place)
            if found is None:
                place = max(place, len(text) - overlap(text, (END,)))
                break
            if found[0] == END:
                return "".join([*self._settled, text[: found.start()]]), END, text[found.end() :]
            self._in_string, place = True, found.end()
        self._settled.append(text[:place])
        self._rest = text[place:]
        return None

    def whole(self) -> str:
        return "".join([*self._settled, self._rest])


class ToolReader:
    """Splits an answer, as it comes, into what is said and what is called.

    A call that is cut off or that could not be handed back is handed on as text, tags included: nothing is lost. A
    closing tag in a string of a call is a part of that string, unless the string is never closed: then tags close
    calls wherever they stand.
    """

    def __init__(self, inside: bool = False) -> None:
        """`inside`: the prompt ends with the opening tag."""
        self._rest = ""
        """The end of what is said, in which a tag may have begun."""
        self._call = CallScanner() if inside else None
        self._opening = "" if inside else BEGIN
        self._space = ""
        """What stands between calls, or after them: it shows if words follow."""
        self.num_calls = 0
        self.is_cut = False
        """The text ended within a call."""

    def push(self, text: str, is_last: bool) -> tuple[str, list[FunctionCall]]:
        said, calls = "", list[FunctionCall]()
        text, self._rest = self._rest + text, ""
        for is_call, part, closing in self._parts(text, is_last):
            read = read_calls(part) if is_call else []
            if read and self.num_calls + len(read) <= MAX_CALLS:
                calls += read
                self.num_calls += len(read)
            elif is_call:
                said += self._opening + part + closing
                self.is_cut = not closing
            else:
                said, self._opening = said + part, BEGIN
        said, self._space = self._space + said, ""
        if self.num_calls and said.isspace():
            said, self._space = "", said
        return said, calls

    def _parts(self, text: str, is_last: bool) -> Iterator[tuple[bool, str, str]]:
        """What is complete: whether it is a call, what it says, and the tag that closed it."""
        is_broken = False
        """A string is never closed."""
        while True:
            if self._call is None:
                before, found, text = text.partition(BEGIN)
                keep = 0 if found or is_last else overlap(before, (BEGIN,))
                self._rest = before[len(before) - keep :]
                yield False, before[: len(before) - keep], ""
                if not found:
                    return
                self._call = CallScanner()
            split = None if is_broken else self._call.push(text)
            if split is None:
                if not is_last:
                    return
                split = (text if is_broken else self._call.whole()).partition(END)
                is_broken = True
            before, found, text = split
            self._call = None
            yield True, before, found


def read_calls(text: str) -> list[FunctionCall]:
    """One call, or a list of them; empty if it is neither.

    Arguments are handed on as they are written, for not every number is the same once it was read. Only control
    characters in strings are escaped, which models write as they are.
    """
    text = STRING.sub(lambda string: CONTROL.sub(escaped, string[0]), text.strip())
    try:
        whole = JSON.decode(text)
        places = [start for _, start, _ in members(text, 0)] if isinstance(whole, list) else [0]
        calls = [read_call(text, place) for place in places]
    except (ValueError, RecursionError):
        return []
    return calls


def escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("\\") else f"\\u{ord(found[0]):04x}"


def read_call(text: str, place: int) -> FunctionCall:
    """The call that stands at this place of a JSON text. ValueError if it is none that could be handed back."""
    if text[place] != "{":
        raise ValueError("a call is an object")
    found = {name: text[start:end] for name, start, end in members(text, place)}
    arguments = found.get("arguments", "")
    if arguments.startswith('"'):
        arguments = JSON.decode(arguments)
    read_arguments(arguments)
    call = CalledFunction(name=JSON.decode(found.get("name", "null")), arguments=arguments)
    return FunctionCall(name=call.name, arguments=call.arguments)


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
