"""`jetspec info`: the contents of a model or a head, and the reasons why the two do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from jetspec.commands.options import AsJson, examples
from jetspec.commands.screen import NEGATIVE, out, write_json
from jetspec.models.hub import check_name, head_path

app = typer.Typer(add_completion=False)


@app.command(
    "info", epilog=examples("jetspec info smollm2-135m-instruct", "jetspec info models/target --head heads/mine --json")
)
def info(
    name: Annotated[
        str, typer.Argument(help="A model or a head: a Hugging Face id, a folder or a GGUF file.", metavar="NAME")
    ],
    head: Annotated[str | None, typer.Option(help="A head to check against NAME.", metavar="NAME")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a model or a head.

    With --head, also whether the two fit each other. Exit status 1: they do not.
    """
    for each in (name, head):
        check_name(head_path(each or name))
    from jetspec.models.describe import describe, fits

    model = describe(name)
    if head is None:
        write_json(model) if as_json else _show(model)
        return
    other = describe(head_path(head))
    problems = fits(model, other)
    if as_json:
        write_json({"model": model, "head": other, "fits": not problems, "problems": problems})
    else:
        _show(model)
        _show(other)
        out().print("fits: no" if problems else "fits: yes", style="bold red" if problems else "bold green")
        for problem in problems:
            out().print(f"- {problem}", markup=False)
    if problems:
        raise typer.Exit(NEGATIVE)


def _show(description: dict[str, Any]) -> None:
    console = out()
    if not console.is_terminal:
        console.print(Text("".join(f"{name}: {value}\n" for name, value in _rows(description))))
        return
    table = Table(show_header=False, box=SIMPLE)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(description):
        table.add_row(name, Text(value))
    console.print(table)


def _rows(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values in words. A part that is None does not exist and is left out."""
    for name, value in description.items():
        if value is not None:
            yield name.replace("_", " "), _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
