"""`python -m benchmarks COMMAND`. A command's module is imported when the command is used."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from benchmarks.options import ANYTHING, moved
from jetspec.commands.app import OneLineErrors

COMMANDS = {
    "run": ("run:run", "Measure methods against plain decoding."),
    "grade": ("run:grade", "Grade the answers of a run again."),
    "report": ("report:report", "Make tables and plots of measurements."),
    "pages": ("pages:pages", "Make every generated page, table and plot from the records again."),
    "load": ("load:load", "Put an OpenAI-compatible server under load, and time it."),
    "serve": ("serve:app", "Servers under load: `check` for errors and leaks, `rates` for speed."),
    "engine": ("engine:app", "The engine's speed in every sampling setting."),
    "soak": ("engine:soak", "Random arrivals, cancels and preemptions, checked for leaks and wrong texts."),
    "lossless": ("engine:lossless", "Greedy output against `generate` of transformers, token for token."),
    "vllm": ("vllm:vllm", "vLLM alone, with chains and with our trees."),
    "training": ("training:training", "Speed and memory of training."),
    "ablate": ("training:ablate", "Train one short head per setting, and score them alike."),
    "tree-settings": ("training:tree_settings", "Tokens per round of a head's trees, by temperature and width."),
    "records": ("records:records", "Compare the records of the performance page with their limits."),
    "ship-head": ("ship_head:ship_head", "Put a trained head into the package."),
    "screenshots": ("screenshots:screenshots", "Take the playground's pictures."),
    "kernel-choices": ("kernel_choices:main", "Measure the kernels that `jetspec.ops.select` chooses from."),
}
"""Module and function of every command, with one line of help."""
MOVED = {"cpu-speed": "run benchmarks/recipes/cpu.yaml"}
"""Commands that left, and what takes their place."""


class Commands(OneLineErrors):
    """Commands that are imported on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        single = typer.Typer(add_completion=False)
        if name in MOVED:
            single.command(name, context_settings=ANYTHING)(moved(name, MOVED[name]))
        elif name in COMMANDS:
            module, attribute = COMMANDS[name][0].split(":")
            loaded = import_module(f"benchmarks.{module}")
            found = getattr(loaded, attribute)
            if isinstance(found, typer.Typer):
                return typer.main.get_command(found)
            epilog = getattr(loaded, f"{attribute.upper()}_EPILOG", getattr(loaded, "EPILOG", None))
            single.command(name, epilog=epilog, context_settings=HELP)(found)
        return typer.main.get_command(single) if single.registered_commands else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=HELP,
    rich_markup_mode=None,  # rich help would import every command
)


@app.callback()
def root(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Measure JetSpec, reproduce the paper's experiments, and make the documentation's tables."""


def main() -> None:
    app(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
