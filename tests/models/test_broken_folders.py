"""A broken folder of a head, in any layout, is refused in one line that names the file and the fault."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.models.decoder import DecoderConfig
from jetspec.models.heads import load_any_head
from tests.models import test_eagle3_format as eagle3
from tests.models.test_config_keys import LAYOUTS, TARGET, write_layout
from tests.models.test_weights import Bomb

FOLDERS = [name for name in LAYOUTS if not name.startswith("rope_")]
each_layout = pytest.mark.parametrize("name", FOLDERS)


def refusal(folder: Path, target: DecoderConfig | None = None) -> str:
    with pytest.raises(ValueError) as error:
        load_any_head(folder, target)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def target_of(name: str) -> DecoderConfig:
    return eagle3.TARGET if "EAGLE-3" in name else TARGET


@each_layout
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_torn_file(name: str, file: str, kept: float, tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    whole = (tmp_path / file).read_bytes().rstrip(b"\n")
    (tmp_path / file).write_bytes(whole[: int(kept * len(whole))])
    assert file in refusal(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "3", "\x00", "{" * 10_000, '{"a": 1'])
def test_config_that_is_no_table(text: str, tmp_path: Path) -> None:
    write_layout("DFlash", tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refusal(tmp_path)


@each_layout
def test_missing_file(name: str, tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json" in refusal(tmp_path)


@each_layout
def test_each_tensor_is_needed_in_its_shape(name: str, tmp_path: Path) -> None:
    """But for copies of the target's."""
    write_layout(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)  # the first layer has several published prefixes
    copies = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d"}
    copies |= set() if "EAGLE" in name else {"lm_head.weight"}
    for stored in tensors.keys() - copies:
        rest = {key: value for key, value in tensors.items() if key != stored}
        for torn in (rest, rest | {stored: torch.cat((tensors[stored], tensors[stored][:1]))}):
            save_file(torn, file)
            message = refusal(tmp_path)
            assert stored.removeprefix("layers.0.") in message and str(file) in message
            assert "shape" in message or torn is rest


@each_layout
def test_missing_ids(name: str, tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    file = tmp_path / "config.json"
    keys = {"mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "num_target_layers"}
    missing = [{"mask_token_id"}] if name.endswith("P-EAGLE") else [keys - {"mask_token_id"}, keys]
    for gone in missing if "EAGLE-3" not in name else []:
        file.write_text(json.dumps(without(json.loads(file.read_text()), gone)))
        assert any(key in refusal(tmp_path) for key in gone)


def without(raw: Any, keys: set[str]) -> Any:
    if not isinstance(raw, dict):
        return raw
    return {key: without(value, keys) for key, value in raw.items() if key not in keys}


@each_layout
@pytest.mark.parametrize("change", [{"vocab_size": 41}, {"hidden_size": 20}, {"num_layers": 3}])
def test_head_for_another_target(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    load_any_head(tmp_path, target_of(name))
    assert "another model" in refusal(tmp_path, replace(target_of(name), **change))


@each_layout
def test_tap_of_the_last_layer_needs_its_form(name: str, tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    file, depths = tmp_path / "config.json", {"num_target_layers", "target_num_hidden_layers"}
    taps = load_any_head(tmp_path, target_of(name)).head_config.tap_layers
    target, raw = replace(target_of(name), num_layers=1 + max(taps)), without(json.loads(file.read_text()), depths)
    for form in (None, "raw", "normed"):
        file.write_text(json.dumps(raw | {"last_tap": form}))
        if form is None and "is_causal" not in raw:  # else JetSpec wrote it
            assert "it taps layer" in refusal(tmp_path, target) and "last_tap" in refusal(tmp_path, target)
        else:
            head = load_any_head(tmp_path, target).head_config
            assert head.last_tap == (form or "raw") and max(head.tap_layers) == max(taps) + (form == "normed")


@each_layout
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_code_in_a_pickle_is_not_run(name: str, file: str, tmp_path: Path) -> None:
    write_layout(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(pickle.dumps({"fc.weight": Bomb(tmp_path / "ran")}))
    assert "model.safetensors" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()
