"""`jetspec data`: the target answers prompts, or writes prompts, in one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from jetspec.aliases import current
from jetspec.commands.options import Given, TargetConfig, check_model, examples, options
from jetspec.commands.screen import duration, working
from jetspec.config import EngineConfig

if TYPE_CHECKING:
    from jetspec.data.prompts import OnBad, Prompt, PromptData
    from jetspec.data.regenerate import Check, RegenerateConfig
    from jetspec.data.synthesize import SynthesizeConfig
    from jetspec.data.workers import Answer
    from jetspec.engine.llm import LLM

CPU_BATCH, GPU_BATCH = 8, 2048
MAX_ADMISSION_DELAY = 24
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
class PromptOptions:
    """Prompts to answer."""

    hf_dataset: str | None = None
    """Hugging Face dataset with prompts."""
    split: str = "train"
    """Split of that dataset."""
    limit: int | None = None
    """Only the first prompts, as many."""
    shard: str = "0/1"
    """I/N: only part I of N, I from 0, for several machines."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Treatment of a prompt that cannot be used."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it must be at least 1")


@dataclass(frozen=True)
class AnswerOptions:
    """Answers to prompts."""

    responses: Literal["target", "corpus"] = "target"
    """Source of the answers: the target, or the data itself."""
    max_tokens: int = 512
    """Most tokens per answer."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most probable tokens up to this total probability."""
    seed: int = 0
    """The same seed gives the same rows."""
    max_len: int | None = None
    """Longest conversation in tokens. By default the model's context."""


@dataclass(frozen=True)
class SynthesisOptions:
    """Prompts that the target writes."""

    prefix: tuple[str, ...] = ()
    """First words of a prompt; repeatable, then used in turn. By default those of `prefixes`."""
    prefixes: str = "builtin"
    """builtin, the default: a built-in prefix, from sums to summaries, for every second prompt; none; or a file with
    one per line, where an empty line is a free prompt."""
    system: str | None = None
    """System message to steer by. It is not part of the output."""
    max_tokens: int = 256
    """Most tokens per prompt; longer ones are dropped."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy: one prompt per prefix."""
    top_p: float = 1.0
    """Sample from the most probable tokens up to this total probability."""
    seed: int = 0
    """The same seed gives the same prompts."""

    def __post_init__(self) -> None:
        if self.prefix and self.prefixes != "builtin":
            raise ValueError("prefix and prefixes exclude each other; set one")


@dataclass(frozen=True)
class Machines:
    """Processes and batch of the target. Neither changes the rows, except for near ties in 16 bits."""

    jobs: int | None = None
    """Processes. By default one per GPU; more share it."""
    batch: int | None = None
    """Answers decoded together. By default 8 on a CPU, 2048 on a GPU."""

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs is {self.jobs}; it must be at least 1")

    def engine(self, place: str, max_len: int | None = None) -> EngineConfig:
        """Large chunks of many prompts: throughput counts, not latency."""
        usual = CPU_BATCH if place == "cpu" else GPU_BATCH
        batch = usual if self.batch is None else self.batch
        return EngineConfig(
            max_batch=batch,
            max_len=max_len,
            prefill_chunk=max(512, 16 * batch),
            prefix_cache=False,
            max_admission_delay=MAX_ADMISSION_DELAY,
        )


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
    prompts, answers, machine = settings.prompts, settings.answers, settings.machine
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
    from jetspec.data.prompts import PromptData, parse_shard
    from jetspec.data.regenerate import RegenerateConfig

    source = PromptData(
        tuple(data or ()),
        prompts.hf_dataset,
        prompts.split,
        prompts.limit,
        parse_shard(prompts.shard),
        answers.responses,
    )
    config = RegenerateConfig(settings.model.name, **vars(answers))
    regenerate_data(out, source, config, settings.model, machine, on_bad=prompts.on_bad, dry_run=dry_run)


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
    from jetspec.data.synthesize import SynthesizeConfig, read_prefixes

    asked = dict(vars(settings.prompts))
    one_by_one, file = asked.pop("prefix"), asked.pop("prefixes")
    config = SynthesizeConfig(settings.model.name, one_by_one or read_prefixes(file), **asked)
    synthesize_data(out, count, config, settings.model, settings.machine, dry_run=dry_run)


# -- regenerate


