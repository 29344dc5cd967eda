"""`training`: speed and memory of training with batches of several shapes. `ablate` and `tree-settings`: teacher-forced
tokens per round, on the first questions of every task.

`ablate` makes the paper's ablations on a small model: one short training per variant, at equal steps and equal data,
each head scored on the same answers; one record per variant. `tree-settings` scores heads with trees of every draft
temperature and width; one record per head. What records hold is not measured again.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.methods import kind_of
from benchmarks.options import (
    DEFAULT,
    Model,
    Questions,
    RecordFile,
    RecordFolder,
    Settings,
    TrainRecipe,
    examples,
    numbers,
)
from benchmarks.recipe import KINDS, USUAL
from benchmarks.results import Record, read_record
from jetspec.config import EngineConfig, TreeConfig
from jetspec.data.answers import Answerer, fingerprint
from jetspec.data.corpus import Document, Documents, PackedData
from jetspec.data.prompts import find_tasks, read_questions
from jetspec.engine.llm import LLM
from jetspec.models.decoder import Decoder
from jetspec.models.heads import Head, load_any_head, save_any_head
from jetspec.models.weights import load_target
from jetspec.profile.timing import Moment, without_capture
from jetspec.progress import progress_bar
from jetspec.record import current_commit, shown_head, write_record
from jetspec.settings import read_settings
from jetspec.train.config import TrainConfig, load_recipe
from jetspec.train.evaluate import score_head
from jetspec.train.loss import DraftLoss
from jetspec.train.parallel import frozen_copy
from jetspec.train.run import adopt_tokens, read_data, start_head
from jetspec.train.trainer import Trainer

TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench", "alpaca_eval")
BUDGETS = ("chain", "16", "32", "64", "128", "256")
TREE_BUDGETS = ("16", "64", "256")
ABLATE_EPILOG = examples(
    "ablate --recipe jetspec/recipes/smollm2_135m.yaml --data-dir data/eval --out docs/results/ablations",
    "ablate ... --only causal,edge-128 --set steps=200 --keep-heads runs/ablations/heads",
)
TREE_SETTINGS_EPILOG = examples(
    "tree-settings ddtree=runs/bench/bidirectional/head eagle3=runs/bench/eagle3/head --data-dir data/eval"
    " --out docs/results/tree_settings"
)
EAGLE3 = "eagle3"
SHAPES = "64x256x32,64x512x32,32x1024x128,32x1024x256,32x1024x512"
TRAINING_EPILOG = examples(
    "training --recipe jetspec/recipes/smollm2_135m.yaml --shapes 64x256x32,32x1024x128 --out speed.json"
)
Limit = Annotated[int, typer.Option(min=1, help="Questions per task.")]
Tokens = Annotated[int, typer.Option(min=1, help="Most tokens per answer.")]


BASE = ("head.edge_rank=0", "head.causal=true", "loss.kind=forward_kl", "loss.gamma=null")
TEXTS = ("regenerated", "corpus")
"""Variants that are trained on answers of their own."""
ABLATIONS: dict[str, Any] = read_settings(Path(__file__).with_name("ablations.yaml"))
VARIANTS: dict[str, dict[str, Any]] = ABLATIONS["variants"]


def ablate(
    recipe: TrainRecipe,
    data_dir: Questions,
    out: RecordFolder,
    set_: Settings = [],  # noqa: B006
    regenerated: Annotated[Path | None, typer.Option(help="The target's answers to some prompts, for table 6.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="The corpus's answers to the same, for table 6.")] = None,
    limit: Limit = 20,
    tokens: Tokens = 128,
    only: Annotated[str | None, typer.Option(help="Some of the variants, separated by commas.")] = None,
    keep_heads: Annotated[Path | None, typer.Option(help="Save each head as FOLDER/VARIANT, bfloat16.")] = None,
) -> None:
    """Train one short head per variant, and score all of them on the same answers.

    Stop it at any time: the same command resumes with the variants that have no record.
    """
    commit, base = current_commit(), load_recipe(recipe, tuple(set_))
    given = {"regenerated": regenerated, "corpus": corpus}
    texts = {text: file for text, file in given.items() if file is not None}
    lacking = [text for text in TEXTS if text not in texts]
    suited = [name for name in VARIANTS if name.startswith(EAGLE3) == (base.head.kind == EAGLE3)]
    names = only.split(",") if only else [name for name in suited if name not in lacking]
    if other := [name for name in names if name not in suited]:
        reason = f"{recipe} trains a head of kind {base.head.kind}" if other[0] in VARIANTS else "it does not exist"
        raise ValueError(f"not {other[0]}: {reason}; choose among {', '.join(suited)}")
    if missing := [name for name in names if name in lacking]:
        raise ValueError(f"the variant {missing[0]} needs --{missing[0]} FILE")
    todo = [
        name
        for name in names
        if not ((out / f"{name}.json").exists() and (keep_heads is None or (keep_heads / name).exists()))
    ]
    if not todo:
        return
    if len(texts) == 1 and any(name in texts for name in todo):
        print("only one text is given: another may answer other prompts, and could not be compared", file=sys.stderr)
    llm = LLM(base.model, drafter="none", engine=EngineConfig(max_batch=64, max_len=base.row_len + tokens))
    answers = write_answers(llm, data_dir, limit, tokens)
    target = llm.target.decoder
    data: dict[Any, Documents] = {}
    with tempfile.TemporaryDirectory() as folder:
        shared = with_same_prompts(texts, Path(folder))
        for name in todo:
            config = variant_of(recipe, set_, name)
            config = replace(config, data=(str(shared[name]),)) if name in TEXTS else config
            if config.data not in data:
                data[config.data] = read_data(config, target.config.vocab_size, start_head(config, target))
            head, results = run_variant(config, target, data[config.data], answers, name)
            if keep_heads is not None:
                save_any_head(head, keep_heads / name)
            about = {"variant": name, "tables": VARIANTS[name]["tables"], "questions": limit, "tokens": tokens}
            write_record(out / f"{name}.json", {**about, **results}, commit)
            print(name, {budget: round(value, 3) for budget, value in results["mean"].items()}, flush=True)


def variant_of(recipe: Path, changes: Sequence[str], name: str) -> TrainConfig:
    base = () if name.startswith(EAGLE3) else BASE
    return load_recipe(recipe, (*changes, *base, *VARIANTS[name]["set"]))


def with_same_prompts(texts: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Copies of the rows whose prompts all texts answer, with their metadata: a corpus may lack some responses."""
    lines = {text: [line for line in file.read_text().splitlines() if line.strip()] for text, file in texts.items()}
    ids = {text: [json.loads(line)["id"] for line in found] for text, found in lines.items()}
    shared = set.intersection(*map(set, ids.values())) if ids else set()
    for text, file in texts.items():
        kept = [line for line, id in zip(lines[text], ids[text], strict=True) if id in shared]
        (folder / f"{text}.jsonl").write_text("".join(f"{line}\n" for line in kept))
        if (meta := Path(f"{file}.meta.json")).exists():
            shutil.copyfile(meta, folder / f"{text}.jsonl.meta.json")
    return {text: folder / f"{text}.jsonl" for text in texts}


