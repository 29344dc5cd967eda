"""Draft trees as parent pointers, with ancestor bitmasks for attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def limited(self, budget_B: Tensor, width_B: Tensor) -> DraftTree:
        """Return the trees cut to at most `budget_B` nodes and `width_B` children per node. A limit of 0 counts as 1.

        Nodes are ordered best first, so the best nodes stay, and with them their parents.
        """
        node_N = torch.arange(self.token_BN.shape[1], device=self.token_BN.device)
        sibling_BNN = self.parent_BN[:, :, None] == self.parent_BN[:, None]
        # The root is its own parent, but not its own child.
        rank_BN = (sibling_BNN & (node_N[:, None] > node_N) & (node_N > 0)).sum(-1)
        fits_BN = (rank_BN < width_B.clamp(min=1)[:, None]) & (node_N < self.size_B[:, None])
        kept_BN = (self.ancestor_BNW & ~pack_bits(fits_BN)[:, None] == 0).all(-1)
        kept_BN &= kept_BN.cumsum(1) <= budget_B.clamp(min=1)[:, None]
        size_B, place_BN = kept_BN.sum(1), kept_BN.cumsum(1) - 1
        order_BN = (~kept_BN).int().sort(stable=True).indices
        if order_BN.device.type == "cpu":  # no sync here, and fewer nodes save time
            order_BN = order_BN[:, : int(size_B.max())]
        return DraftTree.from_parents(
            token_BN=self.token_BN.gather(1, order_BN),
            parent_BN=place_BN.gather(1, self.parent_BN.gather(1, order_BN)).clamp(min=0),
            size_B=size_B,
            max_depth=min(self.max_depth, order_BN.shape[1] - 1),
            score_BN=None if self.score_BN is None else self.score_BN.gather(1, order_BN),
        )

    def visible_BNN(self) -> Tensor:
        """Return the mask as booleans: entry (i, j) is true when node i attends to node j."""
        return unpack_bits(self.ancestor_BNW, self.token_BN.shape[1])

    def validate(self) -> None:
        """Assert every invariant of the class. For tests and debugging: it reads the tensors."""
        num_nodes = self.token_BN.shape[1]
        node_N = torch.arange(num_nodes, device=self.token_BN.device)
        real_BN = node_N < self.size_B[:, None]
        child_BN = real_BN & (node_N > 0)
        parent_BN = self.parent_BN

        assert ((self.size_B >= 1) & (self.size_B <= num_nodes)).all(), "size out of range"
        assert torch.where(child_BN, (parent_BN >= 0) & (parent_BN < node_N), parent_BN == node_N).all(), (
            "a parent must come before its child; root and padding are their own"
        )
        above_BN = self.depth_BN.gather(1, parent_BN)
        assert (self.depth_BN == torch.where(child_BN, above_BN + 1, 0)).all(), "depth is not the parent's plus one"
        assert (self.depth_BN <= self.max_depth).all(), "deeper than max_depth"

        own_NW = pack_bits(torch.eye(num_nodes, dtype=torch.bool, device=self.token_BN.device))
        inherited_BNW = torch.where(child_BN[..., None], _rows(self.ancestor_BNW, parent_BN), 0)
        assert self.ancestor_BNW.dtype == torch.int32
        assert (self.ancestor_BNW == inherited_BNW | own_NW).all(), "mask is not the parent's row plus the own bit"

        same_BNN = (parent_BN[:, :, None] == parent_BN[:, None]) & (self.token_BN[:, :, None] == self.token_BN[:, None])
        both_BNN = child_BN[:, :, None] & child_BN[:, None] & (node_N[:, None] < node_N)
        assert not (same_BNN & both_BNN).any(), "siblings carry the same token"
        if self.score_BN is not None:
            rises_BN = self.score_BN > self.score_BN.gather(1, parent_BN)
            assert not (rises_BN & child_BN).any(), "a child outranks its parent"

    def show(
        self, decode: Callable[[int], str] | None = None, row: int = 0, path: Collection[int] | None = None
    ) -> str:
        """Draw one tree of the batch with its scores; the nodes of `path` are marked."""
        size = int(self.size_B[row])
        scores = None if self.score_BN is None else self.score_BN[row, :size].tolist()
        return draw(self.token_BN[row, :size].tolist(), self.parent_BN[row, :size].tolist(), scores, path or (), decode)


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


def draw(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float] | None = None,
    path: Collection[int] = (),
    decode: Callable[[int], str] | None = None,
) -> str:
    """Return a tree as text, one node per line: token, score, and a mark on the nodes of `path`."""
    children = children_of(parents)

    def label(node: int) -> str:
        name = repr(decode(tokens[node])) if decode else str(tokens[node])
        score = "" if scores is None else f"  {scores[node]:.2f}"
        return f"{name}{score}{'  ✓' if node in path else ''}"

    lines = [label(0)]

    def descend(node: int, indent: str) -> None:
        for child in children[node]:
            is_last = child == children[node][-1]
            lines.append(f"{indent}{'└─ ' if is_last else '├─ '}{label(child)}")
            descend(child, indent + ("   " if is_last else "│  "))

    descend(0, "")
    return "\n".join(lines)


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
