"""`jetspec eval-head`: tokens that a round commits with a head, per task and budget, as a table or JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from jetspec.commands.options import AsJson, ModelConfig, check_model, examples, load_llm, options
from jetspec.commands.screen import note, number_table, out, write_json
from jetspec.config import EngineConfig, TreeConfig
from jetspec.files import check_writable, install_hint
from jetspec.settings import at_least
from jetspec.types import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jetspec.data.answers import Decoded
    from jetspec.data.corpus import Document
    from jetspec.engine.llm import LLM
    from jetspec.train.evaluate import HeadScore

PerTask = Mapping[str, Mapping[str, float]]
"""Task -> budget -> a number."""

Choices = Literal["skip", "check", "fit"]
SAMPLED_TEXTS, SAMPLED_TOKENS = 60, 128
"""Most sampled texts of a setting, and their length."""

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class EvalOptions:
    """Tasks and trees of an evaluation."""

    tasks: str | None = None
    """A,B,..: some of the tasks. By default all."""
    limit: int = 80
    """Conversations per task."""
    max_tokens: int = 256
    """Most tokens per answer."""
    budgets: str = "chain,16,32,64,128,256"
    """A,B,..: trees to measure, each a chain or a number of nodes."""
    real: bool = True
    """Decode as well, in addition to scoring the target's text."""
    choices: Choices = "skip"
    """Sampled text: `check` decodes it with and without the choice model and compares the probabilities of the trees
    with what the target chose, as tables and with --out as a picture; `fit` first fits the model to sampled answers
    and stores it in the head's folder."""

    def __post_init__(self) -> None:
        for name in ("limit", "max_tokens"):
            at_least(1, name, getattr(self, name))
        for name in self.names:
            if name != "chain":
                TreeConfig(int(name) if name.isdecimal() else name)  # type: ignore[arg-type]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.budgets.split(","))


@dataclass(frozen=True)
class Evaluation:
    """Settings of `jetspec eval-head`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_batch=32))
    eval: EvalOptions = field(default_factory=EvalOptions)


@app.command(
    "eval-head",
    epilog=examples(
        "jetspec eval-head --head heads/mine --data-dir data/eval --tasks gsm8k,mbpp --out results/mine.json",
        "jetspec eval-head --head heads/mine --data-dir data/eval --limit 10 --budgets chain,64 --no-real --json",
        "jetspec eval-head --head heads/mine --data-dir data/eval --choices check --out results/mine.json",
    ),
)
@options(
    *("--model=model.name", "model.head", "eval.tasks", "eval.limit", "eval.max_tokens"),
    *("eval.budgets", "eval.real", "eval.choices"),
)
def eval_head_command(
    settings: Evaluation,
    data_dir: Annotated[
        Path, typer.Option(help="Folder with a file of questions per task: TASK.jsonl.", metavar="FOLDER")
    ],
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write a record; answers are kept beside it for other heads, and so is the picture of --choices.",
            metavar="FILE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how many tokens a round commits with a head.

    The target answers the questions greedily; the head is scored on these answers at every position, then decodes.
    """
    if not data_dir.is_dir():
        raise ValueError(f"{data_dir}: there is no such folder")
    if out_file is not None:
        check_writable(out_file)
    check_model(settings.model)
    from jetspec.data.prompts import find_tasks

    tasks = settings.eval.tasks
    files = find_tasks(data_dir, tasks.split(",") if tasks else None)
    llm = load_llm(settings.model, settings.engine)
    from jetspec.engine.engine import check_drafter
    from jetspec.record import write_record
    from jetspec.train.evaluate import HeadScore, score_head

    if llm.head is None:
        raise ValueError("there is no head to evaluate; give one with --head")
    check_drafter("head", llm.head, settings.tree)
    documents = _answers(llm, settings.eval, files, out_file.parent / "answers" if out_file else None)
    scores = {}
    for task, answers in documents.items():
        note(f"{task}: scoring {len(answers)} answers")
        scores[task] = score_head(
            llm.target.decoder, llm.head, answers, settings.eval.names, settings.tree, progress=True
        )
    if settings.eval.choices == "fit":
        _fit_choices(llm, _sampled_prompts(documents), _head_folder(llm))
    sampled = {} if settings.eval.choices == "skip" else _check_choices(llm, settings, _sampled_prompts(documents))
    real = _decode(llm, settings, documents) if settings.eval.real else {}
    results = {**_results(llm, settings, scores, real), "sampled": sampled}
    write_json(results) if as_json else _show(results, HeadScore.join(list(scores.values())))
    if out_file is not None:
        write_record(out_file, results)
        if sampled:
            _draw(sampled, out_file.with_name(f"{out_file.stem}_choices.svg"))