def write_answers(llm: LLM, folder: Path, limit: int, tokens: int) -> dict[str, list[Document]]:
    """The target's greedy answers, on which every head is scored."""
    answerer = Answerer.of(llm, tokens)
    tasks = find_tasks(folder, TASKS)
    answers = {task: answerer.answers(task, read_questions(path, limit), None) for task, path in tasks.items()}
    del llm.__dict__["engine"]  # its cache is not needed any more
    return answers


def run_variant(
    config: TrainConfig,
    target: Decoder,
    documents: Documents,
    answers: Mapping[str, Sequence[Document]],
    name: str,
) -> tuple[Head, dict[str, Any]]:
    """Train from scratch, then count teacher-forced rounds."""
    head = start_head(config, target).to(target.embedding.device)
    adopt_tokens(config, head, documents, target)
    trainer = Trainer(config, target, head, PackedData(documents, config.row_len, config.seed))
    losses, began = [], time.perf_counter()
    for step in progress_bar(range(1, config.steps + 1), desc=name, unit="step"):
        sums = trainer.train_step()
        if step % config.log_every == 0 or step == config.steps:
            losses.append((step, sums.metrics().loss))
        if step == 1:
            began, first = time.perf_counter(), began
    seconds, startup = time.perf_counter() - began, began - first
    scored, kind = frozen_copy(trainer.head, target.embedding.dtype), KINDS[USUAL[kind_of(trainer.head)]]
    tree = TreeConfig(width=kind.width, draft_temperature=kind.draft_temperature, ngrams=False)
    results = {
        "settings": asdict(replace(config, data=tuple(Path(file.path).name for file in config.files))),
        "seconds": seconds,
        "startup_seconds": startup,
        "documents": len(documents),
        "losses": losses,
        "tree": asdict(tree),
        **forced_rounds(target, scored, answers, tree, BUDGETS),
    }
    return scored, results


