"""`jetspec data`: the target answers prompts, or writes prompts, in one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from jetspec.aliases import current
from jetspec.commands.options import Given, TargetConfig, check_model, examples, options
from jetspec.commands.screen import duration, working
from jetspec.config import EngineConfig
from jetspec.data.config import AnswerOptions, Machines, RegenerateConfig, SynthesisOptions, SynthesizeConfig
from jetspec.data.prompts import PromptData, PromptOptions

if TYPE_CHECKING:
    from jetspec.data.workers import Answer
    from jetspec.engine.llm import LLM

SHARED_FRAC = 0.7
"""Share of a GPU's memory that the caches of several processes on it may take together."""
TARGET_ONLY = ("max_tokens", "temperature", "top_p", "seed")
"""Settings of answers that only the target uses, as all of `machine`."""


class DataCommands(TyperGroup):
    """The commands, also by the names of an earlier release."""

    def get_command(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, current(name, "command", where="jetspec data"))


app = typer.Typer(cls=DataCommands, no_args_is_help=True, add_completion=False, name="data", help="Make training data.")


@dataclass(frozen=True)
class Regeneration:
    """Settings of `jetspec data regenerate`."""

    model: TargetConfig = field(default_factory=TargetConfig)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    machine: Machines = field(default_factory=Machines)


@dataclass(frozen=True)
class Synthesis:
    """Settings of `jetspec data synthesize`."""

    model: TargetConfig = field(default_factory=TargetConfig)
    prompts: SynthesisOptions = field(default_factory=SynthesisOptions)
    machine: Machines = field(default_factory=Machines)


