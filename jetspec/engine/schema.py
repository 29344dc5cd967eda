"""JSON schemas that a grammar keeps to the letter: whatever else they ask is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated"}
)
"""Keywords that ask nothing of the text."""
IGNORED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "patternProperties"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"}
)
"""Keywords that the library reads over, at least in some schemas."""
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords beside which the library reads over all others."""

READ_OVER = re.compile(r"\(\?(?!:|<\w|P<\w)|(?<=[^|(])\^|\$(?=[^|)])")
"""Parts of an expression that the library reads over: what looks ahead, flags, anchors that are not at an end."""


def check_schema(source: str) -> None:
    """Refuse, by name, what would be ignored: a text must not be promised more than it keeps."""
    try:
        root = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not valid JSON: {error}") from error
    parts = _all_parts(root)
    try:
        ignored = {name for part in parts for name in _ignored(part)}
        has_end = _all_end(root, parts)
    except (TypeError, AttributeError):
        raise ValueError("the JSON schema has a keyword whose value is of the wrong type") from None
    if ignored:
        raise ValueError(f"the JSON schema uses {', '.join(sorted(ignored))} where it cannot be enforced")
    if not has_end:
        raise ValueError("the JSON schema has a part that contains itself by $ref, so that no text of it ever ends")


def _ignored(schema: dict[str, Any]) -> set[str]:
    keywords = schema.keys() - ANNOTATIONS
    ignored = set(keywords & IGNORED)
    if "pattern" in keywords:
        ignored |= keywords & {"minLength", "maxLength", "format"}
        ignored |= set() if _is_safe(str(schema["pattern"])) else {"pattern"}
    if schema.get("type") != "integer":
        ignored |= keywords & {"multipleOf"}
    if schema.get("required") and not schema.get("properties"):
        ignored |= {"required"}
    if not re.fullmatch(r"#(/.*)?", str(schema.get("$ref", "#")), re.DOTALL):
        ignored |= {"$ref"}
    if alone := [keyword for keyword in ALONE if keyword in keywords]:
        ignored |= keywords - {alone[0]} - ({"type"} if alone[0] in ("enum", "const") else set())
        ignored |= {"allOf"} if len(schema.get("allOf", ())) > 1 else set()
    elif not keywords & {"type", "properties", "items", "prefixItems"}:
        ignored |= keywords
    return ignored


def _is_safe(pattern: str) -> bool:
    """Whether an expression is followed to the letter.

    The library reads over what looks ahead, flags, and anchors in the middle, and takes escapes that it does not know
    for plain letters. A character that a JSON string must escape it would write bare.
    """
    escapes = re.findall(r"\\(.)", pattern, re.DOTALL)
    is_known = all(e in "dDsSwW" or not (e.isalnum() or e == "\\") for e in escapes)
    return pattern.isprintable() and '"' not in pattern and is_known and not READ_OVER.search(_bare(pattern))


def _bare(pattern: str) -> str:
    """An expression with a letter in place of each escape and each class of characters."""
    return re.sub(r"\[[^]]*\]", "x", re.sub(r"\\.", "x", pattern))


def _all_parts(root: Any) -> list[dict[str, Any]]:
    """A schema and all schemas inside it or named by it, each once."""
    found: dict[int, dict[str, Any]] = {}
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            left += _parts(schema)
            left += [_target(root, schema["$ref"])] if "$ref" in schema else []
    return list(found.values())


def _parts(schema: dict[str, Any]) -> list[Any]:
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


def _target(root: Any, ref: Any) -> Any:
    """The schema that a reference leads to; None if there is none, which the library says."""
    for name in str(ref).split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _all_end(root: Any, parts: Iterable[dict[str, Any]]) -> bool:
    """Whether each part has a finite text. It has if all that it cannot do without have: those are found first."""
    left = {id(part): part for part in parts}
    while left:
        ending = [key for key, part in left.items() if _ends(part, root, left)]
        if not ending:
            return False
        for key in ending:
            del left[key]
    return True


def _ends(schema: dict[str, Any], root: Any, endless: Mapping[int, Any]) -> bool:
    """Whether a schema has a finite text, if those in `endless` have none."""

    def ends(part: Any) -> bool:
        return id(part) not in endless

    for keyword in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(keyword), list):
            return any(map(ends, ways))
    if "$ref" in schema:
        return ends(_target(root, schema["$ref"]))
    if isinstance(whole := schema.get("allOf"), list):
        return all(map(ends, whole))
    if "enum" in schema or "const" in schema:
        return True
    return any(all(map(ends, needed)) for needed in _needed(schema))


def _needed(schema: dict[str, Any]) -> list[list[Any]]:
    """For each type that a value may have, the schemas of those parts of it that cannot be left out."""
    type, named = schema.get("type"), schema.get("properties")
    implied = ["object"] * ("properties" in schema) + ["array"] * ("items" in schema or "prefixItems" in schema)
    ways: list[list[Any]] = []
    for kind in ([type] if isinstance(type, str) else type) or implied or ["any"]:
        needed: list[Any] = []
        if kind == "object":
            named = named if isinstance(named, dict) else {}
            others = schema.get("additionalProperties", True)
            required = [name for name in schema.get("required") or () if isinstance(name, str)]
            needed += [named.get(name, others) for name in required]
            needed += [others] if _count(schema, "minProperties") > len(named) else []
        elif kind == "array":
            first, least = schema.get("prefixItems") or [], _count(schema, "minItems")
            needed += first[:least]
            needed += [schema.get("items", True)] if least > len(first) else []
        ways.append(needed)
    return ways


def _count(schema: dict[str, Any], keyword: str) -> int:
    value = schema.get(keyword)
    return value if isinstance(value, int) else 0
