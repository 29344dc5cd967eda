"""Measuring: every method on every task, group by group, into a file that survives any kill.

A run is a folder. `rows.jsonl` has a line per group of questions decoded together; a stopped run resumes with the
groups that are missing. `run.json` holds the settings of the rows: rows of other settings are not added.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.methods import (
    Ask,
    Method,
    Reply,
    Timed,
    UnequalConditions,
    check_found,
    check_ready,
    find_head,
    identify,
    kind_of,
    left_open,
    open_method,
    with_head_of,
)
from benchmarks.recipe import PLAIN, BenchConfig, Cell, MethodConfig
from benchmarks.results import ROWS_FILE, RUN_FILE
from benchmarks.rows import (
    Answering,
    Group,
    Key,
    Row,
    RowsFile,
    check_prompts,
    has_failed,
    kept_settings,
    questions_digest,
)
from benchmarks.tasks import BUILTIN, check_tasks, read_task
from jetspec.data.answers import fingerprint
from jetspec.data.conversation import Conversation, require_template
from jetspec.data.prompts import Prompt
from jetspec.engine.llm import LLM
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.hub import head_path, resolve, shipped_head
from jetspec.progress import progress_bar
from jetspec.record import hardware, package_versions, shown
from jetspec.train.card import read_card

FAILURES = (ValueError, OSError, RuntimeError)
"""Errors of a method after which others are still measured."""
TURN_TOKENS = 64
"""Tokens that a chat template may write around a turn."""


def check_inputs(config: BenchConfig, folder: Path, fresh: bool) -> None:
    """Refuse bad questions, missing heads and servers before the target is loaded."""
    check_tasks(config.tasks, data_dir_of(config))
    for task in config.tasks if config.data_dir else {BUILTIN}.intersection(config.tasks):
        questions_of(config, task)
    if config.head is not None:
        find_head(config.head)
    is_new = fresh or not (folder / ROWS_FILE).exists()
    for method in config.all_methods():
        check_found(method, is_new)


def data_dir_of(config: BenchConfig) -> Path | None:
    return Path(config.data_dir) if config.data_dir else None


def questions_of(config: BenchConfig, task: str) -> list[Prompt]:
    return read_task(task, data_dir_of(config), config.limit, config.skip_of(task))


class Bench:
    """A benchmark over one load of the target."""

    def __init__(self, config: BenchConfig, llm: LLM, folder: Path) -> None:
        require_template(llm.tokenizer)
        self.config, self.llm, self.folder = config, llm, folder
        self.methods = config.all_methods(kind_of(llm.head) if llm.head else None)
        self.variables = {} if config.thinking is None else {"enable_thinking": config.thinking}
        self.questions = {task: questions_of(config, task) for task in config.tasks}

    @cached_property
    def max_len(self) -> int:
        """Tokens of the longest conversation, up to the model's context."""
        longest = max(self._longest(prompt) for prompts in self.questions.values() for prompt in prompts)
        return min(longest, self.context)

    @property
    def context(self) -> int:
        return self.llm.target.decoder.config.max_len

    def _longest(self, prompt: Prompt) -> int:
        later = [len(self.llm.tokenizer.encode_words(turn)) + TURN_TOKENS for turn in prompt.turns[1:]]
        return len(self._start(prompt).conversation.token_ids) + sum(later) + len(prompt.turns) * self.config.max_tokens

    def _start(self, prompt: Prompt) -> Answering:
        return Answering(Conversation(prompt, self.llm.tokenizer, **self.variables))

    def run(self, progress: bool = False, fresh: bool = False, retry_failed: bool = False) -> dict[Key, Row]:
        """Measure groups that the folder lacks; returns all rows of this benchmark.

        `fresh` deletes existing rows, once all methods are known to be measurable and the folder is locked.
        `retry_failed` measures groups again in which a question failed; the new row of such a group counts.
        """
        settings = self.settings()
        for method in self.methods if fresh else ():
            check_ready(self.llm, method)
        with closing(RowsFile(self.folder / ROWS_FILE, fresh)) as file:
            wanted = list(self.groups())
            todo = [g for g in wanted if g.key not in file.rows or (retry_failed and has_failed(file.rows[g.key]))]
            is_held = held_settings({cell for cell, _, _ in file.rows})
            file.begin(settings, is_held, is_measured=bool(todo))
            check_prompts(file.rows.values())
            for method in self.methods:
                if any(group.cell.method == method.name for group in todo):
                    check_ready(self.llm, method)
            with progress_bar(total=len(todo), unit="group", disable=not (progress and todo)) as bar:
                for row in self._measure(todo, bar):
                    file.append(row)
                    bar.update()
            check_prompts(file.rows.values())
            return {group.key: file.rows[group.key] for group in wanted}

    def _kept(self) -> dict[str, Any]:
        return kept_settings(self.folder / RUN_FILE)

    def runs(self) -> list[dict[str, Any]]:
        """Commands that measured the rows, in order, each with its commit and date."""
        return list(self._kept()["runs"])

    def weights(self) -> dict[str, Any]:
        """Fingerprints of target and heads, and the training of each head, from its card."""
        settings, with_head = self._kept()["settings"], [method for method in self.methods if method.traits.head]
        heads = {m.name: {"weights": settings[f"head of {m.name}"], **self._trained(m)} for m in with_head}
        return {"weights": settings["weights"], "heads": heads}

    def left_open(self) -> dict[str, list[str]]:
        """Sampling settings that each method's server chooses by itself, where a server answered."""
        settings = self._kept()["settings"]
        servers = {method.name: settings.get(f"server of {method.name}") for method in self.methods}
        return {name: left_open(server.get("sampling", {})) for name, server in servers.items() if server}

    def _trained(self, method: MethodConfig) -> dict[str, str]:
        name = method.head or self.config.head
        folder = resolve(head_path(name)) if name else shipped_head(self.config.model)
        if folder is None or not (folder / CARD_FILE).is_file():
            return {}
        card = (folder / CARD_FILE).read_text(encoding="utf-8", errors="replace")
        training, origin = read_card(card, "Training"), read_card(card, "Origin")
        data = "; ".join(f"{key.removeprefix('data: ')}, {value}" for key, value in training.items() if "data: " in key)
        told = {"data": data} if data else {}
        told |= {key: training[key] for key in ("steps", "batch per process", "optimizer") if key in training}
        return told | {key: origin[key] for key in ("command", "commit") if key in origin}

    def commits(self) -> list[str]:
        return list(dict.fromkeys(str(run["commit"]) for run in self.runs()))

    def groups(self) -> Iterator[Group]:
        """Groups in the order of measuring: every method once, then every method again in reverse order.

        A machine that slows down as it grows warm, or is shared for a while, thus slows all methods alike.
        """
        cells = [(method, cell) for method in self.methods for cell in self.config.cells(method)]
        for repeat in range(self.config.repeats):
            for method, cell in reversed(cells) if repeat % 2 else cells:
                prompts = self.questions[cell.task][: method.limit]
                for index, first in enumerate(range(0, len(prompts), cell.batch)):
                    yield Group(cell, repeat, index, prompts[first : first + cell.batch])

    def _measure(self, groups: Sequence[Group], bar: Any) -> Iterator[Row]:
        """Rows of groups. A method is opened and warmed up outside all timing, and kept while groups need it."""
        methods = {method.name: method for method in self.methods}
        engine_of = attrgetter("repeat", "cell.method", "cell.budget", "cell.batch")  # every repeat has its own
        for (_, name, budget, batch), some in groupby(groups, key=engine_of):
            opened, warm = self._open(methods[name], budget, batch), set()
            for group in some:
                place = f"repeat {group.repeat + 1}: {name} {budget or ''} x{batch} {group.cell.task}"
                bar.set_description(place, refresh=False)
                if group.cell not in warm and not isinstance(opened, Exception):
                    self._warm_up(opened, group)
                    warm.add(group.cell)
                yield self.decode(opened, group)
            del opened
            release_memory()

    def _open(self, method: MethodConfig, budget: int | None, batch: int) -> Method | Exception:
        """An open method, or why it cannot be opened, such as too little memory. Plain decoding must open."""
        llm = with_head_of(self.llm, method)
        try:
            return open_method(llm, method, budget, batch, self.max_len, **self.variables)
        except FAILURES as error:
            if method.name == PLAIN:
                raise
            check_alive()
            return error.with_traceback(None)  # which would keep what was made before it failed

    def _warm_up(self, method: Method, group: Group) -> None:
        """Decode a few tokens of the group's own questions. A failure here is repeated, and recorded, in `decode`."""
        asks = [self._start(prompt).ask(self.config, group.cell.temperature, group.repeat) for prompt in group.prompts]
        short = [replace(ask, sampling=replace(ask.sampling, max_tokens=self.config.warmup)) for ask in asks]
        if fitting := [ask for ask in short if len(ask.prompt) < self.context]:
            with suppress(*FAILURES):
                method.warm_up(fitting)

    def decode(self, method: Method | Exception, group: Group) -> Row:
        """Decode one group turn by turn into a row, with its failures."""
        under_way = [self._start(prompt) for prompt in group.prompts]
        prefill_s = decode_s = 0.0
        while live := [one for one in under_way if one.has_next_turn]:
            asks = [one.ask(self.config, group.cell.temperature, group.repeat) for one in live]
            for one, ask in zip(live, asks, strict=True):
                if len(ask.prompt) >= self.context:
                    one.error = f"the prompt has {len(ask.prompt)} tokens, the context holds {self.context}"
            if pairs := [(one, ask) for one, ask in zip(live, asks, strict=True) if one.error is None]:
                timed = self._try(method, [ask for _, ask in pairs])
                prefill_s, decode_s = prefill_s + timed.prefill_s, decode_s + timed.decode_s
                for (one, ask), reply in zip(pairs, timed.replies, strict=True):
                    if isinstance(reply, Reply):
                        self.check_reply(group.cell.method, ask, reply)
                    one.take(reply)
        return {
            "cell": asdict(group.cell),
            "repeat": group.repeat,
            "group": group.index,
            "ids": [one.id for one in under_way],
            "prompt_tokens": [one.prompt_tokens for one in under_way],
            "prompts": [one.prompt_digests for one in under_way],
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "answers": [one.answer() for one in under_way],
        }

    @staticmethod
    def _try(method: Method | Exception, asks: Sequence[Ask]) -> Timed:
        """Replies of a group; an exception becomes the error of each. A lost GPU ends the run instead."""
        try:
            if isinstance(method, Exception):
                raise method
            return method.decode(asks)
        except UnequalConditions:
            raise
        except FAILURES as error:
            check_alive()
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Timed([reason] * len(asks), 0.0, 0.0)

    def check_reply(self, method: str, ask: Ask, reply: Reply) -> None:
        """Refuse a reply that did not stop at the tokens and lengths common to all methods."""
        limit, count = ask.sampling.token_limit, reply.num_tokens
        capacity = self.context - len(ask.prompt)
        ends = self.llm.target.eos_tokens
        shows_end = next(m for m in self.methods if m.name == method).url is None
        problem = None
        if reply.num_read != len(ask.prompt) and not reply.other_prompt:
            problem = f"it read {reply.num_read} tokens of a prompt of {len(ask.prompt)}"
        elif reply.finish not in ("stop", "length"):
            problem = f"it ended by {reply.finish!r}"
        elif count > limit:
            problem = f"it wrote {count} tokens where {limit} are allowed"
        elif reply.finish == "length" and count < min(limit, capacity):
            problem = f"it stopped for its length after {count} tokens where {limit} are allowed"
        elif count == len(reply.token_ids) and any(token in ends for token in reply.token_ids[:-1]):
            problem = "it went on after an end token"
        elif shows_end and reply.finish == "stop" and (not reply.token_ids or reply.token_ids[-1] not in ends):
            problem = "it stopped without an end token"
        if problem:
            raise UnequalConditions(f"{method} does not follow the rules of the others: {problem}")

    def settings(self) -> dict[str, Any]:
        """All settings that rows depend on, beside their keys."""
        config, decoder = self.config, self.llm.target.decoder
        shared = {
            "model": self.llm.model_name,
            "weights": fingerprint(decoder),
            "dtype": str(decoder.embedding.dtype).removeprefix("torch."),
            "device": decoder.embedding.device.type,
            "hardware": hardware(),
            "versions": package_versions(),
            "max_tokens": config.max_tokens,
            "warmup": config.warmup,
            "seed": config.seed,
            "thinking": str(config.thinking),
            "head": str(config.head and shown(config.head)),
        }
        tasks = {f"task {task}": questions_digest(self.questions[task]) for task in config.tasks}
        methods = {f"method {method.name}": method.to_dict() for method in self.methods}
        trees = {
            f"tree of {method.name} {budget}": asdict(method.tree(budget))
            for method in self.methods
            for budget in config.budgets_of(method)
            if budget is not None
        }
        heads = {  # by fingerprint: a head that was trained again keeps its name
            f"head of {method.name}": fingerprint(head)
            for method in self.methods
            if method.traits.head and (head := with_head_of(self.llm, method).head) is not None
        }
        servers = {
            f"server of {method.name}": server
            for method in self.methods
            if method.url is not None and (server := identify(method.url, method.served_model)) is not None
        }
        return shared | tasks | methods | trees | heads | servers


def check_alive() -> None:
    """Raise if the GPU is lost."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Free the memory of an engine before the next one allocates."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def held_settings(cells: Collection[Cell]) -> Callable[[str], bool]:
    """Predicate: rows of these cells depend on a setting."""
    parts = ("method", "head of", "server of", "tree of", "task")
    held = {f"{part} {cell.method}" for cell in cells for part in parts[:3]}
    held |= {f"tree of {cell.method} {cell.budget}" for cell in cells} | {f"task {cell.task}" for cell in cells}
    return lambda name: name in held if name.startswith(tuple(f"{part} " for part in parts)) else bool(held)
