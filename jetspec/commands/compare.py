"""`jetspec compare`: the same prompts decoded plainly and speculatively, one after the other, shown side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from jetspec.commands.options import (
    AsChat,
    AsJson,
    Decoding,
    Given,
    Prompts,
    check_prompt,
    examples,
    load_llm,
    options,
    stream,
)
from jetspec.commands.screen import (
    NEGATIVE,
    last,
    number_table,
    out,
    printable,
    shade,
    to_dict,
    total,
    working,
    write_json,
)
from jetspec.types import Completion, RoundStats, SamplingParams, Update

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM

DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A baker makes 12 loaves an hour and sells each for 3 dollars. How much does he earn in 5 hours?",
    "Why is the sky blue? Answer in three sentences.",
)
"""Built-in prompts: code, arithmetic and prose."""

USUAL: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
SAMPLED_TOKENS = 24
"""Sampling setting of the built-in prompts beside greedy decoding, and most tokens of such an answer."""

NARROW = 72
"""Below this many columns the panels stand one above the other."""

REDRAW_S = 0.1
WARM_UP = "Once upon a time"

Decode = Callable[[str], Iterator[Update]]
"""The updates of an answer to a prompt."""

app = typer.Typer(add_completion=False)


@app.command(
    "compare",
    epilog=examples(
        "jetspec compare",
        'jetspec compare "Count to fifty." "Write a limerick." --budget 32',
        "jetspec compare --temperature 0.7 --top-p 0.8 --top-k 20",
        "jetspec compare --json > compare.json",
    ),
)
@options(
    *("--model=model.name", "model.head", "model.drafter", "model.device", "tree.budget", "tree.width"),
    *("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.max_tokens"),
    hidden=("sampling.min_p", "sampling.seed"),
)
def compare(
    settings: Decoding, given: Given, prompts: Prompts = None, chat: AsChat = True, as_json: AsJson = False
) -> None:
    """Decode plainly and speculatively, side by side.

    Shows both speeds and whether the texts are identical. Exit status 1: they differ, greedy in float32.

    With --temperature both sides sample with one seed, which is shown. The built-in prompts are also sampled.
    """
    texts = tuple(map(check_prompt, prompts or ())) or DEMO_PROMPTS
    llm = load_llm(settings.model, settings.engine, given.get("tree"))
    sides, sampling = both_sides(llm, chat), seeded(settings.sampling)
    results = compare_sides(*sides(sampling), texts, None if as_json else out(), _about(sampling))
    found = _report(results, sampling)
    if not (prompts or sampling.is_sampled):
        limit = min(SAMPLED_TOKENS, sampling.token_limit)
        sampling = seeded(replace(sampling, **USUAL, max_tokens=limit))
        sampled = compare_sides(*sides(sampling), texts, None)
        found["sampled"] = _report(sampled, sampling)
        if not as_json:
            verdict = f"identical: {_yes(sampled)}"
            out().print(f"sampled, {limit} tokens each{_about(sampling)}: {_line(sampled)}, {verdict}", markup=False)
    if as_json:
        about = {"model": llm.model_name, "drafter": llm.drafter, "tree": asdict(llm.tree)}
        write_json({**about, **found})
    check_identical(found["identical"], llm, settings.sampling)


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded both ways."""

    prompt: str
    plain: Completion
    speculative: Completion

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def verdict(self) -> str:
        """`identical: yes`, or the first token that differs."""
        if self.identical:
            return "identical: yes"
        pairs = zip(self.plain.token_ids, self.speculative.token_ids, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return f"identical: no, from token {shared + 1} on"

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "identical": self.identical,
            "speedup": speedup([self]),
            "plain": to_dict(self.plain),
            "speculative": to_dict(self.speculative),
        }


def _report(results: Sequence[Comparison], sampling: SamplingParams) -> dict[str, Any]:
    return {
        "setting": sampling.setting,
        "seed": sampling.seed,
        "identical": all(result.identical for result in results),
        "speedup": speedup(results),
        "results": [result.to_dict() for result in results],
    }