OutFile = Annotated[
    Path, typer.Option("--out", help="Rows are appended here; run again to go on after a stop.", metavar="FILE")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and the time that it takes.")]


@app.command(
    "regenerate",
    epilog=examples(
        "jetspec data regenerate --data prompts.jsonl --out rows.jsonl",
        "jetspec data regenerate --data data/train --out rows.jsonl --jobs 4 --set prompts.on_bad=skip",
        "jetspec data regenerate --data data/train --out rows.jsonl --dry-run",
    ),
)
@options(
    *("prompts.hf_dataset", "prompts.limit", "--model=model.name"),
    *("answers.max_tokens", "answers.temperature", "machine.jobs"),
)
def regenerate(
    settings: Regeneration,
    given: Given,
    out: OutFile,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts: a .jsonl or .jsonl.gz file, or a folder of them; repeatable.", metavar="PATH"),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Let the target answer prompts.

    Each line of the data has a `prompt`, `turns` (a list of user messages), or a chat under `messages` or
    `conversations`. Each row of the output has the tokens of a whole conversation and the spans of the answers.
    """
    prompts, answers = settings.prompts, settings.answers
    if not data and not prompts.hf_dataset:
        raise typer.BadParameter("give --data, or --hf-dataset", param_hint="--data")
    unused = [f"answers.{name}" for name in given.get("answers", {}) if name in TARGET_ONLY]
    unused += [f"{group}.{name}" for group in ("machine", "model") for name in given.get(group, {}) if name != "name"]
    if answers.responses == "corpus" and unused:
        raise ValueError(f"leave out {', '.join(unused)}: with responses=corpus the target generates nothing")
    for path in data or ():
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder")
    check_model(settings.model)
    from jetspec.data import regenerate as job

    source = PromptData(tuple(data or ()), answers.responses, **vars(prompts))
    config = RegenerateConfig(settings.model.name, **vars(answers))
    where, loads = target_loads(settings.model, settings.machine, max_len=answers.max_len)
    if answers.responses == "corpus":
        tokenizer, eos_tokens, context = job.read_tokenizer(config.model)
        where, corpus = ["cpu"], job.Corpus(tokenizer, eos_tokens, config.longest(context))
        check: job.Check = corpus.converse
        starts: list[Callable[[], Answer]] = [lambda: corpus.answer]
    else:
        check, starts = job.load_check(config), [partial(start_answers, load, config) for load in loads]
    if not dry_run:
        print(job.write_rows(out, source, config, check, starts).summary(out))
        return
    words, todo = job.plan(out, source, config, check, where)
    print(words, flush=True)
    if todo and answers.responses == "target":
        llm = loads[0]()
        with working("Answering a few prompts"):
            # Processes that share a device count as one.
            found = job.time_needed(llm, config, todo, llm.config.max_batch, len(set(where)))
        if found is None:
            print("the time is unknown: none of the prompts that were tried can be answered")
        else:
            print(f"which takes about {duration(found[0])}, judging by {found[1]}")


@app.command(
    "synthesize",
    epilog=examples(
        "jetspec data synthesize --count 20000 --out prompts.jsonl",
        "jetspec data synthesize --count 500 --out sums.jsonl --prefix 'A baker sells' --prefix 'Solve'",
        "jetspec data synthesize --count 20000 --out prompts.jsonl --prefixes mine.txt --temperature 0.8 --dry-run",
    ),
)
@options("--model=model.name", "prompts.prefix", "prompts.prefixes", "prompts.max_tokens", "prompts.temperature")
def synthesize(
    settings: Synthesis,
    count: Annotated[int, typer.Option(min=1, help="Prompts in the finished file.", metavar="N")],
    out: OutFile,
    dry_run: DryRun = False,
) -> None:
    """Let the target write prompts.

    It gets the beginning of a user's turn and continues it as a user would. Turns without an end, of fewer than two
    words, with broken text, or that exist already are dropped. Answer them with `jetspec data regenerate`.
    """
    check_model(settings.model)
    from jetspec.data.regenerate import read_tokenizer
    from jetspec.data.synthesize import UserTurn, plan, write_prompts

    config = SynthesizeConfig(settings.model.name, **vars(settings.prompts))
    # A batch of more than the prompts to write would be discarded in part.
    where, loads = target_loads(settings.model, settings.machine, count=count)
    tokenizer, eos_tokens, _ = read_tokenizer(config.model)
    turn = UserTurn(tokenizer, eos_tokens, config.system)
    if dry_run:
        print(plan(out, count, config, turn, where))
    else:
        starts = [partial(start_prompts, load, config) for load in loads]
        print(write_prompts(out, count, config, turn, starts).summary(out))


# -- the target in one process or several


def target_loads(
    model: TargetConfig, machine: Machines, max_len: int | None = None, count: int | None = None
) -> tuple[list[str], list[Callable[[], LLM]]]:
    """The device of each process, and the function that loads the target there. `count`: answers in all, if known."""
    from jetspec.data.workers import places

    where = places(model.device, machine.jobs)
    most = None if count is None else -(-count // len(where))
    return where, [
        partial(load_target_alone, model, machine.engine(place, max_len, most), place, where.count(place))
        for place in where
    ]


def load_target_alone(model: TargetConfig, engine: EngineConfig, device: str, sharing: int) -> LLM:
    """The target without a drafter. `sharing` is the number of processes on the same device."""
    import torch

    from jetspec.engine.llm import LLM

    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
        if sharing > 1:
            memory = torch.cuda.get_device_properties(device).total_memory
            engine = replace(engine, cache_gb=SHARED_FRAC * memory / 2**30 / sharing)
    is_worker = multiprocessing.parent_process() is not None
    with nullcontext() if is_worker else working(f"Loading {model.name}"):
        return LLM(model.name, drafter="none", engine=engine, dtype=model.dtype, device=device)


def start_answers(load: Callable[[], LLM], config: RegenerateConfig) -> Answer:
    from jetspec.data.regenerate import regenerate

    return partial(regenerate, load(), config)


def start_prompts(load: Callable[[], LLM], config: SynthesizeConfig) -> Answer:
    from jetspec.data.synthesize import UserTurn, synthesize

    llm = load()
    turn = UserTurn(llm.tokenizer, llm.target.eos_tokens, config.system)
    # The end of a user's turn may differ from that of an answer.
    llm.target = replace(llm.target, eos_tokens=turn.end_tokens)
    return partial(synthesize, llm, config, turn)
