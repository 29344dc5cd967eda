"""The EAGLE-3 head, a baseline: one decoder layer that drafts token by token on its own hidden states.

The *feature* f_p of a position is three tapped layers of the target, fused to one vector by `fc`. The *row* of a token
is the input of the layer's attention:

    row p = [ input_norm(embedding of x_p) ; hidden_norm(f_{p-1}) ]

So the feature at p - 1 and the token at p predict the token at p + 1. Position 0 has no row, and its place in the cache
is masked. Row p depends on the tokens up to p only, so prefixes can be shared. (Other engines store the same row at
position p - 1, which is equal: attention depends on distances.)

A tree grows from the anchor x_n, whose row contains the feature f_{n-1}. Deeper nodes have no feature yet: their rows
contain the layer's output at the parent, before its norm. After the norm, `lm_head` computes logits over a reduced
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from jetspec import ops
from jetspec.config import EAGLE3_DEPTH, EAGLE3_TAPS, TreeConfig
from jetspec.models.decoder import (
    Attend,
    Attention,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    Linear,
    RMSNorm,
    Rope,
)
from jetspec.models.draft_head import Embedder, EngineHead, HeadState, LastTap, slot_before, with_filters
from jetspec.models.masked_attention import Visible, attend_own
from jetspec.ops import HeadNorm, Residual
from jetspec.tree import DraftTree, GrowingTree, pack_bits
from jetspec.types import ChoiceModel, TreeBatch


@dataclass(frozen=True)
class Eagle3Config:
    """Architecture of a head."""

    kind: ClassVar = "eagle3"
    """Kind of the head in a training recipe."""
    layers: DecoderConfig
    """Its one layer; `vocab_size` is the target's."""
    tap_layers: tuple[int, ...]
    """Target layers whose outputs it reads, counted from 0."""
    draft_vocab_size: int
    """Number of tokens that it can draft."""
    depth: int = EAGLE3_DEPTH
    """Default depth of a tree."""
    target_hidden_size: int | None = None
    """The target's hidden size if it differs from the head's."""
    num_target_layers: int | None = None
    norm_before_residual: bool = False
    """The residual starts from the normed input of the layer."""
    norm_taps: bool = False
    """The concatenated taps are normed before they are fused."""
    norm_each_tap: bool = False
    """Each tap is normed before it is fused (EAGLE-3.1)."""
    norm_output: bool = False
    """The next step reads the normed hidden state (EAGLE-3.1)."""
    last_tap: LastTap | None = None
    """Form of a tap of the target's last layer. None: there is no such tap."""
    own_embedding: bool = False
    """It has an embedding of its own; otherwise it uses the target's."""

    @property
    def tap_size(self) -> int:
        return (self.target_hidden_size or self.layers.hidden_size) * self.num_taps

    @property
    def num_taps(self) -> int:
        return len(self.tap_layers) or EAGLE3_TAPS

    def draft_depth(self, requested: int | None) -> int:
        """Returns the depth of trees with a requested depth: any, since drafting is autoregressive."""
        return requested or self.depth

    def num_in_flight(self, tree: TreeConfig) -> int:
        """Largest number of nodes in the layer: the anchor and the frontiers of all levels but the last."""
        levels = min(self.draft_depth(tree.depth), tree.budget - 1)
        return 1 + max(levels - 1, 0) * self.frontier(tree)

    def frontier(self, tree: TreeConfig) -> int:
        """Number of nodes of a level that are expanded."""
        return min(tree.width, self.draft_vocab_size)


def eagle3_tap_layers(num_target_layers: int) -> tuple[int, ...]:
    """Returns the authors' tap layers: the inputs of layers 2, N / 2 and N - 3, as outputs of the layers before."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


class Eagle3Layer(DecoderLayer):
    """A decoder layer over embedding and hidden state: attention reads both, the residual is the hidden state."""

    def __init__(self, config: DecoderConfig, layer: int, norm_before_residual: bool, norm_output: bool) -> None:
        super().__init__(config, layer)
        self.attention = Attention(config, inputs=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output

    def row(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_norm(embedded), self.hidden_norm(hidden)), -1)

    def forward(  # type: ignore[override]  # two inputs
        self, x: Tensor, h: Tensor, rope: Rope, attend: Attend, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Returns the next hidden state and its norm, from an embedding x and a hidden state h."""
        attended = self.attention.attend(self.attention.qkv(self.row(x, h)), rope, attend)
        hidden = (self.hidden_norm(h) if self.norm_before_residual else h) + self.attention.out(attended)
        hidden = self.mlp(Residual(hidden), self.post_norm, next_norm).x
        normed = next_norm(hidden)
        return (normed if self.norm_output else hidden), normed


