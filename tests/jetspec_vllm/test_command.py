"""Command line and configuration checks of the plugin; these tests do not import vLLM."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from jetspec.commands.app import app
from jetspec.config import TreeConfig
from jetspec.models.decoder import DecoderConfig
from jetspec.models.head_format import save_head
from jetspec.models.hub import DEFAULT_MODEL
from jetspec_vllm import options
from jetspec_vllm.command import run_command, serve_command
from jetspec_vllm.compat import check_hook, check_version
from jetspec_vllm.options import check_head, refusals, refuse, tree_config
from tests.engine.tiny import tiny_decoder, tiny_head
from tests.models.head_paged import make_head

TARGET = tiny_decoder().config
HEAD = replace(tiny_head(tiny_decoder()).head_config, num_target_layers=TARGET.num_layers)


@pytest.fixture
def head(tmp_path: Path) -> str:
    save_head(make_head(HEAD), tmp_path / "head")
    return str(tmp_path / "head")


def test_command_carries_the_settings_the_worker_reads(head: str) -> None:
    tree = TreeConfig(budget=32, width=4, depth=5)
    command = serve_command(["owner/model", "--port", "9000"], head, tree)
    said = dict(zip(command[3::2], command[4::2], strict=True))
    speculative = json.loads(said["--speculative-config"])
    assert tree_config(json.loads(said["--additional-config"]), speculative["num_speculative_tokens"]) == tree
    assert speculative["model"] == head and said["--port"] == "9000"
    with pytest.raises(ValueError, match="budget of 4"):  # smaller than a block
        serve_command(["owner/model"], head, TreeConfig(budget=4))


@pytest.mark.parametrize(
    "words",
    [
        "MODEL --port 9000 --enforce-eager",
        "--port 9000 MODEL --enforce-eager",
        "--port=9000 MODEL --enforce-eager",
        "--enforce-eager MODEL --port 9000",
        "-tp 2 --seed -1 MODEL",
        "-O3 MODEL",
        "-cc.mode=3 MODEL -q awq",
        "-cc.mode 3 MODEL",
    ],
)
def test_the_target_stands_anywhere_among_the_options(words: str, head: str) -> None:
    command, given = serve_command(words.split(), head, TreeConfig()), words.split()
    assert command[:3] == ["vllm", "serve", "MODEL"]
    given.remove("MODEL")
    assert command[-len(given) :] == given


def test_explicit_capture_options_are_kept(head: str) -> None:
    size = "--max-cudagraph-capture-size"
    assert size in serve_command(["MODEL", "--config", "x"], head, TreeConfig())
    for words in ("-cc.mode=3", "-cc {}", "--compilation-config {}", "-O1", "--cudagraph_capture_sizes 1"):
        assert size not in serve_command(["MODEL", *words.split()], head, TreeConfig())


def additional(command: list[str]) -> object:
    assert command.count("--additional-config") == 1
    return json.loads(command[command.index("--additional-config") + 1])


@pytest.mark.parametrize("joint", [" ", "="])
def test_an_additional_configuration_is_kept(joint: str, head: str) -> None:
    given = {"other": [1], "jetspec": {"score": "entropy", "width": 4}}
    words = ["MODEL", *f"--additional-config{joint}{json.dumps(given, separators=(',', ':'))}".split(), "--port", "1"]
    command = serve_command(words, head, TreeConfig(width=4, depth=3))
    assert additional(command) == {"other": [1], "jetspec": {"score": "entropy", "width": 4, "depth": 3}}
    assert command[-2:] == ["--port", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((words, "MODEL") for words in ("", "--port 9000", "--port MODEL")),
        *((f"MODEL {words}", "^--worker-cls ") for words in ("--worker-cls x", "--worker_cls=x")),
        *((f"MODEL --speculative-config{words}", "^--speculative-config ") for words in (" {}", ".model x")),
        ("MODEL -sc {}", "^-sc "),
        ('MODEL --additional-config {"jetspec":{"width":4}}', "width"),
        ('MODEL --additional-config {"jetspec":{"widht":4}}', "widht"),
        ('MODEL --additional-config {"jetspec":4}', "jetspec"),
        ("MODEL --additional-config {", "--additional-config"),
        ("MODEL --additional-config []", "--additional-config"),
        ("MODEL --additional-config.jetspec.width=4", "--additional-config"),
        *((model, f"jetspec export {model}") for model in (DEFAULT_MODEL, "some/where.gguf")),
    ],
)
def test_wrong_words_are_refused_by_name(words: str, said: str, head: str) -> None:
    with pytest.raises(ValueError, match=said):
        serve_command(words.split(), head, TreeConfig())


def test_a_head_for_another_target_is_refused_before_vllm_starts(head: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": TARGET.vocab_size, "hidden_size": TARGET.hidden_size, "num_hidden_layers": 99}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ValueError, match="99"):
        serve_command([str(tmp_path)], head, TreeConfig())
    serve_command([str(tmp_path), "--hf-overrides", '{"num_hidden_layers": 2}'], head, TreeConfig())
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": TARGET.num_layers}))
    serve_command([str(tmp_path)], head, TreeConfig())


def test_vllm_of_this_environment_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []

    def become(path: str, words: list[str]) -> None:
        run.append([path, *words])
        raise SystemExit

    def started() -> list[str]:
        with pytest.raises(SystemExit):
            run_command(["vllm", "serve", "MODEL"])
        return run[-1]

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "execvp", become)
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vllm").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert started() == [str(tmp_path / "own" / "vllm"), "vllm", "serve", "MODEL"]
    (tmp_path / "own" / "vllm").unlink()
    monkeypatch.setattr("jetspec_vllm.command.find_spec", lambda name: object())
    assert started()[1:] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "MODEL"]
    monkeypatch.setattr("jetspec_vllm.command.find_spec", lambda name: None)
    assert started() == ["vllm", "vllm", "serve", "MODEL"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="pip install"):
        run_command(["vllm", "serve", "MODEL"])


def test_old_names_of_settings_still_work(capsys: pytest.CaptureFixture[str]) -> None:
    tree = tree_config({"jetspec": {"heat": 0.5}}, 15)
    assert tree.draft_temperature == 0.5 and "draft_temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [4, {"widht": 4}, {"width": "3"}, {"shortlist": "64"}, {"entropy_weight": "1"}, {"depth": 0}]
)
def test_wrong_options_are_named(given: object) -> None:
    with pytest.raises(ValueError, match=next(iter(given)) if isinstance(given, dict) else "jetspec"):
        tree_config({"jetspec": given}, 15)


def test_other_versions_and_other_hooks_are_refused() -> None:
    check_version("0.32.1")
    check_version("0.26.0")
    with pytest.raises(ValueError, match=r"0\.26\.0, 0\.32\.x, this is 0\.33\.0"):
        check_version("0.33.0")

    def hook(first: int, second: int, third: int = 0) -> None: ...

    check_hook(hook, "first", "second")
    with pytest.raises(ValueError, match="hook"):
        check_hook(hook, "second", "first")


def ordinary() -> SimpleNamespace:
    """An accepted vLLM configuration with the fields that the checks read."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=2,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        speculative_config=SimpleNamespace(method="dflash", draft_sample_method="greedy"),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=False,
            is_hybrid=False,
            is_encoder_decoder=False,
            is_multimodal_model=False,
            uses_mrope=False,
            get_sliding_window=lambda: None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(backend=None),
        lora_config=None,
        kv_transfer_config=None,
    )


