"""A training recipe: what a YAML file says, checked to the last key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jetspec.config import EAGLE3_DEPTH, EAGLE3_TAPS, MAX_DEPTH
from jetspec.data.prompts import OnBad
from jetspec.settings import apply_override, at_least, fraction, from_dict, positive, read_settings

COUNTS = (
    *("steps", "rows", "row_len", "anchors", "anchors_at_once", "accumulate"),
    *("log_every", "validate_every", "save_every", "keep"),
)
"""Settings that must be at least 1."""

BLOCK_ONLY = ("num_layers", "block_size", "causal", "mask_token", "edge_rank")
EAGLE3_ONLY = ("depth", "draft_vocab")
"""Settings of a head that mean nothing to the other kind."""


@dataclass(frozen=True)
class DataFile:
    path: str
    times: int = 1
    """How often each of its rows is seen in one pass over the data."""

    def __post_init__(self) -> None:
        at_least(1, "data.times", self.times)


@dataclass(frozen=True)
class HeadShape:
    """The head to train. What is None follows the target, or the head to start from."""

    kind: Literal["block", "eagle3"] = "block"
    """`block` drafts all positions in one pass. `eagle3` goes step by step through a single layer, a baseline."""
    num_layers: int = 5
    block_size: int = 16
    causal: bool = True
    """False: all slots of a block see each other (DFlash)."""
    tap_layers: tuple[int, ...] | None = None
    mask_token: int | None = None
    """An id that never occurs in text, which only the reader of a vocabulary can tell: fresh heads need it given."""
    inner_size: int | None = None
    edge_rank: int = 0
    """Rank of the edge term. 0: none, or that of the head to start from."""
    depth: int | None = None
    """EAGLE-3: steps that training unrolls. None: 7, as in its paper."""
    draft_vocab: int | None = None
    """EAGLE-3: tokens that it can draft, the most frequent of the data. None: 32000, or all if those are fewer."""

    def __post_init__(self) -> None:
        others = EAGLE3_ONLY if self.kind == "block" else BLOCK_ONLY
        for name in others:
            if getattr(self, name) != getattr(HeadShape, name):
                raise ValueError(f"head.{name} does not apply to a head of kind {self.kind}; leave it out")
        at_least(1, "head.depth", self.depth)
        at_least(1, "head.draft_vocab", self.draft_vocab)
        if self.kind == "eagle3" and self.tap_layers is not None and len(self.tap_layers) != EAGLE3_TAPS:
            raise ValueError(f"head.tap_layers names {len(self.tap_layers)} layers; an EAGLE-3 head taps {EAGLE3_TAPS}")
        at_least(1, "head.num_layers", self.num_layers)
        at_least(2, "head.block_size", self.block_size)
        if self.block_size > 1 + MAX_DEPTH:
            raise ValueError(f"head.block_size is {self.block_size}; trees are at most {MAX_DEPTH} deep")
        at_least(0, "head.mask_token", self.mask_token)
        at_least(1, "head.inner_size", self.inner_size)
        at_least(0, "head.edge_rank", self.edge_rank)
        if self.tap_layers is not None and not self.tap_layers:
            raise ValueError("head.tap_layers is empty; name at least one layer, or null for the usual ones")
        for layer in self.tap_layers or ():
            at_least(0, "head.tap_layers", layer)

    @property
    def drafts(self) -> str:
        """What an anchor begins, in words."""
        return "blocks" if self.kind == "block" else "chains"

    @property
    def span(self) -> int:
        """Tokens that a draft covers, its anchor included."""
        return self.block_size if self.kind == "block" else 1 + (self.depth or EAGLE3_DEPTH)


@dataclass(frozen=True)
class LossConfig:
    """What a draft is measured by."""

    kind: Literal["forward_kl", "reverse_kl", "sft"] = "forward_kl"
    temperature: float = 1.0
    gamma: float | None = None
    """Position k weighs exp(-(k - 1) / gamma). None: all weigh the same."""
    dpace: float | None = None
    """D-PACE smoothing, 0.5 in its paper: weigh a position by the accepted prefix at stake. None: off."""

    def __post_init__(self) -> None:
        positive("loss.gamma", self.gamma, ", or null for no weighting")
        if self.dpace is not None and not 0 <= self.dpace < 1:
            raise ValueError(f"loss.dpace is {self.dpace}; it must be at least 0 and below 1, or null")
        if self.gamma is not None and self.dpace is not None:
            raise ValueError("loss.gamma and loss.dpace both weigh positions; choose one")
        positive("loss.temperature", self.temperature)


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` for matrices between hidden states, with AdamW for everything else. One rate fits both: Muon's updates
    are scaled to the size of AdamW's."""
    lr: float = 6e-4
    warmup_frac: float = 0.04
    final_lr_frac: float = 0.05
    """Share of the learning rate that is left at the end of the cosine."""
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    """Longest gradient."""

    def __post_init__(self) -> None:
        positive("optimizer.lr", self.lr)
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}; it must be at least 0, and finite")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"optimizer.betas has {beta}; each must be at least 0 and below 1")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip is {self.clip}; it must be positive")
        fraction("optimizer.warmup_frac", self.warmup_frac)
        fraction("optimizer.final_lr_frac", self.final_lr_frac)


