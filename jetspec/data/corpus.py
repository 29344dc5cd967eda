"""Reads regenerated conversations and packs them into rows of tokens, the same for every run with the same seed."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.data.prompts import OnBad, text_lines
from jetspec.files import NAMED, some

T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """One conversation: its tokens, and a mask of those that the target wrote."""

    tokens: np.ndarray
    written: np.ndarray
    id: str | None = None
    """Id of its prompt. Answers to the same prompt share it, in one file or several."""


@dataclass(frozen=True, eq=False)
class Documents(Sequence[Document]):
    """Conversations as slices of two flat arrays: five bytes per token, and a few numbers per conversation."""

    token_N: np.ndarray
    written_N: np.ndarray
    start_D: np.ndarray
    end_D: np.ndarray
    file_D: np.ndarray
    """Index of the file of each."""
    prompt_D: np.ndarray
    """Index of the prompt of each. A conversation without an id has its own."""

    @classmethod
    def join(cls, found: Sequence[tuple[int, Document]]) -> Documents:
        """Documents with the indices of their files, in flat arrays."""
        end_D = np.cumsum([len(document.tokens) for _, document in found])
        first: dict[str, int] = {}
        ids = (document.id for _, document in found)
        return cls(
            np.concatenate([document.tokens.astype(np.int32) for _, document in found]),
            np.concatenate([document.written for _, document in found]),
            np.concatenate(([0], end_D[:-1])),
            end_D,
            np.array([file for file, _ in found]),
            np.array([i if id is None else first.setdefault(id, i) for i, id in enumerate(ids)]),
        )

    def __len__(self) -> int:
        return len(self.start_D)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        inside = slice(self.start_D[index], self.end_D[index])
        return Document(self.token_N[inside], self.written_N[inside])

    def take(self, index: np.ndarray) -> Documents:
        """The documents `index`, in this order, with repetitions. Tokens are shared, not copied."""
        own = (self.start_D, self.end_D, self.file_D, self.prompt_D)
        return Documents(self.token_N, self.written_N, *(each[index] for each in own))

    def hold_out(self, most: int, seed: int) -> tuple[Documents, Documents]:
        """Splits off a tenth of the prompts, at most `most`, with all their answers; returns both parts, shuffled.

        The split is random, because files list short answers first: those were finished first.
        """
        shuffled = self.take(np.random.default_rng(seed).permutation(len(self)))
        _, first_P = np.unique(shuffled.prompt_D, return_index=True)
        if len(first_P) < 2:
            raise ValueError("the data has one prompt, so none can be held out: add more, or set validation_rows to 0")
        count = max(1, min(len(first_P) // 10, most))
        held_D = np.isin(shuffled.prompt_D, shuffled.prompt_D[np.sort(first_P)[:count]])
        return shuffled.take(np.flatnonzero(held_D)), shuffled.take(np.flatnonzero(~held_D))


class OnDevice:
    """A base of dataclasses of tensors, with operations on all of them."""

    def to(self, device: torch.device) -> Self:
        """Copies to a device, asynchronously from pinned memory."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> Self:
        return self._map(Tensor.pin_memory)

    def copy_(self, other: Self) -> None:
        """Copies the content of another of the same sizes, asynchronously from pinned memory."""
        for name, value in vars(self).items():
            value.copy_(getattr(other, name), non_blocking=True)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(value.shape for value in vars(self).values())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: change(value) for name, value in vars(self).items()})


@dataclass(frozen=True)
class PackedBatch(OnDevice):
    """Rows of T tokens, each filled with consecutive documents. Padding is document -1."""

    token_RT: Tensor
    position_RT: Tensor
    document_RT: Tensor
    written_RT: Tensor

    def rows(self, first: int, count: int) -> PackedBatch:
        return self._map(lambda x: x[first : first + count])

    def padded(self, count: int) -> PackedBatch:
        """The batch with empty rows appended, up to `count`."""
        more = (0, 0, 0, count - len(self.token_RT))
        fill = {"document_RT": -1}
        return PackedBatch(**{name: F.pad(x, more, value=fill.get(name, 0)) for name, x in vars(self).items()})

    def documents(self) -> Iterator[Document]:
        """All documents, row by row."""
        for row in range(len(self.token_RT)):
            document = self.document_RT[row]
            for number in range(int(document.max()) + 1):
                inside = document == number
                yield Document(self.token_RT[row, inside].numpy(), self.written_RT[row, inside].numpy())


CHANGES = {
    "cut": "cut: longer than row_len {max_len}",
    "lost": "left out: the cut took all answers",
    "empty": "left out: the target wrote nothing",
    "short": "left out: answers of one token only",
    "bad": "left out: broken",
    "masked": "left out: the mask token occurs",
}
"""Changes of rows with their reasons."""


@dataclass
class Tally:
    """Number of the rows of some files, and places of those changed or left out, by the name of the change."""

    rows: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in CHANGES})

    def kinds(self, max_len: int) -> dict[str, list[str]]:
        """Changed and omitted rows, by the change and its reason."""
        return {CHANGES[name].format(max_len=max_len): places for name, places in self.places.items() if places}

    def summary(self, max_len: int) -> str:
        """One line per kind; empty if no row was changed."""
        kinds = self.kinds(max_len).items()
        return "\n".join(f"{len(places):,} of {self.rows:,} rows {kind} ({some(places)})" for kind, places in kinds)

    def listing(self, max_len: int) -> str:
        """One line per changed row."""
        kinds = self.kinds(max_len).items()
        return "".join(f"{place} {kind}\n" for kind, places in kinds for place in places)

    def names_all(self) -> bool:
        """True if the summary names every changed row."""
        return all(len(places) <= NAMED for places in self.places.values())


