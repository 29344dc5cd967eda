"""N-grams in draft trees: earlier occurrences of the end of a text, and what followed them, as nodes.

A *match* is an earlier position whose last tokens equal the end of the text. The tokens behind it are a *chain*. Each
has a *hit rate*, its probability once those before it are accepted, learned from what the target chose after earlier
matches of that length, at that depth, in the same text. Fixed shapes, no host sync.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetspec.ops.select import operation
from jetspec.tree.draft_tree import Acceptance, DraftTree, pack_bits

MATCHES = 4
"""Chains per text."""
SHORTEST, LONGEST = 2, 8
"""Tokens of a match."""
MAX_CHAIN = 16
"""Most tokens of a chain."""
LENGTHS, BUCKETS = LONGEST - SHORTEST + 1, 5
"""Hit rates of a text, by length of the match and depth: 1, 2, 3 to 4, 5 to 8, 9 to 16."""
PRIOR_MISSES, PRIOR_TRIALS = 3.0, 8.0
"""Prior rate: a chain that agrees with the text on n tokens, those of the match included, hits as often as n times out
of n + `PRIOR_MISSES`. It counts as much as `PRIOR_TRIALS` trials."""
MEMORY = 0.99
"""Weight of a count after each later trial of the same rate."""


class NgramTable:
    """Tokens of each row, and what is known of its hit rates.

    A text starts behind `corpus_len` tokens of other texts, which may be matched as well. -1: no token.
    """

    def __init__(self, num_rows: int, row_len: int, device: torch.device, corpus_len: int = 0) -> None:
        self.corpus_len = corpus_len
        self.text_RT = torch.full((num_rows, corpus_len + row_len), -1, dtype=torch.int32, device=device)
        self.count_R2LX = torch.zeros(num_rows, 2, LENGTHS, BUCKETS, device=device)
        """Trials and hits by length of the match and bucket of the depth, without the prior."""

    def enter(self, row: int, token_T: Tensor, corpus_T: Tensor | None = None) -> None:
        """Starts a text behind the last tokens of others."""
        begin = self.corpus_len - (0 if corpus_T is None else len(corpus_T))
        self.text_RT[row, :begin] = -1  # an earlier request of the row may not share its texts
        if corpus_T is not None:
            self.text_RT[row, begin : self.corpus_len] = corpus_T
        self.text_RT[row, self.corpus_len : self.corpus_len + len(token_T)] = token_T
        self.count_R2LX[row].zero_()

    def end(self, last_B: Tensor) -> Tensor:
        """Returns the places of last tokens at positions `last_B` of their texts."""
        return last_B + self.corpus_len if self.corpus_len else last_B


@dataclass(frozen=True)
class Matches:
    """The longest matches of each text; of equals, the most recent."""

    token_BKD: Tensor
    """int64; the chains. One that reaches the end of the text goes on with its own beginning."""
    rate_BKD: Tensor
    """float32; probability that a token is the target's choice, if those before it are. 0: there is no match."""
    length_BK: Tensor
    """int64; tokens that match, at most `LONGEST`. 0: there is no match."""


@operation(lambda table, *_: (table.text_RT,))
def match(table: NgramTable, row_B: Tensor, last_B: Tensor, depth: int) -> Matches:
    """Find the earlier occurrences of the end of each text, whose last token is at `last_B`, with chains of `depth`."""
    last_B = table.end(last_B)
    longest = int(last_B.max()) + 1 if last_B.device.type == "cpu" else None  # no sync here, and most rows are long
    text_BT = table.text_RT[:, :longest][row_B]
    size, position_T = text_BT.shape[1], torch.arange(text_BT.shape[1], device=row_B.device)
    window_BTL = torch.nn.functional.pad(text_BT, (LONGEST - 1, 0), value=-1).unfold(1, LONGEST, 1)
    end_B1L = window_BTL[torch.arange(len(row_B), device=row_B.device), last_B][:, None]
    length_BT = ((window_BTL == end_B1L) & (window_BTL >= 0)).flip(-1).cumprod(-1).sum(-1)
    is_match_BT = (position_T < last_B[:, None]) & (length_BT >= SHORTEST)
    key_BT = torch.where(is_match_BT, length_BT * size + position_T, 0)  # distinct, but for 0
    key_BK = torch.nn.functional.pad(key_BT, (0, MATCHES)).topk(MATCHES).values

    length_BK, end_BK1 = key_BK // size, (key_BK % size)[..., None]
    period_BK1 = (last_B[:, None, None] - end_BK1).clamp(min=1)
    index_BKD = end_BK1 + 1 + torch.arange(depth, device=row_B.device) % period_BK1
    token_BKD = text_BT.gather(1, index_BKD.minimum(last_B[:, None, None]).flatten(1)).view_as(index_BKD).long()

    trial_BKD, hit_BKD = _rates(length_BK, depth, table.count_R2LX[row_B])
    return Matches(token_BKD, torch.where(length_BK[..., None] > 0, hit_BKD / trial_BKD, 0), length_BK)


