"""Grammars of tool calls: JSON between two tags, as the chat templates of Qwen and Hermes models define them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, Protocol

from jetspec.grammar.keywords import all_parts, types_of
from jetspec.types import Grammar

BEGIN, END = "<tool_call>", "</tool_call>"


class Function(Protocol):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    strict: bool | None


def check_functions(functions: Sequence[Function]) -> None:
    """Raise ValueError for two functions of one name, or parameters that do not describe an object."""
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"several tools are called {name}")
    for function in functions:
        parameters = function.parameters or {"type": "object"}
        try:
            is_object = types_of(parameters, parameters) == {"object"}
        except TypeError:  # a keyword with a value of the wrong type
            is_object = False
        if not is_object:
            raise ValueError(f'the parameters of {function.name} must have "type": "object"')


def forced_call(functions: Sequence[Function]) -> Grammar:
    """One call of these functions. The prompt ends with the tag; arguments follow their schema, strict or not."""
    return Grammar("json_schema", json.dumps(call_schema(functions, [f.parameters for f in functions])))


def free_calls(functions: Sequence[Function], *, once: bool = False) -> Grammar:
    """Free text with calls of these functions in it; calls of strict ones follow their schema. `once`: the text ends
    with its first call."""
    schema = call_schema(functions, [f.parameters if f.strict else {} for f in functions])
    return Grammar("calls", json.dumps({"begin": BEGIN, "end": END, "schema": schema, "once": once}))


def call_schema(functions: Sequence[Function], parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema between the tags. Each function's parameters are a definition of their own, so that the
    definitions inside them do not collide."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    definitions = (schema or {"type": "object"} for schema in parameters)
    return {"anyOf": calls, "$defs": {str(i): _rebased(d, f"#/$defs/{i}") for i, d in enumerate(definitions)}}


def _rebased(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A copy of a schema with its references adjusted to its new place in another schema."""
    schema = copy.deepcopy(schema)
    for part in all_parts(schema):
        if isinstance(ref := part.get("$ref"), str):
            part["$ref"] = place + ref.removeprefix("#")
    return schema
