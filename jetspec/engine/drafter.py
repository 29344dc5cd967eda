"""Who guesses: a head, the text itself, or nobody. All of them hand the round a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.engine.kv_cache import KVCache
from jetspec.engine.rows import RowTable
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.models.eagle3 import Eagle3Head
from jetspec.ops.transfer import send, upload
from jetspec.tree import Candidates, DraftTree, GrowingTree, build_tree, pack_bits
from jetspec.types import Request, RoundFeatures, RowSampling, TreeBatch


@dataclass(frozen=True)
class RoundState:
    """The batch at the start of a round."""

    row_B: Tensor
    """Rows of the page table."""
    anchor_B: Tensor
    sampling: RowSampling
    requests: list[Request]
    """None of them when a round is captured."""
    features: RoundFeatures = field(default_factory=RoundFeatures)
    limits: tuple[Tensor, Tensor] | None = None
    """Budget and width per request, where one of them wants less than the whole tree."""

    @staticmethod
    def of(rows: RowTable, row_B: Tensor, features: RoundFeatures, requests: list[Request]) -> RoundState:
        limits = rows.limits(row_B) if features.drafting == "limited" else None
        return RoundState(row_B, rows.anchor_R[row_B], rows.sampling(row_B, features), requests, features, limits)

    @property
    def is_constrained(self) -> bool:
        return any(request.constraint for request in self.requests)


class Drafter(Protocol):
    """Two stages of the round, and what they need from the rest."""

    tree: TreeConfig
    tap_layers: tuple[int, ...]
    """Target layers whose states it wants to observe."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Read the texts of a round's requests, before it starts."""

    def draft(self, state: RoundState) -> Any:
        """Guess what follows each anchor."""

    def build(self, state: RoundState, drafted: Any) -> DraftTree:
        """Make a tree of the guesses."""

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        """See tokens that were committed, with their tapped states."""


