"""`jetspec compare`: the same prompts decoded plainly and speculatively, one after the other, shown side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE
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
from jetspec.commands.screen import NEGATIVE, last, out, printable, shade, to_dict, working, write_json
from jetspec.config import TreeConfig
from jetspec.types import Completion, SamplingParams, Update

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM

DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A baker makes 12 loaves an hour and sells each for 3 dollars. How much does he earn in 5 hours?",
    "Why is the sky blue? Answer in three sentences.",
)
"""Built-in prompts: code, arithmetic and prose."""

NARROW = 72
"""Below this many columns the panels stand one above the other."""

REDRAW_S = 0.1
WARM_UP = "Once upon a time"

Updates = Iterator[Update]
Decode = Callable[[str], Updates]

app = typer.Typer(add_completion=False)


@app.command(
    "compare",
    epilog=examples(
        "jetspec compare",
        'jetspec compare "Count to fifty." "Write a limerick." --budget 32',
        "jetspec compare --json > compare.json",
    ),
)
@options(
    *("--model=model.name", "model.head", "model.drafter", "model.device", "tree.budget", "tree.width"),
    *("sampling.temperature", "sampling.max_tokens"),
)
def compare(
    settings: Decoding, given: Given, prompts: Prompts = None, chat: AsChat = True, as_json: AsJson = False
) -> None:
    """Decode plainly and speculatively, side by side.

    Shows both speeds and whether the texts are identical. Exit status 1: they differ, greedy in float32.
    """
    texts, sampling = tuple(map(check_prompt, prompts or ())), settings.sampling
    decode = partial(stream, sampling=same_seed(sampling), chat=chat)
    llm = load_llm(settings.model, settings.engine, given.get("tree"))
    report = compare_drafters(llm, texts or DEMO_PROMPTS, decode, as_json)
    if not report.identical and report.is_exact and sampling.temperature == 0:
        raise typer.Exit(NEGATIVE)


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

    @property
    def speedup(self) -> float:
        return speedup([self])

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "identical": self.identical,
            "speedup": self.speedup,
            "plain": to_dict(self.plain),
            "speculative": to_dict(self.speculative),
        }


def speedup(results: Sequence[Comparison]) -> float:
    """Ratio of the speeds in tokens per second, all results together."""
    plain = _speed([r.plain for r in results])
    return _speed([r.speculative for r in results]) / plain if plain else 0.0


@dataclass(frozen=True)
class Report:
    """All comparisons of one run, with the settings of the speculative side."""

    model: str
    drafter: str
    tree: TreeConfig
    is_exact: bool
    """In float32 greedy texts must be identical; 16 bits allow near ties."""
    results: list[Comparison]

    @property
    def identical(self) -> bool:
        return all(result.identical for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "drafter": self.drafter,
            "tree": asdict(self.tree),
            "identical": self.identical,
            "speedup": speedup(self.results),
            "results": [result.to_dict() for result in self.results],
        }


def same_seed(sampling: SamplingParams) -> SamplingParams:
    """The parameters with a seed, so that both sides sample alike."""
    return replace(sampling, seed=random.getrandbits(62)) if sampling.seed is None else sampling


def both(llm: LLM) -> tuple[LLM, LLM]:
    """Plain decoding over the weights of `llm`, and `llm`, both warmed up."""
    if llm.drafter == "none":
        raise ValueError("drafter none is plain decoding itself; choose --drafter head or ngram to compare with it")
    plain = llm.with_drafter("none")
    with working("Warming up"):
        for each in (plain, llm):
            each.generate(WARM_UP, SamplingParams(max_tokens=8, ignore_eos=True))
    return plain, llm


def is_exact(llm: LLM) -> bool:
    return str(llm.target.decoder.embedding.dtype) == "torch.float32"


def compare_drafters(llm: LLM, prompts: Sequence[str], decode: Callable[[LLM, str], Updates], as_json: bool) -> Report:
    """Compares `llm` with plain decoding over the same weights; shows it, or prints it as JSON."""
    plain, speculative = (partial(decode, each) for each in both(llm))
    results = compare_sides(plain, speculative, prompts, None if as_json else out())
    report = Report(llm.model_name, llm.drafter, llm.tree, is_exact(llm), results)
    if as_json:
        write_json(report.to_dict())
    return report


def compare_sides(
    plain: Decode, speculative: Decode, prompts: Sequence[str], console: Console | None
) -> list[Comparison]:
    """Decodes every prompt both ways, plain first. A terminal shows it live, another console afterwards, None never."""
    if console is None:
        return [_quietly(plain, speculative, prompt) for prompt in prompts]
    show = _live if console.is_terminal else _in_lines
    results = [show(plain, speculative, prompt, console) for prompt in prompts]
    if len(results) > 1:
        console.print(_table(results) if console.is_terminal else f"all prompts: {_line(results)}")
    return results


def _quietly(plain: Decode, speculative: Decode, prompt: str) -> Comparison:
    return Comparison(prompt, last(plain(prompt)), last(speculative(prompt)))


def _in_lines(plain: Decode, speculative: Decode, prompt: str, console: Console) -> Comparison:
    result = _quietly(plain, speculative, prompt)
    sides = {"text": result.plain} if result.identical else {"plain": result.plain, "speculative": result.speculative}
    console.out(f"prompt: {prompt}")
    for name, completion in sides.items():
        console.out(f"{name}: {printable(completion.text)}")
    console.out(f"{_line([result])}, {result.verdict}\n")
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
                if side.is_due():
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

    def is_due(self) -> bool:
        """True at the end, and a few times a second before: the panel is drawn again then."""
        now_s = time.perf_counter()
        if self.completion is None and now_s - self.drawn_s < REDRAW_S:
            return False
        self.drawn_s = now_s
        return True

    def speed(self) -> str:
        if self.completion:
            return f"{self.completion.stats.tokens_per_s:.1f} tokens/s"
        if self.num_tokens == 0:
            return "waiting"
        return f"{self.num_tokens / (time.perf_counter() - self.start_s):.1f} tokens/s"

    def lines(self, console: Console, width: int) -> list[Text]:
        return list(self.text.wrap(console, width - 4))

    def panel(self, lines: list[Text], width: int, height: int) -> Panel:
        """The last lines that fit into `height`."""
        body = Text("\n").join(lines[-(height - 2) :])
        border = "green" if self.completion else "dim"
        return Panel(
            body,
            title=self.name,
            title_align="left",
            subtitle=self.speed(),
            border_style=border,
            width=width,
            height=height,
        )


def _panels(console: Console, left: _Side, right: _Side, rows: int | None = None) -> RenderableType:
    """Both sides beside each other and equally high, or one above the other where columns are few."""
    is_narrow = console.width < NARROW
    columns = console.width - 2  # the terminal echoes ^C behind the last line; a full line would make it scroll
    width = columns if is_narrow else columns // 2
    texts = [side.lines(console, width) for side in (left, right)]
    height = max(1, *map(len, texts)) + 2
    if rows is not None:
        height = max(3, min(height, rows // 2 if is_narrow else rows))
    panels = [side.panel(lines, width, height) for side, lines in zip((left, right), texts, strict=True)]
    if is_narrow:
        return Group(*panels)
    grid = Table.grid()
    grid.add_row(*panels)
    return grid


def _speed(completions: Sequence[Completion]) -> float:
    seconds = sum(c.stats.decode_s for c in completions)
    return sum(c.stats.completion_tokens for c in completions) / seconds if seconds else 0.0


def _tokens_per_round(results: Sequence[Comparison]) -> float:
    rounds = sum(r.speculative.stats.rounds for r in results)
    return sum(r.speculative.stats.completion_tokens for r in results) / rounds if rounds else 0.0


def _columns(results: Sequence[Comparison]) -> tuple[str, str, str, str]:
    """Both speeds, tokens per round and speedup, of one prompt or of all."""
    plain, speculative = _speed([r.plain for r in results]), _speed([r.speculative for r in results])
    return f"{plain:.1f}", f"{speculative:.1f}", f"{_tokens_per_round(results):.2f}", f"{speedup(results):.2f}x"


def _line(results: Sequence[Comparison]) -> str:
    plain, speculative, per_round, ratio = _columns(results)
    return f"plain {plain} tokens/s, speculative {speculative} tokens/s, {per_round} tokens per round, speedup {ratio}"


def _table(results: Sequence[Comparison]) -> Table:
    table = Table(show_footer=True, box=SIMPLE)
    total = (*_columns(results), _yes_no(all(r.identical for r in results)))
    heads = ("plain tokens/s", "speculative tokens/s", "tokens per round", "speedup", "identical")
    table.add_column("prompt", footer="all", no_wrap=True, overflow="ellipsis", max_width=40)
    for head, foot in zip(heads, total, strict=True):
        table.add_column(head, footer=foot, justify="right")
    for result in results:
        table.add_row(Text(" ".join(result.prompt.split())), *_columns([result]), _yes_no(result.identical))
    return table


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
