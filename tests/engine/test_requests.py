"""Penalties, biases, log-probabilities and shared prompts: exact with every drafter, free for other requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import jetspec.engine.round as round_module
from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.types import Completion, SamplingParams, TokenLogprob, Update
from tests.engine import tiny
from tests.engine.test_engine import GREEDY, PROMPTS, SAMPLED, TRUTH, truth
from tests.engine.tiny import VOCAB, Script, finish, make_engine, next_logits, run, tiny_decoder, use

TARGET = tiny_decoder()
PENALIZED = SamplingParams(max_tokens=24, presence_penalty=0.6, frequency_penalty=0.8, logit_bias={7: 3.0, 8: -100})
SETTINGS = {
    "greedy": PENALIZED,
    "sampled": replace(PENALIZED, temperature=0.8, top_p=0.95, seed=5),
    "bias": SamplingParams(max_tokens=24, logit_bias={20: 4.0}),
    "reward": SamplingParams(max_tokens=24, presence_penalty=-1.5),
}


def engine_of(who: str, budget: int = 12, **options: object) -> Engine:
    config = EngineConfig(page_size=4, **options)  # type: ignore[arg-type]
    return tiny.engine_of(TARGET, who, TreeConfig(budget=budget, width=4), config)


# ---- penalties ----


def test_penalties_follow_the_definition_of_openai() -> None:
    for prompt, text in zip(PROMPTS[:2], TRUTH[SETTINGS["greedy"]][:2], strict=True):
        for i, token in enumerate(text):
            logits, count = next_logits(TARGET, [*prompt, *text[:i]]).clone(), Counter(text[:i])
            for t, times in count.items():
                logits[t] -= PENALIZED.frequency_penalty * times + PENALIZED.presence_penalty
            for t, bias in PENALIZED.logit_bias.items():
                logits[t] += bias
            assert token == int(logits.argmax())
    assert TRUTH[SETTINGS["greedy"]] != [text[:24] for text in TRUTH[GREEDY]]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("who", ["ngram", "head", "edge"])
def test_penalties_count_the_path_of_each_node(who: str, name: str) -> None:
    done = run(engine_of(who, budget=30), PROMPTS, SETTINGS[name])
    assert [c.token_ids for c in done] == TRUTH[SETTINGS[name]]


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_long_accepted_paths_are_counted(name: str) -> None:
    coming = {tuple(p): t for p, t in zip(PROMPTS, TRUTH[SETTINGS[name]], strict=True)}
    engine = use(engine_of("none", max_batch=3), Script(coming, 0.9, budget=20))
    done = run(engine, PROMPTS, SETTINGS[name])
    assert [c.token_ids for c in done] == TRUTH[SETTINGS[name]]
    assert max(max(c.stats.accepted_lengths) for c in done) == 6


@pytest.mark.parametrize("overlap_rounds", [0, 1])
@pytest.mark.parametrize("num_pages", [None, 24])
def test_reused_rows_start_without_penalties(num_pages: int | None, overlap_rounds: int) -> None:
    """Requests with and without penalties reuse rows, with preemption and overlapping rounds."""
    engine = engine_of("head", max_batch=3, num_pages=num_pages, overlap_rounds=overlap_rounds)
    names = [["greedy", "plain", "bias", "plain", "sampled", "greedy"][i % 6] for i in range(12)]
    params = [SETTINGS.get(name, GREEDY) for name in names]
    done = run(engine, PROMPTS * 2, params)
    for i, (name, completion) in enumerate(zip(names, done, strict=True)):
        expected = TRUTH[GREEDY] if name == "plain" else TRUTH[SETTINGS[name]]
        assert completion.token_ids == expected[i % 6]


def test_preempted_requests_leave_no_penalties() -> None:
    """It is preempted or cancelled before its row is uploaded."""
    engine = engine_of("none", max_batch=2)
    leaving = engine.add([9], replace(PENALIZED, logit_bias={20: 100.0}))
    engine.scheduler.next_chunks()
    engine.cancel(leaving)
    done = run(engine, PROMPTS, [GREEDY, *[SETTINGS["bias"]] * 5])
    assert [c.token_ids for c in done] == [TRUTH[GREEDY][0], *TRUTH[SETTINGS["bias"]][1:]]


def test_unused_features_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("penalize", "forbid", "PathLogprobs", "TreeMasks"):
        monkeypatch.setattr(round_module, name, None)
    engine = engine_of("head")
    assert [c.token_ids for c in run(engine, PROMPTS, GREEDY)] == TRUTH[GREEDY]
    assert engine.cache.rows.token_counts is None


# ---- log-probabilities ----


def check_logprobs(prompt: list[int], completion: Completion, num_top: int) -> None:
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    for i, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        law = next_logits(TARGET, [*prompt, *completion.token_ids[:i]]).log_softmax(-1)
        assert found.token == token
        assert found.logprob == pytest.approx(float(law[token]), abs=1e-4)
        best = law.topk(num_top)
        assert [t for t, _ in found.top] == best.indices.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert dict(found.top).get(token, found.logprob) == pytest.approx(found.logprob, abs=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SETTINGS["greedy"]], ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("who", ["none", "ngram", "edge"])
def test_logprobs_are_those_of_the_target(who: str, sampling: SamplingParams) -> None:
    engine = engine_of(who)
    prompt, asked = PROMPTS[2], replace(sampling, logprobs=3)
    streamed: list[TokenLogprob] = []

    def follow(_: Engine, updates: list[Update]) -> None:
        for update in updates:
            if update.logprobs is not None:
                assert [found.token for found in update.logprobs] == update.token_ids
                streamed.extend(update.logprobs)

    asked_for, silent = run(engine, [prompt, prompt], [asked, sampling], follow)
    check_logprobs(prompt, asked_for, 3)
    assert streamed == asked_for.logprobs
    assert silent.logprobs is None and silent.token_ids == asked_for.token_ids


def test_logprobs_of_long_paths_cut_by_the_limit() -> None:
    engine = use(engine_of("none"), Script(truth(GREEDY), 1.0, budget=12))
    (done,) = run(engine, PROMPTS[:1], SamplingParams(max_tokens=10, logprobs=20))
    assert max(done.stats.accepted_lengths) > 2
    check_logprobs(PROMPTS[0], done, 20)


def test_logprobs_survive_preemption_and_overlap() -> None:
    engine = engine_of("head", max_batch=6, num_pages=26, overlap_rounds=1)
    done = run(engine, PROMPTS, replace(GREEDY, logprobs=0))
    for prompt, completion, text in zip(PROMPTS, done, TRUTH[GREEDY], strict=True):
        assert completion.token_ids == text
        check_logprobs(prompt, completion, 0)


# ---- sharing and leaving ----


@pytest.mark.parametrize("who", ["none", "head"])
def test_completions_of_one_prompt_share_its_pages(who: str) -> None:
    prompt, sampling = [7, 8, 9, 10] * 5 + [3], replace(SAMPLED, max_tokens=8)
    engine = engine_of(who, max_batch=4, prefill_chunk=6)
    ids = engine.add_several(prompt, sampling, 4)
    users: list[int] = []
    done = finish(engine, lambda engine, _: users.extend(engine.cache.pool.users))
    assert max(users) == 4
    assert [done[i].stats.cached_tokens for i in ids] == [0, 20, 20, 20]
    for i, request_id in enumerate(ids):
        alone = run(engine_of(who, prefix_cache=False), [prompt], replace(sampling, seed=11 + i))[0]
        assert done[request_id].token_ids == alone.token_ids
        assert done[request_id].stats.accepted_lengths == alone.stats.accepted_lengths
    assert len({tuple(c.token_ids) for c in done.values()}) > 1
    assert engine.cache.pool.num_available == engine.cache.pool.num_pages


def test_prefix_leader_may_be_cancelled_during_prefill() -> None:
    engine = engine_of("none", max_batch=4, prefill_chunk=3)
    first, *rest = engine.add_several(PROMPTS[2], GREEDY, 3)
    engine.step()
    engine.cancel(first)
    done = finish(engine)
    assert [done[i].token_ids for i in rest] == [TRUTH[GREEDY][2]] * 2


def test_pages_are_shared_only_within_a_salt() -> None:
    engine = engine_of("head")
    prompt = PROMPTS[2]

    def ask(salt: str) -> Completion:
        request_id = engine.add(prompt, GREEDY, cache_salt=salt)
        return finish(engine)[request_id]

    done = [ask(salt) for salt in ("alice", "bob", "alice", "", "bob", "0")]
    assert [c.stats.cached_tokens for c in done] == [0, 0, 16, 0, 16, 0]
    assert {tuple(c.token_ids) for c in done} == {tuple(TRUTH[GREEDY][2])}
    assert len({tuple(c.stats.accepted_lengths) for c in done}) == 1


@pytest.mark.parametrize("overlap_rounds", [0, 1, 2])
@pytest.mark.parametrize("who", ["none", "head"])
def test_a_cancelled_request_frees_its_pages_at_once(who: str, overlap_rounds: int) -> None:
    """Also with rounds in flight, whose writes do not affect the next user of the pages."""
    engine = engine_of(who, max_batch=2, num_pages=30, overlap_rounds=overlap_rounds, prefix_cache=False)
    heard = set[int]()
    for steps in (0, 1, 2, 5):
        leaving = engine.add(PROMPTS[0], GREEDY)
        staying = engine.add(PROMPTS[3], GREEDY)
        for _ in range(steps):
            engine.step()
        engine.cancel(leaving)
        engine.cancel(leaving)
        held = sum(len(pages) for pages in engine.cache.pages_of)
        assert engine.cache.pool.num_available == 30 - held
        following = engine.add(PROMPTS[2], GREEDY)
        done = finish(engine, lambda _, updates: heard.update(update.request_id for update in updates))
        assert leaving not in heard
        for request_id, index in ((staying, 3), (following, 2)):
            assert done[request_id].token_ids == TRUTH[GREEDY][index]
        assert engine.cache.pool.num_available == 30
        assert not (engine.requests or engine.texts or engine.decode_began or engine.in_flight)


# ---- refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 21}, "logprobs is 21"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 tokens"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    engine = engine_of("none")
    with pytest.raises(ValueError, match="not in the vocabulary"):
        engine.add([1], SamplingParams(logit_bias={token: 1.0}))
    assert not engine.has_work


def test_max_tokens_beyond_the_context_is_refused_only_where_it_is_given() -> None:
    engine = make_engine(TARGET, config=EngineConfig(page_size=4, max_len=40))
    with pytest.raises(ValueError, match="max_tokens"):
        engine.add([1, 2], SamplingParams(max_tokens=41))
    assert engine.clip(SamplingParams(max_tokens=41)).max_tokens == 40
    for sampling in (SamplingParams(ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True)):
        (completion,) = run(engine, [[1, 2]], sampling)
        assert len(completion.token_ids) == 38 and completion.finish_reason == "length"
