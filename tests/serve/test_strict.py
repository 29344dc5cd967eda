"""Strict tools constrain calls that the model decides to make, and leave other text unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from jetspec.grammar.tools import BEGIN, END
from jetspec.serve.config import ServeConfig
from tests.serve.live import NAME, Live, assert_error, events, joined, tiny_llm
from tests.serve.test_forms import CLOCK, TOOL_TEMPLATE
from tests.train.tiny_model import END_TOKEN, write_model

BEGIN_TOKEN = END_TOKEN + 1
BIAS = {BEGIN_TOKEN: 9, END_TOKEN: 8, ord("}"): 9, ord(","): 9, **dict.fromkeys(b" \n\r\t", -30)}
CALLING = {str(token): bias for token, bias in BIAS.items()}
"""Makes a random model open a call, close its brackets, and end."""
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
    """A model in whose vocabulary each tag is one token."""
    llm = tiny_llm(write_model(tmp_path_factory.mktemp("strict") / "tiny", [BEGIN, END]))
    llm.tokenizer.chat_template = TOOL_TEMPLATE
    with Live(llm, ServeConfig(port=0)) as server:
        yield server
        server.wait_for_rest()


def ask(live: Live, tools: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Completions of a model that often calls."""
    response = live.chat(tools=tools, **{**MANY, **options})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def called(choices: list[dict[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Names and arguments of the calls, per completion."""
    made = [[call["function"] for call in choice["message"].get("tool_calls", [])] for choice in choices]
    return [[(call["name"], json.loads(call["arguments"])) for call in calls] for calls in made]


def test_openai_client_parses_calls_of_strict_tools(calling: Live) -> None:
    options: Any = {**MANY, "max_tokens": 200}  # the client refuses a completion that is cut off
    body: Any = [{"role": "user", "content": "?"}]
    done = calling.client().chat.completions.parse(model=NAME, messages=body, tools=[STRICT], **options)
    calls = [call for choice in done.choices for call in choice.message.tool_calls or []]
    assert calls and all(isinstance(call.function.parsed_arguments, Seat) for call in calls)


class Flag(BaseModel):
    on: bool


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"tools": [STRICT], "tool_choice": "required"},
        {"response_format": Flag},
        {"tools": [STRICT], "tool_choice": "none", "logit_bias": {str(END_TOKEN): 100}},
    ],
    ids=["call", "format", "empty"],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_messages_of_the_openai_client_can_be_sent_back(calling: Live, body: dict[str, Any], streamed: bool) -> None:
    """The client adds parsed values to them."""
    chat, messages = calling.client().chat.completions, list[Any]([{"role": "user", "content": "?"}])
    options = {"model": NAME, "logit_bias": CALLING, "max_tokens": 100, "seed": 1, **body}
    for _ in range(2):
        if streamed:
            with chat.stream(messages=messages, **options) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = chat.parse(messages=messages, **options).choices[0].message
        calls = message.tool_calls or []
        assert bool(calls) == (body.get("tool_choice") == "required")
        assert isinstance(message.parsed, Flag) == ("response_format" in body)
        assert all(isinstance(call.function.parsed_arguments, Seat) for call in calls)
        messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls)]


def test_strict_and_other_tools_can_be_combined(calling: Live) -> None:
    """Calls of the strict one follow its schema; the other is called with any object."""
    choices = ask(calling, [STRICT, CLOCK])
    found = [call for calls in called(choices) for call in calls]
    assert {name for name, _ in found} == {"book", "clock"}
    for name, arguments in found:
        assert Seat.model_validate(arguments) if name == "book" else isinstance(arguments, dict)
    for choice in choices:
        assert choice["finish_reason"] == "length" or BEGIN not in (choice["message"]["content"] or "")


def test_calls_are_not_constrained_without_a_strict_tool(calling: Live) -> None:
    assert any(BEGIN in choice["message"]["content"] for choice in ask(calling, [LOOSE], max_tokens=20))
    assert ask(calling, [LOOSE], ignore_eos=True, max_tokens=4)[0]["finish_reason"] == "length"


def test_parallel_tool_calls_can_be_turned_off(calling: Live) -> None:
    """It is refused where no grammar can enforce it."""
    bias = {**CALLING, str(BEGIN_TOKEN): 20, str(END_TOKEN): 12}
    alone, several = (
        ask(calling, [STRICT, CLOCK], logit_bias=bias, parallel_tool_calls=choice) for choice in (False, True)
    )
    assert max(map(len, called(alone))) == 1 < max(map(len, called(several)))
    for choice in alone:
        assert choice["finish_reason"] == "length" or called([choice]) == [[]] or not choice["message"]["content"]
    for one, other in zip(called(alone), called(several), strict=True):
        assert one == other[:1], "the first call is the same with and without the limit"
    forced = ask(calling, [LOOSE], parallel_tool_calls=False, tool_choice="required")
    assert max(map(len, called(forced))) == 1
    assert_error(calling.chat(tools=[LOOSE], parallel_tool_calls=False), 400, "parallel_tool_calls")
    assert calling.chat(parallel_tool_calls=False, max_tokens=2).status_code == 200, "without tools"


@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_do_not_depend_on_tree_or_stream(calling: Live, temperature: float) -> None:
    options = {"temperature": temperature, "n": 3}
    choices = ask(calling, [STRICT, CLOCK], **options)
    assert are_same(choices, ask(calling, [STRICT, CLOCK], **options, jetspec={"budget": 1}))
    assert are_same(choices, joined(events(calling.chat(tools=[STRICT, CLOCK], stream=True, **{**MANY, **options}))))


def are_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Equal texts and calls, apart from the ids of the calls."""

    def content(choices: list[dict[str, Any]]) -> Any:
        texts = [(choice["message"]["content"] or "", choice["finish_reason"]) for choice in choices]
        return texts, called(choices)

    return bool(content(some) == content(others)) and any(called(some))
