"""The parts of a JSON schema: what lies inside it, where references lead, which values and types it names."""

from __future__ import annotations

from typing import Any

IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}
"""Keywords that, without a type, have the library write values of this one only."""
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def all_parts(root: Any) -> list[dict[str, Any]]:
    """A schema and all schemas inside it or named by it, each once."""
    found: dict[int, dict[str, Any]] = {}
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            left += inner_schemas(schema)
            left += [target(root, schema["$ref"])] if "$ref" in schema else []
    return list(found.values())


def inner_schemas(schema: dict[str, Any]) -> list[Any]:
    """The schemas inside a schema: not the names of properties, nor values to compare with."""
    parts: list[Any] = []
    for keyword, value in schema.items():
        if keyword in ("properties", "$defs", "definitions") and isinstance(value, dict):
            parts += value.values()
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            parts += value
        elif keyword in ("items", "additionalProperties", "propertyNames"):
            parts.append(value)
    return parts


def target(root: Any, ref: Any) -> Any:
    """The schema that a reference leads to; None if there is none, which the library says."""
    for name in str(ref).split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """What a schema is that only leads to another."""
    seen: set[int] = set()
    while isinstance(schema, dict) and id(schema) not in seen:
        seen.add(id(schema))
        if "$ref" in schema:
            schema = target(root, schema["$ref"])
        elif "allOf" in schema:
            (schema,) = schema["allOf"]
        else:
            return schema
    return {}


def alternatives(schema: dict[str, Any], root: Any) -> list[Any]:
    """The schemas of which a schema is one, if it is nothing else."""
    if "$ref" in schema:
        return [target(root, schema["$ref"])]
    return next((schema[keyword] for keyword in ("anyOf", "oneOf", "allOf") if keyword in schema), [])


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The types that a text of a schema may have. A number may be an integer, too."""
    found: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            found |= TYPES if part is not False else set()
        elif id(part) not in seen:
            seen.add(id(part))
            if inner := alternatives(part, root):
                left += inner
            elif values := only_values(part):
                found |= {type_of(value) for value in values}
            else:
                found |= set(named_types(part)) or TYPES
    return frozenset(found | {"integer"} if "number" in found else found)


def named_types(schema: dict[str, Any]) -> list[str]:
    """The types that a schema names or implies."""
    type = schema.get("type")
    implied = [kind for keyword, kind in IMPLIED.items() if keyword in schema]
    return ([type] if isinstance(type, str) else type) or implied


def only_values(schema: dict[str, Any]) -> list[Any]:
    """The only values that a schema allows; empty if it does not name them."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema.get("enum", ()))


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null"