@operation(lambda table, *_: (table.text_RT,))
def append(table: NgramTable, row_B: Tensor, last_B: Tensor, token_BX: Tensor) -> None:
    """Write committed tokens behind the end of each text. Those past the new end are written over later."""
    position_BX = table.end(last_B)[:, None] + 1 + torch.arange(token_BX.shape[1], device=row_B.device)
    table.text_RT[row_B[:, None], position_BX] = token_BX.int()


@operation(lambda table, *_: (table.text_RT,))
def learn(table: NgramTable, row_B: Tensor, matches: Matches, tree: DraftTree, verdict: Acceptance) -> Tensor:
    """Count the chains' trials and hits: a token is tried if those before it are the target's choices, and hits if it
    is one as well. Return the accepted draft tokens of each request that only n-grams proposed."""
    step_X = torch.arange(verdict.token_BD1.shape[1], device=row_B.device)
    depth = min(matches.token_BKD.shape[2], len(step_X))
    is_chosen_BKD = matches.token_BKD[..., :depth] == verdict.token_BD1[:, None, :depth]
    is_known_BKD = (matches.length_BK > 0)[..., None] & (step_X[:depth] <= verdict.length_B[:, None, None])
    hit_BKD = (is_chosen_BKD & is_known_BKD).cumprod(-1)
    trial_BKD = is_known_BKD * torch.nn.functional.pad(hit_BKD[..., :-1], (1, 0), value=1)

    cell_BX = _cells(matches.length_BK, depth).flatten(1)
    old_B2X = table.count_R2LX[row_B].flatten(2)
    new_B2X = torch.zeros_like(old_B2X)
    for i, count_BKD in enumerate((trial_BKD, hit_BKD)):
        new_B2X[:, i].scatter_add_(1, cell_BX, count_BKD.flatten(1).float())
    table.count_R2LX[row_B] = (old_B2X * MEMORY ** new_B2X[:, :1] + new_B2X).view(-1, 2, LENGTHS, BUCKETS)

    if tree.is_ngram_BN is None:
        return torch.zeros_like(verdict.length_B)
    return (tree.is_ngram_BN.gather(1, verdict.path_BD1) & (step_X <= verdict.length_B[:, None])).sum(1)


def _rates(length_BK: Tensor, depth: int, count_B2LX: Tensor) -> tuple[Tensor, Tensor]:
    """Return the trials and hits of every token of a chain, with the prior, (B, K, D) each."""
    depth_D = torch.arange(1, depth + 1, device=length_BK.device)
    agreed_BKD = (length_BK[..., None] + depth_D - 1).float()
    prior_BKD = PRIOR_TRIALS * agreed_BKD / (agreed_BKD + PRIOR_MISSES)
    cell_BX = _cells(length_BK, depth).flatten(1)
    trial_BX, hit_BX = (count_BX.gather(1, cell_BX) for count_BX in count_B2LX.flatten(2).unbind(1))
    return PRIOR_TRIALS + trial_BX.view_as(prior_BKD), prior_BKD + hit_BX.view_as(prior_BKD)


def _cells(length_BK: Tensor, depth: int) -> Tensor:
    """Return the index of the rate of every token of a chain, by length and depth."""
    depth_D = torch.arange(1, depth + 1, device=length_BK.device)
    bucket_D = (depth_D[:, None] > 2 ** torch.arange(BUCKETS - 1, device=length_BK.device)).sum(1)
    return (length_BK[..., None] - SHORTEST).clamp(min=0) * BUCKETS + bucket_D


