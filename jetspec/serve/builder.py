"""API requests become jobs for the engine. Runs in threads beside the event loop, because texts can be long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from jetspec.engine.llm import LLM
from jetspec.grammar.bounds import check_bounds
from jetspec.grammar.tools import BEGIN, check_functions, forced_call, free_calls
from jetspec.models.tokenizer import TooLong
from jetspec.serve import protocol as api
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import ApiError
from jetspec.serve.tools import template_arguments
from jetspec.serve.worker import Job
from jetspec.types import Grammar, SamplingParams, TreeLimits

FORCED_CALL = f"{BEGIN}\n"
"""Beginning of the model's turn where it must call a tool."""


SHARED = ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "seed", "presence_penalty", "frequency_penalty")
"""Fields of a request that are fields of `SamplingParams`."""


class RequestBuilder:
    """Turns API requests into jobs. Refuses by name whatever this server's model and engine do not support."""

    def __init__(self, llm: LLM, config: ServeConfig) -> None:
        self.tokenizer, self.tree, max_len = llm.tokenizer, llm.tree, llm.engine.max_len
        self.model_name = config.model_name or llm.model_name
        if config.max_tokens is not None and config.max_tokens > max_len:
            raise ValueError(f"max_tokens is {config.max_tokens}, but the context holds {max_len} tokens")
        self.max_prompt = min(config.max_prompt or max_len, max_len - 1)
        self.max_tokens = config.max_tokens or max_len

    def chat(self, request: api.ChatRequest, tenant: str) -> Job:
        self._check(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs", param="top_logprobs")
        template = self.tokenizer.chat_template
        tools, is_forced = chosen_tools(request)
        if tools or any(message.role == "tool" or message.tool_calls for message in request.messages):
            check_template(template)
            check_call_ids(request.messages)
        grammar = self._grammar(request, tools, is_forced)
        variables: dict[str, Any] = {}
        if tools:  # as sent, without `strict`, which concerns decoding only
            sent = (tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in tools)
            variables["tools"] = list(sent)
        options = request.chat_template_kwargs or api.TemplateOptions()
        for name, value in options.model_dump(exclude_none=True).items():
            if name not in (template or ""):
                where = f"chat_template_kwargs.{name}"
                raise ApiError(f"{where} is not supported: this model's chat template does not use it", param=where)
            variables[name] = value
        messages = [template_message(message, f"messages.{i}") for i, message in enumerate(request.messages)]
        tokens = self._encode_chat(messages, FORCED_CALL if is_forced else "", variables)
        old, new = request.max_tokens, request.max_completion_tokens  # two names of one limit
        if old is not None and new is not None and old != new:
            why = f"max_tokens is {old}, but max_completion_tokens is {new}; give one of them"
            raise ApiError(why, param="max_tokens")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        job = self._job(request, [tokens], tenant, new or old, logprobs, grammar)
        return replace(job, reads_tools=bool(tools), in_call=is_forced)

    def completion(self, request: api.CompletionRequest, tenant: str) -> Job:
        self._check(request)
        given = request.prompt
        prompts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        is_given = "max_tokens" in request.model_fields_set
        limit = request.max_tokens if is_given else min(request.max_tokens, self.max_tokens)
        return self._job(request, [self._encode(prompt) for prompt in prompts], tenant, limit, request.logprobs)

    def _grammar(self, request: api.ChatRequest, tools: list[api.Tool], is_forced: bool) -> Grammar | None:
        """The grammar of a completion: a forced call, calls of strict tools, or the response format."""
        functions = [tool.function for tool in tools]
        with refused("tools"):
            check_bounds([function.parameters for function in functions], "tools")
            check_functions(functions)
        form = request.response_format
        if form and form.type == "text":
            form = None
        if form and tools:
            raise ApiError("response_format and tools cannot be combined", param="response_format")
        if is_forced:
            return forced_call(functions)
        if any(function.strict for function in functions):
            return free_calls(functions, once=not request.parallel_tool_calls)
        if tools and not request.parallel_tool_calls:
            why = "parallel_tool_calls can be false only if a tool is strict or tool_choice forces a call"
            raise ApiError(why, param="parallel_tool_calls")
        if isinstance(form, api.SchemaFormat):
            with refused("response_format"):
                check_bounds([form.json_schema.schema_], "response_format")
            return Grammar("json_schema", json.dumps(form.json_schema.schema_))
        return Grammar("json_object") if form else None

    def _check(self, request: api.GenerationRequest) -> None:
        if request.model != self.model_name:
            raise ApiError(
                f"the model {request.model!r} is not served here; {self.model_name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )
        if request.stream_options and not request.stream:
            raise ApiError("stream_options needs stream", param="stream_options")
        if request.jetspec and request.jetspec.trace and not request.stream:
            raise ApiError("jetspec.trace needs stream", param="jetspec.trace")

    def _encode_chat(self, messages: list[dict[str, Any]], begin: str, variables: dict[str, Any]) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ApiError("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self.tokenizer.encode_chat(messages, begin, self.max_prompt, **variables)
        except TooLong as error:
            raise self._too_long() from error
        except ValueError as error:
            if error.__cause__ is None:
                raise ApiError(str(error), param="messages") from error
            # Messages of `raise_exception` in a template are for users; other failures are internals.
            why = f": {error.__cause__}" if type(error.__cause__) is TemplateError else ""
            raise ApiError(f"the chat template does not accept this conversation{why}", param="messages") from error

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            self._check_tokens(prompt, "prompt")
            return prompt
        with refused("prompt"):
            try:
                return self.tokenizer.encode(prompt, add_special=True, most=self.max_prompt)
            except TooLong as error:
                raise self._too_long() from error

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and max(tokens) >= self.tokenizer.vocab_size:
            raise ApiError(f"token id {max(tokens)} is not in the vocabulary", param=param)

    def _job(
        self,
        request: api.GenerationRequest,
        prompts: list[list[int]],
        tenant: str,
        limit: int | None,
        logprobs: int | None,
        grammar: Grammar | None = None,
    ) -> Job:
        for tokens in prompts:
            if not tokens:
                raise ApiError("the prompt is empty", param="prompt")
            if len(tokens) > self.max_prompt:
                raise self._too_long()
        if limit is not None and limit > self.max_tokens:
            raise ApiError(f"max_tokens is {limit}; here it may be at most {self.max_tokens}", param="max_tokens")
        if grammar and request.ignore_eos:
            why = "ignore_eos cannot be combined with response_format, forced calls or strict tools"
            raise ApiError(why, param="ignore_eos")
        bias = {int(token): value for token, value in request.logit_bias.items()}
        self._check_tokens(list(bias), "logit_bias")
        tree = request.jetspec or api.TreeOptions()
        sampling = SamplingParams(
            **{name: getattr(request, name) for name in SHARED},
            max_tokens=limit or self.max_tokens,
            stop=tuple(request.stop),
            logit_bias=bias,
            logprobs=0 if tree.trace and logprobs is None else logprobs,
            grammar=grammar,
        )
        for name, value, most in (("budget", tree.budget, self.tree.budget), ("width", tree.width, self.tree.width)):
            if value is not None and value > most:
                raise ApiError(f"{name} is {value}; this server's trees have {most}", param=f"jetspec.{name}")
        limits = TreeLimits(tree.budget or self.tree.budget, tree.width or self.tree.width)
        return Job(
            prompts,
            sampling,
            count=request.n,
            limits=limits if tree.budget or tree.width else None,
            trace=tree.trace,
            cache_salt=json.dumps([tenant, request.cache_salt or ""]) if tenant or request.cache_salt else "",
            tenant=tenant,
            shows_logprobs=logprobs is not None,
        )

    def _too_long(self) -> ApiError:
        why = f"the prompt is too long; it may have at most {self.max_prompt} tokens here"
        return ApiError(why, code="context_length_exceeded")


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Turns a ValueError into an ApiError about the field `param`."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), param=param) from error


def chosen_tools(request: api.ChatRequest) -> tuple[list[api.Tool], bool]:
    """Returns the tools in the prompt, and whether the model must call one."""
    choice = request.tool_choice
    if choice == "none":
        return [], False
    if choice == "auto":
        return request.tools, False
    names = [tool.function.name for tool in request.tools]
    name = choice.function.name if isinstance(choice, api.ToolChoice) else None
    tools = [tool for tool in request.tools if name in (None, tool.function.name)]
    if not tools:
        raise ApiError(f"tool_choice names no tool of this request; it has {names}", param="tool_choice")
    return tools, True


def check_template(template: str | None) -> None:
    """Refuse tools if the chat template does not render them, or renders calls in another format."""
    if template is None or "tools" not in template:
        raise ApiError("tools are not supported: this model's chat template has none", param="tools")
    if BEGIN not in template:
        raise ApiError(f"tools are not supported: this model's chat template does not use {BEGIN}", param="tools")


def check_call_ids(messages: Sequence[api.Message]) -> None:
    """A tool message must answer an earlier call."""
    ids: set[str] = set()
    for number, message in enumerate(messages):
        if message.tool_call_id and message.tool_call_id not in ids:
            raise ApiError("no earlier call has this tool_call_id", param=f"messages.{number}.tool_call_id")
        ids.update(call.id for call in message.tool_calls or [])


def template_message(message: api.Message, place: str) -> dict[str, Any]:
    """A message for the chat template: content as plain text, arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": message.text}
    for number, call in enumerate(message.tool_calls or []):
        with refused(f"{place}.tool_calls.{number}.function.arguments"):
            function = {"name": call.function.name, "arguments": template_arguments(call.function.arguments)}
        result.setdefault("tool_calls", []).append({"id": call.id, "type": call.type, "function": function})
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result
