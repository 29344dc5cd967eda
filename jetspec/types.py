"""The types that layers share. Host-side ones hold no tensors.

Shape suffixes, unless a module says otherwise: B requests, R rows of the page table, N nodes per tree (padded), D draft
depth, K width, C shortlist, T tokens flattened, H query heads, G key/value heads, E head size, M model size, X width of
the concatenated taps, V vocabulary, L layers, P pages per request, S page size, W words of an ancestor bitmask.
A digit behind a letter that it can add to does so: BD1 is (B, D + 1); else it is a size: R3N is (R, 3, N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # values are checked before torch is loaded
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length"]
GrammarKind = Literal["json_object", "json_schema", "calls", "regex", "ebnf"]

MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True)
class Grammar:
    """What a text must look like. `source` is the schema, expression or grammar; any JSON object needs none.

    `calls` is any text, but what stands between two tags in it follows a schema; its source is a JSON object of `begin`
    and `end`, the tags, and the `schema`; with `once` the text ends with the first.
    """

    kind: GrammarKind
    source: str = ""
    compiled: Any = field(default=None, compare=False, repr=False)
    """What `Grammars.compile` made of it, if somebody had it made beforehand."""


@dataclass(frozen=True)
class SamplingParams:
    """What a user may ask of one completion. Temperature 0 is greedy."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this total probability."""
    top_k: int = 0
    """Keep only the k most probable tokens. 0: off."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the best one."""
    max_tokens: int = 256
    """Most tokens of the answer."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    ignore_eos: bool = False
    seed: int | None = None
    """The same seed gives the same text, whatever the tree. None: a fresh one per request."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token once for each time the answer holds it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""
    logprobs: int | None = None
    """Report log-probabilities: of every token written and of so many most probable ones in its place, as the target
    gives them, before penalties, temperature and filters."""
    grammar: Grammar | None = None
    """Write only what this allows."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature is {self.temperature}; it must be between 0 and 100")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 and 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if any(not s for s in self.stop):
            raise ValueError("a stop string is empty")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between -2 and 2")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias names {len(self.logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are allowed")
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise ValueError("a value of logit_bias is not between -100 and 100")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; it must be between 0 and {MAX_LOGPROBS}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("a grammar says where the text ends, so it does not go together with ignore_eos")

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0

    @property
    def is_filtered(self) -> bool:
        return self.is_sampled and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def is_penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True)
class TreeLimits:
    """A smaller tree than the engine's, for one request. A budget of 1 is plain decoding, a width of 1 a chain."""

    budget: int
    """Most nodes in the tree, the anchor included."""
    width: int
    """Most children of one node."""

    def __post_init__(self) -> None:
        for name, value in (("budget", self.budget), ("width", self.width)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


Drafting = Literal["whole", "limited", "none"]
"""What a batch wants of the drafter: its trees, trees of which some are cut to a request's limits, or nothing."""


@dataclass(frozen=True)
class RoundFeatures:
    """What somebody in a batch asks for. A round does only the work that is asked for."""

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
    """What one request may write, given what it has written. Stateful: it stands behind the committed text."""

    def allow(self, mask_W: Tensor) -> None:
        """Write down which tokens may come next: bit t % 32 of word t // 32 (int32, on the host) is token t."""

    def advance(self, token: int) -> bool:
        """Go on by one token. False, and nothing changes, if it may not come next."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens that were gone on by."""


@dataclass
class RoundStats:
    """What one request cost. `completion_tokens == rounds + sum(accepted_lengths)` always holds:
    the last round counts only what was kept of it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Draft tokens kept, per round."""
    prefill_s: float = 0.0
    """While others write, on a GPU: only until it was told what to read, since nobody waits for it then."""
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
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "accepted_lengths": list(self.accepted_lengths),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True)
class TokenLogprob:
    """How probable the target found a token that was written, and what it found most probable there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """Tokens and their log-probabilities, best first; the token itself may be among them."""


@dataclass(frozen=True)
class Completion:
    """Finished output. `token_ids` ends with the end token when the model wrote one; `text` never shows it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RoundStats
    logprobs: list[TokenLogprob] | None = None
    """One per token, if the request asked for them."""


@dataclass(frozen=True)
class RoundTrace:
    """One round as it happened, on the host, for drawing. Node 0 is the anchor."""

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
        """Log-probability of each node after its parent, under the draft; 0 for the anchor."""
        return [score - self.scores[parent] for score, parent in zip(self.scores, self.parents, strict=True)]


