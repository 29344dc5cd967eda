"""Time limits on a busy or slow machine."""

from __future__ import annotations

import time
from collections.abc import Callable

STEPS = 500_000
IDLE_S = 0.05
"""Seconds for this many steps on an idle machine."""


def slowness() -> float:
    """Current slowdown compared to an idle machine, at least 1."""
    began = time.monotonic()
    sum(i * i for i in range(STEPS))
    return max(1.0, (time.monotonic() - began) / IDLE_S)


def is_fast(measure: Callable[[], float], seconds: float) -> bool:
    """True if a measurement stays below a limit on an idle machine, in the best of three tries."""
    return any(measure() < seconds * slowness() for _ in range(3))
