"""Python's search for garbage in cycles, while a batch is decoded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Whatever lives now is left out of the search meanwhile.

    A step of a large batch makes thousands of small objects, which sets off a search every few of them; with all that
    torch and a tokenizer keep alive, that takes longer than the step. Where others have left something out already,
    nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
