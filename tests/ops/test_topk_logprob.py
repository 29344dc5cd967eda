"""The kernels of `topk_logprob` find what a stable sort of the whole row finds."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.ops import topk_logprob
from jetspec.ops.select import force
from tests.kernels import compile_for_hopper


def compare(logits: Tensor, k: int, chunk: int = 0) -> None:
    """Against a stable sort, so that ties count as well. `chunk` replaces the size that suits a GPU."""
    with pytest.MonkeyPatch.context() as patch, force("triton"):
        if chunk:
            patch.setattr("jetspec.ops.topk_logprob_triton.CHUNK", chunk)
        token, logprob = topk_logprob(logits, k)
    with force("reference"):
        expected = topk_logprob(logits, k)
    assert token.dtype == torch.int64 and logprob.dtype == torch.float32
    assert torch.equal(token, logits.float().sort(descending=True, stable=True).indices[..., :k])
    torch.testing.assert_close(logprob, expected[1], rtol=1e-5, atol=1e-5, equal_nan=True)


def compare_hot(logits_BDV: Tensor, k: int, temperature_B: Tensor) -> None:
    """Against logits that were divided before."""
    with pytest.MonkeyPatch.context() as patch, force("triton"):
        patch.setattr("jetspec.ops.topk_logprob_triton.CHUNK", 64)
        token, logprob = topk_logprob(logits_BDV, k, temperature_B)
    divided = logits_BDV.float() / temperature_B[:, None, None]
    assert torch.equal(token, logits_BDV.float().sort(descending=True, stable=True).indices[..., :k])
    torch.testing.assert_close(logprob, divided.log_softmax(-1).gather(-1, token), rtol=1e-5, atol=1e-5)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("k", [8, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_request_has_a_heat_of_its_own(interpreter: Executor, dtype: torch.dtype, k: int) -> None:
    logits = 3 * torch.randn(3, 2, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
    interpreter.submit(compare_hot, logits, k, torch.tensor([0.8, 1.0, 2.5])).result()


@pytest.mark.parametrize("k", [8, 40])
def test_one_heat_serves_all_requests(interpreter: Executor, k: int) -> None:
    """It lies there once, and what lies behind it is none."""
    logits = 3 * torch.randn(3, 2, 150, generator=torch.Generator().manual_seed(0))
    interpreter.submit(compare_hot, logits, k, torch.tensor([0.8, 100.0, 0.01])[:1].expand(3)).result()


@pytest.mark.parametrize(("vocab", "k", "chunk"), [(3, 3, 16), (37, 1, 16), (100, 3, 16), (70, 4, 64)])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_a_sort(
    interpreter: Executor, dtype: torch.dtype, vocab: int, k: int, chunk: int, ties: bool
) -> None:
    logits = 3 * torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0, 0, : vocab // 2] = -torch.inf
    interpreter.submit(compare, (logits.round() if ties else logits).to(dtype), k, chunk).result()


@pytest.mark.parametrize(("vocab", "k"), [(2049, 257), (5000, 512), (1024, 1024)])
def test_long_lists_equal_a_sort(interpreter: Executor, vocab: int, k: int) -> None:
    """Chunks of 1,024 end within the row; half of the first row is absent."""
    logits = 3 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(k))
    logits[0, ::2] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        interpreter.submit(compare, logits.to(dtype), k, 1024).result()


@pytest.mark.parametrize("k", [300, 5])
def test_a_list_of_equals_is_in_the_order_of_tokens(interpreter: Executor, k: int) -> None:
    """Where a row ties as a whole, at its end, or but for a few that come last."""
    steps = torch.arange(1500.0)
    logits = torch.stack((torch.zeros(1500), steps.clamp(min=1300).flip(0), steps.clamp(min=1480)))
    interpreter.submit(compare, logits, k, 512).result()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_comes_first(interpreter: Executor, dtype: torch.dtype) -> None:
    """As in torch, whatever its sign; and then no log-probability of the row is a number."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[0, 50] = torch.nan
    logits[1, ::30] = -torch.tensor(torch.nan)
    interpreter.submit(compare, logits.to(dtype), 8, 32).result()


def test_many_rows(interpreter: Executor) -> None:
    logits = torch.randn(130, 200, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    interpreter.submit(compare, logits, 40, 64).result()


@pytest.mark.parametrize("logits", ["*bf16", "*fp32"])
@pytest.mark.parametrize("rows", ["FEW", "MANY"])
def test_selection_compiles_without_a_gpu(logits: str, rows: str) -> None:
    module = importlib.import_module("jetspec.ops.topk_logprob_triton")
    tiling = getattr(module, rows)
    names = ("V", "num_leaders", "capacity", "span", "k", "most_reaching", "num_chunks")
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("leader_ptr", "passed_ptr", "token_ptr"), "*i64")
    types |= {"logits_ptr": logits, "count_ptr": "*i32"}
    groups = {"GROUP": 16, "GROUPS": module.CHUNK // 16}
    assert "st.global" in compile_for_hopper(module._leader_kernel, types, groups)
    sizes = {"LEADERS": 4096, "CHUNK": module.CHUNK, "RUN": tiling.RUN}
    assert "st.global" in compile_for_hopper(module._pass_kernel, types, sizes, num_warps=8)
    sizes = {"CHUNKS": 64, "OWN": tiling.OWN, "BLOCK": tiling.BLOCK}
    assert "st.global" in compile_for_hopper(module._rank_kernel, types, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [8, 40])
def test_heats_on_a_gpu(k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(4, 15, 49152, generator=generator, device="cuda")
    draft_temperature = torch.tensor([0.8, 1.0, 2.5, 1.7], device="cuda")
    compare_hot(logits, k, draft_temperature)
    compare_hot(logits, k, draft_temperature[:1].expand(4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(15, 151936, 8), (960, 49152, 8), (15, 151936, 128), (120, 50257, 8)])
def test_kernels_on_a_gpu(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    """bf16 logits of this many tokens are full of ties."""
    generator = torch.Generator("cuda").manual_seed(0)
    compare((3 * torch.randn(rows, vocab, generator=generator, device="cuda")).to(dtype), k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(15, 49152), (15, 151936), (120, 50257), (960, 32000)])
@pytest.mark.parametrize("k", [257, 512, 1024])
def test_long_lists_on_a_gpu(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    """In one row everything ties, in one most is absent, and one has what is no number."""
    generator = torch.Generator("cuda").manual_seed(k)
    logits = 3 * torch.randn(rows, vocab, generator=generator, device="cuda")
    logits[0] = 1
    logits[1, 100:] = -torch.inf
    logits[2, ::1000] = torch.nan
    compare(logits.to(dtype), k)
