"""The worker that vLLM is told to start: `--worker-cls jetspec.integrations.vllm.worker.TreeWorker`."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from jetspec.integrations.vllm import BACKEND
from jetspec.integrations.vllm.options import check_hook, check_version, refusals, say

check_version(vllm.__version__)
check_hook(GPUModelRunner.prepare_attn, "self", "input_batch")
check_hook(GPUModelRunner.sample, "self", "hidden_states", "input_batch", "grammar_output")
check_hook(
    Sampler.sample,
    *("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids"),
    *("expanded_local_pos", "seq_lens_upper_bound_np"),
)
check_hook(
    BaseSpeculator.propose,
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
    *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
)

from jetspec.integrations.vllm.runner import TreeRunner  # noqa: E402  only where the hooks are as it knows them


class TreeWorker(CPUWorker):
    """vLLM's worker for the CPU, with our model runner."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        say(refusals(vllm_config) if current_platform.is_cpu() else ["GPUs yet"])
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        # The CPU worker asks for its runner, and the CPU platform for its backend, by a fixed name.
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
        stock, model_runner.CPUModelRunner = model_runner.CPUModelRunner, TreeRunner
        try:
            super().init_device()
        finally:
            model_runner.CPUModelRunner = stock
        if not isinstance(self.model_runner, TreeRunner):
            raise ValueError("JetSpec's trees need vLLM's second model runner, for which Triton must be installed")
