"""Parts of the screens that commands share: loading, statistics, shades, and model text made safe for a terminal."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jetspec.types import Completion, RoundStats, Update

NEGATIVE, FAILED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses: a negative answer, an error, and the two that a shell reports of SIGINT and SIGPIPE."""

SHADES = ("default", "cyan")
"""Tokens of one round share a shade; the next round takes the next one."""

_is_verbose = False
_START_S = time.perf_counter()
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Screen(Console):
    """A console that does not wrap lines, and leaves a broken pipe to the command group."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def out() -> Console:
    return Screen()


class Aside(Screen):
    """A console on stderr. Where it cannot be written, such as on a full disk, the work goes on."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise
        except OSError:
            pass


def err() -> Console:
    return Aside(stderr=True)


def note(line: str) -> None:
    """A dim line on stderr."""
    err().print(line, style="dim", markup=False)


def set_verbose(wanted: bool) -> None:
    global _is_verbose
    _is_verbose = wanted


def detail(line: str) -> None:
    """A line on stderr, with --verbose alone, after the seconds since the start of the process."""
    if _is_verbose:
        note(f"{time.perf_counter() - _START_S:7.2f} s  {line}")


@contextmanager
def working(step: str) -> Iterator[None]:
    """Names a long step on stderr: a spinner on a terminal, one line elsewhere."""
    detail(step)
    console = err()
    if not console.is_terminal:
        console.print(f"{step} ...", markup=False)
        yield
        return
    with console.status(Text(step, style="dim"), spinner="dots"):
        yield


def write_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def printable(text: str) -> str:
    """Text without control characters: a terminal would obey escape sequences that a model writes."""
    return text.translate(_CONTROL)


def duration(seconds: float) -> str:
    """A time, rounded."""
    minutes = seconds / 60
    return f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"


def shade(round_index: int) -> str:
    return SHADES[round_index % len(SHADES)]


def last(updates: Iterator[Update], seen: Callable[[Update], None] = lambda update: None) -> Completion:
    """The completion at the end of a stream. `seen` gets each update on the way."""
    completion = None
    for update in updates:
        seen(update)
        completion = update.completion
    assert completion is not None, "a stream ends with its completion"
    return completion


def to_dict(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.to_dict(),
    }


def total(stats: Iterable[RoundStats]) -> RoundStats:
    """Statistics of several answers as one."""
    parts = list(stats)
    names = [item.name for item in fields(RoundStats) if item.name != "accepted_lengths"]
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return RoundStats(accepted_lengths=[length for part in parts for length in part.accepted_lengths], **sums)


def number_table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], foot: Sequence[Any] = (), **options: Any
) -> Table:
    """A table with names in the first column, and numbers in the others."""
    made = Table(box=SIMPLE, show_footer=bool(foot), **options)
    for index, (head, below) in enumerate(zip(heads, foot or [""] * len(heads), strict=True)):
        shape: Any = {"justify": "right"} if index else {"no_wrap": True, "overflow": "ellipsis", "max_width": 40}
        made.add_column(head, below, **shape)
    for row in rows:
        made.add_row(*row)
    return made


def statistics(stats: RoundStats) -> str:
    return (
        f"{stats.completion_tokens} tokens · {stats.rounds} rounds · {stats.tokens_per_round:.2f} tokens per round"
        f" · {stats.tokens_per_s:.1f} tokens/s"
    )


@contextmanager
def held_interrupt() -> Iterator[Callable[[], bool]]:
    """Holds Ctrl-C back until it is asked for, so that it never interrupts a round. A second Ctrl-C is not held."""
    pressed = False

    def on_press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, on_press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