REFUSED = [
    ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
    ("parallel_config.data_parallel_size", 2, "data parallelism"),
    ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
    ("parallel_config.prefill_context_parallel_size", 2, "context parallelism"),
    ("parallel_config.enable_dbo", True, "microbatches"),
    ("parallel_config.enable_batch_sharded_sampling", True, "batch-sharded sampling"),
    ("speculative_config.enable_adaptive_verification", True, "adaptive verification"),
    ("speculative_config.num_speculative_tokens_per_batch_size", [(1, 2, 3)], "draft lengths by batch size"),
    ("speculative_config.draft_sample_method", "probabilistic", "probabilistic drafts"),
    ("speculative_config.method", "eagle3", "method dflash"),
    ("speculative_config", None, "method dflash"),
    ("lora_config", object(), "LoRA"),
    ("kv_transfer_config", object(), "KV connectors"),
    ("watermark_config", object(), "watermarks"),
    ("model_config.enable_trace_replay", True, "replayed traces"),
    ("model_config.return_sampling_mask", True, "sampling masks"),
    ("model_config.logits_processors", ["x.Y"], "logits processors"),
    ("model_config.use_mla", True, "latent attention"),
    ("model_config.is_hybrid", True, "hybrid layers"),
    ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ("model_config.is_multimodal_model", True, "multimodal"),
    ("model_config.uses_mrope", True, "M-RoPE"),
    ("model_config.get_sliding_window", lambda: 4096, "sliding windows"),
    ("model_config.is_attention_free", True, "attention-free"),
    ("model_config.attention_chunk_size", 8192, "chunked local attention"),
    ("speculative_config.rejection_sample_method", "synthetic", "the method synthetic"),
    ("cache_config.cache_dtype", "fp8", "a KV cache of fp8"),
    ("cache_config.cache_dtype", "float16", "a KV cache of float16 beside a model of bfloat16"),
    ("attention_config.backend", SimpleNamespace(name="FLASH_ATTN"), "FLASH_ATTN"),
]


