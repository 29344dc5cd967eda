"""vLLM with trees writes what vLLM writes alone; and what makes it so is needed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from collections.abc import Callable, Iterator
from typing import Any

from jetspec.integrations.vllm.attention import StepTrees
from jetspec.integrations.vllm.drafter import TreeDrafter
from jetspec.integrations.vllm.runner import TreeRunner
from tests.vllm.cpu import generate, start
from tests.vllm.tiny import Oracle, random_prompts, write_head, write_target

pytestmark = pytest.mark.vllm

LENGTH = 40
PROMPTS = random_prompts((20, 3, 60, 11))
"""The third is longer than what a step may take, so that it is read in chunks beside the trees of others."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def plain(target: str) -> Any:
    return start(target)


@pytest.fixture(scope="module")
def texts(plain: Any) -> list[list[int]]:
    return generate(plain, PROMPTS, LENGTH)


@pytest.fixture(scope="module")
def trees(target: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(target, str(write_head(tmp_path_factory.mktemp("heads") / "head")))


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], trees: Any) -> Iterator[Oracle]:
    oracle = Oracle([prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)])
    monkeypatch.setattr(TreeDrafter, "guess", lambda drafter, *args: oracle.guess(drafter, *args))
    assert trees.reset_prefix_cache()
    yield oracle


def test_a_ragged_batch_with_chunked_prompts(trees: Any, oracle: Oracle, texts: list[list[int]]) -> None:
    assert generate(trees, PROMPTS, LENGTH) == texts
    assert len(oracle.seen) < 0.7 * LENGTH, "hardly anything was accepted: the test says nothing"


def unchanged(*args: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("owner", "name", "without"),
    [
        (TreeRunner, "compact", unchanged),
        (TreeRunner, "set_positions", unchanged),
        (StepTrees, "ancestors", unchanged),
    ],
)
def test_each_part_is_needed(
    trees: Any,
    oracle: Oracle,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    without: Callable[..., Any],
) -> None:
    monkeypatch.setattr(owner, name, without)
    assert generate(trees, PROMPTS, LENGTH) != texts
