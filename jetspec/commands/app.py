"""`jetspec <command>`: parse, then call one function. Everything heavy is imported inside the commands."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import typer
from typer.core import TyperGroup

from jetspec import __version__
from jetspec.config import BatchTree, DrafterName, EngineConfig, Expand, TreeConfig

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM
    from jetspec.types import SamplingParams, Update

NEGATIVE, FAILED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit statuses: the answer is no, an error, and what a shell reports of processes ended by SIGINT and SIGPIPE."""

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""What the parser raises for words that it does not understand; Typer names only this one of its children."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
TableForm = Literal["md", "csv", "json", "jsonl"]
TREE_SHAPE = ("budget", "width", "depth", "draft_temperature", "shortlist", "shortlist_parents", "batch_trees")
DRAFT_TEMPERATURE = "Temperature at which the head drafts for greedy requests."
SHORTLIST = "Tokens per depth that an edge term ranks for each parent; 0: all."
SHORTLIST_PARENTS = "Tokens of the depth before whose children make the shortlist; 0: it goes by the depth alone."


class OneLineErrors(TyperGroup):
    """What a user got wrong or the system refused becomes one line on stderr, without a traceback."""

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
            if ctx.params["debug"] or (isinstance(error, RuntimeError) and not is_memory):
                raise
            _tell(_one_line(error))
            _drop_stdout()
            raise typer.Exit(FAILED) from None


def _misused(error: Any) -> Exception:
    """What to raise for words that the parser did not understand. None at all is a wish for help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return cast(Exception, error)
    where = error.ctx.command_path if error.ctx else "jetspec"
    _tell(f"{_one_line(error.format_message()).rstrip('.')}; see {where} --help")
    return typer.Exit(FAILED)


def _is_memory(error: Exception) -> bool:
    """torch has an error for a GPU that is full, and none for a machine."""
    is_full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_full or "can't allocate memory" in str(error)


def _tell(line: str) -> None:
    """One line on stderr. Where that is full or closed, the exit status has to say it all."""
    with suppress(OSError):
        print(f"jetspec: error: {line}", file=sys.stderr, flush=True)


def _one_line(error: Exception | str) -> str:
    text = str(error) or "out of memory"
    if wanted := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", text):
        text = f"out of memory: {int(wanted[1]) / 1e9:,.1f} GB more were wanted"
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


def _given(context: typer.Context) -> Iterator[str]:
    """The options that stand on the command line, by their long names."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield option.opts[0]


def _option(help: str, *names: str, panel: str | None = None, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True)
class ModelOptions:
    """What decodes: the target, what drafts for it, the shape of the tree."""

    model: Annotated[
        str, _option("Target: a name, folder or GGUF file.", "--model", "-m", panel="Model", metavar="NAME")
    ] = "smollm2-135m-instruct"
    head: Annotated[
        str | None,
        _option(
            "Draft head: a name or folder; by default the model's own, if it has one.", panel="Model", metavar="NAME"
        ),
    ] = None
    drafter: Annotated[DrafterName | None, _option("Who guesses; by default the head.", panel="Model")] = None
    dtype: Annotated[DtypeName, _option("float32, bfloat16, float16.", panel="Model", metavar="TYPE")] = "auto"
    device: Annotated[str, _option("cpu or cuda.", panel="Model", metavar="NAME")] = "auto"
    budget: Annotated[int | None, _option("Most nodes in a tree, the anchor included.", panel="Tree")] = None
    width: Annotated[int | None, _option("Most children of one node; 1 is a chain.", panel="Tree")] = None
    depth: Annotated[int | None, _option("Longest path below the anchor.", panel="Tree")] = None
    draft_temperature: Annotated[float | None, _option(DRAFT_TEMPERATURE, panel="Tree")] = None
    shortlist: Annotated[int | None, _option(SHORTLIST, panel="Tree")] = None
    shortlist_parents: Annotated[int | None, _option(SHORTLIST_PARENTS, panel="Tree")] = None
    batch_trees: Annotated[
        str | None,
        _option(
            "Smaller trees from so many requests on: BATCH:BUDGET[:DEPTH], with commas between, or none. On a GPU"
            " 8:32,24:16:8 by default.",
            panel="Tree",
            metavar="TEXT",
        ),
    ] = None

    def load(self, engine: EngineConfig | None = None) -> LLM:
        """The model, with the library's own tree and engine wherever no option says otherwise."""
        from jetspec.commands.screen import working

        shape = {name: value for name, value in asdict(self).items() if name in TREE_SHAPE and value is not None}
        if self.batch_trees is not None:
            shape["batch_trees"] = BatchTree.parse(self.batch_trees)
        TreeConfig(**shape)  # a bad shape is refused before the load, not after it
        with working(f"Loading {self.model}"):
            from jetspec.engine.llm import LLM

            drafter, dtype, device = self.drafter, self.dtype, self.device
            llm = LLM(self.model, self.head, drafter=drafter, engine=engine, dtype=dtype, device=device)
            return llm.with_drafter(llm.drafter, replace(llm.tree, **shape)) if shape else llm