def _answers(llm: LLM, asked: EvalOptions, files: Mapping[str, Path], cache: Path | None) -> dict[str, list[Document]]:
    """The target's answers to the questions of each file, kept in the folder `cache`."""
    from jetspec.data.answers import Answerer
    from jetspec.data.prompts import read_questions

    tasks = {task: read_questions(path, asked.limit) for task, path in files.items()}
    answerer = Answerer.of(llm.with_drafter("none"), asked.max_tokens, progress=True)
    for questions in tasks.values():
        answerer.check(questions)
    documents = {}
    for task, questions in tasks.items():
        note(f"{task}: the target's answers to {len(questions)} questions")
        documents[task] = answerer.answers(task, questions, cache)
        if left := sum(len(q.turns) for q in questions) - len(documents[task]):
            note(f"{task}: later turns left out, as their conversations outgrow the context: {left}")
    return documents


def _decode(
    llm: LLM, settings: Evaluation, documents: Mapping[str, Sequence[Document]]
) -> dict[str, dict[str, Decoded]]:
    """Results of decoding by task and budget; one engine at a time."""
    from jetspec.data.answers import decode
    from jetspec.train.evaluate import make_trees

    assert llm.head is not None
    depth = llm.head.head_config.draft_depth(settings.tree.depth)
    real: dict[str, dict[str, Decoded]] = {task: {} for task in documents}
    for name, tree in make_trees(settings.eval.names, settings.tree, depth).items():
        fast = llm.with_drafter("head", tree)
        for task, answers in documents.items():
            note(f"{task}: decoding with {_label(name)}")
            real[task][name] = decode(fast, answers, settings.eval.max_tokens, progress=True)
    return real


def _head_folder(llm: LLM) -> Path:
    """Folder of the head, in which fits can be stored."""
    from jetspec.models.hub import head_path, resolve

    assert llm.head_name is not None
    folder = resolve(head_path(llm.head_name))
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder, so it cannot hold the fits of a choice model")
    return folder


