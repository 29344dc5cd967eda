"""`jetspec tree`: the draft tree of each round, one node per line, the accepted path marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.text import Text

from jetspec.commands.screen import err, out
from jetspec.commands.tree_html import DrawnRound, count_nodes, label, write_page
from jetspec.tree import children_of
from jetspec.types import RoundTrace, Update

KEPT, DROPPED, BONUS = "●", "○", "◆"
LEGEND = f"{KEPT} accepted   {DROPPED} rejected   {BONUS} the target's own token   log-probability, Σ of the path"

TokenText = Callable[[int], str]


def draw_trees(prompt: str, updates: Iterable[Update], token_text: TokenText, html: Path | None) -> None:
    """Draw every round as it happens, and all of them on a page at the end."""
    console, rounds = out(), []
    console.print(LEGEND, style="dim")
    for update in updates:
        assert update.trace is not None, "the stream was asked for traces"
        rounds.append(DrawnRound(update.trace, update.text))
        console.print("", round_text(update.trace, len(rounds), token_text), sep="\n")
    if html:
        write_page(html, prompt, rounds, token_text)
        err().print(f"Wrote {html}", style="dim", markup=False)


def round_text(trace: RoundTrace, number: int, token_text: TokenText) -> Text:
    """A headline and the tree below it."""
    headline = Text(f"round {number}: {count_nodes(trace)}", style="bold")
    return Text("\n").join([headline, *_tree_lines(trace, token_text)])


def _tree_lines(trace: RoundTrace, token_text: TokenText) -> Iterator[Text]:
    children, path = children_of(trace.parents), set(trace.path)

    def line(branch: str, mark: str, token: int, style: str, numbers: str = "") -> Text:
        return Text.assemble((branch, "dim"), (f"{mark} {label(token_text(token))}", style), (numbers, "dim"))

    def below(node: int, indent: str) -> Iterator[Text]:
        """The lines of a node's children: the target's own token first, then the draft's, best first."""
        if node == trace.path[-1]:
            branch = "├─" if children[node] else "└─"
            yield line(indent + branch, BONUS, trace.bonus, "bold yellow")
        for child in children[node]:
            is_last = child == children[node][-1]
            kept = child in path
            numbers = f"  {trace.logprobs[child]:.2f}  Σ {trace.scores[child]:.2f}"
            style = "bold green" if kept else "default"
            yield line(
                indent + ("└─" if is_last else "├─"), KEPT if kept else DROPPED, trace.tokens[child], style, numbers
            )
            yield from below(child, indent + ("  " if is_last else "│ "))

    yield line("", KEPT, trace.tokens[0], "bold green", "  anchor")
    yield from below(0, "")
