"""Types that several layers share. Those of the host hold no tensors.

Shape suffixes, unless a module says otherwise: B requests, R rows of the page table, N nodes per tree (padded), D draft
depth, K width, C shortlist, T tokens flattened, H query heads, G key/value heads, E head size, M model size, X width of
the concatenated taps, V vocabulary, L layers, P pages per request, S page size, W words of an ancestor bitmask.
A digit behind a letter that it can add to does so: BD1 is (B, D + 1); else it is a size: R3N is (R, 3, N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # values are checked before torch is loaded
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length"]
GrammarKind = Literal["json_object", "json_schema", "calls", "regex", "ebnf"]

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True)
class Grammar:
    """Form that the generated text must have.

    `source` is the JSON schema, regular expression or EBNF grammar; `json_object`, any JSON object, needs none.
    `calls` is free text in which everything between two tags follows a schema. Its source is a JSON object with the
    tags `begin` and `end`, the `schema`, and optionally `once`: the text then ends after the first call.
    """

    kind: GrammarKind
    """Form of `source`."""
    source: str = ""
    """JSON schema, regular expression, EBNF grammar or call format."""
    compiled: Any = field(default=None, compare=False, repr=False)
    """Result of `Grammars.compile`, when the grammar was compiled beforehand."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and length parameters of one completion."""

    temperature: float = 0.0
    """Sampling temperature, 0 to 100. 0, the default, is greedy decoding."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together hold this probability, above 0 to 1. 1, the default: off."""
    top_k: int = 0
    """Sample from this many most probable tokens. 0, the default: off."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one, 0 to 1. 0, the default: off."""
    max_tokens: int | None = None
    """Most tokens to generate, at least 1 and at most the context. A text that fills the context ends there. Default:
    256, or the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the text. They are not part of it."""
    ignore_eos: bool = False
    """Generate past end tokens, up to `max_tokens`."""
    seed: int | None = None
    """Seed of the random numbers, 0 to 2^63 - 1: the same seed gives the same text, whatever the tree. Default: a
    fresh seed for each request."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logit of every token that the answer contains already, -2 to 2."""
    frequency_penalty: float = 0.0
    """Amount subtracted from the logit of a token for each of its occurrences in the answer, -2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Amounts added to the logits of these tokens, -100 to 100 each; at most 1024 tokens."""
    logprobs: int | None = None
    """Report the log-probability of every generated token and of this many most probable ones at its position, 0 to
    20: those of the target, before penalties, temperature and filters. Default: none."""
    grammar: Grammar | None = None
    """Grammar that the text must follow. Default: free text."""

    def __post_init__(self) -> None:
        ranges = {"temperature": (0, 100), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
        if self.logprobs is not None:
            ranges["logprobs"] = (0, MAX_LOGPROBS)
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between {low} and {high}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if any(not s for s in self.stop):
            raise ValueError("stop contains an empty string")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias names {len(self.logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are allowed")
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise ValueError("a value of logit_bias is not between -100 and 100")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("grammar and ignore_eos exclude each other: the grammar decides when the text ends")

    @property
    def token_limit(self) -> int:
        """`max_tokens`, or its default where the context is large enough."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0

    @property
    def setting(self) -> str:
        """Name of the sampling setting: `greedy`, or the temperature and the filters."""
        names = ("temperature", "top_p", "top_k", "min_p")
        parts = [f"{n} {value:g}" for n in names if (value := getattr(self, n)) != getattr(SamplingParams, n)]
        return ", ".join(parts) if self.is_sampled else "greedy"

    @property
    def is_filtered(self) -> bool:
        return self.is_sampled and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def is_penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True)
class TreeLimits:
    """Limits of the draft tree of one request, below those of the engine."""

    budget: int
    """Most nodes in the tree, the anchor included. 1 is plain decoding."""
    width: int
    """Most children of one node. 1 is a chain."""

    def __post_init__(self) -> None:
        for name, value in (("budget", self.budget), ("width", self.width)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


Drafting = Literal["whole", "limited", "none"]
"""Drafts of a batch: whole trees, trees cut to the limits of some requests, or none."""


@dataclass(frozen=True)
class RoundFeatures:
    """Optional steps that a decode round needs: those that at least one request of the batch uses."""

    sampled: bool = False
    filtered: bool = False
    penalized: bool = False
    logprobs: bool = False
    drafting: Drafting = "whole"

    @classmethod
    def of(cls, params: Iterable[SamplingParams], limits: Sequence[TreeLimits | None] = ()) -> RoundFeatures:
        different = {id(p): p for p in params}.values()
        is_plain = bool(limits) and all(limit is not None and limit.budget == 1 for limit in limits)
        return cls(
            sampled=any(p.is_sampled for p in different),
            filtered=any(p.is_filtered for p in different),
            penalized=any(p.is_penalized for p in different),
            logprobs=any(p.logprobs is not None for p in different),
            drafting="none" if is_plain else "limited" if any(limits) else "whole",
        )


class Constraint(Protocol):
    """State machine of the tokens that a grammar allows after the committed text of one request."""

    def allow(self, mask_W: Tensor) -> None:
        """Writes the mask of tokens allowed next: bit t % 32 of word t // 32 (int32, on the host) is token t."""

    def advance(self, token: int) -> bool:
        """Advances by one token. Returns False, with the state unchanged, when the token is not allowed."""

    def rollback(self, count: int) -> None:
        """Undoes the last `count` advances."""


@dataclass
class RoundStats:
    """Cost of one request. `completion_tokens == rounds + sum(accepted_lengths)` always holds: the last round counts
    only its tokens that were kept."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Accepted draft tokens, per round."""
    ngram_tokens: int = 0
    """Those of them that only n-grams proposed, not the head."""
    prefill_s: float = 0.0
    """Prefill time. On a GPU, while other requests decode, only the time to launch it: the host does not wait."""
    decode_s: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.accepted_lengths)

    @property
    def completion_tokens(self) -> int:
        return self.rounds + sum(self.accepted_lengths)

    @property
    def tokens_per_round(self) -> float:
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "tokens_per_round")
        names = (*counts, "accepted_lengths", "ngram_tokens", "prefill_s", "decode_s", "tokens_per_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a generated token under the target, and the most probable tokens at its position."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """Tokens with their log-probabilities, best first; the generated token may be among them."""


@dataclass(frozen=True)
class Completion:
    """Output of a finished request. `token_ids` includes a generated end token, `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RoundStats
    logprobs: list[TokenLogprob] | None = None
    """One per token, with `SamplingParams.logprobs`."""


@dataclass(frozen=True)
class RoundTrace:
    """Tree and accepted path of one round, on the host, for drawing. Node 0 is the anchor."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    """Cumulative log-probability of each node under the draft."""
    path: list[int]
    """Accepted nodes, anchor first."""
    bonus: int
    """The target's own token after the path."""

    @cached_property
    def logprobs(self) -> list[float]:
        """Log-probability of each node given its parent, under the draft; 0 for the anchor."""
        return [score - self.scores[parent] for score, parent in zip(self.scores, self.parents, strict=True)]


@dataclass(slots=True)
class Update:
    """New output of a request after one round."""

    request_id: int
    token_ids: list[int]
    text: str
    """New text. Empty while a character or a possible stop string is incomplete."""
    completion: Completion | None = None
    """Set on the last update."""
    trace: RoundTrace | None = None
    """Set for requests with traces."""
    logprobs: list[TokenLogprob] | None = None
    """One per token of `token_ids`, with `SamplingParams.logprobs`."""
    drafted: int = 0
    """Draft tokens that the round verified."""
    accepted: int = 0
    """Draft tokens that the target accepted, also those past the end of the text, which are not in `token_ids`."""
    by_ngrams: int = 0
    """Accepted draft tokens that only n-grams proposed, not the head."""


class RequestState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence being decoded.

    Its last token is the anchor: known, not yet cached, root of the next tree. A request is ready to decode once the
    cache holds every token but the anchor, so a prompt of P tokens needs P - 1 of them prefilled.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    """`sampling.seed`, or a random one in its place."""
    max_len: int
    """Tokens at which it ends, prompt included."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end it."""
    _: KW_ONLY
    limits: TreeLimits | None = None
    """Limits of its trees. None: the tree of the engine."""
    traced: bool = False
    """Its updates carry a `RoundTrace`."""
    quiet: bool = False
    """Its only update is the last one, without text."""
    cache_salt: str = ""
    """Requests share cached pages only when they have the same salt."""
    tenant: str = ""
    """User whose requests together have one share of the engine."""
    constraint: Constraint | None = None
    """State of its grammar."""
    prefix_leader: Request | None = None
    """Request with the same prompt, queued earlier: this one is admitted once the leader's pages can be shared."""
    state: RequestState = RequestState.WAITING
    row: int = -1
    """Row of the page table while admitted."""
    row_epoch: int = 0
    """Times it gained or lost its row. Results of rounds launched in an earlier epoch are dropped."""
    num_cached: int = 0
    """Tokens in the KV cache, of target and head alike."""
    capacity: int = 0
    """Most cached tokens for which its pages still suffice for another round."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per generated token, with `SamplingParams.logprobs`."""
    stats: RoundStats = field(default_factory=RoundStats)
    finish_reason: FinishReason | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.num_cached == len(self.tokens) - 1

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True)
class ChoiceModel:
    """Log-odds of the target's choices by the logits of a draft head, per request and depth (D is 1 where all depths
    share an entry): logit / temperature + weight * noise + bonus * [the filters keep the logit].

    The noise is that of the choice itself, which is known before the round. Greedy choices have none.
    """

    temperature_BD: Tensor
    weight_BD: Tensor | None = None
    bonus_BD: Tensor | None = None
    seed_B: Tensor | None = None
    position_BD: Tensor | None = None
    """Positions of the choices, int64."""
    filters: RowSampling | None = None
    """Sampling parameters of the requests, where their filters count."""
    least_BD: Tensor | None = None
    """Least quotient of logit and temperature that the filters keep. None: not known, or there are no filters."""

    def at(self, depth: int) -> ChoiceModel:
        """Returns the model of one depth."""
        tables = {name: value for name, value in vars(self).items() if name.endswith("BD") and value is not None}
        return replace(self, **{name: x if x.shape[1] == 1 else x[:, depth - 1, None] for name, x in tables.items()})


@dataclass(frozen=True)
class EdgeFactors:
    """Low-rank term that makes a child depend on its parent token: edge(y, c) = <E1[y] * gate, E2[c]>, of rank R."""

    gate_BDR: Tensor
    """g0 + G h_d, divided by the draft temperature."""
    predecessor_VR: Tensor
    """E1, one vector per parent token."""
    successor_VR: Tensor
    """E2, one vector per child token."""

    def score(self, depth: int, parent_BW: Tensor, token_BC: Tensor) -> Tensor:
        """Returns edge(y, c) for every parent y and shortlisted token c, (B, W, C) float32."""
        gated_BWR = self.predecessor_VR[parent_BW].float() * self.gate_BDR[:, depth - 1, None].float()
        return gated_BWR @ self.successor_VR[token_BC].float().mT

    def term(self, row: int, parent_DP: Tensor) -> Tensor:
        """Returns edge(y, c) for P parents per depth of one request and all tokens c, (D, P, V) float32."""
        gated_DPR = self.predecessor_VR[parent_DP].float() * self.gate_BDR[row, :, None].float()
        return gated_DPR @ self.successor_VR.float().mT


@dataclass(frozen=True)
class PathTerm:
    """Term of a child's logit that depends on the path to its parent: <vector(parent), rows(child)>, of rank R."""

    root_B1S: Tensor
    """State above the anchor: S numbers that a node carries from the tokens above it."""
    step: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Maps the depth of children, and tokens (B, W) and inherited states (B, W, S) of their parents, to vectors (B, W,
    R) of the parents, divided by the draft temperature, and to the states that the children inherit."""
    rows: Callable[[Tensor], Tensor]
    """Vectors of tokens (..), (.., R)."""


@dataclass(frozen=True)
class KVPages:
    """K and V storage of one layer, (pages, S, G, E) each. A pool is a tuple of these."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class BatchLayout:
    """Pages and query ranges of the requests of a forward: request b owns tokens query_start_B1[b] up to, and without,
    query_start_B1[b + 1]."""

    page_BP: Tensor
    cached_len_B: Tensor
    query_start_B1: Tensor
    page_size: int
    max_queries: int
    """Upper bound of the tokens per request, known on the host."""
    first_seen: int = 0
    """First position that is attended to; those before it are masked for all queries, in trees only where they are
    cached. A query that sees nothing gets zeros."""
    earlier: int = 0
    """Uncommitted tokens of earlier forwards, equally many in every request. Their slots follow the cached ones, and
    the ancestor bits begin with them."""


@dataclass(frozen=True)
class TreeBatch:
    """Tokens of one forward, with their positions and KV cache slots.

    `slot_T` is the index in storage (page * S + offset), `position_T` the index in the sequence. Siblings share a
    position, never a slot. `ancestor_BNW` None means a chain: each token attends to those before it.
    """

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    layout: BatchLayout
    ancestor_BNW: Tensor | None
    is_tree_B: Tensor | None = None
    """Requests whose ancestor bits count; the others are chains of any length. None: all of them."""


@dataclass(frozen=True)
class RowSampling:
    """`SamplingParams` of a batch as tensors, one entry per request. The two flags skip steps that no request needs."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    any_sampled: bool
    any_filtered: bool

    @classmethod
    def of(cls, params: list[SamplingParams], seeds: list[int], device: torch.device | str) -> RowSampling:
        import torch

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature_B=column([p.temperature for p in params], torch.float32),
            top_k_B=column([p.top_k for p in params], torch.int64),
            top_p_B=column([p.top_p for p in params], torch.float32),
            min_p_B=column([p.min_p for p in params], torch.float32),
            seed_B=column(seeds, torch.int64),
            any_sampled=any(p.is_sampled for p in params),
            any_filtered=any(p.is_filtered for p in params),
        )


@dataclass(frozen=True)
class RowPenalties:
    """Biases and penalties on the target's logits, one row per request."""

    presence_B: Tensor
    frequency_B: Tensor
    count_BV: Tensor
    """Occurrences of each token in the generated text."""
    bias_BV: Tensor
