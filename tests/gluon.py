"""Gluon kernels on a CPU: torch runs them, program by program.

A layout sets which thread holds which element, and changes no value. So layouts are ignored here, and a kernel becomes
a function of whole tensors. The compiler checks layouts, and a GPU everything. Programs that wait for each other are
threads.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ONE_AT_A_TIME = threading.Lock()
WAIT_S = 60
DEADLINE = SimpleNamespace(at=0.0)
"""Time by which a kernel must end whose programs wait for each other."""


@dataclass(frozen=True)
class Pointer:
    """Addresses in a tensor's memory."""

    memory: Tensor
    place: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        """Returns a pointer to the first element of a tensor, which may be a view."""
        size = x.untyped_storage().nbytes() // x.itemsize
        return cls(x.as_strided((size,), (1,), 0), x.storage_offset())

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


def as_pointers(arg: Any) -> Any:
    """Returns an argument of a kernel with pointers in place of tensors, alone and in tuples."""
    if isinstance(arg, tuple):
        return tuple(map(as_pointers, arg))
    return Pointer.to(arg) if isinstance(arg, Tensor) else arg


def load(at: Pointer, mask: Any = None, other: float = 0, cache_modifier: str = "") -> Tensor:
    place = torch.as_tensor(at.place)
    if mask is None:
        return at.memory[_from_start(place)].clone()
    seen = torch.as_tensor(mask).expand_as(place)
    return torch.where(seen, at.memory[_from_start(torch.where(seen, place, 0))], other).to(at.memory.dtype)


def store(at: Pointer, value: Any, mask: Any = True) -> None:
    place, value, mask = torch.broadcast_tensors(*map(torch.as_tensor, (at.place, value, mask)))
    at.memory[_from_start(place[mask])] = value[mask].to(at.memory.dtype)


def _from_start(place: Tensor) -> Tensor:
    """Checks for negative indices, which torch counts from the end. It checks the upper bound itself."""
    assert not (place < 0).any(), "memory before the tensor"
    return place


def atomic_add(at: Pointer, value: int, sem: str) -> Tensor:
    assert time.monotonic() < DEADLINE.at, "a grid barrier is never reached"
    with ONE_AT_A_TIME:
        before = load(at)
        store(at, before + value)
        return before


