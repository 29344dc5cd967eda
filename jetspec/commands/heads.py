"""`jetspec heads`: the registry of published draft heads, and which of them are on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from jetspec.commands.options import AsJson, examples
from jetspec.commands.screen import note, out, write_json
from jetspec.models.hub import check_name, local_head, shipped_head
from jetspec.models.registry import KnownHead, heads_of, known_heads

COLUMNS = ("target", "head", "kind", "block", "tokens per round", "licence", "files")

app = typer.Typer(add_completion=False)


@app.command("heads", epilog=examples("jetspec heads", "jetspec heads Qwen/Qwen3-8B", "jetspec heads --json"))
def heads(
    target: Annotated[str | None, typer.Argument(help="A model; all heads when left out.", metavar="TARGET")] = None,
    as_json: AsJson = False,
) -> None:
    """List the known draft heads of a model, the best first, and what --head auto would download.

    Figures are their authors', for GSM8K, and depend on the tree. Needs no network.
    """
    if target is not None:
        check_name(target)
    found = known_heads() if target is None else heads_of(target)
    if as_json:
        write_json({"heads": [asdict(head) | {"on_this_machine": local_head(head.name) is not None} for head in found]})
    elif not found:
        note(f"no head is known for {target}; `jetspec heads` lists all")
    elif out().is_terminal:
        table = Table(*COLUMNS, box=SIMPLE)
        for head in found:
            table.add_row(*_cells(head))
        out().print(table, markup=False)
    else:
        print(*("\t".join(cells) for cells in (COLUMNS, *map(_cells, found))), sep="\n")


def _cells(head: KnownHead) -> tuple[str, ...]:
    block, figure = head.block_size, head.tokens_per_round
    per_round = f"{figure} ({head.measured})" if figure else ""
    return head.targets[0], head.name, head.kind, str(block or ""), per_round, head.license or "", _files(head)


def _files(head: KnownHead) -> str:
    """Place of the files: the package, the cache of Hugging Face, or still to be downloaded."""
    if local_head(head.name) is not None:
        return "package" if shipped_head(head.name) else "cache"
    return f"to download: {head.size_gb} GB" if head.size_gb else "to download"
