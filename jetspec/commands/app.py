"""`jetspec COMMAND`: the group, its errors and exit statuses. Each command is imported when it is used."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from io import StringIO
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from jetspec import __version__
from jetspec.commands import screen
from jetspec.commands.options import examples
from jetspec.commands.screen import BROKEN_PIPE, FAILED, INTERRUPTED

COMMANDS = (
    *("generate", "chat", "compare", "tree", "bench", "serve", "train", "eval-head", "data", "profile"),
    *("export", "info", "heads", "vllm", "version", "help"),
)
GONE = ("report", "grade", "load")
"""Commands of an earlier release, now of `python -m benchmarks`."""
PLUGINS = {"vllm": ("jetspec_vllm", "Draft trees inside vLLM.")}
"""Commands of other packages, with the package and the help. Such a package has an entry point of this name in the
group `jetspec.commands`, which is a Typer app."""

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Base class of the parser's errors; Typer exports only this one of its children."""


class OneLineErrors(TyperGroup):
    """A group of commands whose errors become one line on stderr, without a traceback, and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            raise _misused(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except USAGE_ERROR as error:
            raise _misused(error) from None
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            is_memory = _is_memory(error)
            if ctx.params.get("debug") or (isinstance(error, RuntimeError) and not is_memory):
                raise
            _tell(_one_line(error))
            _drop_stdout()
            raise typer.Exit(FAILED) from None


class Commands(OneLineErrors):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys((*COMMANDS, *GONE))

    def get_command(self, ctx: Any, name: str) -> Any:
        """A command, loaded when it is first looked up."""
        if name in self.commands and self.commands[name] is None:
            self.commands[name] = _load(name)
        return self.commands.get(name)

    def get_params(self, ctx: Any) -> list[Any]:
        """The options. Those that install shell completion are needed once, so the examples name them."""
        params: list[Any] = super().get_params(ctx)
        for each in params:
            each.hidden = each.hidden or each.name in ("install_completion", "show_completion")
        return params


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        'jetspec generate "Why is the sky blue?"',
        "jetspec compare",
        "jetspec help tree",
        "jetspec --install-completion",
    ),
)
built_in = {name: typer.Typer(add_completion=False) for name in ("version", "help")}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jetspec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", callback=screen.set_verbose, help="Print settings and steps on stderr.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Tree-speculative decoding: the target model's own text, several tokens per forward pass."""


@built_in["version"].command("version")
def version() -> None:
    """Print the versions of jetspec and of the packages that it computes with."""
    from platform import platform, python_version

    from jetspec.record import package_versions

    print(f"jetspec {__version__}\npython {python_version()} on {platform()}")
    for name, found in package_versions().items():
        if name != "jetspec":
            print(f"{name} {found}")


@built_in["help"].command("help")
def show_help(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="All, if none.")] = None,
) -> None:
    """Show the help of a command."""
    group = context.find_root().command
    if status := group.main([*(words or ()), "--help"], prog_name="jetspec", standalone_mode=False):
        raise typer.Exit(status)


def _load(name: str) -> Any:
    """A command: one of this package, of a plugin, or a placeholder that tells where it is."""
    if name in GONE:
        return _placeholder(
            name, f"`jetspec {name}` is now `python -m benchmarks {name}`, from a clone of the repository"
        )
    if name in PLUGINS:
        return _plugin(name, *PLUGINS[name])
    found = built_in[name] if name in built_in else import_module(f"jetspec.commands.{name.replace('-', '_')}").app
    command: Any = typer.main.get_command(found)
    for each in (command, *getattr(command, "commands", {}).values()):
        each.params += typer.main.get_command(behind).params
    return command


def _pass_up(context: typer.Context, option: typer.CallbackParam, wanted: bool) -> None:
    """Sets an option of the group that was given behind the command."""
    if wanted:
        context.find_root().params[str(option.name)] = True
        if option.name == "verbose":
            screen.set_verbose(True)


behind = typer.Typer(add_completion=False)


@behind.command()
def behind_command(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", hidden=True, expose_value=False, callback=_pass_up)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", hidden=True, expose_value=False, callback=_pass_up)] = False,
) -> None:
    """Options of the group that every command takes as well."""


def _placeholder(name: str, reason: str, help: str = "", hidden: bool = True) -> Any:
    """A command that fails with one line, whatever its words."""

    def fail(context: typer.Context) -> None:
        raise ValueError(reason)

    return _any_words(name, fail, help, hidden)


def _plugin(name: str, package: str, help: str) -> Any:
    """The command of another package. It is imported when it runs."""
    found = next(iter(entry_points(group="jetspec.commands", name=name)), None)
    if found is None:
        wheel = package.replace("_", "-")
        reason = f"`jetspec {name}` needs {package}: in a clone pip install -e ./{package}, else pip install {wheel}"
        return _placeholder(name, reason, help, hidden=False)

    def run(context: typer.Context) -> None:
        command: Any = typer.main.get_command(found.load())
        with command.make_context(name, context.args, parent=context.parent) as inner:
            command.invoke(inner)

    return _any_words(name, run, help, hidden=False)


def _any_words(name: str, run: Callable[[typer.Context], None], help: str, hidden: bool) -> Any:
    """A command whose words are not parsed, --help among them."""
    made = typer.Typer(add_completion=False)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    made.command(name, help=help, hidden=hidden, context_settings=settings, add_help_option=False)(run)
    return typer.main.get_command(made)


def _misused(error: Any) -> Exception:
    """The exception for words that the parser did not understand. With no words at all, help is shown."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return cast(Exception, error)
    where = error.ctx.command_path if error.ctx else "jetspec"
    _tell(f"{_one_line(error.format_message()).rstrip('.?')}; see {where} --help")
    return typer.Exit(FAILED)


def _is_memory(error: Exception) -> bool:
    """torch has its own error for a full GPU, and a RuntimeError for a full machine."""
    is_full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_full or "can't allocate memory" in str(error)


def _tell(line: str) -> None:
    """One line on stderr. Where stderr is full or closed, only the exit status remains."""
    with suppress(OSError):
        print(f"jetspec: error: {line}", file=sys.stderr, flush=True)


def _one_line(error: Exception | str) -> str:
    text = str(error) or "out of memory"
    if wanted := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", text):
        text = f"out of memory: {int(wanted[1]) / 1e9:,.1f} GB more were needed"
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(text.split())


def _drop_stdout() -> None:
    """Write the rest of stdout, or discard it where that fails: the interpreter would report an error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    # Python has None for a stream that was closed before it started.
    sys.stdout = sys.stdout or StringIO()
    sys.stderr = sys.stderr or StringIO()
    app(prog_name="jetspec")


if __name__ == "__main__":
    main()
