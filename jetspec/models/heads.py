"""Loads, saves and describes heads of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import ContextWeights, DraftHead, HeadState
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.eagle3_format import EAGLE3
from jetspec.models.head_folder import HeadFormat, kind_of
from jetspec.models.head_format import BLOCK
from jetspec.models.hub import head_path, resolve
from jetspec.models.weights import DType
from jetspec.tree import DraftTree
from jetspec.types import TreeBatch

Head = DraftHead | Eagle3Head
FORMATS: tuple[HeadFormat[Any, Any], ...] = (BLOCK, EAGLE3)


class HeadShape(Protocol):
    """Parts of a head's configuration that the engine reads."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs the head reads."""

    def draft_depth(self, requested: int | None) -> int:
        """Depth of trees with a requested depth; None: the default."""

    def num_in_flight(self, tree: TreeConfig) -> int:
        """Largest number of tokens of a request that a round passes through the head."""


class EngineHead(Protocol):
    """Interface between a draft head and the engine. A new kind of head is one class that implements it.

    Trees passed to a head have their `depth` set.
    """

    @property
    def config(self) -> DecoderConfig:
        """Shape of its layers, which its KV cache has as well."""

    @property
    def head_config(self) -> HeadShape: ...

    @property
    def feature_size(self) -> int:
        """Size of the vector that it keeps for each cached position. 0: none."""

    @property
    def uses_score(self) -> bool:
        """The settings `expand` and `score` apply to its trees."""

    def prepare(self) -> None:
        """Packs weights for inference."""

    def context_weights(self) -> ContextWeights | None:
        """Weights of `observe` that are concatenated once."""

    def nodes(self, tree: TreeConfig) -> tuple[Tensor, Tensor | None]:
        """Depths (1, N) and ancestor bits (1, N, W) of the tokens in flight. Without bits they are a chain."""

    def draft(
        self, nodes: TreeBatch, anchor_B: Tensor, tree: TreeConfig, state: HeadState, temperature_B: Tensor | None
    ) -> Any:
        """Drafts below each anchor. `nodes` are positions and slots of the tokens in flight, without their tokens."""

    def build(self, anchor_B: Tensor, drafted: Any, tree: TreeConfig) -> DraftTree:
        """Builds a tree of what `draft` returned."""

    def observe(self, tap_TX: Tensor, batch: TreeBatch, state: HeadState) -> None:
        """Writes committed tokens, with their tapped states, to the head's cache."""


def format_of(folder: Path) -> HeadFormat[Any, Any]:
    """Returns the format of a head's folder. The first one refuses other folders, with the reason."""
    kind = kind_of(folder)
    return next((format for format in FORMATS if kind in format.kinds), BLOCK)


def load_any_head(
    path_or_id: str | Path,
    target: DecoderConfig | None = None,
    dtype: DType = "auto",
    device: torch.device | str = "cpu",
) -> Head:
    """Loads a head by its name, folder or Hugging Face id, for inference. It must fit a given target."""
    format = format_of(resolve(head_path(path_or_id)))
    head: Head = format.load(path_or_id, target, dtype, device)
    return head


def save_any_head(head: Head, folder: str | Path, card: str | None = None) -> None:
    """Writes a head in the published layout of its kind, in bfloat16."""
    format: HeadFormat[Any, Any] = BLOCK if isinstance(head, DraftHead) else EAGLE3
    format.save(head, folder, card=card)
