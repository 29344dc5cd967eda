"""`ship-head`: a trained head becomes the one of the package: 8 bits per weight, with measurements in its card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.options import examples
from benchmarks.pages import decoded, rounds_by_task
from benchmarks.results import Record, read_record
from jetspec.data.corpus import lines_of
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.head_format import load_head, save_head
from jetspec.models.hub import DEFAULT_MODEL, HEADS
from jetspec.models.tensor_files import WEIGHTS_FILE
from jetspec.settings import read_settings

LICENSES: Mapping[str, str] = read_settings(Path(__file__).with_name("licenses.yaml"))
MAX_BYTES = 32_000_000
"""Largest weights of a head in the package."""
MEASURED = "## Tokens per round"
EPILOG = examples(
    "ship-head --head runs/smollm2/head --weights-only --out head8",
    "ship-head --head runs/smollm2/head --record docs/results/head_smollm2.json",
    "ship-head --record docs/results/head_smollm2.json",
)


def ship_head(
    head: Annotated[Path | None, typer.Option(help="Folder that training wrote, with its card.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Folder of the answered prompts, for the card.")] = None,
    record: Annotated[Path | None, typer.Option(help="Record of `jetspec eval-head` about the 8-bit head.")] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="No card, to be measured first.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the shipped head.")] = HEADS / DEFAULT_MODEL,
) -> None:
    """Put a trained head into the package, in 8 bits, with a card.

    The record must be of the 8-bit head: write it with --weights-only, measure it with `jetspec eval-head`, then ship
    it. Without --head the weights stay, and only the measurements in the card are replaced; `pages` fills the README.
    """
    if (record is None) != weights_only:
        raise typer.BadParameter("give --record, or --weights-only")
    if head is None and (weights_only or prompts):
        raise typer.BadParameter("give --head: its weights, or its prompts, are written")
    card = None
    if record is not None:
        parts = [training_sections((head or out) / CARD_FILE), *([prompts_section(prompts)] if prompts else [])]
        card = "\n\n".join((*parts, measured(read_record(record))))
    if head is None:
        assert card is not None
        (out / CARD_FILE).write_text(card, encoding="utf-8")
        return
    save_head(load_head(head.absolute(), dtype=torch.float32), out, dtype=torch.int8, card=card)
    size = (out / WEIGHTS_FILE).stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{out} has {size:,} bytes of weights; at most {MAX_BYTES:,} may be shipped")
    print(f"{out}: {size:,} bytes")


def training_sections(card: Path) -> str:
    """Sections of a card about the making of the head, without the results that training saw."""
    text = card.read_text(encoding="utf-8").partition(MEASURED)[0]
    return "\n\n".join(part.strip() for part in re.split(r"^(?=## )", text, flags=re.M) if part[:10] != "## Results")


def prompts_section(folder: Path) -> str:
    """Section of a card about the prompts that the target answered, by file."""
    rows = {path.name.partition(".")[0]: sum(1 for _ in lines_of(path)) for path in sorted(folder.glob("*.jsonl*"))}
    lines = [f"| {name} | {count:,} | {LICENSES.get(name, 'unknown')} |" for name, count in rows.items()]
    about = (
        "Only questions were taken from these sets; all answers are the target's. Others it made up itself. Some of "
        "these, for code, begin word for word as the prompts of HumanEval and MBPP do, and it made up how they go on: "
        "they were not checked for questions of those tests."
    )
    return "\n".join(("## Prompts", "", about, "", "| set | rows | licence |", "|---|---:|---|", *lines))


def measured(record: Record) -> str:
    """Section of a card about the tokens that a round commits, task by task."""
    hardware: Mapping[str, str] = record["hardware"]
    source = (
        f"Greedy, in {record['dtype']}, up to {record['limit']} conversations of at most {record['max_tokens']} tokens "
        f"per task, width {record['tree']['width']}; measured on {hardware.get('gpu') or 'a CPU'} "
        f"with commit {record['commit']}, on these 8-bit weights."
    )
    forced = "On the target's own text, at every position that a round starts from:"
    parts = [MEASURED, source, forced, rounds_by_task(record["tokens_per_round"])]
    return "\n\n".join([*parts, *(["Decoding:", decoded(record)] if record["real"] else [])]) + "\n"
