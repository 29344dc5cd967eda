"""What clients send and get, as schemas. Bounds stand here, so that the OpenAPI document states them.

Requests follow OpenAI's. A field that is not here is refused by its name; null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from jetspec.config import MAX_BUDGET, MAX_WIDTH
from jetspec.types import MAX_BIASED_TOKENS, MAX_LOGPROBS

MAX_ANSWERS = 16
MAX_STOPS = 16
MAX_TOOLS = 64
MAX_MESSAGES = 2048

ShortText = Annotated[str, StringConstraints(max_length=256)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]


class Asked(BaseModel):
    """Something that a client sends: types are not converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: entry for key, entry in value.items() if entry is not None}
        return value


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
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=MAX_BIASED_TOKENS)] = {}
    """Token ids, and what is added to their logits."""
    ignore_eos: bool = False
    cache_salt: ShortText | None = None
    """Prompts share cached prefixes only with those of the same salt (and the same API key)."""
    user: ShortText | None = None
    """A name for the log; it changes nothing."""
    jetspec: TreeOptions | None = None


class TextPart(Asked):
    type: Literal["text"]
    text: str


class CalledFunction(Asked):
    name: ToolName
    arguments: str
    """JSON."""


class ToolCall(Asked):
    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="after")
    def says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant calls tools")
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
    """It changes nothing: a call that is forced always follows its schema, others are the model's own."""


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
    description: str | None = None
    """Not told to the model, which sees the messages only."""
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
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: Literal[True] = True
    chat_template_kwargs: TemplateArguments | None = None


class CompletionRequest(Generation):
    prompt: str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1, max_length=MAX_ANSWERS)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


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


class TopLogprob(BaseModel):
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
    tool_calls: list[MadeCall] | None = None


Finish = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[MadeCallDelta] | None = None


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
    draft_logprob: float | None = None
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
    usage: Usage | None = None
    jetspec: TracedRound | None = None


class TextCompletion(BaseModel):
    """Whole, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    jetspec: TracedRound | None = None


class TreeShape(BaseModel):
    """How this server decodes; requests may want less of it."""

    drafter: str
    budget: int
    width: int
    max_len: int


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