def multiply(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return y + a.float() @ b.float()


@dataclass(frozen=True)
class Shared:
    """Shared memory of a program. Elements that were never written are NaN."""

    memory: Tensor

    @classmethod
    def allocate(cls, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return cls(torch.zeros(shape)) if dtype == torch.int64 else cls(torch.full(shape, torch.nan, dtype=dtype.torch))

    def index(self, place: Any) -> Shared:
        """Returns one stage. Pieces of rows are joined."""
        found = self.memory[int(place)]
        return Shared(found.movedim(0, 1).flatten(1) if found.dim() == 3 else found)

    def slice(self, first: int, length: int) -> Shared:
        return Shared(self.memory[first : first + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        """Reinterprets lines as rows of a wide matrix: all rows of the first piece, then those of the next."""
        assert dtype == self.dtype
        (count, rows, length), line = shape, self.shape[2]
        return Shared(self.memory.view(shape if length == line else (count, length // line, rows, line)))

    def load(self, layout: Any) -> Tensor:
        return self.memory.clone()

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    @property
    def layout(self) -> None:
        return None

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.memory.dtype
        self.memory.copy_(value)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype


def multiply_shared(a: Shared | Tensor, b: Shared, y: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left = a.memory if isinstance(a, Shared) else a
    return multiply(left, b.memory, y if use_acc else torch.zeros_like(y))


@dataclass
class Barrier:
    """A barrier whose phase ends when all arrivals and all announced bytes are in."""

    count: int
    missing: int
    num_bytes: int = 0
    phase: int = 0

    def change(self, arrived: int, num_bytes: int) -> None:
        self.missing, self.num_bytes = self.missing - arrived, self.num_bytes + num_bytes
        assert self.missing >= 0, "more arrivals than a phase takes"
        if self.missing == self.num_bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Barriers:
    """Barriers in shared memory, by address. A long wait counts as a deadlock."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.found: dict[int, Barrier] = {}
        self.changed = threading.Condition()

    def init(self, place: Shared, count: int) -> None:
        self.found[place.memory.data_ptr()] = Barrier(count, count)

    def change(self, place: Shared, arrived: int, num_bytes: int) -> None:
        with self.changed:
            self.found[place.memory.data_ptr()].change(arrived, num_bytes)
            self.changed.notify_all()

    def expect(self, place: Shared, num_bytes: int) -> None:
        self.change(place, 1, num_bytes)

    def arrive(self, place: Shared, pred: Any = True) -> None:
        if pred:
            self.change(place, 1, 0)

    def wait(self, place: Shared, parity: Any) -> None:
        barrier = self.found[place.memory.data_ptr()]
        with self.changed:
            assert self.changed.wait_for(lambda: barrier.phase % 2 != int(parity), timeout=WAIT_S), (
                "a barrier is never completed"
            )


@dataclass(frozen=True)
class Blocks:
    """A stand-in for the descriptor of a matrix that is copied block by block, with zeros past its end."""

    matrix: Tensor
    shape: tuple[int, int]
    layout: None = None

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(torch=self.matrix.dtype, primitive_bitwidth=8 * self.matrix.itemsize)

    def copy(self, at: list[Any], barriers: Barriers, barrier: Shared, place: Shared) -> None:
        assert place.memory.shape == self.shape
        (row, column), (rows, columns) = map(int, at), self.shape
        block = self.matrix[row : row + rows, column : column + columns]
        place.memory.fill_(0)[: len(block), : block.shape[1]] = block
        barriers.change(barrier, 0, -rows * columns * self.matrix.itemsize)


LAYOUTS = "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout", "DistributedLinearLayout"
OF_TORCH = "float32", "int32", "int64", "exp", "exp2", "log2", "sqrt", "where", "reshape", "permute"
LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(LAYOUTS, lambda *_: None),
    **{name: getattr(torch, name) for name in OF_TORCH},
    "arange": lambda first, last, layout: torch.arange(first, last, dtype=torch.int32),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "convert_layout": lambda x, layout: x,
    "split": lambda x: x.unbind(-1),
    "sum": lambda x, axis: x.sum(axis),
    "max": lambda x, axis: x.amax(axis),
    "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "cdiv": lambda a, b: -(-a // b),
    "static_range": range,
    "allocate_shared_memory": Shared.allocate,
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
}


class Interpreted:
    """A stand-in for a kernel. Programs run one after the other, or all together, and then the first of the grid start
    last. Tensors become pointers to their memory."""

    def __init__(self, kernel: Any, together: bool = False) -> None:
        module, self.arg_names, self.grids = kernel.fn.__globals__, kernel.arg_names, list[tuple[int, ...]]()
        self.kernel, self.together, self.current = kernel, together, threading.local()
        gl = SimpleNamespace(**LANGUAGE, program_id=self.program_id, warp_specialize=self.warp_specialize)
        space = {name: getattr(value, "value", value) for name, value in module.items()}  # constants are wrapped
        space |= {"gl": gl, "mma_v2": multiply, "tl": SimpleNamespace(debug_barrier=lambda: None)}
        barriers = Barriers()
        copy = lambda blocks, at, barrier, place: blocks.copy(at, barriers, barrier, place)  # noqa: E731
        space |= {"mbarrier": barriers, "tma": SimpleNamespace(async_copy_global_to_shared=copy)}
        space |= {"warpgroup_mma": multiply_shared, "fence_async_shared": lambda: None}
        space |= {"warpgroup_mma_wait": lambda num_outstanding, deps: deps if len(deps) > 1 else deps[0]}
        functions = {name: f for name, f in module.items() if hasattr(f, "is_gluon")}
        for borrowed in functions.values():  # with the constants of the module that it is from
            space = {name: getattr(v, "value", v) for name, v in borrowed.fn.__globals__.items()} | space
        space |= {name: FunctionType(f.fn.__code__, space, name, f.fn.__defaults__) for name, f in functions.items()}
        self.run, self.constants = FunctionType(kernel.fn.__code__, space, "kernel", kernel.fn.__defaults__), space

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.current.program[axis], dtype=torch.int32)

    def warp_specialize(self, parts: list[tuple[Any, Any]], num_warps: list[int], num_registers: list[int]) -> None:
        assert len(num_warps) == len(num_registers) == len(parts) - 1
        program = self.current.program

        def run(part: tuple[Any, Any]) -> None:
            self.current.program = program
            part[0](*part[1])

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(run, parts))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            constants = {name: value for name, value in options.items() if name in self.arg_names}
            pointers = [as_pointers(arg) for arg in args]
            self.grids.append(grid)
            DEADLINE.at = time.monotonic() + WAIT_S

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
