"""Schemas of requests and responses, with their bounds, which the OpenAPI document therefore states.

Requests follow OpenAI's. A field that is not here is refused by its name; null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from jetspec.config import MAX_BUDGET, MAX_WIDTH
from jetspec.types import MAX_BIASED_TOKENS, MAX_LOGPROBS

MAX_CHOICES = 16
"""Completions of a prompt."""
MAX_PROMPTS = 16
MAX_STOPS = 16
MAX_TOOLS = 64
MAX_MESSAGES = 2048
MAX_CALLS = 1024
"""Tool calls of a message."""

ShortText = Annotated[str, StringConstraints(max_length=256)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""Canonical decimal, so that no two keys name the same token."""
Bias = Annotated[float, Field(ge=-100, le=100)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, fail_fast=True)]


def prompt_tag(prompt: Any) -> str:
    """Returns the alternative of the union that a prompt means, by its first entry; errors are about that one."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else None
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"


Several = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[list[str], Several, Tag("list[str]")]
    | Annotated[list[TokenIds], Several, Tag("list[list[int]]")],
    Discriminator(prompt_tag),
]


def check_size(biases: Any) -> Any:
    """Limits the entries of a dictionary before pydantic validates each of them."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASED_TOKENS:
        raise PydanticCustomError("too_long", "too many", {"max_length": MAX_BIASED_TOKENS})
    return biases


class RequestModel(BaseModel):
    """Base of everything a client sends: types are not converted, and unknown fields are refused.

    Validation of long lists stops at the first error (`fail_fast`); all errors of a large body would take seconds.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    IGNORED: ClassVar[dict[str, Any]] = {}
    """Field -> value that clients send although it changes nothing. The pair is dropped. An ellipsis is any value:
    OpenAI's client adds such fields, which repeat others, when it sends a response back."""

    @model_validator(mode="before")
    @classmethod
    def drop_ignored(cls, value: Any) -> Any:
        """Drops nulls and fields without effect. Of unknown fields the first is kept: it suffices to refuse all."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: entry for name, entry in value.items() if entry is not None and not cls._is_ignored(name, entry)}
        unknown = next((name for name in given if name not in known), None)
        return {name: entry for name, entry in given.items() if name in known or name == unknown}

    @classmethod
    def _is_ignored(cls, name: str, entry: Any) -> bool:
        """1 and 1.0 are the same value, 1 and true are not."""
        ignored = cls.IGNORED.get(name)
        return ignored is ... or (entry == ignored and isinstance(entry, bool) == isinstance(ignored, bool))


class StreamOptions(RequestModel):
    include_usage: bool = False
    """Send a last chunk with the usage."""


class TreeOptions(RequestModel):
    """JetSpec's extension: a smaller tree for this request, and a trace of its rounds."""

    budget: Annotated[int, Field(ge=1, le=MAX_BUDGET)] | None = None
    """Node limit of the tree, up to the server's budget; 1 is plain decoding."""
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] | None = None
    """Child limit of a node, up to the server's width; 1 is a chain."""
    trace: bool = False
    """Add each round's tokens and tree to the chunks of the stream."""


