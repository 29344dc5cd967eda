"""Warm-up captures every graph that requests of the usual kinds use."""

from __future__ import annotations

import pytest

from jetspec.config import EngineConfig
from jetspec.engine.engine import Engine
from jetspec.engine.warm_up import KINDS, warm_up_batches
from jetspec.types import SamplingParams
from tests.engine.tiny import finish, make_engine, tiny_decoder, tiny_head
from tests.rerun import replay_all

TARGET = tiny_decoder()
MAX_BATCH = 5


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine after its warm-up."""
    replay_all(monkeypatch)
    config = EngineConfig(
        max_batch=MAX_BATCH, max_len=100, prefill_chunk=64, num_pages=200, page_size=4, overlap_rounds=0
    )
    engine = make_engine(TARGET, "head", tiny_head(TARGET), config=config)
    for batch in warm_up_batches(engine):
        batch.run(engine)
    return engine


def test_requests_find_their_graphs(warm: Engine) -> None:
    assert warm.graphs is not None
    captured = warm.graphs.num_captured
    assert captured == len(warm.runner.rounds.captured) + len(warm.runner.prefills.captured) > MAX_BATCH
    for sampling in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, seed=3)):
        for size in range(1, MAX_BATCH + 1):
            for i in range(size):
                warm.add([i], sampling)
            finish(warm)
    for length in (2, 20, 33, 34, 64, 65, 66, 90):
        warm.add([i % 30 for i in range(length)], KINDS[0], cache_salt=str(length))
        finish(warm)
    assert warm.graphs.num_captured == captured


def test_warm_up_leaves_no_request_and_no_prefix(warm: Engine) -> None:
    assert not warm.requests and not warm.has_work
    warm.add([1] * 20, SamplingParams(max_tokens=2), quiet=True)  # starts like a prompt of the warm-up
    (done,) = finish(warm).values()
    assert done.stats.cached_tokens == 0


def test_eager_engine_needs_no_warm_up() -> None:
    assert warm_up_batches(make_engine(TARGET, "head", tiny_head(TARGET))) == []
