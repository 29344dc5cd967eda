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
from jetspec.models.decoder import Decoder, DecoderStack
from jetspec.models.draft_head import HeadState
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.heads import Head
from jetspec.ops.select import force
from jetspec.progress import progress_bar
from jetspec.tree import DraftTree, walk
from jetspec.types import BatchLayout, ChoiceModel, KVPages, TreeBatch

RANKS = (1, 2, 4, 8, 16)
"""Numbers of best candidates for which the share of true tokens among them is reported."""
ABSENT, BEYOND = 1 << 30, -1
"""Ranks of a token that is not a candidate, and of a position beyond the end of the text."""
NEAR_NATS = 5.0
"""Largest difference between the log-probabilities of head and target for a top path that counts as near."""
GREEDY_SHARE = 0.95
"""Least share of first choices in greedy text. Sampled text has far fewer."""
NUM_GAPS = 64
"""Anchors at which the target scores the top path."""
MAX_FLOATS = 1 << 28
"""Most numbers in one tensor. It bounds the anchors that are drafted at once."""


def make_trees(budgets: Sequence[str], tree: TreeConfig, reach: int) -> dict[str, TreeConfig]:
    """Trees of a head alone by name: `chain`, or a number of nodes. Other settings are those of `tree`."""
    for name in budgets:
        if name != "chain" and not name.isdecimal():
            raise ValueError(f"budget is {name!r}; give numbers of nodes, or chain")
    depth, tree = min(tree.depth or reach, reach), replace(tree, ngrams=False)
    return {
        name: replace(tree, width=1, budget=depth + 1) if name == "chain" else replace(tree, budget=int(name))
        for name in budgets
    }


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
            **{name: _shares(hit_AD, known_AD & given_AD) for name, given_AD in self._conditions().items()},
            "in_best": {str(r): _shares((rank_AD >= 0) & (rank_AD < r), known_AD) for r in RANKS},
        }

    def top_path(self) -> dict[str, Any]:
        """Quality of the path of best candidates, compared with its siblings and with the target."""
        known_AD, hit_AD = self.rank_AD != BEYOND, self.rank_AD == 0
        shares = {
            name: _shares(hit_AD[:, 1:].reshape(-1, 1), (known_AD & given_AD)[:, 1:].reshape(-1, 1))[0]
            for name, given_AD in self._conditions().items()
        }
        near_A = self.gap_A.abs() <= NEAR_NATS
        return {
            **shares,
            "gap_anchors": len(self.gap_A),
            "gap_mean_nats": float(self.gap_A.mean()),
            "gap_median_nats": float(self.gap_A.median()),
            "near_frac": float(near_A.double().mean()),
            "gaps_nats": [round(gap, 3) for gap in self.gap_A.tolist()],
        }

    def _conditions(self) -> dict[str, Tensor]:
        """True where all true tokens before a depth are the best candidates, and where the one before it is the first
        that is not, but among the `width` best."""
        on_path_AD = F.pad((self.rank_AD == 0).cumprod(1)[:, :-1], (1, 0), value=1).bool()
        left_AD = on_path_AD & (self.rank_AD > 0) & (self.rank_AD < self.width)
        return {"hit_on_path": on_path_AD, "hit_below_sibling": F.pad(left_AD[:, :-1], (1, 0), value=False)}


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


