"""The kernels of `topk_logprob` find what a stable sort of the whole row finds."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.dispatch import force
from jetspec.ops import topk_logprob
from tests.kernels import compile_for_hopper


def compare(logits: Tensor, k: int, chunk: int = 0) -> None:
    """Against a stable sort, so that ties count as well. `chunk` replaces the size that suits a GPU."""
    kernel: Any = importlib.import_module("jetspec.ops.topk_logprob_triton")
    kernel.CHUNK = chunk or kernel.CHUNK
    with force("triton"):
        token, logprob = topk_logprob(logits, k)
    with force("reference"):
        expected = topk_logprob(logits, k)
    assert token.dtype == torch.int64 and logprob.dtype == torch.float32
    assert torch.equal(token, logits.float().sort(descending=True, stable=True).indices[..., :k])
    torch.testing.assert_close(logprob, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("vocab", "k", "chunk"), [(3, 3, 16), (37, 1, 16), (100, 3, 16), (70, 4, 64)])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_equals_a_sort(
    interpreter: Executor, dtype: torch.dtype, vocab: int, k: int, chunk: int, ties: bool
) -> None:
    logits = 3 * torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0, 0, : vocab // 2] = -torch.inf
    interpreter.submit(compare, (logits.round() if ties else logits).to(dtype), k, chunk).result()


@pytest.mark.parametrize(("logits", "k"), [("*bf16", 8), ("*bf16", 128), ("*fp32", 8), ("*fp32", 128)])
def test_kernels_compile_without_a_gpu(logits: str, k: int) -> None:
    module = importlib.import_module("jetspec.ops.topk_logprob_triton")
    types = {"logits_ptr": logits, "token_ptr": "*i32", "best_token_ptr": "*i64"}
    types |= dict.fromkeys(("V", "num_chunks", "k"), "i32") | {"value_ptr": logits}
    short = {"SHORT": logits == "*bf16"}
    chunk = {"K": k, "GROUP": module.GROUP, "GROUPS": module.CHUNK // module.GROUP, **short}
    assert "st.global" in compile_for_hopper(module._topk_chunk_kernel, types, chunk)
    merge = {"K": k, "GROUP": module.GROUP, "GROUPS": 8 * k, "CHUNKS": 64, **short}
    assert "st.global" in compile_for_hopper(module._topk_merge_kernel, types, merge)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(15, 151936, 8), (960, 49152, 8), (15, 151936, 128), (120, 50257, 8)])
def test_kernel_on_a_gpu(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    """bf16 logits of this many tokens are full of ties."""
    generator = torch.Generator("cuda").manual_seed(0)
    compare((3 * torch.randn(rows, vocab, generator=generator, device="cuda")).to(dtype), k)