class GenerationRequest(RequestModel):
    """Fields of chat and text completions."""

    IGNORED = {"repetition_penalty": 1, "top_k": -1}  # `vllm bench serve` always sends the first; -1 is vLLM's 0

    model: ShortText
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: Stops = []
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """Seed of the first completion; each of the others has the next number."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[TokenIdText, Bias], Field(max_length=MAX_BIASED_TOKENS), BeforeValidator(check_size)
    ] = {}
    """Token id -> value added to its logit."""
    ignore_eos: bool = False
    cache_salt: ShortText | None = None
    """Cached prefixes are shared only between requests of the same salt and API key. Empty: no salt."""
    user: ShortText | None = None
    """Name in the log, without other effect."""
    jetspec: TreeOptions | None = None


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class ChosenFunction(RequestModel):
    name: ToolName


class FunctionCall(ChosenFunction):
    """A function call, in a message or in a completion."""

    IGNORED = {"parsed_arguments": ...}

    arguments: str
    """A JSON object."""


class ToolCall(RequestModel):
    IGNORED = {"index": ...}  # in a stream

    id: ShortText
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestModel):
    IGNORED = {"annotations": [], "parsed": ...}  # in OpenAI's responses, which may be sent back as messages

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="after")
    def check_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant message has tool_calls")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a tool message needs the tool_call_id that it answers")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("only a tool message has a tool_call_id")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionSpec(ChosenFunction):
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None
    """Calls follow the schema even where the model decides to call; forced calls always do."""


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionSpec


class ToolChoice(RequestModel):
    type: Literal["function"]
    function: ChosenFunction


class NamedSchema(RequestModel):
    """A response format. Its `description` is not supported: the prompt holds the messages only."""

    name: ToolName
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Without effect: a completion always follows its schema."""


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"]


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class TemplateOptions(RequestModel):
    """Variables for the chat template."""

    enable_thinking: bool | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False: a completion ends with its first call. A forced call is always the only one."""
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(GenerationRequest):
    IGNORED = {**GenerationRequest.IGNORED, "best_of": 1, "echo": False}  # sent by benchmarks

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


OmitNull = Field(exclude_if=lambda value: value is None)
"""Marks fields that are left out when null. OpenAI's other nullable fields are sent as null."""


class CachedTokens(BaseModel):
    cached_tokens: int


class RoundUsage(BaseModel):
    rounds: int
    tokens_per_round: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    jetspec: RoundUsage


class TopLogprob(TypedDict):
    """A dictionary, not a model: a response may hold hundreds of thousands."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ResponseToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(ResponseToolCall):
    index: int
    """Number of the call in its completion."""


class ResponseMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    """Always null; OpenAI's clients expect the field."""
    tool_calls: Annotated[list[ResponseToolCall] | None, OmitNull] = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class Delta(BaseModel):
    role: Annotated[Literal["assistant"] | None, OmitNull] = None
    content: Annotated[str | None, OmitNull] = None
    tool_calls: Annotated[list[ToolCallDelta] | None, OmitNull] = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class TracedToken(BaseModel):
    """A committed token of a round."""

    text: str
    depth: int
    """Position in the round, from 1. The last token is the bonus token, after the accepted path."""
    logprob: float
    """Log-probability under the target."""
    draft_logprob: Annotated[float | None, OmitNull] = None
    """Log-probability under the draft; the bonus token has none."""


class TracedTree(BaseModel):
    """Draft tree of a round, by node; node 0 is the anchor."""

    tokens: list[str]
    parents: list[int]
    scores: list[float]
    """Cumulative log-probabilities under the draft."""
    path: list[int]
    """Accepted nodes, anchor first."""
    bonus: str
    """Token sampled from the target after the path."""


class TracedRound(BaseModel):
    """Trace of a round, in the chunks of a request with `trace`."""

    round: int
    """Number of the round, from 1."""
    tokens: list[TracedToken]
    tree: TracedTree
    tokens_per_s: float
    """Speed of this completion since the end of its first round."""


class ResponseModel(BaseModel):
    """Fields of every response, and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str


class ChatCompletion(ResponseModel):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(ResponseModel):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Annotated[Usage | None, OmitNull] = None
    jetspec: Annotated[TracedRound | None, OmitNull] = None


class TextCompletion(ResponseModel):
    """A text completion, or a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Annotated[Usage | None, OmitNull] = None
    jetspec: Annotated[TracedRound | None, OmitNull] = None


class TreeShape(BaseModel):
    """Decoding settings of this server, upper bounds for a request."""

    drafter: str
    budget: int
    width: int
    max_len: int
    max_tokens: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["jetspec"] = "jetspec"
    jetspec: TreeShape


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "ready", "busy", "stopping", "failed"]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody
