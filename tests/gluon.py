"""Kernels in Gluon on a CPU: torch does what they say, program by program.

A layout tells which thread holds what, and changes no number. So all of them are left out here, and a kernel becomes a
function of whole tensors. The compiler checks the layouts, and a GPU all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pointer:
    """Places in a tensor's memory."""

    memory: Tensor
    place: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        """To the first number of a tensor, which may be a view of another."""
        size = x.untyped_storage().nbytes() // x.itemsize
        return cls(x.as_strided((size,), (1,), 0), x.storage_offset())

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


def load(at: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    seen = torch.ones_like(at.place, dtype=torch.bool) if mask is None else mask.expand_as(at.place)
    return torch.where(seen, at.memory[torch.where(seen, at.place, 0)], other).to(at.memory.dtype)


def store(at: Pointer, value: Tensor, mask: Tensor) -> None:
    place, value, mask = torch.broadcast_tensors(at.place, value, mask)
    at.memory[place[mask]] = value[mask]


def multiply(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return y + a.float() @ b.float()


def _no_layout(*args: Any) -> None:
    return None


LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(("NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout"), _no_layout),
    **{name: getattr(torch, name) for name in ("float32", "exp", "sqrt", "where")},
    "arange": lambda first, last, layout: torch.arange(first, last),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "convert_layout": lambda x, layout: x,
    "sum": lambda x, axis: x.sum(axis),
    "minimum": lambda a, b: torch.clamp(a, max=b),
    "load": load,
    "store": store,
}


class Interpreted:
    """Stands in for a kernel. Programs run one after the other, and tensors become pointers to their memory."""

    def __init__(self, kernel: Any) -> None:
        module, self.arg_names, self.grids = kernel.fn.__globals__, kernel.arg_names, list[tuple[int, ...]]()
        gl = SimpleNamespace(**LANGUAGE, program_id=lambda axis: self.program[axis])
        space = {**module, "gl": gl, "mma_v2": multiply}
        functions = {name: f for name, f in module.items() if hasattr(f, "is_gluon") and f.is_gluon()}
        space |= {name: FunctionType(f.fn.__code__, space, name, f.fn.__defaults__) for name, f in functions.items()}
        self.run = FunctionType(kernel.fn.__code__, space, "kernel", kernel.fn.__defaults__)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            constants = {name: value for name, value in options.items() if name in self.arg_names}
            pointers = [Pointer.to(arg) if isinstance(arg, Tensor) else arg for arg in args]
            self.grids.append(grid)
            for self.program in product(*map(range, grid)):
                self.run(*pointers, **constants)

        return launch
