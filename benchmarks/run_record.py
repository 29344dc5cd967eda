"""From rows to the record of a run: speeds, tokens per round, scores, and comparisons with plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from benchmarks.cells import Measured, accepted_lengths, round_questions, speedup, tokens_per_round
from benchmarks.estimate import how_many, to_record
from benchmarks.grade import grade
from benchmarks.lossless import LosslessCheck
from benchmarks.measure import Bench
from benchmarks.recipe import PLAIN, TRANSFORMERS, Cell
from benchmarks.results import ROWS_FILE
from benchmarks.rows import Key, Row, measured_by, read_lines
from benchmarks.scores import Grader, Scores, with_progress


@dataclass
class Results:
    """Turns the rows of a benchmark into its record."""

    bench: Bench
    rows: Mapping[Key, Row]
    grader: Grader = grade

    def record(self, progress: bool = False) -> dict[str, Any]:
        decoder, config = self.bench.llm.target.decoder, self.bench.config
        self.scores.run_programs(self.measured.values(), progress)
        cells = list(map(self.cell, with_progress(self.measured.values(), "grading and comparing", progress)))
        return {
            **measured_by(self.rows.values(), self.bench.runs()),
            "model": self.bench.llm.model_name,
            "dtype": str(decoder.embedding.dtype).removeprefix("torch."),
            "device": decoder.embedding.device.type,
            **self.bench.weights(),
            "recipe": config.to_dict(self.bench.methods),
            "noise": self.lossless.noise_record(),
            "cells": cells,
            "notes": list(self._notes()),
            "ungraded": self.scores.notes,
            "runs": self.bench.runs(),
        }

    def _notes(self) -> Iterator[str]:
        """Notes on batches that were never full, and on rows of several commands or sources."""
        yield from self._short_batches()
        yield from self._apart()
        if unused := len(read_lines(self.bench.folder / ROWS_FILE)) - len(self.rows):
            yield f"the folder holds {how_many(unused, 'more group')} that this command did not ask for"
        for name, fields in self.bench.left_open().items():
            if fields:
                yield f"{name} was asked without {', '.join(fields)}: what its server takes instead is not known"
        if len(commits := self.bench.commits()) > 1:
            yield f"measured by several versions of the source, one after the other: {', '.join(commits)}"

    def _short_batches(self) -> Iterator[str]:
        """Notes on methods that were asked fewer questions than a batch holds."""
        methods: dict[tuple[str, int], set[str]] = {}
        short: dict[tuple[str, int, int], set[str]] = {}
        for cell, measured in self.measured.items():
            methods.setdefault((cell.task, cell.batch), set()).add(cell.method)
            if measured.fullest < cell.batch:
                short.setdefault((cell.task, cell.batch, measured.fullest), set()).add(cell.method)
        for (task, batch, count), names in short.items():
            is_all = names == methods[task, batch]
            subject = "there are" if is_all else f"{' and '.join(sorted(names))} got"
            yield f"{task} in batches of {batch}: {subject} only {how_many(count, 'question')}"

    def _apart(self) -> Iterator[str]:
        """Note on methods measured by another command than plain decoding: only within a command they take turns."""
        apart: dict[str, None] = {}
        for cell, measured in self.measured.items():
            plain = self.measured[cell.beside(PLAIN, 1)]
            if measured.beside(plain).commands != plain.beside(measured).commands:
                apart[cell.method] = None
        if apart:
            names = ", ".join(apart)
            yield f"measured, in part, by another command than the plain decoding that they are compared with: {names}"

    @cached_property
    def measured(self) -> dict[Cell, Measured]:
        found: dict[Cell, list[list[Row]]] = {}
        for (cell, repeat, _), row in sorted(self.rows.items(), key=lambda item: item[0][1:]):
            repeats = found.setdefault(cell, [[] for _ in range(self.bench.config.repeats)])
            repeats[repeat].append(row)
        order = [cell for method in self.bench.methods for cell in self.bench.config.cells(method)]
        return {cell: Measured(cell, found[cell]) for cell in order}

    def cell(self, mine: Measured) -> dict[str, Any]:
        plain = self.measured[mine.cell.beside(PLAIN, 1)]
        rounds = round_questions(mine)
        return {
            **asdict(mine.cell),
            "questions": len(mine.answers(0)),
            "together": mine.fullest,
            "tokens": mine.tokens,
            "tokens_per_s": to_record(mine.speeds),
            "tokens_per_round": {
                **to_record(tokens_per_round(mine)),
                "questions": list(rounds.values()),
                "ids": list(rounds),
            },
            "accepted": accepted_lengths(mine),
            "prefill_s": to_record(mine.prefills),
            "speedup": speedup(mine, plain),
            "speedup_transformers": speedup(mine, self.measured.get(mine.cell.beside(TRANSFORMERS, None))),
            "score": self.scores.of(mine),
            "lossless": self.lossless.of(mine, plain) if mine is not plain else None,
            "errors": mine.errors,
        }

    @cached_property
    def scores(self) -> Scores:
        return Scores(self.bench.questions, self.grader)

    @cached_property
    def lossless(self) -> LosslessCheck:
        return LosslessCheck(self.bench, [measured for cell, measured in self.measured.items() if cell.method == PLAIN])
