"""Ctrl-C where it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, which is short and must be done whole.

    Python hears of it in the main thread, and between any two lines of it. A handler of Python's or of anybody else's
    is called when the block is done; where Ctrl-C is ignored or ends the process at once, that stays so.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    presses = []
    signal.signal(signal.SIGINT, lambda *press: presses.append(press))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if presses:
            handler(*presses[-1])
