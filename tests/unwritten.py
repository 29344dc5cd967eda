"""Memory that nobody wrote."""

from __future__ import annotations

import torch


def fill_unwritten() -> None:
    """With NaN. It would hold what was there before, mostly zeros, and break a test once in a hundred runs.

    Not on a GPU, where the deterministic algorithms that come with it are others than those that are tested.
    """
    if torch.cuda.is_available():
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it, unless told not to
