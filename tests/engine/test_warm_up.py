"""After a warm-up, requests of the usual kinds find every graph that they need."""

from __future__ import annotations

from jetspec.config import EngineConfig
from jetspec.engine.engine import Engine
from jetspec.engine.graphs import DecodeBatch, GraphRounds, Launched
from jetspec.engine.prefill import GraphPrefills
from jetspec.engine.warm_up import KINDS, courses
from jetspec.types import RoundFeatures, SamplingParams
from tests.engine.test_prefill import replaying
from tests.engine.tiny import make_engine, tiny_decoder, tiny_head

TARGET = tiny_decoder()
MAX_BATCH = 5


class NotedRounds(GraphRounds):
    """Notes which graphs it would replay, and runs rounds as they are written."""

    def __init__(self, engine: Engine) -> None:
        assert engine.graphs is not None
        super().__init__(engine.round, MAX_BATCH, engine.graphs)
        self.needed: set[tuple[int, RoundFeatures]] = set()

    def launch(self, decode_batch: DecodeBatch) -> Launched:
        self.needed.add((next(size for size in self.sizes if size >= len(decode_batch.rows)), decode_batch.features))
        return self.eager.launch(decode_batch)


def make() -> tuple[Engine, NotedRounds, GraphPrefills]:
    config = EngineConfig(
        max_batch=MAX_BATCH, max_len=100, prefill_chunk=64, num_pages=200, page_size=4, overlap_rounds=0
    )
    engine = replaying(TARGET, tiny_head(TARGET), config)
    engine.rounds = NotedRounds(engine)
    assert isinstance(engine.prefills, GraphPrefills)
    return engine, engine.rounds, engine.prefills


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_requests_find_their_graphs() -> None:
    engine, rounds, prefills = make()
    for course in courses(engine):
        course.run(engine)
    known, captured = set(rounds.needed), set(prefills.graphs)
    rounds.needed.clear()
    for sampling in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, seed=3)):
        for size in range(1, MAX_BATCH + 1):
            for i in range(size):
                engine.add([i], sampling)
            finish(engine)
    assert rounds.needed and rounds.needed <= known
    for length in (2, 20, 33, 34, 64, 65, 66, 90):
        engine.add([i % 30 for i in range(length)], KINDS[0], cache_salt=str(length))
        finish(engine)
    assert set(prefills.graphs) == captured


def test_a_warm_up_leaves_nothing_behind() -> None:
    engine, _, _ = make()
    for course in courses(engine):
        course.run(engine)
    assert not engine.requests and not engine.has_work
    engine.add([1] * 20, SamplingParams(max_tokens=2), quiet=True)  # as a prompt of the warm-up begins
    done = [update.completion for _ in range(9) for update in engine.step() if update.completion]
    assert len(done) == 1 and done[0].stats.cached_tokens == 0


def test_nothing_is_captured_where_rounds_run_as_written() -> None:
    assert courses(make_engine(TARGET, "head", tiny_head(TARGET))) == []
