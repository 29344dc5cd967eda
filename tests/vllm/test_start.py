"""What is refused when vLLM starts is refused before its first request, and the rest works."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams

from jetspec.integrations.vllm.runner import needs_history, slot_rows
from jetspec.integrations.vllm.worker import StockWorker
from jetspec.models.draft_head import make_head
from jetspec.models.head_format import read_config, save_head
from tests.vllm.cpu import start
from tests.vllm.tiny import write_head, write_target

pytestmark = pytest.mark.vllm


def test_a_head_for_another_target_does_not_start(tmp_path: Path) -> None:
    target, made_for_four = str(write_target(tmp_path / "target")), read_config(write_head(tmp_path / "head"))
    save_head(make_head(replace(made_for_four, num_target_layers=5)), tmp_path / "other", dtype=torch.float32)
    with pytest.raises(Exception, match="made for 5 layers, the target has 4"):
        start(target, str(tmp_path / "other"))


class Started(Exception):
    """vLLM's own worker is what comes next."""


def test_the_dtype_of_the_model_is_a_dtype_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no 16-bit arithmetic here, so it is stopped where the worker becomes its own."""

    def stop(worker: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        raise Started(config.cache_config.cache_dtype)

    monkeypatch.setattr(StockWorker, "__init__", stop)
    target, head = str(write_target(tmp_path / "target")), str(write_head(tmp_path / "head"))
    how: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    with pytest.raises(Started, match="auto"):
        start(target, head, **how)
    with pytest.raises(Exception, match="a KV cache of float16 beside a model of bfloat16"):
        start(target, head, **{**how, "kv_cache_dtype": "float16"})


def test_layers_of_different_shapes_are_refused() -> None:
    layers = [SimpleNamespace(kv_cache=torch.zeros(3, heads, 4, 8)) for heads in (2, 4)]
    with pytest.raises(ValueError, match="different shapes"):
        slot_rows(layers)


@pytest.mark.parametrize(
    ("asked", "looks_back"), [({}, False), ({"thinking_token_budget": 0}, True), ({"bad_words": ["a"]}, True)]
)
def test_a_budget_of_no_thoughts_is_a_budget(asked: dict[str, Any], looks_back: bool) -> None:
    assert needs_history(SamplingParams(**asked)) is looks_back
