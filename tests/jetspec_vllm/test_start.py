"""Unsupported settings are refused at start, before the first request."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from jetspec.models.head_format import read_config, save_head
from jetspec_vllm.compat import check_hooks
from jetspec_vllm.drafter import TreeDrafter
from jetspec_vllm.runner import needs_history, slot_rows
from jetspec_vllm.worker import StockWorker
from tests.jetspec_vllm.cpu import generate, start
from tests.jetspec_vllm.tiny import random_prompts, write_head, write_target
from tests.models.head_paged import make_head

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Collect dropped engines at once: deleting one destroys the process groups of the others."""
    yield
    gc.collect()


def test_a_head_for_another_target_does_not_start(tmp_path: Path) -> None:
    target, made_for_four = str(write_target(tmp_path / "target")), read_config(write_head(tmp_path / "head"))
    save_head(make_head(replace(made_for_four, num_target_layers=5)), tmp_path / "other", dtype=torch.float32)
    with pytest.raises(Exception, match="4"):
        start(target, str(tmp_path / "other"))


@pytest.mark.parametrize("hook", ["add_requests", "prepare_dummy_attn", "profile_run"])
def test_missing_or_changed_hook_is_named(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hooks()
    monkeypatch.setattr(GPUModelRunner, hook, lambda other: None)
    with pytest.raises(ValueError, match=r"other.*0\.26\.0, 0\.32\.x"):
        check_hooks()
    monkeypatch.delattr(GPUModelRunner, hook)
    with pytest.raises(ValueError, match=rf"{hook}.*0\.26\.0, 0\.32\.x"):
        check_hooks()


class Started(Exception):
    """Raised where vLLM's own worker would start."""


def test_the_dtype_of_the_model_is_a_dtype_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU wheel has no 16-bit arithmetic, so the start stops before vLLM's own worker."""

    def stop(worker: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        raise Started(config.cache_config.cache_dtype)

    monkeypatch.setattr(StockWorker, "__init__", stop)
    target, head = str(write_target(tmp_path / "target")), str(write_head(tmp_path / "head"))
    how: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    with pytest.raises(Started, match="auto"):
        start(target, head, **how)
    with pytest.raises(Exception, match=r"float16.*bfloat16"):
        start(target, head, **{**how, "kv_cache_dtype": "float16"})


def test_the_largest_step_is_part_of_the_memory_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, vLLM gives the KV cache the memory that `profile_run` leaves free."""
    target, head = str(write_target(tmp_path / "target")), str(write_head(tmp_path / "head"))
    seen: dict[str, list[int]] = {"logits": [], "drafts": [], "states": []}
    logits, draft = Qwen3ForCausalLM.compute_logits, TreeDrafter.draft

    def compute_logits(model: Any, hidden: torch.Tensor) -> Any:
        seen["logits"].append(len(hidden))
        return logits(model, hidden)

    def noted(drafter: Any, inputs: Any) -> Any:
        seen["drafts"].append(len(inputs.anchor_B))
        seen["states"].append(len(inputs.tap_TX))
        return draft(drafter, inputs)

    monkeypatch.setattr(Qwen3ForCausalLM, "compute_logits", compute_logits)
    monkeypatch.setattr(TreeDrafter, "draft", noted)
    # Where the size of the cache is said, as in these tests, vLLM on a CPU has nothing to measure.
    monkeypatch.setattr(StockWorker, "_should_warm_up_model", lambda worker: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    trees = start(target, head, max_num_seqs=3, max_num_batched_tokens=64)
    measured = {what: max(sizes) for what, sizes in seen.items()}
    assert measured == {"logits": 3 * 16, "drafts": 3, "states": 64}
    generate(trees, random_prompts((20, 3, 70)), 12)
    assert all(max(sizes) <= measured[what] for what, sizes in seen.items())


def test_layers_of_different_shapes_are_refused() -> None:
    layers = [SimpleNamespace(kv_cache=torch.zeros(3, heads, 4, 8)) for heads in (2, 4)]
    with pytest.raises(ValueError, match="different shapes"):
        slot_rows(layers)


@pytest.mark.parametrize(
    ("asked", "looks_back"), [({}, False), ({"thinking_token_budget": 0}, True), ({"bad_words": ["a"]}, True)]
)
def test_a_budget_of_no_thoughts_is_a_budget(asked: dict[str, Any], looks_back: bool) -> None:
    assert needs_history(SamplingParams(**asked)) is looks_back
