"""A trained head becomes the one that comes with the package: 8 bits per weight, its card with what was measured.

    jetspec eval-head --head runs/smollm2/head8 --data-dir data/eval --out docs/results/head_smollm2.json
    python -m benchmarks.ship_head --head runs/smollm2/head --record docs/results/head_smollm2.json

The record must be of the 8-bit head: `--weights-only` writes that, to be measured first. With `--page README.md` the
same table goes there, between its marks. Without `--head` the weights stay as they are, and only what was measured is
told anew:

    jetspec eval-head --data-dir data/eval --out docs/results/head_smollm2.json
    python -m benchmarks.ship_head --record docs/results/head_smollm2.json --page README.md
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import put_between
from jetspec.data.corpus import lines_of
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.head_format import load_head, save_head
from jetspec.models.hub import DEFAULT_MODEL, HEADS
from jetspec.models.tensor_files import WEIGHTS_FILE

LICENSES = {
    "dolly_3k": "CC BY-SA 3.0",
    "gpteacher_code": "MIT",
    "gpteacher_roleplay": "MIT",
    "gsm8k_train": "MIT",
    "math_train": "MIT",
    "mbpp_train": "CC BY 4.0",
    "self_instruct_seed": "Apache-2.0",
    "small_talk": "BSD-3-Clause",
    "summarize_cnn": "Apache-2.0",
    "svamp": "MIT",
    "task_talk": "CC BY-SA 4.0",
    "web_questions": "CC BY 4.0",
}
"""Of the sets of prompts, by the names of their files."""
MAX_BYTES = 32_000_000
"""What a package may weigh more for its head."""
MEASURED = "## Tokens per round"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, help="folder that training wrote, with its card")
    parser.add_argument("--prompts", type=Path, help="folder of the prompts that were answered, for the card")
    parser.add_argument("--record", type=Path, help="what `jetspec eval-head` wrote about the 8-bit head")
    parser.add_argument("--weights-only", action="store_true", help="without a card, to be measured")
    parser.add_argument("--page", type=Path, help="page that shows the table as well")
    parser.add_argument("--out", type=Path, default=HEADS / DEFAULT_MODEL)
    args = parser.parse_args()
    if (args.record is None) != args.weights_only:
        parser.error("give --record, or --weights-only")
    if args.head is None and (args.weights_only or args.prompts):
        parser.error("give --head: its weights, or its prompts, are what is written")

    card = None
    if args.record is not None:
        record = json.loads(args.record.read_text(encoding="utf-8"))
        parts = [made((args.head or args.out) / CARD_FILE)]
        parts += [asked(args.prompts)] if args.prompts else []
        card = "\n\n".join((*parts, measured(record)))
        if args.page is not None:
            args.page.write_text(put_between(args.page.read_text(encoding="utf-8"), "head", decoded(record)))
    if args.head is None:
        assert card is not None
        (args.out / CARD_FILE).write_text(card, encoding="utf-8")
        return
    save_head(load_head(args.head.absolute(), dtype=torch.float32), args.out, dtype=torch.int8, card=card)
    size = (args.out / WEIGHTS_FILE).stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{args.out} has {size:,} bytes of weights; at most {MAX_BYTES:,} may be shipped")
    print(f"{args.out}: {size:,} bytes")


def made(card: Path) -> str:
    """The sections of a card that say how the head came about. What training saw of it on the way is left out: what is
    measured takes its place."""
    text = card.read_text(encoding="utf-8").partition(MEASURED)[0]
    return "\n\n".join(part.strip() for part in re.split(r"^(?=## )", text, flags=re.M) if part[:10] != "## Results")


def asked(folder: Path) -> str:
    """The section of a card that says which prompts the target answered, by file."""
    rows = {path.name.partition(".")[0]: sum(1 for _ in lines_of(path)) for path in sorted(folder.glob("*.jsonl*"))}
    lines = [f"| {name} | {count:,} | {LICENSES.get(name, 'unknown')} |" for name, count in rows.items()]
    about = (
        "Only questions were taken from these sets; all answers are the target's. Others it made up itself. Some of "
        "these, for code, begin word for word as the prompts of HumanEval and MBPP do, and it made up how they go on: "
        "nobody has looked whether some came out like questions of those tests."
    )
    return "\n".join(("## Prompts", "", about, "", "| set | rows | licence |", "|---|---:|---|", *lines))


def measured(record: dict[str, Any]) -> str:
    """The section of a card that says how many tokens a round commits, task by task."""
    source = (
        f"Greedy, in {record['dtype']}, up to {record['limit']} conversations of at most {record['max_tokens']} tokens "
        f"per task, width {record['tree']['width']}; measured on {record['hardware'].get('gpu') or 'a CPU'} "
        f"with commit {record['commit']}, on these 8-bit weights."
    )
    forced = "On the target's own text, at every position that a round starts from:"
    parts = [MEASURED, source, forced, table(record["tokens_per_round"])]
    if record["real"]:
        parts += ["Decoding:", decoded(record)]
    return "\n\n".join(parts) + "\n"


def decoded(record: dict[str, Any]) -> str:
    real, hardware = record["real"], record["hardware"]
    rows = {task: {name: run["tokens_per_round"] for name, run in row.items()} for task, row in real.items()}
    about = f"{record['dtype']}, {hardware.get('gpu', hardware['cpu'])}, commit {record['commit'][:7]}"
    settings = record["tree"]
    heat = settings.get("draft_temperature", settings.get("heat"))
    tree = f"the edge term ranking {settings['shortlist']} tokens, at a draft temperature of {heat:g}"
    return f"{table(rows)}\n\nMeasured with {about}, {tree}."


def table(values: dict[str, dict[str, float]]) -> str:
    budgets = list(next(iter(values.values())))
    mean = {name: statistics.fmean(row[name] for row in values.values()) for name in budgets}
    titles = [name if name == "chain" else f"tree of {name}" for name in budgets]
    lines = [f"| task | {' | '.join(titles)} |", "|---|" + "---:|" * len(budgets)]
    for task, row in {**values, "mean": mean}.items():
        lines.append(f"| {task} | {' | '.join(f'{row[name]:.2f}' for name in budgets)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
