"""Exported heads have the same meaning under the rules of each engine."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from typer.testing import CliRunner

from jetspec.commands.app import app
from jetspec.models.decoder import RopeConfig
from jetspec.models.draft_head import EdgeConfig, HeadConfig
from jetspec.models.eagle3_format import EAGLE3
from jetspec.models.export import Engine, chain_head, chain_kind, check_export, export_head
from jetspec.models.head_format import load_head, save_head
from jetspec.models.heads import load_any_head
from tests.models.head_paged import CAUSAL, LAYERS, random_head
from tests.models.head_paged import HEADS as ALL_HEADS
from tests.models.peers import TAPS, Peer
from tests.models.test_eagle3_format import PLAIN, TARGET, random_eagle3
from tests.models.test_head_format import Json, Tensors, edit_config
from tests.models.test_published_heads import assert_equal_to
from tests.models.test_weights import Bomb

HEADS = ALL_HEADS | {
    "dspark": replace(CAUSAL, causal=False, edge=EdgeConfig(6, False, 0.5), shifted=True),
    "dspark_windowed": replace(ALL_HEADS["windowed_bidirectional"], edge=EdgeConfig(6, False, 0.5), shifted=True),
    "dflash2_windowed": replace(ALL_HEADS["windowed_bidirectional"], edge=EdgeConfig(6, True, 0.0)),
    "all_windowed": replace(CAUSAL, layers=replace(LAYERS, windows=(5, 5, 5))),
    "dflash2": replace(CAUSAL, causal=False, edge=EdgeConfig(6, True, 0.0)),
}
REFUSED = {"shifted": "slots", "adapter": "adapts", "convolved": "convolutions"}
YARN = RopeConfig(theta=1000.0, kind="yarn", factor=4.0, original_len=32)

each_engine = pytest.mark.parametrize("engine", get_args(Engine))
each_head = pytest.mark.parametrize("name", HEADS)


@each_engine
@each_head
def test_exported_head_is_read_back_or_refused(engine: Engine, name: str, tmp_path: Path) -> None:
    head, folder = random_head(HEADS[name]), tmp_path / "head"
    config = HEADS[name]
    why = REFUSED.get(name)
    if engine == "speculators" and (config.causal or config.layers.windows):
        why = why or ("windows" if config.layers.windows else "causal")
    if name == "dspark_windowed":
        why = "windows"
    if why:
        with pytest.raises(ValueError, match=why):
            export_head(head, folder, engine, torch.float32, "owner/target")
        assert not folder.exists()
        return
    export_head(head, folder, engine, torch.float32, "owner/target")
    chain = chain_head(head, chain_kind(config, engine))
    again = load_head(folder)
    assert (again.edge is not None) == (chain_kind(config, engine) != "dflash")
    assert again.state_dict().keys() == chain.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), chain.parameters(), strict=True))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("edge", "kind"),
    [
        (None, "dflash"),
        (EdgeConfig(rank=6, gate=False, gate_bias=0.5), "dspark"),
        (EdgeConfig(rank=6, gate_bias=0.0), "dflash2"),
    ],
)
def test_speculators_own_module_computes_the_same(
    edge: EdgeConfig | None, kind: str, shifted: bool, tmp_path: Path
) -> None:
    config = replace(CAUSAL, causal=False, edge=edge, shifted=shifted, tap_layers=TAPS)
    if shifted and kind != "dspark":
        return
    head = random_head(config)
    export_head(head, tmp_path, "speculators", torch.float32, "owner/target")
    peer = Peer.load(kind, tmp_path)
    assert_equal_to(peer, tmp_path, head if kind != "dflash2" else None)


@pytest.mark.parametrize(
    ("engine", "change", "said"),
    [
        ("vllm", lambda c: c["dflash_config"].pop("causal"), r"vLLM 0\.26 would misread causal"),
        ("vllm", lambda c: c.update(is_causal=False), r"vLLM 0\.32 would misread causal"),
        ("vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 3]), None),
        ("vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2]), "misread tap_layers"),
        ("vllm", lambda c: c.update(rope_parameters=None), None),
        ("vllm", lambda c: c.update(rope_parameters={"rope_theta": 10.0}), "misread rope"),
        ("sglang", lambda c: c.pop("is_causal"), "SGLang would misread causal"),
        ("sglang", lambda c: c.pop("layer_types"), "SGLang would misread causal"),
        ("sglang", lambda c: c["dflash_config"].pop("causal"), None),
        ("speculators", lambda c: c.update(sliding_window_non_causal=False), "would misread causal"),
        ("speculators", lambda c: c.update(aux_hidden_state_layer_ids=[1, 2]), "read back"),
        ("speculators", lambda c: c.update(block_size=4), "read back"),
    ],
)
def test_check_finds_misread_properties(
    engine: Engine, change: Callable[[Json], object], said: str | None, tmp_path: Path
) -> None:
    config = replace(CAUSAL, causal=False) if engine == "speculators" else CAUSAL
    head, folder = random_head(config), tmp_path / "head"
    export_head(head, folder, engine, torch.float32, "owner/target")
    edit_config(folder, change)
    raw = json.loads((folder / "config.json").read_text())
    if said is None:
        check_export(raw, engine, head.head_config)
        return
    with pytest.raises(ValueError, match=said):
        check_export(raw, engine, head.head_config)


@pytest.mark.parametrize("rope", [RopeConfig(theta=1000.0), YARN])
def test_transformers_reads_both_rope_spellings(rope: RopeConfig, tmp_path: Path) -> None:
    config: HeadConfig = replace(CAUSAL, layers=replace(LAYERS, rope=rope))
    export_head(random_head(config), tmp_path / "head", "vllm", torch.float32)
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    for missing in ("rope_parameters", "rope_theta"):
        kept = {key: value for key, value in raw.items() if key not in (missing, "architectures")}
        found = dict(Qwen3Config(**kept).rope_parameters or {})
        assert found["rope_theta"] == 1000.0 and found["rope_type"] == rope.kind
        assert found.get("factor", 1.0) == rope.factor


@pytest.mark.parametrize("format", ["hf", "vllm", "speculators"])
def test_command_exports_a_head(format: str, tmp_path: Path) -> None:
    head = replace(HEADS["edge"], causal=format != "speculators")
    save_head(random_head(head), tmp_path / "head", torch.float32)
    words = ["export", str(tmp_path / "head"), "--format", format, "--out", str(tmp_path / "out"), "--target", "o/t"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out")
    assert ("edge term" in result.stderr) == (format != "hf")
    assert ("vllm serve" in result.stderr) == (format != "hf")


def write_pickle(folder: Path, tensors: Tensors, num_files: int = 1) -> None:
    """Moves the weights of a folder to pickles."""
    (folder / "model.safetensors").unlink()
    for i in range(num_files):
        part = {name: tensors[name] for name in sorted(tensors)[i::num_files]}
        file = "pytorch_model.bin" if num_files == 1 else f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin"
        torch.save(part, folder / file)


def convert(folder: Path, *words: str) -> str:
    """Returns the errors of the command."""
    result = CliRunner().invoke(app, ["export", str(folder), "--out", str(folder.parent / "out"), *words])
    assert (result.exit_code == 0) == (folder.parent / "out").exists()
    return "\n".join(line for line in result.stderr.splitlines() if not line.startswith("Writing"))


@pytest.mark.parametrize("has_taps", [False, True])
@pytest.mark.parametrize("num_files", [1, 2])
def test_pickled_eagle3_head_becomes_safetensors(num_files: int, has_taps: bool, tmp_path: Path) -> None:
    """Published configs name no tap layers."""
    folder, head = tmp_path / "head", random_eagle3(replace(PLAIN, tap_layers=(1, 3, 4)))
    EAGLE3.save(head, folder, torch.float32)
    write_pickle(folder, load_file(folder / "model.safetensors"), num_files)
    if not has_taps:
        unused = ("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_target_layers")
        edit_config(folder, lambda c: [c.pop(key) for key in unused])
    with pytest.raises(ValueError, match=f"jetspec export {folder} --format hf"):
        load_any_head(folder, TARGET)
    convert(folder, "--dtype", "float32")
    again = load_any_head(tmp_path / "out", TARGET)
    assert again.head_config.tap_layers == head.head_config.tap_layers
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_pickle_with_code_is_refused_unrun(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    EAGLE3.save(random_eagle3(PLAIN), folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    write_pickle(folder, tensors)
    file = folder / "pytorch_model.bin"
    whole, bomb = file.read_bytes(), {**tensors, "fc.weight": Bomb(tmp_path / "ran")}
    torch.save(bomb, file)
    zipped = file.read_bytes()
    damaged = [zipped, pickle.dumps(bomb), b"", whole[:1000], pickle.dumps([1]), pickle.dumps({"fc.weight": 1})]
    for content in damaged:
        file.write_bytes(content)
        message = convert(folder)
        assert str(file) in message and "\n" not in message
        assert not (tmp_path / "ran").exists()
    torch.save({name: tensors[name] for name in tensors if name != "norm.weight"}, file)
    assert "norm.weight" in convert(folder)
    file.unlink()
    assert "pytorch_model" in convert(folder)


def test_local_target_names_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for target, kinds in ((str(tmp_path / "target"), ["LlamaForCausalLM"]), ("owner/elsewhere", [])):
        export_head(random_head(HEADS["bidirectional"]), tmp_path / "head", "speculators", torch.float32, target)
        raw = json.loads((tmp_path / "head" / "config.json").read_text())
        assert raw["speculators_config"]["verifier"] == {"name_or_path": target, "architectures": kinds}


def test_speculators_needs_a_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --target"):
        export_head(random_head(HEADS["bidirectional"]), tmp_path / "head", "speculators", torch.float32)