def totals(results: Iterable[Comparison]) -> tuple[RoundStats, RoundStats]:
    """Statistics of both sides of all results."""
    results = list(results)
    return total(r.plain.stats for r in results), total(r.speculative.stats for r in results)


def speedup(results: Sequence[Comparison]) -> float:
    """Ratio of the speeds in tokens per second, all results together."""
    plain, speculative = totals(results)
    return speculative.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0


def seeded(sampling: SamplingParams) -> SamplingParams:
    """The same parameters, with a seed if they sample."""
    is_open = sampling.is_sampled and sampling.seed is None
    return replace(sampling, seed=random.getrandbits(31)) if is_open else sampling


def both_sides(llm: LLM, chat: bool) -> Callable[[SamplingParams], tuple[Decode, Decode]]:
    """Plain decoding over the weights of `llm`, and `llm` itself. Returns a function of the sampling parameters that
    warms both up; both sample with the same seed."""
    if llm.drafter == "none":
        raise ValueError("drafter none is plain decoding itself; choose --drafter head or ngram to compare with it")
    pair = llm.with_drafter("none"), llm

    def sides(sampling: SamplingParams) -> tuple[Decode, Decode]:
        sampling = seeded(sampling)
        with working("Warming up"):  # sampling and filters have graphs of their own
            for each in pair:
                each.generate(WARM_UP, replace(sampling, max_tokens=8, ignore_eos=sampling.grammar is None))
        plain, speculative = (partial(stream, each, sampling=sampling, chat=chat) for each in pair)
        return plain, speculative

    return sides


def check_identical(identical: bool, llm: LLM, sampling: SamplingParams) -> None:
    """Ends with a negative answer if greedy texts differ in float32; 16 bits allow near ties."""
    is_exact = str(llm.target.decoder.embedding.dtype) == "torch.float32"
    if not identical and is_exact and sampling.temperature == 0:
        raise typer.Exit(NEGATIVE)


def compare_sides(
    plain: Decode, speculative: Decode, prompts: Sequence[str], console: Console | None, about: str = ""
) -> list[Comparison]:
    """Decodes every prompt both ways, plain first. A terminal shows it live, another console afterwards, None never.
    `about` is shown beside the figures."""
    if console is None:
        return [_quietly(plain, speculative, prompt) for prompt in prompts]
    if not console.is_terminal:
        results = [_in_lines(plain, speculative, prompt, console, about) for prompt in prompts]
        last_line: RenderableType = f"all prompts{about}: {_line(results)}"
    else:
        results = [_live(plain, speculative, prompt, console) for prompt in prompts]
        last_line = _table(results, about)
    if len(results) > 1 or (about and console.is_terminal):
        console.print(last_line)
    return results


def _quietly(plain: Decode, speculative: Decode, prompt: str) -> Comparison:
    return Comparison(prompt, last(plain(prompt)), last(speculative(prompt)))


def _in_lines(plain: Decode, speculative: Decode, prompt: str, console: Console, about: str) -> Comparison:
    result = _quietly(plain, speculative, prompt)
    sides = {"text": result.plain} if result.identical else {"plain": result.plain, "speculative": result.speculative}
    console.out(f"prompt: {prompt}")
    for name, completion in sides.items():
        console.out(f"{name}: {printable(completion.text)}")
    console.out(f"{_line([result])}, {result.verdict}{about}\n")
    return result


def _live(plain: Decode, speculative: Decode, prompt: str, console: Console) -> Comparison:
    from rich.live import Live

    console.print(Rule(Text(prompt, style="bold", no_wrap=True, overflow="ellipsis"), align="left", style="dim"))
    left, right = _Side("plain"), _Side("speculative")
    # Drawn between rounds, in this thread: a second thread would slow down the rounds that are timed.
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def follow(side: _Side) -> Callable[[Update], None]:
            def seen(update: Update) -> None:
                side.add(update)
                if update.completion or time.perf_counter() - side.drawn_s >= REDRAW_S:
                    side.drawn_s = time.perf_counter()
                    live.update(_panels(console, left, right, rows=console.height - 4), refresh=True)

            return seen

        result = Comparison(prompt, last(plain(prompt), follow(left)), last(speculative(prompt), follow(right)))
    console.print(_panels(console, left, right))
    _, _, per_round, ratio = _columns([result])
    verdict = Text(result.verdict, style="bold green" if result.identical else "bold red")
    console.print(f"speedup {ratio} · {per_round} tokens per round ·", verdict, end="\n\n")
    return result


