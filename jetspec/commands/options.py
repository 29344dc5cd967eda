"""Options from the config dataclasses: flags for the settings that people use, `--set section.field=value` for all."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from jetspec.aliases import RENAMED, current, renamed
from jetspec.commands.screen import detail, working
from jetspec.config import DrafterName, DtypeName, EngineConfig, TreeConfig
from jetspec.models.hub import AUTO, DEFAULT_MODEL, check_name, head_path
from jetspec.settings import Setting, describe_settings, parse_overrides, updated
from jetspec.types import SamplingParams

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM
    from jetspec.types import Update

Command = TypeVar("Command", bound=Callable[..., None])
Given = dict[str, dict[str, Any]]
"""Settings that a command line names: section, field, value."""

SHORT = {"--model": ["-m"], "--temperature": ["-t"], "--max-tokens": ["-n"], "--port": ["-p"]}
DEFAULT_TREES = """Unless set, the tree suits the device: on a CPU budget=16 and shortlist_parents=0,
on a GPU batch_trees=8:32,24:16:8 and ngrams=false."""
UNSETTABLE = {"sampling": "grammar.compiled", "server": "keys"}
"""Fields that no command line sets: a compiled object, and secrets that every user of the machine could read there."""


# -- sections and options that several commands share


@dataclass(frozen=True)
class TargetConfig:
    """Target and device."""

    name: str = DEFAULT_MODEL
    """Target: a Hugging Face id (owner/name), a folder, or a GGUF file. By default smollm2-135m-instruct, 98 MB."""
    dtype: DtypeName = "auto"
    """Number format. Auto, the default: float32 on a CPU, bfloat16 on a GPU."""
    device: str = "auto"
    """cpu, cuda or cuda:N. Auto, the default: the GPU, if there is one."""


@dataclass(frozen=True)
class ModelConfig(TargetConfig):
    """Target, drafter and device."""

    head: str | None = None
    """Draft head: a Hugging Face id, a folder, or a model that has one. The default is auto, the best known one
    (`jetspec heads`), of those on this machine; given as --head auto, it is downloaded."""
    drafter: DrafterName | None = None
    """Source of drafts: a head, n-gram lookup, or none for plain decoding. By default the head, without one ngram."""


@dataclass(frozen=True)
class Decoding:
    """Settings of commands that decode."""

    NOTE = DEFAULT_TREES
    model: ModelConfig = field(default_factory=ModelConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
AsChat = Annotated[bool, typer.Option("--chat/--raw", help="Apply the chat template, or continue the raw text.")]
Prompt = Annotated[str | None, typer.Argument(help="Read from standard input when left out.", metavar="PROMPT")]
Prompts = Annotated[list[str] | None, typer.Argument(help="Three built-in ones when left out.", metavar="PROMPT")]
System = Annotated[str | None, typer.Option(help="System message of the conversation.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change any setting; repeatable.", metavar="NAME=VALUE")]


def examples(*lines: str) -> str:
    return "\n  ".join(["Examples:", *lines])


def load_llm(model: ModelConfig, engine: EngineConfig, tree: Mapping[str, Any] | None = None) -> LLM:
    """The model. Fields of `tree` replace those of the device's default tree."""
    check_model(model)
    with working(f"Loading {model.name}"):
        from jetspec.engine.llm import LLM

        drafter, dtype, device = model.drafter, model.dtype, model.device
        llm = LLM(model.name, model.head, drafter=drafter, engine=engine, dtype=dtype, device=device)
        return llm.with_drafter(llm.drafter, replace(llm.tree, **tree)) if tree else llm


