"""Control of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MIN_BATCH = 64
"""Batches from this size on trigger collections. For smaller ones the check takes as long as a few steps."""


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pauses the collector."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def freeze_objects(batch: int) -> Iterator[None]:
    """Excludes all present objects from collection while a large batch is decoded.

    A step of a large batch allocates thousands of small objects, which triggers a collection every few steps. With all
    that torch and a tokenizer keep alive, a collection takes longer than a step. Objects frozen elsewhere stay frozen.
    """
    if batch < MIN_BATCH or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
