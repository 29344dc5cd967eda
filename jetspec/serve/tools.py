"""Tool calls as chat templates define them: JSON between two tags, as the Qwen and Hermes families write it."""

from __future__ import annotations

import json
from typing import Any

from jetspec.engine.detokenize import overlap
from jetspec.serve.errors import Refused
from jetspec.serve.protocol import FunctionCall, Tool

BEGIN, END = "<tool_call>", "</tool_call>"


def check_template(template: str | None) -> None:
    """Tools are refused where the model would not be told of them, or would call them in a way we cannot read."""
    if template is None or "tools" not in template:
        raise Refused("tools are not supported: this model's chat template has none", param="tools")
    if BEGIN not in template:
        raise Refused("tools are not supported: this model's chat template calls them in an unknown way", param="tools")


def call_schema(tools: list[Tool]) -> dict[str, Any]:
    """A JSON schema of what stands between the tags when one of these is called."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


class ToolReader:
    """Splits an answer, as it comes, into what is said and what is called.

    A call that is cut off or is no valid JSON is handed on as text, tags included: nothing is lost.
    """

    def __init__(self, inside: bool = False) -> None:
        """`inside`: the prompt ends with the opening tag."""
        self._rest = ""
        self._inside = inside
        self._opening = "" if inside else BEGIN
        self.num_calls = 0

    def push(self, text: str, is_last: bool) -> tuple[str, list[FunctionCall]]:
        self._rest += text
        said, calls = "", []
        while True:
            tag = END if self._inside else BEGIN
            before, found, after = self._rest.partition(tag)
            if not found and not (is_last and self._inside):
                break
            self._rest = after
            if not self._inside:
                said, self._opening = said + before, BEGIN
            elif read := read_calls(before):
                calls += read
            else:
                said += self._opening + before + found
            self._inside = not self._inside and bool(found)
        if not self._inside:
            keep = 0 if is_last else overlap(self._rest, (BEGIN,))
            said, self._rest = said + self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
        self.num_calls += len(calls)
        if self.num_calls and said.isspace():
            said = ""
        return said, calls


def read_calls(text: str) -> list[FunctionCall]:
    """One call, or a list of them; empty if it is neither."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in value if isinstance(value, list) else [value]:
        if not (isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call):
            return []
        arguments = call["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(FunctionCall(name=call["name"], arguments=written))
    return calls
