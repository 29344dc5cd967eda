"""The model card of a trained head: its shape, training, results and origin."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jetspec.data.corpus import lines_of
from jetspec.models.draft_head import HeadConfig
from jetspec.models.eagle3 import Eagle3Config
from jetspec.record import make_record, shown
from jetspec.train.config import DataFile, LossConfig, TrainConfig


def model_card(
    config: TrainConfig,
    head: HeadConfig | Eagle3Config,
    steps: int,
    minutes: float,
    num_documents: int,
    results: dict[str, dict[str, Any]],
) -> str:
    """A README for the folder of a head. `results` are the last numbers of each kind in the log.

    It names a licence for the default target only. For other targets its author decides.
    """
    record, model = make_record({}), shown(config.model)
    command = re.sub("^python -m (?=jetspec )", "", record["command"])
    origin = {
        "command": f"`{command}`",
        "commit": record["commit"] or "unknown",
        "date": record["date"],
        "hardware": record["hardware"].get("gpu") or record["hardware"]["cpu"],
    }
    licence = ["license: apache-2.0"] if config.model == TrainConfig.model else []
    sections = [
        "\n".join(("---", *licence, f"base_model: {model}", "tags: [speculative-decoding]", "---")),
        f"# Draft head for {model}",
        f"Drafts up to {head.depth} tokens {'in one pass' if head.kind == 'block' else 'step by step'} for "
        "JetSpec, which verifies them with the target: the text stays the target's own.",
        "## Shape\n\n" + _table(_shape(head)),
        "## Training\n\n" + _table(_training(config, steps, minutes, num_documents)),
        "## Results\n\n" + (_table(_results(results, steps)) if results else "Nothing was measured."),
        "## Origin\n\n" + _table(origin),
    ]
    if licence:
        sections.append(
            "The head's weights are licensed under Apache-2.0; the target and the data have licences of their own."
        )
    return "\n\n".join(sections) + "\n"


def read_card(card: str, section: str) -> dict[str, str]:
    """The table of a section of a card, such as Training or Origin; empty if there is none."""
    text = card.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\S.*?) \| (.*) \|$", text, re.MULTILINE)
    return {name: value.strip("`") for name, value in rows}


def _shape(head: HeadConfig | Eagle3Config) -> dict[str, Any]:
    taps = {"target layers read": ", ".join(map(str, head.tap_layers))}
    sizes = {"hidden size": head.layers.hidden_size, "MLP size": head.layers.inner_size}
    if isinstance(head, Eagle3Config):
        return {
            "kind": "EAGLE-3, one layer",
            **sizes,
            "steps unrolled in training": head.depth,
            **taps,
            "tokens it can draft": f"{head.draft_vocab_size:,} of {head.layers.vocab_size:,}",
        }
    return {
        "layers": head.layers.num_layers,
        **sizes,
        "block size": head.block_size,
        "attention within a block": "causal" if head.causal else "bidirectional",
        **taps,
        "mask token": head.mask_token,
        "edge rank": head.edge.rank if head.edge else "no edge term",
    }


def _training(config: TrainConfig, steps: int, minutes: float, num_documents: int) -> dict[str, Any]:
    return {
        **{f"data: {Path(file.path).name}": _rows(file) for file in config.files},
        "conversations per pass": f"{num_documents:,}",
        "steps": f"{steps:,}",
        "time": f"{minutes:,.1f} minutes",
        "batch per process": f"{config.rows * config.accumulate} rows of {config.row_len} tokens, "
        f"{config.anchors} {config.head.drafts} each",
        "loss": _loss(config.loss),
        "optimizer": f"{config.optimizer.kind}, learning rate {config.optimizer.lr:g}",
        "seed": config.seed,
    }


@cache
def _rows(file: DataFile) -> str:
    """Rows of a file, counted once per run: every checkpoint writes a card."""
    often = f", each {file.times} times per pass" if file.times > 1 else ""
    return f"{sum(1 for _ in lines_of(Path(file.path))):,} rows{often}"


def _loss(config: LossConfig) -> str:
    named = {"temperature": (config.temperature, 1), "gamma": (config.gamma, None), "D-PACE": (config.dpace, None)}
    words = [f"{name} {value:g}" for name, (value, default) in named.items() if value != default]
    return ", ".join([config.kind.replace("_", " "), *words])


KINDS = {
    "train": "training, last step",
    "validation": "validation, teacher-forced",
    "decode": "decoding, tokens per round",
}


def _results(results: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """Losses and tokens per round, each with its step if that was an earlier one.

    Chains of training and validation start at random places; in decoding, rounds start more often at hard ones.
    """
    rows = {}
    for kind, title in KINDS.items():
        for name, value in results.get(kind, {}).items():
            if name in ("loss", "chain") or name.startswith("tree_"):
                place = " from random places" if name == "chain" and kind != "decode" else ""
                when = results[kind]["step"]
                rows[f"{title}: {name}{place}"] = f"{value:.3f}" + (f" at step {when:,}" if when != steps else "")
    return rows


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())))