@dataclass
class _Side:
    """One panel: the text so far with a shade per round, and its speed."""

    name: str
    text: Text = field(default_factory=Text)
    num_rounds: int = 0
    num_tokens: int = 0
    start_s: float = 0.0
    drawn_s: float = 0.0
    completion: Completion | None = None

    def add(self, update: Update) -> None:
        if self.num_rounds == 0:
            self.start_s = time.perf_counter()
        else:
            self.num_tokens += len(update.token_ids)
        self.text.append(printable(update.text), style=shade(self.num_rounds))
        self.num_rounds += 1
        self.completion = update.completion

    def speed(self) -> str:
        if self.completion:
            return f"{self.completion.stats.tokens_per_s:.1f} tokens/s"
        if self.num_tokens == 0:
            return "waiting"
        return f"{self.num_tokens / (time.perf_counter() - self.start_s):.1f} tokens/s"

    def panel(self, lines: list[Text], width: int, height: int) -> Panel:
        """The last lines that fit into `height`."""
        return Panel(
            Text("\n").join(lines[-(height - 2) :]),
            title=self.name,
            title_align="left",
            subtitle=self.speed(),
            border_style="green" if self.completion else "dim",
            width=width,
            height=height,
        )


def _panels(console: Console, left: _Side, right: _Side, rows: int | None = None) -> RenderableType:
    """Both sides beside each other and equally high, or one above the other where columns are few."""
    is_narrow = console.width < NARROW
    columns = console.width - 2  # the terminal echoes ^C behind the last line; a full line would make it scroll
    width = columns if is_narrow else columns // 2
    texts = [list(side.text.wrap(console, width - 4)) for side in (left, right)]
    height = max(1, *map(len, texts)) + 2
    if rows is not None:
        height = max(3, min(height, rows // 2 if is_narrow else rows))
    panels = [side.panel(lines, width, height) for side, lines in zip((left, right), texts, strict=True)]
    if is_narrow:
        return Group(*panels)
    grid = Table.grid()
    grid.add_row(*panels)
    return grid


def _columns(results: Sequence[Comparison]) -> tuple[str, str, str, str]:
    """Both speeds, tokens per round and speedup, of one prompt or of all."""
    plain, fast = totals(results)
    speeds = f"{plain.tokens_per_s:.1f}", f"{fast.tokens_per_s:.1f}"
    return *speeds, f"{fast.tokens_per_round:.2f}", f"{speedup(results):.2f}x"


def _line(results: Sequence[Comparison]) -> str:
    plain, speculative, per_round, ratio = _columns(results)
    return f"plain {plain} tokens/s, speculative {speculative} tokens/s, {per_round} tokens per round, speedup {ratio}"


def _about(sampling: SamplingParams) -> str:
    """The sampling setting in brackets; nothing for greedy decoding."""
    return f" ({sampling.setting}, seed {sampling.seed})" if sampling.is_sampled else ""


def _yes(results: Iterable[Comparison]) -> str:
    return "yes" if all(result.identical for result in results) else "no"


def _table(results: Sequence[Comparison], about: str) -> Table:
    def row(name: str, some: Sequence[Comparison]) -> tuple[Text | str, ...]:
        return Text(" ".join(name.split())), *_columns(some), _yes(some)

    heads = ("prompt", "plain tokens/s", "speculative tokens/s", "tokens per round", "speedup", "identical")
    rows = [row(result.prompt, [result]) for result in results]
    return number_table(heads, rows, foot=row("all", results), title=about.strip() or None)
