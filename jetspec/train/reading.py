"""Drafts of a head at any position of a text that the target has encoded.

The interface is the same for heads of every kind: trees at some anchors, and the ranks of the true tokens among the
candidates there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.models.decoder import Decoder, DecoderStack
from jetspec.models.draft_head import DraftHead
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.heads import Head
from jetspec.ops.select import force
from jetspec.tree import Candidates, DraftTree, GrowingTree, build_tree, pack_bits
from jetspec.types import BatchLayout, KVPages, TreeBatch

RANKS = (1, 2, 4, 8, 16)
"""Numbers of best candidates for which the share of true tokens among them is reported."""
ABSENT, BEYOND = 1 << 30, -1
"""Ranks of a token that is not a candidate, and of a position beyond the end of the text."""


class Drafted(Protocol):
    """Drafts at some anchors."""

    def tree(self, config: TreeConfig) -> DraftTree: ...

    def ranks(self, next_BD: Tensor) -> Tensor:
        """Rank of each next token among the candidates of its true parent, (B, D)."""


class Reading(ABC):
    """A text with the K and V of target and head at every position.

    Each position is one page. So anchors share the pages before them, have their own pages from there on, and one
    forward serves them all.
    """

    @staticmethod
    @abstractmethod
    def floats_per_anchor(head: Any, tree: TreeConfig) -> int:
        """Numbers per anchor in the largest tensor of a draft."""

    def __init__(self, target: Decoder, head: Head, tokens: np.ndarray) -> None:
        self.target = target
        self.batch = whole(tokens, target.embedding.device)
        self.token_T, self.position_T = self.batch.token_T, self.batch.position_T
        self.target_pages, self.head_pages = _make_pages(target, len(tokens)), _make_pages(head, len(tokens))
        tap_TX = target(self.batch, self.target_pages, head.head_config.tap_layers).tap_TX
        assert tap_TX is not None
        self.tap_TX = tap_TX

    @abstractmethod
    def draft(self, anchor_B: Tensor, tree: TreeConfig) -> Drafted:
        """Drafts at these positions after the text before them, for trees of at most this budget, width and depth."""

    def logprob(self, anchor_B: Tensor, path_BD: Tensor) -> Tensor:
        """The target's log-probability of every token on paths that branch off after their anchors, (B, D)."""
        token_BD = torch.cat((self.token_T[anchor_B, None], path_BD[:, :-1]), dim=1)
        batch, pages = self._place(anchor_B, token_BD, self.target_pages)
        logits_TV = self.target.logits(self.target(batch, pages).hidden_TM).float()
        return logits_TV.log_softmax(-1).gather(1, path_BD.reshape(-1, 1)).view_as(path_BD)

    def _place(self, anchor_B: Tensor, token_BN: Tensor, pages: list[KVPages]) -> tuple[TreeBatch, list[KVPages]]:
        """Chains of tokens from their anchors on, and the pages of the text extended by pages for them."""
        (B, N), T, device = token_BN.shape, len(self.token_T), token_BN.device
        own_BN = T + torch.arange(B * N, device=device).view(B, N)
        index_P, anchor_B1 = torch.arange(T + N, device=device), anchor_B[:, None]
        page_BP = torch.where(index_P < anchor_B1, index_P, own_BN.gather(1, (index_P - anchor_B1).clamp(0, N - 1)))
        layout = BatchLayout(page_BP, anchor_B, torch.arange(B + 1, device=device) * N, page_size=1, max_queries=N)
        position_BN = anchor_B1 + torch.arange(N, device=device)
        batch = TreeBatch(token_BN.flatten(), position_BN.flatten(), own_BN.flatten(), layout, None)
        padding = (0, 0, 0, 0, 0, 0, 0, B * N)
        return batch, [KVPages(F.pad(page.k, padding), F.pad(page.v, padding)) for page in pages]


def whole(tokens: np.ndarray, device: torch.device) -> TreeBatch:
    """A text as a batch of one request, with one page per position."""
    token_T = torch.as_tensor(tokens, dtype=torch.long, device=device)
    position_T = torch.arange(len(tokens), device=device)
    start_B1 = position_T.new_tensor([0, len(tokens)])
    layout = BatchLayout(position_T[None], position_T.new_zeros(1), start_B1, page_size=1, max_queries=len(tokens))
    return TreeBatch(token_T, position_T, position_T, layout, None)


