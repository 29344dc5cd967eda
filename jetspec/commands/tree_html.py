"""Draft trees as one standalone HTML page: inline SVG and CSS, light and dark, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.cells import cell_len

from jetspec.files import write_whole
from jetspec.types import RoundTrace

ROW, BOX, GAP, PAD = 26, 20, 34, 8
"""Pixels: row height, box height, space between columns, margin."""
CHAR = 7.3
"""Width of one column of the 12 px monospaced font; wide characters take two."""


@dataclass(frozen=True)
class DrawnRound:
    """A round and the text that became visible with it."""

    trace: RoundTrace
    text: str


def label(text: str) -> str:
    """A token in quotes, which show its spaces."""
    return f'"{text}"'


def count_nodes(trace: RoundTrace) -> str:
    """`16 nodes, 3 accepted + 1`: the one is the target's own token."""
    size = len(trace.tokens)
    return f"{size} node{'s' * (size > 1)}, {len(trace.path) - 1} accepted + 1"


def write_page(path: Path, prompt: str, rounds: Sequence[DrawnRound], token_text: Callable[[int], str]) -> None:
    """Write the page, whole or not at all."""
    write_whole(path, page(prompt, rounds, token_text))


def page(prompt: str, rounds: Sequence[DrawnRound], token_text: Callable[[int], str]) -> str:
    """The whole document: the prompt, the text with a shade per round, and a picture of every tree."""
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("jetspec.commands", ""), autoescape=True).get_template("tree.html")
    pictures = [(each.text, count_nodes(each.trace), _picture(each.trace, token_text)) for each in rounds]
    return template.render(prompt=prompt, rounds=pictures)


@dataclass(frozen=True)
class _Box:
    """A node with its place on the page; `y` is its middle."""

    text: str
    x: float
    y: float
    width: float


def _picture(trace: RoundTrace, token_text: Callable[[int], str]) -> str:
    """The tree from left to right, a column per depth. The target's own token is drawn as one more node."""
    nodes = len(trace.tokens)
    tokens, parents = [*trace.tokens, trace.bonus], [*trace.parents, trace.path[-1]]
    numbers = ["", *(f" {trace.logprobs[node]:.2f}" for node in range(1, nodes)), ""]
    labels = [label(token_text(token)) + number for token, number in zip(tokens, numbers, strict=True)]
    on_path = {*trace.path, nodes}
    boxes = _place(parents, labels, on_path)
    kinds = ["bonus" if n == nodes else "kept" if n in on_path else "dropped" for n in range(nodes + 1)]
    weights = [1.0, *(math.exp(min(trace.logprobs[node], 0.0)) for node in range(1, nodes)), 1.0]
    # The path is drawn last, over the lines it crosses.
    order = sorted(range(1, nodes + 1), key=lambda node: node in on_path)
    lines = [_line(boxes[parents[n]], boxes[n], kinds[n], weights[n]) for n in order]
    titles = ["anchor", *(_title(trace, node, token_text) for node in range(1, nodes)), "the target's own token"]
    drawn = [_node(box, kind, title) for box, kind, title in zip(boxes, kinds, titles, strict=True)]
    width = max(box.x + box.width for box in boxes) + PAD
    height = max(box.y for box in boxes) + ROW / 2 + PAD
    return f'<svg width="{width:.0f}" height="{height:.0f}" role="img">{"".join(lines)}{"".join(drawn)}</svg>'


def _place(parents: list[int], labels: list[str], on_path: set[int]) -> list[_Box]:
    """Columns as wide as their widest label; a parent level with its first child; the accepted path on the top row."""
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    widths = [cell_len(text) * CHAR + 2 * PAD for text in labels]
    columns = [max(w for w, d in zip(widths, depths, strict=True) if d == depth) for depth in range(max(depths) + 1)]
    left = [PAD + sum(columns[:depth]) + GAP * depth for depth in range(len(columns))]
    rows = _rows(parents, on_path)
    return [
        _Box(text, left[depth], PAD + ROW * (row + 0.5), width)
        for text, depth, row, width in zip(labels, depths, rows, widths, strict=True)
    ]


def _rows(parents: list[int], on_path: set[int]) -> list[int]:
    """Row of every node: a depth-first walk, the path first, that takes a new row whenever it turns back."""
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda node: node not in on_path):
        children[parents[node]].append(node)
    rows, last_row, stack = [0] * len(parents), 0, [(0, True)]
    while stack:
        node, is_first = stack.pop()
        last_row += not is_first
        rows[node] = last_row
        stack.extend((child, rank == 0) for rank, child in reversed(list(enumerate(children[node]))))
    return rows


def _line(parent: _Box, child: _Box, kind: str, weight: float) -> str:
    start, end = parent.x + parent.width, child.x
    middle = (start + end) / 2
    curve = (
        f"M{start:.0f} {parent.y:.0f}C{middle:.0f} {parent.y:.0f} {middle:.0f} {child.y:.0f} {end:.0f} {child.y:.0f}"
    )
    return f'<path class="{kind}" d="{curve}" stroke-width="{1 + 3 * weight:.1f}"/>'


def _node(box: _Box, kind: str, title: str) -> str:
    return (
        f'<g class="{kind}"><title>{escape(title)}</title>'
        f'<rect x="{box.x:.0f}" y="{box.y - BOX / 2:.0f}" width="{box.width:.0f}" height="{BOX}" rx="5"/>'
        f'<text x="{box.x + PAD:.0f}" y="{box.y + 4:.0f}" xml:space="preserve">{escape(box.text)}</text></g>'
    )


def _title(trace: RoundTrace, node: int, token_text: Callable[[int], str]) -> str:
    """The path to a node, as text, and its log-probability."""
    path, at = [], node
    while at:
        path.append(token_text(trace.tokens[at]))
        at = trace.parents[at]
    return f"{label(''.join(reversed(path)))}  Σ {trace.scores[node]:.2f}"
