"""The method: draft, build, verify, accept, commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.engine.drafter import Drafter, RoundState
from jetspec.engine.kv_cache import KVCache
from jetspec.models.decoder import Decoder, Hidden
from jetspec.tree import Acceptance, DraftTree, accept, accepted_tokens
from jetspec.types import TreeBatch


@dataclass(frozen=True)
class RoundResult:
    """What a round committed: row b of `token_BD1` holds `length_B[b]` draft tokens and the bonus."""

    tree: DraftTree
    verdict: Acceptance
    token_BD1: Tensor

    @property
    def packed_BD3(self) -> Tensor:
        """Lengths, sizes of the trees and tokens side by side: all that the host needs, in one piece."""
        return torch.cat((self.verdict.length_B[:, None], self.tree.size_B[:, None], self.token_BD1), 1)


class Round:
    """One speculative round for a batch of requests.

    Before and after it, for every request: the cache of the target, and that of the head, hold all committed
    tokens but the last, which is the anchor.
    """

    def __init__(self, target: Decoder, drafter: Drafter, cache: KVCache) -> None:
        self.target, self.drafter, self.cache = target, drafter, cache

    def __call__(self, state: RoundState) -> RoundResult:
        tree = self.tree(state)
        batch = self.cache.place(state.row_B, tree.token_BN, tree.depth_BN, tree.ancestor_BNW)
        out, logits_BNV = self.verify(batch, tree)
        verdict = accept(tree, logits_BNV, state.sampling, batch.layout.cached_len_B)
        self.commit(state, batch, out, verdict)
        return RoundResult(tree, verdict, accepted_tokens(tree, verdict))

    def tree(self, state: RoundState) -> DraftTree:
        """Draft and build, as far as the requests want it."""
        if state.is_plain:
            return DraftTree.root(state.anchor_B)
        tree = self.drafter.build(state, self.drafter.draft(state))
        return tree if state.limits is None else tree.limited(*state.limits)

    def verify(self, batch: TreeBatch, tree: DraftTree) -> tuple[Hidden, Tensor]:
        """The target's distribution after every node, from one pass over the tree."""
        out = self.target(batch, self.cache.target.layers, self.drafter.tap_layers)
        return out, self.target.logits(out.hidden_TM).unflatten(0, tree.token_BN.shape)

    def commit(self, state: RoundState, batch: TreeBatch, out: Hidden, verdict: Acceptance) -> None:
        """Keep the accepted path's K/V, show its tapped states to the drafter, and take the bonus as next anchor."""
        self.cache.compact(state.row_B, batch, verdict)
        self.cache.rows.anchor_R[state.row_B] = verdict.bonus_B
        if out.tap_TX is not None:
            B, D1 = verdict.path_BD1.shape
            tap_BNX = out.tap_TX.unflatten(0, (B, -1))
            tap_BD1X = tap_BNX.gather(1, verdict.path_BD1[..., None].expand(-1, -1, tap_BNX.shape[-1]))
            position, slot = self.cache.path_places(batch, D1)
            self.drafter.observe(tap_BD1X.flatten(0, 1), position.flatten(), slot.flatten())
