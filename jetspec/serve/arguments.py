"""The arguments of a tool call: an object, as JSON in a text. One rule for calls that are made and that come back."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from jetspec.grammar.bounds import depth_of

MAX_DEPTH = 64
MAX_DIGITS = 4300
"""Of a whole number, which Python reads; a longer one becomes a float."""


def read_whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


JSON = json.JSONDecoder(parse_int=read_whole, parse_constant=no_number)
"""Reads numbers of any length, but not NaN and its like."""


def read_arguments(text: str) -> dict[str, Any]:
    """ValueError if they are no object, or one that is too deep."""
    try:
        text.encode()  # an escape in a text around this one may stand for what no text can hold
        value = JSON.decode(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    if depth_of(value) > MAX_DEPTH:
        raise ValueError(f"the arguments of a call are nested deeper than {MAX_DEPTH}")
    return value


def told_arguments(text: str) -> dict[str, Any]:
    """What the model is told of them: no text holds half of a surrogate pair, which JSON can name.

    Some clients leave them empty where a function takes nothing.
    """
    whole = json.dumps(read_arguments(text or "{}"), ensure_ascii=False)
    told: dict[str, Any] = json.loads(whole.encode(errors="replace"))
    return told
