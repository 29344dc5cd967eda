"""The fake LLM in place of the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.fake_llm import FakeLLM


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """The LLM class that the commands load: a subclass, which tests may change."""
    kind = type("FreshFake", (FakeLLM,), {"asked": [], "trees": [], "made": [], "sampled": []})
    monkeypatch.setitem(sys.modules, "jetspec.engine.llm", SimpleNamespace(LLM=kind))
    return kind
