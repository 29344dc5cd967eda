"""Pages are handed out once, come back, and are recalled only for exactly the tokens they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jetspec.engine.kv_cache import KVCache, PagePool
from jetspec.types import Request, SamplingParams
from tests.engine.tiny import tiny_decoder

PAGE = 2
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Pages(RuleBasedStateMachine):
    """A pool against a model that writes down what each page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, PAGE)
        self.held: list[tuple[list[int], list[int], str]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(tokens=tokens_strategy, salt=st.sampled_from(["", "1", "other"]))
    def start(self, tokens: list[int], salt: str) -> None:
        known = self.pool.recall(tokens, salt)
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
        """Pages may be recalled by others while they are in use."""
        self.pool.remember(*self.held[which % len(self.held)])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), remember=st.booleans())
    def finish(self, which: int, remember: bool) -> None:
        tokens, pages, salt = self.held.pop(which % len(self.held))
        if remember:
            self.pool.remember(tokens, pages, salt)
        self.pool.release(pages)

    @invariant()
    def every_page_is_somewhere(self) -> None:
        used = {page for _, pages, _ in self.held for page in pages}
        free, unused = set(self.pool.free_pages), set(self.pool.unused)
        assert not (free & unused or free & used or unused & used)
        assert free | unused | used == set(range(8))
        assert self.pool.num_available == 8 - len(used)


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPages = Pages.TestCase


def test_the_longest_unused_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = PagePool(4, 1)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None and second is not None
    pool.remember([1, 2], first)
    pool.remember([3, 4], second)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]
    assert pool.recall([1, 2]) == [first[0]]
    assert pool.recall([3, 4]) == second


def test_without_memory_nothing_is_recalled() -> None:
    pool = PagePool(4, 1, remember=False)
    pages = pool.allocate(2)
    assert pages is not None
    pool.remember([1, 2], pages)
    pool.release(pages)
    assert pool.recall([1, 2]) == []


def cache_of(num_pages: int) -> KVCache:
    config = tiny_decoder().config
    return KVCache(
        config,
        None,
        num_rows=8,
        row_len=200,
        num_pages=num_pages,
        page_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        prefix_cache=False,
    )


def request_of(prompt: int, longest: int) -> Request:
    return Request(0, [0] * prompt, prompt, SamplingParams(), seed=0, longest=longest)


@pytest.mark.parametrize(("num_pages", "most_changes"), [(200, 5), (35, 26)])
def test_the_page_table_rarely_changes_while_pages_are_plenty(num_pages: int, most_changes: int) -> None:
    """And a request never holds more than it could come to need."""
    cache, request, changes = cache_of(num_pages), request_of(5, longest=120), 0
    assert cache.admit(request, tokens_ahead=6)
    for cached in range(5, 120):
        request.num_cached = cached
        assert cache.reserve(request, tokens_ahead=6)
        held = cache.pages_of[request.row]
        assert cache.pages_for(cached + 6) <= len(held) <= cache.pages_for(120 + 6)
        changes += bool(cache.new_pages)
        cache.flush()
        assert cache.page_RP[request.row, : len(held)].tolist() == held
    assert changes <= most_changes


@pytest.mark.parametrize("num_pages", [9, 16, 23, 40])
def test_spare_pages_are_taken_from_nobody(num_pages: int) -> None:
    cache = cache_of(num_pages)
    for prompt in (3, 9, 14, 6, 30, 2, 8, 5):
        free, request = len(cache.pool.free_pages), request_of(prompt, longest=100)
        needed = cache.pages_for(prompt - 1 + 6)
        assert cache.admit(request, tokens_ahead=6) == (needed <= free)
        if needed <= free:
            spare = len(cache.pages_of[request.row]) - needed
            assert 0 <= spare <= 8 and (spare == 0 or len(cache.pool.free_pages) >= num_pages // 2)
