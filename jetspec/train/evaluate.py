"""How good a head is, teacher-forced: on text that the target wrote, without decoding it again.

On the target's own greedy text a round keeps the longest path of its tree that spells the coming tokens, and adds
one more. So the head drafts at every position of an answer at once, and the rounds are a walk through that table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from jetspec.config import TreeConfig
from jetspec.models.decoder import Decoder, DecoderStack
from jetspec.models.draft_head import DraftHead
from jetspec.train.data import Document
from jetspec.tree import Candidates, DraftTree, build_tree
from jetspec.types import BatchLayout, KVPages, TreeBatch

RANKS = (1, 2, 4, 8, 16)
"""How often the true token is among this many best ones is reported."""
NEAR_NATS = 5.0
"""A top path is near the target when their log-probabilities of it differ by no more than this."""
GREEDY_SHARE = 0.95
"""Text was written greedily if so many of its tokens are first choices. Sampled text has far fewer."""
NUM_GAPS = 64
"""Anchors whose top path the target scores."""
MAX_FLOATS = 1 << 28
"""Most numbers in one tensor: as many anchors are drafted at once as this allows."""

ABSENT, BEYOND = 1 << 30, -1
"""Ranks of a token that is no candidate, and of a place beyond the end of the text."""


def draft_depth(tree: TreeConfig, reach: int) -> int:
    """Depth of the trees of a head that drafts `reach` positions."""
    return min(tree.depth or reach, reach)


def make_trees(budgets: Sequence[str], tree: TreeConfig, reach: int) -> dict[str, TreeConfig]:
    """The trees to measure, by name: `chain`, or a number of nodes. All else is as in `tree`."""

    def make(name: str) -> TreeConfig:
        if name == "chain":
            return replace(tree, width=1, budget=draft_depth(tree, reach) + 1)
        if not name.isdecimal():
            raise ValueError(f"{name!r} is no budget; give numbers of nodes, or chain")
        return replace(tree, budget=int(name))

    return {name: make(name) for name in budgets}


class Reading:
    """A text as the target has read it: K and V of the target and of the head at every position.

    Each position is a page of its own. So anchors share the pages before them, have pages of their own from there
    on, and one forward serves them all.
    """

    def __init__(self, target: Decoder, head: DraftHead, tokens: np.ndarray) -> None:
        self.target, self.head = target, head
        self.target_pages, self.head_pages = _make_pages(target, len(tokens)), _make_pages(head, len(tokens))
        batch = _whole(tokens, target.embedding.device)
        self.token_T = batch.token_T
        tap_TX = target(batch, self.target_pages, head.head_config.tap_layers).tap_TX
        head.observe(tap_TX, batch.position_T, batch.position_T, self.head_pages)

    def draft(self, anchor_B: Tensor) -> Tensor:
        """The head's states for depths 1..D, (B, D, M), at these positions: it has seen the text before them."""
        batch, pages = self._place(anchor_B, self.head.block_tokens(self.token_T[anchor_B]), self.head_pages)
        return self.head.propose(batch, self.target, pages)

    def logprob(self, anchor_B: Tensor, path_BD: Tensor) -> Tensor:
        """The target's log-probability of every token on paths that leave the text behind their anchors, (B, D)."""
        token_BD = torch.cat((self.token_T[anchor_B, None], path_BD[:, :-1]), dim=1)
        batch, pages = self._place(anchor_B, token_BD, self.target_pages)
        logits_TV = self.target.logits(self.target(batch, pages).hidden_TM).float()
        return logits_TV.log_softmax(-1).gather(1, path_BD.reshape(-1, 1)).view_as(path_BD)

    def _place(self, anchor_B: Tensor, token_BN: Tensor, pages: list[KVPages]) -> tuple[TreeBatch, list[KVPages]]:
        """Chains of tokens from their anchors on, and pages with room for them behind those of the text."""
        (B, N), T, device = token_BN.shape, len(self.token_T), token_BN.device
        own_BN = T + torch.arange(B * N, device=device).view(B, N)
        index_P, anchor_B1 = torch.arange(T + N, device=device), anchor_B[:, None]
        page_BP = torch.where(index_P < anchor_B1, index_P, own_BN.gather(1, (index_P - anchor_B1).clamp(0, N - 1)))
        layout = BatchLayout(page_BP, anchor_B, torch.arange(B + 1, device=device) * N, page_size=1, max_queries=N)
        position_BN = anchor_B1 + torch.arange(N, device=device)
        batch = TreeBatch(token_BN.flatten(), position_BN.flatten(), own_BN.flatten(), layout, None)
        room = (0, 0, 0, 0, 0, 0, 0, B * N)
        return batch, [KVPages(F.pad(page.k, room), F.pad(page.v, room)) for page in pages]


