"""Norms and rotations equal their formulas, and the kernels equal the references."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.ops import HeadNorm, rms_norm, rope, rotate, rotate_qkv, rotate_store, rotate_store_layers
from jetspec.ops.select import force
from jetspec.types import KVPages

EPS = 1e-5
# In bf16 the references round more often than the kernels: they differ by a few units in the last place.
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(3, 5, 16), (1, 16), (16,)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_of_one_row_has_gradients() -> None:
    x, weight = torch.randn(1, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x.double(), weight.double()))
    rms_norm(x, weight, EPS).sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_rotation_is_by_the_angle_and_scores_depend_on_distance_alone() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    q, k = torch.randn(6), torch.randn(6)

    def at(x: Tensor, position: int) -> Tensor:
        return rotate(x[None, None], rope(torch.tensor([position]), inv_freq, 1.0, torch.float32))[0, 0]

    rotated = torch.view_as_complex(torch.stack((q[:3], q[3:]), -1)) * torch.exp(1j * 7 * inv_freq)
    torch.testing.assert_close(at(q, 7), torch.cat((rotated.real, rotated.imag)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(at(q, 12) @ at(k, 9), at(q, 3) @ at(k, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normalized_then_rotated_and_values_unchanged(normed: bool) -> None:
    qkv, tables, norm = heads((2, 3), num_heads=4, num_kv_heads=2, size=8, normed=normed)
    q, k, v = rotate_qkv(qkv, 2, tables, norm)
    plain_q, plain_k, plain_v = qkv.split((4, 2, 2), -2)
    if norm is not None:
        plain_q, plain_k = rms_norm(plain_q, norm.q, EPS), rms_norm(plain_k, norm.k, EPS)
    torch.testing.assert_close(q, rotate(plain_q, tables))
    torch.testing.assert_close(k, rotate(plain_k, tables))
    assert torch.equal(v, plain_v)


@pytest.mark.parametrize("num_heads", [4, 0])
def test_keys_and_values_are_stored_in_their_slots(num_heads: int) -> None:
    qkv, tables, norm = heads((5,), num_heads, num_kv_heads=2, size=8, normed=True)
    pages, slot = KVPages(*torch.zeros(2, 4, 3, 2, 8)), torch.tensor([7, 0, 11, 4, 3])
    q, k, v = rotate_qkv(qkv, 2, tables, norm)
    assert torch.equal(rotate_store(qkv, 2, tables, norm, pages, slot), q)
    for stored, expected in ((pages.k, k), (pages.v, v)):
        assert torch.equal(stored.flatten(0, 1)[slot], expected)
        assert int(stored.flatten(0, 1).any(-1).any(-1).sum()) == len(slot)


def heads(
    lead: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    size: int,
    normed: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, tuple[Tensor, Tensor], HeadNorm | None]:
    torch.manual_seed(0)
    qkv = torch.randn((*lead, num_heads + 2 * num_kv_heads, size), device=device).to(dtype)
    inv_freq = 10_000 ** (-torch.arange(0, size, 2, device=device) / size)
    with force("reference"):
        tables = rope(torch.randint(30_000, lead, device=device), inv_freq, 1.0, dtype)
    weights = torch.rand(2, size, device=device).to(dtype)
    return qkv, tables, HeadNorm(weights[0], weights[1], EPS) if normed else None


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def compare_norms(x: Tensor, weight: Tensor, tolerance: float) -> None:
    with force("triton"):
        got = rms_norm(x, weight, EPS)
    with force("reference"):
        assert_same((got,), (rms_norm(x, weight, EPS),), tolerance)


def compare_ropes(position: Tensor, size: int, dtype: torch.dtype, tolerance: float) -> None:
    inv_freq = 10_000 ** (-torch.arange(0, size, 2, device=position.device) / size)
    with force("triton"):
        got = rope(position, inv_freq, 1.25, dtype)
    with force("reference"):
        assert_same(got, rope(position, inv_freq, 1.25, dtype), tolerance)


def compare_rotations(
    qkv: Tensor, tables: tuple[Tensor, Tensor], norm: HeadNorm | None, num_kv_heads: int, tolerance: float
) -> None:
    """Compare `rotate_qkv` and, for (T, X, E), `rotate_store`."""
    slots = len(qkv) + 3
    slot = torch.randperm(slots, device=qkv.device)[: len(qkv)]

    def run() -> tuple[Tensor, ...]:
        out = rotate_qkv(qkv, num_kv_heads, tables, norm)
        if qkv.dim() > 3:
            return out
        pages = KVPages(*torch.zeros((2, slots, 1, num_kv_heads, qkv.shape[-1]), device=qkv.device).to(qkv.dtype))
        return *out, rotate_store(qkv, num_kv_heads, tables, norm, pages, slot), pages.k, pages.v

    with force("triton"):
        got = run()
    with force("reference"):
        want = run()
    assert torch.equal(got[2], want[2]) and torch.equal(got[-1], want[-1])
    assert_same(got, want, tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (3, 2, 18), (0, 16)])
def test_norm_kernel_equals_reference(
    interpreter: Executor, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1:]).to(dtype)
    interpreter.submit(compare_norms, x, weight, tolerance).result()


@DTYPES
@pytest.mark.parametrize("shape", [(1,), (2, 5), (0,)])
def test_rope_kernel_equals_reference(
    interpreter: Executor, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    for size in (8, 10):
        interpreter.submit(compare_ropes, torch.randint(40_000, shape), size, dtype, tolerance).result()


@DTYPES
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("lead", "num_heads", "num_kv_heads", "size"),
    [((1,), 9, 3, 8), ((3,), 0, 2, 2), ((2, 2), 2, 1, 16), ((3,), 3, 1, 10), ((0,), 2, 1, 16)],
)
def test_rotation_kernel_equals_reference(
    interpreter: Executor,
    lead: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    size: int,
    normed: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    inputs = heads(lead, num_heads, num_kv_heads, size, normed, dtype)
    interpreter.submit(compare_rotations, *inputs, num_kv_heads, tolerance).result()


def compare_layers(scattered: bool, normed: bool, tolerance: float, device: str = "cpu") -> None:
    """Compare one call for all layers with one call per layer, for layers at equal and at unequal distances."""
    T, L, G, E, slots = 5, 3, 2, 8, 9
    kv, tables, _ = heads((T,), L * 2 * G, 0, E, normed=False, device=device)
    kv = kv.unflatten(1, (L, 2 * G))
    weights = torch.rand(2, L, E, device=device)
    norm_L = HeadNorm(weights[0], weights[1], EPS) if normed else None
    slot = torch.randperm(slots, device=device)[:T]

    def pages() -> list[KVPages]:
        storage = torch.zeros(2, 2 * L, slots, 1, G, E, device=device)
        places = (0, 3, 4) if scattered else (0, 2, 4)
        return [KVPages(storage[0, i], storage[1, i]) for i in places]

    one_by_one, together = pages(), pages()
    with force("reference"):
        for i in range(L):
            rotate_store(kv[:, i], G, tables, None if norm_L is None else norm_L.layer(i), one_by_one[i], slot)
    with force("triton"):
        rotate_store_layers(kv, tables, norm_L, together, slot)
    for got, want in zip(together, one_by_one, strict=True):
        assert_same((got.k, got.v), (want.k, want.v), tolerance)
        assert want.k.any()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
def test_layers_at_once_equal_layers_one_by_one(interpreter: Executor, scattered: bool, normed: bool) -> None:
    interpreter.submit(compare_layers, scattered, normed, 1e-5).result()


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
def test_layers_at_once_on_a_gpu(scattered: bool, normed: bool) -> None:
    compare_layers(scattered, normed, 1e-5, "cuda")


def compare_many(
    x: Tensor, weight: Tensor, inputs: tuple[Tensor, tuple[Tensor, Tensor], HeadNorm | None], num_kv_heads: int
) -> None:
    """Compare with the launch sizes for many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jetspec.ops.norm_rope_triton.MANY_TOKENS", 1)
        compare_norms(x, weight, 1e-5)
        compare_rotations(*inputs, num_kv_heads, 1e-5)