def check_model(model: TargetConfig) -> None:
    """Refuses names of neither a file, a folder nor a repository, before anything heavy is imported."""
    check_name(model.name)
    if isinstance(model, ModelConfig) and model.head not in (None, AUTO):
        check_name(head_path(model.head))


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or standard input."""
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give one, or pipe it in", param_hint="PROMPT")
    return check_prompt(sys.stdin.read() if prompt is None else prompt)


def check_prompt(prompt: str) -> str:
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if any("\ud800" <= c <= "\udfff" for c in prompt):  # Python's stand-ins for bytes that are not UTF-8
        raise ValueError("the prompt is not text in UTF-8")
    return prompt


def stream(
    llm: LLM, prompt: str, *, sampling: SamplingParams, chat: bool, system: str | None = None, trace: bool = False
) -> Iterator[Update]:
    if chat:
        return llm.stream_chat(conversation(prompt, system), sampling, trace=trace)
    if system is not None:
        raise ValueError("--system needs the chat template; leave out --raw")
    return llm.stream(prompt, sampling, trace=trace)


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


# -- a command whose options are its settings


@dataclass(frozen=True)
class Flag:
    """An option that sets one setting."""

    name: str
    path: str
    old_in: str | None = None
    """Section of the table of old names, for an option of an earlier release."""
    is_hidden: bool = False
    """The help leaves it out."""

    @property
    def slot(self) -> str:
        """Name of the parameter."""
        return self.name.strip("-").replace("-", "_") + "_"


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _flag_parameter(flag: Flag, setting: Setting) -> inspect.Parameter:
    """The parameter of a flag. The help is the setting's docstring, with the default if that is neither named there nor
    a matter of the device."""
    hint, section = _option_type(setting.hint), flag.path.partition(".")[0]
    text, default = setting.help, setting.default
    if default not in (None, (), "") and "efault" not in text and section != "tree":
        text = f"{text} Default: {_shown(default)}."
    names = [f"{flag.name}/--no-{flag.name[2:]}" if hint is bool else flag.name, *SHORT.get(flag.name, ())]
    panel = section.capitalize()
    option = typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, hidden=flag.is_hidden)
    return _parameter(flag.slot, Annotated[hint | None, option], None)


def options(*flags: str, hidden: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Gives a command a flag for each of these settings, and --set and --help-all for all of them.

    The parameter `settings` of the command is a dataclass whose fields are sections. With a parameter `given` it also
    gets the settings that the command line names. A flag is written `section.field`, or `--name=section.field` where it
    is not called after the field. The help leaves out the `hidden` ones: --help-all lists their settings.
    """

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        root: Any = hints["settings"]
        known = {setting.path: setting for setting in all_settings(root())}
        flagged = _flags((*flags, *hidden), hidden, known, command.__name__)
        own = [
            _parameter(name, hints[name], parameter.default)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in ("settings", "given", "context")
        ]

        def run(context: typer.Context, set_: Sequence[str] | None, help_all: bool, **words: Any) -> None:
            raw: Given = {}
            for flag in flagged:
                if (value := words.pop(flag.slot)) not in (None, []):
                    section, _, name = flag.path.partition(".")
                    raw.setdefault(section, {})[name] = value
                    if flag.old_in is not None:
                        current(flag.name, flag.old_in, where=context.command_path)
            settings, given = read_options(root(), raw, set_ or ())
            for setting in all_settings(settings):
                if setting.default is not MISSING:  # a field of a group that is not there
                    detail(f"{setting.path} = {setting.default}")
            made = {"settings": settings, "given": given, "context": context}
            command(**{name: value for name, value in made.items() if name in hints}, **words)

        listing = help_all(lambda: describe(all_settings(root()), getattr(root, "NOTE", "")))
        parameters = [
            _parameter("context", typer.Context),
            *own,
            *(_flag_parameter(flag, known[flag.path]) for flag in flagged),
            _parameter("set_", Set, None),
            _parameter("help_all", listing, False),
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def read_options(defaults: Any, flagged: Given, overrides: Sequence[str]) -> tuple[Any, Given]:
    """The settings with flags and overrides applied, and those that were named."""
    raw = parse_overrides(overrides)
    for section in vars(defaults):
        named = raw.setdefault(section, {})
        if not isinstance(named, dict):
            raise ValueError(f"{section} is a group of settings; write --set {section}.FIELD=VALUE")
        if (secret := UNSETTABLE.get(section)) in named:
            raise ValueError(f"{section}.{secret} cannot be set on a command line")
        for name, value in flagged.get(section, {}).items():
            if named.setdefault(name, value) != value:
                raise ValueError(f"{section}.{name} is given twice, as {value} and as {named[name]}")
    settings = updated(defaults, raw)
    given = {}
    for section, values in raw.items():
        names = renamed(values, section) if section in RENAMED else values
        given[section] = {name: getattr(getattr(settings, section), name) for name in names}
    return settings, given


def all_settings(settings: Any) -> list[Setting]:
    """Every setting that a command line can set, with its value in `settings` as the default."""
    hidden = {f"{section}.{name}" for section, name in UNSETTABLE.items()}
    return [setting for setting in describe_settings(settings) if setting.path not in hidden]


def _flags(flags: Sequence[str], hidden: Sequence[str], known: Container[str], command: str) -> list[Flag]:
    """Flags of these settings, and hidden ones of an earlier release for other settings of the command."""
    found: dict[str, Flag] = {}
    for text in flags:
        name, _, path = text.rpartition("=")
        name = name or f"--{path.partition('.')[2].replace('_', '-')}"
        found[name] = Flag(name, path, is_hidden=text in hidden)
    for section in (f"flag {command}", "flag"):
        for name, new in RENAMED.get(section, {}).items():
            if (path := new.removeprefix("--set ")) in known:
                found.setdefault(name, Flag(name, path, section, is_hidden=True))
    return [*found.values()]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _option_type(hint: Any) -> Any:
    """Type of an option's value, without None. A tuple is a repeatable option, unless its items have a short form."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(choice for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return str if hasattr(item, "parse") else list[item]  # type: ignore[valid-type]
    return hint


def help_all(listing: Callable[[], str]) -> Any:
    """The option that shows the help with a listing of all settings."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            print(context.get_help(), listing(), sep="\n")
            raise typer.Exit

    return Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show, help="List all settings and exit.")]


def describe(settings: Sequence[Setting], note: str = "") -> str:
    """Settings as text: name, default, type, help."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [f"All settings, for --set NAME=VALUE. {note}"]
    for setting in settings:
        default = "" if setting.default in (None, (), MISSING) else f"={_shown(setting.default)}"
        lines += ["", f"  {setting.path}{default}  ({setting.type})"]
        lines += textwrap.wrap(setting.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
