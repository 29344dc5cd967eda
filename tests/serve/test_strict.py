"""Strict tools hold where the model calls by itself, and cost an answer without calls nothing of its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from jetspec.grammar.tools import BEGIN, END
from jetspec.serve.config import ServeConfig
from tests.serve.live import NAME, Live, events, tiny_llm
from tests.serve.test_forms import CLOCK, COUNTED, TOOL_TEMPLATE, schema_format
from tests.train.tiny_model import END_TOKEN, write_model

BEGIN_TOKEN = END_TOKEN + 1
BIAS = {BEGIN_TOKEN: 9, END_TOKEN: 8, ord("}"): 9, ord(","): 9, **dict.fromkeys(b" \n\r\t", -30)}
CALLING = {str(token): bias for token, bias in BIAS.items()}
"""Makes a model of random weights call, close what it opened, and end."""
MANY = {"n": 6, "seed": 1, "max_tokens": 90, "logit_bias": CALLING}


class Seat(BaseModel):
    """A seat in a theatre."""

    model_config = ConfigDict(extra="forbid")

    row: Literal["A", "B"]
    at: int


STRICT: Any = openai.pydantic_function_tool(Seat, name="book")
LOOSE = {"type": "function", "function": {**STRICT["function"], "strict": False}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model to which each of the tags is one token."""
    llm = tiny_llm(write_model(tmp_path_factory.mktemp("strict") / "tiny", [BEGIN, END]))
    llm.tokenizer.chat_template = TOOL_TEMPLATE
    with Live(llm, ServeConfig(port=0)) as server:
        yield server
        server.wait_for_rest()


