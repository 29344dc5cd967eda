"""Routes of the API: texts equal those of the engine, streams equal whole responses, errors name their field."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jetspec.engine.choices import ChoiceTable
from jetspec.engine.llm import LLM
from jetspec.models.choices import ChoiceFits, Fit, Weights
from jetspec.serve.builder import RequestBuilder
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import ApiError
from jetspec.serve.metrics import ChoiceWeights
from jetspec.serve.protocol import ChatChunk, ChatCompletion, CompletionRequest, TextCompletion
from jetspec.types import SamplingParams, TreeLimits, Update
from tests.serve.live import NAME, Live, assert_error, events, joined, schema_format, streaming
from tests.serve.test_forms import CLOCK, NOTHING, function_tool

PROMPTS = ["ab", "abcabcabc", "The sky", "ünïcödé 漢字 🙂", "z" * 50]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 3},
        {"temperature": 1.0, "min_p": 0.01, "seed": 7, "n": 3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0},
        {"logit_bias": {65: 50.0, 66: -5.0}},
        {"logprobs": 3, "ignore_eos": True},
        {"logprobs": 0, "temperature": 0.8, "seed": 2},
    ],
)
def test_completions_are_those_of_the_engine(live: Live, alone: LLM, options: dict[str, Any]) -> None:
    """Whole and streamed, for every prompt; completions of one prompt have consecutive seeds."""
    params, count = {name: value for name, value in options.items() if name != "n"}, options.get("n", 1)
    seeds = [options["seed"] + i if "seed" in options else None for i in range(count)]
    settings = [SamplingParams(**{**params, "max_tokens": 16, "seed": seed}) for seed in seeds]
    expected = [alone.generate(prompt, sampling)[0] for prompt in PROMPTS for sampling in settings]
    assert len({done.text for done in expected}) == (1 if "logit_bias" in options else len(expected))
    body = {"prompt": PROMPTS, "max_tokens": 16, "temperature": 0, **options}
    whole = live.post(**body).json()
    TextCompletion.model_validate(whole)
    stats = [done.stats for done in expected]
    assert whole["usage"]["completion_tokens"] == sum(each.completion_tokens for each in stats)
    assert whole["usage"]["jetspec"]["rounds"] == sum(each.rounds for each in stats)
    with streaming(live, **body) as response:
        parts = [chunk["choices"][0] for chunk in events(response)]
    for choice, done in zip(whole["choices"], expected, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (done.text, done.finish_reason)
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == done.text
        if done.logprobs is None:
            assert choice["logprobs"] is None
            continue
        shown = [entry.logprob for entry in done.logprobs if entry.token < 256]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(shown, abs=1e-4)
        assert all(len(top) <= options["logprobs"] for top in choice["logprobs"]["top_logprobs"])
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [value for part in mine for value in part["logprobs"][name]]
            assert streamed == pytest.approx(choice["logprobs"][name], abs=1e-4)


def test_chat_uses_the_template(live: Live, alone: LLM) -> None:
    expected = alone.chat(CHAT, SamplingParams(max_tokens=30))
    whole = live.chat(messages=CHAT, max_tokens=30, temperature=0).json()
    ChatCompletion.model_validate(whole)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    parts = [{"role": m["role"], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in CHAT]
    same = live.chat(messages=parts, max_completion_tokens=30, temperature=0).json()
    assert same["choices"] == whole["choices"]


@pytest.mark.parametrize("options", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "seed": 1, "temperature": 1}])
def test_stream_adds_up_to_the_whole_response(live: Live, options: dict[str, Any]) -> None:
    body = {"max_tokens": 40, "temperature": 0, **options}
    whole = live.chat(**body).json()
    *pieces, last = events(live.chat(**body, stream=True, stream_options={"include_usage": True}))
    for chunk in (*pieces, last):
        ChatChunk.model_validate(chunk)
    assert joined(pieces) == whole["choices"]
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in pieces]
    assert set(roles[: options.get("n", 1)]) == {"assistant"} and not any(roles[options.get("n", 1) :])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in (*pieces, last)}) == 1
    for choice in whole["choices"] if "logprobs" in options else []:
        content = choice["logprobs"]["content"]
        text = bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace")
        assert text == choice["message"]["content"]
        for entry in content:
            best, second = entry["top_logprobs"]
            assert entry["logprob"] == pytest.approx(best["logprob"], abs=1e-5) and best["logprob"] >= second["logprob"]


def test_prompt_may_be_token_ids(live: Live, alone: LLM) -> None:
    tokens = alone.tokenizer.encode("abc", add_special=True)
    text = live.post(prompt="abc", temperature=0).json()["choices"][0]["text"]
    assert live.post(prompt=tokens, temperature=0).json()["choices"][0]["text"] == text
    both = live.post(prompt=[tokens, tokens], temperature=0).json()["choices"]
    assert [choice["text"] for choice in both] == [text, text]


@pytest.mark.parametrize("prompt", PROMPTS[2:4])
def test_text_ends_before_a_stop_string(live: Live, prompt: str) -> None:
    text = live.post(prompt=prompt, max_tokens=30, temperature=0).json()["choices"][0]["text"]
    for start in range(1, min(len(text) - 2, 6)):
        stop = text[start : start + 3]
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "stop": ["never\u0000there", stop]}
        with streaming(live, **body) as response:
            chunks = list(events(response))
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert streamed == text[: text.index(stop)] == live.post(**body).json()["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("limits", [{}, {"budget": 4}, {"width": 1}, {"budget": 1}])
def test_traces_are_those_of_the_engine(live: Live, alone: LLM, limits: dict[str, int]) -> None:
    prompt, sampling = alone.tokenizer.encode("abcabcabcabc", add_special=True), SamplingParams(max_tokens=40)
    tree = TreeLimits(limits.get("budget", 8), limits.get("width", 4))
    alone.engine.add(prompt, sampling, limits=tree, trace=True)
    expected = list[Update]()
    while alone.engine.has_work:
        expected += alone.engine.step()
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "jetspec": {"trace": True, **limits}}
    with streaming(live, **body) as response:
        rounds = [chunk["jetspec"] for chunk in events(response)]
    assert [r["round"] for r in rounds] == list(range(1, len(rounds) + 1)) and rounds[-1]["tokens_per_s"] > 0
    text = alone.tokenizer.token_text
    for r, update in zip(rounds, expected, strict=True):
        trace, tree = update.trace, r["tree"]
        assert trace is not None and tree["tokens"] == [text(token) for token in trace.tokens]
        assert (tree["parents"], tree["path"], tree["bonus"]) == (trace.parents, trace.path, text(trace.bonus))
        assert tree["scores"] == pytest.approx(trace.scores, abs=1e-4)
        assert [token["depth"] for token in r["tokens"]] == list(range(1, len(update.token_ids) + 1))
        drafts = [trace.logprobs[node] for node in trace.path[1:]][: len(update.token_ids)]
        found = [token["draft_logprob"] for token in r["tokens"] if "draft_logprob" in token]
        assert found == pytest.approx(drafts, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bogus": 1}, "bogus"),
        ({"best_of": 2}, "best_of"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["y" * 300]}, "stop.0"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias.x"),
        ({"logit_bias": {"9999": 1.0}}, "logit_bias"),
        ({"logit_bias": {"65": 101.0}}, "logit_bias.65"),
        ({"logit_bias": {str(i): 1.0 for i in range(2000)}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"jetspec": {"trace": True}}, "jetspec.trace"),
        ({"jetspec": {"budget": 9}}, "jetspec.budget"),
        ({"jetspec": {"depth": 2}}, "jetspec.depth"),
        ({"user": "u" * 300}, "user"),
    ],
)
def test_unsupported_values_are_refused_by_name(live: Live, body: dict[str, Any], param: str | None) -> None:
    content = json.dumps({"model": NAME, "prompt": "ab", **body}).encode()
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{live.url}/v1/completions", content=content, headers=headers)
    assert assert_error(response, 400, param)["type"] == "invalid_request_error"


CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
QUESTION, RESULT = {"role": "user", "content": "?"}, {"role": "tool", "content": "noon", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [QUESTION | {"name": "n"}]}, "messages.0.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url",
        ),
        ({"messages": [QUESTION | {"tool_call_id": "call_1"}]}, "messages.0"),
        ({"messages": [CALLING, {"role": "tool", "content": "noon"}]}, "messages.1"),
        ({"messages": [CALLING, RESULT | {"tool_call_id": "call_2"}]}, "messages.1.tool_call_id"),
        ({"messages": [RESULT, CALLING]}, "messages.0.tool_call_id"),
        ({"messages": [QUESTION | {"annotations": [{"type": "url_citation"}]}]}, "messages.0.annotations"),
        ({"max_tokens": 3, "max_completion_tokens": 12}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"functions": []}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema_format({}) | {"strict": True}}, "response_format.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "description": ""}}},
            "response_format.json_schema.description",
        ),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [function_tool("f", {"type": "string"})]}, "tools"),
        ({"tools": [function_tool("f", {"type": 5})]}, "tools"),
        ({"tools": [function_tool("f", {"anyOf": [NOTHING, {}]})]}, "tools"),
        ({"tools": [function_tool("no spaces", {})]}, "tools.0.function.name"),
    ],
)
def test_unsupported_chats_are_refused_by_name(
    live: Live, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(live.llm.tokenizer, "chat_template", TEMPLATE)
    assert_error(live.chat(**body), 400, param)


TEMPLATE = "{% for m in messages %}{{ m.role }}{{ m.content }}{% if tools %}<tool_call>{% endif %}{% endfor %}"


def test_tools_need_a_template_with_tools(live: Live) -> None:
    assert_error(live.chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools")
    assert_error(live.chat(messages=[CALLING, RESULT]), 400, "tools")


@pytest.mark.parametrize(
    "body",
    [
        {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0},
        {"repetition_penalty": 1, "best_of": 1, "echo": False},
        dict.fromkeys(("temperature", "stop", "n", "seed", "user", "jetspec", "best_of", "logit_bias", "suffix")),
    ],
)
def test_values_without_effect_are_accepted(live: Live, body: dict[str, Any]) -> None:
    """`vllm bench serve` and others always send them; null is the same as leaving a field out."""
    response = live.post(**body, stream=True, stream_options={"include_usage": True}, logprobs=None)
    assert response.status_code == 200


@pytest.mark.parametrize("text", ["1", "word ", "<|im_end|>"])
def test_far_too_long_prompt_is_not_tokenized_whole(live: Live, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_completion_ends_with_the_context(live: Live, limit: int | None) -> None:
    done = live.chat(max_tokens=limit, ignore_eos=True, temperature=0).json()
    assert done["choices"][0]["finish_reason"] == "length" and done["usage"]["total_tokens"] == 256
    response = live.chat(max_tokens=257)
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"


def test_default_length_is_clipped_and_a_given_one_refused(alone: LLM) -> None:
    """For a request beyond the server's limit, and for that limit beyond the context."""
    with pytest.raises(ValueError, match="max_tokens"):
        RequestBuilder(alone, ServeConfig(max_tokens=257))
    builder = RequestBuilder(alone, ServeConfig(max_tokens=8))
    body = {"model": NAME, "prompt": "ab"}
    job = builder.completion(CompletionRequest.model_validate({**body, "max_tokens": None}), "")
    assert job.sampling.max_tokens == 8
    with pytest.raises(ApiError, match="max_tokens"):
        builder.completion(CompletionRequest.model_validate({**body, "max_tokens": 16}), "")


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


