"""`engine`, `soak`, `lossless` and `cpu-speed`: properties of the engine, measured, one record per command.

A text may differ from the plain one only at a near tie: in float32 where two logits are less than 1e-4 apart, in 16
bits where they are within the rounding of two logits, in some reading of the text: see `benchmarks.lossless`.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import cycle, islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from transformers import PreTrainedModel

from benchmarks.lossless import FreshPass, Judge, PairNoise, Texts, cached, find_differences, pair_noise, readings
from benchmarks.methods import token_times
from benchmarks.options import DEFAULT, Commit, Device, Model, Questions, RecordFile, examples, numbers, with_options
from benchmarks.soak import KINDS, Soak
from jetspec.commands.screen import total
from jetspec.config import BatchTree, EngineConfig, TreeConfig
from jetspec.engine.drafter import Drafter, RoundState
from jetspec.engine.engine import Engine
from jetspec.engine.llm import DTYPES, GPU_TREE, choose_device
from jetspec.engine.runner import batch_sizes
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
from jetspec.profile.timing import without_capture
from jetspec.progress import progress_bar
from jetspec.record import current_commit, write_record
from jetspec.train.choices import SETTINGS
from jetspec.train.config import HeadShape
from jetspec.tree import DraftTree
from jetspec.types import Completion, RoundStats, SamplingParams

STRICT_TIE = 1e-4
LONGEST_PROMPT, LONGEST_LOSSLESS = 1024, 300
"""Tokens of a prompt, and of one that `lossless` asks."""
NOISE_TEXTS = 16
"""Answers that rounding is measured on."""
MAX_ADMISSION_DELAY = 8
STEADY_S, MOST_RUNS = 1.0, 5
"""Shorter runs are repeated, up to this number."""
SOAK_CHECKS, SOAK_PAGE = 100, 8
SPEED_SETS, BATCH_SETS = ("gsm8k", "humaneval", "mt_bench"), ("gsm8k",)
SAMPLING_SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench", "alpaca_eval")
TURN_BATCH = 32
"""Conversations whose earlier turns are answered together."""
CPU_PROMPT, CPU_WARM_UP = "Explain in a few sentences how a bicycle stays upright while it is moving.", 2


@dataclass(frozen=True)
class Models:
    """A target, its head, and engines over both."""

    target: Decoder
    head: DraftHead
    eos_tokens: frozenset[int] = frozenset()
    shortlist: int = TreeConfig.shortlist

    def engine(
        self,
        budget: int,
        config: EngineConfig,
        depth: int | None = None,
        batch_trees: tuple[BatchTree, ...] = (),
        choice_model: bool = True,
    ) -> Engine:
        """Speculative engine, with n-grams if a GPU has them by default; with a budget of 1 it decodes plainly."""
        tree = TreeConfig(budget, depth=depth, shortlist=self.shortlist, batch_trees=batch_trees)
        return Engine(
            self.target,
            self.head if budget > 1 else None,
            drafter="head" if budget > 1 else "none",
            tree=replace(tree, ngrams=GPU_TREE.ngrams, choice_model=choice_model),
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


def decode_timed(
    engine: Engine, prompts: Texts, tokens: int, batch: int, label: str, most: int = MOST_RUNS
) -> list[Decoded]:
    """`decode`, first repeated until no graph is captured on the way, then, if short, for an odd number of runs.

    The fastest run comes first.
    """
    runs = [without_capture(engine.graphs, lambda: decode(engine, prompts, tokens, batch, label))]
    while len(runs) < most and sum(run.seconds for run in runs) < STEADY_S:
        runs += [decode(engine, prompts, tokens, batch, label) for _ in range(2)]
    return sorted(runs, key=lambda run: run.seconds)


def warm_up(engine: Engine, prompts: Texts, batch: int) -> None:
    """Capture and compile rounds of all batch sizes up to this one."""
    prompt = next(iter(prompts.values()))
    for size in batch_sizes(batch, engine.drafter.tree.batch_trees):
        decode(engine, {str(i): prompt[:1] for i in range(size)}, 1, size)  # nothing to prefill: all join at once
    decode(engine, first(prompts, batch), 2, batch)


def engine_config(prompts: Texts, tokens: int, batch: int, **options: Any) -> EngineConfig:
    """Just enough memory, and no prefix cache: every run does the same work."""
    return EngineConfig(max_batch=batch, max_len=longest(prompts) + tokens, prefix_cache=False, **options)


def longest(prompts: Texts) -> int:
    return max(map(len, prompts.values()))


def first(prompts: Texts, count: int) -> Texts:
    return dict(list(prompts.items())[:count])


# -- near ties


@dataclass(frozen=True)
class Ties:
    """Distinguishes near ties from mistakes."""

    prompts: Texts
    judges: Sequence[Judge]
    noise: PairNoise
    limit: float
    """Largest distance of two logits at a near tie."""

    @classmethod
    def measure(cls, models: Models, prompts: Texts, plain: Texts, budget: int) -> Ties:
        """Measure the rounding of passes over one token and over trees of this budget, on plain texts."""
        fresh = FreshPass(models.target, None, longest(prompts) + longest(plain))
        noise = pair_noise(fresh, [(prompts[name], text) for name, text in plain.items()], budget, NOISE_TEXTS)
        if models.target.embedding.dtype == torch.float32:
            return cls(prompts, [cached(fresh.logits)], noise, STRICT_TIE)
        return cls(prompts, list(map(cached, readings(fresh))), noise, noise.widest_tie)

    def __call__(self, plain: Texts, other: Texts) -> dict[str, Any]:
        """Differences of two decodings, each with its gap."""
        found = find_differences(self.prompts, plain, other, self.judges, self.limit)
        mistakes = sum(not difference.tie for difference in found)
        return {"different": len(found), "mistakes": mistakes, "differences": list(map(asdict, found))}

    def record(self, runs: Sequence[Mapping[str, Any]], best: Mapping[Any, float] | None = None) -> dict[str, Any]:
        """Noise and verdict: every difference is a near tie, and the best budget beats plain decoding everywhere."""
        found = {"noise": asdict(self.noise), "tie_limit": self.limit}
        found["correct"] = not any(run["mistakes"] for run in runs)
        if best is not None:
            found |= {"faster": min(best.values()) > 1, "best_speedup": best, "runs": runs}
        return found


# -- measurements


def check_speed(
    models: Models,
    sets: Mapping[str, Texts],
    budgets: Sequence[int],
    tokens: int,
    other: PreTrainedModel | None = None,
    other_prompts: int = 3,
) -> dict[str, Any]:
    """Tokens per second of one request at a time: plain, speculative, and of `transformers`; without prefill."""
    everything = {name: prompt for prompts in sets.values() for name, prompt in prompts.items()}
    config = engine_config(everything, tokens, 1)
    done: dict[tuple[str, int], Decoded] = {}
    for budget in (1, *budgets):
        engine = models.engine(budget, config)
        warm_up(engine, everything, 1)
        for course in warm_up_batches(engine):  # prompts of every length
            course.run(engine)
        for name, prompts in sets.items():
            (done[name, budget],) = decode_timed(engine, prompts, tokens, 1, f"{name}, budget {budget}", most=1)
    plain = {name: done[name, 1] for name in sets}
    texts = {name: text for decoded in plain.values() for name, text in decoded.texts.items()}
    ties = Ties.measure(models, everything, texts, max(budgets))
    runs: list[dict[str, Any]] = [
        {
            "set": name,
            "budget": budget,
            "tokens": decoded.stats.completion_tokens,
            "tokens_per_s": decoded.stats.tokens_per_s,
            "tokens_per_round": decoded.stats.tokens_per_round,
            "speedup": decoded.stats.tokens_per_s / plain[name].stats.tokens_per_s,
            **ties(plain[name].texts, decoded.texts),
        }
        for (name, budget), decoded in done.items()
    ]
    best = {name: max(run["speedup"] for run in runs if run["set"] == name) for name in sets}
    found = ties.record(runs, best)
    if other is not None:
        for name, prompts in sets.items():
            rates = transformers_rates(other, first(prompts, other_prompts), tokens)
            median = statistics.median(rates)
            for run in (run for run in runs if run["set"] == name):
                run |= {"transformers_tokens_per_s": median, "transformers_range": [min(rates), max(rates)]}
                run["speedup_over_transformers"] = run["tokens_per_s"] / median
        found["transformers_prompts"] = min(other_prompts, *map(len, sets.values()))
    return found


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


@dataclass(frozen=True, order=True)
class Tree:
    """`BUDGET` or `BUDGET:DEPTH`, where a depth of 0 is the drafter's own; `shrinking`: an engine's trees on a GPU."""

    budget: int
    depth: int = 0
    batch_trees: bool = False

    @classmethod
    def read(cls, word: str) -> Tree:
        if word == "shrinking":
            return cls(GPU_TREE.budget, batch_trees=True)
        try:
            budget, _, depth = word.partition(":")
            config = TreeConfig(budget=int(budget), depth=int(depth or 0) or None)
        except ValueError as error:
            raise ValueError(f"{word!r} is no tree: {error}") from None
        return cls(config.budget, config.depth or 0)


def check_batches(
    models: Models, prompts: Texts, batches: Sequence[int], trees: Sequence[Tree], tokens: int, waves: int
) -> dict[str, Any]:
    """Every batch size with every tree: median tokens per second with prefill, and texts against those alone."""
    config = engine_config(prompts, tokens, max(batches), max_admission_delay=MAX_ADMISSION_DELAY)
    alone: Decoded | None = None
    done: dict[tuple[Tree, int], list[Decoded]] = {}
    for tree in sorted({Tree(1), *trees}):
        shrinking = GPU_TREE.batch_trees if tree.batch_trees else ()
        engine = models.engine(tree.budget, config, tree.depth or None, shrinking)
        warm_up(engine, prompts, max(batches))
        alone = alone or decode(engine, first(prompts, waves * max(batches)), tokens, 1, "alone")
        for batch in batches:
            some, label = first(prompts, waves * batch), f"batch {batch}, budget {tree.budget}"
            done[tree, batch] = decode_timed(engine, some, tokens, batch, label)
    assert alone is not None
    ties = Ties.measure(models, prompts, alone.texts, max(trees).budget)
    runs = [
        {
            "batch": batch,
            "budget": tree.budget,
            "depth": tree.depth or None,
            "batch_trees": tree.batch_trees,
            "tokens": median.stats.completion_tokens,
            "seconds": median.seconds,
            "seconds_of_runs": [run.seconds for run in repeats],
            "tokens_per_s": median.stats.completion_tokens / median.seconds,
            "tokens_per_round": median.stats.tokens_per_round,
            **ties(alone.texts, median.texts),
        }
        for (tree, batch), repeats in done.items()
        for median in (repeats[len(repeats) // 2],)
    ]
    frame = pd.DataFrame(runs)
    plain, others = (
        frame[is_own].groupby("batch").tokens_per_s.max() for is_own in (frame.budget == 1, frame.budget > 1)
    )
    return ties.record(runs, (others / plain).fillna(1.0).to_dict())


def check_strict(models: Models, prompts: Texts, batch: int, budget: int, tokens: int) -> dict[str, Any]:
    """Speculative against plain texts of many prompts, every difference listed."""
    config = engine_config(prompts, tokens, batch, max_admission_delay=MAX_ADMISSION_DELAY)
    plain = decode(models.engine(1, config), prompts, tokens, batch, "plain")
    other = decode(models.engine(budget, config), prompts, tokens, batch, f"budget {budget}")
    ties = Ties.measure(models, prompts, plain.texts, budget)
    found = ties(plain.texts, other.texts)
    gaps = [d["gap"] for d in found["differences"] if d["gap"] is not None]
    return {
        "prompts": len(prompts),
        "tokens": plain.stats.completion_tokens,
        "batch": batch,
        "budget": budget,
        "tokens_per_round": other.stats.tokens_per_round,
        **ties.record([found]),
        "widest_gap": max(gaps, default=0.0),
        **found,
    }


def transformers_rates(model: PreTrainedModel, prompts: Texts, tokens: int) -> list[float]:
    """Tokens per second of `generate` for each prompt, after a warm-up of the same length."""
    token_times(model, next(iter(prompts.values())), tokens)
    timed = progress_bar(prompts.values(), desc="transformers", leave=False)
    clocks = (token_times(model, prompt, tokens) for prompt in timed)
    return [(tokens - 1) / (times[-1] - times[0]) for times in clocks]


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

Prompts = Annotated[int, typer.Option(min=1, help="Prompts to draw, for `speed` of each set.")]
Batch = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
Budget = Annotated[int, typer.Option(min=2, help="Nodes of a tree.")]
SOAK_EPILOG = examples("soak --head HEAD --data DATA --out docs/results/engine_soak.json")
CPU_SPEED_EPILOG = examples("cpu-speed --out docs/results/cpu_speed.json")
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

    def run(self, check: str, measure: Callable[[Models, Tokenizer, torch.dtype], dict[str, Any]]) -> None:
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
            results[name] = measure(models, target.tokenizer, DTYPES[name])
            left = {"unfinished": dtypes[done:]} if dtypes[done:] else {}
            holds = not left and all_hold(results)
            found = {"max_tokens": self.tokens, **left, "holds": holds, "results": results}
            write_record(self.out, {**about, **found}, commit)
        print(json.dumps({"check": check, "holds": holds, "record": str(self.out)}))
        if not holds:
            raise typer.Exit(1)


def all_hold(results: Mapping[str, Mapping[str, Any]]) -> bool:
    """All texts are correct, and a 16-bit dtype is faster; float32 need not be where another was measured."""
    timed = [result for name, result in results.items() if name != "float32"] or list(results.values())
    return all(result["correct"] for result in results.values()) and all(r.get("faster", True) for r in timed)


@app.command(epilog=examples("engine speed --head HEAD --data DATA --out docs/results/engine_speed.json"))
@with_options(Plan, dtypes="bfloat16")
def speed(
    plan: Plan,
    prompts: Prompts = 80,
    budgets: Annotated[str, typer.Option(help="Nodes of a tree.", metavar="A,B,..")] = "16,32,64",
    other_prompts: Annotated[int, typer.Option(min=0, help="Prompts of each set for `transformers`; 0: none.")] = 3,
) -> None:
    """Time one request at a time: plain, speculative, and `transformers`."""
    sizes, files = numbers(budgets, least=2, name="--budgets"), plan.files(*SPEED_SETS)

    def measure(models: Models, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, Any]:
        turns = {file.stem: draw_turns([file], prompts, tokenizer, LONGEST_PROMPT) for file in files}
        sets = {name: every_turn(models, tokenizer, said, plan.tokens) for name, said in turns.items()}
        other = load_hf(resolve(plan.model), dtype, plan.where) if other_prompts else None
        return check_speed(models, sets, sizes, plan.tokens, other, other_prompts)

    plan.run("speed", measure)


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

    def measure(models: Models, tokenizer: Tokenizer, _: torch.dtype) -> dict[str, Any]:
        asked = {name: prompt for file in files for name, prompt in draw([file], prompts, tokenizer).items()}
        return check_sampling(models, asked, sizes, plan.tokens, repeats)

    plan.run("sampling", measure)


@app.command(epilog=examples("engine batches --head HEAD --data DATA --out docs/results/engine_batches.json"))
@with_options(Plan, tokens=128)
def batches(
    plan: Plan,
    batches: Annotated[str, typer.Option(help="Requests at a time.", metavar="A,B,..")] = "1,2,4,8,16,32,64",
    trees: Annotated[
        str,
        typer.Option(help="BUDGET or BUDGET:DEPTH; 1 is plain, `shrinking` an engine's own trees.", metavar="A,B,.."),
    ] = "1,16,16:8,32,64,shrinking,128",
    waves: Annotated[int, typer.Option(min=1, help="Prompts per slot of the batch.")] = 4,
) -> None:
    """Time every batch size with every tree."""
    sizes, shapes = numbers(batches, name="--batches"), [Tree.read(word) for word in trees.split(",")]
    files = plan.files(*BATCH_SETS)

    def measure(models: Models, tokenizer: Tokenizer, _: torch.dtype) -> dict[str, Any]:
        prompts = draw(files, waves * max(sizes), tokenizer)
        return check_batches(models, prompts, sizes, shapes, plan.tokens, waves)

    plan.run("batches", measure)


@app.command(epilog=examples("engine strict --head HEAD --data DATA --out docs/results/engine_strict.json"))
@with_options(Plan)
def strict(plan: Plan, prompts: Prompts = 1000, batch: Batch = 32, budget: Budget = 64) -> None:
    """Compare many speculative texts with plain ones, and list every difference."""
    files = plan.files()
    plan.run(
        "strict",
        lambda models, tokenizer, _: check_strict(models, draw(files, prompts, tokenizer), batch, budget, plan.tokens),
    )


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
        lambda models, tokenizer, _: check_soak(
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


# -- beside transformers on a CPU


class FullTree(Drafter):
    """Drafter of a full binary tree, so that a round costs as much as its budget allows."""

    def __init__(self, budget: int) -> None:
        self.lookahead, self.tree = budget, TreeConfig(budget)

    def draft(self, state: RoundState) -> None:
        return None

    def build(self, state: RoundState, drafted: None) -> DraftTree:
        node = torch.arange(self.lookahead)
        token = torch.where(node == 0, state.anchor_B[:, None], node)
        parent = ((node - 1).clamp(min=0) // 2).expand_as(token)
        return DraftTree.from_parents(token, parent, torch.full_like(state.anchor_B, self.lookahead), max_depth=8)


def cpu_speed(
    out: RecordFile,
    model: Model = DEFAULT,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per timing.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each.")] = 30,
    budget: Annotated[int, typer.Option(min=2, help="Nodes of a tree.")] = 16,
) -> None:
    """Time plain decoding, `transformers`, and a round of a tree on a CPU, in turn."""
    commit = current_commit()
    target = load_target(model, torch.float32, torch.device("cpu"))
    prompt = target.tokenizer.encode_chat([{"role": "user", "content": CPU_PROMPT}])
    other = load_hf(resolve(model), torch.float32)

    def engine(nodes: int) -> Engine:
        config = EngineConfig(max_batch=1, max_len=1024, prefix_cache=False)
        made = Engine(target.decoder, drafter="none", tree=TreeConfig(budget=nodes), config=config)
        if nodes > 1:
            made.drafter = made.round.drafter = FullTree(nodes)
            made.scheduler.lookahead = nodes
        return made

    plain, tree, rows = engine(1), engine(budget), list[tuple[float, float, float]]()
    for _ in range(repeats + CPU_WARM_UP):
        times = token_times(other, prompt, tokens + 1)
        transformers_ms = (times[-1] - times[0]) / tokens * 1e3
        rows.append((round_ms(plain, prompt, tokens), transformers_ms, round_ms(tree, prompt, tokens)))
    timings = pd.DataFrame(rows[CPU_WARM_UP:], columns=["plain_ms", "transformers_ms", "round_ms"])
    ratios = timings.div(timings.plain_ms, axis=0).median()  # of neighbouring timings, which other load slows alike
    over = {"transformers_over_plain": ratios.transformers_ms, "round_over_plain": ratios.round_ms}
    results = {"model": target.name, "budget": budget, **timings.median().to_dict(), **over}
    write_record(out, {**results, "all": timings.to_dict("list")}, commit)
    print(json.dumps(results))


def round_ms(engine: Engine, prompt: list[int], rounds: int) -> float:
    """Milliseconds per round of a new request, without prefill and the first round."""
    request_id = engine.add(prompt, SamplingParams(max_tokens=engine.max_len, ignore_eos=True))
    engine.step()
    began = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    seconds = time.perf_counter() - began
    engine.cancel(request_id)
    return seconds / rounds * 1e3


# -- prompts


def draw(files: Sequence[Path], count: int, tokenizer: Tokenizer, most: int = LONGEST_PROMPT) -> dict[str, list[int]]:
    """Prompts of first turns, by id."""
    drawn = draw_turns(files, count, tokenizer, most)
    return {name: encode(tokenizer, turns[:1]) for name, turns in drawn.items()}


def draw_turns(files: Sequence[Path], count: int, tokenizer: Tokenizer, most: int) -> dict[str, list[str]]:
    """User turns drawn over all files, the same for every run. Conversations with a long first turn are left out."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(lines)
    short = (line for line in lines if len(encode(tokenizer, line["turns"][:1])) <= most)
    drawn = {line["id"]: line["turns"] for line in islice(short, count)}
    if len(drawn) < count:
        held = f"{len(drawn)} conversations that begin with at most {most:,} tokens"
        raise ValueError(f"{', '.join(file.name for file in files)}: {held}, of {count} requested")
    return drawn


