"""The GGUF reader: tensor types, models, damaged and hostile files."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from jetspec.models.describe import describe
from jetspec.models.families import FAMILIES
from jetspec.models.gguf import CHUNK, READABLE, GGUFFile
from jetspec.models.weights import load_decoder, load_target, open_model
from tests.models.gguf_files import write_gguf
from tests.models.test_decoder import CASES, assert_same, make_model
from tests.models.test_tokenizer import gguf_metadata


def raw_blocks(kind: Type, rows: int, width: int) -> np.ndarray:
    """Bytes of a quantised tensor. Small exponents keep every half-precision scale finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (rows, width // block * size), dtype=np.uint8)
    return np.where((raw & 0x7C) == 0x7C, raw & 0x3F, raw).astype(np.uint8)


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_type_equals_the_gguf_package(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind = Type[name]
    rows, width = 3, CHUNK // 2 + 256  # more than one chunk, ending inside one
    blocks = raw_blocks(kind, rows, width)
    if kind in (Type.F32, Type.F16):
        blocks = np.random.default_rng(0).normal(size=(rows, width)).astype(kind.name.replace("F", "float"))
    path = write_gguf(tmp_path / "a.gguf", {"x": blocks}, {}, types={"x": kind})
    file = GGUFFile(path)
    assert file.shape("x") == (rows, width)
    out = torch.empty(rows, width, dtype=dtype)
    file.read("x", out)
    expected = torch.from_numpy(gguf.dequantize(blocks, kind)).to(dtype)
    torch.testing.assert_close(out, expected, atol=0, rtol=0, equal_nan=True)


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permutes q or k of a llama model as llama.cpp's converter does."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def to_gguf(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Converts a transformers model to the tensors of llama.cpp's converter."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        if ".experts" in name:
            continue
        array = value.numpy().copy()
        if architecture == "llama" and re.search(r"self_attn\.[qk]_proj", name):
            array = permute(array, 4 if "q_proj" in name else 2)
        tensors[str(names.get_name(name, try_suffixes=(".weight", ".bias")))] = array
    for i, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            gate, up = (half.numpy().copy() for half in block.mlp.experts.gate_up_proj.detach().chunk(2, 1))
            tensors[f"blk.{i}.ffn_gate_exps.weight"] = gate
            tensors[f"blk.{i}.ffn_up_exps.weight"] = up
            tensors[f"blk.{i}.ffn_down_exps.weight"] = block.mlp.experts.down_proj.detach().numpy().copy()
    return tensors


def fields_of(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the keys that llama.cpp's converter writes for a model."""
    c: Any = model.config
    head_dim, rope = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, c.rope_parameters
    fields = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "expert_count": getattr(c, "num_experts", None),
        "expert_used_count": getattr(c, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(c, "moe_intermediate_size", None),
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": rope["rope_type"] if "factor" in rope else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }
    return {key: value for key, value in fields.items() if value is not None}


def make_pair(case: str) -> tuple[PreTrainedModel, dict[str, np.ndarray], dict[str, Any], str]:
    model = make_model(*CASES[case])
    architecture = FAMILIES[CASES[case][0]].architecture
    tensors = to_gguf(model, architecture)
    if model.config.tie_word_embeddings:
        del tensors["output.weight"]
    return model, tensors, fields_of(model), architecture


PLAIN = ("llama", "llama tied", "llama biases", "llama head size", "llama linear", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("case", [*PLAIN, "qwen3 yarn", "qwen3_moe"])
def test_gguf_equals_its_source_model(case: str, tmp_path: Path) -> None:
    model, tensors, fields, architecture = make_pair(case)
    assert_same(write_gguf(tmp_path / "a.gguf", tensors, fields, architecture), model)


def test_rope_factors_of_llama3(tmp_path: Path) -> None:
    """Converters store the frequencies of llama 3 as divisors of the plain ones."""
    parameters = {"rope_theta": 10_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    model = make_model("llama", {"rope_parameters": parameters})
    plain = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 2
    plain_fields = {key: value for key, value in fields_of(model).items() if not key.startswith("rope.scaling")}
    tensors = to_gguf(model, "llama") | {"rope_freqs.weight": divisors}
    assert_same(write_gguf(tmp_path / "a.gguf", tensors, plain_fields), model)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    _, tensors, fields, architecture = make_pair("llama")
    extra = {"tokenizer.ggml.tokens": ["a", "b"], "general.alignment": 32, "some.flag": True}
    path = tmp_path_factory.mktemp("intact") / "a.gguf"
    return write_gguf(path, tensors, fields, architecture, extra=extra).read_bytes()


def assert_only_value_errors(path: Path, data: bytes) -> None:
    """Checks that a file is read or refused in one line, with bounded memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        open_model(path)
        load_decoder(open_model(path))
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(data) + (1 << 22)


@given(data=st.data())
@settings(max_examples=60)
def test_truncated_files(data: st.DataObject, intact: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    end = data.draw(st.integers(0, len(intact) - 1))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(intact[:end])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        GGUFFile(path)


@given(data=st.data())
@settings(max_examples=150)
def test_corrupted_files(data: st.DataObject, intact: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged = bytearray(intact)
    end_of_header = len(intact) - sum(tensor.nbytes for tensor in make_pair("llama")[1].values())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, end_of_header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        damaged[place : place + width] = data.draw(st.binary(min_size=width, max_size=width))
    assert_only_value_errors(tmp_path_factory.getbasetemp() / "bad.gguf", bytes(damaged))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: list[bytes], fields: list[bytes], version: int = 3, magic: bytes = b"GGUF") -> bytes:
    start = magic + struct.pack("<IQQ", version, len(tensors), len(fields))
    return start + b"".join(fields) + b"".join(tensors)


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)


def alignment(value: int) -> bytes:
    return text(b"general.alignment") + struct.pack("<II", 4, value)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "magic": (header([], [], magic=b"GGML"), "not a GGUF file"),
    "version": (header([], [], version=1), "version 1"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "more than fit"),
    "long name": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 40) + bytes(40), "name of"),
    "long text": (header([], [text(b"k") + struct.pack("<IQ", 8, 1 << 62)]), "ends inside"),
    "long array": (header([], [text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62)]), "more than fit"),
    "nested array": (header([], [text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(16)]), "unsupported type 9"),
    "value type": (header([], [text(b"k") + struct.pack("<IQ", 99, 0)]), "unsupported type 99"),
    "not text": (header([], [text(b"\xff\xfe") + struct.pack("<II", 4, 0)]), "not UTF-8"),
    "same key": (header([], [alignment(32)] * 2), "twice"),
    "same tensor": (header([tensor(b"x", [8])] * 2, []) + bytes(256), "twice"),
    "no dimensions": (header([tensor(b"x", []) + bytes(32)], []), "0 dimensions"),
    "many dimensions": (header([tensor(b"x", [1] * 5)], []), "5 dimensions"),
    "zero dimension": (header([tensor(b"x", [8, 0])], []), "impossible"),
    "huge dimensions": (header([tensor(b"x", [1 << 62, 1 << 62])], []), "may be incomplete"),
    "partial block": (header([tensor(b"x", [33], kind=8)], []) + bytes(256), "impossible"),
    "removed type": (header([tensor(b"x", [32], kind=4)], []) + bytes(256), "stores tensors as type 4;"),
    "other type": (header([tensor(b"x", [256], kind=10)], []) + bytes(256), "stores tensors as Q2_K;"),
    "alignment": (header([], [alignment(33)]), "alignment"),
    "unaligned": (header([tensor(b"x", [8], offset=4)], []) + bytes(256), "unaligned"),
    "far away": (header([tensor(b"x", [8], offset=1 << 40)], []) + bytes(256), "ends inside tensor x"),
    "overlap": (header([tensor(b"x", [16]), tensor(b"y", [8], offset=32)], []) + bytes(512), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": 4}, r"missing: blk\.3\.attn_norm\.weight"),
        ({"embedding_length": 64}, "has shape"),
        ({"block_count": 4_000_000}, "block_count"),
        ({"attention.head_count": 0}, "head_count"),
        ({"rope.dimension_count": 4}, "rope.dimension_count"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"expert_count": 8}, "mixtures"),
    ],
)
def test_header_and_tensors_disagree(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, tensors, intact_fields, _ = make_pair("llama")
    path = write_gguf(tmp_path / "a.gguf", tensors, intact_fields | fields)
    with pytest.raises(ValueError, match=message):
        load_decoder(open_model(path))


def test_target_of_a_file(tmp_path: Path) -> None:
    vocabulary = gguf_metadata()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    model = make_model("llama", {"vocab_size": len(tokens)})
    path = write_gguf(tmp_path / "a.gguf", to_gguf(model, "llama"), fields_of(model), extra=vocabulary)
    target = load_target(path)
    assert target.eos_tokens == {1}
    assert target.tokenizer.decode(target.tokenizer.encode("low lower")) == "low lower"
    assert describe(path)["stored_as"] == {"F32": len(GGUFFile(path).tensors)}


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mamba' is not supported; choose one of"):
        open_model(write_gguf(tmp_path / "a.gguf", {}, {}, "mamba"))
    with pytest.raises(ValueError, match=r"b\.gguf: the GGUF vocabulary is empty"):
        load_target(write_gguf(tmp_path / "b.gguf", *make_pair("llama")[1:]))
