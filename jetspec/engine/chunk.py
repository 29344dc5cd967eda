"""Prompt tokens of one prefill, packed for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jetspec.ops.transfer import upload
from jetspec.types import Request


class Chunk(NamedTuple):
    """Consecutive tokens of one row."""

    row: int
    first: int
    """Position of the first token."""
    tokens: list[int]

    @staticmethod
    def of(request: Request, count: int) -> Chunk:
        """The next `count` tokens of a prompt."""
        return Chunk(request.row, request.num_cached, request.tokens[request.num_cached : request.num_cached + count])


def pad(chunks: Sequence[Chunk], num_tokens: int, num_chunks: int, idle_row: int) -> list[Chunk]:
    """Pads to `num_tokens` tokens in `num_chunks` chunks, at least one more than given.

    Padding tokens form one chunk of the idle row behind the others; further chunks are empty.
    """
    missing = num_tokens - sum(len(chunk.tokens) for chunk in chunks)
    empty = [Chunk(idle_row, 0, [])] * (num_chunks - len(chunks) - 1)
    return [*chunks, Chunk(idle_row, 0, [0] * missing), *empty]


class ChunkTensors(NamedTuple):
    """Concatenated chunks."""

    position_T: Tensor
    token_T: Tensor
    row_T: Tensor
    start_B1: Tensor
    row_B: Tensor


@dataclass(frozen=True, eq=False)
class PackedChunks:
    """Concatenated chunks in one device tensor, so that they are uploaded by one copy, and their sizes on the host."""

    packed: Tensor
    num_tokens: int
    num_chunks: int
    longest: int
    """Upper bound of the tokens in a chunk."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device, longest: int | None = None) -> PackedChunks:
        lengths = [len(chunk.tokens) for chunk in chunks]
        packed = [
            *(chunk.first + i for chunk in chunks for i in range(len(chunk.tokens))),
            *(token for chunk in chunks for token in chunk.tokens),
            *(chunk.row for chunk in chunks for _ in chunk.tokens),
            *accumulate(lengths, initial=0),
            *(chunk.row for chunk in chunks),
        ]
        return cls(upload(packed, torch.int64, device), sum(lengths), len(chunks), longest or max(lengths))

    def copy_(self, source: PackedChunks) -> None:
        self.packed.copy_(source.packed)

    def unpack(self) -> ChunkTensors:
        T, B = self.num_tokens, self.num_chunks
        return ChunkTensors(*self.packed.split((T, T, T, B + 1, B)))
