"""What the routes answer: the engine's own texts, whole or in pieces, and refusals by name."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetspec.config import TreeConfig
from jetspec.engine.llm import LLM
from jetspec.serve.builder import RequestBuilder
from jetspec.serve.errors import ApiError
from jetspec.serve.protocol import ChatChunk, ChatCompletion, CompletionRequest, TextCompletion
from jetspec.types import SamplingParams
from tests.serve.live import NAME, Live, events, streaming

PROMPTS = ["ab", "abcabcabc", "The sky", "ünïcödé 漢字 🙂", "z" * 50]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 3}])
def test_answers_are_the_engines_own(live: Live, alone: LLM, prompt: str, asked: dict[str, Any]) -> None:
    expected = alone.generate(prompt, SamplingParams(max_tokens=40, **asked))[0]
    whole = live.post(prompt=prompt, max_tokens=40, **asked).json()
    TextCompletion.model_validate(whole)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    stats = expected.stats
    assert whole["usage"]["completion_tokens"] == stats.completion_tokens
    assert whole["usage"]["jetspec"] == {"rounds": stats.rounds, "tokens_per_round": stats.tokens_per_round}
    with streaming(live, prompt=prompt, max_tokens=40, **asked) as response:
        pieces = [chunk["choices"][0]["text"] for chunk in events(response)]
    assert "".join(pieces) == expected.text


def test_a_chat_goes_through_the_template(live: Live, alone: LLM) -> None:
    expected = alone.chat(CHAT, SamplingParams(max_tokens=30))
    whole = live.chat(messages=CHAT, max_tokens=30, temperature=0).json()
    ChatCompletion.model_validate(whole)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    parts = [{"role": m["role"], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in CHAT]
    same = live.chat(messages=parts, max_completion_tokens=30, temperature=0).json()
    assert same["choices"] == whole["choices"]


def test_a_stream_is_the_answer_in_pieces(live: Live) -> None:
    whole = live.chat(max_tokens=40, temperature=0).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(events(live.chat(max_tokens=40, temperature=0, **options)))
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    *pieces, bill = chunks
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in pieces]
    assert roles == ["assistant"] + [None] * (len(pieces) - 1)
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in pieces)
        == (whole["choices"][0]["message"]["content"])
    )
    finishes = [chunk["choices"][0].get("finish_reason") for chunk in pieces]
    assert finishes == [None] * (len(pieces) - 1) + [whole["choices"][0]["finish_reason"]]
    assert bill["choices"] == []
    # The second time the prompt was in the cache.
    assert bill["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_several_answers_have_seeds_of_their_own(live: Live, alone: LLM) -> None:
    asked = {"prompt": ["ab", "cd"], "n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    texts = [choice["text"] for choice in live.post(**asked).json()["choices"]]
    expected = [
        alone.generate(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=12))[0].text
        for prompt in ("ab", "cd")
        for seed in (7, 8, 9)
    ]
    assert texts == expected and len(set(texts)) > 1
    with streaming(live, **asked) as response:
        streamed = [""] * 6
        for chunk in events(response):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == expected


def test_token_ids_may_stand_for_text(live: Live, alone: LLM) -> None:
    tokens = alone.tokenizer.encode("abc", add_special=True)
    text = live.post(prompt="abc", temperature=0).json()["choices"][0]["text"]
    assert live.post(prompt=tokens, temperature=0).json()["choices"][0]["text"] == text
    both = live.post(prompt=[tokens, tokens], temperature=0).json()["choices"]
    assert [choice["text"] for choice in both] == [text, text]


@pytest.mark.parametrize("prompt", PROMPTS[2:4])
def test_stop_strings_never_show(live: Live, prompt: str) -> None:
    """Every stop string taken from the text itself: the text ends before it, in the stream as well."""
    text = live.post(prompt=prompt, max_tokens=30, temperature=0).json()["choices"][0]["text"]
    for start in range(1, min(len(text) - 2, 6)):
        stop = text[start : start + 3]
        asked = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "stop": ["never\u0000there", stop]}
        with streaming(live, **asked) as response:
            chunks = list(events(response))
        said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert said == text[: text.index(stop)] == live.post(**asked).json()["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_traces_show_every_round(live: Live) -> None:
    """The tokens of all rounds are the text, every path is a path of its tree, and limits are kept."""
    asked = {"prompt": "abcabcabcabc", "max_tokens": 40, "temperature": 0}
    text = live.post(**asked).json()["choices"][0]["text"]
    for limits in ({}, {"budget": 4}, {"width": 1}, {"budget": 1}):
        with streaming(live, **asked, jetspec={"trace": True, **limits}) as response:
            rounds = [chunk["jetspec"] for chunk in events(response)]
        assert [r["round"] for r in rounds] == list(range(1, len(rounds) + 1))
        tokens = [token for r in rounds for token in r["tokens"]]
        assert len(tokens) == 40
        if "\ufffd" not in text:
            assert "".join(token["text"] for token in tokens) == text
        for r in rounds:
            tree = r["tree"]
            assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["scores"]) <= limits.get("budget", 8)
            assert all(tree["parents"][below] == above for above, below in pairwise(tree["path"]))
            assert [token["depth"] for token in r["tokens"]] == list(range(1, len(r["tokens"]) + 1))
            assert len(r["tokens"]) <= len(tree["path"])
        if limits.get("budget") == 1:
            assert len(rounds) == 40
    assert rounds[-1]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"bogus": 1}, "bogus", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"top_k": -2}, "top_k", "greater than or equal to 0"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"n": 1.5}, "n", "integer"),
        ({"seed": -1}, "seed", "greater"),
        ({"seed": 1 << 63}, "seed", "less"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": 100_000}, "max_tokens", "at most"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"stop": ["y" * 300]}, "stop", "256"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [9999]}, "prompt", "vocabulary"),
        ({"prompt": "x" * 5000}, None, "at most 255"),
        ({"prompt": "\ud800"}, "prompt", ""),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"jetspec": {"trace": True}}, "jetspec.trace", "needs stream"),
        ({"jetspec": {"budget": 9}}, "jetspec.budget", "have 8"),
        ({"jetspec": {"depth": 2}}, "jetspec.depth", "not supported"),
        ({"user": "u" * 300}, "user", "256"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(live: Live, body: dict[str, Any], param: str | None, word: str) -> None:
    asked = json.dumps({"model": NAME, "prompt": "ab", **body})
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{live.url}/v1/completions", content=asked.encode(), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"] or "").startswith(param or "") and word in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "tools"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"functions": []}, "functions"),
    ],
)
def test_chats_that_cannot_be_had_are_refused_by_name(live: Live, body: dict[str, Any], param: str) -> None:
    response = live.chat(**body)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("text", ["1", "word ", "<|im_end|>"])
def test_a_prompt_far_too_long_costs_little(live: Live, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = live.llm.tokenizer, list[int]()
    encode = tokenizer._encoding

    def counted(text: str, add_special: bool = False) -> Any:
        read.append(len(text))
        return encode(text, add_special)

    monkeypatch.setattr(tokenizer, "_encoding", counted)
    long = text * (3_000_000 // len(text))
    for response in (
        live.post(prompt=long),
        live.post(prompt=["short", long]),
        live.chat(messages=[{"role": "user", "content": long}]),
    ):
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert sum(read) < 30_000


@pytest.mark.parametrize("limit", [None, 256])
def test_an_answer_ends_where_the_context_does(live: Live, limit: int | None) -> None:
    """However many tokens it may have. It says that it was cut; only what no prompt leaves room for is refused."""
    done = live.chat(max_tokens=limit, ignore_eos=True, temperature=0).json()
    assert done["choices"][0]["finish_reason"] == "length" and done["usage"]["total_tokens"] == 256
    response = live.chat(max_tokens=257)
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"


def test_a_small_bound_holds_for_those_who_ask_for_nothing(alone: LLM) -> None:
    builder = RequestBuilder(alone.tokenizer, TreeConfig(), model_name=NAME, max_len=256, max_tokens=8)
    asked = {"model": NAME, "prompt": "ab"}
    (job,) = builder.completion(CompletionRequest.model_validate({**asked, "max_tokens": None}), "").jobs
    assert job.sampling.max_tokens == 8
    with pytest.raises(ApiError, match="at most 8"):
        builder.completion(CompletionRequest.model_validate({**asked, "max_tokens": 16}), "")


def test_null_is_the_same_as_nothing(live: Live) -> None:
    fields = ("temperature", "stop", "n", "seed", "user", "jetspec", "stream_options", "best_of", "logit_bias")
    assert live.post(**dict.fromkeys(fields)).status_code == 200


def test_models_are_listed_and_others_unknown(live: Live) -> None:
    client = live.client()
    (card,) = client.models.list().data
    assert card.id == NAME == client.models.retrieve(NAME).id
    assert card.jetspec == {"drafter": "ngram", "budget": 8, "width": 4, "max_len": 256, "max_tokens": 256}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    response = live.post(model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(f"{live.url}/v1/nothing").status_code == 404
    assert httpx.get(f"{live.url}/v1/completions").status_code == 405


@pytest.mark.parametrize("is_cut", [False, True])
def test_metrics_count_what_happened(live: Live, is_cut: bool) -> None:
    """What the target accepted of the drafts counts, even where the answer ends before the end of the path."""

    def write(limit: int) -> tuple[dict[str, Any], list[int]]:
        """What an answer cost, and how many draft tokens each round accepted."""
        asked = {"prompt": "ab", "max_tokens": limit, "temperature": 0, "stream_options": {"include_usage": True}}
        with streaming(live, **asked, jetspec={"trace": True}) as response:
            *chunks, bill = events(response)
        return bill["usage"], [len(chunk["jetspec"]["tree"]["path"]) - 1 for chunk in chunks]

    def read() -> dict[str, float]:
        page = httpx.get(f"{live.url}/metrics").text
        families = text_string_to_metric_families(page)
        return {
            sample.name + sample.labels.get("position", ""): sample.value
            for family in families
            for sample in family.samples
            if not re.search("_bucket$", sample.name)
        }

    limit = 60
    if is_cut:
        _, lengths = write(limit)
        limit = 1 + next(number for number, length in enumerate(lengths) if length)  # a token before the path ends
    before = read()
    usage, lengths = write(limit)
    after = read()
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    rounds, tokens, accepted = usage["jetspec"]["rounds"], usage["completion_tokens"], sum(lengths)
    assert accepted > tokens - rounds if is_cut else accepted == tokens - rounds
    assert gained["vllm:generation_tokens_total"] == tokens
    assert gained["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert gained["jetspec:rounds_total"] == gained["jetspec:accepted_length_count"] == rounds
    assert gained["jetspec:accepted_length_sum"] == accepted
    assert gained["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
    per_position = [v for name, v in gained.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos")]
    assert sum(per_position) == accepted
    assert 0 < gained["vllm:spec_decode_num_drafts_total"] <= rounds
    assert gained["vllm:spec_decode_num_draft_tokens_total"] >= gained["vllm:spec_decode_num_drafts_total"]
    assert gained["vllm:time_to_first_token_seconds_count"] == 1
    assert gained["vllm:inter_token_latency_seconds_count"] == rounds - 1
    assert after["jetspec:tokens_per_second"] > 0 and after["jetspec:tokens_per_round"] >= 1
    assert after["jetspec:pages_in_use"] == after["vllm:num_requests_waiting"] == 0
    assert not any(name.endswith("_created") for name in after)
