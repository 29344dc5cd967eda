"""P-EAGLE: rows of EAGLE-3 through several layers, all tokens drafted in one pass.

The first slot of a pass is the row of the anchor. The others predict the positions after it: their token is a mask and
their feature that of a learned vector in place of the taps. A slot attends to the text and to the slots before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from jetspec.config import TreeConfig
from jetspec.models.decoder import DecoderLayer
from jetspec.models.draft_head import HeadState, slot_before
from jetspec.models.eagle3 import Eagle3Config, EagleHead, slots_before
from jetspec.ops import Residual
from jetspec.tree import Candidates, DraftTree, build_tree
from jetspec.types import ChoiceModel, TreeBatch


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """Architecture of a head; `depth` is the number of slots of a pass by default."""

    kind: ClassVar = "peagle"
    mask_token: int = 0

    def num_in_flight(self, tree: TreeConfig) -> int:
        return self.draft_depth(tree.depth)


class PEagleHead(EagleHead):
    """The layers, and the vector of masked slots."""

    head_config: PEagleConfig
    edge = None

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.tap_size))

    def nodes(self, tree: TreeConfig) -> tuple[Tensor, Tensor | None]:
        assert tree.depth is not None
        return torch.arange(tree.depth, device=self.norm.weight.device)[None], None

    def draft(
        self, nodes: TreeBatch, anchor_B: Tensor, tree: TreeConfig, state: HeadState, choice: ChoiceModel | None
    ) -> Candidates:
        """Predicts a position per slot. A request without cached tokens has no feature, so its anchor gets no child."""
        assert state.feature_SM is not None
        B, first_BM = len(anchor_B), state.feature_SM[slot_before(nodes.layout)]
        token_BS = anchor_B.new_full((B, len(nodes.token_T) // B), self.head_config.mask_token)
        token_BS[:, 0] = anchor_B
        masked_BM = self.fuse(self.mask_hidden[0]).expand(B, -1)
        feature_BSM = torch.stack((first_BM, *[masked_BM] * (token_BS.shape[1] - 1)), 1)
        batch = replace(nodes, token_T=token_BS.flatten())
        normed_TM = self.run_rows(batch, feature_BSM.flatten(0, 1), state)
        token_BSK, logprob_BSK = self.best_tokens(normed_TM.unflatten(0, (B, -1)), tree.width, choice)
        is_first_B11 = (nodes.layout.cached_len_B == 0)[:, None, None]
        return Candidates(token_BSK, logprob_BSK.masked_fill(is_first_B11, -torch.inf), None)

    def build(self, anchor_B: Tensor, drafted: Candidates, tree: TreeConfig) -> DraftTree:
        assert tree.depth is not None
        return build_tree(anchor_B, drafted, tree, tree.depth)

    def observe(self, tap_TX: Tensor, batch: TreeBatch, state: HeadState) -> None:
        """Writes features of newly committed tokens, and K and V of their rows in all layers."""
        assert state.feature_SM is not None
        before_T = slots_before(batch)
        state.feature_SM.index_copy_(0, batch.slot_T, self.fuse(tap_TX))
        self.run_rows(batch, state.feature_SM[before_T], state)

    def run_rows(self, chains: TreeBatch, feature_TM: Tensor, state: HeadState) -> Tensor:
        """Runs rows, whose K and V are stored, and returns their normed states. Position 0 has no row and is masked."""
        chains = replace(chains, layout=replace(chains.layout, first_seen=1))
        rope, attends = self.rope(chains.position_T), self.paged(chains, state.layers)
        layers = [cast(DecoderLayer, layer) for layer in self.layers[1:]]
        norms = [*(layer.input_norm for layer in layers), self.norm]
        embedded_TM = self.embed(chains.token_T, state.target)
        residual = Residual(self.layer(embedded_TM, feature_TM, rope, attends[0], norms[0])[0])
        for layer, attend, next_norm in zip(layers, attends[1:], norms[1:], strict=True):
            residual = layer(residual, rope, attend, next_norm)
        return self.norm(residual.x)
