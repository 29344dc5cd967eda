"""Markdown tables, and a report as one HTML page without any other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markdown_it import MarkdownIt

NONE = "-"
"""Text of a cell without a value."""


def make_table(
    rows: Iterable[Mapping[str, str]],
    caption: str = "",
    text_columns: int = 1,
    wraps: bool = False,
    keep_empty: bool = False,
) -> str:
    """Markdown table of rows by column name, and its caption. Empty without rows.

    Columns behind the first `text_columns` are aligned right. Those without a value in any row are left out, unless
    `keep_empty`. Cells are padded to one width, unless `wraps`: they are prose.
    """
    rows = list(rows)
    columns = []
    for place, name in enumerate(rows[0] if rows else ()):
        cells = [cell.replace("|", "\\|") for cell in (name, *(row[name] for row in rows))]
        if not keep_empty and set(cells[1:]) == {NONE}:
            continue
        is_left, width = place < text_columns, 0 if wraps else max(3, *map(len, cells))
        rule = "-" * max(width, 3) if is_left else "-" * max(width - 1, 3) + ":"
        cells.insert(1, rule)
        columns.append([cell.ljust(width) if is_left else cell.rjust(width) for cell in cells])
    lines = "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
    return f"{lines}\n\n{caption}" if lines and caption else lines


def template(name: str, autoescape: bool = False) -> Template:
    """A template of this folder."""
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=autoescape, trim_blocks=True, lstrip_blocks=True).get_template(name)


def folded(title: str, content: str) -> str:
    """A part of a report that is folded at first; nothing without content."""
    return content and f"<details><summary>{escape(title)}</summary>\n\n{content}\n\n</details>"


def to_html(title: str, text: str, pictures: Mapping[str, str]) -> str:
    """One page of a report's Markdown from `report.html.j2`, with its pictures, SVG by name, inside.

    HTML in the text is escaped, but for that of folded parts.
    """

    def picture(self: Any, tokens: Any, index: int, *_: Any) -> str:
        name = Path(tokens[index].attrs["src"]).stem
        return f'<span class="plot" id="plot-{name}">{pictures[name]}</span>'

    def html_block(self: Any, tokens: Any, index: int, *_: Any) -> str:
        found = tokens[index].content
        return found if found.startswith(("<details><summary>", "</details>")) else escape(found)

    reader = MarkdownIt("commonmark").enable("table")
    reader.add_render_rule("image", picture)
    reader.add_render_rule("html_block", html_block)
    reader.add_render_rule("html_inline", lambda self, tokens, index, *_: escape(tokens[index].content))
    reader.add_render_rule("table_open", lambda *_: '<div class="wide"><table>')
    reader.add_render_rule("table_close", lambda *_: "</table></div>")
    tokens, sections = reader.parse(text), dict[str, str]()
    for token, content in pairwise(tokens):
        if token.type == "heading_open":
            anchor = "".join(c if c.isalnum() else "-" for c in content.content.lower())
            token.attrSet("id", anchor)
            sections |= {anchor: content.content} if token.tag == "h2" else {}
    body = reader.renderer.render(tokens, reader.options, {})
    return template("report.html.j2", autoescape=True).render(title=title, sections=sections, body=body) + "\n"
