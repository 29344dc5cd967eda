"""Pages have one owner, are freed, and are shared only for exactly the tokens they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.soak import resident_bytes
from jetspec.engine.kv_cache import KVPool, PagePool
from jetspec.models.decoder import DecoderConfig

PAGE = 2
SIZES = DecoderConfig(
    "llama", 40, 32, num_layers=30, num_heads=4, num_kv_heads=3, head_dim=64, inner_size=48, max_len=64
)
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Pages(RuleBasedStateMachine):
    """Compares a pool with a model that records the content of each page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, PAGE)
        self.held: list[tuple[list[int], list[int], str]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(tokens=tokens_strategy, salt=st.sampled_from(["", "1", "other"]))
    def start(self, tokens: list[int], salt: str) -> None:
        known = self.pool.match_prefix(tokens, salt)
        for i, page in enumerate(known):
            assert self.content[page] == (salt, tuple(tokens[: (i + 1) * PAGE]))
        missing = -(-len(tokens) // PAGE) - len(known)
        before = self.pool.num_available
        fresh = self.pool.allocate(missing)
        if fresh is None:
            assert before < missing
            self.pool.release(known)
            return
        assert len(fresh) == missing
        used = {page for _, pages, _ in self.held for page in pages}
        assert not used & set(fresh) and len(set(fresh)) == len(fresh)
        pages = known + fresh
        for i in range(len(known), len(pages)):
            self.content[pages[i]] = (salt, tuple(tokens[: (i + 1) * PAGE]))
        self.held.append((tokens, pages, salt))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def share(self, which: int) -> None:
        """Registered pages may be shared while they are in use."""
        self.pool.register(*self.held[which % len(self.held)])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), remember=st.booleans())
    def finish(self, which: int, remember: bool) -> None:
        tokens, pages, salt = self.held.pop(which % len(self.held))
        if remember:
            self.pool.register(tokens, pages, salt)
        self.pool.release(pages)

    @invariant()
    def every_page_is_somewhere(self) -> None:
        used = {page for _, pages, _ in self.held for page in pages}
        free, unused = set(self.pool.free_pages), set(self.pool.evictable)
        assert not (free & unused or free & used or unused & used)
        assert free | unused | used == set(range(8))
        assert self.pool.num_available == 8 - len(used)


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPages = Pages.TestCase


def test_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pool = PagePool(4, 1)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None and second is not None
    pool.register([1, 2], first)
    pool.register([3, 4], second)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]
    assert pool.match_prefix([1, 2]) == [first[0]]
    assert pool.match_prefix([3, 4]) == second


def test_cpu_allocation_fails_with_the_error_of_torch() -> None:
    """An empty allocation succeeds."""
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        KVPool(SIZES, 1 << 40, 16, torch.float32, torch.device("cpu"))
    assert KVPool(SIZES, 0, 16, torch.bfloat16, torch.device("cpu")).storage.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_take_memory_when_they_are_first_written(dtype: torch.dtype) -> None:
    before = resident_bytes()
    pool = KVPool(SIZES, 1 << 12, 16, dtype, torch.device("cpu"), feature_size=64)
    assert pool.storage.nbytes > 1 << 29
    first = pool.layers[0].k[0]
    assert not first.any() and pool.feature_SM is not None and not pool.feature_SM[0].any()
    first.fill_(1)
    assert (first == 1).all() and not pool.layers[0].v[0].any() and not pool.layers[0].k[1].any()
    assert resident_bytes() - before < pool.storage.nbytes / 8
