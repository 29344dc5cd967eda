"""`jetspec load`: a bar while it runs, then a table, a record and a plot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from benchmarks.load import PERCENTILES, Load, Message, Timing, send_load, summarize
from jetspec.commands.compare import DEMO_PROMPTS
from jetspec.commands.screen import err, out, write_json
from jetspec.data.prompts import read_questions
from jetspec.files import read_text
from jetspec.record import write_record

TIMES = {"first_token_ms": "first token", "between_tokens_ms": "between tokens", "whole_ms": "whole answer"}


def run_load(plan: Load, data: Path | None, key_file: Path | None, to: Path | None, as_json: bool) -> bool:
    """Send the load and show what came of it. Whether every request was answered."""
    if to is not None and not to.parent.is_dir():
        raise FileNotFoundError(f"{to.parent} is not a folder; create it first")
    chats = read_chats(data, plan.requests)
    key = read_key(key_file) if key_file else None
    with tqdm(total=plan.requests, desc="requests", unit="request", leave=False) as bar:
        timings = asyncio.run(send_load(plan, chats, key, bar.update))
    summary = summarize(timings)
    if to is not None:
        write_record(to, {"load": asdict(plan), **summary, "timings": [times_of(timing) for timing in timings]})
        if summary["failed"] < len(timings):
            draw(timings, to.with_suffix(".svg"))
    if as_json:
        write_json(summary)
    else:
        show(summary)
    return not summary["failed"]


def read_key(path: Path) -> str:
    """A key for any server; ours alone wants long ones."""
    lines = read_text(path).split()
    if not lines:
        raise ValueError(f"{path} holds no key; write it in the first line")
    return lines[0]


def read_chats(path: Path | None, count: int | None) -> list[list[Message]]:
    """First questions of a file's conversations, or the built-in ones."""
    if path is None:
        return [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS]
    chats = []
    for question in read_questions(path, count):
        system = [{"role": "system", "content": question.system}] if question.system else []
        chats.append([*system, {"role": "user", "content": question.turns[0]}])
    return chats


def times_of(timing: Timing) -> dict[str, Any]:
    """A request in the record."""
    if timing.error is not None:
        return {"error": timing.error}
    return {
        "first_token_ms": timing.first_s * 1000,
        "between_tokens_ms": timing.between_s * 1000,
        "whole_ms": timing.whole_s * 1000,
        "tokens": timing.tokens,
        "rounds": timing.rounds,
    }


def show(summary: dict[str, Any]) -> None:
    for error, count in summary["errors"].items():
        err().print(f"{count} × {error}", style="red", markup=False)
    if "seconds" not in summary:
        return
    table = Table(box=None)
    for name in ("milliseconds", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(name, justify="left" if name == "milliseconds" else "right")
    for key, title in TIMES.items():
        table.add_row(title, *(f"{value:,.1f}" for value in summary[key].values()))
    out().print(table)
    speed = f"{summary['tokens_per_s']:,.1f} tokens/s · {summary['requests_per_s']:.2f} requests/s"
    per_round = summary["tokens_per_round"]
    out().print(speed + (f" · {per_round:.2f} tokens per round" if per_round else ""))


def draw(timings: Sequence[Timing], path: Path) -> None:
    """For each of the times, the share of requests that took no longer."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ValueError("the plot needs the package matplotlib: pip install 'jetspec[bench]'") from None
    good = [times_of(timing) for timing in timings if timing.error is None]
    figure, axes = plt.subplots(1, len(TIMES), figsize=(9, 3), sharey=True)
    for axis, (key, title) in zip(axes, TIMES.items(), strict=True):
        values = sorted(times[key] for times in good)
        axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post")
        axis.set(title=title, xlabel="ms")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