def _whole(tokens: np.ndarray, device: torch.device) -> TreeBatch:
    """A text from its first token on, each position a page."""
    token_T = torch.as_tensor(tokens, dtype=torch.long, device=device)
    position_T = torch.arange(len(tokens), device=device)
    start_B1 = position_T.new_tensor([0, len(tokens)])
    layout = BatchLayout(position_T[None], position_T.new_zeros(1), start_B1, page_size=1, max_queries=len(tokens))
    return TreeBatch(token_T, position_T, position_T, layout, None)


def _make_pages(model: DecoderStack, count: int) -> list[KVPages]:
    c, like = model.config, model.norm.weight
    shape = (count, 1, c.num_kv_heads, c.head_dim)
    return [KVPages(like.new_empty(shape), like.new_empty(shape)) for _ in range(c.num_layers)]


@dataclass(frozen=True)
class HeadScore:
    """What a head did on some answers. A anchors, D depths."""

    rounds: dict[str, list[list[int]]]
    """Per tree and answer: the accepted length of every round."""
    rank_AD: Tensor
    """Place of the true token among the candidates under its true parent, best 0; ABSENT; BEYOND."""
    gap_A: Tensor
    """log q - log p of the top path, for a sample of anchors."""
    width: int

    @classmethod
    def join(cls, scores: Sequence[HeadScore]) -> HeadScore:
        """As if all had been scored together."""
        return cls(
            rounds={name: [r for score in scores for r in score.rounds[name]] for name in scores[0].rounds},
            rank_AD=torch.cat([score.rank_AD for score in scores]),
            gap_A=torch.cat([score.gap_A for score in scores]),
            width=scores[0].width,
        )

    @property
    def tokens_per_round(self) -> dict[str, float]:
        """Mean over all rounds; the last round of an answer counts what was kept of it."""
        lengths = {name: np.concatenate(rounds) for name, rounds in self.rounds.items()}
        return {name: 1 + float(length.mean()) for name, length in lengths.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "answers": len(next(iter(self.rounds.values()))),
            "tokens": len(self.rank_AD),
            "rounds": {name: sum(map(len, rounds)) for name, rounds in self.rounds.items()},
            "accepted_lengths": {name: np.bincount(np.concatenate(r)).tolist() for name, r in self.rounds.items()},
            "depths": self.depths(),
            "top_path": self.top_path(),
        }

    def depths(self) -> dict[str, Any]:
        """Per depth, counted from 1: how often the true token is the best candidate, or among the best.

        `hit_on_path` is given that all before it were the best; `hit_below_sibling` given that all were but the
        last, which was another of the `width` best. None: no such anchor.
        """
        rank_AD = self.rank_AD
        known_AD, hit_AD = rank_AD != BEYOND, rank_AD == 0
        return {
            "anchors": known_AD.sum(0).tolist(),
            "hit": _shares(hit_AD, known_AD),
            "hit_on_path": _shares(hit_AD, known_AD & self._on_path()),
            "hit_below_sibling": _shares(hit_AD, known_AD & self._below_sibling()),
            "in_best": {str(r): _shares((rank_AD >= 0) & (rank_AD < r), known_AD) for r in RANKS},
        }

    def top_path(self) -> dict[str, Any]:
        """How far to trust the path of best candidates: beside its siblings, and against the target."""
        known_AD, hit_AD = self.rank_AD != BEYOND, self.rank_AD == 0
        on_path, below = (
            _shares(hit_AD[:, 1:].reshape(-1, 1), (known_AD & given)[:, 1:].reshape(-1, 1))[0]
            for given in (self._on_path(), self._below_sibling())
        )
        near_A = self.gap_A.abs() <= NEAR_NATS
        return {
            "hit_on_path": on_path,
            "hit_below_sibling": below,
            "gap_anchors": len(self.gap_A),
            "gap_mean_nats": float(self.gap_A.mean()),
            "gap_median_nats": float(self.gap_A.median()),
            "near_frac": float(near_A.double().mean()),
        }

    def _on_path(self) -> Tensor:
        """Whether all true tokens before a depth are the best candidates."""
        return F.pad((self.rank_AD == 0).cumprod(1)[:, :-1], (1, 0), value=1).bool()

    def _below_sibling(self) -> Tensor:
        """Whether the true token before a depth is the first that is not the best, but one of the `width` best."""
        left_AD = self._on_path() & (self.rank_AD > 0) & (self.rank_AD < self.width)
        return F.pad(left_AD[:, :-1], (1, 0), value=False)


