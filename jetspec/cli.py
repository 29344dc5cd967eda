"""`jetspec <command>`: parse, then call one function. Everything heavy is imported inside the commands."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperGroup

from jetspec import __version__
from jetspec.config import DrafterName, TreeConfig

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM
    from jetspec.types import SamplingParams, Update

NEGATIVE, FAILED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses: the answer is no, an error, and what a shell reports of processes ended by SIGINT and SIGPIPE."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
TREE_SHAPE = ("budget", "width", "depth")


class OneLineErrors(TyperGroup):
    """What a user got wrong or the system refused becomes one line on stderr, without a traceback."""

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
        except (ValueError, OSError) as error:
            if ctx.params["debug"]:
                raise
            print(f"jetspec: error: {_one_line(error)}", file=sys.stderr)
            _drop_stdout()
            raise typer.Exit(FAILED) from None


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(text.split())


def _drop_stdout() -> None:
    """Write what stdout still holds, or throw it away where that fails, or the interpreter complains at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options. Typer knows flat parameters only, so it sees the fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    inner = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        flat += inner[name].values() if name in groups else [parameter.replace(annotation=hints[name])]

    def run(**given: Any) -> None:
        made = {name: group(**{key: given.pop(key) for key in inner[name]}) for name, group in groups.items()}
        command(**given, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    )
    return run


def _option(help: str, *names: str, panel: str | None = None, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True)
class ModelOptions:
    """What decodes: the target, what drafts for it, the shape of the tree."""

    model: Annotated[
        str, _option("Target: a name, folder or GGUF file.", "--model", "-m", panel="Model", metavar="NAME")
    ] = "smollm2-135m-instruct"
    head: Annotated[str | None, _option("Draft head: a name or folder.", panel="Model", metavar="NAME")] = None
    drafter: Annotated[DrafterName | None, _option("Who guesses; by default the head.", panel="Model")] = None
    dtype: Annotated[DtypeName, _option("float32, bfloat16, float16.", panel="Model", metavar="TYPE")] = "auto"
    device: Annotated[str, _option("cpu or cuda.", panel="Model", metavar="NAME")] = "auto"
    budget: Annotated[int | None, _option("Most nodes in a tree, the anchor included.", panel="Tree")] = None
    width: Annotated[int | None, _option("Most children of one node; 1 is a chain.", panel="Tree")] = None
    depth: Annotated[int | None, _option("Longest path below the anchor.", panel="Tree")] = None

    def load(self) -> LLM:
        """The model, with the library's own tree wherever no option says otherwise."""
        from jetspec.terminal.screen import working

        shape = {name: value for name, value in asdict(self).items() if name in TREE_SHAPE and value is not None}
        TreeConfig(**shape)  # a bad shape is refused before the load, not after it
        with working(f"Loading {self.model}"):
            from jetspec.engine.llm import LLM

            llm = LLM(self.model, self.head, drafter=self.drafter, dtype=self.dtype, device=self.device)
            return llm.with_drafter(llm.drafter, replace(llm.tree, **shape)) if shape else llm


@dataclass(frozen=True)
class SamplingOptions:
    """What is asked of a completion."""

    temperature: Annotated[float, _option("0 is greedy.", "--temperature", "-t", panel="Sampling")] = 0.0
    top_p: Annotated[float, _option("Keep the best up to this mass.", panel="Sampling")] = 1.0
    top_k: Annotated[int, _option("Keep the k best tokens; 0: all.", panel="Sampling")] = 0
    min_p: Annotated[float, _option("Drop below this share of the best.", panel="Sampling")] = 0.0
    seed: Annotated[int | None, _option("Same seed, same text, whatever drafts.", panel="Sampling")] = None
    max_tokens: Annotated[int, _option("Most tokens to write.", "--max-tokens", "-n", panel="Sampling")] = 256
    stop: Annotated[
        list[str] | None, _option("End before this text; repeatable.", panel="Sampling", metavar="TEXT")
    ] = None

    def params(self) -> SamplingParams:
        from jetspec.types import SamplingParams

        return SamplingParams(**{**asdict(self), "stop": tuple(self.stop or ())})


Prompt = Annotated[str | None, typer.Argument(help="Read from standard input when left out.", metavar="PROMPT")]
Prompts = Annotated[list[str] | None, typer.Argument(help="Three built-in ones when left out.", metavar="PROMPT")]
AsChat = Annotated[bool, _option("Chat template or raw text.", "--chat/--raw")]
AsJson = Annotated[bool, _option("Print one JSON object instead.", "--json")]


