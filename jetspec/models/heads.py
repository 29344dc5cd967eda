"""Loads and saves heads of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import DraftHead
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.eagle3_format import EAGLE3
from jetspec.models.head_folder import HeadFormat, kind_of
from jetspec.models.head_format import BLOCK
from jetspec.models.hub import head_path, resolve
from jetspec.models.weights import DType

Head = DraftHead | Eagle3Head
FORMATS: tuple[HeadFormat[Any, Any], ...] = (BLOCK, EAGLE3)


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
