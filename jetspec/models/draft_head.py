"""The draft head: one pass over [anchor, MASK, .., MASK] predicts a distribution for each of the next positions.

Embedding and output matrix are the target's. The context enters as K and V computed from hidden states of the target's
tapped layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor, nn

from jetspec import ops
from jetspec.config import TreeConfig
from jetspec.models.block_conv import BlockConv, ConvConfig, ConvLayer
from jetspec.models.choices import ChoiceFits
from jetspec.models.decoder import DecoderConfig, DecoderLayer, DecoderStack, Linear, RMSNorm, Rope
from jetspec.models.masked_attention import Visible, attend_masked, narrow
from jetspec.models.path_terms import BlockStates, PathConfig, make_term
from jetspec.ops import HeadNorm
from jetspec.tree import Candidates, DraftTree, build_tree, least_kept, pack_bits
from jetspec.types import BatchLayout, ChoiceModel, EdgeFactors, KVPages, TreeBatch

LastTap = Literal["raw", "normed"]
"""Output of the target's last layer: of the layer itself, or of the norm after it."""
Confidence = Literal["state", "state_and_parent"]
"""Inputs of a confidence: the state of a slot, and the E1 vector of the parent token."""


@dataclass(frozen=True)
class EdgeConfig:
    """The edge term adds E2 (E1[parent] * (gate_bias + G h)) to the logits of a child."""

    rank: int = 128
    gate: bool = True
    gate_bias: float = 1.0
    candidates: int | None = None
    """Most probable tokens of a depth among which the term was trained to choose. None: all."""


@dataclass(frozen=True)
class HeadConfig:
    """Architecture of a head."""

    kind: ClassVar = "block"
    """Kind of the head in a training recipe."""
    layers: DecoderConfig
    """The head's own layers; `vocab_size` is the target's."""
    tap_layers: tuple[int, ...]
    """Target layers whose outputs it reads, counted from 0."""
    mask_token: int
    block_size: int = 16
    causal: bool = True
    """A slot of the block attends only to earlier slots. False: to all of them (DFlash)."""
    causal_windows: bool = False
    """Layers with a sliding window are causal even if the others are not (DFlash heads with windows)."""
    shifted: bool = False
    """Slot k predicts position k + 1 instead of its own."""
    target_hidden_size: int | None = None
    """The target's hidden size if it differs from the head's: an adapter maps each tap."""
    num_target_layers: int | None = None
    last_tap: LastTap | None = None
    """Form of a tap of the target's last layer. None: there is no such tap."""
    edge: EdgeConfig | None = None
    path: PathConfig | None = None
    """A term of the whole path in place of the edge term."""
    conv: ConvConfig | None = None
    """Convolutions over the block around attention and MLP."""
    confidence: Confidence | None = None
    """A predicted acceptance of each slot, which scales the probabilities of the children there."""
    fused_taps: bool = False
    """Each layer adds its own mixture of the taps to its context rows."""
    embedding_scale: float = 1.0
    """Factor on the embeddings of a block."""
    output_scale: float = 1.0
    """Factor on the logits, before `softcap` and terms."""
    softcap: float | None = None
    """Largest logit: c tanh(logit / c)."""
    draft_vocab_size: int | None = None
    """Number of tokens that it can draft, by an output matrix of its own. None: all, by the target's matrix."""

    @property
    def depth(self) -> int:
        """Positions drafted in one pass."""
        return self.block_size if self.shifted else self.block_size - 1

    def draft_depth(self, requested: int | None) -> int:
        """Returns the depth of trees with a requested depth: at most that of a block."""
        return min(requested or self.depth, self.depth)

    def num_in_flight(self, tree: TreeConfig) -> int:
        """Largest number of tokens of a request that a round passes through the head."""
        return self.block_size

    @property
    def causal_layers(self) -> tuple[bool, ...]:
        """Per layer, true if a slot attends only to earlier slots."""
        windowed = (self.layers.window(i) is not None for i in range(self.layers.num_layers))
        return tuple(self.causal or (self.causal_windows and w) for w in windowed)

    @property
    def tap_size(self) -> int:
        return (self.target_hidden_size or self.layers.hidden_size) * len(self.tap_layers)


