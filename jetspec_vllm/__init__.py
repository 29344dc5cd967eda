"""Draft trees inside stock vLLM: a worker, a model runner, a drafter and an attention backend.

The scheduler, the cache manager, the sampler and the request states stay vLLM's. To the scheduler, a tree of N nodes
below its anchor is N draft tokens.
"""

from __future__ import annotations

from typing import Any

WORKER = "jetspec_vllm.worker.TreeWorker"
BACKEND = "jetspec_vllm.attention.TreeAttentionBackend"
OPTIONS = "jetspec"
"""Key of vLLM's `--additional-config` that holds the shape of the tree."""


def register() -> None:
    """Plugin entry point, called in each process of vLLM: allows min-p and logit biases for requests decoded with
    trees.

    Stock vLLM refuses both with speculative decoding. Every row of a tree is sampled as in plain decoding, so both are
    exact here. Unsupported versions of vLLM are not patched; the worker refuses them by version.
    """
    import vllm
    from vllm.sampling_params import SamplingParams

    from jetspec_vllm.compat import is_supported

    stock = getattr(SamplingParams, "_validate_spec_decode", None)
    if stock is None or getattr(stock, "knows_trees", False) or not is_supported(vllm.__version__):
        return

    def validate(params: Any, speculative_config: Any) -> None:
        parallel = getattr(speculative_config, "target_parallel_config", None)
        if getattr(parallel, "worker_cls", None) != WORKER:
            stock(params, speculative_config)

    validate.knows_trees = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = validate
