"""Bounds on the JSON schemas of clients, so that compiling one takes neither much time nor much memory."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jetspec.grammar.schema_form import COUNTS
from jetspec.serve.errors import ApiError

MAX_BYTES = 16 << 10
MAX_ALL_BYTES = 4 * MAX_BYTES
"""Of all schemas of a request together."""
MAX_DEPTH = 16
MAX_COUNT = 1024
"""Most characters, entries or properties that a schema may ask for, and most repetitions in its patterns."""
MAX_STATES = 4096
"""Named properties times their number, in an object that bounds it: a grammar follows which of them are left."""


def bounded(schema: dict[str, Any], param: str) -> str:
    """The schema as JSON, if it is small enough."""
    check_bounds([schema], param)
    return json.dumps(schema)


def check_bounds(schemas: list[dict[str, Any]], param: str) -> None:
    """Refuse what is too large, one by one or all together: they become one grammar."""
    if max(map(depth_of, schemas), default=0) > MAX_DEPTH:
        raise ApiError(f"{param} is nested deeper than {MAX_DEPTH}", param=param)
    sizes = [len(json.dumps(schema)) for schema in schemas]
    for size, most in ((max(sizes, default=0), MAX_BYTES), (sum(sizes), MAX_ALL_BYTES)):
        if size > most:
            raise ApiError(f"{param} has {size} bytes; it may have {most}", param=param)
    repeated = 0
    for part in objects(schemas):
        for name in COUNTS:
            if isinstance(value := part.get(name), int) and value > MAX_COUNT:
                raise ApiError(f"{name} in {param} is {value}; it may be at most {MAX_COUNT}", param=param)
        check_properties(part, param)
        if not str(part.get("$ref", "#")).startswith("#"):
            raise ApiError(f"a $ref in {param} leads elsewhere; only those within it are followed", param=param)
        if isinstance(pattern := part.get("pattern"), str):
            count = repetitions(pattern)
            repeated += count if count > 1 else 0
        if repeated > MAX_COUNT:
            raise ApiError(f"the patterns in {param} repeat more than {MAX_COUNT} times", param=param)


def check_properties(part: dict[str, Any], param: str) -> None:
    """Refuse to count many properties, of which a grammar knows at each place which may still come."""
    named = part.get("properties")
    counts = [part[name] for name in ("minProperties", "maxProperties") if isinstance(part.get(name), int)]
    if isinstance(named, dict) and counts and len(named) * max(len(named), *counts) > MAX_STATES:
        why = f"an object in {param} names {len(named)} properties and bounds their number; that is too much together"
        raise ApiError(why, param=param)


def depth_of(value: Any) -> int:
    """How deep lists and objects lie in each other."""
    level, depth = [value], 0
    while level:
        level = [part for whole in level for part in parts_of(whole)]
        depth += 1
    return depth - 1


def parts_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def objects(value: Any) -> list[dict[str, Any]]:
    """Every object, at any depth."""
    found: list[dict[str, Any]] = []
    left = [value]
    while left:
        whole = left.pop()
        if isinstance(whole, dict):
            found.append(whole)
        left += parts_of(whole)
    return found


def repetitions(pattern: str) -> int:
    """At most how often a part of the pattern is repeated by counts, if all of them lie in each other."""
    return math.prod(max(1, int(number[:9])) for number in re.findall(r"[{,](\d+)(?=[,}])", pattern))
