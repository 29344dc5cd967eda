"""`engine sampling`, `soak` and `lossless`: properties of the engine, measured, one record per command."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.lossless import FreshPass, Texts
from benchmarks.options import (
    ANYTHING,
    DEFAULT,
    Commit,
    Device,
    Model,
    Questions,
    RecordFile,
    examples,
    moved,
    numbers,
    with_options,
)
from benchmarks.soak import KINDS, Soak
from jetspec.commands.screen import total
from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.engine.llm import DTYPES, GPU_TREE, choose_device
from jetspec.engine.warm_up import warm_up_batches
from jetspec.files import check_writable
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.models.head_format import load_head
from jetspec.models.hf_target import load_hf
from jetspec.models.hub import resolve
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import Target, load_target
from jetspec.profile.shapes import open_head
from jetspec.progress import progress_bar
from jetspec.record import current_commit, write_record
from jetspec.train.choices import SETTINGS
from jetspec.train.config import HeadShape
from jetspec.types import Completion, RoundStats, SamplingParams

STRICT_TIE = 1e-4
LONGEST_PROMPT, LONGEST_LOSSLESS = 1024, 300
"""Tokens of a prompt, and of one that `lossless` asks."""
SOAK_CHECKS, SOAK_PAGE = 100, 8
SAMPLING_SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench", "alpaca_eval")


@dataclass(frozen=True)
class Models:
    """A target, its head, and engines over both."""

    target: Decoder
    head: DraftHead
    eos_tokens: frozenset[int] = frozenset()
    shortlist: int = TreeConfig.shortlist

    def engine(self, budget: int, config: EngineConfig, choice_model: bool = True) -> Engine:
        """Speculative engine, with n-grams if a GPU has them by default; with a budget of 1 it decodes plainly."""
        return Engine(
            self.target,
            self.head if budget > 1 else None,
            drafter="head" if budget > 1 else "none",
            tree=TreeConfig(budget, shortlist=self.shortlist, ngrams=GPU_TREE.ngrams, choice_model=choice_model),
            config=config,
            eos_tokens=self.eos_tokens,
        )


# -- decoding


@dataclass(frozen=True)
class Decoded:
    completions: dict[str, Completion]
    seconds: float

    @property
    def texts(self) -> dict[str, list[int]]:
        return {name: completion.token_ids for name, completion in self.completions.items()}

    @cached_property
    def stats(self) -> RoundStats:
        """Statistics of all; the speed is that of requests that ran one at a time, without prefill."""
        return total(completion.stats for completion in self.completions.values())


def decode(
    engine: Engine,
    prompts: Texts,
    tokens: int,
    batch: int,
    label: str | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008
) -> Decoded:
    """Completions of prompts, greedy ones by default, `batch` at a time; a label shows progress. Where no seed
    is set, they are the numbers of the prompts."""
    sampling, waiting = replace(sampling, max_tokens=tokens), deque(enumerate(prompts.items()))
    name_of: dict[int, str] = {}
    done: dict[str, Completion] = {}
    began = time.perf_counter()
    with progress_bar(total=len(prompts), desc=label, unit="prompt", leave=False, disable=label is None) as bar:
        while len(done) < len(prompts):
            while waiting and len(engine.requests) < batch:
                number, (name, prompt) = waiting.popleft()
                seed = number if sampling.seed is None else sampling.seed
                name_of[engine.add(prompt, replace(sampling, seed=seed), quiet=True)] = name
            for update in engine.step():
                if update.completion:
                    done[name_of[update.request_id]] = update.completion
                    bar.update()
    seconds = time.perf_counter() - began
    return Decoded({name: done[name] for name in prompts}, seconds)


def engine_config(prompts: Texts, tokens: int, batch: int) -> EngineConfig:
    """Just enough memory, and no prefix cache: every run does the same work."""
    return EngineConfig(max_batch=batch, max_len=longest(prompts) + tokens, prefix_cache=False)


def longest(prompts: Texts) -> int:
    return max(map(len, prompts.values()))


def first(prompts: Texts, count: int) -> Texts:
    return dict(list(prompts.items())[:count])


# -- measurements


def check_sampling(models: Models, prompts: Texts, budgets: Sequence[int], tokens: int, repeats: int) -> dict[str, Any]:
    """One request at a time in every sampling setting: plain, and with trees that were drafted with the noise of the
    choices and without it. Settings alternate within a repeat."""
    config = engine_config(prompts, tokens, 1)
    cases = [(1, False), *product(budgets, (True, False))]
    engines = {(budget, uses): models.engine(budget, config, choice_model=uses) for budget, uses in cases}
    for engine in engines.values():
        for course in warm_up_batches(engine):
            course.run(engine)
    settings = {sampling.setting: sampling for sampling in (SamplingParams(), *SETTINGS)}
    for engine, sampling in product(engines.values(), settings.values()):
        decode(engine, first(prompts, 1), tokens, 1, sampling=sampling)  # captures the graphs of the setting
    done: dict[tuple[str, int, bool], list[Decoded]] = defaultdict(list)
    for repeat, name, case in product(range(repeats), settings, cases):
        label = f"{repeat + 1}/{repeats}: {name}, budget {case[0]}"
        done[name, *case].append(decode(engines[case], prompts, tokens, 1, label, settings[name]))
    rows = []
    for (name, budget, uses), runs in done.items():
        plain, rates = done[name, 1, False], [run.stats.tokens_per_s for run in runs]
        rows.append(
            {
                "setting": name,
                "budget": budget,
                "choice_model": uses,
                "tokens_per_round": runs[0].stats.tokens_per_round,
                "tokens_per_s": statistics.median(rates),
                "range": [min(rates), max(rates)],
                "plain_tokens_per_s": (of_plain := statistics.median(run.stats.tokens_per_s for run in plain)),
                "speedup": statistics.median(rates) / of_plain,
                "same_text": sum(text == plain[0].texts[key] for key, text in runs[0].texts.items()),
                "total": len(prompts),
            }
        )
    repeatable = all(run.texts == runs[0].texts for runs in done.values() for run in runs)
    return {"repeats": repeats, "rows": rows, "correct": repeatable}


def check_soak(models: Models, prompts: Texts, batch: int, budget: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Random arrivals, cancels and preemptions: see `Soak`. Half the pages of a full batch force preemptions."""
    fresh = FreshPass(models.target, models.head, longest(prompts) + tokens)
    alone = models.engine(1, engine_config(prompts, tokens, batch))
    plain = {kind: decode(alone, prompts, tokens, batch, None, params).texts for kind, params in KINDS.items()}
    config = EngineConfig(max_batch=batch, max_len=longest(prompts) + tokens, page_size=SOAK_PAGE)
    block = models.head.head_config.block_size
    mean = sum(map(len, prompts.values())) // len(prompts)
    least = longest(prompts) + tokens + max(budget, block) + 2 * block
    pages = -(-max(least, batch * (mean + tokens) // 2) // SOAK_PAGE)
    engine = models.engine(budget, replace(config, num_pages=pages))
    return Soak(engine, prompts, plain, fresh, tokens, STRICT_TIE).run(rounds, SOAK_CHECKS)


# -- commands

Prompts = Annotated[int, typer.Option(min=1, help="Prompts to draw, for `sampling` of each set.")]
Batch = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
Budget = Annotated[int, typer.Option(min=2, help="Nodes of a tree.")]
SOAK_EPILOG = examples("soak --head HEAD --data DATA --out docs/results/engine_soak.json")
LOSSLESS_EPILOG = examples("lossless --data data/eval --out docs/results/lossless_smollm2_cpu.json")
app = typer.Typer(no_args_is_help=True)


@dataclass
class Plan:
    """Options of every command here, and the loop over precisions."""

    head: Annotated[str, typer.Option(help="Name or folder of the head.", metavar="NAME")]
    data: Questions
    out: RecordFile
    model: Model = DEFAULT
    device: Device = "auto"
    dtypes: Annotated[str, typer.Option(help="Precisions, one run for each.", metavar="A,B,..")] = "bfloat16,float32"
    tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a prompt.")] = 256
    shortlist: Annotated[int, typer.Option(min=0, help="Tokens that an edge term ranks.")] = TreeConfig.shortlist
    commit: Commit = None

    def __post_init__(self) -> None:
        """Refuse bad values before anything is loaded."""
        check_writable(self.out)
        self.tree = TreeConfig(shortlist=self.shortlist)
        self.where = choose_device(self.device)
        if unknown := [name for name in self.dtypes.split(",") if name not in DTYPES]:
            raise ValueError(f"dtypes: {unknown[0]!r} is none of {', '.join(sorted(DTYPES))}")

    def files(self, *names: str) -> list[Path]:
        """Files of these sets of prompts; without names, of all."""
        files = [self.data / f"{name}.jsonl" for name in names] or sorted(self.data.glob("*.jsonl"))
        if missing := [file for file in files if not file.is_file()]:
            raise ValueError(f"there is no file {missing[0]}")
        if not files:
            raise ValueError(f"{self.data} holds no JSONL files")
        return files

    def run(self, check: str, measure: Callable[[Models, Tokenizer], dict[str, Any]]) -> None:
        """Measure in each precision, and write the record after each. Exit status 1: something does not hold."""
        commit = self.commit or current_commit()  # now, because the checkout may change while this runs
        about: dict[str, Any] = {"check": check, "model": Path(self.model).name, "head": Path(self.head).name}
        about |= {"device": self.where.type, "draft_temperature": self.tree.draft_temperature}
        about |= {"shortlist": self.shortlist, "shortlist_parents": self.tree.shortlist_parents}
        dtypes, results = self.dtypes.split(","), dict[str, dict[str, Any]]()
        for done, name in enumerate(dtypes, 1):
            target = load_target(self.model, DTYPES[name], self.where)
            head = load_head(self.head, target.decoder.config, DTYPES[name], self.where)
            models = Models(target.decoder, head, target.eos_tokens, self.shortlist)
            results[name] = measure(models, target.tokenizer)
            left = {"unfinished": dtypes[done:]} if dtypes[done:] else {}
            holds = not left and all(result["correct"] for result in results.values())
            found = {"max_tokens": self.tokens, **left, "holds": holds, "results": results}
            write_record(self.out, {**about, **found}, commit)
        print(json.dumps({"check": check, "holds": holds, "record": str(self.out)}))
        if not holds:
            raise typer.Exit(1)


@app.command(epilog=examples("engine sampling --head HEAD --data DATA --out docs/results/sampling.json"))
@with_options(Plan, dtypes="bfloat16")
def sampling(
    plan: Plan,
    prompts: Prompts = 8,
    budgets: Annotated[str, typer.Option(help="Nodes of a tree.", metavar="A,B,..")] = "16,64",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every setting.")] = 3,
) -> None:
    """Time sampled text in the usual settings: plain, and with trees with and without the choice model."""
    sizes, files = numbers(budgets, least=2, name="--budgets"), plan.files(*SAMPLING_SETS)

    def measure(models: Models, tokenizer: Tokenizer) -> dict[str, Any]:
        asked = {name: prompt for file in files for name, prompt in draw([file], prompts, tokenizer).items()}
        return check_sampling(models, asked, sizes, plan.tokens, repeats)

    plan.run("sampling", measure)


for gone in ("speed", "batches", "strict"):
    place = moved(f"engine {gone}", f"run benchmarks/recipes/engine_{gone}.yaml")
    app.command(gone, hidden=True, context_settings=ANYTHING)(place)


@with_options(Plan, dtypes="float32", tokens=96)
def soak(
    plan: Plan,
    prompts: Prompts = 32,
    batch: Batch = 8,
    budget: Budget = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 10_000,
) -> None:
    """Run random arrivals, cancels and preemptions, and look for leaks and wrong texts."""
    files = plan.files()
    plan.run(
        "soak",
        lambda models, tokenizer: check_soak(
            models, draw(files, prompts, tokenizer), batch, budget, plan.tokens, rounds
        ),
    )


# -- against transformers


def lossless(
    data: Questions,
    out: RecordFile,
    model: Model = DEFAULT,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to draw.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    budgets: Annotated[str, typer.Option(help="Nodes of a tree; 1 is plain decoding.")] = "1,8,64",
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,6",
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Settings checked at the same time.")] = 1,
    commit: Commit = None,
) -> None:
    """Compare greedy texts of every drafter with those of `generate` of transformers, token for token, in float32.

    Every drafter, budget, batch size and prefix-cache setting must write the same. Exit status 1: a text differs.
    """
    sizes, widths = numbers(budgets, name="--budgets"), numbers(batches, name="--batches")
    drafters = ("none", "ngram", "head", "edge head")
    every = product(drafters, sizes, widths, (True, False))
    settings = [setting for setting in every if (setting[1] == 1) == (setting[0] == "none")]
    commit = commit or current_commit()  # now, because the checkout may change while this runs
    target = loaded(model, device)
    asked = list(draw(sorted(data.glob("*.jsonl")), prompts, target.tokenizer, LONGEST_LOSSLESS).values())
    expected = transformers_greedy(model, asked, tokens, device, target.eos_tokens)
    job = partial(check_setting, model, device, asked, expected, tokens)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(job, settings))
    different = sum(int(run["different"]) for run in runs)
    results = {"model": target.name, "prompts": len(asked), "tokens": tokens, "dtype": "float32"}
    write_record(out, {**results, "different": different, "runs": runs}, commit)
    print(json.dumps({"runs": len(runs), "different": different}))
    if different:
        raise typer.Exit(1)


def transformers_greedy(
    model: str, prompts: Sequence[Sequence[int]], tokens: int, device: str, eos: frozenset[int]
) -> list[list[int]]:
    other = load_hf(resolve(model), torch.float32, device)
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": sorted(eos), "pad_token_id": 0}
    written = []
    for prompt in progress_bar(prompts, desc="transformers"):
        ids = torch.tensor([list(prompt)], device=device)
        out = other.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        written.append(out[0, len(prompt) :].tolist())
    return written


@cache
def loaded(model: str, device: str) -> Target:
    return load_target(model, torch.float32, torch.device(device))


def check_setting(
    model: str,
    device: str,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    tokens: int,
    setting: tuple[str, int, int, bool],
) -> dict[str, Any]:
    """Decode all prompts in one setting and count those that differ."""
    drafter, budget, batch, prefix_cache = setting
    target = loaded(model, device)
    layers = min(5, max(1, target.decoder.config.num_layers - 3))
    shape = HeadShape(num_layers=layers, edge_rank=32 if drafter == "edge head" else 0)
    head = open_head(target.decoder, None, shape) if drafter.endswith("head") else None
    config = EngineConfig(max_batch=batch, prefix_cache=prefix_cache, max_len=2048, cache_gb=4)
    kind: Any = "head" if head else drafter
    tree, ends = TreeConfig(budget=budget), target.eos_tokens
    engine = Engine(target.decoder, head, drafter=kind, tree=tree, config=config, eos_tokens=ends)
    done = decode(engine, {str(i): prompt for i, prompt in enumerate(prompts)}, tokens, len(prompts))
    different = sum(text != expected[int(i)] for i, text in done.texts.items())
    run = {"drafter": drafter, "budget": budget, "batch": batch, "prefix_cache": prefix_cache}
    written, rounds = sum(map(len, expected)), done.stats.rounds
    print(run, f"different {different}, {written / rounds:.2f} tokens per round, {done.seconds:.0f} s", flush=True)
    return {**run, "different": different, "tokens": written, "rounds": rounds, "seconds": done.seconds}


# -- prompts


def draw(files: Sequence[Path], count: int, tokenizer: Tokenizer, most: int = LONGEST_PROMPT) -> dict[str, list[int]]:
    """Prompts of first turns by id, drawn over all files, the same for every run. Longer ones are left out."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(lines)
    prompts = ((line["id"], encode(tokenizer, line["turns"][0])) for line in lines)
    drawn = dict(islice(((name, prompt) for name, prompt in prompts if len(prompt) <= most), count))
    if len(drawn) < count:
        held = f"{len(drawn)} conversations that begin with at most {most:,} tokens"
        raise ValueError(f"{', '.join(file.name for file in files)}: {held}, of {count} requested")
    return drawn


def encode(tokenizer: Tokenizer, said: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": said}])
