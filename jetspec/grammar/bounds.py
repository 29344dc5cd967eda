"""Size limits on JSON schemas from clients: compiling one takes bounded time and memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from jetspec.grammar.keywords import COUNTS

MAX_BYTES = 16 << 10
MAX_ALL_BYTES = 4 * MAX_BYTES
"""Limit on all schemas of a request together."""
MAX_DEPTH = 16
MAX_COUNT = 1024
"""Limit on each count keyword, and on the repetitions in all patterns."""
MAX_STATES = 4096
"""Limit on named properties times their count: the grammar has a state for each subset size."""


def check_bounds(schemas: list[dict[str, Any]], name: str) -> None:
    """Raise ValueError for schemas that are too large, alone or together: they become one grammar. `name` is the
    request field that holds them."""
    if max(map(depth_of, schemas), default=0) > MAX_DEPTH:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH}")
    sizes = [len(json.dumps(schema)) for schema in schemas]
    for size, limit in ((max(sizes, default=0), MAX_BYTES), (sum(sizes), MAX_ALL_BYTES)):
        if size > limit:
            raise ValueError(f"{name} has {size} bytes; it may have {limit}")
    repeated = 0
    for part, _ in _walk(schemas):
        if not isinstance(part, dict):
            continue
        for keyword in COUNTS:
            if isinstance(value := part.get(keyword), int) and value > MAX_COUNT:
                raise ValueError(f"{keyword} in {name} is {value}; it may be at most {MAX_COUNT}")
        properties = part.get("properties")
        counts = [part[key] for key in ("minProperties", "maxProperties") if isinstance(part.get(key), int)]
        if isinstance(properties, dict) and counts and len(properties) * max(len(properties), *counts) > MAX_STATES:
            raise ValueError(f"an object in {name} bounds the number of its {len(properties)} properties: too many")
        if not str(part.get("$ref", "#")).startswith("#"):
            raise ValueError(f"a $ref in {name} leads outside; only references inside the schema are followed")
        if isinstance(pattern := part.get("pattern"), str):
            count = _repetitions(pattern)
            repeated += count if count > 1 else 0
        if repeated > MAX_COUNT:
            raise ValueError(f"the patterns in {name} repeat more than {MAX_COUNT} times")


def depth_of(value: Any) -> int:
    """Nesting depth of lists and objects."""
    return max(depth for _, depth in _walk(value))


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Yields a JSON value and all values inside it, with their depths. Iterative: depth is not limited yet."""
    left = [(value, 0)]
    while left:
        part, depth = left.pop()
        yield part, depth
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        left += [(child, depth + 1) for child in inner]


def _repetitions(pattern: str) -> int:
    """Upper bound of the repetitions by counts in a pattern, as if all of them were nested."""
    return math.prod(max(1, int(number[:9])) for number in re.findall(r"[{,](\d+)(?=[,}])", pattern))
