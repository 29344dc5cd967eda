"""Between rounds the cache equals that of a fresh pass over the committed tokens."""

from __future__ import annotations

import pytest
import torch

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.engine.kv_cache import KVCache
from jetspec.types import KVPages, Request, SamplingParams, Update
from tests.engine.tiny import Script, Texts, engine_of, make_engine, run, tiny_decoder, use

TARGET = tiny_decoder()
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 4] * 10]
GREEDY = SamplingParams(max_tokens=25)
TRUTH = Texts(TARGET, PROMPTS)


def rows(cache: KVCache, pages: KVPages, request: Request) -> torch.Tensor:
    """K and V of a request, in order of position."""
    index = torch.tensor(cache.pages_of[request.row])
    both = torch.stack((pages.k[index], pages.v[index]))
    return both.flatten(1, 2)[:, : request.num_cached]


def fresh_rows(engine: Engine, request: Request) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V from a new engine that prefills the committed tokens at once."""
    head = getattr(engine.drafter, "head", None)
    name = "head" if head else "none"
    other = make_engine(engine.target, name, head, config=EngineConfig(page_size=64))  # type: ignore[arg-type]
    other.add(request.tokens, GREEDY)
    other._prefill(other.scheduler.next_chunks())
    (only,) = other.requests.values()
    layers = other.cache.head.layers if other.cache.head else []
    target = [rows(other.cache, pages, only) for pages in other.cache.target.layers]
    return target, [rows(other.cache, pages, only) for pages in layers]


def check_cache(engine: Engine, updates: list[Update]) -> None:
    for request in engine.scheduler.running.values():
        if not request.is_prefilled:
            continue
        assert request.num_cached == len(request.tokens) - 1 == int(engine.cache.length_R[request.row])
        with torch.inference_mode():
            target, head = fresh_rows(engine, request)
        for pages, expected in zip(engine.cache.target.layers, target, strict=True):
            torch.testing.assert_close(rows(engine.cache, pages, request), expected, atol=1e-4, rtol=1e-4)
        for pages, expected in zip(engine.cache.head.layers if engine.cache.head else (), head, strict=True):
            torch.testing.assert_close(rows(engine.cache, pages, request), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("who", ["causal", "bidirectional", "edge", "eagle3"])
def test_cache_of_target_and_head_equals_a_fresh_pass(who: str) -> None:
    engine = engine_of(TARGET, who, TreeConfig(budget=30, width=5), EngineConfig(page_size=4, prefill_chunk=5))
    run(engine, PROMPTS, GREEDY, check_cache)


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_cache_equals_a_fresh_pass_after_long_scattered_paths(right: float) -> None:
    truth = {tuple(p): t for p, t in zip(PROMPTS, TRUTH[GREEDY], strict=True)}
    engine = use(make_engine(TARGET, config=EngineConfig(page_size=4)), Script(truth, right, budget=16))
    run(engine, PROMPTS, GREEDY, check_cache)


@pytest.mark.parametrize("who", ["edge", "eagle3"])
def test_rows_behind_the_length_are_never_read(who: str) -> None:
    """Block rows, rejected nodes and padding lie behind the cached length. NaN there changes nothing."""
    engine = engine_of(TARGET, who, TreeConfig(budget=12, width=4), EngineConfig(page_size=4))

    def poison(engine: Engine, updates: list[Update]) -> None:
        assert engine.cache.head is not None
        for request in engine.scheduler.running.values():
            pages = torch.tensor(engine.cache.pages_of[request.row])
            position = torch.arange(request.num_cached, len(pages) * 4)
            for pool in (engine.cache.target, engine.cache.head):
                for layer in pool.layers:
                    layer.k[pages[position // 4], position % 4] = 1e6
                    layer.v[pages[position // 4], position % 4] = 1e6
                if pool.feature_SM is not None:
                    pool.feature_SM[pages[position // 4] * 4 + position % 4] = 1e6

    assert [c.token_ids for c in run(engine, PROMPTS, GREEDY, poison)] == TRUTH[GREEDY]
