"""Small GGUF files for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    fields: Mapping[str, Any],
    architecture: str = "llama",
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """`fields` are prefixed with the architecture, `extra` are full keys; `types` marks tensors given as raw blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in ({f"{architecture}.{key}": value for key, value in fields.items()} | dict(extra or {})).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
