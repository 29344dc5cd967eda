"""What the keywords of a JSON schema may hold. A malformed one is refused by its name, and not read over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetspec.grammar.schema_parts import TYPES

Check = Callable[[Any], bool]
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def object_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


FORMS: list[tuple[tuple[str, ...], Check, str]] = [
    (("type",), is_type, f"a type ({', '.join(sorted(TYPES))}) or a list of some"),
    (("$ref", "pattern", "format"), is_text, "a string"),
    (COUNTS, is_whole, "a whole number"),
    ((*RANGE, "multipleOf"), is_number, "a number"),
    (("enum",), lambda value: isinstance(value, list), "a list"),
    (("required",), list_of(is_text), "a list of names"),
    (("anyOf", "oneOf", "allOf", "prefixItems"), list_of(is_schema), "a list of schemas"),
    (("properties", "$defs", "definitions"), object_of(is_schema), "an object of schemas"),
    (("items", "additionalProperties", "propertyNames"), is_schema, "a schema"),
]


def check_form(schema: dict[str, Any]) -> None:
    """Refuse keywords whose values are none."""
    for keywords, is_good, wanted in FORMS:
        for keyword in keywords:
            if keyword in schema and not is_good(schema[keyword]):
                raise ValueError(f"{keyword} in the JSON schema is not {wanted}")
    for keyword in COUNTS:
        if schema.get(keyword, 0) < 0:
            raise ValueError(f"{keyword} in the JSON schema is negative")
    if schema.get("multipleOf", 1) <= 0:
        raise ValueError("multipleOf in the JSON schema is not above 0")
    for keyword in ("anyOf", "oneOf", "allOf", "enum"):
        if schema.get(keyword) == []:
            raise ValueError(f"{keyword} in the JSON schema is empty, so that nothing can be written")
