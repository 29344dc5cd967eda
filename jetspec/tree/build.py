"""Construction of draft trees from the candidates of a head.

`build_tree` runs on the device: level by level in torch, or as best-first search in `build_tree_triton`, one program
per request. `build_tree_reference` is the textbook search with a heap. All return the same tree to the last bit,
because all follow one total order of nodes: higher score, then smaller depth, then better parent, then better rank
among its siblings. (With edges the sums behind a score may round differently.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.ops.select import select
from jetspec.tree.draft_tree import Candidates, DraftTree


def build_tree(anchor_B: Tensor, candidates: Candidates, config: TreeConfig, depth: int) -> DraftTree:
    """Build trees of at most `config.budget` nodes and `depth` levels. Fixed shapes, no host sync.

    `optimal` takes the nodes of highest score. `paper` adds all children of a node when the node is popped, that is,
    the nodes whose *parents* have the highest score. Nodes are in the order in which best-first search adds them, so
    in either case a smaller budget gives a prefix of the larger tree.
    """
    if config.budget == 1 or candidates.by_level:  # the anchor alone, or terms that no kernel computes
        return _build_by_level(anchor_B, candidates, config, depth)
    if config.score != "accum_logp" and candidates.entropy_BD is None:
        raise ValueError(f"score {config.score!r} needs entropies, which this drafter lacks; use accum_logp")
    # The kernel ranks a shortlist for every possible parent; a long one is faster ranked for the actual parents.
    ranked = 0 if candidates.edge is None else candidates.token_BDC.shape[-1]
    return select("build_tree", _build_by_level, anchor_B, num_tokens=ranked)(anchor_B, candidates, config, depth)


def _build_by_level(anchor_B: Tensor, candidates: Candidates, config: TreeConfig, depth: int) -> DraftTree:
    """`build_tree` in torch: the best children of every level, then the best nodes of all levels.

    The merit of a node is its own score (`optimal`) or its parent's (`paper`); all else is shared. Merit never rises
    along a path, so the best nodes include their parents. A node at depth d has d ancestors, so at most `budget - d`
    of the best nodes are at depth d: keeping that many per level loses nothing.
    """
    max_depth = min(depth, config.budget - 1)
    zero_B1 = torch.zeros_like(anchor_B)[:, None]
    root_B1S = None if candidates.path is None else candidates.path.root_B1S
    levels = [_Level(anchor_B[:, None], zero_B1, zero_B1.float(), zero_B1.float(), root_B1S)]
    first = 0  # index of the level's first node among those of all levels
    for d in range(1, max_depth + 1):
        parents = levels[-1]
        levels.append(_next_level(parents, first, candidates, config, d))
        first += parents.token_BW.shape[1]
    return _best_nodes(levels, config.budget, max_depth)


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth, best merit first. Absent nodes are last, with merit and score -inf."""

    token_BW: Tensor
    parent_BW: Tensor
    """Index of the parent among the nodes of all levels."""
    score_BW: Tensor
    merit_BW: Tensor
    state_BWS: Tensor | None = None
    """States that the nodes inherit from their parents, for terms of paths."""


def _next_level(parents: _Level, first: int, candidates: Candidates, config: TreeConfig, depth: int) -> _Level:
    """Return the best children. Laid out by parent, then rank: a stable sort by merit keeps the node order."""
    token_BWK, logprob_BWK, state_BWS = candidates.expand(depth, parents.token_BW, config.width, parents.state_BWS)
    above_BW1 = parents.score_BW[..., None]
    score_BWK = above_BW1 + _increment(logprob_BWK, candidates.entropy_BD, config, depth)
    merit_BWK = score_BWK
    if config.expand == "paper":
        merit_BWK = torch.where(score_BWK > -torch.inf, above_BW1, score_BWK)
    level = _rank(token_BWK, score_BWK, merit_BWK, first, config.budget - depth)
    if state_BWS is None:
        return level
    parent_BW1 = (level.parent_BW - first)[..., None]
    return replace(level, state_BWS=state_BWS.gather(1, parent_BW1.expand(-1, -1, state_BWS.shape[-1])))


def _rank(token_BWK: Tensor, score_BWK: Tensor, merit_BWK: Tensor, first: int, count: int) -> _Level:
    """Return the `count` best children; `first` is the index of the first parent."""
    merit_BX, index_BX = _best_first(merit_BWK.flatten(1), count)
    return _Level(
        token_BW=token_BWK.flatten(1).gather(1, index_BX),
        parent_BW=first + index_BX // token_BWK.shape[-1],
        score_BW=score_BWK.flatten(1).gather(1, index_BX),
        merit_BW=merit_BX,
    )


def _increment(logprob_BWK: Tensor, entropy_BD: Tensor | None, config: TreeConfig, depth: int) -> Tensor:
    """Return the difference between a node's score and its parent's.

    The entropy score is summed along the path as well. This is our reading of the paper's entropy-guided score: the
    entropy of a node's depth alone could rise along a path, and the best nodes would then lack their parents.
    """
    step_BWK = logprob_BWK
    if config.score != "accum_logp":
        assert entropy_BD is not None
        entropy_B11 = entropy_BD[:, depth - 1, None, None]
        step_BWK = torch.where(logprob_BWK > -torch.inf, -entropy_B11, logprob_BWK)
        if config.score == "hybrid":
            step_BWK = logprob_BWK - config.entropy_weight * entropy_B11
    return _never_up(step_BWK)


