"""Delivery of Ctrl-C at points where it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, which is short and must be completed.

    Python delivers SIGINT in the main thread, between any two bytecodes. The handler in place, of Python or of another
    library, is called after the block. A default or ignored SIGINT is left unchanged.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: received.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[-1])