class OnDevice:
    """It guesses from what the device holds, so a round can start before the host has read the last one."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """There is no need to."""


class NoDrafter(OnDevice):
    """Plain decoding: the tree is the anchor."""

    tree = TreeConfig(budget=1)
    tap_layers: tuple[int, ...] = ()

    def draft(self, state: RoundState) -> None:
        return None

    def build(self, state: RoundState, drafted: None) -> DraftTree:
        return DraftTree.root(state.anchor_B)

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        raise AssertionError("nothing is tapped")


class HeadDrafter(OnDevice):
    """The draft head."""

    def __init__(self, head: DraftHead, target: Decoder, cache: KVCache, tree: TreeConfig) -> None:
        config = head.head_config
        self.head, self.target, self.cache, self.tree = head, target, cache, tree
        self.context_weights = head.context_weights()
        self.draft_temperature = DraftTemperature(tree.draft_temperature, cache.device)
        self.tap_layers = config.tap_layers
        self.slot_1S = torch.arange(config.block_size, device=cache.device)[None]

    def draft(self, state: RoundState) -> Candidates:
        assert self.cache.head is not None
        token_BS = self.head.block_tokens(state.anchor_B)
        block = self.cache.place(state.row_B, token_BS, self.slot_1S.expand_as(token_BS), None)
        tree, depth = self._shape(state)
        hidden_BDM = self.head.propose(block, self.target, self.cache.head.layers)[:, :depth]
        temperature_B = self.draft_temperature.of(state)
        return self.head.candidates(hidden_BDM, state.anchor_B, self.target, tree, temperature_B)

    def build(self, state: RoundState, drafted: Candidates) -> DraftTree:
        return build_tree(state.anchor_B, drafted, *self._shape(state))

    def _shape(self, state: RoundState) -> tuple[TreeConfig, int]:
        tree = self.tree.at(len(state.anchor_B))
        return tree, self.head.head_config.draft_depth(tree.depth)

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        assert self.cache.head is not None
        layers, weights = self.cache.head.layers, self.context_weights
        self.head.observe(tap_TX, batch.position_T, batch.slot_T, layers, weights)


class Eagle3Drafter(OnDevice):
    """A head that drafts level by level, on what it has drafted."""

    def __init__(self, head: Eagle3Head, target: Decoder, cache: KVCache, tree: TreeConfig) -> None:
        config = head.head_config
        self.head, self.target, self.cache, self.tree = head, target, cache, tree
        self.draft_temperature = DraftTemperature(tree.draft_temperature, cache.device)
        self.tap_layers = config.tap_layers
        self.width = config.frontier(tree)
        trees = [self._shape(batch)[0] for batch in (1, *(each.batch for each in tree.batch_trees))]
        self.nodes = {size: self._nodes(size) for size in map(config.num_in_flight, trees)}

    def draft(self, state: RoundState) -> GrowingTree:
        assert self.cache.head is not None and self.cache.head.feature_SM is not None
        B = len(state.anchor_B)
        tree, depth = self._shape(B)
        depth_1N, own_1NW = self.nodes[self.head.head_config.num_in_flight(tree)]
        depth_BN, own_BNW = depth_1N.expand(B, -1), own_1NW.expand(B, -1, -1)
        nodes = self.cache.place(state.row_B, depth_BN, depth_BN, own_BNW)
        feature_BM = self.cache.head.feature_SM[self.cache.slot_before(nodes.layout)]
        growing = GrowingTree(state.anchor_B, self.width, tree.budget)
        temperature_B = self.draft_temperature.of(state)
        return self.head.grow(growing, depth, nodes, feature_BM, self.target, self.cache.head.layers, temperature_B)

    def build(self, state: RoundState, drafted: GrowingTree) -> DraftTree:
        return drafted.tree()

    def _shape(self, batch: int) -> tuple[TreeConfig, int]:
        """Such a head can always go deeper, but a larger batch is not the reason to."""
        tree, config = self.tree.at(batch), self.head.head_config
        depth = min(config.draft_depth(tree.depth), config.draft_depth(self.tree.depth))
        return replace(tree, depth=depth), min(depth, tree.budget - 1)

    def _nodes(self, size: int) -> tuple[Tensor, Tensor]:
        """The depths of nodes in flight, and each as its own only ancestor."""
        node_N = torch.arange(size, device=self.cache.device)
        own_NW = pack_bits(torch.eye(size, dtype=torch.bool, device=self.cache.device))
        return ((node_N + self.width - 1) // self.width)[None], own_NW[None]

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        pool = self.cache.head
        assert pool is not None and pool.feature_SM is not None
        before_T = self.cache.slots_before(batch)
        self.head.observe(tap_TX, batch, before_T, self.target, pool.layers, pool.feature_SM)


class DraftTemperature:
    """Temperatures to draft with. A sampled request has its own: its tree is drafted from what will be sampled."""

    def __init__(self, greedy: float, device: torch.device) -> None:
        self.greedy = greedy
        self.greedy_1 = None if greedy == 1 else torch.full((1,), greedy, device=device)

    def of(self, state: RoundState) -> Tensor | None:
        """None: 1 for all."""
        if state.sampling.any_sampled:
            temperature_B = state.sampling.temperature_B
            return torch.where(temperature_B > 0, temperature_B, self.greedy)
        return None if self.greedy_1 is None else self.greedy_1.expand(len(state.anchor_B))


@dataclass
class Continuation:
    """Node of the tree of matches: how much weight of matches passes through a token."""

    token: int
    parent: int
    depth: int
    weight: float = 0.0
    children: dict[int, int] = field(default_factory=dict)


class NgramDrafter:
    """Prompt lookup: text that followed earlier occurrences of the last few tokens, merged into a tree.

    A match of n tokens weighs 4^n, so a long match outweighs many short ones. Weight can only fall along a path,
    so the heaviest nodes form a tree. The host finds it before the round, and the round reads it from the device.
    """

    tap_layers: tuple[int, ...] = ()
    min_match = 2
    max_match = 8
    max_matches = 32
    max_depth = 15

    def __init__(self, tree: TreeConfig, num_rows: int, device: torch.device) -> None:
        self.tree = tree
        self.depth = min(tree.depth or self.max_depth, tree.budget - 1)
        # Per row, and in float64, which holds all of them exactly: tokens, parents (none of what is not there), scores.
        self.guess_R3N = torch.zeros(num_rows, 3, tree.budget, dtype=torch.float64, device=device)
        self.guess_R3N[:, 1, 1:] = -1

    def prepare(self, requests: Sequence[Request]) -> None:
        guess_B3N = torch.zeros(len(requests), 3, self.tree.budget, dtype=torch.float64)
        guess_B3N[:, 1] = -1
        for guess_3N, request in zip(guess_B3N, requests, strict=True):
            nodes = self.heaviest(self.continuations(request.tokens))
            columns = [
                (n.token, n.parent, math.log(n.weight / nodes[0].weight) if i else 0.0) for i, n in enumerate(nodes)
            ]
            guess_3N[:, : len(nodes)] = torch.tensor(columns, dtype=torch.float64).T
        device = self.guess_R3N.device
        row_B = upload([request.row for request in requests], torch.int64, device)
        self.guess_R3N[row_B] = send(guess_B3N, device)

    def draft(self, state: RoundState) -> Tensor:
        return self.guess_R3N[state.row_B]

    def build(self, state: RoundState, drafted: Tensor) -> DraftTree:
        drafted = drafted[..., : self.tree.at(len(drafted)).budget]  # the heaviest come first
        size_B = (drafted[:, 1] >= 0).sum(1)
        if drafted.device.type == "cpu":  # a look is free, and every node that is not there saves time
            drafted = drafted[..., : int(size_B.max())]
        token_BN, parent_BN, score_BN = drafted.unbind(1)
        depth = min(self.depth, drafted.shape[-1] - 1)
        return DraftTree.from_parents(token_BN.long(), parent_BN.long(), size_B, depth, score_BN.float())

    def continuations(self, tokens: list[int]) -> list[Continuation]:
        """The tree of the best matches, long before short and late before early; node 0 is the anchor."""
        length = match_lengths(np.asarray(tokens), self.max_match)
        ends = np.flatnonzero(length >= self.min_match)[::-1]
        ends = ends[np.argsort(-length[ends], kind="stable")][: self.max_matches]
        nodes = [Continuation(tokens[-1], 0, 0)]
        for end in ends.tolist():
            weight, node = 4.0 ** int(length[end]), 0
            nodes[0].weight += weight
            for token in tokens[end + 1 : end + 1 + self.depth]:
                child = nodes[node].children.get(token)
                if child is None:
                    child = nodes[node].children[token] = len(nodes)
                    nodes.append(Continuation(token, node, nodes[node].depth + 1))
                nodes[child].weight += weight
                node = child
        return nodes

    def heaviest(self, nodes: list[Continuation]) -> list[Continuation]:
        """At most `budget` nodes and `width` children each, parents first."""
        allowed = {0}
        for node in nodes:
            best = sorted(node.children.values(), key=lambda child: -nodes[child].weight)
            allowed.update(best[: self.tree.width])
        order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].weight, nodes[i].depth, i))
        place: dict[int, int] = {}
        kept: list[Continuation] = []
        for i in order:
            if len(kept) == self.tree.budget:
                break
            if i in allowed and (i == 0 or nodes[i].parent in place):
                place[i] = len(kept)
                kept.append(nodes[i])
        return [Continuation(n.token, place[n.parent], n.depth, n.weight) for n in kept]

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        raise AssertionError("nothing is tapped")


def match_lengths(text: np.ndarray, longest: int) -> np.ndarray:
    """For each earlier position, how many tokens ending there equal the last tokens of the text (up to `longest`)."""
    earlier = len(text) - 1
    length = np.zeros(earlier, dtype=np.int64)
    matching = np.ones(earlier, dtype=bool)
    for back in range(min(longest, earlier)):
        shifted = np.zeros(earlier, dtype=bool)
        shifted[back:] = text[: earlier - back] == text[-1 - back]
        matching &= shifted
        length += matching
    return length
