"""Draft trees as parent pointers with ancestor bitmasks for attention, the candidates that a head proposes for them,
and the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetspec.types import EdgeFactors, PathTerm

WORD = 32
"""Bits per word of an ancestor mask."""


@dataclass(frozen=True)
class DraftTree:
    """Batch of token trees, padded to N nodes, parents before children.

    Node 0 is the anchor. Nodes from `size_B` on are padding: token 0, depth 0, parent is the node itself. Padding
    attends only to itself (a softmax over no keys is NaN), and no real node attends to it.
    """

    token_BN: Tensor
    parent_BN: Tensor
    """int64; the root is its own parent."""
    depth_BN: Tensor
    """int64; the root has depth 0."""
    ancestor_BNW: Tensor
    """int32 words; bit j of row i: node i attends to node j. Includes the node itself."""
    size_B: Tensor
    max_depth: int
    """Upper bound of the depth, known on the host."""
    score_BN: Tensor | None = None
    """float32; ranking score of the draft, summed along the path. -inf on padding."""
    is_ngram_BN: Tensor | None = None
    """Nodes that only n-grams proposed, in trees that they were merged into."""

    @classmethod
    def from_parents(
        cls, token_BN: Tensor, parent_BN: Tensor, size_B: Tensor, max_depth: int, score_BN: Tensor | None = None
    ) -> DraftTree:
        """Compute depths and ancestors by pointer doubling: each step doubles the levels covered. No host sync.

        Nodes from `size_B` on become padding, whatever their values.
        """
        num_nodes = token_BN.shape[1]
        node_N = torch.arange(num_nodes, device=token_BN.device)
        real_BN = node_N < size_B[:, None]
        parent_BN = torch.where(real_BN, parent_BN, node_N)

        own_NW = pack_bits(torch.eye(num_nodes, dtype=torch.bool, device=token_BN.device))
        jump_BN, depth_BN = parent_BN, (parent_BN != node_N).long()
        ancestor_BNW = own_NW | own_NW[parent_BN]
        for _ in range(max(max_depth - 1, 0).bit_length()):
            depth_BN = depth_BN + depth_BN.gather(1, jump_BN)
            ancestor_BNW = ancestor_BNW | _rows(ancestor_BNW, jump_BN)
            jump_BN = jump_BN.gather(1, jump_BN)

        token_BN = torch.where(real_BN, token_BN, 0)
        if score_BN is not None:
            score_BN = torch.where(real_BN, score_BN, -torch.inf)
        return cls(token_BN, parent_BN, depth_BN, ancestor_BNW, size_B, max_depth, score_BN)

    @classmethod
    def root(cls, anchor_B: Tensor) -> DraftTree:
        """Return trees of the anchor alone: a round with them is a plain decoding step."""
        return cls.chain(anchor_B[:, None])

    @classmethod
    def chain(cls, token_BN: Tensor) -> DraftTree:
        """Return chains: the parent of each token is the previous one."""
        batch, num_nodes = token_BN.shape
        parent_N = torch.arange(-1, num_nodes - 1, device=token_BN.device).clamp(min=0)
        size_B = torch.full((batch,), num_nodes, device=token_BN.device)
        return cls.from_parents(token_BN, parent_N.expand(batch, -1), size_B, num_nodes - 1)

    def limited(self, budget_B: Tensor, width_B: Tensor, most: int | None = None) -> DraftTree:
        """Return the trees cut to at most `budget_B` nodes and `width_B` children per node. A limit of 0 counts as 1.

        Nodes are ordered best first, so the best nodes stay, and with them their parents. `most` bounds the budgets on
        the host.
        """
        node_N = torch.arange(self.token_BN.shape[1], device=self.token_BN.device)
        sibling_BNN = self.parent_BN[:, :, None] == self.parent_BN[:, None]
        # The root is its own parent, but not its own child.
        rank_BN = (sibling_BNN & (node_N[:, None] > node_N) & (node_N > 0)).sum(-1)
        fits_BN = (rank_BN < width_B.clamp(min=1)[:, None]) & (node_N < self.size_B[:, None])
        kept_BN = (self.ancestor_BNW & ~pack_bits(fits_BN)[:, None] == 0).all(-1)
        kept_BN &= kept_BN.cumsum(1) <= budget_B.clamp(min=1)[:, None]
        size_B, place_BN = kept_BN.sum(1), kept_BN.cumsum(1) - 1
        order_BN = (~kept_BN).int().sort(stable=True).indices[:, :most]
        if order_BN.device.type == "cpu":  # no sync here, and fewer nodes save time
            order_BN = order_BN[:, : int(size_B.max())]
        tree = DraftTree.from_parents(
            token_BN=self.token_BN.gather(1, order_BN),
            parent_BN=place_BN.gather(1, self.parent_BN.gather(1, order_BN)).clamp(min=0),
            size_B=size_B,
            max_depth=min(self.max_depth, order_BN.shape[1] - 1),
            score_BN=None if self.score_BN is None else self.score_BN.gather(1, order_BN),
        )
        is_ngram_BN = None if self.is_ngram_BN is None else self.is_ngram_BN.gather(1, order_BN)
        return replace(tree, is_ngram_BN=is_ngram_BN)

    def visible_BNN(self) -> Tensor:
        """Return the mask as booleans: entry (i, j) is true when node i attends to node j."""
        return unpack_bits(self.ancestor_BNW, self.token_BN.shape[1])


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Return the children of every node, in node order. The root and padding are children of no node."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent != node:
            children[parent].append(node)
    return children


def pack_bits(visible_BNN: Tensor) -> Tensor:
    """Pack booleans (..., N) into int32 words (..., ceil(N / 32)); bit j of the row is entry j."""
    num_bits = visible_BNN.shape[-1]
    padded = torch.nn.functional.pad(visible_BNN.long(), (0, -num_bits % WORD))
    bit = torch.arange(WORD, device=visible_BNN.device)
    value = torch.where(bit == WORD - 1, -1, 1) << bit  # the last bit of a word is its sign
    return (padded.unflatten(-1, (-1, WORD)) * value).sum(-1).to(torch.int32)


def unpack_bits(word_BNW: Tensor, num_bits: int) -> Tensor:
    """Inverse of `pack_bits`: int32 words to booleans (..., num_bits)."""
    bit = torch.arange(WORD, dtype=torch.int32, device=word_BNW.device)
    return (word_BNW[..., None] >> bit & 1).flatten(-2)[..., :num_bits].bool()


def _rows(x_BNW: Tensor, index_BN: Tensor) -> Tensor:
    """Return row index_BN[b, i] of x_BNW[b] for every i."""
    return x_BNW.gather(1, index_BN[..., None].expand(-1, -1, x_BNW.shape[-1]))


@dataclass(frozen=True)
class Acceptance:
    """Outcome of a round: the accepted path and the target's token after it."""

    path_BD1: Tensor
    """Node indices, anchor first, padded with the last accepted node. D is the tree's `max_depth`."""
    length_B: Tensor
    """Accepted draft tokens, 0 to D."""
    bonus_B: Tensor
    """The target's own next token: the next anchor."""
    token_BD1: Tensor
    """Committed tokens: the draft tokens of the path, then the bonus, repeated to the end of the row."""

    @classmethod
    def of(cls, tree: DraftTree, path_BD1: Tensor, length_B: Tensor, bonus_B: Tensor) -> Acceptance:
        draft_BD, bonus_B1 = tree.token_BN.gather(1, path_BD1[:, 1:]), bonus_B[:, None]
        step_D1 = torch.arange(path_BD1.shape[1], device=bonus_B.device)
        token_BD1 = torch.where(step_D1 < length_B[:, None], torch.cat((draft_BD, bonus_B1), dim=1), bonus_B1)
        return cls(path_BD1, length_B, bonus_B, token_BD1)


