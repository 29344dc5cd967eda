"""Cache writes change exactly the slots that they name."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.ops import SlotRows, compact_kv, compact_rows, store_kv
from jetspec.ops.select import force
from jetspec.types import KVPages
from tests.kernels import given_by_address

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def storage(
    layers: int, pages: int, page_size: int, heads: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    shape = torch.Size((2, layers, pages, page_size, heads, size))
    return torch.arange(shape.numel(), device=device).remainder(251).view(shape).to(dtype)


def random_paths(slots: int, rows: int, num: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return source and target slots as after a round: each row reads and writes a range of its own.

    The last node of a path is repeated; some slots are both source and target, some are equal.
    """
    own = slots // rows
    source = torch.stack([torch.randperm(own, device=device)[:num].sort().values for _ in range(rows)])
    source[:, num // 2 :] = source[:, num // 2, None]
    target = torch.arange(num, device=device).expand(rows, num)
    start = own * torch.arange(rows, device=device)[:, None]
    return start + source, start + target


def test_compaction_reads_a_row_before_writing_it() -> None:
    pool = torch.arange(2 * 2 * 3 * 4.0).view(2, 2, 3, 4, 1, 1).clone()
    before = pool.flatten(2, 3).clone()
    compact_kv(pool, torch.tensor([[5, 2], [9, 10]]), torch.tensor([[2, 5], [3, 10]]))
    after = pool.flatten(2, 3)
    assert torch.equal(after[:, :, [2, 5, 3]], before[:, :, [5, 2, 9]])
    kept = [i for i in range(12) if i not in (2, 3, 5)]
    assert torch.equal(after[:, :, kept], before[:, :, kept])


def compare_compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    by_kernel, by_reference = pool.clone(), pool.clone()
    with force("triton"):
        compact_kv(by_kernel, source, target)
    with force("reference"):
        compact_kv(by_reference, source, target)
    assert torch.equal(by_kernel, by_reference)


@DTYPES
@pytest.mark.parametrize(("rows", "num", "heads", "size"), [(1, 1, 1, 2), (1, 7, 3, 64), (3, 4, 3, 64)])
def test_compaction_kernel_equals_reference(
    interpreter: Executor, rows: int, num: int, heads: int, size: int, dtype: torch.dtype
) -> None:
    pool = storage(2, 6, 5, heads, size, dtype)
    interpreter.submit(compare_compact, pool, *random_paths(30, rows, num)).result()
    cycle = torch.arange(num)[None]
    interpreter.submit(compare_compact, pool, cycle, cycle.roll(1, 1)).result()


def compare_store(pages: KVPages, k: Tensor, v: Tensor, slot: Tensor) -> None:
    results = []
    for kernels in ("triton", "reference"):
        copy = KVPages(pages.k.clone(), pages.v.clone())
        with force(kernels):
            store_kv(copy, k, v, slot)
        results.append(copy)
    assert torch.equal(results[0].k, results[1].k) and torch.equal(results[0].v, results[1].v)


def heads_of_tokens(pages: KVPages, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return K in rows of its own, V as a slice of wider rows, and slots."""
    num_pages, page_size, G, E = pages.k.shape
    k, wide = torch.randn(tokens, G, E), torch.randn(tokens, 3 * G, E)
    v, slot = wide.to(pages.v)[:, 2 * G :], torch.randperm(num_pages * page_size)[:tokens]
    return k.to(pages.k), v, slot.to(pages.k.device)


@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 3, 64), (1, 1, 2), (9, 3, 64)])
def test_store_kernel_equals_reference(
    interpreter: Executor, tokens: int, heads: int, size: int, dtype: torch.dtype
) -> None:
    pages = KVPages(*storage(1, 6, 5, heads, size, dtype)[:, 0])
    interpreter.submit(compare_store, pages, *heads_of_tokens(pages, tokens)).result()


@DTYPES
def test_kernel_stores_to_interleaved_pages_and_skips_negative_slots(interpreter: Executor, dtype: torch.dtype) -> None:
    interpreter.submit(compare_interleaved, dtype).result()


def compare_interleaved(dtype: torch.dtype) -> None:
    apart = KVPages(*storage(1, 6, 5, 3, 64, dtype)[:, 0])
    joined = torch.cat((apart.k, apart.v), -1)
    k, v, slot = heads_of_tokens(apart, 9)
    store_kv(apart, k[2:], v[2:], slot[2:])
    slot[:2] = -1
    with force("triton"):
        store_kv(KVPages(*joined.chunk(2, -1)), k, v, slot)
    assert torch.equal(joined, torch.cat((apart.k, apart.v), -1))


@DTYPES
def test_compaction_of_separate_layers_equals_that_of_a_pool(interpreter: Executor, dtype: torch.dtype) -> None:
    interpreter.submit(compare_compact_rows, dtype).result()


def compare_compact_rows(dtype: torch.dtype) -> None:
    pool = storage(2, 6, 5, 3, 64, dtype)
    source, target = random_paths(30, 3, 4)
    layers = [pool[i, j].flatten(0, 1).flatten(1).clone() for i in range(2) for j in range(2)]
    compact_kv(pool, source, target)
    for kernels in ("triton", "reference"):
        copies = [layer.clone() for layer in layers]
        with force(kernels), given_by_address(copies):
            compact_rows(SlotRows.of(copies), source, target)
        expected = [pool[i, j].flatten(0, 1).flatten(1) for i in range(2) for j in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(copies, expected, strict=True))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (3, 64)])
def test_kernels_on_a_gpu(heads: int, size: int, dtype: torch.dtype) -> None:
    pool = storage(36, 64, 16, heads, size, dtype, "cuda")
    for rows, num in ((1, 17), (8, 17), (4, 64)):
        compare_compact(pool, *random_paths(64 * 16, rows, num, "cuda"))
    cycle = torch.arange(64, device="cuda")[None]
    compare_compact(pool, cycle, cycle.roll(1, 1))
    pages = KVPages(pool[0, 3], pool[1, 3])
    for tokens in (1, 700):
        compare_store(pages, *heads_of_tokens(pages, tokens))
