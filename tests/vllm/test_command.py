"""The command that starts vLLM, and what is refused. None of it needs vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jetspec.cli import app
from jetspec.config import TreeConfig
from jetspec.integrations.vllm.command import serve_command
from jetspec.integrations.vllm.compat import check_hook, check_version
from jetspec.integrations.vllm.options import refusals, say, tree_config
from jetspec.models.draft_head import make_head
from jetspec.models.head_format import save_head
from tests.engine.tiny import tiny_decoder, tiny_head


@pytest.fixture
def head(tmp_path: Path) -> str:
    save_head(make_head(tiny_head(tiny_decoder()).head_config), tmp_path / "head")
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


@pytest.mark.parametrize(("given", "said"), [({"jetspec": {"widht": 4}}, "widht"), ({"jetspec": 4}, "not a table")])
def test_unknown_options_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tree_config(given, 15)


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
    ("cache_config.cache_dtype", "fp8", "quantized KV cache"),
    ("attention_config.backend", SimpleNamespace(name="FLASH_ATTN"), "FLASH_ATTN"),
]


def test_an_ordinary_configuration_is_not_refused() -> None:
    assert refusals(ordinary()) == []


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
