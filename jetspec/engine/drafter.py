"""Drafters: draft head, n-gram lookup, none. Each returns a `DraftTree`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.engine.choices import ChoiceTable
from jetspec.engine.kv_cache import KVCache
from jetspec.engine.rows import RowTable
from jetspec.models.choices import ChoiceFits
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import EngineHead, HeadState
from jetspec.ops.transfer import send, upload
from jetspec.tree import MAX_CHAIN, Acceptance, DraftTree, Matches, learn, match, merge
from jetspec.types import Request, RoundFeatures, RowSampling, TreeBatch


@dataclass(frozen=True)
class RoundState:
    """The batch at the start of a round."""

    row_B: Tensor
    """Rows of the page table."""
    anchor_B: Tensor
    sampling: RowSampling
    requests: list[Request]
    """Empty in a captured round."""
    features: RoundFeatures = field(default_factory=RoundFeatures)
    limits: tuple[Tensor, Tensor] | None = None
    """Budget and width per request, when a request limits its tree."""

    @staticmethod
    def of(rows: RowTable, row_B: Tensor, features: RoundFeatures, requests: list[Request]) -> RoundState:
        limits = rows.limits(row_B) if features.drafting == "limited" else None
        return RoundState(row_B, rows.anchor_R[row_B], rows.sampling(row_B, features), requests, features, limits)

    @property
    def is_constrained(self) -> bool:
        return any(request.constraint for request in self.requests)


class Drafter(Protocol):
    """The draft and build stages of a round."""

    tree: TreeConfig
    tap_layers: tuple[int, ...] = ()
    """Target layers whose hidden states `observe` takes."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Runs on the host before each round, for drafters that read the text. Others read device state only, so a
        round can start before the host has read the last one."""
        return None

    def draft(self, state: RoundState) -> Any:
        """Drafts tokens that may follow each anchor."""

    def build(self, state: RoundState, drafted: Any) -> DraftTree:
        """Builds a tree of the drafted tokens."""

    def learn(self, state: RoundState, drafted: Any, tree: DraftTree, verdict: Acceptance) -> Tensor | None:
        """Learns from a verdict. Returns the accepted draft tokens per request that only n-grams proposed."""
        return None

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        """Takes committed tokens with their tapped hidden states."""
        raise AssertionError("this drafter has no tap layers")


class NoDrafter(Drafter):
    """Plain decoding: the tree is the anchor."""

    tree = TreeConfig(budget=1)

    def draft(self, state: RoundState) -> None:
        return None

    def build(self, state: RoundState, drafted: None) -> DraftTree:
        return DraftTree.root(state.anchor_B)


@dataclass
class Drafted:
    """Proposals of a head and of n-grams below the anchors."""

    by_head: Any
    cached_len_B: Tensor
    """Positions of the anchors."""
    matches: Matches | None = None
    tree: DraftTree | None = None
    """The tree of the head alone, once it is built."""


class HeadDrafter(Drafter):
    """Drafts with a draft head of any kind, and with n-grams where the cache keeps the texts."""

    def __init__(self, head: EngineHead, target: Decoder, cache: KVCache, tree: TreeConfig) -> None:
        assert cache.head is not None
        self.head, self.cache, self.tree, self.ngrams = head, cache, tree, cache.rows.ngrams
        self.state = HeadState(target, cache.head.layers, cache.head.feature_SM, head.context_weights())
        self.tap_layers = head.head_config.tap_layers
        self.trees: dict[int, TreeConfig] = {}
        self.nodes = {tree: head.nodes(tree) for tree in map(self.tree_of, (1, *(t.batch for t in tree.batch_trees)))}
        fits, depth = head.choices if tree.choice_model else ChoiceFits(), self.tree_of(1).depth or 1
        entry_R, refine = cache.rows.columns["choices"], tree.refine_choices and tree.ranks_by_probability
        self.choices = cache.rows.choices = ChoiceTable(fits, tree.draft_temperature, entry_R, depth, refine)

    def prepare(self, requests: Sequence[Request]) -> None:
        if any(request.sampling.is_sampled for request in requests):
            self.choices.refine()

    def draft(self, state: RoundState) -> Drafted:
        B = len(state.anchor_B)
        tree = self.tree_of(B)
        depth_1N, mask_1NW = self.nodes[tree]
        depth_BN = depth_1N.expand(B, -1)
        mask_BNW = None if mask_1NW is None else mask_1NW.expand(B, -1, -1)
        nodes = self.cache.place(state.row_B, depth_BN, depth_BN, mask_BNW)  # the head sets the tokens
        assert tree.depth is not None
        choice = self.choices.model(state.row_B, state.sampling, nodes.layout.cached_len_B, tree.depth)
        by_head = self.head.draft(nodes, state.anchor_B, tree, self.state, choice)
        drafted = Drafted(by_head, nodes.layout.cached_len_B)
        if self.ngrams is not None:
            depth = min(tree.depth, tree.budget - 1, MAX_CHAIN)
            drafted.matches = match(self.ngrams, state.row_B, nodes.layout.cached_len_B, depth)
        return drafted

    def build(self, state: RoundState, drafted: Drafted) -> DraftTree:
        tree, matches = self.tree_of(len(state.anchor_B)), drafted.matches
        drafted.tree = built = self.head.build(state.anchor_B, drafted.by_head, tree)
        return built if matches is None else merge(built, matches, tree.budget, tree.width)

    def learn(self, state: RoundState, drafted: Drafted, tree: DraftTree, verdict: Acceptance) -> Tensor | None:
        assert drafted.tree is not None
        self.choices.observe(state.row_B, state.sampling, drafted.cached_len_B, drafted.tree, verdict)
        if self.ngrams is None or drafted.matches is None:
            return None
        return learn(self.ngrams, state.row_B, drafted.matches, tree, verdict)

    def observe(self, tap_TX: Tensor, batch: TreeBatch) -> None:
        self.head.observe(tap_TX, batch, self.state)

    def tree_of(self, batch: int) -> TreeConfig:
        """Tree of each request in a batch, with its depth. A larger batch never has deeper trees."""
        if batch not in self.trees:
            tree, config = self.tree.at(batch), self.head.head_config
            depth = min(config.draft_depth(tree.depth), config.draft_depth(self.tree.depth))
            self.trees[batch] = replace(tree, depth=depth, batch_trees=())
        return self.trees[batch]


@dataclass
class Continuation:
    """Node of the tree of matches, with the total weight of the matches through it."""

    token: int
    parent: int
    depth: int
    weight: float = 0.0
    children: dict[int, int] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """Prompt lookup: continuations of earlier occurrences of the last tokens, merged into a tree.

    A match of n tokens weighs 4^n, so a long match outweighs many short ones. Weight never grows along a path, so the
    heaviest nodes form a tree. The host finds it before the round and uploads it.
    """

    min_match = 2
    max_match = 8
    max_matches = 32
    max_depth = 15

    def __init__(self, tree: TreeConfig, num_rows: int, device: torch.device) -> None:
        self.tree = tree
        self.depth = min(tree.depth or self.max_depth, tree.budget - 1)
        # Per row, and in float64, which holds all of them exactly: tokens, parents (none of what is not there), scores.
        self.drafted_R3N = torch.zeros(num_rows, 3, tree.budget, dtype=torch.float64, device=device)
        self.drafted_R3N[:, 1, 1:] = -1

    def prepare(self, requests: Sequence[Request]) -> None:
        drafted_B3N = torch.zeros(len(requests), 3, self.tree.budget, dtype=torch.float64)
        drafted_B3N[:, 1] = -1
        for drafted_3N, request in zip(drafted_B3N, requests, strict=True):
            nodes = self.heaviest(self.continuations(request.tokens))
            columns = [
                (n.token, n.parent, math.log(n.weight / nodes[0].weight) if i else 0.0) for i, n in enumerate(nodes)
            ]
            drafted_3N[:, : len(nodes)] = torch.tensor(columns, dtype=torch.float64).T
        device = self.drafted_R3N.device
        row_B = upload([request.row for request in requests], torch.int64, device)
        self.drafted_R3N[row_B] = send(drafted_B3N, device)

    def draft(self, state: RoundState) -> Tensor:
        return self.drafted_R3N[state.row_B]

    def build(self, state: RoundState, drafted: Tensor) -> DraftTree:
        drafted = drafted[..., : self.tree.at(len(drafted)).budget]  # heaviest first
        size_B = (drafted[:, 1] >= 0).sum(1)
        if drafted.device.type == "cpu":  # reading the size is free, and every node costs time
            drafted = drafted[..., : int(size_B.max())]
        token_BN, parent_BN, score_BN = drafted.unbind(1)
        depth = min(self.depth, drafted.shape[-1] - 1)
        return DraftTree.from_parents(token_BN.long(), parent_BN.long(), size_B, depth, score_BN.float())

    def continuations(self, tokens: list[int]) -> list[Continuation]:
        """Tree of the best matches, ordered by length, then by recency. Node 0 is the anchor."""
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
        """The heaviest nodes, parents first: at most `budget`, and at most `width` children of one node."""
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


def match_lengths(text: np.ndarray, longest: int) -> np.ndarray:
    """For each earlier position, the number of tokens up to it that equal the end of the text, at most `longest`."""
    earlier = len(text) - 1
    length = np.zeros(earlier, dtype=np.int64)
    matching = np.ones(earlier, dtype=bool)
    for back in range(min(longest, earlier)):
        shifted = np.zeros(earlier, dtype=bool)
        shifted[back:] = text[: earlier - back] == text[-1 - back]
        matching &= shifted
        length += matching
    return length
