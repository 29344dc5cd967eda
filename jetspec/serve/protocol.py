"""What clients send and get, as schemas. Bounds stand here, so that the OpenAPI document states them.

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

MAX_ANSWERS = 16
"""Answers to a prompt."""
MAX_PROMPTS = 16
MAX_STOPS = 16
MAX_TOOLS = 64
MAX_MESSAGES = 2048
MAX_CALLS = 1024
"""Calls of a message."""

ShortText = Annotated[str, StringConstraints(max_length=256)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""One way to write each, so that no two names are of the same token."""
Bias = Annotated[float, Field(ge=-100, le=100)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, fail_fast=True)]


def form_of_prompt(prompt: Any) -> str:
    """Which of its forms a prompt is meant to have, by its first entry: errors are about that one."""
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
    Discriminator(form_of_prompt),
]


def check_size(biases: Any) -> Any:
    """Pydantic counts the entries of a dictionary only after it has looked at each."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASED_TOKENS:
        raise PydanticCustomError("too_long", "too many", {"max_length": MAX_BIASED_TOKENS})
    return biases


def untold(description: Any) -> Any:
    """Refuse a description that the model would not be told of."""
    if description is not None:
        raise PydanticCustomError("untold", "it is not told to the model; say it in a message")
    return description


class Asked(BaseModel):
    """Something that a client sends: types are not converted, and unknown fields are refused.

    What a client can send many of stops at the first mistake (`fail_fast`), or one wrong body would take seconds.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    NEUTRAL: ClassVar[dict[str, Any]] = {}
    """Values beyond those of its fields that change nothing, and that clients send all the same."""
    REPEATED: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that OpenAI's client adds to an answer that it hands back: they say again what others say."""

    @model_validator(mode="before")
    @classmethod
    def leave_out(cls, value: Any) -> Any:
        """What means nothing. Of the fields that are not known, the first is enough to refuse the whole."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: entry for name, entry in value.items() if entry is not None and not cls._is_neutral(name, entry)}
        unknown = next((name for name in given if name not in known), None)
        return {name: entry for name, entry in given.items() if name in known or name == unknown}

    @classmethod
    def _is_neutral(cls, name: str, entry: Any) -> bool:
        """Numbers may be written in any way, but neither true nor false is one."""
        if name not in cls.NEUTRAL:
            return name in cls.REPEATED
        neutral = cls.NEUTRAL[name]
        return bool(entry == neutral) and isinstance(entry, bool) == isinstance(neutral, bool)


class StreamOptions(Asked):
    include_usage: bool = False
    """A last chunk with what the request cost."""


class TreeOptions(Asked):
    """JetSpec's own extension: the tree of this request, and a look at it."""

    budget: Annotated[int, Field(ge=1, le=MAX_BUDGET)] | None = None
    """Most nodes of a tree, up to the server's own budget; 1 is plain decoding."""
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] | None = None
    """Most children of a node, up to the server's own width; 1 is a chain."""
    trace: bool = False
    """Put every round's tokens and tree into the chunks of the stream."""


class Generation(Asked):
    """What chats and plain completions have in common."""

    NEUTRAL = {"repetition_penalty": 1, "top_k": -1}  # `vllm bench serve` always sends the one; vLLM's word for 0

    model: ShortText
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """0: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: Stops = []
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """Answers 2 to n take the numbers that follow."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[TokenIdText, Bias], Field(max_length=MAX_BIASED_TOKENS), BeforeValidator(check_size)
    ] = {}
    """Token ids, and what is added to their logits."""
    ignore_eos: bool = False
    cache_salt: ShortText | None = None
    """Prompts share cached prefixes only with those of the same salt (and the same API key). Empty: none."""
    user: ShortText | None = None
    """A name for the log; it changes nothing."""
    jetspec: TreeOptions | None = None


class TextPart(Asked):
    type: Literal["text"]
    text: str