def tree_settings(
    heads: Annotated[list[str], typer.Argument(help="Record name and folder of a head.", metavar="NAME=HEAD")],
    data_dir: Questions,
    out: RecordFolder,
    model: Model = DEFAULT,
    limit: Limit = 20,
    tokens: Tokens = 128,
    draft_temperatures: Annotated[str, typer.Option("--draft-temperatures", "--heats")] = "0.6,0.8,1.0,1.2",
    widths: Annotated[str, typer.Option(help="Children of a node.")] = "4,8,10,16",
) -> None:
    """Measure the trees of a head at every draft temperature and width.

    `pages` makes a table of each record.
    """
    if wrong := [head for head in heads if "=" not in head]:
        raise typer.BadParameter(f"heads are given as NAME=HEAD, not {wrong[0]}")
    grid = list(product(numbers(draft_temperatures, float, 1e-6), numbers(widths)))
    paths, commit = dict(head.split("=", 1) for head in heads), current_commit()
    files = {name: out / f"{name}.json" for name in paths}
    begun: dict[str, Record] = {name: read_record(file) if file.exists() else {} for name, file in files.items()}
    trees = {name: {tree_key(tree): tree for tree in record.get("trees", [])} for name, record in begun.items()}
    todo = {name: [setting for setting in grid if setting not in known] for name, known in trees.items()}
    if not any(todo.values()):
        return
    llm = LLM(model, drafter="none", engine=EngineConfig(max_batch=64))
    target = llm.target.decoder
    place = target.embedding.device, target.embedding.dtype
    loaded = {name: load_any_head(path, target.config).to(*place) for name, path in paths.items() if todo[name]}
    answers = write_answers(llm, data_dir, limit, tokens)
    for name, head in loaded.items():
        about: dict[str, Any] = {"head": shown_head(paths[name]), "weights": fingerprint(head), "model": model}
        about |= {"questions": limit, "tokens": tokens}
        if begun[name] and any(begun[name].get(key) != value for key, value in {**about, "commit": commit}.items()):
            other = "another commit, or with another head or other options: move it away"
            raise ValueError(f"{files[name]} was begun by {other}")
        for heat, width in progress_bar(todo[name], desc=name, unit="tree"):
            tree = TreeConfig(draft_temperature=heat, width=width, ngrams=False)
            found = forced_rounds(target, head, answers, tree, TREE_BUDGETS, num_gaps=0)
            trees[name][heat, width] = {"draft_temperature": heat, "width": width, **found}
            in_order = [trees[name][key] for key in sorted(trees[name])]
            write_record(files[name], {"name": name, **about, "trees": in_order}, commit)


def tree_key(tree: Record) -> tuple[float, int]:
    return tree["draft_temperature"], tree["width"]


@torch.inference_mode()
def forced_rounds(
    target: Decoder,
    head: Head,
    answers: Mapping[str, Sequence[Document]],
    tree: TreeConfig,
    budgets: Sequence[str],
    **options: Any,
) -> dict[str, Any]:
    """Teacher-forced tokens per round by task and budget, and their means over tasks."""
    found = {
        task: score_head(target, head, rows, budgets, tree, **options).tokens_per_round
        for task, rows in answers.items()
    }
    mean = {budget: statistics.fmean(row[budget] for row in found.values()) for budget in budgets}
    return {"tokens_per_round": found, "mean": mean}


# -- speed of training


def training(
    recipe: TrainRecipe,
    out: RecordFile,
    set_: Settings = [],  # noqa: B006
    shapes: Annotated[str, typer.Option(help="ROWSxTOKENSxANCHORS of a row, separated by commas.")] = SHAPES,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after the warm-up.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the warm-up.")] = 4,
) -> None:
    """Time training steps with batches of several shapes, and measure their memory.

    Shapes that differ in anchors alone show that memory does not grow with these.
    """
    commit, config = current_commit(), load_recipe(recipe, tuple(set_))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(config.model, dtype, device).decoder
    found = []
    for shape in shapes.split(","):
        rows, row_len, anchors = map(int, shape.split("x"))
        tried = replace(config, rows=rows, row_len=row_len, anchors=anchors, steps=warmup + steps)
        found.append(measure(tried, target, warmup))
        print(found[-1], flush=True)
        write_record(out, {"timed_steps": steps, "shapes": found}, commit)


def measure(config: TrainConfig, target: Decoder, warmup: int) -> dict[str, Any]:
    """Drafted positions per second, all and those with a label, and peak memory. Steps that capture are repeated."""
    device = target.embedding.device
    documents = read_data(config, target.config.vocab_size, start_head(config, target))
    data = PackedData(documents, config.row_len, config.seed)
    gc.collect()  # an earlier trainer is a reference cycle: its memory would count here
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, target, start_head(config, target).to(device), data)
    for _ in range(warmup):
        trainer.train_step()
    steps, label = config.steps - warmup, f"{config.rows} x {config.row_len} x {config.anchors}"

    def timed() -> tuple[list[DraftLoss], float]:
        began = Moment(device)
        losses = [trainer.train_step() for _ in progress_bar(range(steps), desc=label, unit="step")]
        return losses, began.ms_until(Moment(device)) / 1e3

    sums, seconds = without_capture(trainer.passes, timed)
    positions = sum(float(part.reach_D.sum()) for part in sums)
    return {
        **{name: getattr(config, name) for name in ("rows", "row_len", "anchors")},
        "anchors_at_once": min(config.anchors, config.anchors_at_once),
        "step_ms": seconds / len(sums) * 1e3,
        "positions_per_s": positions / seconds,
        "drafted_per_s": len(sums) * config.rows * config.anchors * sums[0].reach_D.numel() / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
