"""Triton kernels where there is no GPU. The interpreter runs plain Python; only the compiler knows the language."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

HOPPER = 90
"""Its compute capability."""


def interpret_quickly() -> None:
    """Spare Triton's interpreter what takes most of its time.

    Whenever one kernel function calls another it searches its whole language for functions to replace. The names stay
    the same, so it is to search once. And it sorts by exclusive ors, which it takes one by one where numpy takes all.
    """
    import numpy as np
    from triton.language import standard
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    reduce_any = interpreter.ReduceOps.generic_reduce

    def reduce(self: Any, input: Any) -> Any:
        if self.combine_fn is not standard._xor_combine:
            return reduce_any(self, input)
        values = input[0].handle.data
        return self.to_tensor(np.bitwise_xor.reduce(values, self.axis, keepdims=self.keep_dims), input[0].dtype)

    interpreter._patch_builtin, interpreter.ReduceOps.generic_reduce = patch_builtin, reduce


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