@dataclass(frozen=True)
class TrainConfig:
    """One run. A step takes `rows` packed rows of `row_len` tokens on every device, `accumulate` times."""

    data: tuple[str | DataFile, ...]
    """JSONL files that `jetspec data regenerate` wrote: paths, or `{path: .., times: 2}`."""
    out: str
    """Folder for checkpoints, log and head."""
    on_bad: OnBad = "stop"
    """What to do about a broken row of the data, or one that holds the mask token: stop, or leave it out."""
    model: str = "smollm2-135m-instruct"
    start: str | None = None
    """A head to start from instead of fresh weights. What the recipe says about `head` must agree with it; only an
    edge term may be added."""
    train_only_edge: bool = False
    """Freeze the rest of the head."""
    head: HeadShape = field(default_factory=HeadShape)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 1000
    minutes: float | None = None
    """Stop training after this time, resumed parts counted together, even if steps are left; a last validation and
    save follow. The learning rate then anneals by time or by steps, whichever is further. As no two runs keep the
    same time, such a run does not repeat, nor go on from a checkpoint, bit for bit."""
    rows: int = 8
    row_len: int = 1024
    anchors: int = 64
    """Drafts per packed row."""
    anchors_at_once: int = 64
    """Drafts per row in one pass of the head. More of them take further passes, and no more memory."""
    accumulate: int = 1
    validation_rows: int = 16
    """Packed rows kept out of training, with all other answers to their prompts."""
    seed: int = 0
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target and of the head's products; the head's own weights are float32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: the whole head on each, or a part of every weight."""
    compile: bool | None = None
    """Whether the head's layers are compiled, and a step's passes captured as CUDA graphs. None: on a GPU."""
    log_every: int = 10
    validate_every: int = 500
    save_every: int = 500
    keep: int = 2
    """Checkpoints kept."""
    score: bool | None = None
    """Whether every save also decodes a few of the conversations kept out of training. None: if there are any."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data is empty; name at least one file that `jetspec data regenerate` wrote")
        for name in COUNTS:
            at_least(1, name, getattr(self, name))
        at_least(0, "validation_rows", self.validation_rows)
        at_least(0, "seed", self.seed)
        positive("minutes", self.minutes, ", or null for no limit")
        if self.score and not self.validation_rows:
            raise ValueError("score needs conversations kept out of training; set validation_rows, or leave score out")
        if self.row_len <= self.head.span:
            raise ValueError(f"row_len {self.row_len} cannot hold a block of {self.head.span}")
        if self.train_only_edge and not self.head.edge_rank:
            raise ValueError("train_only_edge needs an edge term: set head.edge_rank")
        if self.train_only_edge and self.start is None:
            raise ValueError("train_only_edge needs a finished head: name it with start")

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(DataFile(item) if isinstance(item, str) else item for item in self.data)


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """A recipe file with `key.key=value` overrides on top."""
    raw = read_settings(path)
    for override in overrides:
        apply_override(raw, override)
    return from_dict(TrainConfig, raw)
