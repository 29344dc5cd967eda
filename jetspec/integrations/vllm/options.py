"""What vLLM is asked for, and what of it does not go together with trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from jetspec.config import TreeConfig
from jetspec.integrations.vllm import OPTIONS
from jetspec.models.draft_head import HeadConfig

SUPPORTED = "0.32."


def check_version(version: str) -> None:
    """Hooks are private to vLLM and differ between its versions."""
    if not version.startswith(SUPPORTED):
        raise ValueError(f"JetSpec's trees support vLLM {SUPPORTED}x, this is {version}; pip install 'jetspec[vllm]'")


def check_hook(hook: Callable[..., Any], *expected: str) -> None:
    """A method of vLLM that we override or call takes what we know of it, in this order, whatever comes behind."""
    found = tuple(inspect.signature(hook).parameters)
    if found[: len(expected)] != expected:
        raise ValueError(
            f"{hook.__qualname__} of this vLLM takes ({', '.join(found)}), not ({', '.join(expected)}); "
            f"JetSpec's trees support vLLM {SUPPORTED}x"
        )


def tree_config(additional: Mapping[str, Any], num_drafted: int) -> TreeConfig:
    """The tree that `--additional-config '{"jetspec": {..}}'` describes; its budget is what vLLM drafts, and the
    anchor."""
    given = additional.get(OPTIONS) or {}
    known = {field.name for field in fields(TreeConfig)} - {"budget"}
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - known)):
        what = f"{', '.join(unknown)} is not an option" if isinstance(given, Mapping) else "it is not a table"
        raise ValueError(f"{OPTIONS} of --additional-config: {what}; the options are {', '.join(sorted(known))}")
    return TreeConfig(budget=num_drafted + 1, **given)


def refusals(config: Any) -> list[str]:
    """What in a vLLM configuration does not work with trees, by name."""
    parallel, model, speculative = config.parallel_config, config.model_config, config.speculative_config
    if speculative is None or speculative.method != "dflash":
        return ["a worker without --speculative-config of method dflash"]
    found = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "microbatches (DBO)": parallel.enable_dbo,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "adaptive verification": speculative.enable_adaptive_verification,
        "draft lengths by batch size": bool(speculative.num_speculative_tokens_per_batch_size),
        "probabilistic drafts": speculative.draft_sample_method == "probabilistic",
        "LoRA": config.lora_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "watermarks": config.watermark_config is not None,
        "multi-head latent attention": model.use_mla,
        "recurrent or hybrid layers": model.is_hybrid,
        "encoder-decoder models": model.is_encoder_decoder,
        "multimodal models": model.is_multimodal_model,
        "M-RoPE": model.uses_mrope,
        "sliding windows": model.get_sliding_window() is not None,
        "a quantized KV cache": config.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
    }
    return [name for name, is_asked in found.items() if is_asked]


def head_refusals(head: HeadConfig, tree: TreeConfig) -> list[str]:
    """Why a head cannot draft these trees here."""
    problems = []
    if any(window is not None for window in head.layers.windows):
        problems.append("heads with sliding windows")
    if tree.budget < head.block_size:
        problems.append(f"a budget of {tree.budget} with this head, whose blocks take at least {head.block_size}")
    return problems


def say(refused: list[str]) -> None:
    if refused:
        raise ValueError(f"JetSpec's trees in vLLM do not support {', '.join(refused)}")