def ask(live: Live, tools: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Some answers of a model that likes to call."""
    response = live.chat(tools=tools, **{**MANY, **options})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def called(choices: list[dict[str, Any]]) -> list[list[tuple[str, Any]]]:
    """For each answer, what it calls."""
    made = [[call["function"] for call in choice["message"].get("tool_calls", [])] for choice in choices]
    return [[(call["name"], json.loads(call["arguments"])) for call in calls] for calls in made]


def test_the_openai_client_parses_calls_that_the_model_makes_by_itself(calling: Live) -> None:
    options: Any = {**MANY, "max_tokens": 200}  # the client takes no answer that is cut off
    asked: Any = [{"role": "user", "content": "?"}]
    done = calling.client().chat.completions.parse(model=NAME, messages=asked, tools=[STRICT], **options)
    calls = [call for choice in done.choices for call in choice.message.tool_calls or []]
    assert calls and all(isinstance(call.function.parsed_arguments, Seat) for call in calls)


class Flag(BaseModel):
    on: bool


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [STRICT], "tool_choice": "required"},
        {"response_format": Flag},
        {"tools": [STRICT], "tool_choice": "none", "logit_bias": {str(END_TOKEN): 100}},
    ],
    ids=["call", "form", "silence"],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_what_the_openai_client_hands_back_is_taken(calling: Live, asked: dict[str, Any], streamed: bool) -> None:
    """It adds what it has read of an answer to the message."""
    chat, messages = calling.client().chat.completions, list[Any]([{"role": "user", "content": "?"}])
    options = {"model": NAME, "logit_bias": CALLING, "max_tokens": 100, "seed": 1, **asked}
    for _ in range(2):
        if streamed:
            with chat.stream(messages=messages, **options) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = chat.parse(messages=messages, **options).choices[0].message
        calls = message.tool_calls or []
        assert bool(calls) == (asked.get("tool_choice") == "required")
        assert isinstance(message.parsed, Flag) == ("response_format" in asked)
        assert all(isinstance(call.function.parsed_arguments, Seat) for call in calls)
        messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls)]


def test_calls_of_strict_and_other_tools_stand_side_by_side(calling: Live) -> None:
    """Those of the strict one keep its schema; the other is called with any object."""
    choices = ask(calling, [STRICT, CLOCK])
    found = [call for calls in called(choices) for call in calls]
    assert {name for name, _ in found} == {"book", "clock"}
    for name, arguments in found:
        assert Seat.model_validate(arguments) if name == "book" else isinstance(arguments, dict)
    for choice in choices:
        assert choice["finish_reason"] == "length" or BEGIN not in (choice["message"]["content"] or "")


def test_without_a_strict_tool_calls_are_the_models_own(calling: Live) -> None:
    """The same model, which then opens calls that are none, and hears nothing of a grammar."""
    assert any(BEGIN in choice["message"]["content"] for choice in ask(calling, [LOOSE], max_tokens=20))
    assert ask(calling, [LOOSE], ignore_eos=True, max_tokens=4)[0]["finish_reason"] == "length"


def test_calls_come_one_at_a_time_where_that_is_asked_for(calling: Live) -> None:
    """Also those of several tools. Where nothing can see to it, that is refused, with what would help."""
    bias = {**CALLING, str(BEGIN_TOKEN): 20, str(END_TOKEN): 12}
    alone, several = (
        ask(calling, [STRICT, CLOCK], logit_bias=bias, parallel_tool_calls=choice) for choice in (False, True)
    )
    assert max(map(len, called(alone))) == 1 < max(map(len, called(several)))
    for choice in alone:
        assert choice["finish_reason"] == "length" or called([choice]) == [[]] or not choice["message"]["content"]
    for one, other in zip(called(alone), called(several), strict=True):
        assert one == other[:1], "the first call is the one that would have been made anyway"
    forced = ask(calling, [LOOSE], parallel_tool_calls=False, tool_choice="required")
    assert max(map(len, called(forced))) == 1
    response = calling.chat(tools=[LOOSE], parallel_tool_calls=False)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "parallel_tool_calls") and "strict" in error["message"]
    assert calling.chat(parallel_tool_calls=False, max_tokens=2).status_code == 200, "nothing can be called"


@pytest.mark.parametrize("temperature", [0, 1])
def test_trees_streams_and_plain_decoding_call_the_same(calling: Live, temperature: float) -> None:
    options = {"temperature": temperature, "n": 3}
    choices = ask(calling, [STRICT, CLOCK], **options)
    assert are_same(choices, ask(calling, [STRICT, CLOCK], **options, jetspec={"budget": 1}))
    answer = [{"index": i, "message": {"content": "", "tool_calls": []}, "finish_reason": None} for i in range(3)]
    for chunk in events(calling.chat(tools=[STRICT, CLOCK], stream=True, **{**MANY, **options})):
        (part,) = chunk["choices"]
        message = answer[part["index"]]["message"]
        message["content"] += part["delta"].get("content", "")
        message["tool_calls"] += part["delta"].get("tool_calls", [])
        answer[part["index"]]["finish_reason"] = part["finish_reason"]
    assert are_same(choices, answer)


def are_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether answers say and call the same, whatever the ids of their calls."""

    def told(choices: list[dict[str, Any]]) -> Any:
        said = [(choice["message"]["content"] or "", choice["finish_reason"]) for choice in choices]
        return said, called(choices)

    return bool(told(some) == told(others)) and any(called(some))


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_without_calls_is_that_without_strict(calling: Live, temperature: float) -> None:
    options = {"temperature": temperature, "logit_bias": {str(BEGIN_TOKEN): -100, "256": 3}, "max_tokens": 60}
    strict, loose = ask(calling, [STRICT], **options), ask(calling, [LOOSE], **options)
    assert strict == loose and not any(called(strict))


def test_a_call_that_is_cut_off_is_text(calling: Live) -> None:
    choices = ask(calling, [STRICT], max_tokens=8)
    assert any(BEGIN in choice["message"]["content"] for choice in choices) and not any(called(choices))
    assert all(choice["finish_reason"] != "tool_calls" for choice in choices)


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "iri"}}}, "format"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 100_000}}}, "maxLength"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-z]{1,1000}"}}}, "too large"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "contains itself"),
        (COUNTED, "400 properties"),
    ],
)
def test_strict_schemas_that_cannot_be_kept_are_refused(calling: Live, parameters: dict[str, Any], word: str) -> None:
    function = {"name": "f", "parameters": parameters}
    response = calling.chat(tools=[CLOCK, {"type": "function", "function": {**function, "strict": True}}], max_tokens=2)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools") and word in error["message"]
    if word in ("patternProperties", "format"):
        loose = calling.chat(tools=[CLOCK, {"type": "function", "function": function}], max_tokens=2)
        assert loose.status_code == 200, "nothing is promised of it"


def test_what_strict_tools_cannot_go_with_is_refused(calling: Live) -> None:
    for asked in ({"tools": [STRICT], "ignore_eos": True}, {"tools": [STRICT, LOOSE]}):
        assert calling.chat(**asked, max_tokens=2).status_code == 400


def test_a_description_that_nobody_reads_is_refused(calling: Live) -> None:
    form = schema_format({"type": "boolean", "description": "this is a part of the schema"})
    assert calling.chat(response_format=form, max_tokens=9).status_code == 200
    form["json_schema"]["description"] = "Whether it rains."
    response = calling.chat(response_format=form, max_tokens=9)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format.json_schema.description")
