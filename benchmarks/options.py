"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.recipe import DtypeName
from jetspec.models.hub import DEFAULT_MODEL

Output = Annotated[Literal["md", "csv", "json", "jsonl"], typer.Option(help="Form of the table on stdout.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Target: a name, folder or GGUF file.", metavar="NAME")]
Device = Annotated[str, typer.Option(help="cpu or cuda.", metavar="NAME")]
Dtype = Annotated[DtypeName, typer.Option(help="float32, bfloat16, float16.", metavar="TYPE")]
RecordFile = Annotated[Path, typer.Option("--out", help="Record to write.", dir_okay=False, metavar="FILE")]
RecordFolder = Annotated[Path, typer.Option("--out", help="Folder of the records.", file_okay=False, metavar="FOLDER")]
Commit = Annotated[str | None, typer.Option(help="Commit of the source, where git cannot tell.", metavar="HASH")]
Questions = Annotated[
    Path, typer.Option(help="Folder of JSONL files with `turns`.", exists=True, file_okay=False, metavar="FOLDER")
]
TrainRecipe = Annotated[Path, typer.Option(help="Training recipe with the settings that all share.", metavar="FILE")]
Settings = Annotated[list[str], typer.Option("--set", help="Change a setting of the recipe.", metavar="KEY=VALUE")]
DEFAULT = DEFAULT_MODEL
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that left."""


def moved(old: str, now: str) -> Callable[[], None]:
    """A command that left, and tells where it went."""

    def command() -> None:
        raise ValueError(f"`python -m benchmarks {old}` is now `python -m benchmarks {now}`")

    return command


def with_options(options: Callable[..., Any], **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a command takes the fields of a dataclass as options in place of its first parameter, an instance.

    `defaults` replace those of fields.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = signature(function, eval_str=True).parameters.values()
        fields = signature(options, eval_str=True).parameters.values()
        fields_now = [field.replace(default=defaults.get(field.name, field.default)) for field in fields]

        @wraps(function)
        def command(**given: Any) -> None:
            instance = options(**{field.name: given.pop(field.name) for field in fields})
            function(instance, **given)

        every = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (*fields_now, *own)]
        command.__dict__["__signature__"] = Signature(every)
        command.__annotations__ = {each.name: each.annotation for each in every}
        return command

    return made


def examples(*lines: str) -> str:
    return "\n  ".join(["Examples:", *(f"python -m benchmarks {line}" for line in lines)])


def numbers(text: str, kind: Any = int, least: float = 1, name: str = "") -> list[Any]:
    """Values of A,B,.., each at least `least`."""
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    bound = f" of at least {least:g}" if least > -math.inf else ""
    if not values or min(values) < least:
        raise typer.BadParameter(f"{text!r} is no list of numbers{bound}, such as 1,8", param_hint=name)
    return values
