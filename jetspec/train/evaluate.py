"""Teacher-forced scores of a head: rounds on text that the target wrote, without decoding it again.

On the target's own greedy text a round accepts the longest path of its tree that equals the next tokens, and commits
one more. So the head drafts at every position of an answer at once, and the rounds follow from that table.
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

from jetspec.config import TreeConfig
from jetspec.data.corpus import Document, answer_spans
from jetspec.models.decoder import Decoder
from jetspec.models.heads import Head
from jetspec.progress import progress_bar
from jetspec.train.reading import BEYOND, RANKS, READINGS, Reading, first_choices, next_tokens
from jetspec.tree import DraftTree

NEAR_NATS = 5.0
"""Largest difference between the log-probabilities of head and target for a top path that counts as near."""
GREEDY_SHARE = 0.95
"""Least share of first choices in greedy text. Sampled text has far fewer."""
NUM_GAPS = 64
"""Anchors at which the target scores the top path."""
MAX_FLOATS = 1 << 28
"""Most numbers in one tensor. It bounds the anchors that are drafted at once."""


def make_trees(budgets: Sequence[str], tree: TreeConfig, reach: int) -> dict[str, TreeConfig]:
    """Trees by name: `chain`, or a number of nodes. Other settings are those of `tree`."""

    def make(name: str) -> TreeConfig:
        if name == "chain":
            return replace(tree, width=1, budget=min(tree.depth or reach, reach) + 1)
        if not name.isdecimal():
            raise ValueError(f"budget is {name!r}; give numbers of nodes, or chain")
        return replace(tree, budget=int(name))

    return {name: make(name) for name in budgets}


@dataclass(frozen=True)
class HeadScore:
    """Results of a head on some answers, with A anchors and D depths."""

    rounds: dict[str, list[list[int]]]
    """Accepted length of every round, by tree and answer."""
    rank_AD: Tensor
    """Rank of the true token among the candidates of its true parent, best 0; ABSENT; BEYOND."""
    gap_A: Tensor
    """log q - log p of the top path, for a sample of anchors."""
    width: int

    @classmethod
    def join(cls, scores: Sequence[HeadScore]) -> HeadScore:
        """The score of all answers together."""
        return cls(
            rounds={name: [r for score in scores for r in score.rounds[name]] for name in scores[0].rounds},
            rank_AD=torch.cat([score.rank_AD for score in scores]),
            gap_A=torch.cat([score.gap_A for score in scores]),
            width=scores[0].width,
        )

    @property
    def tokens_per_round(self) -> dict[str, float]:
        """Mean over all rounds. The last round of an answer counts the tokens up to its end."""
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
        """Per depth, counted from 1: share of anchors with the true token as the best candidate, or among the best.

        `hit_on_path` is conditional on best candidates at all depths before; `hit_below_sibling` on a sibling among
        the `width` best at the depth before. None: no such anchor.
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
        """Quality of the path of best candidates, compared with its siblings and with the target."""
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
            "gaps_nats": [round(gap, 3) for gap in self.gap_A.tolist()],
        }

    def _on_path(self) -> Tensor:
        """True where all true tokens before a depth are the best candidates."""
        return F.pad((self.rank_AD == 0).cumprod(1)[:, :-1], (1, 0), value=1).bool()

    def _below_sibling(self) -> Tensor:
        """True where the true token before a depth is the first that is not the best, but among the `width` best."""
        left_AD = self._on_path() & (self.rank_AD > 0) & (self.rank_AD < self.width)
        return F.pad(left_AD[:, :-1], (1, 0), value=False)


def _shares(event_AD: Tensor, given_AD: Tensor) -> list[float | None]:
    """Share of `event` among `given`, per column."""
    counts = zip((event_AD & given_AD).sum(0).tolist(), given_AD.sum(0).tolist(), strict=True)
    return [hits / total if total else None for hits, total in counts]


@torch.inference_mode()
def score_head(
    target: Decoder,
    head: Head,
    documents: Sequence[Document],
    budgets: Sequence[str],
    tree: TreeConfig,
    *,
    num_gaps: int = NUM_GAPS,
    progress: bool = False,
) -> HeadScore:
    """Teacher-forced rounds on the target's text in `documents`, for every tree of `make_trees`.

    For greedy text they equal the rounds of greedy decoding. Sampled text leaves the likely path more often, and its
    rounds are shorter.
    """
    trees = make_trees(budgets, tree, head.head_config.draft_depth(tree.depth))
    starts = [0, *accumulate(sum(e - s for s, e in answer_spans(document)) for document in documents)]
    picked = np.zeros(starts[-1], dtype=bool)
    picked[np.linspace(0, starts[-1] - 1, min(num_gaps, starts[-1])).astype(int)] = True
    scorer = _Scorer(target, head, trees, tree)
    rows = zip(documents, pairwise(starts), strict=True)
    bar = progress_bar(rows, total=len(documents), desc="scoring", unit="answer", disable=not progress)
    return HeadScore.join([scorer.score(document, picked[first:last]) for document, (first, last) in bar])


