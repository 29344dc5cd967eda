"""What must hold of the engine, measured: one check per command, one record per check.

    python -m benchmarks.check_engine speed   --head HEAD --data DATA --out docs/results/speed.json
    python -m benchmarks.check_engine batches --head HEAD --data DATA --out docs/results/batches.json
    python -m benchmarks.check_engine strict  --head HEAD --data DATA --out docs/results/strict.json
    python -m benchmarks.check_engine soak    --head HEAD --data DATA --out docs/results/soak.json

DATA is a folder of JSONL files with `turns`. A text may differ from the plain one only at a near tie: in float32 where
two logits are less than 1e-4 apart, in 16 bits where they are no further apart than rounding moves two logits, in some
reading of the text: see `benchmarks.precision`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.check_cpu_speed import Clock
from benchmarks.precision import (
    FreshPass,
    PairNoise,
    Remembering,
    Texts,
    find_differences,
    pair_noise,
    readings,
)
from benchmarks.soak import Soak, plain_texts
from jetspec.config import BatchTree, EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.engine.llm import DTYPES, GPU_TREE, choose_device
from jetspec.engine.sizes import batch_sizes
from jetspec.engine.warm_up import warm_up_batches
from jetspec.files import check_writable
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.models.head_format import load_head
from jetspec.models.hf_target import load_hf
from jetspec.models.hub import DEFAULT_MODEL, resolve
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import load_target
from jetspec.profile.timing import without_capture
from jetspec.record import current_commit, write_record
from jetspec.types import Completion, SamplingParams

STRICT_TIE = 1e-4
LONGEST_PROMPT = 1024
NOISE_TEXTS, NOISE_TOKENS = 16, 64
"""What rounding is measured on: so many answers, of each at most so many tokens."""
PATIENCE = 8
"""Rounds that a request may wait for others to be prefilled with."""
STEADY_S, MOST_RUNS = 1.0, 5
"""Runs of less time are repeated, up to so many."""
SOAK_CHECKS, SOAK_PAGE = 100, 8
SPEED_SETS, BATCH_SETS = ("gsm8k", "humaneval", "mt_bench"), ("gsm8k",)
ANSWERED = 32
"""Conversations that are answered together, for turns to come."""


@dataclass(frozen=True)
class Models:
    """A target, its head, and engines over both."""

    target: Decoder
    head: DraftHead
    eos_tokens: frozenset[int] = frozenset()
    shortlist: int = TreeConfig.shortlist

    def engine(
        self, budget: int, config: EngineConfig, depth: int | None = None, batch_trees: tuple[BatchTree, ...] = ()
    ) -> Engine:
        """One that speculates, or with a budget of 1 decodes plainly."""
        return Engine(
            self.target,
            self.head if budget > 1 else None,
            drafter="head" if budget > 1 else "none",
            tree=TreeConfig(budget=budget, depth=depth, shortlist=self.shortlist, batch_trees=batch_trees),
            config=config,
            eos_tokens=self.eos_tokens,
        )

    def fresh_pass(self, prompts: Texts, tokens: int) -> FreshPass:
        return FreshPass(self.target, self.head, longest(prompts) + tokens)


# -- decoding


@dataclass(frozen=True)
class Decoded:
    """What became of some prompts, and the time it took."""

    completions: dict[str, Completion]
    seconds: float

    @property
    def texts(self) -> dict[str, list[int]]:
        return {name: completion.token_ids for name, completion in self.completions.items()}

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts.values()))

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / sum(c.stats.rounds for c in self.completions.values())

    @property
    def decode_rate(self) -> float:
        """Tokens per second of requests that ran one at a time, prefill left out."""
        return self.tokens / sum(c.stats.decode_s for c in self.completions.values())


def decode(engine: Engine, prompts: Texts, tokens: int, batch: int, label: str | None = None) -> Decoded:
    """Greedy completions of prompts, so many at a time. With a label, shows how far it is."""
    sampling, waiting = SamplingParams(max_tokens=tokens), deque(prompts.items())
    name_of: dict[int, str] = {}
    done: dict[str, Completion] = {}
    began = time.perf_counter()
    with tqdm(total=len(prompts), desc=label, unit="prompt", leave=False, disable=label is None) as bar:
        while len(done) < len(prompts):
            while waiting and len(engine.requests) < batch:
                name, prompt = waiting.popleft()
                name_of[engine.add(prompt, sampling, quiet=True)] = name
            for update in engine.step():
                if update.completion:
                    done[name_of[update.request_id]] = update.completion
                    bar.update()
    seconds = time.perf_counter() - began
    return Decoded({name: done[name] for name in prompts}, seconds)


def decode_timed(engine: Engine, prompts: Texts, tokens: int, batch: int, label: str) -> Decoded:
    """`decode`, over and over until all that it needs was captured before."""
    return without_capture(engine.graphs, lambda: decode(engine, prompts, tokens, batch, label))


def decode_steadily(engine: Engine, prompts: Texts, tokens: int, batch: int, label: str) -> list[Decoded]:
    """`decode_timed`, a short run several times: an odd number of runs, the quickest first."""
    runs = [decode_timed(engine, prompts, tokens, batch, label)]
    while len(runs) < MOST_RUNS and sum(run.seconds for run in runs) < STEADY_S:
        runs += [decode(engine, prompts, tokens, batch, label) for _ in range(2)]
    return sorted(runs, key=lambda run: run.seconds)


def warm_up(engine: Engine, prompts: Texts, batch: int) -> None:
    """Capture and compile the rounds of batches up to this size, all of which a run may come through as it ends."""
    prompt = next(iter(prompts.values()))
    for size in batch_sizes(batch, engine.drafter.tree.batch_trees):
        decode(engine, {str(i): prompt[:1] for i in range(size)}, 1, size)  # nothing to prefill: all join at once
    decode(engine, first(prompts, batch), 2, batch)


def engine_config(prompts: Texts, tokens: int, batch: int, **options: Any) -> EngineConfig:
    """Just enough memory. No prefix is reused: every run is to do the same work."""
    return EngineConfig(max_batch=batch, max_len=longest(prompts) + tokens, prefix_cache=False, **options)


def longest(prompts: Texts) -> int:
    return max(map(len, prompts.values()))


def first(prompts: Texts, count: int) -> Texts:
    return dict(list(prompts.items())[:count])


def spread(prompts: Texts, count: int) -> Texts:
    """So many at most, as far apart as they can be."""
    names = list(prompts)
    return {names[i]: prompts[names[i]] for i in range(0, len(names), -(-len(names) // count))}


# -- near ties


@dataclass(frozen=True)
class Ties:
    """Tells near ties from mistakes."""

    prompts: Texts
    judges: Sequence[Remembering]
    noise: PairNoise
    limit: float
    """Logits no further apart than this are a near tie."""

    def __call__(self, plain: Texts, other: Texts) -> dict[str, Any]:
        """How two decodings differ, each difference with its gap."""
        found = find_differences(self.prompts, plain, other, self.judges, self.limit)
        return {
            "different": len(found),
            "mistakes": sum(not difference.tie for difference in found),
            "differences": [asdict(difference) for difference in found],
        }

    def to_dict(self) -> dict[str, Any]:
        return {"noise": asdict(self.noise), "tie_limit": self.limit}


def measure_ties(models: Models, prompts: Texts, plain: Texts, budget: int) -> Ties:
    """Measure what rounding does to passes over one token and over trees of this budget, on some of the plain texts, of
    every kind of prompt: some are noisier than others."""
    fresh = FreshPass(models.target, None, longest(prompts) + longest(plain))
    some = [(prompts[name], text[:NOISE_TOKENS]) for name, text in spread(plain, NOISE_TEXTS).items()]
    noise = pair_noise(fresh, some, budget)
    if models.target.embedding.dtype == torch.float32:
        return Ties(prompts, [Remembering(fresh)], noise, STRICT_TIE)
    return Ties(prompts, [Remembering(judge) for judge in readings(fresh)], noise, noise.widest_tie)


# -- the checks


def check_speed(
    models: Models,
    sets: Mapping[str, Texts],
    budgets: Sequence[int],
    tokens: int,
    other: PreTrainedModel | None = None,
    other_prompts: int = 3,
) -> dict[str, Any]:
    """Tokens per second of one request at a time: plain, speculative, and of `transformers`; prefill left out."""
    everything = {name: prompt for prompts in sets.values() for name, prompt in prompts.items()}
    config = engine_config(everything, tokens, 1)
    done: dict[tuple[str, int], Decoded] = {}
    for budget in (1, *budgets):
        engine = models.engine(budget, config)
        warm_up(engine, everything, 1)
        for course in warm_up_batches(engine):  # prompts of every length
            course.run(engine)
        for name, prompts in sets.items():
            done[name, budget] = decode_timed(engine, prompts, tokens, 1, f"{name}, budget {budget}")
    plain = {name: done[name, 1] for name in sets}
    texts = {name: text for decoded in plain.values() for name, text in decoded.texts.items()}
    ties = measure_ties(models, everything, texts, max(budgets))
    runs: list[dict[str, Any]] = [
        {
            "set": name,
            "budget": budget,
            "tokens": decoded.tokens,
            "tokens_per_s": decoded.decode_rate,
            "tokens_per_round": decoded.tokens_per_round,
            "speedup": decoded.decode_rate / plain[name].decode_rate,
            **ties(plain[name].texts, decoded.texts),
        }
        for (name, budget), decoded in done.items()
    ]
    best = {name: max(run["speedup"] for run in runs if run["set"] == name) for name in sets}
    found = {**ties.to_dict(), **verdict(runs, min(best.values())), "best_speedup": best, "runs": runs}
    if other is not None:
        for name, prompts in sets.items():
            rates = transformers_rates(other, first(prompts, other_prompts), tokens)
            for run in runs:
                if run["set"] == name:
                    run["transformers_tokens_per_s"] = statistics.median(rates)
                    run["transformers_range"] = [min(rates), max(rates)]
                    run["speedup_over_transformers"] = run["tokens_per_s"] / statistics.median(rates)
        found["transformers_prompts"] = min(other_prompts, *map(len, sets.values()))
    return found


@dataclass(frozen=True, order=True)
class Tree:
    """`BUDGET`, or `BUDGET:DEPTH`, where a depth of 0 is the drafter's own; or `shrinking`, as an engine on a GPU has
    trees unless told otherwise."""

    budget: int
    depth: int = 0
    batch_trees: bool = False

    @classmethod
    def read(cls, word: str) -> Tree:
        if word == "shrinking":
            return SHRINKING
        try:
            budget, _, depth = word.partition(":")
            tree = cls(int(budget), int(depth or 0))
            TreeConfig(budget=tree.budget, depth=tree.depth or None)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{word!r} is no tree: {error}") from None
        return tree


SHRINKING = Tree(GPU_TREE.budget, batch_trees=True)


def check_batches(
    models: Models, prompts: Texts, batches: Sequence[int], trees: Sequence[Tree], tokens: int, waves: int
) -> dict[str, Any]:
    """Every batch size with every tree: tokens per second, the median, prefill included, and each text against its own
    alone.

    `waves` prompts per place of the batch are decoded. One engine serves all batch sizes of a tree.
    """
    config = engine_config(prompts, tokens, max(batches), max_admission_delay=PATIENCE)
    alone: Decoded | None = None
    done: dict[tuple[Tree, int], list[Decoded]] = {}
    for tree in sorted({Tree(1), *trees}):
        engine = models.engine(
            tree.budget, config, tree.depth or None, GPU_TREE.batch_trees if tree.batch_trees else ()
        )
        warm_up(engine, prompts, max(batches))
        alone = alone or decode(engine, first(prompts, waves * max(batches)), tokens, 1, "alone")
        for batch in batches:
            some, label = first(prompts, waves * batch), f"batch {batch}, budget {tree.budget}"
            done[tree, batch] = decode_steadily(engine, some, tokens, batch, label)
    assert alone is not None
    ties = measure_ties(models, prompts, alone.texts, max(trees).budget)
    runs = []
    for (tree, batch), repeats in done.items():
        median = repeats[len(repeats) // 2]
        runs.append(
            {
                "batch": batch,
                "budget": tree.budget,
                "depth": tree.depth or None,
                "shrinks": tree.batch_trees,
                "tokens": median.tokens,
                "seconds": median.seconds,
                "seconds_of_runs": [run.seconds for run in repeats],
                "tokens_per_s": median.tokens / median.seconds,
                "tokens_per_round": median.tokens_per_round,
                **ties(alone.texts, median.texts),
            }
        )
    best = {batch: best_speedup([run for run in runs if run["batch"] == batch]) for batch in batches}
    return {**ties.to_dict(), **verdict(runs, min(best.values())), "best_speedup": best, "runs": runs}


def best_speedup(runs: Sequence[Mapping[str, Any]]) -> float:
    """Of the best budget over plain decoding."""
    plain = next(run["tokens_per_s"] for run in runs if run["budget"] == 1)
    return max((run["tokens_per_s"] for run in runs if run["budget"] > 1), default=plain) / plain


def check_strict(models: Models, prompts: Texts, batch: int, budget: int, tokens: int) -> dict[str, Any]:
    """Many texts at once, speculative against plain, every difference listed."""
    config = engine_config(prompts, tokens, batch, max_admission_delay=PATIENCE)
    plain = decode(models.engine(1, config), prompts, tokens, batch, "plain")
    other = decode(models.engine(budget, config), prompts, tokens, batch, f"budget {budget}")
    ties = measure_ties(models, prompts, plain.texts, budget)
    found = ties(plain.texts, other.texts)
    gaps = [d["gap"] for d in found["differences"] if d["gap"] is not None]
    return {
        "prompts": len(prompts),
        "tokens": plain.tokens,
        "batch": batch,
        "budget": budget,
        "tokens_per_round": other.tokens_per_round,
        **ties.to_dict(),
        **verdict([found]),
        "widest_gap": max(gaps, default=0.0),
        **found,
    }


def verdict(runs: Sequence[Mapping[str, Any]], speedup: float | None = None) -> dict[str, bool]:
    """`correct`: every difference is a near tie. `faster`: the best budget beats plain decoding, everywhere."""
    correct = {"correct": not any(run["mistakes"] for run in runs)}
    return correct if speedup is None else correct | {"faster": speedup > 1}


def transformers_rates(model: PreTrainedModel, prompts: Texts, tokens: int) -> list[float]:
    """Tokens per second of `generate` for each prompt, prefill and the first token left out. A text as long as theirs
    warms up: kernels are chosen by length."""
    generate_s(model, next(iter(prompts.values())), tokens)
    timed = tqdm(prompts.values(), desc="transformers", leave=False)
    return [(tokens - 1) / generate_s(model, prompt, tokens) for prompt in timed]


@torch.inference_mode()
def generate_s(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> float:
    """Seconds from the first token to the last. It never ends early, which its speed does not depend on."""
    ids, clock = torch.tensor([prompt], device=model.device), Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    _, first_token, *_, last = clock.times  # the streamer is handed the prompt before the first token
    return last - first_token


def check_soak(models: Models, prompts: Texts, batch: int, budget: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Random arrivals, cancels and preemptions: see `Soak`."""
    fresh = models.fresh_pass(prompts, tokens)
    plain = plain_texts(models.engine(1, engine_config(prompts, tokens, batch)), prompts, tokens)
    config = EngineConfig(max_batch=batch, max_len=longest(prompts) + tokens, page_size=SOAK_PAGE)
    engine = models.engine(budget, replace(config, num_pages=scarce_pages(models, prompts, batch, budget, tokens)))
    return Soak(engine, prompts, plain, fresh, tokens, STRICT_TIE).run(rounds, SOAK_CHECKS)


