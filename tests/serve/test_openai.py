"""The `openai` client against a server process with the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from benchmarks.servers import ServerProcess
from jetspec.models.hub import DEFAULT_MODEL, default_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEMPLATE = """\
{% if tools %}<|im_start|>system
You may call a function, as JSON with its name and arguments between <tool_call></tool_call>. There are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template with tools; the model's own has none."""

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "find_town",
        "description": "Find a town on the map.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 20}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


class Town(BaseModel):
    name: str
    is_capital: bool


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    try:
        default_model()
    except ValueError:
        pytest.skip("the default model is not here and cannot be fetched")
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    options = ("--max-batch", "4", "--max-len", "512", "--chat-template", str(template))
    with ServerProcess(DEFAULT_MODEL, *options) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **options}
    return client.chat.completions.create(model=DEFAULT_MODEL, **body)


def test_chat_and_stream(client: openai.OpenAI) -> None:
    whole = ask(client)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12 and whole.usage.jetspec["rounds"] >= 1
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, **streaming, extra_body={"jetspec": {"budget": 1}}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == chunks[-1].usage.jetspec["rounds"]


def test_response_format(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model=DEFAULT_MODEL, messages=MESSAGES, temperature=0, max_tokens=60, response_format=Town
    )
    choice = done.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Town)


def test_forced_tool_call(client: openai.OpenAI) -> None:
    done = ask(client, tools=[TOOL], tool_choice="required", max_tokens=60)
    assert done.choices[0].finish_reason == "tool_calls"
    (call,) = done.choices[0].message.tool_calls
    assert call.function.name == "find_town" and set(json.loads(call.function.arguments)) == {"town"}
    answered = [
        *MESSAGES,
        done.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "It is in the north."},
    ]
    assert ask(client, messages=answered, tools=[TOOL], max_tokens=2).choices[0].finish_reason == "length"