def test_logits_processors_of_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(name="mine")]
    monkeypatch.setattr(options, "entry_points", lambda group: found if group == "vllm.logits_processors" else [])
    assert "mine" in refusals(ordinary())[0]


def configured(head: str, target: DecoderConfig = TARGET, budget: int = 16) -> SimpleNamespace:
    """An ordinary configuration with a head."""
    config = ordinary()
    config.speculative_config.draft_model_config = SimpleNamespace(model=head)
    config.speculative_config.num_speculative_tokens = budget - 1
    config.additional_config = {}
    config.model_config.get_vocab_size = lambda: target.vocab_size
    config.model_config.get_hidden_size = lambda: target.hidden_size
    config.model_config.get_total_num_hidden_layers = lambda: target.num_layers
    return config


def test_a_head_that_does_not_fit_is_refused_at_start(head: str, tmp_path: Path) -> None:
    check_head(configured(head))
    save_head(make_head(replace(HEAD, target_hidden_size=2 * TARGET.hidden_size)), tmp_path / "adapted")
    with pytest.raises(ValueError, match="size"):
        check_head(configured(str(tmp_path / "adapted")))
    foreign = {"architectures": ["Qwen3DSparkModel"]}
    (tmp_path / "adapted" / "config.json").write_text(json.dumps(foreign))
    with pytest.raises(ValueError, match="DSpark"):
        check_head(configured(str(tmp_path / "adapted")))
    for other in (replace(TARGET, vocab_size=99), replace(TARGET, hidden_size=99), replace(TARGET, num_layers=99)):
        with pytest.raises(ValueError, match="99"):
            check_head(configured(head, other))


@pytest.mark.parametrize(("where", "value", "said"), REFUSED, ids=[row[0] for row in REFUSED])
def test_unsupported_features_are_refused_by_name(where: str, value: object, said: str) -> None:
    config = ordinary()
    assert refusals(config) == []
    config.cache_config.cache_dtype = "bfloat16"  # the model's own
    assert refusals(config) == []
    *parts, name = where.split(".")
    setattr(getattr(config, parts[0]) if parts else config, name, value)
    found = refusals(config)
    assert len(found) == 1 and said in found[0]
    with pytest.raises(ValueError, match=re.escape(found[0])):
        refuse(found)


def test_the_terminal_prints_the_command(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("vllm", "jetspec_vllm.command:commands", "jetspec.commands")
    monkeypatch.setattr("jetspec.commands.app.entry_points", lambda **_: [point])
    words = ["--port", "9000", "-cc.cudagraph_mode=NONE", "owner/model", "-tp", "2"]
    result = CliRunner().invoke(app, ["vllm", "serve", *words[:3], "--head", head, "--dry-run", *words[3:]])
    assert result.exit_code == 0
    assert shlex.split(result.stdout) == serve_command(words, head, TreeConfig())
