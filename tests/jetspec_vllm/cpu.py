"""Runs vLLM's official wheel on a CPU: the wheel has all Python files but no compiled CPU operations.

What the models here need of them is written in torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm._custom_ops as vllm_ops
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample import gumbel, sampler

from jetspec_vllm import BACKEND, OPTIONS, WORKER, register

SET_UP = (("init_cpu_memory_env", "(int[] x) -> ()", None), ("init_cpu_threads_env", "(str x) -> str", ""))
LIBRARY = torch.library.Library("_C", "FRAGMENT")


def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, eps: float, *_: object) -> None:
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None and weight.dim() == 2:  # one for each of the outermost rows
        weight = weight.view(len(weight), *[1] * (x.dim() - 2), -1)
    out.copy_(normed if weight is None else normed * weight.float())


def rotary_embedding(
    position_T: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin: Tensor, is_neox: bool, *_: object
) -> None:
    assert is_neox
    cos, sin = cos_sin[position_T].float()[:, None].chunk(2, -1)
    for heads in (query, key):
        if heads is not None:
            x = heads.view(len(position_T), -1, head_size)
            first, second = x.float().chunk(2, -1)
            x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def gumbel_sample(logits: Tensor, request_T: Tensor, temperature_R: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Argmax instead of vLLM's Gumbel kernel for greedy requests: interpreted, it takes seconds per real vocabulary."""
    if not temperature_R[request_T].any():
        return logits.argmax(-1)
    return gumbel.gumbel_sample(logits, request_T, temperature_R, *rest, **options)


def answer(result: object, _: object) -> object:
    return result


def install() -> None:
    """Use `TreeAttentionBackend` with and without trees: plain vLLM has no CPU attention in this wheel."""
    current_platform.import_kernels()
    for name, signature, result in SET_UP:
        LIBRARY.define(name + signature)
        LIBRARY.impl(name, partial(answer, result), "CompositeExplicitAutograd")
    vllm_ops.rms_norm, vllm_ops.rotary_embedding = rms_norm, rotary_embedding
    sampler.gumbel_sample = gumbel_sample
    topk_topp_sampler.HAS_TRITON = False  # the interpreter does not know all that its kernel says
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    register()


install()


def start(
    model: str, head: str | None = None, *, budget: int = 16, tree: dict[str, object] | None = None, **changes: Any
) -> Any:
    """vLLM engine with trees, or plain without a head."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
    }
    if head is not None:
        settings["worker_cls"] = WORKER
        settings["speculative_config"] = {"method": "dflash", "model": head, "num_speculative_tokens": budget - 1}
        settings["additional_config"] = {OPTIONS: tree or {}}
    return LLM(model, **{**settings, **changes})


def generate(llm: Any, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[list[int]]:
    asked = {"temperature": 0, "ignore_eos": True, "detokenize": False, **sampling}
    params = SamplingParams(max_tokens=max_tokens, **asked)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_runner(llm: Any) -> Any:
    """Worker of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def counted(llm: Any) -> dict[str, int]:
    """Draft counters from vLLM's own metrics."""
    prefix = "vllm:spec_decode_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if prefix in metric.name and hasattr(metric, "value")
    }