@dataclass(frozen=True)
class SamplingOptions:
    """What is asked of a completion."""

    temperature: Annotated[float, _option("0 is greedy.", "--temperature", "-t", panel="Sampling")] = 0.0
    top_p: Annotated[float, _option("Keep the best up to this mass.", panel="Sampling")] = 1.0
    top_k: Annotated[int, _option("Keep the k best tokens; 0: all.", panel="Sampling")] = 0
    min_p: Annotated[float, _option("Drop below this share of the best.", panel="Sampling")] = 0.0
    presence_penalty: Annotated[float, _option("Against tokens written already.", panel="Sampling")] = 0.0
    frequency_penalty: Annotated[float, _option("The same, for each time.", panel="Sampling")] = 0.0
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
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give one, or pipe it in", param_hint="PROMPT")
    return _check(sys.stdin.read() if prompt is None else prompt)


def _check(prompt: str) -> str:
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if any("\ud800" <= c <= "\udfff" for c in prompt):  # what Python makes of bytes that it cannot decode
        raise ValueError("the prompt is not text in UTF-8")
    return prompt


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
    from jetspec.commands.generate import write_completion, write_text

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
    given, sampling = tuple(map(_check, prompts or ())), asked.params()
    from jetspec.commands.compare import DEMO_PROMPTS, compare_drafters, same_seed

    stream = partial(_stream, sampling=same_seed(sampling), chat=chat)
    report = compare_drafters(options.load(), given or DEMO_PROMPTS, stream, as_json)
    if not report.identical and report.is_exact and sampling.temperature == 0:
        raise typer.Exit(NEGATIVE)


@app.command(epilog=_examples("jetspec chat", "jetspec chat --temperature 0.7 --max-tokens 500"))
@spread
def chat(options: ModelOptions, asked: SamplingOptions) -> None:
    """Talk to the model.

    Each change of shade in an answer is a new round.
    """
    sampling = asked.params()
    from jetspec.commands.chat import Chat

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
    from jetspec.commands.tree import draw_trees

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
    from jetspec.commands.info import show_info

    if not show_info(name, head, as_json):
        raise typer.Exit(NEGATIVE)


EVAL_BUDGETS = "chain,16,32,64,128,256"

EvalData = Annotated[Path, _option("Folder with a file of questions per task: TASK.jsonl.", metavar="FOLDER")]
EvalTasks = Annotated[str | None, _option("Some of its tasks; all when left out.", metavar="A,B,..")]
EvalBudgets = Annotated[str, _option("Trees to measure: chain, or numbers of nodes.", metavar="A,B,..")]
EvalOut = Annotated[
    Path | None, _option("Write a record; answers are kept beside it for other heads.", "--out", metavar="FILE")
]


@app.command(
    "eval-head",
    epilog=_examples(
        "jetspec eval-head --head heads/mine --data-dir data/eval --tasks gsm8k,mbpp --out results/mine.json",
        "jetspec eval-head --head heads/mine --data-dir data/eval --limit 10 --budgets chain,64 --no-real --json",
    ),
)
def eval_head(
    data_dir: EvalData,
    model: Annotated[str, _option("Target: a name, folder or GGUF file.", "--model", "-m", metavar="NAME")] = (
        "smollm2-135m-instruct"
    ),
    head: Annotated[
        str | None, _option("Draft head: a name or folder; by default the model's own.", metavar="NAME")
    ] = None,
    tasks: EvalTasks = None,
    limit: Annotated[int, typer.Option(min=1, help="Conversations per task.")] = 80,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens per answer.")] = 256,
    budgets: EvalBudgets = EVAL_BUDGETS,
    width: Annotated[int, _option("Most children of one node.")] = 8,
    draft_temperature: Annotated[float, _option(DRAFT_TEMPERATURE)] = TreeConfig.draft_temperature,
    shortlist: Annotated[int, _option(SHORTLIST)] = TreeConfig.shortlist,
    shortlist_parents: Annotated[int, _option(SHORTLIST_PARENTS)] = TreeConfig.shortlist_parents,
    expand: Annotated[Expand, _option("The best nodes, or all children of the best nodes.")] = "optimal",
    real: Annotated[bool, _option("Decode, too, or only score the target's text.", "--real/--no-real")] = True,
    batch: Annotated[int, _option("Conversations decoded together.")] = 32,
    dtype: Annotated[DtypeName, _option("float32, bfloat16, float16.", metavar="TYPE")] = "auto",
    device: Annotated[str, _option("cpu or cuda.", metavar="NAME")] = "auto",
    out: EvalOut = None,
    as_json: AsJson = False,
) -> None:
    """Measure how many tokens a round commits with a head.

    The target answers the questions greedily; the head is scored on these answers at every position, then decodes.
    """
    shape = TreeConfig(
        width=width,
        expand=expand,
        draft_temperature=draft_temperature,
        shortlist=shortlist,
        shortlist_parents=shortlist_parents,
    )
    engine = EngineConfig(max_batch=batch)
    from jetspec.commands.eval_head import EvalPlan
    from jetspec.commands.eval_head import eval_head as run_eval
    from jetspec.commands.screen import working
    from jetspec.data.prompts import find_tasks

    files = find_tasks(data_dir, tasks.split(",") if tasks else None)
    plan = EvalPlan(head, files, limit, max_tokens, tuple(budgets.split(",")), shape, real, out)
    with working(f"Loading {model}"):
        from jetspec.engine.llm import LLM

        llm = LLM(model, head, engine=engine, dtype=dtype, device=device)
    run_eval(llm, plan, as_json)