def encode(tokenizer: Tokenizer, said: Sequence[str]) -> list[int]:
    roles = cycle(("user", "assistant"))
    return tokenizer.encode_chat([{"role": role, "content": text} for role, text in zip(roles, said, strict=False)])


def every_turn(
    models: Models, tokenizer: Tokenizer, turns: Mapping[str, Sequence[str]], tokens: int
) -> dict[str, list[int]]:
    """Prompts of all turns. Plain decoding answers the earlier ones. A conversation ends where it is too long."""
    prompts: dict[str, list[int]] = {}
    said, turn = {name: [first] for name, (first, *_) in turns.items()}, 1
    while True:
        asked = {name: prompt for name in said if len(prompt := encode(tokenizer, said[name])) <= LONGEST_PROMPT}
        prompts |= {f"{name}, turn {turn}": prompt for name, prompt in asked.items()}
        asked = {name: prompt for name, prompt in asked.items() if turn < len(turns[name])}
        if not asked:
            break
        batch = min(len(asked), TURN_BATCH)
        engine = models.engine(1, engine_config(asked, tokens, batch))
        answers = decode(engine, asked, tokens, batch, f"turn {turn}").texts
        said = {name: [*said[name], tokenizer.decode(answer), turns[name][turn]] for name, answer in answers.items()}
        turn += 1
    return prompts