@dataclass(frozen=True)
class Candidates:
    """Proposals of a draft head: C tokens per depth with full-vocabulary log-probabilities (float32), best first.

    With an edge term they are in any order. Depth d, counted from 1, is row d - 1. A log-probability of -inf marks an
    absent candidate: it sorts last, and its token may be any valid id.
    """

    token_BDC: Tensor
    logprob_BDC: Tensor
    entropy_BD: Tensor | None = None
    edge: EdgeFactors | None = None
    path: PathTerm | None = None
    """In place of an edge term."""
    survival: Callable[[int, Tensor], Tensor] | None = None
    """Maps the depth of children and the tokens (B, W) of their parents to the log-probability (B, W) that any child
    is accepted."""

    @property
    def by_level(self) -> bool:
        """The children of a node depend on more than its depth and token, or on terms that no kernel computes."""
        return self.path is not None or self.survival is not None

    def children(self, depth: int, parent_BW: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the K = min(width, C) best tokens at `depth` for each parent token: token_BWK, logprob_BWK.

        Without edges all parents share one list. With edges each parent re-ranks the shortlist, which keeps its mass:
        log q(c|y) = z_c - logsumexp(z) + logsumexp(logprob) with z = logprob + edge, summed over the shortlist.
        """
        return self.expand(depth, parent_BW, width, None)[:2]

    def expand(
        self, depth: int, parent_BW: Tensor, width: int, state_BWS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `children`, and the states that they inherit, from those of their parents. None: there are none."""
        token_BC, logprob_BC = self.token_BDC[:, depth - 1], self.logprob_BDC[:, depth - 1]
        num_parents = parent_BW.shape[1]
        token_BWC = token_BC[:, None].expand(-1, num_parents, -1)
        logprob_BWC = logprob_BC[:, None].expand(-1, num_parents, -1)
        term_BWC = None
        if self.path is not None:
            assert state_BWS is not None
            vector_BWR, state_BWS = self.path.step(depth, parent_BW, state_BWS)
            term_BWC = vector_BWR.float() @ self.path.rows(token_BC).float().mT
        elif self.edge is not None:
            term_BWC = self.edge.score(depth, parent_BW, token_BC)
        if term_BWC is not None:
            token_BWC, logprob_BWC = _reranked(token_BWC, logprob_BWC, logprob_BWC + term_BWC)
        if self.survival is not None:
            logprob_BWC = logprob_BWC + self.survival(depth, parent_BW)[..., None]
        return token_BWC[..., :width], logprob_BWC[..., :width], state_BWS


def _reranked(token_BWC: Tensor, logprob_BWC: Tensor, z_BWC: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probabilities by falling logits z, scaled to the mass of `logprob_BWC`.

    One call for both sums: equal rows give equal bits, so a term of 0 changes nothing. The clamp keeps a depth without
    candidates at -inf instead of NaN.
    """
    mass_2BW = torch.stack((logprob_BWC, z_BWC)).logsumexp(-1).clamp(min=torch.finfo(torch.float32).min)
    logprob_BWC, order_BWC = (z_BWC - (mass_2BW[1] - mass_2BW[0])[..., None]).sort(descending=True, stable=True)
    return token_BWC.gather(-1, order_BWC), logprob_BWC