def _never_up(step: Tensor) -> Tensor:
    """Clamp to at most 0, so that rounding cannot rank a child above its parent. NaN, which would sort first, becomes
    -inf."""
    return step.clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _best_nodes(levels: list[_Level], budget: int, max_depth: int) -> DraftTree:
    """Return the tree of the nodes of highest merit. Levels are joined in order, so of equals the shallower wins."""
    merit_BX = torch.cat([level.merit_BW for level in levels], dim=1)
    merit_BN, index_BN = _best_first(merit_BX, budget)
    node_BN = torch.arange(merit_BN.shape[1], device=merit_BN.device).expand_as(index_BN)
    place_BX = torch.zeros_like(merit_BX, dtype=torch.long).scatter(1, index_BN, node_BN)

    def pick(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1).gather(1, index_BN)

    return DraftTree.from_parents(
        token_BN=pick([level.token_BW for level in levels]),
        parent_BN=place_BX.gather(1, pick([level.parent_BW for level in levels])),
        size_B=(merit_BN > -torch.inf).sum(1),
        max_depth=max_depth,
        score_BN=pick([level.score_BW for level in levels]),
    )


def _best_first(value_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values and their indices, the earlier of equals first, unlike `topk`."""
    value_BX, index_BX = value_BX.sort(dim=1, descending=True, stable=True)
    return value_BX[:, :count], index_BX[:, :count]


class GrowingTree:
    """Tree built level by level, for drafters that run on their own drafts (EAGLE-2): a beam search with memory.

    Every level has a frontier, its `width` best nodes. The drafter gives the best children of each frontier node; all
    of them become candidates, and the best of them the next frontier. The final tree holds the best candidates of all
    levels, which include their parents, because a score never rises along a path. Fixed shapes, no host sync.
    """

    def __init__(self, anchor_B: Tensor, width: int, budget: int) -> None:
        self.width, self.budget = width, budget
        zero_B1 = torch.zeros_like(anchor_B)[:, None]
        self.levels = [_Level(anchor_B[:, None], zero_B1, zero_B1.float(), zero_B1.float())]

    @property
    def frontier_BW(self) -> Tensor:
        """Tokens of the nodes to expand next, best first."""
        return self.levels[-1].token_BW[:, : self.width]

    def extend(self, token_BWK: Tensor, logprob_BWK: Tensor) -> Tensor:
        """Add children of the frontier, best first for each of its nodes.

        Returns the index of each new frontier node's parent in the old frontier, (B, W).
        """
        above, depth = self.levels[-1], len(self.levels)
        first = sum(level.token_BW.shape[1] for level in self.levels[:-1])
        score_BWK = above.score_BW[:, : self.width, None] + _never_up(logprob_BWK)
        level = _rank(token_BWK, score_BWK, score_BWK, first, max(self.width, self.budget - depth))
        self.levels.append(level)
        return level.parent_BW[:, : self.width] - first

    def tree(self, budget: int | None = None) -> DraftTree:
        """Return the tree of the `budget` best candidates so far. Default: the budget of the constructor, the most."""
        budget = self.budget if budget is None else budget
        return _best_nodes(self.levels, budget, min(len(self.levels), budget) - 1)


class _Node(NamedTuple):
    """Node of the reference. The order of nodes is the order of these tuples; the smallest is the best."""

    cost: float
    """Minus the score."""
    depth: int
    parent: _Node | None
    rank: int
    token: int


def build_tree_reference(
    anchor: int,
    children: Callable[[int, int], tuple[list[int], list[float]]],
    config: TreeConfig,
    depth: int,
    entropy: list[float] | None = None,
) -> DraftTree:
    """Build the tree of one request by best-first search with a heap: slow and obvious, the oracle of the others.

    `children(depth, parent_token)` returns tokens and log-probabilities, best first; `entropy[d - 1]` is of depth d.
    """

    def step(logprob: float, d: int) -> np.float32:
        if config.score == "accum_logp":
            return np.float32(logprob)
        assert entropy is not None
        if config.score == "hybrid":
            return np.float32(logprob) - np.float32(config.entropy_weight) * np.float32(entropy[d - 1])
        return -np.float32(entropy[d - 1])

    def family(node: _Node) -> list[_Node]:
        if node.depth == depth:
            return []
        d = node.depth + 1
        tokens, logprobs = children(d, node.token)
        return [
            _Node(-float(np.float32(-node.cost) + min(step(logprob, d), np.float32(0))), d, node, rank, token)
            for rank, (token, logprob) in enumerate(zip(tokens[: config.width], logprobs, strict=False))
            if logprob > -np.inf
        ]

    root = _Node(0.0, 0, None, 0, anchor)
    heap = [root]
    tree = [root] if config.expand == "paper" else []
    while heap and len(tree) < config.budget:
        node = heapq.heappop(heap)
        found = family(node)
        for child in found:
            heapq.heappush(heap, child)
        tree += found[: config.budget - len(tree)] if config.expand == "paper" else [node]

    place = {node: i for i, node in enumerate(tree)}
    return DraftTree.from_parents(
        token_BN=torch.tensor([[node.token for node in tree]]),
        parent_BN=torch.tensor([[place[node.parent or root] for node in tree]]),
        size_B=torch.tensor([len(tree)]),
        max_depth=min(depth, config.budget - 1),
        score_BN=torch.tensor([[-node.cost for node in tree]], dtype=torch.float32),
    )
