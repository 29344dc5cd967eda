"""A padded prefill writes the same cache as one without padding."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.chunk import Chunk, PackedChunks, pad
from jetspec.engine.engine import Engine
from jetspec.engine.runner import MAX_CHUNKS, MAX_TOKENS, TOKEN_STEP, PrefillSizes
from jetspec.models.decoder import Decoder
from jetspec.models.heads import Head
from jetspec.ops.select import force
from tests.engine.test_engine import GREEDY
from tests.engine.tiny import engine_of, head_of, make_engine, tiny_decoder, tiny_eagle3, tiny_peagle
from tests.rerun import replay_all

WHO = ["none", "head", "edge", "eagle3", "peagle"]
DOUBLE = tiny_decoder().double()


def replaying(target: Decoder, head: Head | None, config: EngineConfig, sizes: PrefillSizes | None = None) -> Engine:
    """An engine with captured prefills and eager rounds."""
    with pytest.MonkeyPatch.context() as patch:
        replay_all(patch)
        engine = make_engine(target, "head" if head else "none", head, TreeConfig(budget=8, width=4), config)
    engine.runner.rounds.pool = None
    if sizes is not None:
        engine.runner.prefill_sizes = sizes
    return engine


def product_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product of each row alone: libraries add in an order that depends on the number of rows."""
    rows = [weight @ row if bias is None else weight @ row + bias for row in x.flatten(0, -2)]
    return torch.stack(rows).view(*x.shape[:-1], -1)


def read_prompts(engine: Engine, prompts: list[list[int]]) -> list[Tensor]:
    """Prefills all prompts and cancels each afterwards. Returns the content of all pages but the idle row's."""
    for prompt in prompts:
        engine.add(prompt, GREEDY)
    with torch.inference_mode():
        while engine.has_work:
            engine._prefill(engine.scheduler.next_chunks())
            for request in list(engine.scheduler.running.values()):
                if request.is_prefilled:
                    engine.cancel(request.id)
    return held(engine)


def held(engine: Engine) -> list[Tensor]:
    cache, pools = engine.cache, [pool for pool in (engine.cache.target, engine.cache.head) if pool is not None]
    found = [pool.storage[:, :, : cache.pool.num_pages].clone() for pool in pools]
    slots = cache.pool.num_pages * cache.page_size
    return found + [pool.feature_SM[:slots].clone() for pool in pools if pool.feature_SM is not None]


@settings(max_examples=40)
@given(
    who=st.sampled_from(WHO),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6),
    page_size=st.integers(1, 6),
    prefill_chunk=st.integers(1, 60),
    max_batch=st.integers(1, 5),
    sizes=st.sampled_from([None, PrefillSizes([8, 16], [1, 2]), PrefillSizes([1, 2, 3, 20], [2, 3])]),
)
def test_padded_prefills_write_the_same_bits(
    who: str, prompts: list[list[int]], page_size: int, prefill_chunk: int, max_batch: int, sizes: PrefillSizes | None
) -> None:
    """Ragged chunks, prompts of several chunks, cached prefixes, and chunks too large to be captured."""
    config = EngineConfig(
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        max_batch=max_batch,
        max_len=64,
        num_pages=120,
        overlap_rounds=0,
    )
    eager = engine_of(DOUBLE, who, config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("jetspec.ops.linear"), "linear_reference", product_by_rows)
        expected = read_prompts(eager, prompts)
        found = read_prompts(replaying(DOUBLE, head_of(who, DOUBLE), config, sizes), prompts)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert any(len(prompt) > 1 for prompt in prompts) == bool(expected[0].any())


@given(st.integers(1, 5000), st.integers(1, 200), st.data())
def test_prefill_sizes_are_few_and_padding_is_bounded(prefill_chunk: int, max_batch: int, data: st.DataObject) -> None:
    sizes = PrefillSizes.of(EngineConfig(prefill_chunk=prefill_chunk, max_batch=max_batch))
    assert len(sizes.tokens) <= 14 and len(sizes.chunks) <= 4
    assert sizes.chunks[-1] == min(max_batch, MAX_CHUNKS)
    assert min(prefill_chunk, MAX_TOKENS) <= sizes.tokens[-1] <= MAX_TOKENS
    for before, after in pairwise([0, *sizes.tokens]):
        assert before < after <= max(before + TOKEN_STEP, before * 1.5)

    count = data.draw(st.integers(1, max_batch))
    num_tokens = data.draw(st.integers(count, max(count, prefill_chunk)))
    chunks = [Chunk(i, 0, [5]) for i in range(count - 1)] + [Chunk(count - 1, 0, [5] * (num_tokens - count + 1))]
    size = sizes.fitting(chunks)
    assert (size is None) == (count > MAX_CHUNKS or num_tokens > sizes.tokens[-1])
    if size is not None:
        padded = pad(chunks, size[0], size[1] + 1, idle_row=max_batch)
        assert padded[:count] == chunks and len(padded) == size[1] + 1
        assert sum(len(chunk.tokens) for chunk in padded) == size[0]
        for rest in padded[count:]:
            assert rest.row == max_batch and rest.first == 0 and len(rest.tokens) <= sizes.max_padding


def interpret(who: str) -> None:
    """Compares padded with unpadded chunks on the kernels; the second chunk has a prefix."""
    torch.set_num_threads(1)
    target = tiny_decoder(vocab=20, layers=2)
    small: dict[str, Callable[..., Head]] = {"eagle3": partial(tiny_eagle3, depth=2), "peagle": tiny_peagle}
    head = small[who](target, draft_vocab=9) if who in small else head_of(who, target)
    config = EngineConfig(page_size=4, num_pages=20, max_batch=2, overlap_rounds=0)
    left = []
    for is_padded in (False, True):
        engine = replaying(target, head, config)
        assert engine.cache.idle_row is not None
        for tokens in ([5, 4, 3, 2, 1, 0], [7, 8]):
            engine.add(tokens, GREEDY)
        engine.scheduler.next_chunks()
        for counts in ((3, 0), (2, 1)):
            engine.cache.flush()
            parts = list(zip(engine.requests.values(), counts, strict=True))
            chunks, longest = [Chunk.of(*part) for part in parts if part[1]], None
            if is_padded:
                chunks, longest = pad(chunks, 8, 4, engine.cache.idle_row), 8
            with torch.inference_mode(), force("triton"):
                engine.round.prefill(PackedChunks.of(chunks, engine.device, longest))
            for part in parts:
                engine.cache.advance(*part)
        left.append(held(engine))
    for found, expected in zip(*left, strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("who", ["head", "eagle3", "peagle"])
def test_kernels_accept_padded_chunks(interpreter: Executor, who: str) -> None:
    interpreter.submit(interpret, who).result()
