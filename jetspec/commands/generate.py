"""`jetspec generate`: the text on stdout and its statistics on stderr, or both as one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer

from jetspec.commands.options import (
    AsChat,
    AsJson,
    Decoding,
    Given,
    Prompt,
    System,
    examples,
    load_llm,
    options,
    read_prompt,
    stream,
)
from jetspec.commands.screen import last, note, printable, statistics, to_dict, write_json
from jetspec.types import Update

app = typer.Typer(add_completion=False)


@app.command(
    "generate",
    epilog=examples(
        'jetspec generate "Write a haiku about autumn."',
        "cat letter.txt | jetspec generate --max-tokens 400",
        'jetspec generate --raw "def fibonacci(n):" --drafter none',
        'jetspec generate "Name a colour." --temperature 0.8 --seed 7 --json',
        'jetspec generate "Count to ten." --set tree.depth=4',
    ),
)
@options(
    *("--model=model.name", "model.head", "model.drafter", "model.dtype", "model.device", "tree.budget", "tree.width"),
    *("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.seed"),
    *("sampling.max_tokens", "sampling.stop"),
    hidden=("sampling.presence_penalty", "sampling.frequency_penalty"),
)
def generate(
    settings: Decoding,
    given: Given,
    prompt: Prompt = None,
    system: System = None,
    chat: AsChat = True,
    as_json: AsJson = False,
) -> None:
    """Write an answer to PROMPT.

    The text goes to stdout as it appears, its statistics to stderr.
    """
    text = read_prompt(prompt)
    llm = load_llm(settings.model, settings.engine, given.get("tree"))
    updates = stream(llm, text, sampling=settings.sampling, chat=chat, system=system)
    write_json(to_dict(last(updates))) if as_json else write_text(updates)


def write_text(updates: Iterator[Update]) -> None:
    """Streams the text as it appears. A terminal gets it without control characters, a file unchanged."""
    clean = printable if sys.stdout.isatty() else str
    has_begun = False

    def show(update: Update) -> None:
        nonlocal has_begun
        has_begun = True
        sys.stdout.write(clean(update.text))
        sys.stdout.flush()

    try:
        completion = last(updates, show)
    finally:
        if has_begun:
            sys.stdout.write("\n")
    note(statistics(completion.stats))
