"""Environment for importing vLLM: CPU platform, interpreted kernels. Set here so that no other tests inherit it."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("vllm"):
    os.environ.update(
        VLLM_TARGET_DEVICE="cpu",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker is in the process of the test, which looks into it
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_CI_ENV="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
