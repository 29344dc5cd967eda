from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.models.decoder import RopeConfig
from jetspec.models.describe import describe
from jetspec.models.draft_head import HeadConfig
from jetspec.models.head_format import check_fits, load_head, save_head
from jetspec.models.heads import load_any_head
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.models.hub import HEADS as HEADS_FOLDER
from tests.models.gguf_files import write_gguf
from tests.models.head_paged import CAUSAL, HEADS, LAYERS, random_head

Json = dict[str, Any]
Tensors = dict[str, Tensor]

each_head = pytest.mark.parametrize("config", HEADS.values(), ids=HEADS.keys())
TARGET = replace(LAYERS, family="llama", num_layers=6, rope=RopeConfig(), qk_norm=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(random_head(CAUSAL), tmp_path / "head", torch.float32)
    return tmp_path / "head"


def edit_config(folder: Path, change: Callable[[Json], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        load_head(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@each_head
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_head_is_loaded_again(config: HeadConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    head = random_head(config)
    save_head(head, tmp_path / "head", dtype)
    back = load_head(tmp_path / "head")
    assert back.head_config == config
    assert back.state_dict().keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert back.state_dict()[name].dtype == dtype
        assert torch.equal(back.state_dict()[name], value.to(dtype)), name
    assert torch.equal(back.inv_freq, head.inv_freq)
    assert not back.training and not any(parameter.requires_grad for parameter in back.parameters())


ROPES = [
    RopeConfig(5e5, "linear", 2.0),
    RopeConfig(5e5, "llama3", 8.0, 64, low_freq_factor=1.5, high_freq_factor=3.0),
    RopeConfig(5e5, "yarn", 4.0, 32, beta_fast=16.0, beta_slow=2.0),
    RopeConfig(5e5, "yarn", 4.0, 32, attention_factor=1.25),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_stretched_rope_is_read_back(rope: RopeConfig, tmp_path: Path) -> None:
    config = replace(CAUSAL, layers=replace(LAYERS, rope=rope))
    save_head(random_head(config), tmp_path / "head")
    assert load_head(tmp_path / "head").head_config == config


def test_saving_the_shipped_head_reproduces_its_files(tmp_path: Path) -> None:
    """Published heads stay readable by other programs."""
    folder = HEADS_FOLDER / DEFAULT_MODEL
    save_head(load_head(folder), tmp_path / "head", torch.int8)
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    saved, shipped = (load_file(path / "model.safetensors") for path in (tmp_path / "head", folder))
    assert saved.keys() == shipped.keys()
    assert all(torch.equal(value, shipped[name]) for name, value in saved.items())


def test_published_names_of_the_adapter(tmp_path: Path) -> None:
    save_head(random_head(HEADS["adapter"]), tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text())["dflash_config"]["target_hidden_size"] == 10
    assert load_file(tmp_path / "head" / "model.safetensors")["hidden_dim_adapter.proj.weight"].shape == (16, 10)


def stack(tensors: Tensors, parts: tuple[str, ...], name: str) -> Tensors:
    for i in range(3):
        pieces = [tensors.pop(f"layers.{i}.{part}.weight") for part in parts]
        tensors[f"layers.{i}.{name}.weight"] = torch.cat(pieces)
    return tensors


def rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new if name == old else name: value for name, value in tensors.items()}


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
SPELLINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "prefix": lambda t: {f"model.{name}": value for name, value in t.items()},
    "encoder": lambda t: rename(
        rename(t, "fc.weight", "encoder.fc.weight"), "hidden_norm.weight", "encoder.output_norm_enc.weight"
    ),
    "stacked_qkv": lambda t: stack(t, QKV, "self_attn.qkv_proj"),
    "stacked_mlp": lambda t: stack(t, ("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    "borrowed": lambda t: t | {"embed_tokens.weight": torch.ones(37, 16), "lm_head.weight": torch.ones(37, 16)},
    "identity": lambda t: t | {"d2t": torch.zeros(37, dtype=torch.int64), "t2d": torch.ones(37, dtype=torch.bool)},
    "borrowed_with_prefix": lambda t: t | {"model.embed_tokens.weight": torch.ones(37, 16)},
}


@pytest.mark.parametrize("change", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_tensor_spellings_are_read(change: Callable[[Tensors], Tensors], folder: Path) -> None:
    edit_tensors(folder, change)
    back, head = load_head(folder), random_head(CAUSAL)
    assert all(torch.equal(back.state_dict()[name], value) for name, value in head.state_dict().items())


def test_shards_are_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    assert torch.equal(load_head(folder).fc.weight, random_head(CAUSAL).fc.weight)


def nest(config: Json, key: str, section: str) -> None:
    config[section] = {**(config[section] or {}), key: config.pop(key)}


def new_rope(config: Json) -> None:
    del config["rope_scaling"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}


CONFIG_SPELLINGS: dict[str, Callable[[Json], object]] = {
    "new_rope": new_rope,
    "block_size_inside": lambda c: nest(c, "block_size", "dflash_config"),
    "other_architecture": lambda c: c.update(architectures=["Qwen3DFlashDraftModel"]),
    "equal_target_size": lambda c: c["dflash_config"].update(target_hidden_size=16),
    "unknown_code": lambda c: c.update(auto_map={"AutoModel": "evil.Model"}),
    "no_layer_types": lambda c: c.pop("layer_types"),
    "not_shifted": lambda c: c["dflash_config"].update(sample_from_anchor=False),
}


@pytest.mark.parametrize("change", CONFIG_SPELLINGS.values(), ids=CONFIG_SPELLINGS.keys())
def test_config_spellings_are_read(change: Callable[[Json], object], folder: Path) -> None:
    edit_config(folder, change)
    assert load_head(folder).head_config == CAUSAL


def test_missing_tap_layers_have_defaults(folder: Path) -> None:
    def change(config: Json) -> None:
        del config["dflash_config"]["target_layer_ids"]
        config["num_target_layers"] = 36

    edit_config(folder, change)
    edit_tensors(folder, lambda t: t | {"fc.weight": torch.ones(16, 48)})
    assert load_head(folder).head_config.tap_layers == (1, 17, 33)
    edit_config(folder, lambda c: c.pop("num_target_layers"))
    assert "target_layer_ids" in refusal(folder)


def set_flags(config: Json, flags: dict[str, bool]) -> None:
    for place in (config, config["dflash_config"]):
        for key in ("causal_head", "causal", "is_causal"):
            place.pop(key, None)
    for key, value in flags.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value


CAUSAL_FLAGS = ["dflash_config.causal_head", "dflash_config.causal", "is_causal"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags=st.dictionaries(st.sampled_from(CAUSAL_FLAGS), st.booleans()))
def test_causal_flag_in_any_spelling(flags: dict[str, bool], folder: Path) -> None:
    edit_config(folder, lambda c: set_flags(c, flags))
    if len(set(flags.values())) > 1:
        message = refusal(folder)
        assert "contradictory" in message and all(key in message for key in flags)
    else:
        assert load_head(folder).head_config.causal is any(flags.values())


@pytest.mark.parametrize("flags", [{}, {"is_causal": False}, {"is_causal": True}])
def test_windows_are_causal_without_a_flag(flags: dict[str, bool], tmp_path: Path) -> None:
    save_head(random_head(HEADS["windowed"]), tmp_path / "head")
    edit_config(tmp_path / "head", lambda c: set_flags(c, flags))
    config = load_head(tmp_path / "head").head_config
    expected = (True, False, True) if not flags else (flags["is_causal"],) * 3
    assert config.causal_layers == expected


@pytest.mark.parametrize("key", ["shift_label", "draft_shift", "sample_from_anchor"])
@pytest.mark.parametrize("section", ["", "dflash_config"])
def test_shifted_flag_in_any_spelling(key: str, section: str, folder: Path) -> None:
    edit_config(folder, lambda c: (c[section] if section else c).update({key: True}))
    config = load_head(folder).head_config
    assert config.shifted and config.depth == 5


FOREIGN: dict[str, Json] = {
    "DSpark of another family": {"architectures": ["Gemma4DSparkModel"], "markov_rank": 256},
    "speculators (mtp)": {"speculators_model_type": "mtp"},
    "speculators (unheard of)": {"speculators_model_type": "unheard of", "architectures": ["DFlashDraftModel"]},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_kinds_of_heads_are_refused(name: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(FOREIGN[name]))
    message = refusal(folder)
    assert name in message and "not supported" in message
    assert describe(folder) == {"kind": "head", "path": str(folder), "head_kind": name, "problem": message}


def test_other_files_are_refused(folder: Path) -> None:
    for kind in ("dflash-draft", "eagle3"):
        file = write_gguf(folder.parent / f"{kind}.gguf", {}, {}, kind)
        assert kind in refusal(file) and describe(file)["head_kind"] == f"GGUF ({kind})"
    assert f"{folder.parent} is not a draft head: did you mean {folder}?" in refusal(folder.parent)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    for target in (folder, write_gguf(folder.parent / "target.gguf", {}, {})):
        assert "not a draft head" in refusal(target)


def test_model_name_loads_its_shipped_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("jetspec.models.hub.HEADS", folder.parent)
    monkeypatch.setattr("jetspec.models.hub.DEFAULT_MODEL", folder.name)
    for load in (load_head, load_any_head):
        assert torch.equal(load(folder.name).fc.weight, random_head(CAUSAL).fc.weight)


WINDOWED = {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}
NONSENSE: dict[str, Callable[[Json], object]] = {
    "dflash_config.rms_norm_eps": lambda c: c["dflash_config"].update(rms_norm_eps=0.5),
    "dflash_config.layer_types": lambda c: c["dflash_config"].update(layer_types=["full_attention"] * 3),
    "dflash_config.rope_theta": lambda c: c["dflash_config"].update(rope_theta=77.0),
    "use_sliding_window is not true": lambda c: c.update(WINDOWED, sliding_window=8, use_sliding_window=False),
    "use_sliding_window": lambda c: c.update(WINDOWED, sliding_window=8, use_sliding_window=None),
    "num_hidden_layers": lambda c: c.update(num_hidden_layers=-1),
    "rope_theta": lambda c: c.pop("rope_theta"),
    "block_size": lambda c: c.update(block_size=1),
    "mask_token_id": lambda c: c["dflash_config"].update(mask_token_id=37),
    "target_layer_ids": lambda c: c["dflash_config"].update(target_layer_ids=[1, -2]),
    "dflash_config": lambda c: c.update(dflash_config=[1]),
    "layer_types": lambda c: c.update(WINDOWED, layer_types=["sliding_attention"] * 2, sliding_window=8),
    "sliding_window": lambda c: c.update(WINDOWED),
    "sliding_attention": lambda c: c.update(WINDOWED, layer_types=["chunked_attention"] * 3, sliding_window=8),
    "rank": lambda c: c["dflash_config"].update(edge={"rank": 0}),
    "gate": lambda c: c["dflash_config"].update(edge={"rank": 4, "gate": 1}),
    "use_swa": lambda c: c["dflash_config"].update(use_swa=True),
    "silu": lambda c: c.update(hidden_act="gelu"),
    "is_causal": lambda c: set_flags(c, {"is_causal": "yes"}),  # type: ignore[dict-item]
    "contradictory": lambda c: c["dflash_config"].update(shift_label=True, draft_shift=False),
}


@pytest.mark.parametrize("key", NONSENSE)
def test_invalid_config_is_refused(key: str, folder: Path) -> None:
    edit_config(folder, NONSENSE[key])
    message = refusal(folder)
    assert key in message and message.startswith(f"{folder / 'config.json'}: ")


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "unknown": (lambda t: t | {"layers.0.attention_conv.base_kernel": torch.ones(2)}, "attention_conv.base_kernel"),
    "another_layer": (lambda t: t | {"layers.3.mlp.up_proj.weight": torch.ones(24, 16)}, "layers.3.mlp.up_proj"),
    "dtype": (lambda t: t | {"norm.weight": torch.ones(16, dtype=torch.int32)}, "norm.weight is stored as I32"),
    "twice": (lambda t: t | {"model.norm.weight": torch.ones(16)}, "norm.weight is stored twice"),
    "edge": (lambda t: t | {"edge.gate.weight": torch.ones(6, 16)}, "edge.gate.weight"),
    "embedding": (lambda t: t | {"embed_tokens.weight": torch.ones(3, 3)}, "embed_tokens.weight has shape (3, 3)"),
    "reduced": (lambda t: t | {"lm_head.weight": torch.ones(20, 16)}, "lm_head.weight has shape (20, 16)"),
    "norm": (lambda t: t | {"verifier_norm.weight": torch.ones(37)}, "verifier_norm.weight has shape"),
    "map": (lambda t: t | {"d2t": torch.arange(20)}, "d2t has shape"),
    "reordered": (lambda t: t | {"d2t": torch.tensor([1, -1] + [0] * 35)}, "d2t maps tokens to others"),
    "drafted": (lambda t: t | {"t2d": torch.arange(37) < 20}, "t2d contradict"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_mismatching_tensors_are_refused(name: str, folder: Path) -> None:
    change, words = DAMAGE[name]
    edit_tensors(folder, change)
    message = refusal(folder)
    assert words in message and str(folder if name == "twice" else folder / "model.safetensors") in message


@each_head
def test_description(config: HeadConfig, tmp_path: Path) -> None:
    head = random_head(config)
    save_head(head, tmp_path / "head")
    facts = describe(tmp_path / "head")
    assert (facts["kind"], facts["head_kind"]) == ("head", "DFlash") and "problem" not in facts
    assert facts["layout"] == ("anchor-first" if config.shifted else "fill-in")
    assert facts["tap_layers"] == list(config.tap_layers)
    assert facts["format"].startswith("JetSpec" if config.causal else "DFlash")
    assert facts["format"].endswith("edges") is (config.edge is not None)
    assert facts["parameters"] == sum(parameter.numel() for parameter in head.parameters())
    assert facts["depth"] == config.depth
    json.dumps(facts)


def test_all_misfits_are_named(folder: Path) -> None:
    assert load_head(folder, TARGET, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError) as error:
        load_head(folder, replace(TARGET, hidden_size=32, vocab_size=30, num_layers=2))
    message = str(error.value)
    assert "\n" not in message
    assert all(words in message for words in ("hidden size", "vocabulary", "made for 6", "taps layer", "mask token"))
    assert "states of size 10" in " ".join(check_fits(HEADS["adapter"], TARGET))


def test_saving_replaces_only_a_head(folder: Path) -> None:
    head = random_head(CAUSAL, seed=5)
    save_head(head, folder, torch.float32)
    assert torch.equal(load_head(folder).fc.weight, head.fc.weight)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        save_head(head, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        save_head(head, folder / "notes.txt")


def test_failed_save_leaves_the_old_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file = os.replace

    def fail_to_swap(source: Path, destination: Path) -> None:
        if source.name.endswith(".new"):
            raise OSError("no space left on device")
        replace_file(source, destination)

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("jetspec.files.os.replace", fail_to_swap)
    with pytest.raises(OSError, match="no space"):
        save_head(random_head(CAUSAL, seed=5), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_system_error_is_an_oserror(tmp_path: Path) -> None:
    """The file size limit applies to a whole process, hence the subprocess."""
    script = f"""
import resource
from jetspec.models.head_format import save_head
from tests.models.head_paged import CAUSAL, random_head
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_head(random_head(CAUSAL), {str(tmp_path / "head")!r})
except OSError as error:
    print(error.strerror, error.filename.endswith("model.safetensors"))
"""
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large True\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_head(random_head(CAUSAL), tmp_path / "head", card="A head.")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()} == {0o666 & ~umask}


def test_two_window_sizes_are_refused(tmp_path: Path) -> None:
    two_windows = replace(CAUSAL, layers=replace(LAYERS, windows=(2, 3, None)))
    with pytest.raises(ValueError, match="single size"):
        save_head(random_head(two_windows), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_int8_error_is_half_a_step(tmp_path: Path) -> None:
    head = random_head(HEADS["edge"])
    save_head(head, tmp_path / "wide")
    save_head(head, tmp_path / "narrow", dtype=torch.int8)
    again = load_head(tmp_path / "narrow")
    for (name, value), (_, stored) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        step = value.detach().abs().amax(-1, keepdim=True) / 127
        assert ((stored - value.detach()).abs() <= 0.51 * step + 1e-7).all(), name
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("narrow", "wide")]
    assert sizes[0] < sizes[1]
    edit_tensors(tmp_path / "narrow", lambda t: {name: t[name] for name in t if name != "fc.weight_scale"})
    assert "fc.weight_scale" in refusal(tmp_path / "narrow")
