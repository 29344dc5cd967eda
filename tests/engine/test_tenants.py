"""Tenants share the rows fairly, and no text depends on who else is there."""

from __future__ import annotations

import random

import pytest

from jetspec.config import EngineConfig
from jetspec.types import SamplingParams
from tests.engine.tiny import finish, make_engine, plain, tiny_decoder

TARGET = tiny_decoder()
PROMPT = [3, 1, 4, 1, 5]


def params(length: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0.8, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("num_pages", [None, 30])
def test_a_small_tenant_does_not_wait_for_a_large_one(num_pages: int | None) -> None:
    """Even if rows or pages are all taken. The texts of both are those that they have alone."""
    engine = make_engine(TARGET, config=EngineConfig(max_batch=4, page_size=4, max_len=40, num_pages=num_pages))
    large = [engine.add(PROMPT, params(24, seed), tenant="a") for seed in range(12)]
    done = {u.request_id: u.completion for _ in range(6) for u in engine.step() if u.completion}
    small = engine.add([7, 7], params(3, 99), tenant="b")
    steps = 0
    while small not in done:
        done |= {u.request_id: u.completion for u in engine.step() if u.completion}
        steps += 1
    assert steps <= 6 and len(done) <= 2
    done |= finish(engine)
    assert all(done[i].token_ids == plain(TARGET, [PROMPT], params(24, s))[0] for s, i in enumerate(large))
    assert done[small].token_ids == plain(TARGET, [[7, 7]], params(3, 99))[0]


def test_many_tenants_are_served_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tenants than rows, with requests of all sizes, some with many at once. Jain's index of the tokens served."""
    monkeypatch.setattr("jetspec.engine.scheduler.QUANTUM", 16)
    engine, draw = make_engine(TARGET, config=EngineConfig(max_batch=4, page_size=4, max_len=64)), random.Random(0)
    tokens = dict.fromkeys(map(str, range(20)), 0)
    tenant_of: dict[int, str] = {}
    for step in range(500):
        for tenant in tokens:
            if tenant not in engine.scheduler.tenants:
                for _ in range(draw.choice((1, 1, 6))):
                    tenant_of[engine.add(PROMPT, params(draw.randint(1, 50), step), tenant=tenant)] = tenant
        for update in engine.step():
            tokens[tenant_of[update.request_id]] += len(update.token_ids)
    served = tokens.values()
    assert sum(served) ** 2 / (len(served) * sum(n * n for n in served)) >= 0.95


def test_requests_of_one_tenant_are_served_in_order() -> None:
    engine = make_engine(TARGET, config=EngineConfig(max_batch=2, page_size=4))
    ids = [engine.add(PROMPT, params(8), tenant="a") for _ in range(6)]
    ended: list[int] = []
    finish(engine, lambda _, updates: ended.extend(u.request_id for u in updates if u.completion))
    assert ended == ids
    assert not engine.scheduler.tenants
