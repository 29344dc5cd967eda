"""Kernels in Gluon on a CPU: torch does what they say, program by program.

A layout tells which thread holds what, and changes no number. So all of them are left out here, and a kernel becomes a
function of whole tensors. The compiler checks the layouts, and a GPU all of it. Programs that wait for each other are
threads.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ONE_AT_A_TIME = threading.Lock()


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


def load(at: Pointer, mask: Any = None, other: float = 0, cache_modifier: str = "") -> Tensor:
    place = torch.as_tensor(at.place)
    if mask is None:
        return at.memory[place].clone()
    seen = torch.as_tensor(mask).expand_as(place)
    return torch.where(seen, at.memory[torch.where(seen, place, 0)], other).to(at.memory.dtype)


def store(at: Pointer, value: Any, mask: Any = True) -> None:
    place, value, mask = torch.broadcast_tensors(*map(torch.as_tensor, (at.place, value, mask)))
    at.memory[place[mask]] = value[mask].to(at.memory.dtype)


def atomic_add(at: Pointer, value: int, sem: str) -> Tensor:
    with ONE_AT_A_TIME:
        before = load(at)
        store(at, before + value)
        return before


def multiply(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return y + a.float() @ b.float()


LAYOUTS = "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout", "DistributedLinearLayout"
OF_TORCH = "float32", "int32", "int64", "exp", "exp2", "log2", "sqrt", "where", "reshape", "permute"
LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(LAYOUTS, lambda *_: None),
    **{name: getattr(torch, name) for name in OF_TORCH},
    "arange": lambda first, last, layout: torch.arange(first, last, dtype=torch.int32),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "convert_layout": lambda x, layout: x,
    "sum": lambda x, axis: x.sum(axis),
    "max": lambda x, axis: x.amax(axis),
    "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "cdiv": lambda a, b: -(-a // b),
    "static_range": range,
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
}


class Interpreted:
    """Stands in for a kernel. Programs run one after the other, or all TOGETHER, and tensors become pointers to their
    memory. The programs that begin last are the first of the grid."""

    def __init__(self, kernel: Any, together: bool = False) -> None:
        module, self.arg_names, self.grids = kernel.fn.__globals__, kernel.arg_names, list[tuple[int, ...]]()
        self.kernel, self.together, self.current = kernel, together, threading.local()
        program_id = lambda axis: torch.tensor(self.current.program[axis], dtype=torch.int32)  # noqa: E731
        gl = SimpleNamespace(**LANGUAGE, program_id=program_id)
        space = {name: getattr(value, "value", value) for name, value in module.items()}  # constants are wrapped
        space |= {"gl": gl, "mma_v2": multiply, "tl": SimpleNamespace(debug_barrier=lambda: None)}
        functions = {name: f for name, f in module.items() if hasattr(f, "is_gluon") and f.is_gluon()}
        space |= {name: FunctionType(f.fn.__code__, space, name, f.fn.__defaults__) for name, f in functions.items()}
        self.run = FunctionType(kernel.fn.__code__, space, "kernel", kernel.fn.__defaults__)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            constants = {name: value for name, value in options.items() if name in self.arg_names}
            constants |= {"TOGETHER": True} if self.together else {}
            pointers = [Pointer.to(arg) if isinstance(arg, Tensor) else arg for arg in args]
            self.grids.append(grid)

            def run(program: tuple[int, ...]) -> None:
                self.current.program = program
                self.run(*pointers, **constants)

            programs = list(product(*map(range, grid)))
            if not self.together:
                for program in programs:
                    run(program)
                return
            with ThreadPoolExecutor(len(programs)) as pool:
                list(pool.map(run, reversed(programs)))

        return launch
