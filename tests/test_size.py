"""The package stays short enough to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMITS: dict[tuple[str, ...], int] = {
    ("jetspec/types.py", "jetspec/config.py", "jetspec/tree", "jetspec/engine"): 5_500,
    ("jetspec",): 30_000,
    ("jetspec", "jetspec_vllm", "benchmarks"): 40_000,
    ("tests",): 32_000,
}
"""Most lines of Python in files and folders together. The first are the heart: what a reader reads first."""


@pytest.mark.parametrize("places", LIMITS, ids=" + ".join)
def test_lines(places: tuple[str, ...]) -> None:
    paths = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert 0 < lines <= LIMITS[places]
