"""The command that starts vLLM, and what is refused. None of it needs vLLM."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from jetspec.cli import app
from jetspec.config import TreeConfig
from jetspec.integrations.vllm import options
from jetspec.integrations.vllm.command import serve_command
from jetspec.integrations.vllm.compat import check_hook, check_version
from jetspec.integrations.vllm.options import check_head, refusals, say, tree_config
from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import make_head
from jetspec.models.head_format import save_head
from tests.engine.tiny import tiny_decoder, tiny_head

TARGET = tiny_decoder().config
HEAD = replace(tiny_head(tiny_decoder()).head_config, num_target_layers=TARGET.num_layers)


@pytest.fixture
def head(tmp_path: Path) -> str:
    save_head(make_head(HEAD), tmp_path / "head")
    return str(tmp_path / "head")


def test_the_command_says_what_the_worker_reads(head: str) -> None:
    tree = TreeConfig(budget=32, width=4, depth=5)
    command = serve_command("owner/model", head, tree, ["--port", "9000"])
    said = dict(zip(command[3::2], command[4::2], strict=True))
    speculative = json.loads(said["--speculative-config"])
    assert tree_config(json.loads(said["--additional-config"]), speculative["num_speculative_tokens"]) == tree
    assert speculative["model"] == head and said["--port"] == "9000"


def test_a_tree_smaller_than_a_block_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match=r"a budget of 4 .* at least 6"):
        serve_command("owner/model", head, TreeConfig(budget=4))


WRONG: list[tuple[object, str]] = [
    ({"widht": 4}, "widht"),
    (4, "not a table"),
    ({"width": "3"}, "width is '3'; it must be a whole number"),
    ({"shortlist": "64"}, "shortlist is '64'; it must be a whole number"),
    ({"entropy_weight": "1"}, "entropy_weight is '1'; it must be a number"),
    ({"depth": 0}, "depth is 0"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_wrong_options_are_named(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tree_config({"jetspec": given}, 15)


def test_other_versions_and_other_hooks_are_refused() -> None:
    check_version("0.32.1")
    check_version("0.26.0")
    with pytest.raises(ValueError, match=r"0\.26\.0, 0\.32\.x, this is 0\.33\.0"):
        check_version("0.33.0")

    def hook(first: int, second: int, third: int = 0) -> None: ...

    check_hook(hook, "first", "second")
    with pytest.raises(ValueError, match="takes"):
        check_hook(hook, "second", "first")


def ordinary() -> SimpleNamespace:
    """A vLLM configuration, as far as it matters to trees, that is not refused."""
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


def test_an_ordinary_configuration_is_not_refused() -> None:
    config = ordinary()
    assert refusals(config) == []
    config.cache_config.cache_dtype = "bfloat16"  # the model's own
    assert refusals(config) == []


def test_logits_processors_that_packages_bring_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_head_for_another_target_is_refused_at_start(head: str) -> None:
    check_head(configured(head))
    for other in (replace(TARGET, vocab_size=99), replace(TARGET, hidden_size=99), replace(TARGET, num_layers=99)):
        with pytest.raises(ValueError, match=r"head for another model.* 99"):
            check_head(configured(head, other))


def test_a_head_with_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    save_head(make_head(replace(HEAD, target_hidden_size=2 * TARGET.hidden_size)), tmp_path / "head")
    with pytest.raises(ValueError, match="adapt the size"):
        check_head(configured(str(tmp_path / "head")))


@pytest.mark.parametrize(("where", "value", "said"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_does_not_go_together_with_trees_is_refused_by_name(where: str, value: object, said: str) -> None:
    config = ordinary()
    *parts, name = where.split(".")
    setattr(getattr(config, parts[0]) if parts else config, name, value)
    found = refusals(config)
    assert len(found) == 1 and said in found[0]
    with pytest.raises(ValueError, match="do not support"):
        say(found)


def test_a_worker_without_drafts_is_refused() -> None:
    nothing = SimpleNamespace(parallel_config=None, model_config=None, speculative_config=None)
    assert "dflash" in refusals(nothing)[0]


def test_the_terminal_prints_the_command(head: str) -> None:
    result = CliRunner().invoke(app, ["vllm", "serve", "owner/model", "--head", head, "--dry-run", "--port", "9000"])
    assert result.exit_code == 0
    assert shlex.split(result.stdout) == serve_command("owner/model", head, TreeConfig(), ["--port", "9000"])
