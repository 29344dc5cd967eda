"""The draft head: one pass over [anchor, MASK, .., MASK] gives a distribution for each of the next positions.

It owns neither embedding nor output matrix: both are the target's. Context reaches it as K and V computed from
the target's tapped hidden states, which the target computed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from jetspec import ops
from jetspec.config import TreeConfig
from jetspec.models.decoder import (
    Attend,
    DecoderConfig,
    DecoderLayer,
    DecoderStack,
    Linear,
    RMSNorm,
    Rope,
)
from jetspec.models.masked_attention import Visible, attend_masked, narrow
from jetspec.ops import HeadNorm
from jetspec.tree import Candidates, pack_bits
from jetspec.types import EdgeFactors, KVPages, TreeBatch

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class EdgeConfig:
    """The edge term: logits of a child gain E2 (E1[parent] * (gate_bias + G h))."""

    rank: int = 128
    gate: bool = True
    gate_bias: float = 1.0


@dataclass(frozen=True)
class HeadConfig:
    """Everything about a head but its weights."""

    layers: DecoderConfig
    """Shape of the head's own layers; `vocab_size` is the target's."""
    tap_layers: tuple[int, ...]
    """Target layers it reads: outputs, counted from 0."""
    mask_token: int
    block_size: int = 16
    causal: bool = True
    """Whether a slot of the block sees only those before it. False: all of them (DFlash)."""
    causal_windows: bool = False
    """Whether layers with a sliding window are causal even if the others are not (DFlash heads with windows)."""
    shifted: bool = False
    """Slot k predicts position k + 1 instead of its own."""
    target_hidden_size: int | None = None
    """Set when the target's hidden size is not the head's: an adapter maps each tap."""
    num_target_layers: int | None = None
    edge: EdgeConfig | None = None

    @property
    def depth(self) -> int:
        """Positions drafted in one pass."""
        return self.block_size if self.shifted else self.block_size - 1

    def draft_depth(self, asked: int | None) -> int:
        """Depth of trees that ask for one, or not: no deeper than a block reaches."""
        return min(asked or self.depth, self.depth)

    def num_in_flight(self, tree: TreeConfig) -> int:
        """Most nodes that a round passes through the head."""
        return self.block_size

    @property
    def causal_layers(self) -> tuple[bool, ...]:
        """Per layer, whether a slot sees only those before it."""
        windowed = (self.layers.window(i) is not None for i in range(self.layers.num_layers))
        return tuple(self.causal or (self.causal_windows and w) for w in windowed)

    @property
    def tap_size(self) -> int:
        return (self.target_hidden_size or self.layers.hidden_size) * len(self.tap_layers)


def default_tap_layers(num_taps: int, num_target_layers: int) -> tuple[int, ...]:
    """Spread evenly from the second layer to the fourth from the end."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def init_weights(head: M, seed: int) -> M:
    """Fresh matrices and biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return head


class EdgeTerm(nn.Module):
    """How likely one token follows another here: two codebooks and a gate that reads the slot's state."""

    def __init__(self, config: EdgeConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gate_bias = config.gate_bias
        self.predecessor = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.gate = Linear(hidden_size, config.rank) if config.gate else None

    def gates(self, hidden: Tensor) -> Tensor:
        """gate_bias + G h, (..., rank)."""
        if self.gate is None:
            return hidden.new_full((*hidden.shape[:-1], self.predecessor.shape[1]), self.gate_bias)
        return self.gate_bias + self.gate(hidden)

    def forward(self, hidden: Tensor, parent: Tensor) -> Tensor:
        """The term for every child: (..., V) for states (..., M) and parent tokens (...)."""
        return ops.linear(self.predecessor[parent] * self.gates(hidden), self.successor)


class ContextWeights(NamedTuple):
    """What makes keys and values of context rows, of all layers together."""

    weight: Tensor
    bias: Tensor | None
    norm: HeadNorm | None


class Embedder(Protocol):
    """What a head borrows from the target."""

    def embed(self, token: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftHead(DecoderStack):
    """Decoder layers whose context is the target's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config.layers)
        self.head_config = config
        size = config.layers.hidden_size
        self.fc = Linear(len(config.tap_layers) * size, size)
        self.hidden_norm = RMSNorm(size, config.layers.norm_eps)
        self.adapter = Linear(config.target_hidden_size, size) if config.target_hidden_size else None
        self.edge = EdgeTerm(config.edge, config.layers.vocab_size, size) if config.edge else None

    def init_weights(self, seed: int = 0) -> DraftHead:
        """Fresh weights. The edge term starts at zero, so that training starts from the plain head."""
        init_weights(self, seed)
        if self.edge is not None:
            nn.init.zeros_(self.edge.successor)
            if self.edge.gate is not None:
                nn.init.zeros_(self.edge.gate.weight)
        return self

    def fuse(self, tap: Tensor) -> Tensor:
        """Tapped states side by side (..., X) -> one context row each (..., M)."""
        if self.adapter is not None:
            tap = self.adapter(tap.unflatten(-1, (len(self.head_config.tap_layers), -1))).flatten(-2)
        return self.hidden_norm(self.fc(tap))

    def observe(
        self,
        tap_TX: Tensor,
        position_T: Tensor,
        slot_T: Tensor,
        cache: Sequence[KVPages],
        weights: ContextWeights | None = None,
    ) -> None:
        """Extend the context with newly committed tokens."""
        weights = weights or self.context_weights()
        ops.rotate_store_layers(self.context(tap_TX, weights), self.rope(position_T), weights.norm, cache, slot_T)

    def context(self, tap: Tensor, weights: ContextWeights) -> Tensor:
        """Key and value heads of context rows for every layer, (.., L, 2G, E), not yet turned to their positions.

        The layers look at the same rows and never change them.
        """
        heads = ops.linear(self.fuse(tap), weights.weight, weights.bias)
        return heads.unflatten(-1, (self.config.num_layers, -1, self.config.head_dim))

    def context_weights(self) -> ContextWeights:
        """As the layers' weights are now. Who does not change them may ask once."""
        attentions = [cast(DecoderLayer, layer).attention for layer in self.layers]
        weights, biases = zip(*(attention.context_weights for attention in attentions), strict=True)
        norms = [norm for attention in attentions if (norm := attention.head_norm) is not None]
        return ContextWeights(
            torch.cat(weights),
            None if biases[0] is None else torch.cat(biases),
            HeadNorm.joined(norms) if norms else None,
        )

    def propose(self, block: TreeBatch, target: Embedder, cache: Sequence[KVPages]) -> Tensor:
        """States for depths 1..D, (B, D, M), of blocks [anchor, MASK, ..] placed behind the context.

        Who sees whom in a block is the head's to know: the batch's own mask is not looked at. The block's K and V
        are written past the context's end, where the next rows overwrite them.
        """
        rope = self.rope(block.position_T)
        states = self.run(target.embed(block.token_T), rope, self._attend_block(block, cache)).hidden_TM
        return self.predicting(states.unflatten(0, (-1, self.head_config.block_size)))

    def _attend_block(self, block: TreeBatch, cache: Sequence[KVPages]) -> list[Attend]:
        """A causal layer attends the block as a chain, any other as a clique."""
        causal_layers = self.head_config.causal_layers
        seen = {c: None if c else self._clique(block) for c in set(causal_layers)}
        kinds = {c: self.paged(replace(block, ancestor_BNW=bits), cache) for c, bits in seen.items()}
        return [kinds[c][i] for i, c in enumerate(causal_layers)]

    def _clique(self, block: TreeBatch) -> Tensor:
        """The mask under which all slots of a block see each other."""
        rows, size = len(block.layout.cached_len_B), self.head_config.block_size
        return pack_bits(torch.ones(rows, size, size, dtype=torch.bool, device=block.token_T.device))

    def block_tokens(self, anchor_B: Tensor) -> Tensor:
        """[anchor, MASK, .., MASK] per request, (B, block size)."""
        token = anchor_B.new_full((len(anchor_B), self.head_config.block_size), self.head_config.mask_token)
        token[:, 0] = anchor_B
        return token

    def predicting(self, slots: Tensor) -> Tensor:
        """Of a block's slots (.., block size, M), those that predict depths 1..D."""
        return slots if self.head_config.shifted else slots[..., 1:, :]

    def candidates(
        self,
        hidden_BDM: Tensor,
        root_B: Tensor,
        target: Embedder,
        tree: TreeConfig,
        temperature_B: Tensor | None = None,
    ) -> Candidates:
        """What the states of depths 1..D below some roots offer to a tree. `temperature_B` are the draft temperatures;
        None: 1."""
        hidden_TM, (B, D) = hidden_BDM.flatten(0, 1), hidden_BDM.shape[:2]
        logits_BDV = target.logits(hidden_TM).unflatten(0, (B, D))
        V, entropy_BD = logits_BDV.shape[-1], None
        if tree.score != "accum_logp":
            # Its checks would wait for the device, which a captured round must not.
            scaled = torch.distributions.Categorical(
                logits=ops.apply_temperature(logits_BDV, temperature_B).float(), validate_args=False
            )
            entropy_BD = scaled.entropy()
        if self.edge is None:
            return Candidates(*ops.topk_logprob(logits_BDV, min(tree.width, V), temperature_B), entropy_BD)
        gate_BDR = ops.apply_temperature(self.edge.gates(hidden_TM).unflatten(0, (B, D)), temperature_B).float()
        edge = EdgeFactors(gate_BDR, self.edge.predecessor, self.edge.successor)
        count = min(tree.shortlist or V, V)
        if tree.shortlist_parents and count < V:
            found = ops.shortlist(logits_BDV, root_B, edge, count, min(tree.shortlist_parents, V), temperature_B)
        else:
            found = ops.topk_logprob(logits_BDV, count, temperature_B)
        return Candidates(*found, entropy_BD, edge)

    def forward_blocks(
        self, block: Tensor, block_position: Tensor, tap: Tensor, tap_position: Tensor, visible: Visible
    ) -> Tensor:
        """The same pass without a cache, for training: blocks of embeddings over sequences of context rows.

        `block` is (.., Q, M) with all blocks' slots in a row, `tap` (.., T, X), `visible` (.., Q, T + Q): what each
        slot sees of the context rows, then of the slots, where no window narrows it. Returns every slot's state.
        """
        key_position = torch.cat((tap_position, block_position), -1)
        seen = {
            window: narrow(visible, block_position, key_position, window, self.head_config.causal_windows)
            for window in self.config.distinct_windows
        }
        G, tap_rope, block_rope = self.config.num_kv_heads, self.rope(tap_position), self.rope(block_position)
        attends = []
        weights = self.context_weights()
        for i, kv in enumerate(self.context(tap, weights).unbind(-3)):
            norm = None if weights.norm is None else weights.norm.layer(i)
            _, k, v = ops.rotate_qkv(kv, G, tap_rope, norm)
            attends.append(partial(self._attend_dense, k, v, seen[self.config.window(i)]))
        return self.run(block, block_rope, attends).hidden_TM

    def _attend_dense(
        self, k_context: Tensor, v_context: Tensor, visible: Visible, qkv: Tensor, rope: Rope, norm: HeadNorm | None
    ) -> Tensor:
        """Attention of slots over context rows, then slots."""
        q, k, v = ops.rotate_qkv(qkv, self.config.num_kv_heads, rope, norm)
        return attend_masked(q, torch.cat((k_context, k), -3), torch.cat((v_context, v), -3), visible)


def make_head(config: HeadConfig, seed: int = 0, **changes: object) -> DraftHead:
    """A head with fresh weights."""
    return DraftHead(replace(config, **changes)).init_weights(seed)  # type: ignore[arg-type]
