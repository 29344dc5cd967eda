"""Compiling Triton kernels where there is no GPU. The interpreter runs plain Python; only the compiler knows the
language."""

from __future__ import annotations

from typing import Any

import pytest


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """The PTX of a kernel. Arguments that neither mapping names are pointers to float32. All are aligned, as
    torch's are.

    Kernels that can start early must, and wait before they store anything.
    """
    triton = pytest.importorskip("triton")
    early = "OVERLAP" in kernel.arg_names
    if early:
        constants, options = {"OVERLAP": True, **constants}, {"launch_pdl": True, **options}
    known = {name: types.get(name, "*fp32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(known.values()) if type.startswith("*")}
    source = triton.compiler.ASTSource(kernel, known, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    ptx = str(triton.compile(source, target=target, options=options).asm["ptx"])
    assert not early or 0 < ptx.index("griddepcontrol.wait") < ptx.index("st.global")
    return ptx
