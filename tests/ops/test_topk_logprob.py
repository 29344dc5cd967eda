"""The top-k kernels equal a stable sort of the whole row."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetspec.ops import topk_logprob
from jetspec.ops.select import force
from jetspec.ops.shortlist import log_odds
from jetspec.types import ChoiceModel


def compare(logits: Tensor, k: int, chunk: int = 0, choice: ChoiceModel | None = None) -> None:
    """Compare with a stable sort, which orders ties as well. `chunk` overrides the size of a chunk."""
    with pytest.MonkeyPatch.context() as patch, force("triton"):
        if chunk:
            patch.setattr("jetspec.ops.shortlist_triton.CHUNK", chunk)
        token, logprob = topk_logprob(logits, k, choice)
    divided = log_odds(logits, choice).float()
    assert token.dtype == torch.int64 and logprob.dtype == torch.float32
    assert torch.equal(token, divided.sort(descending=True, stable=True).indices[..., :k])
    expected = divided.gather(-1, token) - divided.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_reference_equals_the_full_log_softmax() -> None:
    logits = torch.randn(2, 3, 50) * 4
    token, logprob = topk_logprob(logits, 7)
    expected, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(token, order[..., :7])
    torch.testing.assert_close(logprob, expected[..., :7])


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_temperatures_divide_the_logits(interpreter: Executor, dtype: torch.dtype, shared: bool) -> None:
    """A shared temperature is one number with stride 0."""
    logits = 3 * torch.randn(3, 2, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
    temperature_B = torch.tensor([0.8, 1.0, 2.5])
    temperature_B = temperature_B[:1].expand(3) if shared else temperature_B
    interpreter.submit(compare, logits, 40, 64, ChoiceModel(temperature_B[:, None])).result()


def random_choice(B: int, D: int, filters: bool, device: str = "cpu") -> ChoiceModel:
    """Weights and filters of sampled requests and, in the first row, of a greedy one."""
    rng = torch.Generator().manual_seed(B)
    tables = 0.5 + torch.rand(4, B, D, generator=rng)
    tables[1:3, 0] = 0
    temperature, weight, bonus, least = tables.to(device)
    found = ChoiceModel(temperature, weight, seed_B=(torch.arange(B, device=device) << 40) + 5)
    found = replace(found, position_BD=torch.arange(B * D, device=device).view(B, D))
    return replace(found, bonus_BD=bonus, least_BD=least) if filters else found


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_and_filters_take_part(interpreter: Executor, dtype: torch.dtype, filters: bool) -> None:
    logits = 3 * torch.randn(3, 2, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
    interpreter.submit(compare, logits, 40, 64, random_choice(3, 2, filters)).result()


@pytest.mark.parametrize(
    ("vocab", "k", "chunk", "ties"), [(3, 3, 16, False), (37, 1, 16, True), (100, 3, 16, True), (70, 4, 64, False)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_a_sort(
    interpreter: Executor, dtype: torch.dtype, vocab: int, k: int, chunk: int, ties: bool
) -> None:
    logits = 3 * torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0, 0, : vocab // 2] = -torch.inf
    interpreter.submit(compare, (logits.round() if ties else logits).to(dtype), k, chunk).result()


@pytest.mark.parametrize(("vocab", "k"), [(2049, 257), (5000, 512), (1024, 1024)])
def test_long_lists_equal_a_sort(interpreter: Executor, vocab: int, k: int) -> None:
    """Rows are no multiples of the chunk of 1,024; half of the first row is -inf."""
    logits = 3 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(k))
    logits[0, ::2] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        interpreter.submit(compare, logits.to(dtype), k, 1024).result()


@pytest.mark.parametrize("k", [300, 5])
def test_equal_logits_are_in_token_order(interpreter: Executor, k: int) -> None:
    """A row of equals, one with equals at its end, and one with all but a few equal."""
    steps = torch.arange(1500.0)
    logits = torch.stack((torch.zeros(1500), steps.clamp(min=1300).flip(0), steps.clamp(min=1480)))
    interpreter.submit(compare, logits, k, 512).result()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_comes_first(interpreter: Executor, dtype: torch.dtype) -> None:
    """NaN of either sign is greatest, as in torch. All log-probabilities of such a row are NaN."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[0, 50] = torch.nan
    logits[1, ::30] = -torch.tensor(torch.nan)
    interpreter.submit(compare, logits.to(dtype), 8, 32).result()


def test_many_rows_equal_a_sort(interpreter: Executor) -> None:
    logits = torch.randn(130, 60, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    interpreter.submit(compare, logits, 10, 32).result()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [8, 40])
def test_temperatures_on_a_gpu(k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(4, 15, 49152, generator=generator, device="cuda")
    temperature_B = torch.tensor([0.8, 1.0, 2.5, 1.7], device="cuda")
    for each_B in (temperature_B, temperature_B[:1].expand(4)):
        compare(logits, k, 64, ChoiceModel(each_B[:, None]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(15, 151936, 8), (960, 49152, 8), (15, 151936, 128), (120, 50257, 8)])
def test_kernels_on_a_gpu(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    """bf16 logits of this many tokens have many ties."""
    generator = torch.Generator("cuda").manual_seed(0)
    compare((3 * torch.randn(rows, vocab, generator=generator, device="cuda")).to(dtype), k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(15, 151936), (120, 50257), (960, 32000)])
@pytest.mark.parametrize("k", [257, 1024])
def test_long_lists_on_a_gpu(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    """One row ties as a whole, one is mostly -inf, one contains NaN."""
    generator = torch.Generator("cuda").manual_seed(k)
    logits = 3 * torch.randn(rows, vocab, generator=generator, device="cuda")
    logits[0] = 1
    logits[1, 100:] = -torch.inf
    logits[2, ::1000] = torch.nan
    compare(logits.to(dtype), k)
