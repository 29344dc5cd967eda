"""From what a client asks to jobs for the engine. Runs beside the event loop, because texts can be long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jinja2 import TemplateError

from jetspec.config import TreeConfig
from jetspec.models.tokenizer import Tokenizer
from jetspec.serve.errors import Refused
from jetspec.serve.protocol import ChatRequest, CompletionRequest, Generation, Message, TextFormat, ToolCall, ToolChoice
from jetspec.serve.tools import check_template
from jetspec.serve.worker import Job
from jetspec.types import SamplingParams, TreeLimits

MAX_SCHEMA_BYTES = 16 << 10
MAX_SCHEMA_DEPTH = 16

ENGINE_OPTIONS = {field.name for field in fields(SamplingParams)}


@dataclass(frozen=True)
class Prepared:
    """What the engine is to do, and how its answers are to be read."""

    jobs: list[Job]
    reads_tools: bool = False
    """Answers may hold tool calls."""


class Desk:
    """Knows what this server's model and engine can do, and refuses the rest by name."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tree: TreeConfig,
        *,
        model_name: str,
        max_len: int,
        max_prompt: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self.tree, self.model_name = tokenizer, tree, model_name
        self.max_prompt = min(max_prompt or max_len, max_len - 1)
        self.max_tokens = min(max_tokens or max_len, max_len)

    def chat(self, asked: ChatRequest, tenant: str) -> Prepared:
        self._check_common(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused("top_logprobs needs logprobs", param="top_logprobs")
        tools = asked.tools if asked.tool_choice != "none" else []
        if asked.response_format and not isinstance(asked.response_format, TextFormat):
            raise Refused(f"response_format {asked.response_format.type} is not supported", param="response_format")
        if tools or any(map(uses_tools, asked.messages)):
            check_template(self.tokenizer.chat_template)
        if asked.tool_choice == "required" or isinstance(asked.tool_choice, ToolChoice):
            raise Refused("tool_choice is auto or none here", param="tool_choice")
        variables: dict[str, Any] = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
        if asked.chat_template_kwargs:
            variables |= asked.chat_template_kwargs.model_dump(exclude_none=True)
        text = self._render([template_message(message) for message in asked.messages], variables)
        tokens = self._encode(text, "messages", add_special=False)
        limit = asked.max_completion_tokens or asked.max_tokens
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return Prepared(list(self._jobs(asked, [tokens], limit, logprobs)), reads_tools=bool(tools))

    def completion(self, asked: CompletionRequest, tenant: str) -> Prepared:
        self._check_common(asked)
        prompts = [self._encode(prompt) for prompt in each_prompt(asked.prompt)]
        return Prepared(list(self._jobs(asked, prompts, asked.max_tokens, asked.logprobs)))

    def _check_common(self, asked: Generation) -> None:
        if asked.model != self.model_name:
            raise Refused(
                f"the model {asked.model!r} is not served here; {self.model_name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )
        if asked.stream_options and not asked.stream:
            raise Refused("stream_options needs stream", param="stream_options")
        if asked.jetspec and asked.jetspec.trace and not asked.stream:
            raise Refused("jetspec.trace needs stream", param="jetspec.trace")

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        if self.tokenizer.chat_template is None:
            raise Refused("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self.tokenizer.chat(messages, **variables)
        except ValueError as error:
            # What a template says about a conversation is for the client; how it broke is not.
            why = f": {error.__cause__}" if type(error.__cause__) is TemplateError else ""
            raise Refused(f"the chat template does not take this conversation{why}", param="messages") from error

    def _encode(self, prompt: str | list[int], param: str = "prompt", add_special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt, add_special)
            except ValueError as error:
                raise Refused(str(error), param=param) from error
        if max(prompt) >= self.tokenizer.vocab_size:
            raise Refused(f"token id {max(prompt)} is not in the vocabulary", param="prompt")
        return prompt

    def _jobs(
        self, asked: Generation, prompts: list[list[int]], limit: int | None, logprobs: int | None
    ) -> Iterator[Job]:
        sampling = self._sampling(asked, limit, logprobs)
        limits = self._limits(asked)
        trace = bool(asked.jetspec and asked.jetspec.trace)
        for tokens in prompts:
            self._check_prompt(tokens)
            for index in range(asked.n):
                seed = None if asked.seed is None else (asked.seed + index) % (1 << 63)
                yield Job(tokens, replace(sampling, seed=seed), limits, trace)

    def _sampling(self, asked: Generation, limit: int | None, logprobs: int | None) -> SamplingParams:
        if limit is not None and limit > self.max_tokens:
            raise Refused(f"max_tokens is {limit}; here it may be at most {self.max_tokens}", param="max_tokens")
        wanted: dict[str, Any] = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "max_tokens": limit or self.max_tokens,
            "stop": tuple(asked.stop),
            "ignore_eos": asked.ignore_eos,
        }
        optional = {
            "presence_penalty": asked.presence_penalty or None,
            "frequency_penalty": asked.frequency_penalty or None,
            "logprobs": logprobs,
        }
        wanted |= {name: value for name, value in optional.items() if value is not None}
        for name in sorted(wanted.keys() - ENGINE_OPTIONS):
            raise Refused(f"{name} is not supported", param=name)
        return SamplingParams(**wanted)

    def _limits(self, asked: Generation) -> TreeLimits | None:
        tree = asked.jetspec
        if tree is None or (tree.budget is None and tree.width is None):
            return None
        for name, value, most in (
            ("budget", tree.budget, self.tree.budget),
            ("width", tree.width, self.tree.width),
        ):
            if value is not None and value > most:
                raise Refused(f"{name} is {value}; this server's trees have {most}", param=f"jetspec.{name}")
        return TreeLimits(tree.budget or self.tree.budget, tree.width or self.tree.width)

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise Refused("the prompt is empty", param="prompt")
        if len(tokens) > self.max_prompt:
            raise Refused(
                f"the prompt has {len(tokens)} tokens; here it may have at most {self.max_prompt}",
                code="context_length_exceeded",
            )


def each_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """The prompts of a completion: a text or token ids are one of them."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def uses_tools(message: Message) -> bool:
    return message.role == "tool" or bool(message.tool_calls)


def read_arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise Refused("the arguments of a tool call are not JSON", param="messages") from None


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: plain text, and the arguments of a call as an object."""
    said: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": value}}
            for call, value in zip(message.tool_calls, map(read_arguments, message.tool_calls), strict=True)
        ]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    return said
