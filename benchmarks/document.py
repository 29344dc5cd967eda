"""A report as blocks, written as Markdown or as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Warned:
    """What a reader must know before believing the numbers."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells are text. Columns from `first_number` on are aligned right; `bold` holds (row, column) to stress."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    first_number: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()
    wraps: bool = False
    """Whether cells are prose, which may be broken into lines."""


@dataclass(frozen=True)
class Plot:
    """A picture; `svg` stands for itself, as a file and inside a page."""

    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Folded:
    """What few will want to see: closed on the page."""

    title: str
    content: Table | str
    """A table, or text to show as it is."""


Block = Heading | Text | Warned | Table | Plot | Folded


def to_markdown(title: str, blocks: Sequence[Block], plot_folder: str) -> str:
    parts = [f"# {title}", *(_markdown(block, plot_folder) for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block, plot_folder: str) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Warned(text):
            return f"> **Note:** {text}"
        case Table():
            return markdown_table(block) + (f"\n\n{block.caption}" if block.caption else "")
        case Plot(name, title, caption, _):
            return f"![{title}]({plot_folder}/{name}.svg)\n\n{caption}"
        case Folded(title, content):
            inner = markdown_table(content) if isinstance(content, Table) else f"```json\n{content}\n```"
            return f"<details><summary>{escape(title)}</summary>\n\n{inner}\n\n</details>"


def markdown_table(table: Table) -> str:
    """Readable as it stands, too: columns are as wide as they must be, unless cells are prose."""

    def text(row: int, column: int, cell: str) -> str:
        safe = cell.replace("|", "\\|")
        return f"**{safe}**" if (row, column) in table.bold else safe

    lines = [[text(r, c, cell) for c, cell in enumerate(row)] for r, row in enumerate((table.columns, *table.rows), -1)]
    widths = [3 if table.wraps else max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    is_left = [column < table.first_number for column in range(len(widths))]
    rule = ["-" * width if left else "-" * (width - 1) + ":" for left, width in zip(is_left, widths, strict=True)]

    def padded(line: Sequence[str]) -> str:
        columns = zip(line, widths, is_left, strict=True)
        return "| " + " | ".join(c.ljust(width) if left else c.rjust(width) for c, width, left in columns) + " |"

    return "\n".join(padded(line) for line in (lines[0], rule, *lines[1:]))


def to_html(title: str, blocks: Sequence[Block]) -> str:
    links = "".join(
        f'<a href="#{_anchor(block.text)}">{escape(block.text)}</a>'
        for block in blocks
        if isinstance(block, Heading) and block.level == 2
    )
    body = "\n".join(
        f'<div class="plots">{"".join(map(_html, group))}</div>' if is_plot else "\n".join(map(_html, group))
        for is_plot, group in groupby(blocks, key=lambda block: isinstance(block, Plot))
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level} id="{_anchor(text)}">{escape(text)}</h{level}>'
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Warned(text):
            return f'<p class="warned" role="note">{escape(text)}</p>'
        case Table():
            return _html_table(block)
        case Plot(name, title, caption, svg):
            picture = f'<div class="wide">{svg}</div>'
            return f'<figure id="plot-{name}">{picture}<figcaption>{escape(caption)}</figcaption></figure>'
        case Folded(title, content):
            inner = _html_table(content) if isinstance(content, Table) else f"<pre>{escape(content)}</pre>"
            return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _html_table(table: Table) -> str:
    def cell(tag: str, row: int, column: int, text: str) -> str:
        marks = "n" * (column >= table.first_number) + " b" * ((row, column) in table.bold)
        return f'<{tag} class="{marks}">{escape(text)}</{tag}>' if marks else f"<{tag}>{escape(text)}</{tag}>"

    head = "".join(cell("th", -1, c, text) for c, text in enumerate(table.columns))
    rows = "".join(
        f"<tr>{''.join(cell('td', r, c, text) for c, text in enumerate(row))}</tr>" for r, row in enumerate(table.rows)
    )
    note = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    kind = ' class="wraps"' if table.wraps else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def _anchor(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())


STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f8fa; --ink: #1f2328; --faint: #59636e; --edge: #d0d7de;
  --link: #0969da; --warn: #9a6700; --warn-fill: #fff8c5; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --card: #161b22; --ink: #e6edf3; --faint: #9198a1; --edge: #30363d; --link: #58a6ff;
    --warn: #d29922; --warn-fill: #2e2511; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--edge); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; } a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.warned { background: var(--warn-fill); border-left: 4px solid var(--warn); border-radius: 4px; padding: .5rem .9rem; }
.wide { overflow-x: auto; border: 1px solid var(--edge); border-radius: 8px; margin: .6rem 0; }
.caption, figcaption { color: var(--faint); font-size: .88rem; margin: .3rem 0 1.2rem; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td { padding: .35rem .7rem; text-align: left; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { background: var(--card); font-weight: 600; }
td { border-top: 1px solid var(--edge); }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); }
th:first-child { background: var(--card); }
.wraps td:not(.n) { white-space: normal; max-width: 30rem; } .wraps tr > :first-child { position: static; }
.n { text-align: right; } .b { font-weight: 700; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 0 1.5rem; }
figure { margin: .5rem 0; min-width: 0; } figure svg { display: block; width: 100%; min-width: 28rem; height: auto; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--link); }
pre { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: .8rem; overflow-x: auto;
  font-size: .82rem; overflow-wrap: normal; }
@media (max-width: 40rem) {
  body { padding: 1rem .9rem; } th, td { padding: .3rem .5rem; } table { font-size: .84rem; } }
"""
