"""`jetspec generate`: the text on stdout, what it cost on stderr; or both as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from jetspec.commands.screen import err, last, printable, statistics
from jetspec.types import Completion, Update


def to_dict(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.to_dict(),
    }


def write_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def write_completion(updates: Iterator[Update]) -> None:
    write_json(to_dict(last(updates)))


def write_text(updates: Iterator[Update]) -> None:
    """Stream the text as it appears. A terminal gets it without control characters, a file gets it unchanged."""
    clean = printable if sys.stdout.isatty() else str
    has_begun = False

    def show(update: Update) -> None:
        nonlocal has_begun
        has_begun = True
        sys.stdout.write(clean(update.text))
        sys.stdout.flush()

    try:
        completion = last(updates, show)
    finally:
        if has_begun:
            sys.stdout.write("\n")
    err().print(statistics(completion.stats), style="dim")