@pytest.mark.parametrize(("rows", "size"), [(1, 40), (7, 64), (2, 5000)])
def test_launch_sizes_for_many_tokens_equal_reference(interpreter: Executor, rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size), torch.randn(size)
    inputs = heads((rows,), 12, 4, 16, True, torch.float32)
    interpreter.submit(compare_many, x, weight, inputs, 4).result()


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("size", [576, 4096])
@pytest.mark.parametrize("rows", [1, 700, 5001])
def test_norm_kernel_on_a_gpu(rows: int, size: int, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = (torch.randn(s, device="cuda").to(dtype) for s in ((rows, size), (size,)))
    compare_norms(x, weight, tolerance)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("rows", [1, 700])
def test_rope_kernel_on_a_gpu(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    for size in (128, 80):
        compare_ropes(torch.randint(40_000, (rows,), device="cuda"), size, dtype, tolerance)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "normed"), [(32, 8, 128, True), (9, 3, 64, False), (32, 8, 80, False)]
)
@pytest.mark.parametrize("tokens", [1, 700, 5000])
def test_rotation_kernel_on_a_gpu(
    tokens: int, num_heads: int, num_kv_heads: int, size: int, normed: bool, dtype: torch.dtype, tolerance: float
) -> None:
    for count in (num_heads, 0):
        inputs = heads((tokens,), count, num_kv_heads, size, normed, dtype, "cuda")
        compare_rotations(*inputs, num_kv_heads, tolerance)