def scarce_pages(models: Models, prompts: Texts, batch: int, budget: int, tokens: int) -> int:
    """Half of what a full batch needs, so that requests are sent back; but enough for any one of them alone."""
    overlap_rounds = max(budget, models.head.head_config.block_size) + 2 * models.head.head_config.block_size
    mean = sum(map(len, prompts.values())) // len(prompts)
    return -(-max(longest(prompts) + tokens + overlap_rounds, batch * (mean + tokens) // 2) // SOAK_PAGE)


# -- the command


class Unusable(ValueError):
    """What is asked for cannot be measured."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(words)
    try:
        measure(args)
    except Unusable as error:
        parser.error(str(error))


def measure(args: argparse.Namespace) -> None:
    """Run a check and write its record: after every dtype, so that none is lost where a later one fails."""
    commit = args.commit or current_commit()  # now, because the checkout may move on while this runs
    tree, device, files = prepare(args)
    about = {"check": args.check, "model": Path(args.model).name, "head": Path(args.head).name, "device": device.type}
    settings = {
        "heat": tree.draft_temperature,
        "shortlist": tree.shortlist,
        "likely": tree.shortlist_parents,
        "max_tokens": args.tokens,
    }
    results: dict[str, dict[str, Any]] = {}
    for done, name in enumerate(args.dtypes, 1):
        results[name] = run(args, files, DTYPES[name], device)
        left = {"unfinished": args.dtypes[done:]} if args.dtypes[done:] else {}
        holds = not left and all_hold(results)
        write_record(args.out, {**about, **settings, **left, "holds": holds, "results": results}, commit)
    print(json.dumps({"check": args.check, "holds": holds, "record": str(args.out)}))
    raise SystemExit(0 if holds else 1)


def prepare(args: argparse.Namespace) -> tuple[TreeConfig, torch.device, list[Path]]:
    """What a check needs besides models. What cannot be is told before they are loaded."""
    try:
        check_writable(args.out)
        return TreeConfig(shortlist=args.shortlist), choose_device(args.device), files_of(args.check, args.data)
    except ValueError as error:
        raise Unusable(error) from error


def files_of(check: str, folder: Path) -> list[Path]:
    """The files that prompts are drawn from."""
    if not folder.is_dir():
        raise Unusable(f"there is no folder {folder}")
    names = {"speed": SPEED_SETS, "batches": BATCH_SETS}.get(check)
    files = [folder / f"{name}.jsonl" for name in names] if names else sorted(folder.glob("*.jsonl"))
    if missing := [file for file in files if not file.is_file()]:
        raise Unusable(f"there is no file {missing[0]}")
    if not files:
        raise Unusable(f"{folder} holds no JSONL files")
    return files


def all_hold(results: Mapping[str, Mapping[str, Any]]) -> bool:
    """float32 is for exactness: where another dtype is measured, that one must be fast."""
    timed = [result for name, result in results.items() if name != "float32"] or list(results.values())
    return all(result["correct"] for result in results.values()) and all(r.get("faster", True) for r in timed)


def at_least(low: int) -> Callable[[str], int]:
    def read(word: str) -> int:
        if not word.isdecimal() or int(word) < low:
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number of at least {low}")
        return int(word)

    return read


def drafted(word: str) -> int:
    """Nodes of a tree that is drafted."""
    tree = Tree.read(word)
    if tree.budget == 1 or tree.depth:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of nodes of at least 2")
    return tree.budget


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    return make_parser().parse_args(words)


def make_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="check", required=True)

    def command(name: str, help: str, dtypes: list[str], tokens: int) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        made.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or GGUF file")
        made.add_argument("--head", required=True, help="name or folder")
        made.add_argument("--data", type=Path, required=True, help="folder of JSONL files with `turns`")
        made.add_argument("--out", type=Path, required=True, help="where the record goes")
        made.add_argument("--device", default="auto", help="auto, cpu or cuda")
        made.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=dtypes, help="one run for each")
        made.add_argument("--tokens", type=at_least(1), default=tokens, help="most new tokens of a prompt")
        made.add_argument(
            "--shortlist", type=at_least(0), default=TreeConfig.shortlist, help="tokens an edge term ranks"
        )
        made.add_argument("--commit", help="commit of the source, where git cannot tell")
        return made

    both = ["bfloat16", "float32"]
    speed = command("speed", "one request at a time, against plain and `transformers`", ["bfloat16"], 256)
    speed.add_argument("--budgets", type=drafted, nargs="+", default=[16, 32, 64])
    speed.add_argument(
        "--other-prompts", type=at_least(0), default=3, help="prompts of each set for `transformers`; 0: none"
    )
    batches = command("batches", "every batch size with every budget", both, 128)
    batches.add_argument("--batches", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    batches.add_argument(
        "--trees",
        type=Tree.read,
        nargs="+",
        metavar="BUDGET[:DEPTH]",
        default=[Tree(1), Tree(16), Tree(16, 8), Tree(32), Tree(64), SHRINKING, Tree(128)],
        help="nodes, and how deep they may lie; 1 is plain decoding, `shrinking` the trees of an engine's own",
    )
    batches.add_argument("--waves", type=at_least(1), default=4, help="prompts per place of the batch")
    strict = command("strict", "many texts, every difference listed", both, 256)
    soak = command("soak", "random arrivals, cancels and preemptions", ["float32"], 96)
    soak.add_argument("--rounds", type=at_least(1), default=10_000)
    for made, prompts in ((speed, 80), (strict, 1000), (soak, 32)):
        made.add_argument(
            "--prompts", type=at_least(1), default=prompts, help="how many to draw, for `speed` of each set"
        )
    for made, batch, budget in ((strict, 32, 64), (soak, 8, 16)):
        made.add_argument("--batch", type=at_least(1), default=batch)
        made.add_argument("--budget", type=drafted, default=budget)
    return parser


def run(args: argparse.Namespace, files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One check in one precision."""
    target = load_target(args.model, dtype, device)
    head = load_head(args.head, target.decoder.config, dtype, device)
    models = Models(target.decoder, head, target.eos_tokens, args.shortlist)
    if args.check == "speed":
        turns = {file.stem: draw_turns([file], args.prompts, target.tokenizer) for file in files}
        sets = {name: every_turn(models, target.tokenizer, said, args.tokens) for name, said in turns.items()}
        other = load_hf(resolve(args.model), dtype, device) if args.other_prompts else None
        return check_speed(models, sets, args.budgets, args.tokens, other, args.other_prompts)
    if args.check == "batches":
        prompts = draw(files, args.waves * max(args.batches), target.tokenizer)
        return check_batches(models, prompts, args.batches, args.trees, args.tokens, args.waves)
    prompts = draw(files, args.prompts, target.tokenizer)
    if args.check == "strict":
        return check_strict(models, prompts, args.batch, args.budget, args.tokens)
    return check_soak(models, prompts, args.batch, args.budget, args.tokens, args.rounds)


def draw(files: Sequence[Path], count: int, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """First turns, by their id."""
    turns = draw_turns(files, count, tokenizer)
    return {name: ask(tokenizer, said[:1]) for name, said in turns.items()}


def draw_turns(files: Sequence[Path], count: int, tokenizer: Tokenizer) -> dict[str, list[str]]:
    """What users say, drawn over all files, the same for every run. Who begins with very much is left out. Fewer than
    are asked for would be another check."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(lines)
    short = (line for line in lines if len(ask(tokenizer, line["turns"][:1])) <= LONGEST_PROMPT)
    drawn = {line["id"]: line["turns"] for line in islice(short, count)}
    if len(drawn) < count:
        held = f"{len(drawn)} conversations that begin with at most {LONGEST_PROMPT:,} tokens"
        raise Unusable(f"{', '.join(file.name for file in files)}: {held}, and {count} are asked for")
    return drawn


def ask(tokenizer: Tokenizer, said: Sequence[str]) -> list[int]:
    """The prompt for what user and assistant have said in turn."""
    roles = cycle(("user", "assistant"))
    return tokenizer.encode_chat([{"role": role, "content": text} for role, text in zip(roles, said, strict=False)])


def every_turn(
    models: Models, tokenizer: Tokenizer, turns: Mapping[str, Sequence[str]], tokens: int
) -> dict[str, list[int]]:
    """Prompts of all turns. The ones before a turn are answered by plain decoding, for all that is measured the same.
    A conversation that has become very long goes no further."""
    prompts: dict[str, list[int]] = {}
    said: dict[str, list[str]] = {name: [] for name in turns}
    for number in range(max(map(len, turns.values()))):
        goes_on = {}
        for name in [name for name in said if number < len(turns[name])]:
            said[name].append(turns[name][number])
            prompt = ask(tokenizer, said[name])
            if len(prompt) <= LONGEST_PROMPT:
                prompts[f"{name}, turn {number + 1}"] = goes_on[name] = prompt
        answered = {name: prompt for name, prompt in goes_on.items() if number + 1 < len(turns[name])}
        said = {name: said[name] for name in answered}
        if answered:
            batch = min(len(answered), ANSWERED)
            engine = models.engine(1, engine_config(answered, tokens, batch))
            for name, answer in decode(engine, answered, tokens, batch, f"turn {number + 1}").texts.items():
                said[name].append(tokenizer.decode(answer))
    return prompts


if __name__ == "__main__":
    main()
