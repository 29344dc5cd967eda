"""Tool calls as chat templates define them: JSON between two tags, as the Qwen and Hermes families write it."""

from __future__ import annotations

import copy
import json
from typing import Any

from jetspec.engine.detokenize import overlap
from jetspec.engine.schema_parts import inner_schemas, types_of
from jetspec.serve.errors import Refused
from jetspec.serve.protocol import FunctionCall, Tool

BEGIN, END = "<tool_call>", "</tool_call>"


def check_template(template: str | None) -> None:
    """Tools are refused where the model would not be told of them, or would call them in a way we cannot read."""
    if template is None or "tools" not in template:
        raise Refused("tools are not supported: this model's chat template has none", param="tools")
    if BEGIN not in template:
        raise Refused("tools are not supported: this model's chat template calls them in an unknown way", param="tools")


def check_parameters(tools: list[Tool]) -> None:
    """Arguments are an object, so that must be what a tool's schema describes."""
    for tool in tools:
        parameters = tool.function.parameters or {"type": "object"}
        try:
            is_object = types_of(parameters, parameters) == {"object"}
        except TypeError:  # a keyword with a value of the wrong type
            is_object = False
        if not is_object:
            raise Refused(f'the parameters of {tool.function.name} must have "type": "object"', param="tools")


def call_schema(tools: list[Tool]) -> dict[str, Any]:
    """A JSON schema of what stands between the tags when one of these is called.

    Each tool's parameters lie under a name of their own, so that what they define cannot meet another's.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    parameters = [tool.function.parameters or {"type": "object"} for tool in tools]
    return {"anyOf": calls, "$defs": {str(i): moved(schema, f"#/$defs/{i}") for i, schema in enumerate(parameters)}}


def moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema whose references still lead to its own parts when it lies at this place of another."""
    schema = copy.deepcopy(schema)
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += inner_schemas(part)
            if isinstance(ref := part.get("$ref"), str):
                part["$ref"] = place + ref.removeprefix("#")
    return schema


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
