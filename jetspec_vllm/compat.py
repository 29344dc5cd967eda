"""Compatibility layer: one name for each interface that differs between supported versions of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch import Tensor

SUPPORTED = ("0.26.0", "0.32.")
"""Exact versions, or prefixes of a series."""
NAMES = ", ".join(version + "x" if version.endswith(".") else version for version in SUPPORTED)
HOOKS = {
    "model_runner:GPUModelRunner.__init__": "self vllm_config device",
    "model_runner:GPUModelRunner.add_requests": "self scheduler_output",
    "model_runner:GPUModelRunner.initialize_kv_cache": "self kv_cache_config",
    "model_runner:GPUModelRunner.profile_run": "self",
    "model_runner:GPUModelRunner.capture_model": "self",
    "model_runner:GPUModelRunner.prepare_attn": "self input_batch",
    "model_runner:GPUModelRunner.prepare_dummy_attn": "self input_batch",
    "model_runner:GPUModelRunner.sample": "self hidden_states input_batch grammar_output",
    "spec_decode.speculator:DraftModelSpeculator.__init__": "self vllm_config device",
    "spec_decode.speculator:DraftModelSpeculator.load_draft_model": "self target_model target_attn_layer_names",
    "spec_decode.speculator:DraftModelSpeculator.set_attn": "self model_state kv_cache_config block_tables",
    "spec_decode.speculator:DraftModelSpeculator.init_cudagraph_manager": "self cudagraph_mode",
    "spec_decode.speculator:DraftModelSpeculator.capture": "self",
    "spec_decode.speculator:DraftModelSpeculator.propose": "self input_batch attn_metadata slot_mappings"
    " last_hidden_states aux_hidden_states num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
    "sample.logprob:compute_topk_scores": "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state"
    " expanded_idx_mapping max_per_req_token_ids logits_mode",
    "input_batch:get_num_sampled_and_rejected": "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
    "sample.output:SamplerOutput": "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
}
"""Interfaces that all supported versions share, below `vllm.v1.worker.gpu`, with their first parameters."""


def is_supported(version: str) -> bool:
    """True for supported versions: hooks are private to vLLM and differ between versions."""
    return version.startswith(SUPPORTED)


def check_version(version: str) -> None:
    if not is_supported(version):
        raise ValueError(f"JetSpec's trees support vLLM {NAMES}, this is {version}; pip install jetspec-vllm")


def check_hook(hook: Callable[..., Any], *expected: str) -> None:
    """Check that a method of vLLM takes the expected parameters first, in this order."""
    found = parameters(hook)
    if found[: len(expected)] != expected:
        raise ValueError(
            f"{hook.__qualname__} of this vLLM takes ({', '.join(found)}), not ({', '.join(expected)}); "
            f"JetSpec's trees support vLLM {NAMES}"
        )


def check_hooks() -> None:
    """Check that every overridden or called interface of vLLM exists with the expected parameters."""
    try:
        for place, expected in HOOKS.items():
            module, _, name = place.partition(":")
            check_hook(attrgetter(name)(import_module(f"vllm.v1.worker.gpu.{module}")), *expected.split())
        sample = import_module("vllm.v1.worker.gpu.sample.sampler").Sampler.sample
        check_hook(sample, "self", *sample_parameters(sample), "return_logprobs")
    except (ImportError, AttributeError) as error:
        raise ValueError(f"this vLLM lacks a hook ({error}); JetSpec's trees support vLLM {NAMES}") from error


@cache
def parameters(hook: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(hook).parameters)


def sample_parameters(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Expected parameters of the sampler's `sample`; newer versions have more."""
    if "idx_mapping" not in parameters(hook):
        return ("logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos")
    return (
        *("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos"),
        "seq_lens_upper_bound_np",
    )


def draw_tokens(sampler: Any, logits_RV: Tensor, batch: Any, want_logprobs: bool) -> tuple[Tensor, Tensor]:
    """A token for every row with logits, and the logits it was sampled from."""
    row_R = batch.logits_indices
    given = {
        "expanded_idx_mapping": batch.expanded_idx_mapping,
        "idx_mapping_np": batch.idx_mapping_np,
        "pos": batch.positions[row_R],
        "input_ids": batch.input_ids[row_R],
        "expanded_local_pos": batch.expanded_local_pos,
    }
    if "idx_mapping" in parameters(type(sampler).sample):
        given["idx_mapping"] = batch.idx_mapping
        given["seq_lens_upper_bound_np"] = batch.seq_lens_cpu_upper_bound.numpy()
    drawn: tuple[Tensor, Tensor] = sampler.sample(logits_RV, **given, return_logprobs=want_logprobs)
    return drawn


def logprob_counts(sampler: Any, batch: Any) -> tuple[int, int] | None:
    """Largest number of log-probabilities requested in the batch: of the best tokens, and of named tokens. None if no
    request has any."""
    best = sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
    named = sampler.logprob_token_ids_state.max_num_token_ids(batch.idx_mapping_np)
    return (max(best, 0), named) if best >= 0 or named else None


def page_layouts() -> tuple[Any, ...] | None:
    """KV cache layout ordered by position, then head, where vLLM has an enum for it. None: it uses strides."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    return (KVCacheLayout.LBNHC,)
