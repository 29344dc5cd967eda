"""Calls of the command line in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.testing import CliRunner, Result

from jetspec.commands.app import app


def run(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


def all_commands(command: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    """Words of a command and of all commands below it."""
    yield words, command
    for name in getattr(command, "commands", {}):
        yield from all_commands(command.get_command(None, name), f"{words} {name}".strip())