def _read(prompt: str | None) -> str:
    """The prompt given, or what is piped in."""
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give one, or pipe it in", param_hint="PROMPT")
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _stream(llm: LLM, prompt: str, *, sampling: SamplingParams, chat: bool, trace: bool = False) -> Iterator[Update]:
    if chat:
        return llm.stream_chat([{"role": "user", "content": prompt}], sampling, trace=trace)
    return llm.stream(prompt, sampling, trace=trace)


def _examples(*lines: str) -> str:
    return "\n  ".join(["Examples:", *lines])


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples('jetspec generate "Why is the sky blue?"', "jetspec compare", "jetspec tree --help"),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jetspec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Tree-speculative decoding: the target model's own text, several tokens per forward pass."""


@app.command(
    epilog=_examples(
        'jetspec generate "Write a haiku about autumn."',
        "cat letter.txt | jetspec generate --max-tokens 400",
        'jetspec generate --raw "def fibonacci(n):" --drafter none',
        'jetspec generate "Name a colour." --temperature 0.8 --seed 7 --json',
    )
)
@spread
def generate(
    options: ModelOptions, asked: SamplingOptions, prompt: Prompt = None, chat: AsChat = True, as_json: AsJson = False
) -> None:
    """Write an answer to PROMPT.

    The text goes to stdout as it appears, what it cost to stderr.
    """
    text, sampling = _read(prompt), asked.params()
    from jetspec.terminal.generate import write_completion, write_text

    updates = _stream(options.load(), text, sampling=sampling, chat=chat)
    write_completion(updates) if as_json else write_text(updates)


@app.command(
    epilog=_examples(
        "jetspec compare",
        'jetspec compare "Count to fifty." "Write a limerick." --budget 32',
        "jetspec compare --json > compare.json",
    )
)
@spread
def compare(
    options: ModelOptions, asked: SamplingOptions, prompts: Prompts = None, chat: AsChat = True, as_json: AsJson = False
) -> None:
    """Decode plainly and speculatively, side by side.

    Shows both speeds and whether the texts are identical. Exit status 1: they differ, greedy in float32.
    """
    sampling = asked.params()
    from jetspec.terminal.compare import DEMO_PROMPTS, compare_drafters, same_seed

    stream = partial(_stream, sampling=same_seed(sampling), chat=chat)
    report = compare_drafters(options.load(), tuple(prompts or DEMO_PROMPTS), stream, as_json)
    if not report.identical and report.is_exact and sampling.temperature == 0:
        raise typer.Exit(NEGATIVE)


@app.command(epilog=_examples("jetspec chat", "jetspec chat --temperature 0.7 --max-tokens 500"))
@spread
def chat(options: ModelOptions, asked: SamplingOptions) -> None:
    """Talk to the model.

    Each change of shade in an answer is a new round.
    """
    sampling = asked.params()
    from jetspec.terminal.chat import Chat

    Chat(options.load(), sampling).run()


Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Stop after N rounds.")]
Html = Annotated[Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Write a web page, too.")]


@app.command(
    epilog=_examples(
        'jetspec tree "Count from one to ten." --rounds 3',
        'jetspec tree "Why is the sky blue?" --budget 32 --html tree.html',
    )
)
@spread
def tree(
    options: ModelOptions,
    asked: SamplingOptions,
    prompt: Prompt = None,
    rounds: Rounds = 5,
    html: Html = None,
    chat: AsChat = True,
) -> None:
    """Draw the tree of each round.

    Shows every token with its log-probability, and the path that was accepted.
    """
    text, sampling = _read(prompt), asked.params()
    if html and not html.parent.is_dir():
        raise FileNotFoundError(f"{html.parent} is not a folder; create it first")
    from jetspec.terminal.draw import draw_trees

    llm = options.load()
    updates = _stream(llm, text, sampling=sampling, chat=chat, trace=True)
    draw_trees(text, islice(updates, rounds), llm.tokenizer.token_text, html)


@app.command(
    epilog=_examples("jetspec info smollm2-135m-instruct", "jetspec info models/target --head heads/mine --json")
)
def info(
    name: Annotated[str, typer.Argument(help="A model or a head: a name, folder or file.", metavar="NAME")],
    head: Annotated[str | None, typer.Option(help="A head that is to fit NAME.", metavar="NAME")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a model or a head.

    With --head, also whether the two fit each other. Exit status 1: they do not.
    """
    from jetspec.terminal.info import show_info

    if not show_info(name, head, as_json):
        raise typer.Exit(NEGATIVE)


def main() -> None:
    app(prog_name="jetspec")


if __name__ == "__main__":
    main()