def _several(text: str, kind: Callable[[str], Any], name: str) -> list[Any]:
    """The values of A,B,.."""
    try:
        return [kind(word.strip()) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{name} are numbers such as 1,8, not {text!r}") from None


@dataclass(frozen=True)
class BenchOptions:
    """What takes the place of a recipe's settings."""

    model: Annotated[
        str | None, _option("Target: a name, folder or GGUF file.", "--model", "-m", panel="What", metavar="NAME")
    ] = None
    head: Annotated[str | None, _option("Head of methods that name none.", panel="What", metavar="NAME")] = None
    methods: Annotated[
        str | None,
        _option(
            "plain, ngram, dflash, ddtree, eagle3, jetspec-paper, jetspec, jetspec-edge (each =HEAD), transformers,"
            " transformers-lookup, transformers-assisted=MODEL, server=URL.",
            panel="What",
            metavar="A,B,..",
        ),
    ] = None
    tasks: Annotated[
        str | None,
        _option(
            "gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench, mt_bench, alpaca_eval, spec_bench,"
            " builtin, or files of --data-dir.",
            panel="What",
            metavar="A,B,..",
        ),
    ] = None
    data_dir: Annotated[
        str | None, _option("Folder of TASK.jsonl; else from Hugging Face.", panel="What", metavar="FOLDER")
    ] = None
    url: Annotated[str | None, _option("Measure an OpenAI-compatible server, too.", panel="What", metavar="URL")] = None
    budgets: Annotated[str | None, _option("Most nodes of a tree.", panel="How", metavar="A,B,..")] = None
    batches: Annotated[str | None, _option("Questions decoded together.", "--batch", panel="How", metavar="A,B,..")] = (
        None
    )
    temperatures: Annotated[
        str | None, _option("0 is greedy.", "--temperature", "-t", panel="How", metavar="A,B,..")
    ] = None
    repeats: Annotated[int | None, _option("Times that all is measured.", "--repeats", "-r", panel="How")] = None
    limit: Annotated[int | None, _option("Questions per task.", panel="How")] = None
    skip: Annotated[int | None, _option("Questions per task to pass over first.", panel="How")] = None
    max_tokens: Annotated[int | None, _option("Most tokens of an answer.", "--max-tokens", "-n", panel="How")] = None
    seed: Annotated[int | None, _option("Of what is drawn at a temperature above 0.", panel="How")] = None
    dtype: Annotated[DtypeName | None, _option("float32, bfloat16, float16.", panel="How", metavar="TYPE")] = None
    device: Annotated[str | None, _option("cpu or cuda.", panel="How", metavar="NAME")] = None

    def changes(self) -> dict[str, Any]:
        """As settings of a recipe; those not given are left out."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        kinds = {"methods": str, "tasks": str, "budgets": int, "batches": int, "temperatures": float}
        return {**given, **{name: _several(given[name], kind, name) for name, kind in kinds.items() if name in given}}


@app.command(
    epilog=_examples(
        "jetspec bench --quick --report",
        "jetspec bench --tasks gsm8k,mbpp --data-dir data/eval --methods ngram,jetspec-edge=heads/mine --budgets 16,64",
        "jetspec bench benchmarks/recipes/table01.yaml --data-dir data/eval --limit 10 --output csv > table01.csv",
        "jetspec bench --methods transformers --url http://localhost:8000/v1 --batch 1,8",
    )
)
@spread
def bench(
    options: BenchOptions,
    recipe: Annotated[Path | None, typer.Argument(help="A YAML file of settings.", metavar="RECIPE")] = None,
    quick: Annotated[bool, _option("A few built-in questions: minutes, also without a GPU.", "--quick")] = False,
    out: Annotated[
        Path | None, _option("Folder of the run; by default runs/bench/NAME.", "--out", metavar="FOLDER")
    ] = None,
    output: Annotated[TableForm, _option("Form of the table on stdout.", "--output")] = "md",
    make_report: Annotated[bool, _option("Make the report of the run as well.", "--report")] = False,
    fresh: Annotated[bool, _option("Delete what the run holds and start over.", "--fresh")] = False,
    retry_failed: Annotated[bool, _option("Measure again where questions failed.", "--retry-failed")] = False,
) -> None:
    """Measure methods against plain decoding.

    Speed as mean ± sd over repeats, tokens per round, score, and whether the text is that of plain decoding.

    Stop it at any time: the same command goes on with what is missing. Exit status 1: our methods wrote other texts
    than plain decoding, and not by rounding, or failed where it did not, or nothing could be compared.
    """
    changes = options.changes()
    from benchmarks.command_bench import QUICK, read_plan, run_plan

    plan = read_plan(recipe, {**(QUICK if quick else {}), **changes})
    name = "quick" if quick else recipe.stem if recipe else "bench"
    folder, again = out or Path("runs/bench") / name, {"fresh": fresh, "retry_failed": retry_failed}
    if not run_plan(plan, folder, output, **again, report=make_report):
        raise typer.Exit(NEGATIVE)


@app.command(
    epilog=_examples(
        "jetspec grade runs/bench/smollm2",
        "jetspec grade runs/from_the_cluster --data-dir data/eval --report",
    )
)
def grade(
    run: Annotated[Path, typer.Argument(help="Folder of a finished `jetspec bench`.", metavar="RUN")],
    data_dir: Annotated[
        str | None, _option("Folder of TASK.jsonl; by default that of the run.", metavar="FOLDER")
    ] = None,
    output: Annotated[TableForm, _option("Form of the table on stdout.", "--output")] = "md",
    make_report: Annotated[bool, _option("Make the report of the run as well.", "--report")] = False,
) -> None:
    """Grade the answers of a benchmark again.

    `jetspec bench` grades by itself. This is for answers from a machine that has no graders, or may run no programs,
    and for other graders: scores are made anew here, and nothing else of the run changes.

    Exit status 1: some answers could not be graded here, either.
    """
    from benchmarks.command_bench import grade

    if not grade(run, data_dir, output, make_report):
        raise typer.Exit(NEGATIVE)


@app.command(
    epilog=_examples(
        "jetspec report runs/bench/smollm2",
        "jetspec report runs/before runs/after --out comparison",
        "jetspec report runs/bench/smollm2 results/head.json --out docs/results/smollm2",
        "jetspec report runs/bench/smollm2 --output csv > cells.csv",
    )
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of `jetspec bench`; records of `eval-head` and `profile`.", metavar="RUN"),
    ],
    out: Annotated[
        Path | None, _option("Where the report goes; by default `report` in the first run.", "--out", metavar="FOLDER")
    ] = None,
    output: Annotated[TableForm, _option("Form of the table on stdout.", "--output")] = "md",
    paper: Annotated[bool, _option("The paper's results beside ours.", "--paper/--no-paper")] = True,
) -> None:
    """Turn measurements into tables and plots.

    Writes report.html, one page that needs nothing else, report.md, and the plots as files. Two runs are also compared
    with each other, cell by cell.
    """
    from benchmarks.command_report import report_folder, show, write_report

    write_report(show(runs, output), out or report_folder(runs[0]), paper)


@app.command(
    epilog=_examples(
        "jetspec train jetspec/recipes/debug.yaml --dry-run",
        "jetspec train jetspec/recipes/smollm2_135m.yaml --set optimizer.lr=3e-4 --set out=runs/other",
        "torchrun --nproc-per-node 8 -m jetspec train jetspec/recipes/qwen3_8b.yaml",
    )
)
def train(
    recipe: Annotated[str, typer.Argument(help="The name of a recipe, or a YAML file of settings.", metavar="RECIPE")],
    set_: Annotated[list[str] | None, _option("Change a setting; repeatable.", "--set", metavar="KEY=VALUE")] = None,
    fresh: Annotated[bool, _option("Delete the run's checkpoints and start over.", "--fresh")] = False,
    dry_run: Annotated[bool, _option("Say what would happen and how long it takes.", "--dry-run")] = False,
) -> None:
    """Train a draft head for a target, from its own answers.

    Stop it at any time: the same command goes on from the last checkpoint.
    """
    from jetspec.commands.train import train_recipe

    train_recipe(recipe, set_ or (), fresh=fresh, dry_run=dry_run)


data_app = typer.Typer(no_args_is_help=True)
app.add_typer(data_app, name="data", help="Make training data.")

DataPaths = Annotated[
    list[Path] | None,
    _option("Prompts: a .jsonl or .jsonl.gz file, or a folder of them; repeatable.", "--data", metavar="PATH"),
]
TARGET_ONLY = ("--max-tokens", "--temperature", "--top-p", "--seed", "--batch", "--jobs", "--dtype", "--device")
"""What says how the target answers, and where."""
Shard = Annotated[str, _option("Only part I of N, I from 0, for several machines.", metavar="I/N")]
Openings = Annotated[
    str | None,
    _option(
        "builtin (the default): every second prompt gets one of our own, from sums to summaries; none; or a file of"
        " them, one per line, where an empty line is a free prompt.",
        metavar="NAME",
    ),
]


@data_app.command(
    epilog=_examples(
        "jetspec data regenerate --data prompts.jsonl --out rows.jsonl",
        "jetspec data regenerate --data data/train --out rows.jsonl --jobs 4 --on-bad skip",
        "jetspec data regenerate --data data/train --out rows.jsonl --dry-run",
    )
)
def regenerate(
    context: typer.Context,
    out: Annotated[Path, _option("Rows are appended here; run again to go on after a stop.", metavar="FILE")],
    data: DataPaths = None,
    hf_dataset: Annotated[str | None, _option("Prompts: a Hugging Face dataset.", metavar="NAME")] = None,
    split: Annotated[str, _option("Split of that dataset.", metavar="NAME")] = "train",
    model: Annotated[str, _option("Target: a name, folder or GGUF file.", "--model", "-m", metavar="NAME")] = (
        "smollm2-135m-instruct"
    ),
    responses: Annotated[Literal["target", "corpus"], _option("Who answers: the target, or the data.")] = "target",
    max_tokens: Annotated[int, _option("Most tokens per answer.", "--max-tokens", "-n")] = 512,
    temperature: Annotated[float, _option("0 is greedy.", "--temperature", "-t")] = 0.0,
    top_p: Annotated[float, _option("Keep the best up to this mass.")] = 1.0,
    seed: Annotated[int, _option("Same seed, same rows.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    shard: Shard = "0/1",
    on_bad: Annotated[Literal["stop", "skip"], _option("What a prompt that cannot be used does.")] = "stop",
    batch: Annotated[int | None, _option("Answers written together; by default 8, on a GPU 2048.")] = None,
    max_len: Annotated[int | None, _option("Longest conversation; by default the model's context.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per GPU; more share it.")] = None,
    dtype: Annotated[DtypeName, _option("float32, bfloat16, float16.", metavar="TYPE")] = "auto",
    device: Annotated[str, _option("cpu, cuda (all GPUs) or one such as cuda:1.", metavar="NAME")] = "auto",
    dry_run: Annotated[bool, _option("Say what would happen and how long it takes.", "--dry-run")] = False,
) -> None:
    """Let the target answer prompts.

    Each line of the data has `turns`, a list of user messages, or a chat under `messages`. Each row of the output has
    the tokens of a whole conversation and the spans that the target wrote.
    """
    if not data and not hf_dataset:
        raise typer.BadParameter("give --data, or --hf-dataset", param_hint="--data")
    idle = [option for option in _given(context) if option in TARGET_ONLY]
    if responses == "corpus" and idle:
        raise typer.BadParameter(f"leave out {', '.join(idle)}: with --responses corpus the target writes nothing")
    from jetspec.commands.data_regenerate import Machines, regenerate_data
    from jetspec.data.prompts import PromptData, parse_shard
    from jetspec.data.regenerate import RegenerateConfig

    prompts = PromptData(tuple(data or ()), hf_dataset, split, limit, parse_shard(shard), responses)
    config = RegenerateConfig(model, responses, max_tokens, temperature, top_p, seed, max_len)
    machines = Machines(device, jobs, dtype, batch, max_len)
    regenerate_data(out, prompts, config, machines, on_bad=on_bad, dry_run=dry_run)


@data_app.command(
    epilog=_examples(
        "jetspec data invent --count 20000 --out prompts.jsonl",
        "jetspec data invent --count 500 --out sums.jsonl --opening 'A baker sells' --opening 'Solve'",
        "jetspec data invent --count 20000 --out prompts.jsonl --openings mine.txt --temperature 0.8 --dry-run",
    )
)
def invent(
    count: Annotated[int, typer.Option(min=1, help="Prompts that the file is to hold.", metavar="N")],
    out: Annotated[Path, _option("Prompts are appended here; run again to go on after a stop.", metavar="FILE")],
    model: Annotated[str, _option("Target: a name, folder or GGUF file.", "--model", "-m", metavar="NAME")] = (
        "smollm2-135m-instruct"
    ),
    opening: Annotated[
        list[str] | None, _option("First words of a prompt; repeatable, then used by turns.", metavar="TEXT")
    ] = None,
    openings: Openings = None,
    system: Annotated[str | None, _option("System message to steer by; not written out.", metavar="TEXT")] = None,
    max_tokens: Annotated[int, _option("Most tokens per prompt; longer ones are dropped.", "--max-tokens", "-n")] = 256,
    temperature: Annotated[float, _option("0 is greedy: one prompt per opening.", "--temperature", "-t")] = 1.0,
    top_p: Annotated[float, _option("Keep the best up to this mass.")] = 1.0,
    seed: Annotated[int, _option("Same seed, same prompts.")] = 0,
    batch: Annotated[int | None, _option("Prompts written together; by default 8, on a GPU 2048.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per GPU; more share it.")] = None,
    dtype: Annotated[DtypeName, _option("float32, bfloat16, float16.", metavar="TYPE")] = "auto",
    device: Annotated[str, _option("cpu, cuda (all GPUs) or one such as cuda:1.", metavar="NAME")] = "auto",
    dry_run: Annotated[bool, _option("Say what would happen.", "--dry-run")] = False,
) -> None:
    """Let the target write prompts.

    It is given the beginning of a user's turn and goes on as a user would. Turns without an end, of fewer than two
    words, with broken text, or that are there already are dropped. Then let it answer: jetspec data regenerate.
    """
    if opening and openings:
        raise typer.BadParameter("give --opening or --openings, not both", param_hint="--opening")
    from jetspec.commands.data_regenerate import Machines
    from jetspec.commands.data_synthesize import synthesize_data
    from jetspec.data.prefixes import read_prefixes
    from jetspec.data.synthesize import SynthesizeConfig

    begun = tuple(opening) if opening else read_prefixes(openings or "builtin")
    config = SynthesizeConfig(model, begun, system, max_tokens, temperature, top_p, seed)
    synthesize_data(out, count, config, Machines(device, jobs, dtype, batch), dry_run=dry_run)


profile_app = typer.Typer(invoke_without_command=True)
app.add_typer(profile_app, name="profile")

SHAPE_HELP = "qwen3-8b, qwen3-30b-a3b, qwen3-0.6b, smollm2-135m, or that of a model, folder or GGUF file."


@dataclass(frozen=True)
class ProfileOptions:
    """What is measured, where, and where the numbers go."""

    shape: Annotated[str, _option(SHAPE_HELP, panel="Model", metavar="NAME")] = "smollm2-135m"
    batch: Annotated[int, _option("Requests decoded together.", panel="Round")] = 1
    dtype: Annotated[DtypeName, _option("float32, bfloat16, float16.", panel="Model", metavar="TYPE")] = "auto"
    device: Annotated[str, _option("cpu or cuda.", panel="Model", metavar="NAME")] = "auto"
    out: Annotated[Path | None, _option("Write a record, too.", "--out", metavar="FILE")] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class HeadOptions:
    """The head that drafts: a real one, or the shape of one."""

    head: Annotated[str | None, _option("Draft head; random weights when left out.", panel="Head", metavar="NAME")] = (
        None
    )
    head_layers: Annotated[int, typer.Option(min=1, help="Layers of a random head.", rich_help_panel="Head")] = 5
    block: Annotated[int, typer.Option(min=2, help="Block size of a random head.", rich_help_panel="Head")] = 16
    edge: Annotated[bool, _option("Give a random head an edge term.", "--edge", panel="Head")] = False


ProfileShortlist = Annotated[int, _option(SHORTLIST, panel="Round")]
ProfileRoom = Annotated[
    int | None, _option("Room of a request in the cache; by default the model's context.", "--max-len", panel="Round")
]


def _refuse_options(context: typer.Context) -> None:
    """Options that stand before a subcommand would be lost on it."""
    for option in _given(context):
        raise typer.BadParameter(f"put {option} behind `{context.invoked_subcommand}`", ctx=context)


@profile_app.callback(
    epilog=_examples(
        "jetspec profile --shape qwen3-8b --budget 64 --budget 128 --context 256 --context 2048",
        "jetspec profile --shape smollm2-135m-instruct --weights real --head heads/mine --out profile.json",
        "jetspec profile op tree_attention --shape qwen3-8b --context 4096",
    )
)
@spread
def profile(
    context: typer.Context,
    options: ProfileOptions,
    head_options: HeadOptions,
    weights: Annotated[Literal["random", "real"], _option("Of the target.", panel="Model")] = "random",
    budget: Annotated[list[int] | None, _option("Nodes of a tree, 64 by default; repeatable.", panel="Round")] = None,
    width: Annotated[int, _option("Most children of one node.", panel="Round")] = 8,
    shortlist: ProfileShortlist = TreeConfig.shortlist,
    shortlist_parents: Annotated[int, _option(SHORTLIST_PARENTS, panel="Round")] = TreeConfig.shortlist_parents,
    contexts: Annotated[
        list[int] | None, _option("Tokens before it, 1024 by default; repeatable.", "--context", panel="Round")
    ] = (None),
    rounds: Annotated[int | None, _option("Rounds to time; by default 10, on a GPU 200.", panel="Round")] = None,
    max_len: ProfileRoom = None,
    temperature: Annotated[float, _option("Of the target; 0 is greedy.", panel="Round")] = 0.0,
) -> None:
    """Time a round stage by stage.

    Next to it a plain step, and under both the floor: their matrix products alone. Random weights take as long as real
    ones, so no model is needed.
    """
    if context.invoked_subcommand:
        _refuse_options(context)
        return
    if head_options.head is not None and (lost := {"--head-layers", "--block", "--edge"} & set(_given(context))):
        raise typer.BadParameter(f"{min(lost)} shapes a random head, and --head names a real one", ctx=context)
    trees = [
        TreeConfig(budget=nodes, width=width, shortlist=shortlist, shortlist_parents=shortlist_parents)
        for nodes in budget or [64]
    ]
    from jetspec.commands.profile import HeadChoice, Report, Where, default_rounds, profile_rounds
    from jetspec.profile.rounds import Workload
    from jetspec.train.config import HeadShape

    timed = default_rounds(options.device) if rounds is None else rounds
    works = [Workload(length, options.batch, timed, max_len, temperature) for length in contexts or [1024]]
    edge_rank = 128 if head_options.edge else 0
    shape = HeadShape(num_layers=head_options.head_layers, block_size=head_options.block, edge_rank=edge_rank)
    where = Where(options.shape, options.dtype, options.device)
    choice, report = HeadChoice(head_options.head, shape), Report(options.as_json, options.out)
    profile_rounds(where, weights, choice, trees, works, report)


@profile_app.command(
    epilog=_examples(
        "jetspec profile op",
        "jetspec profile op all",
        "jetspec profile op build_edge_tree --shape qwen3-8b --shortlist 512",
        "jetspec profile op add_mixture --shape qwen3-30b-a3b --budget 128 --json",
    )
)
@spread
def op(
    options: ProfileOptions,
    name: Annotated[str | None, typer.Argument(help="Its name, or all; left out, they are listed.")] = None,
    budget: Annotated[int, _option("Nodes of a tree.", panel="Round")] = 64,
    context: Annotated[int, _option("Tokens before it.", panel="Round")] = 1024,
    shortlist: ProfileShortlist = TreeConfig.shortlist,
    window: Annotated[
        int | None, _option("Attention sees so many tokens before each; all by default.", panel="Round")
    ] = None,
    max_len: ProfileRoom = None,
) -> None:
    """Time one operation: its kernel in a CUDA graph, as in a round, and the reference that it must equal, eagerly."""
    from jetspec.commands.profile import Report, Where, list_operations, profile_operations

    if name is None:
        list_operations(options.shape)
        return
    profile_operations(
        name,
        Where(options.shape, options.dtype, options.device),
        budget=budget,
        context=context,
        batch=options.batch,
        shortlist=shortlist,
        window=window,
        max_len=max_len,
        report=Report(options.as_json, options.out),
    )


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, to whom, and how much it takes."""

    host: Annotated[str, _option("Address to listen on; 0.0.0.0 is everywhere.", panel="Server")] = "127.0.0.1"
    port: Annotated[int, _option("0: any free one.", "--port", "-p", panel="Server")] = 8000
    name: Annotated[str | None, _option("What clients call the model.", panel="Server", metavar="NAME")] = None
    api_keys: Annotated[Path | None, _option("File of keys, one per line.", panel="Server", metavar="FILE")] = None
    allow_origin: Annotated[
        list[str] | None, _option("Web site that may ask from a browser; repeatable.", panel="Server", metavar="URL")
    ] = None
    chat_template: Annotated[
        Path | None, _option("Jinja file in place of the model's own.", panel="Model", metavar="FILE")
    ] = None
    log_text: Annotated[bool, _option("Log prompts and answers, too.", "--log-text", panel="Server")] = False
    warm_up: Annotated[
        bool, _option("On a GPU, capture graphs before the first request.", "--warm-up/--no-warm-up", panel="Server")
    ] = True
    max_batch: Annotated[int, _option("Answers written together.", panel="Limits")] = 32
    max_queue: Annotated[int, _option("Answers that may wait for it.", panel="Limits")] = 64
    max_len: Annotated[int | None, _option("Longest prompt and answer.", panel="Limits")] = None
    max_prompt: Annotated[int | None, _option("Longest prompt, in tokens.", panel="Limits")] = None
    max_tokens: Annotated[int | None, _option("Longest answer, in tokens.", panel="Limits")] = None
    max_body: Annotated[int, _option("Bytes of a request.", panel="Limits")] = 4 << 20
    drain: Annotated[float, _option("Seconds to finish answers when stopped; 0: none.", panel="Limits")] = 30.0


@app.command(
    epilog=_examples(
        "jetspec serve",
        "jetspec serve --head heads/mine --port 9000 --max-batch 64",
        "jetspec serve --host 0.0.0.0 --api-keys keys.txt",
        'curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\',
        """  -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi"}]}'""",
    )
)
@spread
def serve(options: ModelOptions, asked: ServeOptions) -> None:
    """Answer OpenAI clients over HTTP.

    The log goes to stderr, one JSON object per line. Ctrl-C or SIGTERM: what is being written is finished first.
    """
    from jetspec.commands.serve import serve_model
    from jetspec.files import read_text
    from jetspec.serve.config import ServeConfig, read_keys

    config = ServeConfig(
        host=asked.host,
        port=asked.port,
        model_name=asked.name,
        keys=read_keys(asked.api_keys) if asked.api_keys else (),
        origins=tuple(asked.allow_origin or ()),
        max_queue=asked.max_queue,
        max_body=asked.max_body,
        max_prompt=asked.max_prompt,
        max_tokens=asked.max_tokens,
        drain_s=asked.drain,
        log_text=asked.log_text,
    )
    template = read_text(asked.chat_template) if asked.chat_template else None
    engine = EngineConfig(max_batch=asked.max_batch, max_len=asked.max_len)
    serve_model(lambda: options.load(engine), config, template, asked.warm_up)


@app.command(
    epilog=_examples(
        "jetspec load --requests 64 --concurrency 8",
        "jetspec load --url http://127.0.0.1:9000 --rate 4 --requests 400 --data questions.jsonl --out load.json",
    )
)
def load(
    url: Annotated[str, _option("The server, without /v1.", metavar="URL")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Most at a time.")] = 8,
    rate: Annotated[
        float | None, _option("Arrivals per second, at random times; when left out, as answers come.")
    ] = None,
    data: Annotated[Path | None, _option("Prompts: a .jsonl file; three built-in ones when left out.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens per answer.")] = 128,
    temperature: Annotated[float, _option("0 is greedy.", "--temperature", "-t")] = 0.0,
    budget: Annotated[int | None, _option("Nodes of a tree, of a JetSpec server; 1 is plain.")] = None,
    model: Annotated[str | None, _option("By default the first that the server has.", metavar="NAME")] = None,
    api_key: Annotated[Path | None, _option("File with a key in its first line.", metavar="FILE")] = None,
    seed: Annotated[int, _option("Of the arrivals.")] = 0,
    out: Annotated[Path | None, _option("Write a record, and a plot beside it.", "--out", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Put an OpenAI-compatible server under load, and time it.

    Exit status 1: some requests failed.
    """
    from benchmarks.command_load import run_load
    from benchmarks.load import Load

    plan = Load(url, requests, concurrency, rate, max_tokens, temperature, budget, model, seed)
    if not run_load(plan, data, api_key, out, as_json):
        raise typer.Exit(NEGATIVE)


@app.command(
    epilog=_examples(
        "jetspec export heads/mine --format vllm --out mine-vllm",
        "jetspec export heads/mine --format speculators --target Qwen/Qwen3-8B --out mine-speculators",
        "jetspec export smollm2-135m-instruct --format hf --out smollm2",
    ),
)
def export(
    name: Annotated[
        str, typer.Argument(help="A head or a model; of a model other engines get its own head.", metavar="NAME")
    ],
    out: Annotated[Path, _option("Folder to write.", "--out", metavar="FOLDER")],
    format: Annotated[
        Literal["hf", "vllm", "sglang", "speculators"],
        _option("hf: the published layout of a head, or a model for any engine. Else: a chain drafter for that one."),
    ] = "hf",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], _option("Of the numbers written.", metavar="TYPE")
    ] = "bfloat16",
    target: Annotated[
        str | None, _option("The head's target, as speculators names it.", "--target", metavar="NAME")
    ] = None,
) -> None:
    """Write a head or a model for other engines.

    What was written is read back by the rules of its engine, which would otherwise take a lost fact for another one.
    """
    import torch

    from jetspec.commands.export import export as run_export

    run_export(name, out, format, getattr(torch, dtype), target)


vllm = typer.Typer(no_args_is_help=True)
app.add_typer(vllm, name="vllm", help="Draft trees inside vLLM.")


@vllm.command(
    "serve",
    # vLLM's options of one dash have an h in them, such as -cc.cudagraph_mode.
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    epilog=_examples(
        "jetspec vllm serve Qwen/Qwen3-0.6B --head heads/mine --dry-run",
        "jetspec vllm serve Qwen/Qwen3-0.6B --head heads/mine --budget 32 --max-model-len 4096 --port 9000",
    ),
)
def vllm_serve(
    words: Annotated[list[str], typer.Argument(help="Target, as `vllm serve` takes it.", metavar="MODEL")],
    head: Annotated[str, _option("Draft head: a name or folder, or a model for its own.", metavar="NAME")],
    budget: Annotated[int, _option("Most nodes in a tree, the anchor included.")] = TreeConfig.budget,
    width: Annotated[int, _option("Most children of one node; 1 is a chain.")] = TreeConfig.width,
    depth: Annotated[int | None, _option("Longest path below the anchor.")] = None,
    dry_run: Annotated[bool, _option("Only print the command.", "--dry-run")] = False,
) -> None:
    """Start vLLM's server with draft trees.

    The command is printed, then run; options that are not listed here are vLLM's own.
    """
    from jetspec_vllm.command import run_command, serve_command

    command = serve_command(words, head, TreeConfig(budget=budget, width=width, depth=depth))
    print(shlex.join(command), flush=True)
    if not dry_run:
        run_command(command)


def main() -> None:
    # Python has None for a stream that was closed before it started; what is written there is for nobody.
    sys.stdout = sys.stdout or StringIO()
    sys.stderr = sys.stderr or StringIO()
    app(prog_name="jetspec")


if __name__ == "__main__":
    main()
