"""Time on a machine that may be busy, or slow."""

from __future__ import annotations

import time

STEPS = 500_000
IDLE_S = 0.05
"""What so many steps take where nothing else runs."""


def slowness() -> float:
    """How many times as long as on an idle machine everything takes just now, at least once."""
    began = time.monotonic()
    sum(i * i for i in range(STEPS))
    return max(1.0, (time.monotonic() - began) / IDLE_S)
