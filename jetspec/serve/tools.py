"""The tools of a request: whether they can be called, and what grammar their calls follow."""

from __future__ import annotations

import copy
import json
from typing import Any

from jetspec.grammar.schema_parts import inner_schemas, types_of
from jetspec.serve.calls import BEGIN, END
from jetspec.serve.errors import ApiError
from jetspec.serve.protocol import Tool
from jetspec.types import Grammar


def check_template(template: str | None) -> None:
    """Tools are refused where the model would not be told of them, or would call them in a way we cannot read."""
    if template is None or "tools" not in template:
        raise ApiError("tools are not supported: this model's chat template has none", param="tools")
    if BEGIN not in template:
        raise ApiError(
            "tools are not supported: this model's chat template calls them in an unknown way", param="tools"
        )


def check_tools(tools: list[Tool]) -> None:
    """Arguments are an object, so that must be what a tool's schema describes; and a name is that of one tool."""
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ApiError(f"several tools are called {name}", param="tools")
    for tool in tools:
        parameters = tool.function.parameters or {"type": "object"}
        try:
            is_object = types_of(parameters, parameters) == {"object"}
        except TypeError:  # a keyword with a value of the wrong type
            is_object = False
        if not is_object:
            raise ApiError(f'the parameters of {tool.function.name} must have "type": "object"', param="tools")


def told_tool(tool: Tool) -> dict[str, Any]:
    """What the chat template is told of a tool: what was sent, but for `strict`, which is not the model's business."""
    return tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


def forced_call(tools: list[Tool]) -> Grammar:
    """One of these is called, and the tag stands in the prompt; arguments follow their schema, strict or not."""
    return Grammar("json_schema", json.dumps(call_schema(tools, [tool.function.parameters for tool in tools])))


def free_calls(tools: list[Tool], several: bool = True) -> Grammar | None:
    """Any text, and calls of these tools, those of a strict one with arguments of its schema. None if none is strict:
    then the model's calls are its own. If there may not be `several`, the answer ends with its first call."""
    if not any(tool.function.strict for tool in tools):
        if not several:
            why = "parallel_tool_calls can be false only if a tool is strict or tool_choice forces a call"
            raise ApiError(f"{why}: ask for one of these", param="parallel_tool_calls")
        return None
    parameters = [tool.function.parameters if tool.function.strict else {} for tool in tools]
    form = {"begin": BEGIN, "end": END, "schema": call_schema(tools, parameters), "once": not several}
    return Grammar("calls", json.dumps(form))


def call_schema(tools: list[Tool], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """A JSON schema of what stands between the tags when one of these is called, with arguments of its parameters.

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
    schemas = [schema or {"type": "object"} for schema in parameters]
    return {"anyOf": calls, "$defs": {str(i): moved(schema, f"#/$defs/{i}") for i, schema in enumerate(schemas)}}


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
