"""`jetspec data regenerate`: the engine writes the answers, in one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from jetspec.commands.data import Machines
from jetspec.commands.options import TargetConfig
from jetspec.commands.screen import duration, working
from jetspec.config import EngineConfig
from jetspec.data.probe import probe
from jetspec.data.prompts import OnBad, Prompt, PromptData
from jetspec.data.regenerate import (
    Check,
    RegenerateConfig,
    load_check,
    load_corpus,
    places,
    plan,
    regenerate,
    write_rows,
)
from jetspec.data.workers import Answer
from jetspec.engine.llm import LLM

SHARED_FRAC = 0.7
"""Share of a GPU's memory that the caches of several processes on it may take together."""


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
    return partial(regenerate, load_target_alone(config.model, engine, dtype, device, sharing), config)


def load_target_alone(model: str, engine: EngineConfig, dtype: str, device: str, sharing: int) -> LLM:
    """The target without a drafter. `sharing` is the number of processes on the same device."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
        if sharing > 1:
            memory = torch.cuda.get_device_properties(device).total_memory
            engine = replace(engine, cache_gb=SHARED_FRAC * memory / 2**30 / sharing)
    is_worker = multiprocessing.parent_process() is not None
    with nullcontext() if is_worker else working(f"Loading {model}"):
        return LLM(model, drafter="none", engine=engine, dtype=dtype, device=device)