def read_documents(
    paths: Iterable[str | Path],
    max_len: int,
    vocab_size: int,
    *,
    mask_token: int | None = None,
    on_bad: OnBad = "stop",
    tally: Tally | None = None,
) -> Documents:
    """All rows of some files, those of a file in the order of their ids, which does not depend on the run that wrote
    them. Longer rows are cut. Rows without a token to train on are left out.

    Broken rows, and those with the mask token, are an error or left out. `tally` counts changes.
    """
    tally = Tally() if tally is None else tally
    masked, found = tally.places["masked"], []
    for file, path in enumerate(paths):
        for number, line in lines_of(Path(path)):
            where = f"{path}:{number}"
            kept = keep(parse_or_skip(line, where, vocab_size, on_bad), where, max_len, tally)
            if kept is not None and mask_token is not None and (kept.tokens == mask_token).any():
                masked.append(where)
            elif kept is not None:
                found.append((file, kept))
    if masked and on_bad == "stop":
        raise ValueError(
            f"the mask token {mask_token} occurs in {len(masked):,} rows of the data ({some(masked)});"
            " choose another head.mask_token, or leave such rows out with on_bad: skip"
        )
    if not found:
        raise ValueError("; ".join(("the data has no row to train on", *tally.summary(max_len).splitlines())))
    found.sort(key=lambda numbered: (numbered[0], numbered[1].id or ""))
    return Documents.join(found)


def parse_or_skip(line: str | None, where: str, vocab_size: int, on_bad: OnBad) -> Document | None:
    try:
        return parse(line, where, vocab_size)
    except ValueError as error:
        if on_bad == "stop":
            raise ValueError(f"{error}; fix it, or leave such rows out with on_bad: skip") from error
        return None


def keep(document: Document | None, where: str, max_len: int, tally: Tally) -> Document | None:
    """The part of a row to train on, if any."""
    tally.rows += 1
    if document is None:
        tally.places["bad"].append(where)
    elif not document.written.any():
        tally.places["empty"].append(where)
    elif not is_trainable(document):
        tally.places["short"].append(where)
    elif len(document.tokens) <= max_len:
        return document
    else:
        tally.places["cut"].append(where)
        cut = Document(document.tokens[:max_len], document.written[:max_len], document.id)
        if is_trainable(cut):
            return cut
        tally.places["lost"].append(where)
    return None


def is_trainable(document: Document) -> bool:
    """True if an answer has two tokens or more. A draft cannot shorten one of a single token: every round commits one
    token anyway."""
    return bool((document.written[1:] & document.written[:-1]).any())


def lines_of(path: Path) -> Iterator[tuple[int, str | None]]:
    """Lines with their numbers, without blank ones; None for one that is not UTF-8."""
    try:
        yield from text_lines(path)
    except OSError as error:
        raise ValueError(f"cannot read the data {path}: {error}") from error


def parse(line: str | None, where: str, vocab_size: int) -> Document:
    """A document from a row {"token_ids": [..], "spans": [[start, end], ..]} of `jetspec data regenerate`."""
    if line is None:
        raise ValueError(f"{where}: not UTF-8 text")
    try:
        raw = json.loads(line)
        tokens, spans = np.asarray(raw["token_ids"]), [(int(a), int(b)) for a, b in raw["spans"]]
        id = None if raw.get("id") is None else str(raw["id"])
    except KeyError:
        lacking = " and ".join(name for name in ("token_ids", "spans") if name not in raw)
        hint = "`jetspec data regenerate` makes such rows from prompts"
        raise ValueError(f"{where}: not a row of regenerated data: it lacks {lacking}; {hint}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
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
    return Document(tokens.astype(np.int64), written, id)


class PackedData:
    """Packed rows by number. Row `i` depends only on the documents and the seed, so a run can resume at any step.

    Every pass over the documents shuffles them anew and fills rows in that order.
    """

    def __init__(self, documents: Sequence[Document], row_len: int, seed: int) -> None:
        self.documents, self.row_len, self.seed = documents, row_len, seed
        self.passes: list[list[list[int]]] = []
        self.first_rows = [0]

    @property
    def rows_per_pass(self) -> int:
        return len(self._pass(0))

    @cached_property
    def digest(self) -> str:
        """A hash of all tokens and masks."""
        found = hashlib.blake2b(digest_size=8)
        for document in self.documents:
            found.update(document.tokens.tobytes())
            found.update(document.written.tobytes())
        return found.hexdigest()

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
            space = 0
            for index in order.tolist():
                size = len(self.documents[index].tokens)
                if size > space:
                    rows.append([])
                    space = self.row_len
                rows[-1].append(index)
                space -= size
            self.passes.append(rows)
            self.first_rows.append(self.first_rows[-1] + len(rows))
        return self.passes[number]


class Prefetch(Generic[T]):
    """Makes numbered items in a thread, each while the one before it is in use."""

    def __init__(self, make: Callable[[int], T], stride: int) -> None:
        self.make, self.stride = make, stride
        self.pool = ThreadPoolExecutor(1)
        self.next: tuple[int, Future[T]] | None = None

    def take(self, number: int) -> T:
        """Item `number`. The thread starts on item `number + stride` at once."""
        expected, future = self.next or (None, None)
        if future is None or expected != number:
            future = self.pool.submit(self.make, number)
        made = future.result()
        self.next = number + self.stride, self.pool.submit(self.make, number + self.stride)
        return made


def answer_spans(document: Document) -> list[tuple[int, int]]:
    """Spans [start, end) that the target wrote. The token before a start is the first anchor, so there must be one."""
    edges = np.flatnonzero(np.diff(document.written, prepend=False, append=False)).tolist()
    spans = ((max(start, 1), end) for start, end in zip(edges[::2], edges[1::2], strict=True))
    return [(start, end) for start, end in spans if start < end]
