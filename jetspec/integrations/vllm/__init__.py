"""Draft trees inside vLLM, without a fork: a worker, a model runner, a drafter and an attention backend of our own.

The scheduler, the cache manager, the sampler and the request states stay vLLM's. To the scheduler a tree of N nodes
below its anchor is N draft tokens.
"""

from __future__ import annotations

WORKER = "jetspec.integrations.vllm.worker.TreeWorker"
BACKEND = "jetspec.integrations.vllm.attention.TreeAttentionBackend"
OPTIONS = "jetspec"
"""The key of vLLM's `--additional-config` that holds the shape of the tree."""


def register() -> None:
    """What vLLM calls in each of its processes: the name of the backend, for those who ask for it, and nothing else."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
