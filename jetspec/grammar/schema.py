"""Checks that a grammar can enforce a JSON schema completely, and rewrites the schema for xgrammar."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

from jetspec.grammar.formats import FREE, LIBRARY, PATTERNS, is_safe, spelled_out
from jetspec.grammar.keywords import (
    COUNTS,
    IMPLIED,
    RANGE,
    all_parts,
    alternatives,
    check_form,
    named_types,
    only_values,
    resolved,
    type_of,
    types_of,
)

ANNOTATIONS = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "discriminator"}
)
"""Keywords without an effect on valid texts; so are those that begin with x-."""
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords beside which xgrammar ignores all others."""
KNOWN = frozenset(
    {"type", "pattern", "format", "multipleOf", "required", "additionalProperties", "propertyNames"}
    | {*COUNTS, *RANGE, *ALONE, *IMPLIED}
)
OWN = "$formats"
"""Keyword that holds our own expressions. It is unknown to clients: a schema that has it is refused."""
MAX_NAMES = 200
"""Limit on the names in an error message, in characters."""


def enforceable(source: str) -> str:
    """Returns the schema in a form that xgrammar enforces completely; ValueError names keywords that it cannot.

    Every generated text is valid, but not every valid text can be generated: a property that tells branches of `oneOf`
    apart becomes required.
    """
    try:
        root = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not valid JSON: {error}") from error
    parts = all_parts(root)
    for part in parts:
        check_form(part)
        _check_values(part)
    ignored = {name for part in parts for name in _ignored(part, root)}
    if ignored:
        names = ", ".join(sorted(ignored))[:MAX_NAMES]
        raise ValueError(f"the JSON schema uses {names} where it cannot be enforced")
    for part in parts:
        _separate(part, root)
        _spell_out(part, root)
    if not _all_end(root, parts):
        raise ValueError("the JSON schema has a part that contains itself by $ref, so that no text of it ever ends")
    return json.dumps(root)


# ---- one part ----


def _check_values(schema: dict[str, Any]) -> None:
    """Refuse constants that contradict the `type` beside them: no text would be valid."""
    named = set(named_types(schema))
    if "number" in named:
        named.add("integer")
    for value in only_values(schema):
        if "type" in schema and type_of(value) not in named:
            raise ValueError(f"the JSON schema has a value that is not of its type {schema['type']!r}"[:MAX_NAMES])


def _ignored(schema: dict[str, Any], root: Any) -> set[str]:
    """Returns the keywords of one part that xgrammar would not enforce."""
    keywords = {keyword for keyword in schema.keys() - ANNOTATIONS if not keyword.startswith("x-")}
    ignored = set(keywords - KNOWN)
    if "pattern" in keywords:
        ignored |= keywords & {"minLength", "maxLength", "format"}
        ignored |= set() if is_safe(str(schema["pattern"])) else {"pattern"}
    if "format" in keywords and schema["format"] not in FREE:
        ignored |= {"format"} if schema["format"] not in PATTERNS.keys() | LIBRARY else set()
        ignored |= keywords & ({"maxLength"} | ({"minLength"} if schema.get("minLength", 0) > 1 else set()))
    if schema.get("type") != "integer" or keywords & {*RANGE}:
        ignored |= keywords & {"multipleOf"}
    required = set(schema.get("required", ()))
    if required - schema.get("properties", {}).keys():
        ignored |= {"required"}
    if "propertyNames" in keywords and (
        schema.get("properties") or types_of(schema["propertyNames"], root) != {"string"}
    ):
        ignored |= {"propertyNames"}
    if schema.get("additionalProperties") is not False and schema.get("minProperties", 0) > max(1, len(required)):
        ignored |= {"minProperties"}  # xgrammar may repeat a name, which counts once
    if not re.fullmatch(r"#(/.*)?", str(schema.get("$ref", "#")), re.DOTALL):
        ignored |= {"$ref"}
    if alone := [keyword for keyword in ALONE if keyword in keywords]:
        ignored |= keywords - {alone[0]} - ({"type"} if alone[0] in ("enum", "const") else set())
        ignored |= {"allOf"} if len(schema.get("allOf", ())) > 1 else set()
    elif not keywords & {"type", *IMPLIED}:
        ignored |= keywords
    return ignored