def _shares(event_AD: Tensor, given_AD: Tensor) -> list[float | None]:
    """Per column, how often `event` holds where `given` does."""
    counts = zip((event_AD & given_AD).sum(0).tolist(), given_AD.sum(0).tolist(), strict=True)
    return [hits / total if total else None for hits, total in counts]


@torch.inference_mode()
def score_head(
    target: Decoder,
    head: DraftHead,
    documents: Sequence[Document],
    budgets: Sequence[str],
    tree: TreeConfig,
    *,
    num_gaps: int = NUM_GAPS,
    progress: bool = False,
) -> HeadScore:
    """Teacher-forced rounds on what the target wrote in `documents`, for every tree of `make_trees`.

    Where it wrote greedily they are the rounds of greedy decoding; a sampled text leaves the likely path more often,
    and its rounds are shorter.
    """
    trees = make_trees(budgets, tree, head.head_config.depth)
    starts = [0, *accumulate(sum(e - s for s, e in answer_spans(document)) for document in documents)]
    picked = np.zeros(starts[-1], dtype=bool)
    picked[np.linspace(0, starts[-1] - 1, min(num_gaps, starts[-1])).astype(int)] = True
    scorer = _Scorer(target, head, trees, tree)
    rows = zip(documents, pairwise(starts), strict=True)
    bar = tqdm(rows, total=len(documents), desc="scoring", unit="answer", disable=not progress)
    return HeadScore.join([scorer.score(document, picked[first:last]) for document, (first, last) in bar])


@torch.no_grad()
def is_greedy(target: Decoder, document: Document) -> bool:
    """Whether the target's own first choices are what it wrote, but for a few near ties."""
    batch = _whole(document.tokens, target.embedding.device)
    choice_T = target.logits(target(batch, _make_pages(target, len(document.tokens))).hidden_TM).argmax(-1)
    agrees = (choice_T[:-1] == batch.token_T[1:]).cpu().numpy()[document.written[1:]]
    return bool(agrees.mean() >= GREEDY_SHARE) if len(agrees) else False


def answer_spans(document: Document) -> list[tuple[int, int]]:
    """Where the target wrote: [start, end). The token before the start is the first anchor, so there must be one."""
    edges = np.flatnonzero(np.diff(document.written, prepend=False, append=False)).tolist()
    spans = ((max(start, 1), end) for start, end in zip(edges[::2], edges[1::2], strict=True))
    return [(start, end) for start, end in spans if start < end]


