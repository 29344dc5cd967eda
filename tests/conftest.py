"""What all tests share. Markers are declared in pyproject.toml."""

from __future__ import annotations

import pytest
import torch

# Tests run in one process per core. Two processes with two threads each would wait for each other all the time.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
