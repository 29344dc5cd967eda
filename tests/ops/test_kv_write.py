"""Cache writes change exactly the slots that they name."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch

from jetspec.ops import SlotRows, compact_kv, compact_rows, store_kv
from jetspec.ops.select import force
from jetspec.types import KVPages
from tests.kernels import given_by_address
from tests.ops.test_agreement import Draw

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def test_compaction_reads_a_row_before_writing_it() -> None:
    pool = torch.arange(2 * 2 * 3 * 4.0).view(2, 2, 3, 4, 1, 1).clone()
    before = pool.flatten(2, 3).clone()
    compact_kv(pool, torch.tensor([[5, 2], [9, 10]]), torch.tensor([[2, 5], [3, 10]]))
    after = pool.flatten(2, 3)
    assert torch.equal(after[:, :, [2, 5, 3]], before[:, :, [5, 2, 9]])
    kept = [i for i in range(12) if i not in (2, 3, 5)]
    assert torch.equal(after[:, :, kept], before[:, :, kept])


def compare_interleaved(dtype: torch.dtype) -> None:
    apart, draw = KVPages(*torch.zeros(2, 6, 5, 3, 64, dtype=dtype)), Draw(dtype, "cpu")
    joined = torch.cat((apart.k, apart.v), -1)
    k, v, slot = draw.normal(9, 3, 64), draw.normal(9, 3, 64), draw.order(30)[:9]
    store_kv(apart, k[2:], v[2:], slot[2:])
    slot[:2] = -1
    with force("triton"):
        store_kv(KVPages(*joined.chunk(2, -1)), k, v, slot)
    assert torch.equal(joined, torch.cat((apart.k, apart.v), -1)) and joined.any()


def compare_rows(dtype: torch.dtype) -> None:
    pool = Draw(dtype, "cpu").normal(2, 2, 6, 5, 3, 64)
    source, target = torch.tensor([[3, 1, 4, 4], [19, 12, 10, 10]]), torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])
    layers = [pool[i, j].flatten(0, 1).flatten(1).clone() for i in range(2) for j in range(2)]
    compact_kv(pool, source, target)
    for kernels in ("triton", "reference"):
        copies = [layer.clone() for layer in layers]
        with force(kernels), given_by_address(copies):
            compact_rows(SlotRows.of(copies), source, target)
        assert torch.equal(torch.stack(copies).view_as(pool), pool)


@DTYPES
def test_kernel_stores_to_interleaved_pages_and_skips_negative_slots(interpreter: Executor, dtype: torch.dtype) -> None:
    interpreter.submit(compare_interleaved, dtype).result()


@DTYPES
def test_compaction_of_separate_layers_equals_that_of_a_pool(interpreter: Executor, dtype: torch.dtype) -> None:
    interpreter.submit(compare_rows, dtype).result()