def is_greedy(target: Decoder, document: Document) -> bool:
    """True if the target wrote its own first choices, up to a few near ties."""
    agrees = first_choices(target, document.tokens)[document.written[1:]]
    return bool(agrees.mean() >= GREEDY_SHARE) if len(agrees) else False


class _Scorer:
    def __init__(self, target: Decoder, head: Head, trees: Mapping[str, TreeConfig], tree: TreeConfig) -> None:
        self.target, self.head, self.trees, self.width = target, head, trees, tree.width
        self.depth = head.head_config.draft_depth(tree.depth)
        most = max(t.budget for t in trees.values())
        # one pass of the head for all trees and the ranks
        self.offer = replace(tree, budget=max(most, self.depth + 1))
        self.chain = TreeConfig(budget=self.depth + 1, width=1)
        self.read = READINGS[head.head_config.kind]
        self.batch = max(1, MAX_FLOATS // self.read.floats_per_anchor(head, self.offer))

    def score(self, document: Document, picked: np.ndarray) -> HeadScore:
        """The score of one document. The target scores the top path at the anchors `picked`."""
        reading = self.read(self.target, self.head, document.tokens)
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
            rounds={
                name: [list(rounds_of(table[a:b])) for a, b in pairwise(stops)] for name, table in accepted.items()
            },
            rank_AD=torch.cat([part[1] for part in parts]),
            gap_A=torch.cat([part[2] for part in parts]),
            width=self.width,
        )

    def _score_anchors(
        self, reading: Reading, anchor_B: Tensor, end_B: Tensor, picked_B: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Accepted lengths per tree, ranks and gaps, on the host."""
        at_B, stop_B = anchor_B.to(reading.token_T.device), end_B.to(reading.token_T.device)
        drafted = reading.draft(at_B, self.offer)
        next_BD = next_tokens(reading.token_T, at_B, stop_B, self.depth)
        accepted = {name: follow(drafted.tree(tree), next_BD).cpu() for name, tree in self.trees.items()}
        gap_B = torch.empty(0)
        if picked_B.any():
            row_R = picked_B.nonzero()[:, 0].to(at_B.device)
            gap_B = self._gaps(reading, at_B[row_R], stop_B[row_R])
        return accepted, drafted.ranks(next_BD).cpu(), gap_B

    def _gaps(self, reading: Reading, at_B: Tensor, stop_B: Tensor) -> Tensor:
        """log q - log p of the top paths up to the end of the text. q is the head's own, at draft temperature 1."""
        chain = reading.draft(at_B, replace(self.offer, draft_temperature=1)).tree(self.chain)
        assert chain.score_BN is not None
        length_B1 = (stop_B - at_B - 1)[:, None].clamp(max=self.depth)
        logp_BD = reading.logprob(at_B, chain.token_BN[:, 1:]).cumsum(1)
        return (chain.score_BN.gather(1, length_B1) - logp_BD.gather(1, length_B1 - 1))[:, 0].cpu()


def follow(tree: DraftTree, next_BD: Tensor) -> Tensor:
    """Length of the longest path of each tree that equals the next tokens, (B)."""
    node_B = length_B = torch.zeros_like(next_BD[:, 0])
    for depth in range(1, tree.max_depth + 1):
        child_BN = (tree.parent_BN == node_B[:, None]) & (tree.token_BN == next_BD[:, depth - 1, None])
        child_BN &= tree.depth_BN == depth
        found_B = child_BN.any(1)
        node_B = torch.where(found_B, child_BN.int().argmax(1), node_B)
        length_B = length_B + found_B
    return length_B


def rounds_of(accepted: Sequence[int]) -> Iterator[int]:
    """Accepted lengths of the rounds of an answer, from those at all anchors. The end of the text cuts the last one."""
    at = 0
    while at < len(accepted):
        kept = min(accepted[at] + 1, len(accepted) - at)
        yield kept - 1
        at += kept