@torch.no_grad()
def first_choices(target: Decoder, tokens: np.ndarray) -> np.ndarray:
    """For every token but the first: True if it is the target's most likely one."""
    batch = whole(tokens, target.embedding.device)
    choice_T = target.logits(target(batch, _make_pages(target, len(tokens))).hidden_TM).argmax(-1)
    return (choice_T[:-1] == batch.token_T[1:]).cpu().numpy()


def _make_pages(model: DecoderStack, count: int) -> list[KVPages]:
    c, like = model.config, model.norm.weight
    shape = (count, 1, c.num_kv_heads, c.head_dim)
    return [KVPages(like.new_empty(shape), like.new_empty(shape)) for _ in range(c.num_layers)]


class BlockReading(Reading):
    """Drafts of heads that draft in one pass."""

    @staticmethod
    def floats_per_anchor(head: DraftHead, tree: TreeConfig) -> int:
        depth, vocab = head.head_config.draft_depth(tree.depth), head.config.vocab_size
        edges = tree.budget * (tree.shortlist or vocab) if head.edge is not None else 0
        return max(depth * vocab, edges)

    def __init__(self, target: Decoder, head: DraftHead, tokens: np.ndarray) -> None:
        super().__init__(target, head, tokens)
        self.head = head
        head.write_context(self.tap_TX, self.position_T, self.position_T, self.head_pages)

    def states(self, anchor_B: Tensor) -> Tensor:
        """The head's states for depths 1..D, (B, D, M)."""
        batch, pages = self._place(anchor_B, self.head.block_tokens(self.token_T[anchor_B]), self.head_pages)
        return self.head.propose(batch, self.target, pages)

    def draft(self, anchor_B: Tensor, tree: TreeConfig) -> BlockDrafted:
        # the shortlist stays as it is, because scores depend on it
        offer = replace(tree, width=max(tree.width, min(RANKS[-1], tree.shortlist or RANKS[-1])))
        depth = self.head.head_config.draft_depth(tree.depth)
        root_B, temperature_B = self.token_T[anchor_B], _greedy_draft_temperature(tree, anchor_B)
        candidates = self.head.candidates(self.states(anchor_B)[:, :depth], root_B, self.target, offer, temperature_B)
        return BlockDrafted(candidates, root_B, depth)


class BlockDrafted:
    """Candidates of every depth. All trees are built from them."""

    def __init__(self, candidates: Candidates, root_B: Tensor, depth: int) -> None:
        self.candidates, self.root_B, self.depth = candidates, root_B, depth

    def tree(self, config: TreeConfig) -> DraftTree:
        return build_tree(self.root_B, self.candidates, config, self.depth)

    def ranks(self, next_BD: Tensor) -> Tensor:
        parent_BD = torch.cat((self.root_B[:, None], next_BD[:, :-1]), dim=1).clamp(min=0)
        offered = [
            self.candidates.children(i + 1, parent_BD[:, i : i + 1], RANKS[-1])[0] for i in range(next_BD.shape[1])
        ]
        return ranks_among(torch.cat(offered, 1), next_BD)


