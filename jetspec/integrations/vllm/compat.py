"""What differs between the versions of vLLM that are supported, under one name each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

SUPPORTED = ("0.26.0", "0.32.")
"""A version, or what those of a series begin with."""
NAMES = ", ".join(version + "x" if version.endswith(".") else version for version in SUPPORTED)


def check_version(version: str) -> None:
    """Hooks are private to vLLM and differ between its versions."""
    if not version.startswith(SUPPORTED):
        raise ValueError(f"JetSpec's trees support vLLM {NAMES}, this is {version}; pip install 'jetspec[vllm]'")


def check_hook(hook: Callable[..., Any], *expected: str) -> None:
    """A method of vLLM that we override or call takes what we know of it, in this order, whatever comes behind."""
    found = tuple(inspect.signature(hook).parameters)
    if found[: len(expected)] != expected:
        raise ValueError(
            f"{hook.__qualname__} of this vLLM takes ({', '.join(found)}), not ({', '.join(expected)}); "
            f"JetSpec's trees support vLLM {NAMES}"
        )


def draw_tokens(sampler: Any, logits_RV: Tensor, batch: Any, want_logprobs: bool) -> tuple[Tensor, Tensor]:
    """A token after every row that has logits, and the logits that it was drawn from."""
    row_R = batch.logits_indices
    requests = [batch.expanded_idx_mapping, batch.idx_mapping_np]
    rest = [batch.positions[row_R], batch.input_ids[row_R], batch.expanded_local_pos]
    if "idx_mapping" in inspect.signature(type(sampler).sample).parameters:
        requests.insert(1, batch.idx_mapping)
        rest.append(batch.seq_lens_cpu_upper_bound.numpy())
    drawn: tuple[Tensor, Tensor] = sampler.sample(logits_RV, *requests, *rest, return_logprobs=want_logprobs)
    return drawn


def logprob_counts(sampler: Any, batch: Any) -> tuple[int, int] | None:
    """The most log-probabilities that a request of the batch wants beside its own token: of the best tokens, and of
    tokens that it names. None: nobody wants any."""
    best = sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
    named = sampler.logprob_token_ids_state.max_num_token_ids(batch.idx_mapping_np)
    return (max(best, 0), named) if best >= 0 or named else None


def is_processed(sampler: Any) -> bool:
    """Whether log-probabilities are those behind temperature and filters."""
    return str(sampler.logprobs_mode).startswith("processed_")


def is_raw_logits(sampler: Any) -> bool:
    """Whether logits are reported in place of log-probabilities."""
    return str(sampler.logprobs_mode).endswith("_logits")


def page_layouts() -> tuple[Any, ...] | None:
    """Pages by position, then head: how versions are told that have a word for it. None: they ask for strides."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    return (KVCacheLayout.LBNHC,)