def test_metrics_show_how_sampled_text_is_drafted() -> None:
    table = ChoiceTable(ChoiceFits((Fit(1.0, depths=(Weights(2.0, 0.5),)),)), 0.8, torch.zeros(1, dtype=torch.int64), 2)
    registry = CollectorRegistry()
    registry.register(ChoiceWeights(table))
    for sampling in (SamplingParams(), SamplingParams(1.0, top_p=0.9), SamplingParams(1.0 + 1e-9, top_p=0.9)):
        table.enter(0, sampling)
    table.flush()
    page = text_string_to_metric_families(generate_latest(registry).decode())
    found = {tuple(s.labels.items()): s for f in page if f.name.endswith("weight") for s in f.samples}
    of_one = [s for s in found.values() if s.labels["temperature"] == "1.0" and s.labels["top_p"] == "0.9"]
    assert [s.value for s in of_one if s.labels["weight"] == "noise"] == [0.5, 0.5]
    assert len(found) == 2 * len(of_one) == 12


def test_metrics_tell_sampled_from_greedy_rounds(live: Live) -> None:
    def read() -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(httpx.get(f"{live.url}/metrics").text)
        [family] = [family for family in families if family.name == "jetspec:round_tokens"]
        return {(s.labels["sampled"], s.name.rpartition("_")[2]): s.value for s in family.samples}

    before = read()
    usage = {
        kind: live.post(prompt="ab", max_tokens=length, temperature=temperature).json()["usage"]
        for kind, length, temperature in (("no", 20, 0), ("yes", 30, 0.7))
    }
    gained = {key: value - before[key] for key, value in read().items()}
    for kind, used in usage.items():
        assert gained[kind, "count"] == used["jetspec"]["rounds"] and gained[kind, "sum"] == used["completion_tokens"]


@pytest.mark.parametrize("is_cut", [False, True])
def test_metrics_count_tokens_rounds_and_drafts(live: Live, is_cut: bool) -> None:
    """Accepted draft tokens count even if the completion ends before the end of the path."""

    def generate(limit: int) -> tuple[dict[str, Any], list[int]]:
        """Usage of a completion, and the accepted draft tokens of each round."""
        body = {"prompt": "ab", "max_tokens": limit, "temperature": 0, "stream_options": {"include_usage": True}}
        with streaming(live, **body, jetspec={"trace": True}) as response:
            *chunks, last = events(response)
        return last["usage"], [len(chunk["jetspec"]["tree"]["path"]) - 1 for chunk in chunks]

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
        _, lengths = generate(limit)
        limit = 1 + next(number for number, length in enumerate(lengths) if length)  # a token before the path ends
    before = read()
    usage, lengths = generate(limit)
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
