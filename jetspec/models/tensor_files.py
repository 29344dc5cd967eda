"""Safetensors and JSON files of a model's folder. Nothing in a folder is ever executed: no pickle, no code."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetspec.models.gguf import PLAIN

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class TensorFiles:
    """Tensors of safetensors files by name. Headers are read when a file is added, tensors on demand."""

    dtypes: Mapping[str, torch.dtype] = PLAIN
    """Storage types that can be read."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Any, str]] = {}
        """Per tensor, the open file and the name in it."""

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, whose type can be read."""
        self.dtype(name)
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        kind = self._slice(name).get_dtype()
        if kind not in self.dtypes:
            raise ValueError(f"tensor {name} is stored as {kind}; {', '.join(self.dtypes)} can be read")
        return self.dtypes[kind]

    def tensor(self, name: str) -> Tensor:
        file, stored = self.entries[name]
        return file.get_tensor(stored)

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.tensor(name))

    def _slice(self, name: str) -> Any:
        file, stored = self.entries[name]
        try:
            return file.get_slice(stored)
        except SafetensorError as error:
            raise ValueError(f"tensor {name} is missing, though the index names it") from error


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read; the download may be incomplete ({error})") from error


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the usual permissions. Failures of the system are an OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error
    path.chmod(mode)  # safetensors restricts it to the owner


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold a table")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Puts the path in front of a ValueError that does not contain it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error
