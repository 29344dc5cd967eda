"""N-grams in the trees of a head: the text is that of plain decoding, and texts on the device are those of the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.types import SamplingParams, TreeLimits, Update
from tests.engine.tiny import Texts, engine_of, finish, run, tiny_decoder

TARGET = tiny_decoder()
PROMPTS = [[1, 2, 3, 4, 5, 6, 7] * 3, [9], [5, 4] * 12, [1, 2, 3, 4, 5, 6, 7] * 3 + [8]]
GREEDY = SamplingParams(max_tokens=32)
SEEDED = SamplingParams(max_tokens=32, temperature=0.3, top_k=4, seed=7)
TRUTH = Texts(TARGET, PROMPTS)
TREE = TreeConfig(budget=16, width=4)


def check_texts(engine: Engine, updates: list[Update]) -> None:
    """The device holds the text up to the anchor, which may be ahead of the host."""
    table = engine.cache.rows.ngrams
    assert table is not None
    for request in engine.scheduler.running.values():
        if request.is_prefilled and request.row not in engine.cache.rows.new_texts:
            begin = table.corpus_len
            assert table.text_RT[request.row, begin : begin + len(request.tokens)].tolist() == request.tokens


PREEMPTED = {"max_batch": 3, "num_pages": 36, "overlap_rounds": 1}


@pytest.mark.parametrize(
    ("who", "sampling", "config"),
    [
        *(("causal", GREEDY, {}), ("edge", SEEDED, {}), ("eagle3", GREEDY, {})),
        *(("causal", SEEDED, PREEMPTED), ("edge", GREEDY, PREEMPTED), ("eagle3", GREEDY, PREEMPTED)),
    ],
    ids=str,
)
def test_ngrams_do_not_change_the_text(who: str, sampling: SamplingParams, config: dict[str, int]) -> None:
    """Requests of different lengths, some preempted, then the same again, which find their prefixes cached."""
    engine = engine_of(TARGET, who, TREE, EngineConfig(page_size=4, prefill_chunk=5, **config))  # type: ignore[arg-type]
    for _ in range(2):
        done = run(engine, PROMPTS, sampling, check_texts)
        assert [c.token_ids for c in done] == TRUTH[sampling]
    assert config or any(c.stats.cached_tokens for c in done)
    assert all(sum(c.stats.accepted_lengths) >= c.stats.ngram_tokens for c in done)
    assert any(c.stats.ngram_tokens for c in done)


def test_ngrams_save_rounds_and_can_be_turned_off() -> None:
    with_ngrams = run(engine_of(TARGET, "edge", TREE), PROMPTS, GREEDY)
    without = run(engine_of(TARGET, "edge", replace(TREE, ngrams=False)), PROMPTS, GREEDY)
    assert sum(c.stats.rounds for c in with_ngrams) < sum(c.stats.rounds for c in without)
    assert not any(c.stats.ngram_tokens for c in without)


CORPUS = EngineConfig(page_size=4, prefill_chunk=5, max_batch=2, ngram_corpus=64)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_of_a_salt_are_drafted_again_under_it_alone(sampling: SamplingParams) -> None:
    """The same prompt again, under the salt of the first answer and under another, which reads its row."""
    engine = engine_of(TARGET, "causal", TREE, CORPUS)
    rounds = []
    for salt in ("mine", "mine", "theirs"):
        request = engine.add(PROMPTS[1], sampling, cache_salt=salt)
        done = finish(engine, check_texts)[request]
        assert done.token_ids == TRUTH[sampling][1]
        rounds.append(done.stats.rounds)
    assert rounds[1] < rounds[0] == rounds[2]


def test_the_corpus_keeps_the_last_tokens_of_few_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.engine.rows.MAX_SALTS", 2)
    engine = engine_of(TARGET, "causal", TREE, CORPUS)
    written: list[int] = []
    for prompt, salt in ((PROMPTS[0], "a"), (PROMPTS[1], "b"), (PROMPTS[2], "a"), (PROMPTS[3], "c")):
        request = engine.add(prompt, GREEDY, cache_salt=salt)
        answer = finish(engine)[request].token_ids
        written += answer if salt == "a" else []
    assert list(engine.cache.rows.answers) == ["a", "c"]
    assert engine.cache.rows.answers["a"] == written[-64:]


def test_a_corpus_without_ngrams_is_refused() -> None:
    with pytest.raises(ValueError, match="ngram_corpus"):
        engine_of(TARGET, "causal", replace(TREE, ngrams=False), CORPUS)


@pytest.mark.parametrize("change", [{"expand": "paper"}, {"score": "entropy"}])
def test_trees_of_other_ranks_are_those_of_the_head(change: dict[str, str]) -> None:
    engine = engine_of(TARGET, "edge", replace(TREE, **change))  # type: ignore[arg-type]
    assert not any(c.stats.ngram_tokens for c in run(engine, PROMPTS, GREEDY))


def test_updates_and_statistics_count_the_same_tokens() -> None:
    engine, counted = engine_of(TARGET, "edge", TREE), 0

    def count(engine: Engine, updates: list[Update]) -> None:
        nonlocal counted
        counted += sum(update.by_ngrams for update in updates)
        assert all(update.by_ngrams <= update.accepted for update in updates)

    done = run(engine, PROMPTS[:1], GREEDY, count)[0]
    past_the_end = sum(done.stats.accepted_lengths) + done.stats.rounds - len(done.token_ids)
    assert past_the_end == 0 < done.stats.ngram_tokens <= counted <= done.stats.ngram_tokens + TREE.budget


def test_limits_of_a_request_hold_for_merged_trees() -> None:
    engine, limits = engine_of(TARGET, "edge", TREE), TreeLimits(budget=5, width=1)
    limited = engine.add(PROMPTS[0], GREEDY, limits=limits, trace=True)
    other = engine.add(PROMPTS[2], GREEDY, trace=True)
    sizes: dict[int, int] = {}

    def measure(engine: Engine, updates: list[Update]) -> None:
        for update in updates:
            assert update.trace is not None
            sizes[update.request_id] = max(sizes.get(update.request_id, 0), len(update.trace.tokens))
            if update.request_id == limited:
                parents = update.trace.parents[1:]
                assert len(parents) == len(set(parents))

    done = finish(engine, measure)
    assert sizes == {limited: 5, other: TREE.budget}
    assert [done[limited].token_ids, done[other].token_ids] == [TRUTH[GREEDY][0], TRUTH[GREEDY][2]]
    assert done[limited].stats.ngram_tokens > 0
