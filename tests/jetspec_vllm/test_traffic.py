"""Short run of random traffic; `python -m tests.jetspec_vllm.traffic` runs it for longer."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from pathlib import Path

from jetspec_vllm.drafter import TreeDrafter
from tests.jetspec_vllm.traffic import run

pytestmark = pytest.mark.vllm


def test_requests_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeDrafter, "guess", TreeDrafter.guess)  # what the run puts in its place goes with the test
    found = run(20, tmp_path)
    assert found["wrong"] == found["left_requests"] == found["left_pages"] == 0
    assert found["answered"] > 5 and found["cancelled"] > 0
    assert found["accepted"] > 0.5 * found["trees"] > 0
