"""Triton kernels where there is no GPU. The interpreter runs plain Python; only the compiler knows the language."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

HOPPER = 90
"""Its compute capability."""


def interpret_quickly() -> None:
    """Spare Triton's interpreter what takes most of its time, in a process that does nothing else.

    Whenever a kernel or a function in one is called it replaces its whole language, and puts it back: once is enough.
    It looks up types in a table that it makes for every lookup, and looks for overflows by several of its own steps.
    And it sorts by steps of a network, where numpy sorts.
    """
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    scope = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: scope

    dtypes: dict[str, Any] = {}
    dtype_of = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    def topk(numbers: Any, k: int) -> Any:
        greatest = np.sort(numbers.handle.data)[..., ::-1][..., :k]
        handle = interpreter.TensorHandle(np.ascontiguousarray(greatest), numbers.dtype)
        return language.tensor(handle, language.block_type(numbers.dtype, list(greatest.shape)))

    def check_overflow(self: Any, left: Any, right: Any, step: Any) -> None:
        if (kind := left.dtype).int_bitwidth < 64:
            exact = exactly[step.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"{kind} overflows in {step.__name__}"

    exactly = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    interpreter._get_np_dtype, language.topk = get_np_dtype, topk


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """The PTX of a kernel. One that can start early must, and wait before it stores anything."""
    ptx = str(_compile(kernel, types, constants, HOPPER, options).asm["ptx"])
    early = "OVERLAP" in kernel.arg_names
    assert not early or 0 < ptx.index("griddepcontrol.wait") < ptx.index("st.global")
    return ptx


def fetches_early(ptx: str) -> bool:
    """Whether a kernel asks for a weight before it waits."""
    return 0 < ptx.index("cp.async.bulk.prefetch.L2") < ptx.index("griddepcontrol.wait")


def shared_bytes(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, int]
) -> int:
    """Shared memory that a program of a kernel takes, on a GPU of a compute capability."""
    return int(_compile(kernel, types, constants, capability, options).metadata.shared)


def _compile(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, int]
) -> Any:
    """Arguments that neither mapping names are pointers to float32. All are aligned, as torch's are."""
    triton = pytest.importorskip("triton")
    if "OVERLAP" in kernel.arg_names:
        early = capability >= HOPPER
        constants, options = {"OVERLAP": early, **constants}, {"launch_pdl": early, **options}
    known = {name: types.get(name, "*fp32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(known.values()) if type.startswith("*")}
    source = triton.compiler.ASTSource(kernel, known, constants, aligned)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32), options=options)