class EagleHead(EngineHead):
    """Layers over rows, with the feature projection, vocabulary and output matrix. The first layer is EAGLE-3's."""

    head_config: Eagle3Config
    uses_score = False
    token_of: Tensor
    """Target token of each token of the head, ascending."""
    embedding: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        flags = {"norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output}
        super().__init__(config.layers, lambda c, i: DecoderLayer(c, i) if i else Eagle3Layer(c, i, **flags))
        self.head_config = config
        self.feature_size = size = config.layers.hidden_size
        self.fc = Linear(config.tap_size, size)
        self.input_norm = RMSNorm(config.tap_size, config.layers.norm_eps) if config.norm_taps else None
        shape = (config.num_taps, config.tap_size // config.num_taps)
        self.fc_norm = nn.Parameter(torch.ones(shape)) if config.norm_each_tap else None
        self.lm_head = Linear(size, config.draft_vocab_size)
        self.register_buffer("token_of", torch.arange(config.draft_vocab_size))
        self.register_buffer("embedding", torch.empty(config.layers.vocab_size, size) if config.own_embedding else None)

    @property
    def layer(self) -> Eagle3Layer:
        return cast(Eagle3Layer, self.layers[0])

    @torch.no_grad()
    def adopt(self, token_of: Tensor, target: Decoder) -> None:
        """Sets the vocabulary, and copies its rows of the target's output matrix."""
        self.token_of.copy_(token_of)
        self.lm_head.weight.copy_(target.lm_head[token_of])

    def fuse(self, tap: Tensor) -> Tensor:
        """Fuses concatenated tapped states (..., X) to features (..., M)."""
        if self.input_norm is not None:
            tap = self.input_norm(tap)
        if self.fc_norm is not None:
            taps = zip(tap.chunk(len(self.fc_norm), -1), self.fc_norm, strict=True)
            tap = torch.cat([ops.rms_norm(x.contiguous(), norm, self.config.norm_eps) for x, norm in taps], -1)
        return self.fc(tap)

    def embed(self, token: Tensor, target: Embedder) -> Tensor:
        return target.embed(token) if self.embedding is None else nn.functional.embedding(token, self.embedding)

    def best_tokens(self, normed: Tensor, count: int, choice: ChoiceModel | None = None) -> tuple[Tensor, Tensor]:
        """Returns the best tokens after states (.., M), best first, and their log-probabilities."""
        c, logits, token_of = self.head_config, self.lm_head(normed), self.token_of
        count = min(count, c.draft_vocab_size)
        if choice is not None and choice.weight_BD is not None and c.draft_vocab_size < c.layers.vocab_size:
            full = logits.new_full((*logits.shape[:-1], c.layers.vocab_size), -torch.inf)  # noise is of target tokens
            return ops.topk_logprob(full.index_copy_(-1, token_of, logits), count, with_filters(choice, full))
        token, logprob = ops.topk_logprob(logits, count, with_filters(choice, logits))
        return token_of[token], logprob


class Eagle3Head(EagleHead):
    """A single layer, in a pass for each level of a tree."""

    def nodes(self, tree: TreeConfig) -> tuple[Tensor, Tensor | None]:
        """The anchor and the frontiers, level by level; the mask of each is its own bit."""
        width, device = self.head_config.frontier(tree), self.norm.weight.device
        node_N = torch.arange(self.head_config.num_in_flight(tree), device=device)
        own_NW = pack_bits(torch.eye(len(node_N), dtype=torch.bool, device=device))
        return ((node_N + width - 1) // width)[None], own_NW[None]

    def draft(
        self, nodes: TreeBatch, anchor_B: Tensor, tree: TreeConfig, state: HeadState, choice: ChoiceModel | None
    ) -> GrowingTree:
        """Grows a tree with a pass per level.

        `nodes` are the anchor and the frontiers, level by level; the mask of each is its own bit. A request without
        cached tokens has no feature, so its anchor gets no child.
        """
        assert state.feature_SM is not None and tree.depth is not None and nodes.ancestor_BNW is not None
        growing = GrowingTree(anchor_B, self.head_config.frontier(tree), tree.budget)
        B, layout = len(anchor_B), replace(nodes.layout, first_seen=1)
        position_BN, slot_BN = (x.view(B, -1) for x in (nodes.position_T, nodes.slot_T))
        hidden_BWM = state.feature_SM[slot_before(nodes.layout)][:, None]
        mask_BWw, first = nodes.ancestor_BNW[:, :1], 0
        for level in range(min(tree.depth, tree.budget - 1)):
            token_BW = growing.frontier_BW
            W = token_BW.shape[1]
            span = slice(first, first + W)
            if level:
                mask_BWw = mask_BWw | nodes.ancestor_BNW[:, span]
            start_B1 = torch.arange(0, B * W + 1, W, device=token_BW.device)
            batch = TreeBatch(
                token_BW.flatten(),
                position_BN[:, span].flatten(),
                slot_BN[:, span].flatten(),
                replace(layout, query_start_B1=start_B1, max_queries=W, earlier=first),
                mask_BWw,
            )
            (attend,), rope = self.paged(batch, state.layers), self.rope(batch.position_T)
            x_TM = self.embed(batch.token_T, state.target)
            hidden_TM, normed_TM = self.layer(x_TM, hidden_BWM.flatten(0, 1), rope, attend, self.norm)
            own = choice and choice.at(level + 1)
            token_BWK, logprob_BWK = self.best_tokens(normed_TM.unflatten(0, (B, W)), growing.width, own)
            if not level:
                logprob_BWK = logprob_BWK.masked_fill((layout.cached_len_B == 0)[:, None, None], -torch.inf)
            parent_BW1 = growing.extend(token_BWK, logprob_BWK)[..., None]
            hidden_BWM = hidden_TM.unflatten(0, (B, W)).take_along_dim(parent_BW1, 1)
            mask_BWw = mask_BWw.take_along_dim(parent_BW1, 1)
            first += W
        return growing

    def build(self, anchor_B: Tensor, drafted: GrowingTree, tree: TreeConfig) -> DraftTree:
        return drafted.tree(tree.budget)

    def observe(self, tap_TX: Tensor, batch: TreeBatch, state: HeadState) -> None:
        """Writes features, K and V of newly committed tokens. K and V of a single layer need no attention."""
        assert state.feature_SM is not None
        before_T, rope, attention = slots_before(batch), self.rope(batch.position_T), self.layer.attention
        state.feature_SM.index_copy_(0, batch.slot_T, self.fuse(tap_TX))
        row_TX = self.layer.row(self.embed(batch.token_T, state.target), state.feature_SM[before_T])
        kv, pages = attention.context(row_TX), state.layers[0]
        ops.rotate_store(kv, self.config.num_kv_heads, rope, attention.head_norm, pages, batch.slot_T)

    def forward_unrolled(
        self,
        embedded: Tensor,
        tap: Tensor,
        position: Tensor,
        anchor: Tensor,
        drafted: Tensor,
        visible: Visible,
    ) -> Tensor:
        """Runs chains along the text without a cache, for training, on the layer's own states as in drafting.

        The text is given as embeddings (R, T, M), taps (R, T, X) and positions (R, T); chains start at `anchor` (R, A),
        with embeddings `drafted` (R, A, D, M). `visible` (R, A, T) is the mask of a chain over the text before its
        anchor. Returns normed states (R, A, D, M): step s predicts the token s + 1 positions after the anchor.
        """
        # The first row of a text gets another text's feature; it is masked.
        before = self.fuse(tap).to(self.norm.weight.dtype).roll(1, -2)
        k, v = self._keys(embedded, before, self.rope(position))
        hidden, at = before.take_along_dim(anchor[..., None], -2), position.gather(-1, anchor)
        steps = torch.arange(drafted.shape[-2], device=at.device)
        # Keys of the chain so far, newest first, padded to a fixed shape.
        shape = (*anchor.shape, len(steps) - 1, *k.shape[-2:])
        k_own, v_own = (x.new_zeros(shape).requires_grad_(x.requires_grad) for x in (k, v))
        states = []
        for step, x in enumerate(drafted.unbind(-2)):
            rope = self.rope(at + step)
            attend = partial(self._attend_unrolled, k, v, visible, k_own, v_own, steps[:-1] < step)
            k_new, v_new = self._keys(x, hidden, rope)
            hidden, normed = self.layer(x, hidden, rope, attend, self.norm)
            k_own, v_own = _push(k_own, k_new), _push(v_own, v_new)
            states.append(normed)
        return torch.stack(states, -2)

    def _keys(self, embedded: Tensor, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns K and V of rows, with rope."""
        kv = self.layer.attention.context(self.layer.row(embedded, hidden))
        _, k, v = ops.rotate_qkv(kv, self.config.num_kv_heads, rope, self.layer.attention.head_norm)
        return k, v

    def _attend_unrolled(
        self,
        k: Tensor,
        v: Tensor,
        visible: Visible,
        k_own: Tensor,
        v_own: Tensor,
        filled: Tensor,
        qkv: Tensor,
        rope: Rope,
        norm: HeadNorm | None,
    ) -> Tensor:
        """Returns attention of one step of all chains over the text before the anchor, the chain so far, and itself."""
        q, k_self, v_self = ops.rotate_qkv(qkv, self.config.num_kv_heads, rope, norm)
        k_own, v_own = torch.cat((k_own, k_self.unsqueeze(-3)), -3), torch.cat((v_own, v_self.unsqueeze(-3)), -3)
        return attend_own(q, k, v, visible, k_own, v_own, nn.functional.pad(filled, (0, 1), value=True))


def slots_before(batch: TreeBatch) -> Tensor:
    """Slot of the position before each token of chains, (T). At position 0 it is the token's own slot.

    An empty chain may start behind the last token, so the index has one more entry than is returned.
    """
    before_T1 = torch.cat((batch.slot_T[-1:], batch.slot_T))
    before_T1.index_copy_(0, batch.layout.query_start_B1[:-1], slot_before(batch.layout))
    return before_T1[:-1]


def _push(own: Tensor, new: Tensor) -> Tensor:
    """Prepends an entry and drops the last one."""
    return torch.cat((new.unsqueeze(-3), own[..., :-1, :, :]), -3)
