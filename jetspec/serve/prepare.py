"""From what a client asks to jobs for the engine. Runs beside the event loop, because texts can be long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from jetspec.config import TreeConfig
from jetspec.grammar.bounds import check_bounds
from jetspec.grammar.tools import BEGIN, check_functions, forced_call, free_calls
from jetspec.models.tokenizer import Tokenizer, TooLong
from jetspec.serve.arguments import told_arguments
from jetspec.serve.errors import ApiError
from jetspec.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    SchemaFormat,
    TemplateArguments,
    TextFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from jetspec.serve.worker import Job
from jetspec.types import Grammar, SamplingParams, TreeLimits

FORCED = f"{BEGIN}\n"
"""Written in the model's name where it must call a tool."""


@dataclass(frozen=True)
class Prepared:
    """What the engine is to do, and how its answers are to be read."""

    jobs: list[Job]
    shows_logprobs: bool = False
    reads_tools: bool = False
    """Answers may hold tool calls."""
    in_call: bool = False
    """Answers begin inside a tool call."""

    @property
    def num_answers(self) -> int:
        return sum(job.count for job in self.jobs)

    @property
    def grammar(self) -> Grammar | None:
        """All jobs have the same."""
        return self.jobs[0].sampling.grammar

    def with_grammar(self, grammar: Grammar) -> Prepared:
        jobs = [replace(job, sampling=replace(job.sampling, grammar=grammar)) for job in self.jobs]
        return replace(self, jobs=jobs)


class RequestBuilder:
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
        self.vocab_size = tokenizer.vocab_size
        self.max_prompt = min(max_prompt or max_len, max_len - 1)
        self.max_tokens = min(max_tokens or max_len, max_len)

    def chat(self, asked: ChatRequest, tenant: str) -> Prepared:
        self._check_common(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError("top_logprobs needs logprobs", param="top_logprobs")
        tools, forced = chosen_tools(asked)
        if tools or any(map(uses_tools, asked.messages)):
            check_template(self.tokenizer.chat_template)
            check_calls(asked.messages)
        grammar = self._grammar(asked, tools, forced)
        variables: dict[str, Any] = {"tools": list(map(told_tool, tools))} if tools else {}
        if asked.chat_template_kwargs:
            variables |= template_arguments(asked.chat_template_kwargs, self.tokenizer.chat_template)
        messages = [template_message(message, f"messages.{i}") for i, message in enumerate(asked.messages)]
        tokens = self._encode_chat(messages, FORCED if forced else "", variables)
        limit = answer_limit(asked)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        jobs = self._jobs(asked, [tokens], tenant, limit, logprobs, grammar)
        return Prepared(jobs, asked.logprobs, reads_tools=bool(tools), in_call=forced)

    def completion(self, asked: CompletionRequest, tenant: str) -> Prepared:
        self._check_common(asked)
        prompts = [self._encode(prompt) for prompt in each_prompt(asked.prompt)]
        is_asked = "max_tokens" in asked.model_fields_set
        limit = asked.max_tokens if is_asked else min(asked.max_tokens, self.max_tokens)
        jobs = self._jobs(asked, prompts, tenant, limit, asked.logprobs, None)
        return Prepared(jobs, asked.logprobs is not None)

    def _grammar(self, asked: ChatRequest, tools: list[Tool], forced: bool) -> Grammar | None:
        """What the answer must look like: a call that is forced, calls of strict tools, or the format asked for."""
        functions = [tool.function for tool in tools]
        with refused("tools"):
            check_bounds([function.parameters for function in functions], "tools")
            check_functions(functions)
        form = asked.response_format
        if isinstance(form, TextFormat):
            form = None
        if form and tools:
            raise ApiError("response_format and tools do not go together", param="response_format")
        if forced:
            return forced_call(functions)
        if any(function.strict for function in functions):
            return free_calls(functions, once=not asked.parallel_tool_calls)
        if tools and not asked.parallel_tool_calls:
            why = "parallel_tool_calls can be false only if a tool is strict or tool_choice forces a call"
            raise ApiError(f"{why}: ask for one of these", param="parallel_tool_calls")
        if isinstance(form, SchemaFormat):
            with refused("response_format"):
                check_bounds([form.json_schema.schema_], "response_format")
            return Grammar("json_schema", json.dumps(form.json_schema.schema_))
        return Grammar("json_object") if form else None

    def _check_common(self, asked: Generation) -> None:
        if asked.model != self.model_name:
            raise ApiError(
                f"the model {asked.model!r} is not served here; {self.model_name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )
        if asked.stream_options and not asked.stream:
            raise ApiError("stream_options needs stream", param="stream_options")
        if asked.jetspec and asked.jetspec.trace and not asked.stream:
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
            # What a template says about a conversation is for the client; how it broke is not.
            why = f": {error.__cause__}" if type(error.__cause__) is TemplateError else ""
            raise ApiError(f"the chat template does not take this conversation{why}", param="messages") from error

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt, add_special=True, most=self.max_prompt)
            except TooLong as error:
                raise self._too_long() from error
            except ValueError as error:
                raise ApiError(str(error), param="prompt") from error
        self._check_tokens(prompt, "prompt")
        return prompt

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            raise ApiError(f"token id {max(tokens)} is not in the vocabulary", param=param)

    def _jobs(
        self,
        asked: Generation,
        prompts: list[list[int]],
        tenant: str,
        limit: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
    ) -> list[Job]:
        for tokens in prompts:
            self._check_prompt(tokens)
        limits, trace = self._limits(asked), bool(asked.jetspec and asked.jetspec.trace)
        if trace and logprobs is None:
            logprobs = 0
        sampling = self._sampling(asked, limit, logprobs, grammar)
        salt = json.dumps([tenant, asked.cache_salt or ""]) if tenant or asked.cache_salt else ""
        return [Job(tokens, sampling, asked.n, limits, trace, salt) for tokens in prompts]

    def _sampling(
        self, asked: Generation, limit: int | None, logprobs: int | None, grammar: Grammar | None
    ) -> SamplingParams:
        if limit is not None and limit > self.max_tokens:
            raise ApiError(f"max_tokens is {limit}; here it may be at most {self.max_tokens}", param="max_tokens")
        if grammar and asked.ignore_eos:
            why = "ignore_eos does not go together with a form of the answer or strict tools"
            raise ApiError(why, param="ignore_eos")
        bias = {int(token): value for token, value in asked.logit_bias.items()}
        self._check_tokens(list(bias), "logit_bias")
        return SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            max_tokens=limit or self.max_tokens,
            stop=tuple(asked.stop),
            ignore_eos=asked.ignore_eos,
            seed=asked.seed,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=bias,
            logprobs=logprobs,
            grammar=grammar,
        )

    def _limits(self, asked: Generation) -> TreeLimits | None:
        tree = asked.jetspec
        if tree is None or (tree.budget is None and tree.width is None):
            return None
        for name, value, most in (
            ("budget", tree.budget, self.tree.budget),
            ("width", tree.width, self.tree.width),
        ):
            if value is not None and value > most:
                raise ApiError(f"{name} is {value}; this server's trees have {most}", param=f"jetspec.{name}")
        return TreeLimits(tree.budget or self.tree.budget, tree.width or self.tree.width)

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise ApiError("the prompt is empty", param="prompt")
        if len(tokens) > self.max_prompt:
            raise self._too_long()

    def _too_long(self) -> ApiError:
        why = f"the prompt is too long; here it may have at most {self.max_prompt} tokens"
        return ApiError(why, code="context_length_exceeded")


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Turns a ValueError into an error for the client about this field."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), param=param) from error


