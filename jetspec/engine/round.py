"""One round of the method: draft, build, verify, accept, commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetspec.engine.chunk import PackedChunks
from jetspec.engine.drafter import Drafter, NoDrafter, RoundState
from jetspec.engine.kv_cache import KVCache
from jetspec.engine.logprobs import PathLogprobs
from jetspec.grammar.constraint import TreeMasks
from jetspec.models.decoder import Decoder, Hidden
from jetspec.tree import Acceptance, DraftTree, accept, append, forbid, penalize
from jetspec.types import TreeBatch

PLAIN = NoDrafter()


@dataclass(frozen=True)
class RoundResult:
    """Draft trees of a round and their accepted paths."""

    tree: DraftTree
    verdict: Acceptance
    by_ngrams_B: Tensor | None = None
    """Accepted draft tokens that only n-grams proposed. None: there are no n-grams."""
    logprobs: PathLogprobs | None = None

    @property
    def packed(self) -> Tensor:
        """Results for the host in one tensor, per request: accepted length, tree size, accepted tokens of n-grams
        alone if there are n-grams, committed tokens, and log-probabilities if any."""
        verdict, counts = self.verdict, [self.verdict.length_B, self.tree.size_B]
        if self.by_ngrams_B is not None:
            counts.append(self.by_ngrams_B)
        packed_BX = torch.cat((torch.stack(counts, 1), verdict.token_BD1), 1)
        return packed_BX if self.logprobs is None else torch.cat((packed_BX, self.logprobs.packed_BX), 1)


class Round:
    """One speculative round of a batch.

    Invariant before and after: the caches of target and head hold all committed tokens of a request but the last,
    which is the anchor.
    """

    def __init__(self, target: Decoder, drafter: Drafter, cache: KVCache) -> None:
        self.target, self.drafter, self.cache = target, drafter, cache

    def __call__(self, state: RoundState) -> RoundResult:
        drafter = self.drafter_of(state)
        drafted = drafter.draft(state)
        tree = self.build(state, drafter, drafted)
        batch = self.cache.place(state.row_B, tree.token_BN, tree.depth_BN, tree.ancestor_BNW)
        masks = TreeMasks(tree, state.requests) if state.is_constrained else None
        out, logits_BNV = self.verify(batch, tree)
        adjusted_BNV = self.adjust(state, tree, logits_BNV, masks)
        verdict = accept(tree, adjusted_BNV, state.sampling, batch.layout.cached_len_B)
        by_ngrams_B = drafter.learn(state, drafted, tree, verdict)
        self.commit(state, batch, out, verdict)
        return self.report(state, tree, logits_BNV, verdict, by_ngrams_B)

    def prefill(self, chunks: PackedChunks) -> None:
        """Prefill: runs prompt tokens through the target, and passes their tapped states to the drafter."""
        batch = self.cache.place_chunks(chunks)
        out = self.target(batch, self.cache.target.layers, self.drafter.tap_layers)
        if out.tap_TX is not None:
            self.drafter.observe(out.tap_TX, batch)

    def drafter_of(self, state: RoundState) -> Drafter:
        """The drafter; plain decoding if no request drafts, or if the tree of this batch size is the anchor alone."""
        is_plain = state.features.drafting == "none" or self.drafter.tree.at(len(state.anchor_B)).budget == 1
        return PLAIN if is_plain else self.drafter

    def build(self, state: RoundState, drafter: Drafter, drafted: Any) -> DraftTree:
        """Builds the draft tree, cut to the limits of each request."""
        tree = drafter.build(state, drafted)
        return tree if state.limits is None else tree.limited(*state.limits)

    def verify(self, batch: TreeBatch, tree: DraftTree) -> tuple[Hidden, Tensor]:
        """Computes the target's logits after every node, in one pass over the tree."""
        out = self.target(batch, self.cache.target.layers, self.drafter.tap_layers)
        return out, self.target.logits(out.hidden_TM).unflatten(0, tree.token_BN.shape)

    def adjust(self, state: RoundState, tree: DraftTree, logits_BNV: Tensor, masks: TreeMasks | None) -> Tensor:
        """Applies penalties, biases and grammar masks to the logits of every node."""
        if state.features.penalized:
            logits_BNV = penalize(tree, logits_BNV, self.cache.rows.penalties(state.row_B))
        if masks is not None:
            logits_BNV = forbid(logits_BNV, *masks.compute(logits_BNV))
        return logits_BNV

    def report(
        self, state: RoundState, tree: DraftTree, logits_BNV: Tensor, verdict: Acceptance, by_ngrams_B: Tensor | None
    ) -> RoundResult:
        """Collects the results. Committed tokens are counted for penalties."""
        if state.features.penalized:
            assert self.cache.rows.token_counts is not None
            self.cache.rows.token_counts.commit(state.row_B, verdict.token_BD1, verdict.length_B)
        logprobs = PathLogprobs.of(logits_BNV, verdict) if state.features.logprobs else None
        return RoundResult(tree, verdict, by_ngrams_B, logprobs)

    def commit(self, state: RoundState, batch: TreeBatch, out: Hidden, verdict: Acceptance) -> None:
        """Keeps K and V of the accepted path, passes its tapped states to the drafter, and sets the next anchor."""
        self.cache.compact(state.row_B, batch, verdict)
        if self.cache.rows.ngrams is not None:
            append(self.cache.rows.ngrams, state.row_B, batch.layout.cached_len_B, verdict.token_BD1)
        self.cache.rows.anchor_R[state.row_B] = verdict.bonus_B
        if out.tap_TX is not None:
            tap_BNX = out.tap_TX.unflatten(0, (len(verdict.path_BD1), -1))
            tap_BD1X = tap_BNX.gather(1, verdict.path_BD1[..., None].expand(-1, -1, tap_BNX.shape[-1]))
            self.drafter.observe(tap_BD1X.flatten(0, 1), self.cache.place_path(batch, verdict.path_BD1))
