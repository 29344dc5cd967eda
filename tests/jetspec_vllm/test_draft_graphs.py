"""Captured drafts serve batches of any size by padding."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu.cudagraph_utils import _teardown_profiling_state

from jetspec_vllm import draft_graphs
from jetspec_vllm.draft_graphs import batch_sizes
from jetspec_vllm.drafter import TreeDrafter
from jetspec_vllm.runner import StockRunner
from tests.jetspec_vllm.cpu import counted, generate, model_runner, start
from tests.jetspec_vllm.tiny import Oracle, random_prompts, write_head, write_target
from tests.rerun import Rerun, RerunPool

pytestmark = pytest.mark.vllm

PROMPTS = random_prompts((20, 3, 60))


def test_the_texts_are_the_same_and_so_is_the_acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in batches captured for four: most drafts include a padding request."""
    target, head = str(write_target(tmp_path / "target")), str(write_head(tmp_path / "head"))
    texts = generate(start(target), PROMPTS, 30)
    oracle, own = Oracle([p + t for p, t in zip(PROMPTS, texts, strict=True)]), TreeDrafter.guess
    seen: dict[tuple[int, int], set[tuple[float, ...]]] = {}

    def guess(drafter: Any, block: Any, anchor_B: Tensor, temperature_B: Tensor, cache: Any) -> Any:
        tree, length_B = own(drafter, block, anchor_B, temperature_B, cache), block.layout.cached_len_B
        assert tree.score_BN is not None
        for anchor, length, score in zip(anchor_B.tolist(), length_B.tolist(), tree.score_BN.tolist(), strict=True):
            seen.setdefault((anchor, length), set()).add(tuple(round(x, 2) for x in score[:4]))
        return oracle.guess(drafter, block, anchor_B, temperature_B, cache)

    monkeypatch.setattr(TreeDrafter, "guess", guess)
    monkeypatch.setattr(draft_graphs, "GraphPool", RerunPool)
    trees = start(target, head, disable_log_stats=False)
    assert generate(trees, PROMPTS, 30) == texts
    rounds = counted(trees)["num_drafts"]
    runner = model_runner(trees)
    runner.speculator.capture_drafts()
    assert trees.reset_prefix_cache()
    assert generate(trees, PROMPTS, 30) == texts
    assert counted(trees)["num_drafts"] == 2 * rounds < 0.7 * 2 * 30 * len(PROMPTS)
    assert all(len(proposals) == 1 for (_, length), proposals in seen.items() if length), "a draft depends on its graph"


def test_graphs_are_dropped_with_their_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures against a small cache, drops both, and drafts before it captures again."""
    target, head = str(write_target(tmp_path / "target")), str(write_head(tmp_path / "head"))
    replays: list[object] = []

    def addresses() -> list[int]:
        return [layer.kv_cache.data_ptr() for layer in model_runner(trees).speculator.layers.values()]

    class AddressedGraph(Rerun):
        """Stand-in for a CUDA graph that stores addresses of its caches."""

        def __init__(self, run: Callable[[], object], result: object) -> None:
            super().__init__(run, result)
            self.addresses = addresses()

        def replay(self) -> None:
            replays.append(self)
            assert self.addresses == addresses(), "the graph writes to a cache that is gone"
            super().replay()

    class AddressedPool(RerunPool):
        def capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
            result = run()
            return AddressedGraph(run, result), result

    monkeypatch.setattr(draft_graphs, "GraphPool", AddressedPool)
    trees = start(target, head)
    texts = generate(trees, PROMPTS, 12)
    assert trees.reset_prefix_cache()
    runner = model_runner(trees)
    monkeypatch.setattr(StockRunner, "capture_model", lambda runner, **options: runner.speculator.capture_drafts() or 0)

    runner.capture_model(profile_only=True)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    old = [StorageWeakRef(layer.kv_cache.untyped_storage()) for layer in layers]
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    config = runner.kv_cache_config
    _teardown_profiling_state(runner)
    assert all(cache.expired() for cache in old), "something holds the cache that was thrown away"
    elsewhere = torch.empty(64 << 20)  # the new cache is not to lie where the old one was
    with set_current_vllm_config(runner.vllm_config):
        runner.initialize_kv_cache(config)
    assert generate(trees, PROMPTS, 12) == texts and not replays

    del elsewhere
    runner.capture_model()
    assert trees.reset_prefix_cache()
    assert generate(trees, PROMPTS, 12) == texts and replays


def test_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(16) == [1, 2, 4, 8, 16]