def check_template(template: str | None) -> None:
    """Refuse tools if the chat template does not render them, or renders calls in another format."""
    if template is None or "tools" not in template:
        raise ApiError("tools are not supported: this model's chat template has none", param="tools")
    if BEGIN not in template:
        raise ApiError(
            "tools are not supported: this model's chat template calls them in an unknown way", param="tools"
        )


def told_tool(tool: Tool) -> dict[str, Any]:
    """A tool as the chat template gets it: as sent, without `strict`, which concerns decoding only."""
    return tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


def chosen_tools(asked: ChatRequest) -> tuple[list[Tool], bool]:
    """The tools that the model is told of, and whether it must call one."""
    choice = asked.tool_choice
    if choice == "none":
        return [], False
    if choice == "auto":
        return asked.tools, False
    names = [tool.function.name for tool in asked.tools]
    wanted = choice.function.name if isinstance(choice, ToolChoice) else None
    tools = [tool for tool in asked.tools if wanted in (None, tool.function.name)]
    if not tools:
        raise ApiError(f"tool_choice wants a tool that is not there; there are: {names}", param="tool_choice")
    return tools, True


def answer_limit(asked: ChatRequest) -> int | None:
    """The limit on an answer has two names."""
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(f"max_tokens is {old}, but max_completion_tokens is {new}; give one of them", param="max_tokens")
    return new or old


def check_calls(messages: Sequence[Message]) -> None:
    """What a tool says must answer a call that was made before."""
    made: set[str] = set()
    for number, message in enumerate(messages):
        if message.tool_call_id and message.tool_call_id not in made:
            raise ApiError("no call before has this tool_call_id", param=f"messages.{number}.tool_call_id")
        made.update(call.id for call in message.tool_calls or [])


def each_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """The prompts of a completion: a text or token ids are one of them."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def uses_tools(message: Message) -> bool:
    return message.role == "tool" or bool(message.tool_calls)


def template_arguments(asked: TemplateArguments, template: str | None) -> dict[str, Any]:
    """What the chat template is told beside the conversation. What it does not use is refused."""
    given = asked.model_dump(exclude_none=True)
    for name in given:
        if name not in (template or ""):
            where = f"chat_template_kwargs.{name}"
            raise ApiError(f"{where} is not supported: this model's chat template does not use it", param=where)
    return given


def told_call(call: ToolCall, place: str) -> dict[str, Any]:
    try:
        arguments = told_arguments(call.function.arguments)
    except ValueError as error:
        raise ApiError(str(error), param=f"{place}.function.arguments") from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def template_message(message: Message, place: str) -> dict[str, Any]:
    """A message as chat templates expect it: plain text, and the arguments of a call as an object."""
    said: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.tool_calls:
        said["tool_calls"] = [told_call(call, f"{place}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    return said
