"""Exported heads have the same meaning under the rules of each engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from typer.testing import CliRunner

from jetspec.commands.app import app
from jetspec.models.decoder import RopeConfig
from jetspec.models.draft_head import HeadConfig
from jetspec.models.export import ENGINES, Engine, check_export, export_head, without_edge
from jetspec.models.head_format import load_head, save_head
from tests.models.head_paged import CAUSAL, HEADS, LAYERS, random_head

REFUSED = {"shifted": "slots", "adapter": "adapts"}
YARN = RopeConfig(theta=1000.0, kind="yarn", factor=4.0, original_len=32)

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_head = pytest.mark.parametrize("name", HEADS)


@each_engine
@each_head
def test_exported_head_is_read_back_or_refused(engine: Engine, name: str, tmp_path: Path) -> None:
    head, folder = random_head(HEADS[name]), tmp_path / "head"
    why = REFUSED.get(name) or ("causal" if (engine, name) == ("speculators", "windowed_mixed") else None)
    if why:
        with pytest.raises(ValueError, match=why):
            export_head(head, folder, engine, torch.float32, "owner/target")
        assert not folder.exists()
        return
    export_head(head, folder, engine, torch.float32, "owner/target")
    check_export(folder, engine, without_edge(head), torch.float32)
    if engine != "speculators":  # whose layout is not that of a head
        again = load_head(folder)
        assert again.head_config == without_edge(head).head_config
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), without_edge(head).parameters(), strict=True))


def drop(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        del raw[path[-1]]

    return change


def put(value: object, *path: str) -> Callable[[dict[str, Any]], object]:
    def change(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("engine", "change", "said"),
    [
        ("vllm", drop("dflash_config", "causal"), r"vLLM 0\.26 would misread causal"),
        ("vllm", put(False, "is_causal"), r"vLLM 0\.32 would misread causal"),
        ("vllm", put([2, 3], "eagle_aux_hidden_state_layer_ids"), None),
        ("vllm", put([1, 2], "eagle_aux_hidden_state_layer_ids"), "misread tap_layers"),
        ("vllm", put(None, "rope_parameters"), None),
        ("vllm", put({"rope_theta": 10.0}, "rope_parameters"), "misread rope"),
        ("sglang", drop("is_causal"), "SGLang would misread causal"),
        ("sglang", drop("layer_types"), "SGLang would misread causal"),
        ("sglang", drop("dflash_config", "causal"), None),
        ("speculators", drop("sliding_window_non_causal"), r"vLLM 0\.26 would misread causal"),
        ("speculators", put([1, 2], "aux_hidden_state_layer_ids"), "misread tap_layers"),
        ("speculators", put(4, "block_size"), "misread depth"),
    ],
)
def test_check_finds_misread_properties(
    engine: Engine, change: Callable[[dict[str, Any]], object], said: str | None, tmp_path: Path
) -> None:
    head, folder = random_head(CAUSAL), tmp_path / "head"
    export_head(head, folder, engine, torch.float32, "owner/target")
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    if said is None:
        check_export(folder, engine, head, torch.float32)
        return
    with pytest.raises(ValueError, match=said):
        check_export(folder, engine, head, torch.float32)


def test_check_finds_other_weights(tmp_path: Path) -> None:
    export_head(random_head(CAUSAL), tmp_path / "head", "vllm", torch.float32)
    with pytest.raises(ValueError, match="tensor "):
        check_export(tmp_path / "head", "vllm", random_head(CAUSAL, seed=1), torch.float32)


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
    save_head(random_head(HEADS["edge"]), tmp_path / "head", torch.float32)
    words = ["export", str(tmp_path / "head"), "--format", format, "--out", str(tmp_path / "out"), "--target", "o/t"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out")
    assert ("edge term" in result.stderr) == (format != "hf")
    assert ("vllm serve" in result.stderr) == (format != "hf")


def test_local_target_names_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for target, kinds in ((str(tmp_path / "target"), ["LlamaForCausalLM"]), ("owner/elsewhere", [])):
        export_head(random_head(CAUSAL), tmp_path / "head", "speculators", torch.float32, target)
        raw = json.loads((tmp_path / "head" / "config.json").read_text())
        assert raw["speculators_config"]["verifier"] == {"name_or_path": target, "architectures": kinds}


def test_speculators_needs_a_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --target"):
        export_head(random_head(CAUSAL), tmp_path / "head", "speculators", torch.float32)
