"""Keywords of a JSON schema: the form of their values, the schemas inside a schema, and the types it allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}
"""Keywords that imply a type: without a `type`, xgrammar generates values of this one only."""
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NAMED_SCHEMAS = ("properties", "$defs", "definitions")
CHOICES = ("anyOf", "oneOf", "allOf")
INNER_SCHEMAS = ("items", "additionalProperties", "propertyNames")

# ---- form of the values ----


def _of(*types: type) -> Callable[[Any], bool]:
    """Test for values of these types; a boolean is not a number."""
    return lambda value: isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _list_of(check: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(check, value))


def _is_type(value: Any) -> bool:
    return _list_of(lambda name: isinstance(name, str) and name in TYPES, least=1)(
        [value] if isinstance(value, str) else value
    )


_is_schema, _is_number = _of(dict, bool), _of(int, float)
FORMS: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (("type",), _is_type, f"a type ({', '.join(sorted(TYPES))}) or a list of some"),
    (("$ref", "pattern", "format"), _of(str), "a string"),
    (COUNTS, lambda value: _of(int)(value) and value >= 0, "a whole number from 0"),
    (RANGE, _is_number, "a number"),
    (("multipleOf",), lambda value: _is_number(value) and value > 0, "a number above 0"),
    (("enum",), _list_of(lambda value: True, least=1), "a list of one or more values"),
    (("required",), _list_of(_of(str)), "a list of names"),
    (CHOICES, _list_of(_is_schema, least=1), "a list of one or more schemas"),
    (("prefixItems",), _list_of(_is_schema), "a list of schemas"),
    (NAMED_SCHEMAS, lambda v: isinstance(v, dict) and all(map(_is_schema, v.values())), "an object of schemas"),
    (INNER_SCHEMAS, _is_schema, "a schema"),
]


def check_form(schema: dict[str, Any]) -> None:
    """Refuse a keyword whose value has the wrong form; xgrammar would ignore it."""
    for keywords, is_good, form in FORMS:
        for keyword in keywords:
            if keyword in schema and not is_good(schema[keyword]):
                raise ValueError(f"{keyword} in the JSON schema is not {form}")


# ---- structure ----


def all_parts(root: Any) -> list[dict[str, Any]]:
    """Returns a schema and all schemas inside it or referenced by it, each once."""
    found: dict[int, dict[str, Any]] = {}
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            for keyword, value in schema.items():
                if keyword in NAMED_SCHEMAS and isinstance(value, dict):
                    left += value.values()
                elif keyword in (*CHOICES, "prefixItems") and isinstance(value, list):
                    left += value
                elif keyword in INNER_SCHEMAS:
                    left.append(value)
            left += [target(root, schema["$ref"])] if "$ref" in schema else []
    return list(found.values())


def target(root: Any, ref: Any) -> Any:
    """Returns the schema of a reference; None if there is none, which xgrammar reports."""
    for name in str(ref).split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Follows `$ref` and a single `allOf` to the schema behind them."""
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
    """Returns the schemas behind a `$ref`, `anyOf`, `oneOf` or `allOf`; empty if there is none."""
    if "$ref" in schema:
        return [target(root, schema["$ref"])]
    return next((schema[keyword] for keyword in CHOICES if keyword in schema), [])


# ---- types and values ----


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Returns the types that values of a schema may have. A number includes integers."""
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
    """Returns the types that a schema names or implies."""
    type = schema.get("type")
    implied = [kind for keyword, kind in IMPLIED.items() if keyword in schema]
    return ([type] if isinstance(type, str) else type) or implied


def only_values(schema: dict[str, Any]) -> list[Any]:
    """Returns the values listed by `const` or `enum`; empty if there are none."""
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
