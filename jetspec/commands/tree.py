"""`jetspec tree`: the draft tree of each round, one node per line, the accepted path marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from jetspec.commands.options import AsChat, Decoding, Given, Prompt, examples, load_llm, options, read_prompt, stream
from jetspec.commands.screen import note, out
from jetspec.commands.tree_html import count_nodes, label, page
from jetspec.files import write_whole
from jetspec.types import RoundTrace, Update

KEPT, DROPPED, BONUS = "●", "○", "◆"
LEGEND = f"{KEPT} accepted   {DROPPED} rejected   {BONUS} the target's own token   log-probability, Σ of the path"

TokenText = Callable[[int], str]

app = typer.Typer(add_completion=False)


@app.command(
    "tree",
    epilog=examples(
        'jetspec tree "Count from one to ten." --rounds 3',
        'jetspec tree "Why is the sky blue?" --budget 32 --html tree.html',
    ),
)
@options("--model=model.name", "model.head", "tree.budget", "tree.width", "sampling.temperature")
def tree(
    settings: Decoding,
    given: Given,
    prompt: Prompt = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to draw.")] = 5,
    html: Annotated[Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Also write a web page.")] = None,
    chat: AsChat = True,
) -> None:
    """Draw the tree of each round.

    Shows every token with its log-probability, and the path that was accepted.
    """
    text = read_prompt(prompt)
    if html and not html.parent.is_dir():
        raise FileNotFoundError(f"{html.parent} is not a folder; create it first")
    llm = load_llm(settings.model, settings.engine, given.get("tree"))
    updates = stream(llm, text, sampling=settings.sampling, chat=chat, trace=True)
    draw_trees(text, islice(updates, rounds), llm.tokenizer.token_text, html)


def draw_trees(prompt: str, updates: Iterable[Update], token_text: TokenText, html: Path | None) -> None:
    """Draws every round as it happens, and all of them on a page at the end."""
    console, rounds = out(), []
    console.print(LEGEND, style="dim")
    for update in updates:
        assert update.trace is not None, "the stream was started with trace=True"
        rounds.append((update.trace, update.text))
        console.print("", round_text(update.trace, len(rounds), token_text), sep="\n")
    if html:
        write_whole(html, page(prompt, rounds, token_text))
        note(f"Wrote {html}")


def round_text(trace: RoundTrace, number: int, token_text: TokenText) -> Text:
    """A headline and the tree below it."""
    headline = Text(f"round {number}: {count_nodes(trace)}", style="bold")
    return Text("\n").join([headline, *_tree_lines(trace, token_text)])


def _tree_lines(trace: RoundTrace, token_text: TokenText) -> Iterator[Text]:
    from jetspec.tree import children_of

    children, path = children_of(trace.parents), set(trace.path)

    def line(branch: str, mark: str, token: int, style: str, numbers: str = "") -> Text:
        return Text.assemble((branch, "dim"), (f"{mark} {label(token_text(token))}", style), (numbers, "dim"))

    def below(node: int, indent: str) -> Iterator[Text]:
        """The lines of a node's children: the target's own token first, then the draft's, best first."""
        if node == trace.path[-1]:
            branch = "├─" if children[node] else "└─"
            yield line(indent + branch, BONUS, trace.bonus, "bold yellow")
        for child in children[node]:
            is_last, kept = child == children[node][-1], child in path
            branch, mark = "└─" if is_last else "├─", KEPT if kept else DROPPED
            numbers = f"  {trace.logprobs[child]:.2f}  Σ {trace.scores[child]:.2f}"
            yield line(indent + branch, mark, trace.tokens[child], "bold green" if kept else "default", numbers)
            yield from below(child, indent + ("  " if is_last else "│ "))

    yield line("", KEPT, trace.tokens[0], "bold green", "  anchor")
    yield from below(0, "")
