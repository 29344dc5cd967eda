"""Measuring: every method on every task, group by group, into a file that survives any kill.

A run is a folder. `rows.jsonl` has a line per group of questions that were decoded together; a run that was stopped
goes on with the groups that it does not hold. `run.json` says what the rows were made with: nothing else is mixed in.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.groups import (
    Answering,
    Group,
    GroupFile,
    Key,
    Row,
    check_prompts,
    keep_settings,
    kept_settings,
    questions_digest,
)
from benchmarks.methods import (
    Ask,
    Method,
    Reply,
    Timed,
    Unequal,
    Unopened,
    check_found,
    check_ready,
    find_head,
    kind_of,
    open_method,
    with_head_of,
)
from benchmarks.recipe import PLAIN, BenchConfig, Cell, MethodConfig, method_dict
from benchmarks.runs import RESULTS_FILE, ROWS_FILE, RUN_FILE
from benchmarks.servers import identify, left_open
from benchmarks.tasks import BUILTIN, check_tasks, read_task
from jetspec.data.answers import fingerprint
from jetspec.data.prompts import Prompt
from jetspec.data.regenerate import Conversation, require_template
from jetspec.engine.llm import LLM
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.hub import head_path, resolve, shipped_head
from jetspec.record import date_now, hardware, package_versions, shown
from jetspec.train.card import read_card

FAILURES = (ValueError, OSError, RuntimeError)
"""What a method may raise and others go on after."""
TURN_ROOM = 64
"""Tokens that a chat template may write around a turn."""


def check_inputs(config: BenchConfig, folder: Path, fresh: bool) -> None:
    """Refuse what could not be measured before the target is loaded: bad questions, heads and servers not there."""
    check_tasks(config.tasks, data_dir_of(config))
    for task in config.tasks:
        if config.data_dir or task == BUILTIN:
            questions_of(config, task)
    if config.head is not None:
        find_head(config.head)
    is_new = fresh or not (folder / ROWS_FILE).exists()
    for method in config.contenders():
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
        self.methods = config.contenders(kind_of(llm.head) if llm.head else None)
        self.variables = {} if config.thinking is None else {"enable_thinking": config.thinking}
        self.questions = {task: questions_of(config, task) for task in config.tasks}

    @cached_property
    def max_len(self) -> int:
        """Room for the longest conversation, or as much of it as the model can read."""
        longest = max(self._longest(prompt) for prompts in self.questions.values() for prompt in prompts)
        return min(longest, self.context)

    @property
    def context(self) -> int:
        return self.llm.target.decoder.config.max_len

    def _longest(self, prompt: Prompt) -> int:
        later = [len(self.llm.tokenizer.encode_words(turn)) + TURN_ROOM for turn in prompt.turns[1:]]
        return len(self._start(prompt).conversation.token_ids) + sum(later) + len(prompt.turns) * self.config.max_tokens

    def _start(self, prompt: Prompt) -> Answering:
        return Answering(Conversation(prompt, self.llm.tokenizer, **self.variables))

    def run(self, progress: bool = False, fresh: bool = False, retry_failed: bool = False) -> dict[Key, Row]:
        """Measure what the folder does not hold yet; returns all rows of this benchmark.

        `fresh` forgets what it holds, once it is known that all methods can be measured and nobody else writes there.
        `retry_failed` measures groups again in which a question failed; the new row of such a group counts.
        """
        settings = self.settings()
        for method in self.methods if fresh else ():
            check_ready(self.llm, method)
        with closing(GroupFile(self.folder / ROWS_FILE, fresh)) as file:
            for name in (RUN_FILE, RESULTS_FILE) if fresh else ():
                (self.folder / name).unlink(missing_ok=True)
            wanted = list(self.groups())
            todo = [
                group for group in wanted if group.key not in file.rows or (retry_failed and file.failed(group.key))
            ]
            is_held = held_settings({cell for cell, _, _ in file.rows})
            keep_settings(self.folder / RUN_FILE, settings, is_held, is_measured=bool(todo))
            check_prompts(file.rows.values())
            names = {group.cell.method for group in todo}
            for method in self.methods:
                if method.name in names:
                    check_ready(self.llm, method)
            with progress_bar(len(todo), "group", progress) as bar:
                command = len(self.runs()) - 1
                for row in self._measure(todo, bar):
                    file.append({**row, "command": command, "date": date_now()})
                    bar.update()
            check_prompts(file.rows.values())
            return {group.key: file.rows[group.key] for group in wanted}

    def runs(self) -> list[dict[str, Any]]:
        """The commands that measured what the folder holds, one after the other, each with its commit and date."""
        return list(kept_settings(self.folder / RUN_FILE)["runs"])

    def weights(self) -> dict[str, Any]:
        """Which target and heads the rows are of, and how a head was trained, if its card tells."""
        settings = kept_settings(self.folder / RUN_FILE)["settings"]
        heads = {
            method.name: {"weights": settings[f"head of {method.name}"], **self._trained(method)}
            for method in self.methods
            if method.traits.head
        }
        return {"weights": settings["weights"], "heads": heads}

    def left_open(self) -> dict[str, list[str]]:
        """By method what its server fills in by itself, as far as a server answered."""
        settings = kept_settings(self.folder / RUN_FILE)["settings"]
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
        """Of the sources that measured what the folder holds."""
        return list(dict.fromkeys(str(run["commit"]) for run in self.runs()))

    def groups(self) -> Iterator[Group]:
        """In the order of measuring: every method once, then every method again, the other way round.

        A machine that slows down as it grows warm, or is shared for a while, thus does so to all of them alike.
        """
        cells = [(method, cell) for method in self.methods for cell in self.config.cells(method)]
        for repeat in range(self.config.repeats):
            for method, cell in reversed(cells) if repeat % 2 else cells:
                prompts = self.questions[cell.task][: method.limit]
                for index, first in enumerate(range(0, len(prompts), cell.batch)):
                    yield Group(cell, repeat, index, prompts[first : first + cell.batch])

    def _measure(self, groups: Sequence[Group], bar: tqdm[Any]) -> Iterator[Row]:
        """Their rows. What decodes is made ready outside all timing, and kept while the groups that follow need it."""
        methods = {method.name: method for method in self.methods}
        for (_, name, budget, batch), some in groupby(groups, key=_engine_of):
            opened, warm = self._open(methods[name], budget, batch), set()
            for group in some:
                place = f"repeat {group.repeat + 1}: {name} {budget or ''} x{batch} {group.cell.task}"
                bar.set_description(place, refresh=False)
                if group.cell not in warm:
                    self._warm_up(opened, group)
                    warm.add(group.cell)
                yield self.decode(opened, group)
            del opened
            release_memory()

    def _open(self, method: MethodConfig, budget: int | None, batch: int) -> Method:
        """A method made ready, or, where there is no room for it, one that fails. Without plain decoding, which comes
        first, there would be nothing to compare with."""
        llm = with_head_of(self.llm, method)
        try:
            return open_method(llm, method, budget, batch, self.max_len, **self.variables)
        except FAILURES as error:
            if method.name == PLAIN:
                raise
            check_alive()
            return Unopened(error)

    def _warm_up(self, method: Method, group: Group) -> None:
        """A few tokens of the group's own questions. What fails here will fail again where it is written down."""
        asks = [self._start(prompt).ask(self.config, group.cell.temperature, group.repeat) for prompt in group.prompts]
        short = [replace(ask, sampling=replace(ask.sampling, max_tokens=self.config.warmup)) for ask in asks]
        if fitting := [ask for ask in short if len(ask.prompt) < self.context]:
            with suppress(*FAILURES):
                method.warm_up(fitting)

    def decode(self, method: Method, group: Group) -> Row:
        """One group, turn by turn, as a row. What fails is in it."""
        under_way = [self._start(prompt) for prompt in group.prompts]
        prefill_s = decode_s = 0.0
        while live := [one for one in under_way if one.goes_on]:
            asks = [one.ask(self.config, group.cell.temperature, group.repeat) for one in live]
            for one, ask in zip(live, asks, strict=True):
                if len(ask.prompt) >= self.context:
                    one.error = f"the prompt has {len(ask.prompt)} tokens, the context holds {self.context}"
            pairs = [(one, ask) for one, ask in zip(live, asks, strict=True) if one.error is None]
            if not pairs:
                break
            timed = self._try(method, [ask for _, ask in pairs])
            for (one, ask), reply in zip(pairs, timed.replies, strict=True):
                if isinstance(reply, Reply):
                    self.check_reply(group.cell.method, ask, reply)
                one.take(reply)
            prefill_s += timed.prefill_s
            decode_s += timed.decode_s
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
    def _try(method: Method, asks: Sequence[Ask]) -> Timed:
        """A group that cannot be decoded together is a group of errors. A GPU that is lost ends the run instead: it
        would make errors of all that is left."""
        try:
            return method.decode(asks)
        except Unequal:
            raise
        except FAILURES as error:
            check_alive()
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Timed([reason] * len(asks), 0.0, 0.0)

    def check_reply(self, method: str, ask: Ask, reply: Reply) -> None:
        """All methods stop at the same tokens and lengths, or there is nothing to compare."""
        limit, count = ask.sampling.token_limit, reply.num_tokens
        room = self.context - len(ask.prompt)
        ends = self.llm.target.eos_tokens
        shows_end = next(m for m in self.methods if m.name == method).url is None
        problem = None
        if reply.num_read != len(ask.prompt) and not reply.other_prompt:
            problem = f"it read {reply.num_read} tokens of a prompt of {len(ask.prompt)}"
        elif reply.finish not in ("stop", "length"):
            problem = f"it ended by {reply.finish!r}"
        elif count > limit:
            problem = f"it wrote {count} tokens where {limit} are allowed"
        elif reply.finish == "length" and count < min(limit, room):
            problem = f"it stopped for its length after {count} tokens where {limit} are allowed"
        elif count == len(reply.token_ids) and any(token in ends for token in reply.token_ids[:-1]):
            problem = "it went on after an end token"
        elif shows_end and reply.finish == "stop" and (not reply.token_ids or reply.token_ids[-1] not in ends):
            problem = "it stopped without an end token"
        if problem:
            raise Unequal(f"{method} does not follow the rules of the others: {problem}")

    def settings(self) -> dict[str, Any]:
        """Everything that a row depends on, beside its key."""
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
        methods = {f"method {method.name}": method_dict(method) for method in self.methods}
        trees = {
            f"tree of {method.name} {budget}": asdict(method.tree(budget))
            for method in self.methods
            for budget in config.budgets_of(method)
            if budget is not None
        }
        return shared | tasks | methods | trees | self._heads() | self._servers()

    def _heads(self) -> dict[str, str]:
        """A head that was trained again keeps its name, so its weights are looked at."""
        found = {}
        for method in self.methods:
            if method.traits.head and (head := with_head_of(self.llm, method).head) is not None:
                found[f"head of {method.name}"] = fingerprint(head)
        return found

    def _servers(self) -> dict[str, dict[str, Any]]:
        """Those that answer. One that is gone adds nothing to the rows that it left."""
        found = {}
        for method in self.methods:
            if method.url is not None and (server := identify(method.url, method.served_model)) is not None:
                found[f"server of {method.name}"] = server
        return found


def progress_bar(total: int, unit: str, is_shown: bool) -> tqdm[Any]:
    """A terminal sees it move, a file gets a line now and then; nothing is shown of nothing."""
    interval = 0.5 if sys.stderr.isatty() else 30
    return tqdm(total=total, unit=unit, mininterval=interval, disable=not (is_shown and total))


def _engine_of(group: Group) -> tuple[int, str, int | None, int]:
    """What groups must have in common to be decoded by the same engine: another repeat has another."""
    return group.repeat, group.cell.method, group.cell.budget, group.cell.batch


def check_alive() -> None:
    """Raise if the GPU is lost: after some errors it answers nothing else."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Give back what an engine held, before the next one looks for room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def held_settings(cells: Collection[Cell]) -> Callable[[str], bool]:
    """Which settings rows of these cells depend on."""
    held = {f"{part} {cell.method}" for cell in cells for part in ("method", "head of", "server of")}
    held |= {f"tree of {cell.method} {cell.budget}" for cell in cells} | {f"task {cell.task}" for cell in cells}
    parts = ("method ", "head of ", "server of ", "tree of ", "task ")
    return lambda name: name in held if name.startswith(parts) else bool(held)