def _sampled_prompts(documents: Mapping[str, Sequence[Document]]) -> list[list[int]]:
    """The first questions of each task, equally many."""
    from jetspec.data.corpus import answer_spans

    each = max(1, SAMPLED_TEXTS // len(documents))
    return [d.tokens[: answer_spans(d)[0][0]].tolist() for answers in documents.values() for d in answers[:each]]


def _check_choices(llm: LLM, settings: Evaluation, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Tokens per round of sampled text without and with the choice model, and the reliability of trees with it."""
    from jetspec.train.choices import SETTINGS, decode_traced

    results = {}
    for sampling in (SamplingParams(), *SETTINGS):
        name, params = sampling.setting, replace(sampling, max_tokens=SAMPLED_TOKENS)
        note(f"decoding {len(prompts)} answers: {name}")
        rates = {}
        for uses in (False, True):
            tree = replace(settings.tree, choice_model=uses, ngrams=False)
            rates[uses], reliability = decode_traced(llm.with_drafter("head", tree).engine, prompts, params)
        results[name] = {"without": rates[False], "with": rates[True], "reliability": reliability.to_dict()}
    return results


def _fit_choices(llm: LLM, prompts: Sequence[Sequence[int]], folder: Path) -> None:
    """Fits the choice model to answers that the target samples."""
    from jetspec.models.choices import ChoiceFits
    from jetspec.models.draft_head import DraftHead
    from jetspec.train.choices import SETTINGS, fit_choices

    if not isinstance(llm.head, DraftHead):
        raise ValueError("choice models are fitted for heads that draft a block in one pass")
    plain, fits = llm.with_drafter("none"), []
    for sampling in SETTINGS:
        note(f"sampling {len(prompts)} answers, then fitting: {sampling.setting}")
        params = [replace(sampling, seed=seed, max_tokens=SAMPLED_TOKENS) for seed in range(len(prompts))]
        answers = plain.generate(prompts, params, progress=True)
        texts = [([*prompt, *answer.token_ids], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
        fits.append(fit_choices(llm.target.decoder, llm.head, texts, sampling))
    llm.head.choices = ChoiceFits(tuple(fits))
    llm.head.choices.write(folder)
    note(f"the choice model is in {folder}")


def _results(
    llm: LLM, settings: Evaluation, scores: Mapping[str, HeadScore], real: Mapping[str, Mapping[str, Decoded]]
) -> dict[str, Any]:
    from jetspec.record import shown_head

    assert llm.head is not None
    depth = llm.head.head_config.draft_depth(settings.tree.depth)
    forced = {task: score.tokens_per_round for task, score in scores.items()}
    return {
        "model": llm.model_name,
        "head": llm.head_name and shown_head(llm.head_name),
        "dtype": str(llm.target.decoder.embedding.dtype).removeprefix("torch."),
        "batch": llm.config.max_batch,
        "limit": settings.eval.limit,
        "max_tokens": settings.eval.max_tokens,
        "tree": {**asdict(settings.tree), "budget": None, "depth": depth},
        "tokens_per_round": forced,
        "mean": _mean(forced),
        "real": {task: {name: asdict(d) for name, d in row.items()} for task, row in real.items()},
        "details": {task: score.to_dict() for task, score in scores.items()},
    }


def _mean(values: PerTask) -> dict[str, float]:
    """Mean over the tasks, of equal weight."""
    return {name: statistics.fmean(row[name] for row in values.values()) for name in next(iter(values.values()))}


def _show(results: Mapping[str, Any], overall: HeadScore) -> None:
    from jetspec.train.evaluate import NEAR_NATS

    tables = [("tokens per round", results["tokens_per_round"], "{:.2f}")]
    for title, key, form in (
        ("decoding: tokens per round", "tokens_per_round", "{:.2f}"),
        ("decoding: tokens/s", "tokens_per_s", "{:.0f}"),
        ("decoding: the same text as plain", "same_frac", "{:.1%}"),
    ):
        values = {task: {name: d[key] for name, d in row.items()} for task, row in results["real"].items()}
        tables += [(title, values, form)] if values else []
    for title, values, form in tables:
        out().print(_table(title, values, form))
    if sampled := results["sampled"]:
        rates = [(name, f"{row['without']:.2f}", f"{row['with']:.2f}") for name, row in sampled.items()]
        title = "sampled text: tokens per round"
        out().print(number_table(("sampling", "without noise", "choice model"), rates, title=title))
        for name, row in sampled.items():
            out().print(_reliability(name, row["reliability"]))
    top = overall.top_path()
    on_path, below, near = (
        "-" if top[name] is None else f"{top[name]:.0%}" for name in ("hit_on_path", "hit_below_sibling", "near_frac")
    )
    out().print(
        f"right along the top path {on_path}, below a sibling of it {below};"
        f" top path within {NEAR_NATS:g} nats of the target at {near} of the anchors"
    )


def _table(title: str, values: PerTask, form: str) -> Table:
    mean = _mean(values)

    def row(name: str, found: Mapping[str, float]) -> tuple[str, ...]:
        return name, *(form.format(found[budget]) for budget in mean)

    rows, foot = [row(*item) for item in values.items()], row("mean", mean) if len(values) > 1 else ()
    return number_table(("task", *map(_label, mean)), rows, foot, title=title, title_justify="left")


def _reliability(name: str, found: Mapping[str, Any]) -> Table:
    """Predicted and true share of chosen nodes, by decile of the prediction and depth."""
    groups = _groups(found)
    cells = [[f"{p / n:.2f} {t / n:.2f}" if n else "-" for n, p, t in deciles] for deciles in groups.values()]
    rows = [
        (f"{decile / 10:.1f} to {(decile + 1) / 10:.1f}", *column)
        for decile, column in enumerate(zip(*cells, strict=True))
    ]
    return number_table(("probability", *groups), rows, title=f"{name}: predicted and chosen", title_justify="left")


def _groups(found: Mapping[str, Any]) -> dict[str, list[tuple[float, float, float]]]:
    """Number of nodes, sum of their probabilities, and number of chosen ones in each decile, by group of depths."""
    firsts, tables = found["first_depths"], [found[key] for key in ("count_G10", "predicted_G10", "taken_G10")]
    names = [f"depth {a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in pairwise(firsts)] + [f"{firsts[-1]} up"]
    return {name: list(zip(*rows, strict=True)) for name, *rows in zip(names, *tables, strict=True)}


def draw_reliability(found: Mapping[str, Any], axes: Axes) -> None:
    """Chosen against predicted share, a line per group of depths; points grow with the number of their nodes."""
    axes.axline((0, 0), slope=1, color="0.5", linewidth=0.8)
    for name, deciles in _groups(found).items():
        points = [(p / n, t / n, min(4 + math.sqrt(n), 120)) for n, p, t in deciles if n]
        predicted, chosen, sizes = zip(*points, strict=True) if points else ((), (), ())
        (line,) = axes.plot(predicted, chosen, linewidth=0.8)
        axes.scatter(predicted, chosen, sizes, color=line.get_color(), label=name)
    axes.set(xlabel="predicted", ylabel="chosen", xlim=(0, 1), ylim=(0, 1), aspect="equal")


def _draw(sampled: Mapping[str, Any], path: Path) -> None:
    """Writes a picture with a panel per sampling setting."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note(f"matplotlib is not installed, so there is no picture: {install_hint('bench')}")
        return
    columns = min(3, len(sampled))
    rows = math.ceil(len(sampled) / columns)
    figure = Figure(figsize=(4 * columns, 4 * rows), layout="constrained")
    for number, (name, row) in enumerate(sampled.items(), 1):
        axes = figure.add_subplot(rows, columns, number, title=name)
        draw_reliability(row["reliability"], axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path)
    note(f"predicted and chosen, as a picture: {path}")


def _label(budget: str) -> str:
    return budget if budget == "chain" else f"tree {budget}"
