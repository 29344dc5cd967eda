"""The engine's output equals plain decoding for every drafter and memory layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.config import BatchTree, EngineConfig, TreeConfig
from jetspec.types import Request, SamplingParams, TreeLimits
from tests.engine.tiny import (
    VOCAB,
    Script,
    Texts,
    engine_of,
    finish,
    head_of,
    make_engine,
    plain,
    run,
    tiny_decoder,
    tiny_head,
    use,
)

TARGET = tiny_decoder()
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 4] * 10, [11, 12, 13], [5, 4] * 6 + [30], [40, 41, 42, 43]]
GREEDY = SamplingParams(max_tokens=20)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, top_k=30, min_p=0.01, seed=11)
TRUTH = Texts(TARGET, PROMPTS)


def truth(sampling: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): t for p, t in zip(PROMPTS, TRUTH[sampling], strict=True)}


@pytest.mark.parametrize(
    ("budget", "batch", "sampling"),
    [(2, 6, GREEDY), (8, 1, GREEDY), (40, 6, SAMPLED)],
    ids=["2 nodes, greedy", "one request, greedy", "40 nodes, sampled"],
)
@pytest.mark.parametrize("who", ["ngram", "head", "bidirectional", "edge", "eagle3", "eagle3_few_tokens"])
def test_output_equals_plain_decoding(who: str, budget: int, batch: int, sampling: SamplingParams) -> None:
    config = EngineConfig(page_size=4, max_batch=batch)
    engine = engine_of(TARGET, who, TreeConfig(budget=budget, width=4), config)
    done = run(engine, PROMPTS, replace(sampling, max_tokens=18))
    assert [c.token_ids for c in done] == [text[:18] for text in TRUTH[sampling]]


@pytest.mark.parametrize("who", ["edge", "head", "eagle3", "peagle"])
def test_nan_drafts_do_not_change_the_output(who: str) -> None:
    head = head_of(who, TARGET)
    assert head is not None
    head.norm.weight.fill_(torch.nan)
    engine = make_engine(TARGET, "head", head, TreeConfig(budget=6, width=4))
    done = run(engine, PROMPTS, GREEDY)
    assert [c.token_ids for c in done] == TRUTH[GREEDY]
    assert all(c.stats.ngram_tokens == sum(c.stats.accepted_lengths) for c in done)


@settings(max_examples=10)
@given(
    page_size=st.integers(1, 9),
    chunk=st.integers(1, 12),
    batch=st.integers(1, 6),
    spare_pages=st.integers(0, 30),
    prefix_cache=st.booleans(),
    right=st.sampled_from([0.3, 0.9]),
)
def test_output_does_not_depend_on_the_memory_layout(
    page_size: int, chunk: int, batch: int, spare_pages: int, prefix_cache: bool, right: float
) -> None:
    """Page size, prefill chunk, batch size and preemption do not change the text, and all pages are freed."""
    longest = max(len(p) for p in PROMPTS) + GREEDY.token_limit + 20
    config = EngineConfig(
        page_size=page_size,
        prefill_chunk=chunk,
        max_batch=batch,
        num_pages=-(-longest // page_size) + spare_pages,
        prefix_cache=prefix_cache,
        max_len=200,
    )
    engine = use(make_engine(TARGET, config=config), Script(truth(GREEDY), right, budget=12))
    assert [c.token_ids for c in run(engine, PROMPTS, GREEDY)] == TRUTH[GREEDY]
    pool = engine.cache.pool
    assert pool.num_available == pool.num_pages and not any(pool.users)
    assert sorted(engine.cache.free_rows) == list(range(batch))


@pytest.mark.parametrize("who", ["none", "edge", "eagle3", "peagle"])
def test_prefix_hits_reduce_prefill_only(who: str) -> None:
    sampling = SamplingParams(max_tokens=8)
    shared = [7, 8, 9, 10] * 5
    prompts = [[*shared, 1, 2], [*shared, 3], shared, [*shared, 1, 2, 4]]
    engine = engine_of(TARGET, who, config=EngineConfig(page_size=4, max_batch=1))
    cold = engine_of(TARGET, who, config=EngineConfig(page_size=4, max_batch=1, prefix_cache=False))
    warm_done, cold_done = run(engine, prompts, sampling), run(cold, prompts, sampling)
    assert [c.token_ids for c in warm_done] == [c.token_ids for c in cold_done]
    assert [c.stats.accepted_lengths for c in warm_done] == [c.stats.accepted_lengths for c in cold_done]
    assert [c.stats.cached_tokens for c in warm_done] == [0, 20, 16, 20]
    assert [c.stats.cached_tokens for c in cold_done] == [0, 0, 0, 0]


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("0") + t) for t in tokens)


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("end", ["end token", "ignored end token", "stop string", 1, 4, 7])
def test_text_ends_inside_a_path(end: str | int, right: float) -> None:
    """The end is that of plain decoding: an end token, a stop string or `max_tokens`."""
    expected, sampling, reason = TRUTH[GREEDY][3], GREEDY, "length"
    text, eos = letters(expected), frozenset({expected[9]}) if "end token" in str(end) else frozenset[int]()
    if isinstance(end, int):
        sampling = SamplingParams(max_tokens=end)
        expected, text = expected[:end], text[:end]
    elif end == "end token":
        size, reason = expected.index(expected[9]) + 1, "stop"
        expected, text = expected[:size], text[:size]
    elif end == "stop string":
        sampling, size, reason = replace(GREEDY, stop=("no such text", text[8:11])), text.find(text[8:11]), "stop"
        expected, text = expected[: size + 3], text[:size]
    else:
        sampling = replace(GREEDY, ignore_eos=True)
    engine = use(make_engine(TARGET, decode=letters, eos_tokens=eos), Script(truth(GREEDY), right, budget=12))
    streamed: list[str] = []
    (done,) = run(engine, [PROMPTS[3]], sampling, lambda _, updates: streamed.extend(u.text for u in updates))
    assert (done.token_ids, done.text, done.finish_reason) == (expected, text, reason)
    assert "".join(streamed) == text


@pytest.mark.parametrize("who", ["none", "ngram", "head", "eagle3"])
def test_the_context_is_filled_to_its_last_position(who: str) -> None:
    engine = engine_of(TARGET, who, config=EngineConfig(max_len=24, page_size=5))
    done = run(engine, PROMPTS[:1], SamplingParams())[0]
    assert (done.token_ids, done.finish_reason) == (TRUTH[GREEDY][0][: 24 - 7], "length")


def test_statistics_are_consistent() -> None:
    engine = use(make_engine(TARGET, config=EngineConfig(page_size=4, max_batch=2)), Script(truth(GREEDY), 0.7, 10))
    for prompt, done in zip(PROMPTS, run(engine, PROMPTS, GREEDY), strict=True):
        stats = done.stats
        assert stats.completion_tokens == len(done.token_ids) == stats.rounds + sum(stats.accepted_lengths)
        assert stats.prompt_tokens == len(prompt)
        assert stats.tokens_per_round == pytest.approx(len(done.token_ids) / stats.rounds)
        assert stats.decode_s > 0


@pytest.mark.parametrize(("who", "sampling"), [("ngram", SAMPLED), ("head", GREEDY)], ids=["ngram", "head"])
def test_tree_limits_apply_per_request(who: str, sampling: SamplingParams) -> None:
    """Alone and in a mixed batch, trees stay within their limits and the text is the same."""
    limits = [None, TreeLimits(1, 4), TreeLimits(5, 4), TreeLimits(40, 1), TreeLimits(1, 1), TreeLimits(12, 2)]
    for batch in (1, 6):
        tree, config = TreeConfig(budget=12, width=4), EngineConfig(page_size=4, max_batch=batch)
        engine = engine_of(TARGET, who, tree, config)
        pairs = zip(PROMPTS, limits, strict=True)
        ids = [engine.add(prompt, sampling, limits=limit, trace=True) for prompt, limit in pairs]
        done = {}
        while engine.has_work:
            for update in engine.step():
                limit, trace = limits[ids.index(update.request_id)] or TreeLimits(12, 4), update.trace
                assert trace is not None and update.drafted == len(trace.tokens) - 1 < limit.budget
                children = [trace.parents[1:].count(node) for node in range(len(trace.tokens))]
                assert max(children) <= limit.width
                if update.completion:
                    done[update.request_id] = update.completion.token_ids
        assert [done[i] for i in ids] == TRUTH[sampling]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("who", ["ngram", "head", "edge", "eagle3"])
def test_tree_size_follows_the_batch_size(who: str, sampling: SamplingParams) -> None:
    """Trees grow as requests end, and the text is the same."""
    tree = TreeConfig(budget=12, width=4, batch_trees=(BatchTree(2, 6, depth=2), BatchTree(4, 3), BatchTree(6, 1)))
    engine = engine_of(TARGET, who, tree, EngineConfig(page_size=4, max_batch=6))
    lengths = [3, 6, 9, 12, 15, 20]
    prompts = zip(PROMPTS, lengths, strict=True)
    ids = [engine.add(prompt, replace(sampling, max_tokens=n), trace=True) for prompt, n in prompts]
    done, largest = {}, dict.fromkeys(range(1, 7), 0)
    while engine.has_work:
        updates = engine.step()
        batch = len(engine.decode_batch.requests)
        for update in updates:
            assert update.trace is not None and update.drafted < tree.at(batch).budget
            largest[batch] = max(largest[batch], update.drafted)
            deepest = max(node_depths(update.trace.parents))
            assert deepest <= (2 if batch in (2, 3) and who != "ngram" else 15)
            if update.completion:
                done[update.request_id] = update.completion.token_ids
    assert [done[i] for i in ids] == [text[:n] for text, n in zip(TRUTH[sampling], lengths, strict=True)]
    assert largest[6] == 0 < largest[4] <= 2 < largest[2] <= 5 < largest[1] or who == "ngram"


def node_depths(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def test_plain_rounds_update_the_context_of_the_head() -> None:
    """Drafts after plain rounds are as good as after rounds with trees."""
    head, shared = tiny_head(TARGET), PROMPTS[0]
    accepted = []
    for limits in (None, TreeLimits(1, 1)):
        engine = make_engine(TARGET, "head", head, config=EngineConfig(page_size=4, max_batch=1))
        engine.add(shared, GREEDY, limits=limits)
        finish(engine)
        after = run(engine, [shared + TRUTH[GREEDY][0][:20]], GREEDY)[0]
        assert after.stats.cached_tokens == 24
        accepted.append(after.stats.accepted_lengths)
    assert accepted[0] == accepted[1]


def test_traces_match_the_committed_tokens() -> None:
    engine = make_engine(TARGET, "head", tiny_head(TARGET), TreeConfig(budget=12, width=3))
    engine.add(PROMPTS[0], GREEDY, trace=True)
    written: list[int] = []
    while engine.has_work:
        for update in engine.step():
            trace = update.trace
            assert trace is not None and len(trace.tokens) == 12 == len(trace.parents) == len(trace.scores)
            for above, below in zip(trace.path, trace.path[1:], strict=False):
                assert trace.parents[below] == above
                assert trace.scores[below] == pytest.approx(trace.scores[above] + trace.logprobs[below])
            assert max(trace.logprobs) <= 0
            written += [trace.tokens[node] for node in trace.path[1:]] + [trace.bonus]
    assert written[: GREEDY.token_limit] == TRUTH[GREEDY][0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 256, "256 tokens"), ([VOCAB], "vocabulary"), ([-1], "vocabulary")],
)
def test_bad_prompts_are_refused_in_one_line(prompt: list[int], message: str) -> None:
    engine = make_engine(TARGET)
    with pytest.raises(ValueError, match=message) as caught:
        engine.add(prompt, GREEDY)
    assert "\n" not in str(caught.value)
    assert not engine.has_work


def test_a_small_pool_shortens_the_context_instead_of_hanging() -> None:
    engine = make_engine(TARGET, config=EngineConfig(page_size=4, num_pages=5))
    assert engine.max_len == 5 * 4 - 1
    done = run(engine, [PROMPTS[0]], SamplingParams())[0]
    assert (len(done.token_ids), done.finish_reason) == (19 - 7, "length")


@pytest.mark.parametrize(
    ("who", "tree", "config", "message"),
    [
        ("ngram", TreeConfig(budget=40), EngineConfig(page_size=4, num_pages=5), "num_pages"),
        ("ngram", TreeConfig(), EngineConfig(overlap_rounds=1), "overlap_rounds"),
        ("none", TreeConfig(), EngineConfig(execution="graph"), "execution"),
        *((who, TreeConfig(expand="paper"), EngineConfig(), "expand and score") for who in ("ngram", "eagle3")),
        *((who, TreeConfig(score="entropy"), EngineConfig(), "expand and score") for who in ("ngram", "eagle3")),
    ],
)
def test_unusable_settings_are_refused(who: str, tree: TreeConfig, config: EngineConfig, message: str) -> None:
    """A tree larger than the cache; n-gram drafts, which would continue an outdated text; graphs without a GPU;
    settings of another drafter."""
    with pytest.raises(ValueError, match=message):
        engine_of(TARGET, who, tree, config)
    with pytest.raises(ValueError, match="drafter"):
        make_engine(TARGET, "head")


def test_float64_output_equals_plain_decoding() -> None:
    """The engine runs in the precision of the target."""
    target = tiny_decoder().to(torch.float64)
    done = run(make_engine(target, "ngram"), PROMPTS[:2], GREEDY)
    assert all(len(c.token_ids) == GREEDY.token_limit for c in done)


def test_ngram_rounds_of_the_anchor_alone_may_overlap() -> None:
    config = EngineConfig(page_size=4, overlap_rounds=1)
    plain = make_engine(TARGET, "ngram", tree=TreeConfig(budget=1), config=config)
    assert [c.token_ids for c in run(plain, PROMPTS, GREEDY)] == TRUTH[GREEDY]


@pytest.mark.parametrize(("overlap_rounds", "sampling"), [(1, GREEDY), (2, SAMPLED)], ids=["1, greedy", "2, sampled"])
@pytest.mark.parametrize("who", ["none", "head"])
def test_overlapping_rounds_do_not_change_the_output(who: str, overlap_rounds: int, sampling: SamplingParams) -> None:
    """Requests end, join and are preempted while a round is in flight; the text is the same."""
    eos = TRUTH[sampling][0][12]
    for num_pages in (None, 24):
        config = EngineConfig(page_size=4, max_batch=3, overlap_rounds=overlap_rounds, num_pages=num_pages)
        engine = engine_of(TARGET, who, config=config, eos_tokens=frozenset({eos}))
        done = run(engine, PROMPTS, sampling)
        expected = [t[: t.index(eos) + 1] if eos in t else t for t in TRUTH[sampling]]
        assert [c.token_ids for c in done] == expected
        assert engine.cache.pool.num_available == engine.cache.pool.num_pages
        assert not engine.in_flight


def test_admission_delay_groups_prefills() -> None:
    """Waiting requests are admitted in groups, none later than the delay, and the text is the same."""
    expected = plain(TARGET, PROMPTS[:1], SamplingParams(max_tokens=25))[0]

    def joins(max_admission_delay: int) -> list[int]:
        engine = make_engine(
            TARGET, config=EngineConfig(page_size=4, max_batch=16, max_admission_delay=max_admission_delay)
        )
        sizes: list[int] = []
        next_chunks = engine.scheduler.next_chunks

        def watched() -> list[tuple[Request, int]]:
            chunks = next_chunks()
            if chunks:
                sizes.append(len(chunks))
            return chunks

        engine.scheduler.next_chunks = watched  # type: ignore[method-assign]
        params = [SamplingParams(max_tokens=10 + i) for i in range(16)] + [SamplingParams(max_tokens=5)] * 8
        done = run(engine, [PROMPTS[0]] * 24, params)
        assert [c.token_ids for c in done] == [expected[: p.max_tokens] for p in params]
        return sizes

    assert len(joins(50)) < len(joins(1)) < len(joins(0))
