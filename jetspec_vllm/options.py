"""Checks of a vLLM configuration: the shape of the tree, and features that do not work with trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from jetspec.aliases import renamed
from jetspec.config import TreeConfig
from jetspec.models.draft_head import HeadConfig
from jetspec.models.head_folder import kind_of
from jetspec.models.head_format import read_config, require_fit
from jetspec.models.hub import resolve
from jetspec_vllm import OPTIONS

PROCESSORS = "vllm.logits_processors"
"""Entry-point group of logits processors from installed packages."""

UNUSED = ("batch_trees", "choice_model", "ngrams")
"""Settings of trees without effect in vLLM."""


def tree_config(additional: Mapping[str, Any], num_drafted: int) -> TreeConfig:
    """Tree settings from `--additional-config '{"jetspec": {..}}'`. The budget is vLLM's number of draft tokens plus
    the anchor."""
    given = additional.get(OPTIONS) or {}
    if isinstance(given, Mapping):
        given = renamed(given, "tree", where="--additional-config")
    known = {field.name for field in fields(TreeConfig)} - {"budget", *UNUSED}
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - known)):
        what = f"{', '.join(unknown)} is not an option" if isinstance(given, Mapping) else "it is not a table"
        raise ValueError(f"{OPTIONS} of --additional-config: {what}; the options are {', '.join(sorted(known))}")
    try:
        return TreeConfig(budget=num_drafted + 1, **given)
    except ValueError as error:
        raise ValueError(f"{OPTIONS} of --additional-config: {error}") from None


def refusals(config: Any) -> list[str]:
    """Names of features in a vLLM configuration that do not work with trees. Some versions lack some options."""
    parallel, model, speculative = config.parallel_config, config.model_config, config.speculative_config
    if speculative is None or speculative.method != "dflash":
        return ["a worker without --speculative-config of method dflash"]

    method = getattr(speculative, "rejection_sample_method", "standard")

    def asked(part: Any, name: str) -> bool:
        return bool(getattr(part, name, None))

    brought = [point.name for point in entry_points(group=PROCESSORS)]
    cache, dtype = config.cache_config.cache_dtype, str(model.dtype).removeprefix("torch.")
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
        f"rejection sampling by the method {method}": method != "standard",
        "LoRA": config.lora_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "watermarks": asked(config, "watermark_config"),
        "replayed traces": asked(model, "enable_trace_replay"),
        "sampling masks": asked(model, "return_sampling_mask"),
        "custom logits processors": asked(model, "logits_processors"),
        f"logits processors of installed packages ({', '.join(brought)}): uninstall them": bool(brought),
        "attention-free models": asked(model, "is_attention_free"),
        "chunked local attention": asked(model, "attention_chunk_size"),
        "multi-head latent attention": model.use_mla,
        "recurrent or hybrid layers": model.is_hybrid,
        "encoder-decoder models": model.is_encoder_decoder,
        "multimodal models": model.is_multimodal_model,
        "M-RoPE": model.uses_mrope,
        "sliding windows": model.get_sliding_window() is not None,
        f"a KV cache of {cache} beside a model of {dtype}": cache not in ("auto", dtype),
        f"the attention backend {backend}": backend not in (None, "CUSTOM", "CPU_ATTN"),
    }
    return [name for name, is_asked in found.items() if is_asked]


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target that a head must match."""

    vocab_size: int
    hidden_size: int
    num_layers: int


def check_head(config: Any) -> None:
    """Refuse a head that does not fit the target or the trees of a vLLM configuration."""
    name, model = config.speculative_config.draft_model_config.model, config.model_config
    tree = tree_config(config.additional_config, config.speculative_config.num_speculative_tokens)
    target = TargetShape(model.get_vocab_size(), model.get_hidden_size(), model.get_total_num_hidden_layers())
    folder = resolve(name)
    if (kind := kind_of(folder)) not in (None, "DFlash"):
        refuse([f"heads of kind {kind}"])
    head = read_config(folder)
    refuse(head_refusals(head, tree))
    require_fit(name, head, target)


def head_refusals(head: HeadConfig, tree: TreeConfig) -> list[str]:
    """Reasons a head cannot draft these trees in vLLM."""
    problems = []
    if any(window is not None for window in head.layers.windows):
        problems.append("heads with sliding windows")
    if head.target_hidden_size is not None:
        problems.append("heads that adapt the size of the target's states")
    if tree.budget < head.block_size:
        problems.append(f"a budget of {tree.budget} with this head, whose blocks take at least {head.block_size}")
    return problems


def refuse(refused: list[str]) -> None:
    if refused:
        raise ValueError(f"JetSpec's trees in vLLM do not support {', '.join(refused)}")
