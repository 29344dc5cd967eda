"""Python's search for garbage in cycles, while a batch is decoded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 64
"""Requests whose steps set off searches. For fewer it is not worth asking what is left out already, which takes as
long as a few steps."""


@contextmanager
def settled(batch: int) -> Iterator[None]:
    """While so many requests are decoded together, whatever lives now is left out of the search.

    A step of a large batch makes thousands of small objects, which sets off a search every few of them; with all that
    torch and a tokenizer keep alive, that takes longer than the step. Where others have left something out already,
    nothing changes.
    """
    if batch < MANY or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