@operation(lambda tree, *_: (tree.token_BN,))
def merge(tree: DraftTree, matches: Matches, budget: int, width: int) -> DraftTree:
    """Return the best `budget` nodes of a head's trees and of chains, as one tree with at most `width` children each.

    Nodes of equal path are one node: its token is the target's choice if that of the head or of the likeliest chain
    is, as if they were independent. Order: higher score, smaller depth, nodes of the head, rank of the chain. Without a
    match it is the order of the head's tree, to the last bit.
    """
    present_BK = matches.length_BK > 0
    if tree.token_BN.device.type == "cpu" and not present_BK.any():
        return tree
    lifted_BN, on_BKN = _lift(tree, matches)
    B, N = lifted_BN.shape
    K, D = matches.token_BKD.shape[1:]
    depth_D = torch.arange(1, D + 1, device=lifted_BN.device)

    # Chains leave the head's tree below their last node in it, and each other at their first different token.
    reach_BK, leaf_BK = torch.where(on_BKN, tree.depth_BN[:, None], -1).max(-1)
    equal_BKKD = (matches.token_BKD[:, :, None] == matches.token_BKD[:, None]) & present_BK[:, None, :, None]
    equal_BKKD = equal_BKKD.cumprod(-1)
    first_BKD = equal_BKKD.argmax(2)
    step_BKD = (equal_BKKD * matches.rate_BKD[:, None]).amax(2).log()
    is_below_BKD = (depth_D > reach_BK[..., None]) & present_BK[..., None]
    is_new_BKD = is_below_BKD & (first_BKD == torch.arange(K, device=first_BKD.device)[:, None])
    score_BKD = lifted_BN.gather(1, leaf_BK)[..., None] + torch.where(is_below_BKD, step_BKD, 0).cumsum(-1)
    above_BKD = N + first_BKD.roll(1, -1) * D + depth_D - 2
    parent_BKD = torch.where(depth_D == reach_BK[..., None] + 1, leaf_BK[..., None], above_BKD)

    score_BM = torch.cat((lifted_BN, score_BKD.masked_fill(~is_new_BKD, -torch.inf).flatten(1)), 1)
    depth_BM = torch.cat((tree.depth_BN, depth_D.expand(B, K, D).flatten(1)), 1)
    by_depth_BM = depth_BM.sort(dim=1, stable=True).indices
    by_score_BM = score_BM.gather(1, by_depth_BM).sort(dim=1, descending=True, stable=True).indices
    order_BM = by_depth_BM.gather(1, by_score_BM)
    place_BM = order_BM.argsort(1)
    union = DraftTree.from_parents(
        token_BN=torch.cat((tree.token_BN, matches.token_BKD.flatten(1)), 1).gather(1, order_BM),
        parent_BN=place_BM.gather(1, torch.cat((tree.parent_BN, parent_BKD.flatten(1)), 1).gather(1, order_BM)),
        size_B=(score_BM > -torch.inf).sum(1),
        max_depth=max(tree.max_depth, D),
        score_BN=score_BM.gather(1, order_BM),
    )
    union = replace(union, is_ngram_BN=order_BM >= N)
    return union.limited(torch.full_like(tree.size_B, budget), torch.full_like(tree.size_B, width), most=budget)


def _lift(tree: DraftTree, matches: Matches) -> tuple[Tensor, Tensor]:
    """Return the scores of a head's nodes, raised where chains agree with them, and whether each node is on a chain."""
    assert tree.score_BN is not None
    K, D = matches.token_BKD.shape[1:]
    index_BKN = (tree.depth_BN - 1).clamp(0, D - 1)[:, None].expand(-1, K, -1)
    agrees_BKN = matches.token_BKD.gather(2, index_BKN) == tree.token_BN[:, None]
    agrees_BKN &= ((tree.depth_BN > 0) & (tree.depth_BN <= D))[:, None]
    agrees_BKN[..., 0] = True
    agrees_BKN &= (matches.length_BK > 0)[..., None]
    on_BKN = (tree.ancestor_BNW[:, None] & ~pack_bits(agrees_BKN)[:, :, None] == 0).all(-1)

    step_BN = tree.score_BN - tree.score_BN.gather(1, tree.parent_BN)
    rate_BN = torch.where(on_BKN & (tree.depth_BN > 0)[:, None], matches.rate_BKD.gather(2, index_BKN), 0).amax(1)
    prob_BN = step_BN.exp()
    raised_BN = (prob_BN + rate_BN - prob_BN * rate_BN).clamp(max=1).log() - step_BN
    raised_BN = torch.where(rate_BN > 0, raised_BN.clamp(min=0), 0)
    visible_BNN = tree.visible_BNN()
    lifted_BN = tree.score_BN + (visible_BNN.float() @ raised_BN[..., None])[..., 0]
    # Sums of different order may round a child above its parent.
    return torch.where(visible_BNN, lifted_BN[:, None], torch.inf).amin(-1), on_BKN