def regenerate_data(
    out: Path,
    data: PromptData,
    config: RegenerateConfig,
    model: TargetConfig,
    machine: Machines,
    *,
    on_bad: OnBad,
    dry_run: bool,
) -> None:
    from jetspec.data.regenerate import load_check, load_corpus, places, plan, write_rows

    config.sampling("")  # refuses bad settings before anything is read
    where = places(model.device, machine.jobs)
    if config.responses == "corpus":
        where, corpus = ["cpu"], load_corpus(config)
        check: Check = corpus.converse
        starts: list[Callable[[], Answer]] = [lambda: corpus.answer]
    else:
        starts = [
            partial(
                load_answerer, config, machine.engine(place, config.max_len), model.dtype, place, where.count(place)
            )
            for place in where
        ]
        check = load_check(config)
    if not dry_run:
        print(write_rows(out, data, config, check, starts, on_bad).summary(out))
        return
    words, todo = plan(out, data, config, check, where, on_bad)
    print(words, flush=True)
    if todo and config.responses == "target":
        print(time_needed(config, model.dtype, machine.engine(where[0], config.max_len), where, todo))


def time_needed(
    config: RegenerateConfig, dtype: str, engine: EngineConfig, where: Sequence[str], todo: Sequence[Prompt]
) -> str:
    """Time that the answers take, in words. Processes that share a device count as one."""
    from jetspec.data.regenerate import probe

    llm = load_target_alone(config.model, engine, dtype, where[0], where.count(where[0]))
    with working("Answering a few prompts"):
        found = probe(llm, config, todo, engine.max_batch)
    if found is None:
        return "the time is unknown: none of the prompts that were tried can be answered"
    num_answers = sum(len(prompt.turns) for prompt in todo)
    seconds = found.seconds_for(num_answers, config.max_tokens, len(set(where)))
    return (
        f"which takes about {duration(seconds)}, judging by the beginnings of answers to {found.prompts} prompts:"
        f" {found.tokens_per_s:,.0f} tokens/s, {found.answer_tokens(config.max_tokens):,.0f} tokens per answer"
    )


def load_answerer(config: RegenerateConfig, engine: EngineConfig, dtype: str, device: str, sharing: int) -> Answer:
    from jetspec.data.regenerate import regenerate

    return partial(regenerate, load_target_alone(config.model, engine, dtype, device, sharing), config)


def load_target_alone(model: str, engine: EngineConfig, dtype: str, device: str, sharing: int) -> LLM:
    """The target without a drafter. `sharing` is the number of processes on the same device."""
    import torch

    from jetspec.engine.llm import LLM

    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
        if sharing > 1:
            memory = torch.cuda.get_device_properties(device).total_memory
            engine = replace(engine, cache_gb=SHARED_FRAC * memory / 2**30 / sharing)
    is_worker = multiprocessing.parent_process() is not None
    with nullcontext() if is_worker else working(f"Loading {model}"):
        return LLM(model, drafter="none", engine=engine, dtype=dtype, device=device)


# -- synthesize


def synthesize_data(
    out: Path, count: int, config: SynthesizeConfig, model: TargetConfig, machine: Machines, *, dry_run: bool
) -> None:
    from jetspec.data.regenerate import places, read_tokenizer
    from jetspec.data.synthesize import UserTurn, plan, write_prompts

    config.sampling("")  # refuses bad settings before anything is read
    where = places(model.device, machine.jobs)
    engines = [engine_for(count, len(where), machine, place) for place in where]
    tokenizer, eos_tokens, _ = read_tokenizer(config.model)
    turn = UserTurn(tokenizer, eos_tokens, config.system)
    if dry_run:
        print(plan(out, count, config, turn, where))
        return
    starts = [
        partial(load_writer, config, engine, model.dtype, place, where.count(place))
        for engine, place in zip(engines, where, strict=True)
    ]
    print(write_prompts(out, count, config, turn, starts).summary(out))


def engine_for(count: int, jobs: int, machine: Machines, place: str) -> EngineConfig:
    """Engine settings as for answers, with a batch of at most the prompts to write: more would be discarded."""
    batch = min(machine.engine(place).max_batch, -(-count // jobs))
    return replace(machine, batch=batch).engine(place)


def load_writer(config: SynthesizeConfig, engine: EngineConfig, dtype: str, device: str, sharing: int) -> Answer:
    from jetspec.data.synthesize import UserTurn, synthesize

    llm = load_target_alone(config.model, engine, dtype, device, sharing)
    turn = UserTurn(llm.tokenizer, llm.target.eos_tokens, config.system)
    # The end of a user's turn may differ from that of an answer.
    llm.target = replace(llm.target, eos_tokens=turn.end_tokens)
    return partial(synthesize, llm, config, turn)