def _spell_out(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Replaces a format by our expression, and an expression by one that xgrammar follows.

    Each format becomes one definition under `OWN`, so that the grammar contains it once.
    """
    name = schema.get("format")
    if name in PATTERNS and schema.get("type") == "string":
        root.setdefault(OWN, {})[name] = {"type": "string", "pattern": spelled_out(PATTERNS[name])}
        for keyword in schema.keys() & KNOWN:
            del schema[keyword]
        schema["$ref"] = f"#/{OWN}/{name}"
        return
    if name in FREE or name in PATTERNS:
        del schema["format"]
    if name in PATTERNS:
        schema["pattern"] = PATTERNS[name]
        schema.pop("minLength", None)
    if "pattern" in schema:
        schema["pattern"] = spelled_out(schema["pattern"])


# ---- oneOf ----


class Branch:
    """Properties by which branches of `oneOf` are told apart: types, constants, and constants of properties."""

    def __init__(self, schema: Any, root: Any) -> None:
        self.schema, self.types = resolved(schema, root), types_of(schema, root)
        self.values = _keys(self.schema)
        self.tags = {name: _keys(resolved(part, root)) for name, part in self.schema.get("properties", {}).items()}


def _separate(schema: dict[str, Any], root: Any) -> None:
    """Replaces `oneOf` by `anyOf`, which is equal if the branches are disjoint; refuses it otherwise."""
    if "oneOf" not in schema:
        return
    branches = [Branch(part, root) for part in schema["oneOf"]]
    for one, other in combinations(branches, 2):
        if one.types.isdisjoint(other.types) or _differ(one.values, other.values):
            continue
        tag = next((name for name in one.tags if _differ(one.tags[name], other.tags.get(name))), None)
        if tag is None or not one.types == other.types == {"object"}:
            raise ValueError(
                "the JSON schema uses oneOf with branches that may overlap; they must differ in their types, or in the "
                "const or enum of a property; or use anyOf"
            )
        for branch in (one, other):
            required = branch.schema.setdefault("required", [])
            if tag not in required:
                required.append(tag)
    schema["anyOf"] = schema.pop("oneOf")


def _keys(schema: dict[str, Any]) -> frozenset[str]:
    """Constants of a schema as normalised JSON; empty (any value) if some are lists or objects."""
    values = only_values(schema)
    if any(isinstance(value, list | dict) for value in values):
        return frozenset()
    return frozenset(json.dumps(int(v) if isinstance(v, float) and v.is_integer() else v) for v in values)


def _differ(one: frozenset[str], other: frozenset[str] | None) -> bool:
    """Returns true for two disjoint sets of constants. An empty set allows any value."""
    return bool(one and other) and one.isdisjoint(other or ())


# ---- finite texts ----


def _all_end(root: Any, parts: list[dict[str, Any]]) -> bool:
    """Returns true if each part has a finite text: one of its ways needs only parts that have one.

    Parts follow those that refer to them, so that in reverse order one pass usually suffices.
    """
    endless = {id(part): _ways(part, root) for part in reversed(parts)}
    before = -1
    while before != len(endless):
        before = len(endless)
        for part, ways in list(endless.items()):
            if any(endless.keys().isdisjoint(map(id, way)) for way in ways):
                del endless[part]
    return not endless


def _ways(schema: dict[str, Any], root: Any) -> list[list[Any]]:
    """Returns the ways to a finite text: for each, the schemas that need one."""
    if "$ref" in schema or "allOf" in schema:
        return [alternatives(schema, root)]
    if inner := alternatives(schema, root):
        return [[part] for part in inner]
    if "enum" in schema or "const" in schema:
        return [[]]
    named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    members = [named[name] for name in schema.get("required", ())]
    needed = {
        "object": members + [others] * (schema.get("minProperties", 0) > len(named)),
        "array": first[:least] + [schema.get("items", True)] * (least > len(first)),
    }
    return [needed.get(kind, []) for kind in named_types(schema) or ["any"]]
