"""What every command shows the same way: loading, statistics, shades, and model text made safe for a terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from jetspec.types import Completion, RoundStats, Update

SHADES = ("default", "cyan")
"""Tokens of one round share a shade; the next round takes the next one."""

_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Screen(Console):
    """A console that leaves lines as they are, and a broken pipe to the command line."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def out() -> Console:
    return Screen()


class Aside(Screen):
    """What is said on stderr. Where it cannot be written, such as on a full disk, the work goes on without."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise
        except OSError:
            pass


def err() -> Console:
    return Aside(stderr=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on stderr what takes a while: a spinner on a terminal, one line elsewhere."""
    console = err()
    if not console.is_terminal:
        console.print(f"{what} ...", markup=False)
        yield
        return
    with console.status(Text(what, style="dim"), spinner="dots"):
        yield


def printable(text: str) -> str:
    """Text without control characters: a model may write escape sequences, a terminal would obey them."""
    return text.translate(_CONTROL)


def duration(seconds: float) -> str:
    """A time that nobody needs to know more exactly."""
    minutes = seconds / 60
    return f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"


def shade(round_index: int) -> str:
    return SHADES[round_index % len(SHADES)]


def last(updates: Iterator[Update], seen: Callable[[Update], None] = lambda update: None) -> Completion:
    """Follow a stream to its end, showing each update on the way."""
    completion = None
    for update in updates:
        seen(update)
        completion = update.completion
    assert completion is not None, "a stream ends with its completion"
    return completion


def statistics(stats: RoundStats) -> str:
    return (
        f"{stats.completion_tokens} tokens · {stats.rounds} rounds · {stats.tokens_per_round:.2f} tokens per round"
        f" · {stats.tokens_per_s:.1f} tokens/s"
    )


@contextmanager
def held_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back until asked for, so that it never cuts a round in half. A second Ctrl-C is not held."""
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
