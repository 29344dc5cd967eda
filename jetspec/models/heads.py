"""Loads and saves heads of any kind, and chooses one for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import DraftHead
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.eagle3_format import EAGLE3
from jetspec.models.head_folder import HeadFormat, kind_of, raw_config
from jetspec.models.head_format import BLOCK
from jetspec.models.hub import OfflineError, fetch_config, head_path, local_head, resolve, shipped_head
from jetspec.models.peagle import PEagleHead
from jetspec.models.registry import KnownHead, heads_of, known_heads
from jetspec.models.weights import DType

Head = DraftHead | Eagle3Head | PEagleHead
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


@dataclass(frozen=True)
class Choice:
    """A known head for a model, or none, and the reason."""

    name: str | None
    folder: Path | None
    reason: str
    """One line."""
    hints: tuple[str, ...] = ()
    """Lines on heads that could be had."""


def choose_head(model: str | Path, target: DecoderConfig, fetch: bool = False) -> Choice:
    """Chooses the best known head that fits a model, among those on this machine or, with `fetch`, among all.

    After the heads come n-grams; layers for multi-token prediction in the checkpoint itself, which are not read yet,
    belong between the two.
    """
    missing, problem, can_fetch = list[KnownHead](), "", fetch
    for head in heads_of(model):
        is_new = (folder := local_head(head.name)) is None
        if is_new and can_fetch:
            try:
                folder = _fetched(head.name, target)
            except ValueError as error:
                problem, can_fetch = problem or f"; {error}", not isinstance(error, OfflineError)
        if folder is None:
            missing.append(head)
        elif _fits(folder, target):
            where = "downloaded" if is_new else "from the package" if shipped_head(head.name) else "cached"
            here = " on this machine" if missing else ""
            reason = f"head {head.name} ({head.kind}, {where}): the best known one{here} that fits {model}{problem}"
            return Choice(head.name, folder, reason, () if fetch else _downloads(missing))
    if missing:
        reason = f"no head for {model}: none of the known ones is on this machine{problem}"
        return Choice(None, None, reason, () if fetch else _downloads(missing))
    name = _same_shape(target)
    hints = (f"a draft head fits this model: --head {name} (in Python: head={name!r})",) if name else ()
    return Choice(None, None, f"no head for {model}: none that fits is known{' by this name' if name else ''}", hints)


def _fetched(name: str, target: DecoderConfig) -> Path | None:
    """Fetches a head, or its config alone if it does not fit. None: its weights are not safetensors."""
    folder = fetch_config(name)
    if not _fits(folder, target):
        return folder
    resolve(name)
    return local_head(name)


def _downloads(missing: list[KnownHead]) -> tuple[str, ...]:
    """Returns a line on the first of these heads."""
    if not missing:
        return ()
    head = missing[0]
    about = [f"{head.tokens_per_round} tokens per round published"] if head.tokens_per_round else []
    about += [f"{head.size_gb} GB"] if head.size_gb else []
    return (f"--head auto downloads {head.name}" + (f" ({', '.join(about)})" if about else ""),)


def _fits(folder: Path, target: DecoderConfig) -> bool:
    """True if a head can be read and fits a target, by its config alone."""
    try:
        format = format_of(folder)
        if kind_of(folder) not in format.kinds:
            return False
        return not format.misfits(format.for_target(format.parse(raw_config(folder)), target), target)
    except ValueError:
        return False


def _same_shape(target: DecoderConfig) -> str | None:
    """Returns the name of a head on this machine that was trained for a model of this shape under another name."""
    for head in known_heads():
        folder = local_head(head.name)
        if folder is not None and _fits(folder, target):
            layers = format_of(folder).parse(raw_config(folder)).layers
            if (layers.rope, layers.max_len) == (target.rope, target.max_len):
                return head.name
    return None