class UnrolledReading(Reading):
    """Drafts of heads that draft step by step."""

    @staticmethod
    def floats_per_anchor(head: Eagle3Head, tree: TreeConfig) -> int:
        return max(head.head_config.draft_depth(tree.depth), tree.width) * head.head_config.draft_vocab_size

    def __init__(self, target: Decoder, head: Eagle3Head, tokens: np.ndarray) -> None:
        super().__init__(target, head, tokens)
        self.head = head
        self.feature_TM = self.tap_TX.new_empty(len(tokens), head.config.hidden_size)
        before_T = (self.position_T - 1).clamp(min=0)
        head.write_context(self.tap_TX, self.batch, before_T, target, self.head_pages, self.feature_TM)

    def draft(self, anchor_B: Tensor, tree: TreeConfig) -> UnrolledDrafted:
        return UnrolledDrafted(self, anchor_B, tree)

    def grow(self, anchor_B: Tensor, tree: TreeConfig) -> GrowingTree:
        config, B = self.head.head_config, len(anchor_B)
        width, size = config.frontier(tree), config.num_in_flight(tree)
        node_N = torch.arange(size, device=anchor_B.device)
        nodes, pages = self._place(anchor_B, node_N.expand(B, -1), self.head_pages)
        position_BN = anchor_B[:, None] + (node_N + width - 1) // width
        own_NW = pack_bits(torch.eye(size, dtype=torch.bool, device=anchor_B.device))
        nodes = replace(nodes, position_T=position_BN.flatten(), ancestor_BNW=own_NW.expand(B, -1, -1))
        growing = GrowingTree(self.token_T[anchor_B], width, tree.budget)
        feature_BM = self.feature_TM[(anchor_B - 1).clamp(min=0)]
        depth, temperature_B = config.draft_depth(tree.depth), _greedy_draft_temperature(tree, anchor_B)
        return self.head.grow(growing, depth, nodes, feature_BM, self.target, pages, temperature_B)

    def offered(self, anchor_B: Tensor, next_BD: Tensor) -> Tensor:
        """The best tokens at every depth along the next tokens, (B, D, K), from the pass that training uses."""
        token_BD = torch.cat((self.token_T[anchor_B, None], next_BD[:, :-1]), dim=1).clamp(min=0)
        embedded, drafted = (self.head.embed(x, self.target)[None] for x in (self.token_T, token_BD))
        visible_BT = (self.position_T > 0) & (self.position_T < anchor_B[:, None])
        tap, position, anchor, visible = (x[None] for x in (self.tap_TX, self.position_T, anchor_B, visible_BT))
        with force("reference"):
            states = self.head.forward_unrolled(embedded, tap, position, anchor, drafted, visible)[0]
        return self.head.best_tokens(states, RANKS[-1])[0]


class UnrolledDrafted:
    """Trees of one width are grown together; each takes its best nodes."""

    def __init__(self, reading: UnrolledReading, anchor_B: Tensor, offer: TreeConfig) -> None:
        self.reading, self.anchor_B, self.offer = reading, anchor_B, offer
        self.grown: dict[int, GrowingTree] = {}

    def tree(self, config: TreeConfig) -> DraftTree:
        if config.width not in self.grown:
            self.grown[config.width] = self.reading.grow(self.anchor_B, replace(self.offer, width=config.width))
        return self.grown[config.width].tree(config.budget)

    def ranks(self, next_BD: Tensor) -> Tensor:
        rank_BD = ranks_among(self.reading.offered(self.anchor_B, next_BD), next_BD)
        nothing_seen = (self.anchor_B == 0)[:, None] & (rank_BD != BEYOND)
        return torch.where(nothing_seen, ABSENT, rank_BD)


def _greedy_draft_temperature(tree: TreeConfig, anchor_B: Tensor) -> Tensor | None:
    if tree.draft_temperature == 1:
        return None
    return torch.full(anchor_B.shape, tree.draft_temperature, device=anchor_B.device)


READINGS: dict[str, type[Reading]] = {"block": BlockReading, "eagle3": UnrolledReading}
"""Readings by the kind of the head."""


def ranks_among(offered_BDK: Tensor, next_BD: Tensor) -> Tensor:
    found_BDK = offered_BDK == next_BD[..., None]
    rank_BD = torch.where(found_BDK.any(-1), found_BDK.int().argmax(-1), ABSENT)
    return torch.where(next_BD == BEYOND, BEYOND, rank_BD)


def next_tokens(token_T: Tensor, anchor_B: Tensor, end_B: Tensor, depth: int) -> Tensor:
    """The tokens after each anchor, (B, D); BEYOND from the end on."""
    index_BD = anchor_B[:, None] + torch.arange(1, depth + 1, device=token_T.device)
    return torch.where(index_BD < end_B[:, None], token_T[index_BD.clamp(max=len(token_T) - 1)], BEYOND)
