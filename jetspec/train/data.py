"""Conversations the target wrote -> packed rows of tokens, the same for every run with the same seed."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One conversation: its tokens, and which of them the target wrote."""

    tokens: np.ndarray
    written: np.ndarray


@dataclass(frozen=True)
class PackedBatch:
    """Documents one behind the other in rows of T tokens. Padding belongs to document -1."""

    token_RT: Tensor
    position_RT: Tensor
    document_RT: Tensor
    written_RT: Tensor

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(x.to(device, non_blocking=True) for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_RT, self.position_RT, self.document_RT, self.written_RT


def read_documents(paths: Iterable[str | Path], max_len: int, vocab_size: int) -> list[Document]:
    """All rows of some files. Longer ones are cut; one without a written token in reach is an error."""
    documents = []
    for path in paths:
        for number, line in lines_of(Path(path)):
            document = parse(line, f"{path}:{number}", vocab_size)
            document = Document(document.tokens[:max_len], document.written[:max_len])
            if document.written[1:].any():
                documents.append(document)
    if not documents:
        raise ValueError("the data has no row in which the target wrote something")
    return documents


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"cannot read the data {path}: {error}") from error


def parse(line: str, where: str, vocab_size: int) -> Document:
    """A row {"token_ids": [..], "spans": [[start, end], ..]} as `jetspec data regenerate` writes it."""
    try:
        raw = json.loads(line)
        tokens, spans = np.asarray(raw["token_ids"]), [(int(a), int(b)) for a, b in raw["spans"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: not a row of regenerated data ({error!r})") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{where}: token_ids must be a list of whole numbers")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise ValueError(f"{where}: a token id lies outside the model's vocabulary of {vocab_size}")
    written = np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        if not 0 <= start <= end <= len(tokens):
            raise ValueError(f"{where}: span [{start}, {end}) lies outside the {len(tokens)} tokens")
        written[start:end] = True
    return Document(tokens.astype(np.int64), written)


class PackedData:
    """Rows by number: row `i` is the same whenever and wherever it is asked for, so a run can stop anywhere.

    Every pass over the documents shuffles them anew and fills rows in that order.
    """

    def __init__(self, documents: Sequence[Document], row_len: int, seed: int) -> None:
        self.documents, self.row_len, self.seed = documents, row_len, seed
        self.passes: list[list[list[int]]] = []
        self.first_rows = [0]

    @property
    def rows_per_pass(self) -> int:
        return len(self._pass(0))

    def batch(self, first: int, count: int) -> PackedBatch:
        rows = [self.row(first + i) for i in range(count)]
        return PackedBatch(*(torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True)))

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        while number >= self.first_rows[-1]:
            self._pass(len(self.passes))
        which = bisect_right(self.first_rows, number) - 1
        token, position = np.zeros(self.row_len, np.int64), np.zeros(self.row_len, np.int64)
        document, written = np.full(self.row_len, -1, np.int64), np.zeros(self.row_len, bool)
        start = 0
        for i, index in enumerate(self.passes[which][number - self.first_rows[which]]):
            source = self.documents[index]
            end = start + len(source.tokens)
            token[start:end], written[start:end] = source.tokens, source.written
            position[start:end], document[start:end] = np.arange(end - start), i
            start = end
        return token, position, document, written

    def _pass(self, number: int) -> list[list[int]]:
        while len(self.passes) <= number:
            order = np.random.default_rng((self.seed, len(self.passes))).permutation(len(self.documents))
            rows: list[list[int]] = []
            room = 0
            for index in order.tolist():
                size = len(self.documents[index].tokens)
                if size > room:
                    rows.append([])
                    room = self.row_len
                rows[-1].append(index)
                room -= size
            self.passes.append(rows)
            self.first_rows.append(self.first_rows[-1] + len(rows))
        return self.passes[number]