def default_tap_layers(num_taps: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns layers spread evenly from the second to the fourth from the end."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


class EdgeTerm(nn.Module):
    """Logit term of a parent and child token: two embedding tables and a gate computed from the slot's state."""

    def __init__(self, config: EdgeConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gate_bias = config.gate_bias
        self.predecessor = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.gate = Linear(hidden_size, config.rank) if config.gate else None

    def gates(self, hidden: Tensor) -> Tensor:
        """Returns gate_bias + G h, (..., rank)."""
        if self.gate is None:
            return hidden.new_full((*hidden.shape[:-1], self.predecessor.shape[1]), self.gate_bias)
        return self.gate_bias + self.gate(hidden)

    def forward(self, hidden: Tensor, parent: Tensor) -> Tensor:
        """Returns the term of every child, (..., V), for states (..., M) and parent tokens (...)."""
        return ops.linear(self.predecessor[parent] * self.gates(hidden), self.successor)


class ContextWeights(NamedTuple):
    """K and V projections of context rows, of all layers together."""

    weight: Tensor
    bias: Tensor | None
    norm: HeadNorm | None


class Embedder(Protocol):
    """Parts of the target that a head uses."""

    def embed(self, token: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def output_rows(self, token: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadState:
    """Target, KV cache storage and concatenated weights that a head drafts with."""

    target: Embedder
    layers: Sequence[KVPages]
    feature_SM: Tensor | None
    """One feature per slot, for heads with a `feature_size`."""
    weights: ContextWeights | None


class EngineHead(DecoderStack, ABC):
    """Interface between a draft head and the engine. A new kind of head is one class that implements it.

    Trees passed to a head have their `depth` set. The engine reads its `head_config.tap_layers`, `.draft_depth` and
    `.num_in_flight`.
    """

    head_config: Any
    feature_size = 0
    """Size of the vector that it keeps for each cached position. 0: none."""
    uses_score = True
    """The settings `expand` and `score` apply to its trees."""
    choices = ChoiceFits()
    """Weights with which its logits predict sampled choices."""

    def init_weights(self, seed: int = 0) -> Self:
        """Initialises matrices and biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return self

    def context_weights(self) -> ContextWeights | None:
        """Weights of `observe` that are concatenated once."""
        return None

    @abstractmethod
    def nodes(self, tree: TreeConfig) -> tuple[Tensor, Tensor | None]:
        """Depths (1, N) and ancestor bits (1, N, W) of the tokens in flight. Without bits they are a chain."""

    @abstractmethod
    def draft(
        self, nodes: TreeBatch, anchor_B: Tensor, tree: TreeConfig, state: HeadState, choice: ChoiceModel | None
    ) -> Any:
        """Drafts below each anchor. `nodes` are positions and slots of the tokens in flight, without their tokens."""

    @abstractmethod
    def build(self, anchor_B: Tensor, drafted: Any, tree: TreeConfig) -> DraftTree:
        """Builds a tree of what `draft` returned."""

    @abstractmethod
    def observe(self, tap_TX: Tensor, batch: TreeBatch, state: HeadState) -> None:
        """Writes committed tokens, with their tapped states, to the head's cache."""


class DraftHead(EngineHead):
    """Decoder layers over a context from the target."""

    head_config: HeadConfig
    token_of: Tensor | None
    """Target token of each token of a reduced vocabulary, ascending."""

    def __init__(self, config: HeadConfig) -> None:
        layer = partial(ConvLayer, conv=config.conv, block_size=config.block_size) if config.conv else DecoderLayer
        super().__init__(config.layers, layer)
        self.head_config = config
        size = config.layers.hidden_size
        self.fc = Linear(len(config.tap_layers) * size, size)
        self.hidden_norm = RMSNorm(size, config.layers.norm_eps)
        self.adapter = Linear(config.target_hidden_size, size) if config.target_hidden_size else None
        vocab_size, reduced = config.layers.vocab_size, config.draft_vocab_size
        self.edge = EdgeTerm(config.edge, vocab_size, size) if config.edge else None
        self.path = make_term(config.path, config.layers, config.block_size) if config.path else None
        term = config.edge or config.path
        inputs = size + (term.rank if term and config.confidence == "state_and_parent" else 0)
        self.confidence = Linear(inputs, 1, bias=True) if config.confidence else None
        shape = (config.layers.num_layers, len(config.tap_layers))
        self.tap_weights = nn.Parameter(torch.zeros(shape)) if config.fused_taps else None
        self.feature_size = 0 if self.path is None else self.path.feature_size
        self.lm_head = Linear(size, reduced) if reduced else None
        self.register_buffer("token_of", torch.arange(reduced) if reduced else None)

    def init_weights(self, seed: int = 0) -> Self:
        """Initialises the weights. The edge term starts at zero, convolutions at the identity: training starts from the
        plain head."""
        super().init_weights(seed)
        if self.edge is not None:
            nn.init.zeros_(self.edge.successor)
            if self.edge.gate is not None and self.edge.gate_bias:  # without a bias two zeros would have no gradient
                nn.init.zeros_(self.edge.gate.weight)
        for module in self.modules():
            if isinstance(module, BlockConv):
                module.reset()
        return self

    def fuse(self, tap: Tensor) -> Tensor:
        """Fuses concatenated tapped states (..., X) to context rows (..., M)."""
        if self.adapter is not None:
            tap = self.adapter(tap.unflatten(-1, (len(self.head_config.tap_layers), -1))).flatten(-2)
        return self.hidden_norm(self.fc(tap))

    def nodes(self, tree: TreeConfig) -> tuple[Tensor, Tensor | None]:
        return torch.arange(self.head_config.block_size, device=self.norm.weight.device)[None], None

    def draft(
        self, nodes: TreeBatch, anchor_B: Tensor, tree: TreeConfig, state: HeadState, choice: ChoiceModel | None
    ) -> Candidates:
        block = replace(nodes, token_T=self.block_tokens(anchor_B).flatten())
        hidden_BSM = self.run_block(block, state.target, state.layers)
        hidden_BDM = self.predicting(hidden_BSM)[:, : tree.depth]
        found = self.candidates(hidden_BDM, anchor_B, state.target, tree, choice)
        if self.path is not None:
            feature_BF = None
            if state.feature_SM is not None:
                is_first_B1 = nodes.layout.cached_len_B[:, None] == 0
                before_BF = state.feature_SM[slot_before(nodes.layout)]
                feature_BF = torch.where(is_first_B1, self.path.feature(anchor_B), before_BF)
            states = BlockStates(hidden_BSM, anchor_B, 0 if self.head_config.shifted else 1, state.target, feature_BF)
            found = replace(found, path=self.path.bind(states, choice))
        return found if self.confidence is None else replace(found, survival=self.survival(hidden_BDM))

    def build(self, anchor_B: Tensor, drafted: Candidates, tree: TreeConfig) -> DraftTree:
        assert tree.depth is not None
        return build_tree(anchor_B, drafted, tree, tree.depth)

    def observe(self, tap_TX: Tensor, batch: TreeBatch, state: HeadState) -> None:
        self.write_context(tap_TX, batch.position_T, batch.slot_T, state.layers, state.weights)
        if self.path is not None and state.feature_SM is not None:
            state.feature_SM.index_copy_(0, batch.slot_T, self.path.feature(batch.token_T))

    def write_context(
        self,
        tap_TX: Tensor,
        position_T: Tensor,
        slot_T: Tensor,
        cache: Sequence[KVPages],
        weights: ContextWeights | None = None,
    ) -> None:
        """Appends newly committed tokens to the context."""
        weights = weights or self.context_weights()
        ops.rotate_store_layers(self.context(tap_TX, weights), self.rope(position_T), weights.norm, cache, slot_T)

    def context(self, tap: Tensor, weights: ContextWeights) -> Tensor:
        """Returns K and V heads of context rows for every layer, (.., L, 2G, E), before rope.

        All layers read the same rows and never change them.
        """
        if self.tap_weights is not None:
            return self._layer_contexts(tap, weights)
        heads = ops.linear(self.fuse(tap), weights.weight, weights.bias)
        return heads.unflatten(-1, (self.config.num_layers, -1, self.config.head_dim))

    def _layer_contexts(self, tap: Tensor, weights: ContextWeights) -> Tensor:
        """Returns `context` where each layer adds its own mixture of the taps to the rows that it reads."""
        assert self.tap_weights is not None and weights.bias is None
        L, taps = self.tap_weights.shape
        mixture_LM = self.tap_weights.float().softmax(-1).to(tap.dtype) @ tap.unflatten(-1, (taps, -1))
        rows_LM = self.hidden_norm(self.fc(tap).unsqueeze(-2) + mixture_LM)
        heads = torch.einsum("...lm,lom->...lo", rows_LM, weights.weight.unflatten(0, (L, -1)))
        return heads.unflatten(-1, (-1, self.config.head_dim))

    def context_weights(self) -> ContextWeights:
        """Concatenates the projections of all layers. Inference calls it once."""
        attentions = [cast(DecoderLayer, layer).attention for layer in self.layers]
        weights, biases = zip(*(attention.context_weights for attention in attentions), strict=True)
        norms = [norm for attention in attentions if (norm := attention.head_norm) is not None]
        return ContextWeights(
            torch.cat(weights),
            None if biases[0] is None else torch.cat(biases),
            HeadNorm.joined(norms) if norms else None,
        )

    def propose(self, block: TreeBatch, target: Embedder, cache: Sequence[KVPages]) -> Tensor:
        """Returns states for depths 1..D, (B, D, M), of blocks [anchor, MASK, ..] after the context."""
        return self.predicting(self.run_block(block, target, cache))

    def run_block(self, block: TreeBatch, target: Embedder, cache: Sequence[KVPages]) -> Tensor:
        """Returns states of all slots, (B, S, M), of blocks [anchor, MASK, ..] after the context.

        The head's config decides the mask inside a block; the batch's mask is ignored. K and V of the block are written
        past the end of the context, where the next rows overwrite them.
        """
        rope, x = self.rope(block.position_T), self.embed(block.token_T, target)
        causal_layers = self.head_config.causal_layers
        rows, size = len(block.layout.cached_len_B), self.head_config.block_size
        attends = {}
        for causal in set(causal_layers):
            # Without causality all slots of a block attend to each other.
            bits = None if causal else pack_bits(block.token_T.new_ones(rows, size, size, dtype=torch.bool))
            attends[causal] = self.paged(replace(block, ancestor_BNW=bits), cache)
        chosen = [attends[causal][i] for i, causal in enumerate(causal_layers)]
        states = self.run(x, rope, chosen).hidden_TM
        return states.unflatten(0, (-1, size))

    def embed(self, token: Tensor, target: Embedder) -> Tensor:
        """Returns the embeddings of a block's tokens."""
        return self._scaled(target.embed(token))

    def _scaled(self, embedded: Tensor) -> Tensor:
        return embedded if self.head_config.embedding_scale == 1 else embedded * self.head_config.embedding_scale

    def logits(self, hidden: Tensor, target: Embedder) -> Tensor:
        """Returns the logits of all target tokens, without terms. Tokens outside a reduced vocabulary have -inf."""
        c = self.head_config
        logits = target.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        if c.output_scale != 1:
            logits = logits * c.output_scale
        if c.softcap is not None:
            logits = c.softcap * torch.tanh(logits / c.softcap)
        if self.token_of is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], c.layers.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.token_of, logits)

    def survival(self, hidden_BDM: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Returns the predicted log-probability that a child is accepted, by its depth and parent token."""
        assert self.confidence is not None and self.confidence.bias is not None
        M, term = hidden_BDM.shape[-1], self.edge or self.path
        weight_X, bias = self.confidence.weight[0].float(), self.confidence.bias.float()
        state_BD1 = (hidden_BDM.float() @ weight_X[:M] + bias)[..., None]

        def log_confidence(depth: int, parent_BW: Tensor) -> Tensor:
            logit_BW = state_BD1[:, depth - 1].expand(parent_BW.shape)
            if self.head_config.confidence == "state_and_parent" and term is not None:
                logit_BW = logit_BW + nn.functional.embedding(parent_BW, term.predecessor).float() @ weight_X[M:]
            return nn.functional.logsigmoid(logit_BW)

        return log_confidence

    def block_tokens(self, anchor_B: Tensor) -> Tensor:
        """Returns [anchor, MASK, .., MASK] per request, (B, block size)."""
        token = anchor_B.new_full((len(anchor_B), self.head_config.block_size), self.head_config.mask_token)
        token[:, 0] = anchor_B
        return token

    def predicting(self, slots: Tensor) -> Tensor:
        """Selects the slots that predict depths 1..D from a block (.., block size, M)."""
        return slots if self.head_config.shifted else slots[..., 1:, :]

    def candidates(
        self,
        hidden_BDM: Tensor,
        root_B: Tensor,
        target: Embedder,
        tree: TreeConfig,
        choice: ChoiceModel | None = None,
    ) -> Candidates:
        """Returns the candidates of a tree at depths 1..D below the roots. Without a choice model their probabilities
        are those of the head."""
        hidden_TM, (B, D) = hidden_BDM.flatten(0, 1), hidden_BDM.shape[:2]
        logits_BDV = self.logits(hidden_TM, target).unflatten(0, (B, D))
        V, entropy_BD, choice = logits_BDV.shape[-1], None, with_filters(choice, logits_BDV)
        if tree.score != "accum_logp":
            # Validation would synchronise with the device, which a CUDA graph cannot.
            scaled = torch.distributions.Categorical(
                logits=ops.log_odds(logits_BDV, choice).float(), validate_args=False
            )
            entropy_BD = scaled.entropy()
        c, count = self.head_config, min(tree.width, V)
        if c.edge or c.path:
            count = min(tree.shortlist or V, V, (c.edge and c.edge.candidates) or V)
        if self.edge is None:
            return Candidates(*ops.topk_logprob(logits_BDV, count, choice), entropy_BD)
        gate_BDR = ops.apply_temperature(self.edge.gates(hidden_TM).unflatten(0, (B, D)), choice).float()
        edge = EdgeFactors(gate_BDR, self.edge.predecessor, self.edge.successor)
        if tree.shortlist_parents and count < V and not (c.edge and c.edge.candidates):
            found = ops.shortlist(logits_BDV, root_B, edge, count, min(tree.shortlist_parents, V), choice)
        else:
            found = ops.topk_logprob(logits_BDV, count, choice)
        return Candidates(*found, entropy_BD, edge)

    def forward_blocks(
        self, block: Tensor, block_position: Tensor, tap: Tensor, tap_position: Tensor, visible: Visible
    ) -> Tensor:
        """Runs blocks of embeddings over sequences of context rows without a cache, for training.

        `block` is (.., Q, M) with the slots of all blocks, `tap` (.., T, X). `visible` (.., Q, T + Q) is the mask of
        each slot over context rows, then slots, before windows. Returns every slot's state.
        """
        key_position = torch.cat((tap_position, block_position), -1)
        masks = {
            window: narrow(visible, block_position, key_position, window, self.head_config.causal_windows)
            for window in self.config.distinct_windows
        }
        G, tap_rope, block_rope = self.config.num_kv_heads, self.rope(tap_position), self.rope(block_position)
        attends, weights = [], self.context_weights()
        for i, kv in enumerate(self.context(tap, weights).unbind(-3)):
            norm = None if weights.norm is None else weights.norm.layer(i)
            _, k, v = ops.rotate_qkv(kv, G, tap_rope, norm)
            attends.append(partial(self._attend_dense, k, v, masks[self.config.window(i)]))
        return self.run(self._scaled(block), block_rope, attends).hidden_TM

    def _attend_dense(
        self, k_context: Tensor, v_context: Tensor, visible: Visible, qkv: Tensor, rope: Rope, norm: HeadNorm | None
    ) -> Tensor:
        """Returns attention of slots over context rows, then slots."""
        q, k, v = ops.rotate_qkv(qkv, self.config.num_kv_heads, rope, norm)
        return attend_masked(q, torch.cat((k_context, k), -3), torch.cat((v_context, v), -3), visible)


def with_filters(choice: ChoiceModel | None, logits_BDV: Tensor) -> ChoiceModel | None:
    """Adds the values that the filters of the requests keep of the head's own distributions."""
    if choice is None or choice.filters is None:
        return choice
    scale_BD = choice.filters.temperature_B.clamp(min=1e-6)[:, None] / choice.temperature_BD
    return replace(choice, least_BD=least_kept(logits_BDV, choice.filters) * scale_BD)


def slot_before(layout: BatchLayout) -> Tensor:
    """Slot of each request's last cached position; of its first position where nothing is cached."""
    last_B1 = (layout.cached_len_B - 1).clamp(min=0)[:, None]
    page_B1 = layout.page_BP.gather(1, last_B1 // layout.page_size)
    return (page_B1 * layout.page_size + last_B1 % layout.page_size)[:, 0]
