"""A report as blocks, written as Markdown or as one HTML page without any other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar

import pandas as pd
from jinja2 import Environment, FileSystemLoader

NONE = "-"
"""Text of a cell without a value."""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2
    kind: ClassVar[str] = "heading"

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.text.lower())


@dataclass(frozen=True)
class Text:
    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Note:
    """A warning that stands before the numbers."""

    text: str
    kind: ClassVar[str] = "note"


@dataclass(frozen=True, eq=False)
class Table:
    """Cells are text. Columns behind the first `text_columns` are aligned right; `bold` holds (row, column)."""

    frame: pd.DataFrame
    caption: str = ""
    text_columns: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()
    wraps: bool = False
    """Cells are prose, broken into lines."""
    kind: ClassVar[str] = "table"

    @property
    def columns(self) -> list[str]:
        return list(self.frame.columns)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(self.frame.itertuples(index=False, name=None))

    def to_markdown(self) -> str:
        """Columns padded to one width, unless cells are prose."""

        def text(row: int, column: int, cell: str) -> str:
            safe = cell.replace("|", "\\|")
            return f"**{safe}**" if (row, column) in self.bold else safe

        lines = enumerate((self.columns, *self.rows), -1)
        cells = [[text(r, c, cell) for c, cell in enumerate(line)] for r, line in lines]
        widths = [0 if self.wraps else max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        is_left = [column < self.text_columns for column in range(len(widths))]
        rule = [
            "-" * max(width, 3) if left else "-" * max(width - 1, 3) + ":"
            for left, width in zip(is_left, widths, strict=True)
        ]

        def padded(line: Sequence[str]) -> str:
            columns = zip(line, widths, is_left, strict=True)
            return "| " + " | ".join(c.ljust(width) if left else c.rjust(width) for c, width, left in columns) + " |"

        return "\n".join(padded(line) for line in (cells[0], rule, *cells[1:]))


def make_table(
    rows: Iterable[Mapping[str, str]],
    caption: str = "",
    text_columns: int = 1,
    bold: Iterable[tuple[int, int]] = (),
    wraps: bool = False,
    keep_empty: bool = False,
) -> Table:
    """Table of rows by column name. Columns without a value in any row are left out."""
    frame = pd.DataFrame(list(rows), dtype=object)
    kept = list(frame.columns) if keep_empty else [name for name in frame.columns if (frame[name] != NONE).any()]
    texts = sum(name in kept for name in frame.columns[:text_columns])
    return Table(frame[kept], caption, texts, frozenset(bold), wraps)


@dataclass(frozen=True)
class Plot:
    """A picture; `svg` needs nothing else, as a file or inside a page."""

    name: str
    title: str
    caption: str
    svg: str
    kind: ClassVar[str] = "plot"


@dataclass(frozen=True)
class Details:
    """Content of a page that is folded at first: a table, or text."""

    title: str
    content: Table | str
    kind: ClassVar[str] = "details"


Block = Heading | Text | Note | Table | Plot | Details


def to_markdown(title: str, blocks: Sequence[Block], plot_folder: str) -> str:
    return "\n\n".join([f"# {title}", *(block_markdown(block, plot_folder) for block in blocks)]) + "\n"


def block_markdown(block: Block, plot_folder: str) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Note(text):
            return f"> **Note:** {text}"
        case Table():
            return block.to_markdown() + (f"\n\n{block.caption}" if block.caption else "")
        case Plot(name, title, caption, _):
            return f"![{title}]({plot_folder}/{name}.svg)\n\n{caption}"
        case Details(title, content):
            inner = content.to_markdown() if isinstance(content, Table) else f"```json\n{content}\n```"
            return f"<details><summary>{escape(title)}</summary>\n\n{inner}\n\n</details>"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One page from `report.html.j2`; all text is escaped."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("report.html.j2").render(title=title, blocks=blocks) + "\n"
