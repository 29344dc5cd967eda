"""Compiling Triton kernels where there is no GPU. The interpreter runs plain Python; only the compiler knows the
language."""

from __future__ import annotations

from typing import Any

import pytest


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """The PTX of a kernel. Arguments that neither mapping names are pointers to float32."""
    triton = pytest.importorskip("triton")
    known = {name: types.get(name, "*fp32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, known, constants)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options=options).asm["ptx"])