class CalledFunction(Asked):
    """A call, as it may be handed back. What an answer calls is held to the same."""

    REPEATED = frozenset({"parsed_arguments"})

    name: ToolName
    arguments: str
    """A JSON object, which `read_arguments` reads."""


class ToolCall(Asked):
    REPEATED = frozenset({"index"})  # of a stream

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Asked):
    NEUTRAL = {"annotations": []}  # OpenAI's client hands an answer back as it came, with this in it
    REPEATED = frozenset({"parsed"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="after")
    def says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant calls tools")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of a tool needs the tool_call_id that it answers")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("only a message of a tool has a tool_call_id")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionSpec(Asked):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None
    """Calls that the model makes by itself follow the schema, too. A call that is forced always does."""


class Tool(Asked):
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Asked):
    name: ToolName


class ToolChoice(Asked):
    type: Literal["function"]
    function: ChosenFunction


class NamedSchema(Asked):
    name: ToolName
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Annotated[None, BeforeValidator(untold)] = None
    """Refused: the model sees the messages only."""
    strict: bool | None = None
    """It changes nothing: an answer always follows its schema."""


class TextFormat(Asked):
    type: Literal["text"]


class ObjectFormat(Asked):
    type: Literal["json_object"]


class SchemaFormat(Asked):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class TemplateArguments(Asked):
    """What a client may tell the chat template."""

    enable_thinking: bool | None = None


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False: an answer ends with its first call. A call that is forced is the only one."""
    chat_template_kwargs: TemplateArguments | None = None


class CompletionRequest(Generation):
    NEUTRAL = {**Generation.NEUTRAL, "best_of": 1, "echo": False}  # as benchmarks send them

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


WhenThere = Field(exclude_if=lambda value: value is None)
"""For what is left out of an answer that does not have it; OpenAI's other nullable fields are there, as null."""


class CachedTokens(BaseModel):
    cached_tokens: int


class Rounds(BaseModel):
    rounds: int
    tokens_per_round: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    jetspec: Rounds


class TopLogprob(TypedDict):
    """A dictionary and no model, because an answer may hold hundreds of thousands."""

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


class FunctionCall(BaseModel):
    name: str
    arguments: str


class MadeCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class MadeCallDelta(MadeCall):
    """In a stream a call says which of the answer's calls it is."""

    index: int


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    """Never one; OpenAI's clients expect the field."""
    tool_calls: Annotated[list[MadeCall] | None, WhenThere] = None


Finish = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class Delta(BaseModel):
    role: Annotated[Literal["assistant"] | None, WhenThere] = None
    content: Annotated[str | None, WhenThere] = None
    tool_calls: Annotated[list[MadeCallDelta] | None, WhenThere] = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class TracedToken(BaseModel):
    """A token that a round committed."""

    text: str
    depth: int
    """Place in the round, from 1; the last one is the target's own, after the path."""
    logprob: float
    """Under the target."""
    draft_logprob: Annotated[float | None, WhenThere] = None
    """Under the draft; the last token was not drafted."""


class TracedTree(BaseModel):
    """The tree of a round, node by node; node 0 is the anchor."""

    tokens: list[str]
    parents: list[int]
    scores: list[float]
    """Cumulative log-probabilities under the draft."""
    path: list[int]
    """Accepted nodes, the anchor first."""
    bonus: str
    """The target's own token after the path."""


class TracedRound(BaseModel):
    """What a chunk carries when the request asked for a trace."""

    round: int
    """From 1."""
    tokens: list[TracedToken]
    tree: TracedTree
    tokens_per_s: float
    """Of this answer, from its first round to this one."""


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Annotated[Usage | None, WhenThere] = None
    jetspec: Annotated[TracedRound | None, WhenThere] = None


class TextCompletion(BaseModel):
    """Whole, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Annotated[Usage | None, WhenThere] = None
    jetspec: Annotated[TracedRound | None, WhenThere] = None


class TreeShape(BaseModel):
    """How this server decodes; requests may want less of it."""

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


class ErrorAnswer(BaseModel):
    error: ErrorBody
