"""Time on a machine that may be busy, or slow."""

from __future__ import annotations

import time
from collections.abc import Callable

STEPS = 500_000
IDLE_S = 0.05
"""What so many steps take where nothing else runs."""


def slowness() -> float:
    """How many times as long as on an idle machine everything takes just now, at least once."""
    began = time.monotonic()
    sum(i * i for i in range(STEPS))
    return max(1.0, (time.monotonic() - began) / IDLE_S)


def is_fast(measure: Callable[[], float], seconds: float) -> bool:
    """Whether something takes less than so long on an idle machine. A busy one stalls now and then; what is slow by
    itself is slow in all of three tries."""
    return any(measure() < seconds * slowness() for _ in range(3))
