"""Strict reader of GGUF files.

Model files are untrusted. Every count, length and offset is checked against the file size before any allocation, so
that a damaged or hostile file causes one clear error and uses no memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

MAX_NAME = 1 << 16
MAX_DIMS = 4
CHUNK = 1 << 17
"""Numbers dequantised at a time: a multiple of all block sizes that fits the CPU cache."""

STRING, ARRAY = 8, 9
KINDS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
SCALARS = {number: np.dtype(kind) for number, kind in enumerate(KINDS) if kind is not None}
TYPES = {type.value: type for type in GGMLQuantizationType}


READABLE = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16")
"""Storage formats, by their names in the gguf package."""
PLAIN: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS: dict[str, torch.dtype] = {"I32": torch.int32, "I64": torch.int64}
"""Formats of maps between vocabularies, which are no weights."""


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor. `shape` is in torch's order, the contiguous dimension last."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """Bytes from the start of the data section."""
    num_bytes: int

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        """Name of the type of the dequantised tensor. Like `get_shape` it is spelled as in safetensors."""
        return self.type.name if self.type.name in PLAIN | INTEGERS else "F32"


class GGUFFile:
    """Metadata and tensors of a file, which is memory-mapped; tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        cursor = _Cursor(self._data, path)
        if cursor.take(4) != b"GGUF":
            raise cursor.error("is not a GGUF file")
        version = cursor.integer(4)
        if version not in (2, 3):
            raise cursor.error(f"has GGUF version {version}; 2 and 3 can be read")
        num_tensors = cursor.count(least_bytes=32, what="tensors")
        num_keys = cursor.count(least_bytes=13, what="metadata keys")
        self.metadata: dict[str, Any] = cursor.table(num_keys, cursor.value)
        self.tensors: dict[str, TensorInfo] = cursor.table(num_tensors, cursor.tensor_info)
        self._data_start = self._check_offsets(cursor)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, out: Tensor) -> None:
        """Dequantises a tensor into `out`, which has its shape and any floating dtype."""
        info = self.tensors[name]
        if info.type.name in INTEGERS and out.is_floating_point():
            raise ValueError(f"tensor {name} is stored as {info.type.name}; {', '.join(READABLE)} can be read")
        is_direct = out.is_contiguous() and out.device.type == "cpu"
        flat = (out if is_direct else torch.empty(info.shape, dtype=out.dtype)).view(-1)
        data = np.frombuffer(self._data, np.uint8, info.num_bytes, self._data_start + info.offset)
        step = CHUNK * info.num_bytes // len(flat)
        for chunk, part in zip(flat.split(CHUNK), range(0, info.num_bytes, step), strict=True):
            chunk.copy_(_decode(data[part : part + step], info.type))
        if not is_direct:
            out.copy_(flat.view(info.shape))

    def _check_offsets(self, cursor: _Cursor) -> int:
        """Checks that tensors are inside the file, aligned and disjoint. Returns the start of the data section."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise cursor.error(f"has alignment {alignment}, which is not a power of two")
        start = -(-cursor.offset // alignment) * alignment
        end = 0
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if info.offset % alignment:
                raise cursor.error(f"has tensor {name} at an unaligned offset")
            if info.offset < end:
                raise cursor.error(f"has tensor {name} overlapping another")
            end = info.offset + info.num_bytes
            if start + end > cursor.size:
                raise cursor.error(f"ends inside tensor {name}; the download may be incomplete")
        return start


class _Cursor:
    """Reads the header forward, never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.offset = data, path, len(data), 0

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.path} {what}")

    def advance(self, num_bytes: int) -> int:
        """Advances past the next bytes and returns their offset."""
        start = self.offset
        if num_bytes > self.size - start:
            raise self.error("ends inside its header; the download may be incomplete")
        self.offset = start + num_bytes
        return start

    def take(self, num_bytes: int) -> bytes:
        start = self.advance(num_bytes)
        return self.data[start : start + num_bytes]

    def integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def count(self, least_bytes: int, what: str) -> int:
        """Reads a number of items of at least so many bytes each."""
        count = self.integer(8)
        if count * least_bytes > self.size - self.offset:
            raise self.error(f"claims {count} {what}, more than fit into it")
        return count

    def string(self, longest: int | None = None) -> str:
        length = self.integer(8)
        if longest is not None and length > longest:
            raise self.error(f"has a name of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"has a text that is not UTF-8, near byte {self.offset}") from error

    def table(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            name = self.string(longest=MAX_NAME)
            if name in entries:
                raise self.error(f"has {name} twice")
            entries[name] = read()
        return entries

    def value(self) -> Any:
        """Reads a number or text, or a list of them."""
        kind = self.integer(4)
        is_array = kind == ARRAY
        if is_array:
            kind = self.integer(4)
        if kind != STRING and kind not in SCALARS:
            raise self.error(f"has a value of unsupported type {kind}")
        width = 8 if kind == STRING else SCALARS[kind].itemsize
        count = self.count(width, what="values") if is_array else 1
        if kind == STRING:
            found = [self.string() for _ in range(count)]
        else:
            found = np.frombuffer(self.data, SCALARS[kind], count, self.advance(count * width)).tolist()
        return found if is_array else found[0]

    def tensor_info(self) -> TensorInfo:
        num_dims = self.integer(4)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(f"has a tensor with {num_dims} dimensions")
        shape = tuple(self.integer(8) for _ in range(num_dims))[::-1]
        kind, offset = self.integer(4), self.integer(8)
        type = TYPES.get(kind)
        if type is None or type.name not in (*READABLE, *INTEGERS):
            stored = type.name if type else f"type {kind}"
            raise self.error(f"stores tensors as {stored}; {', '.join(READABLE)} can be read")
        block, num_bytes = GGML_QUANT_SIZES[type]
        if min(shape) < 1 or shape[-1] % block:
            raise self.error(f"has a tensor with impossible dimensions {shape}")
        return TensorInfo(shape, type, offset, prod(shape) // block * num_bytes)


def _decode(raw: np.ndarray, type: GGMLQuantizationType) -> Tensor:
    if (dtype := (PLAIN | INTEGERS).get(type.name)) is not None:
        return torch.from_numpy(raw.copy()).view(dtype)
    return torch.from_numpy(dequantize(raw[None], type)[0])
