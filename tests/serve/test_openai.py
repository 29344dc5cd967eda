"""The `openai` client against a server process with the default model and a chat template of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import openai
import pytest

from benchmarks.servers import ServerProcess
from jetspec.models.hub import DEFAULT_MODEL, default_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %} The capital of France is"


@pytest.mark.model
@pytest.mark.slow
def test_chat_and_stream(tmp_path: Path) -> None:
    try:
        default_model()
    except ValueError:
        pytest.skip("the default model is not here and cannot be fetched")
    (tmp_path / "short.jinja").write_text(TEMPLATE)
    with ServerProcess(DEFAULT_MODEL, "--max-len", "512", "--chat-template", str(tmp_path / "short.jinja")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        create = partial(client.chat.completions.create, model=DEFAULT_MODEL, temperature=0, max_tokens=12)
        ask = partial(create, messages=[{"role": "user", "content": "What is the capital of France?"}])
        whole = ask()
        plain = {"jetspec": {"budget": 1}}
        chunks = list(ask(stream=True, stream_options={"include_usage": True}, extra_body=plain))
    text, usage = whole.choices[0].message.content, whole.usage
    assert "Paris" in text and usage.completion_tokens <= 12 and usage.jetspec["rounds"] >= 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens == chunks[-1].usage.jetspec["rounds"]