class _Scorer:
    def __init__(self, target: Decoder, head: DraftHead, trees: Mapping[str, TreeConfig], tree: TreeConfig) -> None:
        self.target, self.head, self.trees, self.width = target, head, trees, tree.width
        self.depth = draft_depth(tree, head.head_config.depth)
        # One set of candidates serves all trees and the ranks. A shortlist must stay as it is: it shapes the scores.
        self.offer = replace(tree, width=max(tree.width, min(RANKS[-1], tree.shortlist or RANKS[-1])))
        self.chain = TreeConfig(budget=self.depth + 1, width=1)
        vocab, most = target.config.vocab_size, max(t.budget for t in trees.values())
        edges = most * (tree.shortlist or vocab) if head.edge is not None else 0
        self.batch = max(1, MAX_FLOATS // max(self.depth * vocab, edges))

    def score(self, document: Document, picked: np.ndarray) -> HeadScore:
        """`picked` says at which anchors the target scores the top path."""
        reading = Reading(self.target, self.head, document.tokens)
        spans = answer_spans(document)
        anchors = np.concatenate([np.arange(start - 1, end - 1) for start, end in spans])
        ends = np.concatenate([np.full(end - start, end) for start, end in spans])
        parts = [
            self._score_anchors(reading, *(torch.from_numpy(x[i : i + self.batch]) for x in (anchors, ends, picked)))
            for i in range(0, len(anchors), self.batch)
        ]
        accepted = {name: torch.cat([part[0][name] for part in parts]).tolist() for name in self.trees}
        stops = [0, *accumulate(end - start for start, end in spans)]
        return HeadScore(
            rounds={name: [list(walk(table[a:b])) for a, b in pairwise(stops)] for name, table in accepted.items()},
            rank_AD=torch.cat([part[1] for part in parts]),
            gap_A=torch.cat([part[2] for part in parts]),
            width=self.width,
        )

    def _score_anchors(
        self, reading: Reading, anchor_B: Tensor, end_B: Tensor, picked_B: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """On the host: accepted lengths per tree, ranks, gaps."""
        at_B, stop_B = anchor_B.to(reading.token_T.device), end_B.to(reading.token_T.device)
        candidates = self.head.candidates(reading.draft(at_B)[:, : self.depth], self.target, self.offer)
        coming_BD = coming_tokens(reading.token_T, at_B, stop_B, self.depth)
        root_B = reading.token_T[at_B]
        accepted = {
            name: follow(build_tree(root_B, candidates, tree, self.depth), coming_BD).cpu()
            for name, tree in self.trees.items()
        }
        gap_B = torch.empty(0)
        if picked_B.any():
            chain = build_tree(root_B, candidates, self.chain, self.depth)
            gap_B = self._gaps(reading, at_B, stop_B, chain, picked_B.nonzero()[:, 0].to(at_B.device))
        return accepted, true_ranks(candidates, root_B, coming_BD).cpu(), gap_B

    def _gaps(self, reading: Reading, at_B: Tensor, stop_B: Tensor, chain: DraftTree, row_R: Tensor) -> Tensor:
        """log q - log p of the top paths of some rows, cut where the text ends."""
        assert chain.score_BN is not None
        length_R1 = (stop_B - at_B - 1)[row_R, None].clamp(max=self.depth)
        logp_RD = reading.logprob(at_B[row_R], chain.token_BN[row_R, 1:]).cumsum(1)
        logq_RN = chain.score_BN[row_R]
        return (logq_RN.gather(1, length_R1) - logp_RD.gather(1, length_R1 - 1))[:, 0].cpu()


def coming_tokens(token_T: Tensor, anchor_B: Tensor, end_B: Tensor, depth: int) -> Tensor:
    """The tokens behind each anchor, (B, D); BEYOND from the end on."""
    index_BD = anchor_B[:, None] + torch.arange(1, depth + 1, device=token_T.device)
    return torch.where(index_BD < end_B[:, None], token_T[index_BD.clamp(max=len(token_T) - 1)], BEYOND)


def follow(tree: DraftTree, coming_BD: Tensor) -> Tensor:
    """How many of the coming tokens a path of each tree spells, (B)."""
    node_B = length_B = torch.zeros_like(coming_BD[:, 0])
    for depth in range(1, tree.max_depth + 1):
        child_BN = (tree.parent_BN == node_B[:, None]) & (tree.token_BN == coming_BD[:, depth - 1, None])
        child_BN &= tree.depth_BN == depth
        found_B = child_BN.any(1)
        node_B = torch.where(found_B, child_BN.int().argmax(1), node_B)
        length_B = length_B + found_B
    return length_B


def true_ranks(candidates: Candidates, root_B: Tensor, coming_BD: Tensor) -> Tensor:
    """Place of each coming token among the candidates that its true parent offers, (B, D)."""
    parent_BD = torch.cat((root_B[:, None], coming_BD[:, :-1]), dim=1).clamp(min=0)
    ranks = []
    for i in range(coming_BD.shape[1]):
        token_B1K, _ = candidates.children(i + 1, parent_BD[:, i : i + 1], RANKS[-1])
        found_BK = token_B1K[:, 0] == coming_BD[:, i : i + 1]
        ranks.append(torch.where(found_BK.any(1), found_BK.int().argmax(1), ABSENT))
    return torch.where(coming_BD == BEYOND, BEYOND, torch.stack(ranks, dim=1))


def walk(accepted: Sequence[int]) -> Iterator[int]:
    """From the accepted length at every anchor of an answer to those of its rounds. The end cuts the last one."""
    at = 0
    while at < len(accepted):
        kept = min(accepted[at] + 1, len(accepted) - at)
        yield kept - 1
        at += kept