@dataclass(frozen=True)
class Update:
    """What became visible of a request in one round."""

    request_id: int
    token_ids: list[int]
    text: str
    """New text. Empty while a character or a possible stop string is incomplete."""
    completion: Completion | None = None
    """Set on the last update."""
    trace: RoundTrace | None = None
    """Set when the request asked for traces."""
    logprobs: list[TokenLogprob] | None = None
    """Of `token_ids`, if the request asked for them."""
    drafted: int = 0
    """Draft tokens that the round checked."""
    accepted: int = 0
    """Those that the target agreed with. At the end of a text some may lie behind it, and are not in `token_ids`."""


class RequestState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence being decoded.

    The last token is the anchor: known, not yet cached, root of the next tree. A request is ready to decode
    once the cache holds every token but the anchor, so a prompt of P tokens needs P - 1 of them prefilled.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    """`sampling.seed`, or the one drawn in its place."""
    longest: int
    """Tokens at which it ends, prompt included."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end it."""
    state: RequestState = RequestState.WAITING
    row: int = -1
    """Row of the page table while admitted."""
    num_cached: int = 0
    """Tokens in the cache, of target and head alike."""
    capacity: int = 0
    """Tokens cached up to which its pages suffice for the next round."""
    row_epoch: int = 0
    """Times it gained or lost its row: what a round found before the last of them no longer counts."""
    limits: TreeLimits | None = None
    """None: the engine's own tree."""
    want_trace: bool = False
    quiet: bool = False
    """Only the completion is wanted: no updates before it, and no text."""
    cache_salt: str = ""
    """Pages are shared only between requests of the same salt."""
    prefix_leader: Request | None = None
    """A request with the same prompt, whose pages are worth waiting for."""
    constraint: Constraint | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of what it has written, if it asked for them."""
    stats: RoundStats = field(default_factory=RoundStats)
    finish_reason: FinishReason | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.num_cached == len(self.tokens) - 1


@dataclass(frozen=True)
class EdgeFactors:
    """A low-rank term by which a child depends on its actual parent: edge(y, c) = <E1[y] * gate, E2[c]>, rank R."""

    gate_BDR: Tensor
    """g0 + G h_d, divided by the temperature of the draft."""
    predecessor_VR: Tensor
    """E1: a vector for the token we come from."""
    successor_VR: Tensor
    """E2: a vector for the token we go to."""

    def score(self, depth: int, parent_BW: Tensor, token_BC: Tensor) -> Tensor:
        """edge(y, c) for every parent y and shortlisted token c, (B, W, C) float32."""
        gated_BWR = self.predecessor_VR[parent_BW].float() * self.gate_BDR[:, depth - 1, None].float()
        return gated_BWR @ self.successor_VR[token_BC].float().mT

    def term(self, row: int, parent_DP: Tensor) -> Tensor:
        """edge(y, c) for some parents of every depth of a request and all tokens c, (D, P, V) float32."""
        gated_DPR = self.predecessor_VR[parent_DP].float() * self.gate_BDR[row, :, None].float()
        return gated_DPR @ self.successor_VR.float().mT


@dataclass(frozen=True)
class KVPages:
    """One layer's K and V storage, (pages, S, G, E) each. A pool is a tuple of these."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class BatchLayout:
    """Where the requests of a forward live: request b owns tokens query_start_B1[b] to query_start_B1[b + 1]."""

    page_BP: Tensor
    cached_len_B: Tensor
    query_start_B1: Tensor
    page_size: int
    max_queries: int
    """Most tokens of one request, known without looking at the tensors."""
    first_seen: int = 0
    """Cached positions before this one are seen by nobody."""
    earlier: int = 0
    """Tokens that former forwards left in flight, equally many in every request. They lie between the cached ones and
    those of this forward, and the ancestor bits begin with them."""


@dataclass(frozen=True)
class TreeBatch:
    """Tokens placed for one forward: a tree says which tokens, this says where they live.

    `slot_T` is the place in storage (page * S + offset), `position_T` the place in the sequence. Siblings share
    a position, never a slot. `ancestor_BNW` None means a chain: each token sees those before it, all of them this
    forward's.
    """

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    layout: BatchLayout
    ancestor_BNW: Tensor | None
    is_tree_B: Tensor | None = None
    """Requests that the ancestor bits are about; the others are chains of any length. None: all of them."""


@dataclass(frozen=True)
class RowSampling:
    """SamplingParams of a batch as tensors, one row per request. The two flags spare work that no row needs."""

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
    """What to add to the target's logits, one row per request: a bias, less what the text so far costs a token."""

    presence_B: Tensor
    frequency_B: Tensor
    count_BV: Tensor
    """How often each token was written."""
    bias_BV: Tensor