class _Scorer:
    def __init__(self, target: Decoder, head: Head, trees: Mapping[str, TreeConfig], tree: TreeConfig) -> None:
        self.target, self.head, self.width = target, head, tree.width
        self.depth = depth = head.head_config.draft_depth(tree.depth)
        self.trees = {name: replace(each, depth=depth) for name, each in trees.items()}
        self.chain = TreeConfig(budget=depth + 1, width=1, depth=depth)
        width = max(tree.width, min(RANKS[-1], tree.shortlist or RANKS[-1]))
        most = max(depth + 1, *(each.budget for each in trees.values()))
        self.offer = replace(tree, budget=most, depth=depth, width=width)
        """The largest tree. The shortlist is that of all trees, because scores depend on it."""
        self.batch = max(1, MAX_FLOATS // self._floats_per_anchor())

    def _floats_per_anchor(self) -> int:
        """Numbers per anchor in the largest tensor of a draft."""
        head, vocab = self.head, self.head.config.vocab_size
        if isinstance(head, Eagle3Head):
            return max(self.depth, self.width) * head.head_config.draft_vocab_size
        return max(self.depth * vocab, self.offer.budget * (self.offer.shortlist or vocab) if head.edge else 0)

    def _offer(self, tree: TreeConfig) -> TreeConfig:
        """The draft from which a tree is built: one for all trees, or, with drafts step by step, one for each width."""
        return replace(self.offer, width=tree.width) if isinstance(self.head, Eagle3Head) else self.offer

    def score(self, document: Document, picked: np.ndarray) -> HeadScore:
        """The score of one document. The target scores the top path at the anchors `picked`."""
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
        root_B, next_BD = reading.token_T[at_B], next_tokens(reading.token_T, at_B, stop_B, self.depth)
        offers = {name: self._offer(tree) for name, tree in self.trees.items()}
        drafted = {offer: reading.draft(at_B, offer) for offer in dict.fromkeys(offers.values())}
        accepted = {
            name: follow(self.head.build(root_B, drafted[offers[name]], tree), next_BD).cpu()
            for name, tree in self.trees.items()
        }
        gap_B = torch.empty(0)
        if picked_B.any():
            row_R = picked_B.nonzero()[:, 0].to(at_B.device)
            gap_B = self._gaps(reading, at_B[row_R], stop_B[row_R])
        return accepted, reading.ranks(at_B, drafted.get(self.offer), next_BD).cpu(), gap_B

    def _gaps(self, reading: Reading, at_B: Tensor, stop_B: Tensor) -> Tensor:
        """log q - log p of the top paths up to the end of the text. q is the head's own, at draft temperature 1."""
        drafted = reading.draft(at_B, replace(self._offer(self.chain), draft_temperature=1))
        chain = self.head.build(reading.token_T[at_B], drafted, self.chain)
        assert chain.score_BN is not None
        length_B1 = (stop_B - at_B - 1)[:, None].clamp(max=self.depth)
        logp_BD = reading.logprob(at_B, chain.token_BN[:, 1:]).cumsum(1)
        return (chain.score_BN.gather(1, length_B1) - logp_BD.gather(1, length_B1 - 1))[:, 0].cpu()


class Reading:
    """A text with the K and V of target and head at every position.

    Each position is one page. So anchors share the pages before them, have their own pages from there on, and one
    forward serves them all.
    """

    def __init__(self, target: Decoder, head: Head, tokens: np.ndarray) -> None:
        self.target, self.head = target, head
        batch = whole(tokens, target.embedding.device)
        self.token_T, self.position_T = batch.token_T, batch.position_T
        self.target_pages = _make_pages(target, len(tokens))
        tap_TX = target(batch, self.target_pages, head.head_config.tap_layers).tap_TX
        assert tap_TX is not None
        self.tap_TX = tap_TX
        feature_TM = tap_TX.new_empty(len(tokens), head.feature_size) if head.feature_size else None
        self.state = HeadState(target, _make_pages(head, len(tokens)), feature_TM, head.context_weights())
        head.observe(tap_TX, batch, self.state)

    def draft(self, anchor_B: Tensor, tree: TreeConfig, choice: ChoiceModel | None = None) -> Any:
        """Drafts of the head at these positions after the text before them, for its `build`. Without a choice model it
        drafts greedy text."""
        (depth_N,), bits_1NW = self.head.nodes(tree)
        nodes, pages = self.place(anchor_B, depth_N, self.state.layers)
        features = self.state.feature_SM
        if bits_1NW is not None:
            nodes = replace(nodes, ancestor_BNW=bits_1NW.expand(len(anchor_B), -1, -1))
        if features is not None:
            features = F.pad(features, (0, 0, 0, len(nodes.token_T)))
        state = replace(self.state, layers=pages, feature_SM=features)
        greedy_B1 = self.tap_TX.new_full((len(anchor_B), 1), tree.draft_temperature, dtype=torch.float32)
        return self.head.draft(nodes, self.token_T[anchor_B], tree, state, choice or ChoiceModel(greedy_B1))

    def ranks(self, anchor_B: Tensor, drafted: Any, next_BD: Tensor) -> Tensor:
        """Rank of each next token among the candidates of its true parent, (B, D). `drafted` is of a block head."""
        parent_BD = torch.cat((self.token_T[anchor_B, None], next_BD[:, :-1]), dim=1).clamp(min=0)
        if isinstance(self.head, Eagle3Head):
            offered_BDK = self._unrolled(self.head, anchor_B, parent_BD)
        else:
            depths = range(next_BD.shape[1])
            offered_BDK = torch.cat([drafted.children(i + 1, parent_BD[:, i : i + 1], RANKS[-1])[0] for i in depths], 1)
        found_BDK = offered_BDK == next_BD[..., None]
        rank_BD = torch.where(found_BDK.any(-1), found_BDK.int().argmax(-1), ABSENT)
        return torch.where(next_BD == BEYOND, BEYOND, rank_BD)

    def _unrolled(self, head: Eagle3Head, anchor_B: Tensor, parent_BD: Tensor) -> Tensor:
        """The best tokens below each parent, (B, D, K), from the pass that training uses; none below the first token,
        which has no feature before it."""
        embedded, drafted = (head.embed(x, self.target)[None] for x in (self.token_T, parent_BD))
        visible_BT = (self.position_T > 0) & (self.position_T < anchor_B[:, None])
        tap, position, anchor, visible = (x[None] for x in (self.tap_TX, self.position_T, anchor_B, visible_BT))
        with force("reference"):
            states = head.forward_unrolled(embedded, tap, position, anchor, drafted, visible)[0]
        return head.best_tokens(states, RANKS[-1])[0].masked_fill((anchor_B == 0)[:, None, None], BEYOND)

    def logprob(self, anchor_B: Tensor, path_BD: Tensor) -> Tensor:
        """The target's log-probability of every token on paths that branch off after their anchors, (B, D)."""
        token_BD = torch.cat((self.token_T[anchor_B, None], path_BD[:, :-1]), dim=1)
        depth_D = torch.arange(token_BD.shape[1], device=token_BD.device)
        batch, pages = self.place(anchor_B, depth_D, self.target_pages)
        logits_TV = self.target.logits(self.target(replace(batch, token_T=token_BD.flatten()), pages).hidden_TM)
        return logits_TV.float().log_softmax(-1).gather(1, path_BD.reshape(-1, 1)).view_as(path_BD)

    def place(self, anchor_B: Tensor, depth_N: Tensor, pages: Sequence[KVPages]) -> tuple[TreeBatch, list[KVPages]]:
        """Nodes at these depths below their anchors, still without tokens, and the pages of the text extended by pages
        for them."""
        B, N, T, device = len(anchor_B), len(depth_N), len(self.token_T), anchor_B.device
        own_BN = T + torch.arange(B * N, device=device).view(B, N)
        index_P, anchor_B1 = torch.arange(T + N, device=device), anchor_B[:, None]
        page_BP = torch.where(index_P < anchor_B1, index_P, own_BN.gather(1, (index_P - anchor_B1).clamp(0, N - 1)))
        layout = BatchLayout(page_BP, anchor_B, torch.arange(B + 1, device=device) * N, page_size=1, max_queries=N)
        slot_T = own_BN.flatten()
        batch = TreeBatch(torch.zeros_like(slot_T), (anchor_B1 + depth_N).flatten(), slot_T, layout, None)
        padding = (0, 0, 0, 0, 0, 0, 0, B * N)
        return batch, [KVPages(F.pad(page.k, padding), F.pad(page.v, padding)) for page in pages]


def whole(tokens: np.ndarray, device: torch.device) -> TreeBatch:
    """A text as a batch of one request, with one page per position."""
    token_T = torch.as_tensor(tokens, dtype=torch.long, device=device)
    position_T = torch.arange(len(tokens), device=device)
    start_B1 = position_T.new_tensor([0, len(tokens)])
    layout = BatchLayout(position_T[None], position_T.new_zeros(1), start_B1, page_size=1, max_queries=len(tokens))
    return TreeBatch(token_T, position_T, position_T, layout, None)


def _make_pages(model: DecoderStack, count: int) -> list[KVPages]:
    c, like = model.config, model.norm.weight
    shape = (count, 1, c.num_kv_heads, c.head_dim)
    return [KVPages(like.new_empty(shape), like.new_empty(shape)) for _ in range(c.num_layers)]


@torch.no_grad()
def is_greedy(target: Decoder, document: Document) -> bool:
    """True if the target wrote its own first choices, up to a few near ties."""
    batch = whole(document.tokens, target.embedding.device)
    choice_T = target.logits(target(batch, _make_pages(target, len(document.tokens))).hidden_TM).argmax(-1)
    agrees = (choice_T[:-1] == batch.token_T[1:]).cpu().numpy()[document.written[1:]]
    return bool(agrees.mean() >= GREEDY_SHARE) if len(agrees) else False


def next_tokens(token_T: Tensor, anchor_B: Tensor, end_B: Tensor, depth: int) -> Tensor:
    """The tokens after each anchor, (B, D); BEYOND from the end on."""
    index_BD = anchor_B[:, None] + torch.arange(1, depth + 1, device=token_T.device)
    return torch.where(index_BD < end_B[:, None], token_T[index_BD.clamp(max=len(token_T) - 1)], BEYOND)


def follow(tree: DraftTree, next_BD: Tensor) -> Tensor:
    """Length of the longest path of each tree that equals the next tokens, (B)."""
    next_BN = F.pad(next_BD, (0, 1), value=BEYOND).gather(1, tree.depth_BN)
    return walk(tree, next_BN).length_B


def rounds_of(accepted: Sequence[int]) -> Iterator[int]:
    """Accepted lengths of the rounds of an answer, from those at all anchors. The end of the text cuts the last one."""
    at = 0
    while at < len(accepted):
        kept = min(accepted[at] + 1, len(accepted) - at)
        yield kept - 1
        at += kept
