"""Terms of a child's logit that depend on the whole path to it, as published heads compute them.

The corrected logit of a child c of a node n at depth d - 1 is U_d[c] + <vector(n, d), rows(c)>. The vector is computed
from the state of the head at depth d, the token of n, and numbers that n carries from the tokens above it. Nodes of a
level are computed together, so trees grow level by level.

    gated       vector = sigmoid(G [h_d ; e]) * e                                   (DSpark; e = E1[token])
    recurrent   [g ; c ; o] = J [s ; e ; h_d], vector = tanh(o),
                s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)                     (DSpark "rnn")
    gru         s' = GRU(embedding, s), vector = silu(W [h_d ; s'])                  (Domino)
    mixed       a_d = W [.. h_d ; .. mean(h) ; e], vector = mlp(a_d + sum_j L_dj a_j) (XPress)
    corrected   vector = mlp([norm(h_d) ; norm(embedding)]), rows of the lm_head     (DFly)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec import ops
from jetspec.models.decoder import DecoderConfig, Linear, RMSNorm
from jetspec.types import ChoiceModel, PathTerm

PathKind = Literal["gated", "recurrent", "gru", "mixed", "corrected"]


@dataclass(frozen=True)
class PathConfig:
    """Kind and sizes of a term."""

    kind: PathKind
    rank: int
    """Size of a vector, and of the token vectors behind it."""
    inner: int = 0
    """Size of the state of `gru`, and of the MLP of `mixed` and `corrected`."""
    first_depth: int = 1
    """First depth whose logits have the term."""


class PathTarget(Protocol):
    """Parts of the target that a term uses."""

    def embed(self, token: Tensor) -> Tensor: ...
    def output_rows(self, token: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class BlockStates:
    """States of a block of the head, and what surrounds them."""

    hidden_BSM: Tensor
    """Normed states of all slots."""
    anchor_B: Tensor
    first_slot: int
    """Slot that predicts depth 1."""
    target: PathTarget
    feature_BF: Tensor | None = None
    """Feature of the token before the anchor, for terms with a `feature_size`."""

    def at(self, depth: int) -> Tensor:
        """States that predict a depth, (B, 1, M)."""
        slot = self.first_slot + depth - 1
        return self.slot(slot)

    def slot(self, slot: int) -> Tensor:
        return self.hidden_BSM[:, slot : slot + 1].contiguous()


class Term(nn.Module, ABC):
    """Base of the terms."""

    feature_size = 0
    """Numbers that the term keeps for each committed token."""
    state_size = 0
    """Numbers that a node carries from the tokens above it."""
    predecessor: Tensor
    """E1: rows of parents, in terms that read them."""
    successor: Tensor
    """E2: rows of children."""

    def __init__(self, config: PathConfig) -> None:
        super().__init__()
        self.config = config

    def add_tables(self, vocab_size: int, *names: str) -> None:
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(vocab_size, self.config.rank)))

    def bind(self, block: BlockStates, choice: ChoiceModel | None = None) -> PathTerm:
        """Returns the term of the trees below a batch of anchors, divided by the draft temperatures."""

        def step(depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
            vector_BWR, state_BWS = self.step(block, depth, token_BW, state_BWS)
            vector_BWR = vector_BWR.float() * float(depth >= self.config.first_depth)
            return ops.apply_temperature(vector_BWR, choice and choice.at(depth)), state_BWS

        return PathTerm(self.root(block), step, self.rows(block.target))

    def rows(self, target: PathTarget) -> Callable[[Tensor], Tensor]:
        """Returns the map from children to their vectors."""
        return partial(F.embedding, weight=self.successor)

    def feature(self, token: Tensor) -> Tensor:
        """Returns the features of committed tokens."""
        return F.embedding(token, self.predecessor)

    def root(self, block: BlockStates) -> Tensor:
        """Returns the states above the anchors, (B, 1, S)."""
        return block.hidden_BSM.new_zeros(len(block.hidden_BSM), 1, self.state_size)

    @abstractmethod
    def step(self, block: BlockStates, depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
        """Returns vectors and states of nodes with these tokens, whose children are at `depth`, from the states of
        their parents."""


class GatedTerm(Term):
    """Vector of the parent token, gated by itself and the head's state."""

    def __init__(self, config: PathConfig, layers: DecoderConfig) -> None:
        super().__init__(config)
        self.add_tables(layers.vocab_size, "predecessor", "successor")
        self.gate = Linear(layers.hidden_size + config.rank, config.rank, bias=True)

    def step(self, block: BlockStates, depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
        e_BWR = F.embedding(token_BW, self.predecessor)
        return _product(self.gate, _joined(block.at(depth), e_BWR)).sigmoid() * e_BWR, state_BWS


class RecurrentTerm(Term):
    """A gated recurrence over the path. The vector of a node is computed from the state of its parent."""

    def __init__(self, config: PathConfig, layers: DecoderConfig) -> None:
        super().__init__(config)
        self.state_size = config.rank
        self.add_tables(layers.vocab_size, "predecessor", "successor")
        self.joint = Linear(2 * config.rank + layers.hidden_size, 3 * config.rank, bias=True)

    def root(self, block: BlockStates) -> Tensor:
        state_B1S = super().root(block)
        if block.first_slot:  # the slot of the anchor reads the anchor as well
            state_B1S = self.step(block, 1 - block.first_slot, block.anchor_B[:, None], state_B1S)[1]
        return state_B1S

    def step(self, block: BlockStates, depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
        h_BWM = block.at(depth).expand(-1, token_BW.shape[1], -1)
        e_BWR = F.embedding(token_BW, self.predecessor)
        gate, candidate, out = _product(self.joint, torch.cat((state_BWS, e_BWR, h_BWM), -1)).chunk(3, -1)
        return out.tanh(), torch.lerp(candidate.tanh(), state_BWS, gate.sigmoid())


class GRUTerm(Term):
    """A GRU over the target's embeddings of the path; `inner` is its size."""

    def __init__(self, config: PathConfig, layers: DecoderConfig) -> None:
        super().__init__(config)
        self.state_size = config.inner
        self.add_tables(layers.vocab_size, "successor")
        self.input = Linear(layers.hidden_size, 3 * config.inner)
        self.recurrent = Linear(config.inner, 3 * config.inner)
        self.project = Linear(layers.hidden_size + config.inner, config.rank)

    def step(self, block: BlockStates, depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
        reset_x, update_x, new_x = _product(self.input, block.target.embed(token_BW)).chunk(3, -1)
        reset_s, update_s, new_s = _product(self.recurrent, state_BWS).chunk(3, -1)
        new = (new_x + (reset_x + reset_s).sigmoid() * new_s).tanh()
        state_BWS = torch.lerp(new, state_BWS, (update_x + update_s).sigmoid())
        return F.silu(_product(self.project, _joined(block.at(depth), state_BWS))), state_BWS


class MixedTerm(Term):
    """A mixture of vectors of the whole path, with learned weights per pair of slots. A node carries those above it.

    Slot 0 of a block that predicts its own position reads the token before the anchor: the feature.
    """

    def __init__(self, config: PathConfig, layers: DecoderConfig, block_size: int) -> None:
        super().__init__(config)
        rank = config.rank
        self.state_size, self.feature_size = block_size * rank, rank
        self.add_tables(layers.vocab_size, "predecessor", "successor")
        self.own = Linear(layers.hidden_size, rank)
        self.mean = Linear(layers.hidden_size, rank)
        self.input = Linear(3 * rank, rank)
        self.mix = nn.Parameter(torch.empty(rank, block_size, block_size))
        self.gate_up = Linear(rank, 2 * config.inner)
        self.down = Linear(config.inner, rank)

    def root(self, block: BlockStates) -> Tensor:
        state_B1S = super().root(block)
        if block.first_slot == 0:
            return state_B1S
        assert block.feature_BF is not None
        entry_B1R = self.entry(block, 0, block.feature_BF[:, None].to(state_B1S.dtype))
        return torch.cat((entry_B1R, state_B1S[..., self.config.rank :]), -1)

    def step(self, block: BlockStates, depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
        slot, rank = block.first_slot + depth - 1, self.config.rank
        entry_BWR = self.entry(block, slot, F.embedding(token_BW, self.predecessor))
        entries = list(state_BWS.split(rank, -1))
        entries[slot] = entry_BWR
        mixed_BWR = entry_BWR + sum(self.mix[:, slot, j] * entries[j] for j in range(slot + 1))
        vector_BWR = mixed_BWR + _product(self.down, ops.swiglu(_product(self.gate_up, mixed_BWR)))
        return vector_BWR, torch.cat(entries, -1)

    def entry(self, block: BlockStates, slot: int, e_BWR: Tensor) -> Tensor:
        mean_B1M = block.hidden_BSM.mean(1, keepdim=True)
        shared = (_product(self.own, block.slot(slot)), _product(self.mean, mean_B1M))
        return _product(self.input, _joined(torch.cat(shared, -1), e_BWR))


class CorrectedTerm(Term):
    """An MLP over the head's state and the embedding of the parent, whose result is added to the state itself."""

    def __init__(self, config: PathConfig, layers: DecoderConfig) -> None:
        super().__init__(config)
        size, eps = layers.hidden_size, layers.norm_eps
        self.hidden_norm, self.embed_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.gate_up = Linear(2 * size, 2 * config.inner)
        self.down = Linear(config.inner, size)

    def rows(self, target: PathTarget) -> Callable[[Tensor], Tensor]:
        return target.output_rows

    def step(self, block: BlockStates, depth: int, token_BW: Tensor, state_BWS: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embed_norm(block.target.embed(token_BW))
        inner = _product(self.gate_up, _joined(self.hidden_norm(block.at(depth)), embedded))
        return _product(self.down, ops.swiglu(inner)), state_BWS


def make_term(config: PathConfig, layers: DecoderConfig, block_size: int) -> Term:
    """Returns a term of a kind."""
    if config.kind == "mixed":
        return MixedTerm(config, layers, block_size)
    kinds: dict[str, Callable[[PathConfig, DecoderConfig], Term]] = {
        "gated": GatedTerm,
        "recurrent": RecurrentTerm,
        "gru": GRUTerm,
        "corrected": CorrectedTerm,
    }
    return kinds[config.kind](config, layers)


def _joined(shared_B1X: Tensor, own_BWX: Tensor) -> Tensor:
    """Concatenates numbers of a request and numbers of its nodes."""
    return torch.cat((shared_B1X.expand(*own_BWX.shape[:-1], -1), own_BWX), -1)


def _product(linear: Linear, x_BWX: Tensor) -> Tensor:
    """Returns a product of all nodes, as rows of one matrix, which the kernels of few rows need."""
    return linear(x_BWX.flatten(0, 1)).unflatten(0, x_BWX.shape[:2])
