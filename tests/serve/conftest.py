from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jetspec.engine.llm import LLM
from jetspec.serve.config import ServeConfig
from tests.serve.live import Live, tiny_llm
from tests.train.tiny_model import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def alone(folder: Path) -> LLM:
    """The same model as the server's, in an engine of its own."""
    return tiny_llm(folder)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server:
        yield server
        server.wait_for_rest()
