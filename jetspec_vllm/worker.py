"""Worker with draft trees: `--worker-cls jetspec_vllm.worker.TreeWorker`."""

from __future__ import annotations

from typing import Any

import vllm

from jetspec_vllm import BACKEND, register
from jetspec_vllm.compat import check_hooks, check_version
from jetspec_vllm.options import check_head, refusals, refuse

check_version(vllm.__version__)
check_hooks()

# Private interfaces of vLLM, imported only after the version and hook checks.
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm.v1.worker.gpu import model_runner as runner_home  # noqa: E402

from jetspec_vllm.runner import TreeRunner  # noqa: E402

StockWorker: Any
if current_platform.is_cpu():
    from vllm.v1.worker.cpu import model_runner as runner_home
    from vllm.v1.worker.cpu_worker import CPUWorker

    StockWorker, RUNNER = CPUWorker, "CPUModelRunner"
else:
    from vllm.v1.worker.gpu_worker import Worker

    StockWorker, RUNNER = Worker, "GPUModelRunner"


class TreeWorker(StockWorker):
    """vLLM's worker with the model runner for trees."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(refusals(vllm_config))
        check_head(vllm_config)
        vllm_config.cache_config.cache_dtype = "auto"  # the model's own dtype by name means the same
        register()
        # The CPU platform always requests its own backend by name.
        backend = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
        register_backend(backend, BACKEND)
        if not current_platform.is_cpu():
            vllm_config.attention_config.backend = backend
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        # The stock worker creates its runner by a fixed module attribute.
        stock = getattr(runner_home, RUNNER)
        setattr(runner_home, RUNNER, TreeRunner)
        try:
            super().init_device()
        finally:
            setattr(runner_home, RUNNER, stock)
        if not isinstance(self.model_runner, TreeRunner):
            raise ValueError(
                "JetSpec's trees need vLLM's second model runner: install Triton, and set VLLM_USE_V2_MODEL_RUNNER=1"
            )
