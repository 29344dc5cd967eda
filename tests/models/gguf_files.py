"""Small GGUF files for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    fields: Mapping[str, Any] = LLAMA,
    architecture: str = "llama",
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """`fields` are prefixed with the architecture, `extra` are full keys; `types` marks tensors given as raw blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in ({f"{architecture}.{key}": value for key, value in fields.items()} | dict(extra or {})).items():
        add_value(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
