"""What vLLM is asked for, and what of it does not go together with trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jetspec.config import TreeConfig
from jetspec.integrations.vllm import OPTIONS
from jetspec.models.draft_head import HeadConfig


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
    """What in a vLLM configuration does not work with trees, by name. Some versions lack some of the options."""
    parallel, model, speculative = config.parallel_config, config.model_config, config.speculative_config
    if speculative is None or speculative.method != "dflash":
        return ["a worker without --speculative-config of method dflash"]

    def asked(part: Any, name: str) -> bool:
        return bool(getattr(part, name, None))

    backend = getattr(config.attention_config.backend, "name", None)
    found = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "microbatches (DBO)": asked(parallel, "enable_dbo"),
        "batch-sharded sampling": asked(parallel, "enable_batch_sharded_sampling"),
        "adaptive verification": asked(speculative, "enable_adaptive_verification"),
        "draft lengths by batch size": asked(speculative, "num_speculative_tokens_per_batch_size"),
        "probabilistic drafts": speculative.draft_sample_method == "probabilistic",
        "LoRA": config.lora_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "watermarks": asked(config, "watermark_config"),
        "replayed traces": asked(model, "enable_trace_replay"),
        "sampling masks": asked(model, "return_sampling_mask"),
        "logits processors of your own": asked(model, "logits_processors"),
        "multi-head latent attention": model.use_mla,
        "recurrent or hybrid layers": model.is_hybrid,
        "encoder-decoder models": model.is_encoder_decoder,
        "multimodal models": model.is_multimodal_model,
        "M-RoPE": model.uses_mrope,
        "sliding windows": model.get_sliding_window() is not None,
        "a quantized KV cache": config.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
        f"the attention backend {backend}": backend not in (None, "CUSTOM", "CPU_ATTN"),
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
