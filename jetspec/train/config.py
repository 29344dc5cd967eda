"""Training recipes: YAML files, found by name or path and read as checked dataclasses. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from jetspec.config import EAGLE3_DEPTH, EAGLE3_TAPS, MAX_DEPTH
from jetspec.data.prompts import OnBad
from jetspec.settings import apply_override, at_least, fraction, from_dict, positive, read_settings

RECIPES = Path(__file__).parents[1] / "recipes"
"""Recipes of the package."""
LEAST = {
    **dict.fromkeys(("steps", "rows", "row_len", "anchors", "anchors_at_once", "accumulate"), 1),
    **dict.fromkeys(("log_every", "validate_every", "save_every", "keep"), 1),
    **dict.fromkeys(("validation_rows", "seed"), 0),
}
HEAD_LEAST = {
    **dict.fromkeys(("depth", "draft_vocab", "num_layers", "inner_size"), 1),
    **dict.fromkeys(("mask_token", "edge_rank", "conv_taps"), 0),
    "block_size": 2,
}
"""Least values of settings of a recipe, and of its head."""
BLOCK_ONLY = ("num_layers", "block_size", "causal", "shifted", "mask_token", "edge_rank", "edge_gate", "conv_taps")
EAGLE3_ONLY = ("depth", "draft_vocab")
"""Settings of one kind of head that do not apply to the other."""


@dataclass(frozen=True)
class DataFile:
    """A file of training data."""

    path: str
    times: int = 1
    """Repetitions of each row in one pass over the data."""

    def __post_init__(self) -> None:
        at_least(1, "data.times", self.times)


@dataclass(frozen=True)
class HeadShape:
    """Shape of the head to train. A value of None follows the target, or the head to start from."""

    kind: Literal["block", "eagle3"] = "block"
    """`block` drafts all positions in one pass. `eagle3`, a baseline, runs a single layer step by step."""
    num_layers: int = 5
    """Decoder layers."""
    block_size: int = 16
    """Tokens of a draft, the anchor included."""
    causal: bool = True
    """Causal attention within a block. False: bidirectional (DFlash)."""
    shifted: bool = False
    """Slot k predicts position k + 1, so that a block drafts one token more (DSpark)."""
    tap_layers: tuple[int, ...] | None = None
    """Target layers whose outputs the head reads, counted from 0."""
    mask_token: int | None = None
    """Token id that never occurs in text, such as a reserved one. A new block head requires it."""
    inner_size: int | None = None
    """Width of the MLP."""
    edge_rank: int = 0
    """Rank of the edge term. 0: no edge term, or that of the head to start from."""
    edge_gate: Literal["biased", "alone", "none"] = "biased"
    """Factor of the edge term: 1 + G h (`biased`), G h (`alone`, as in DFlash2), or 1 (`none`, as in DSpark)."""
    conv_taps: int = 0
    """Slots that the convolutions around attention and MLP read, as in DFlash2: 2 there. 0: no convolutions."""
    depth: int | None = None
    """EAGLE-3: unrolled steps in training. None: 7, as in its paper."""
    draft_vocab: int | None = None
    """EAGLE-3: size of the draft vocabulary, the most frequent tokens of the data. None: 32000, or the target's if
    smaller."""

    def __post_init__(self) -> None:
        others = EAGLE3_ONLY if self.kind == "block" else BLOCK_ONLY
        for name in others:
            if getattr(self, name) != getattr(HeadShape, name):
                raise ValueError(f"head.{name} does not apply to a head of kind {self.kind}; leave it out")
        for name, least in HEAD_LEAST.items():
            at_least(least, f"head.{name}", getattr(self, name))
        if self.kind == "eagle3" and self.tap_layers is not None and len(self.tap_layers) != EAGLE3_TAPS:
            raise ValueError(f"head.tap_layers names {len(self.tap_layers)} layers; an EAGLE-3 head taps {EAGLE3_TAPS}")
        if self.block_size > 1 + MAX_DEPTH:
            raise ValueError(f"head.block_size is {self.block_size}; trees are at most {MAX_DEPTH} deep")
        if self.edge_gate != "biased" and not self.edge_rank:
            raise ValueError(f"head.edge_gate is {self.edge_gate}, but head.edge_rank is 0: there is no edge term")
        if self.tap_layers is not None and not self.tap_layers:
            raise ValueError("head.tap_layers is empty; name at least one layer, or null for the usual ones")
        for layer in self.tap_layers or ():
            at_least(0, "head.tap_layers", layer)

    @property
    def drafts(self) -> str:
        """The plural noun for drafts of this kind."""
        return "blocks" if self.kind == "block" else "chains"

    @property
    def span(self) -> int:
        """Tokens of a draft, its anchor included."""
        return self.block_size if self.kind == "block" else 1 + (self.depth or EAGLE3_DEPTH)


@dataclass(frozen=True)
class LossConfig:
    """The distillation loss."""

    kind: Literal["forward_kl", "reverse_kl", "sft"] = "forward_kl"
    """KL divergence of teacher and head, its reverse, or cross-entropy of the labels."""
    temperature: float = 1.0
    """Temperature of both distributions."""
    gamma: float | None = None
    """Position k has weight exp(-(k - 1) / gamma). None: equal weights."""
    dpace: float | None = None
    """D-PACE smoothing, 0.5 in its paper: weights from the expected accepted prefix. None: off."""

    def __post_init__(self) -> None:
        positive("loss.gamma", self.gamma, ", or null for no weighting")
        if self.dpace is not None and not 0 <= self.dpace < 1:
            raise ValueError(f"loss.dpace is {self.dpace}; it must be at least 0 and below 1, or null")
        if self.gamma is not None and self.dpace is not None:
            raise ValueError("loss.gamma and loss.dpace both weigh positions; choose one")
        positive("loss.temperature", self.temperature)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` for matrices between hidden states, with AdamW for all other weights. Both use one learning rate: Muon's
    updates are scaled to the size of AdamW's."""
    lr: float = 6e-4
    """Peak learning rate."""
    warmup_frac: float = 0.04
    """Fraction of the steps with a linear rise of the learning rate. A cosine decay follows."""
    final_lr_frac: float = 0.05
    """Fraction of the peak learning rate at the last step."""
    weight_decay: float = 0.01
    """Weight decay of matrices. Norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Momentum coefficients of AdamW."""
    clip: float = 1.0
    """Maximum norm of the gradient."""

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
    """One training run. A step is `accumulate` micro-batches of `rows` packed rows of `row_len` tokens per device."""

    data: tuple[str | DataFile, ...]
    """JSONL files of `jetspec data regenerate`: paths, or `{path: .., times: 2}`."""
    out: str
    """Output folder of checkpoints, log and head."""
    on_bad: OnBad = "stop"
    """Treatment of data rows that are broken or contain the mask token: `stop`, or `skip` to leave them out."""
    model: str = "smollm2-135m-instruct"
    """Target: a name, folder, GGUF file or Hugging Face id."""
    start: str | None = None
    """A head to start from instead of new weights. Settings of `head` must agree with it; only an edge term may be
    added."""
    train_only_edge: bool = False
    """Train the edge term alone, with the rest of the head frozen."""
    head: HeadShape = field(default_factory=HeadShape)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 1000
    """Updates of the weights. The learning rate schedule has this length."""
    minutes: float | None = None
    """Stop after this time, summed over resumed parts, even if steps are left; a last validation and save follow. The
    learning rate then follows time or steps, whichever has progressed further. Such a run is not reproducible bit for
    bit, nor resumed so, because its timing varies."""
    rows: int = 8
    """Packed rows of a micro-batch."""
    row_len: int = 1024
    """Tokens of a packed row."""
    anchors: int = 64
    """Drafts per packed row."""
    anchors_at_once: int = 64
    """Drafts per row in one pass of the head. A smaller number takes more passes and less memory."""
    accumulate: int = 1
    """Micro-batches per step."""
    validation_rows: int = 16
    """Packed rows held out for validation, with all other answers to their prompts."""
    seed: int = 0
    """Seed of new weights, the order of the data, and anchors."""
    device: str = "auto"
    """`cpu` or `cuda`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target and of the head's matrix products. The head's weights are float32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: `ddp` replicates the head, `fsdp` shards every weight."""
    compile: bool | None = None
    """Compile the head's layers, and capture a step's passes as CUDA graphs. None: on a GPU."""
    log_every: int = 10
    """Steps between lines of the log."""
    validate_every: int = 500
    """Steps between validations."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep."""
    score: bool | None = None
    """Decode a few held-out conversations at every checkpoint. None: if there are any."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data is empty; name at least one file of `jetspec data regenerate`")
        for name, least in LEAST.items():
            at_least(least, name, getattr(self, name))
        positive("minutes", self.minutes, ", or null for no limit")
        if self.score and not self.validation_rows:
            raise ValueError("score needs held-out conversations; set validation_rows, or leave score out")
        if self.row_len <= self.head.span:
            raise ValueError(f"row_len {self.row_len} cannot hold a block of {self.head.span}")
        if self.train_only_edge and not self.head.edge_rank:
            raise ValueError("train_only_edge needs an edge term: set head.edge_rank")
        if self.train_only_edge and self.start is None:
            raise ValueError("train_only_edge needs a trained head: name it with start")

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(DataFile(item) if isinstance(item, str) else item for item in self.data)


def recipes() -> dict[str, str]:
    """Recipes of the package by name, each with its description: the first line of the file."""
    found = sorted(RECIPES.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in found}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, by the name of a packaged one or by its path."""
    known = recipes()
    if str(name) in known:
        return RECIPES / f"{name}.yaml"
    path = Path(name)
    if path.is_file():
        return path
    near = get_close_matches(path.stem, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"there is no recipe {name}; {hint}known are {', '.join(known)}, or give a YAML file")


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A recipe, by name or path, with `section.field=value` overrides."""
    raw = read_settings(find_recipe(name))
    for override in overrides:
        apply_override(raw, override)
    return from_dict(TrainConfig, raw)


def check_files(config: TrainConfig) -> None:
    """Refuses missing data before anything is loaded."""
    for file in config.files:
        path = Path(file.path)
        if not path.is_file():
            fault = "is not a file" if path.exists() else "does not exist"
            raise ValueError(f"data names {path}, which {fault}; name files of `jetspec data regenerate`")
