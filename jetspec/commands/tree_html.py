"""Draft trees as one standalone HTML page: inline SVG and CSS, light and dark, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from jetspec.types import RoundTrace

ROW, BOX, GAP, PAD = 26, 20, 34, 8
"""Pixels: row height, box height, space between columns, margin."""
CHAR = 7.3
"""Width of one column of the 12 px monospaced font; wide characters take two."""


def label(text: str) -> str:
    """A token in quotes, which show its spaces."""
    return f'"{text}"'


def count_nodes(trace: RoundTrace) -> str:
    """`16 nodes, 3 accepted + 1`: the one is the target's own token."""
    size = len(trace.tokens)
    return f"{size} node{'s' * (size > 1)}, {len(trace.path) - 1} accepted + 1"


def page(prompt: str, rounds: Sequence[tuple[RoundTrace, str]], token_text: Callable[[int], str]) -> str:
    """The whole document: the prompt, the text with a shade per round, and a picture of every tree."""
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("jetspec.commands", ""), autoescape=True).get_template("tree.html")
    pictures = [(text, count_nodes(trace), picture(trace, token_text)) for trace, text in rounds]
    return template.render(prompt=prompt, rounds=pictures, pad=PAD, box=BOX)


@dataclass(frozen=True)
class Box:
    """A node with its place on the page; `y` is its middle."""

    text: str
    x: float
    y: float
    width: float
    end: float


def picture(trace: RoundTrace, token_text: Callable[[int], str]) -> dict[str, Any]:
    """The tree from left to right, a column per depth: `nodes` (box, kind, title), `lines` (kind, boxes, width), size.

    The target's own token is one more node.
    """
    count, logprobs = len(trace.tokens), trace.logprobs
    parents, on_path = [*trace.parents, trace.path[-1]], {*trace.path, count}
    labels = [label(token_text(token)) for token in (*trace.tokens, trace.bonus)]
    titles = ["anchor", *(_title(trace, node, token_text) for node in range(1, count)), "the target's own token"]
    for node in range(1, count):
        labels[node] += f" {logprobs[node]:.2f}"
    boxes = place(parents, labels, on_path)
    kinds = [*("kept" if node in on_path else "dropped" for node in range(count)), "bonus"]
    widths = [4.0, *(1 + 3 * math.exp(min(logprobs[node], 0.0)) for node in range(1, count)), 4.0]
    # The path is drawn last, over the lines it crosses.
    order = sorted(range(1, count + 1), key=lambda node: node in on_path)
    return {
        "nodes": list(zip(boxes, kinds, titles, strict=True)),
        "lines": [(kinds[node], boxes[parents[node]], boxes[node], widths[node]) for node in order],
        "width": max(box.end for box in boxes) + PAD,
        "height": max(box.y for box in boxes) + ROW / 2 + PAD,
    }


def place(parents: list[int], labels: list[str], on_path: set[int]) -> list[Box]:
    """Columns as wide as their widest label; a parent level with its first child; the accepted path on the top row."""
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    widths = [cell_len(text) * CHAR + 2 * PAD for text in labels]
    columns = [max(w for w, d in zip(widths, depths, strict=True) if d == depth) for depth in range(max(depths) + 1)]
    left = [PAD + sum(columns[:depth]) + GAP * depth for depth in range(len(columns))]
    return [
        Box(text, left[depth], PAD + ROW * (row + 0.5), width, left[depth] + width)
        for text, depth, row, width in zip(labels, depths, _rows(parents, on_path), widths, strict=True)
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


def _title(trace: RoundTrace, node: int, token_text: Callable[[int], str]) -> str:
    """The path to a node, as text, and its log-probability."""
    path, at = [], node
    while at:
        path.append(token_text(trace.tokens[at]))
        at = trace.parents[at]
    return f"{label(''.join(reversed(path)))}  Σ {trace.scores[node]:.2f}"
