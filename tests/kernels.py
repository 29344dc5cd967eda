"""Triton kernels without a GPU: interpreted as plain Python, or compiled for a GPU that is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jetspec.ops import select
from tests.unwritten import fill_unwritten

HOPPER = 90
"""Compute capability."""
_by_address: list[Any] = []


@contextmanager
def given_by_address(tensors: Sequence[Any]) -> Iterator[None]:
    """Lets kernels access tensors whose addresses they read from another tensor."""
    _by_address.extend(tensors)
    try:
        yield
    finally:
        _by_address.clear()


def interpret_quickly() -> None:
    """Makes Triton's interpreter faster and stricter, in a process that does nothing else."""
    from triton import language
    from triton.runtime import interpreter

    fill_unwritten()
    _patch_language_once(interpreter, language)
    _cache_types(interpreter)
    _cache_shapes(interpreter, language)
    _check_overflow_by_numpy(interpreter)
    _sort_by_numpy(interpreter, language)
    _stay_within_tensors(interpreter)


def _patch_language_once(interpreter: Any, language: Any) -> None:
    """Patches the language once, not at every call of a kernel or of a function in one, and without layers between."""
    scope = SimpleNamespace(restore=lambda: None)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        setattr(owner, name, call)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: scope


def _cache_types(interpreter: Any) -> None:
    """Caches NumPy types, for which the interpreter makes a table at every lookup."""
    dtypes: dict[str, Any] = {}
    dtype_of = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = get_np_dtype


def _cache_shapes(interpreter: Any, language: Any) -> None:
    """Caches shapes, which every operation computes several times. Few distinct ones occur."""
    blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    make_block, make_tensor = language.block_type.__init__, language.tensor.__init__
    semantic = interpreter.TritonSemantic
    broadcast, convert = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    constants: dict[tuple[object, ...], Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    def broadcast_unequal(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        are_blocks = left.type.is_block() and right.type.is_block()
        if are_blocks and left.type.shape.values == right.type.shape.values:
            return left, right
        return broadcast(self, left, right)

    def convert_unequal(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        """Two operands of one type stay. A number beside a tensor is made a tensor once."""
        if isinstance(left, language.tensor) and left.dtype.name in ("fp32", "int32", "int64"):
            if isinstance(right, language.tensor):
                if left.type.name == right.type.name:
                    return left, right
            elif isinstance(right, (int, float)):
                key = (left.type.name, type(right), right, options, *named.items())
                if key not in constants:
                    left, filled = convert(self, left, right, *options, **named)
                    if left.type.name != key[0] or right != right:
                        return left, filled
                    constants[key] = filled
                return left, constants[key]
        return convert(self, left, right, *options, **named)

    language.block_type.__init__, language.tensor.__init__ = init_block, init_tensor
    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = broadcast_unequal, convert_unequal


def _check_overflow_by_numpy(interpreter: Any) -> None:
    """Replaces a check that takes several operations of the language."""
    exactly = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_overflow(self: Any, left: Any, right: Any, step: Any) -> None:
        if (kind := left.dtype).int_bitwidth < 64:
            exact = exactly[step.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"{kind} overflows in {step.__name__}"

    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow


def _sort_by_numpy(interpreter: Any, language: Any) -> None:
    """Replaces a sorting network."""

    def topk(numbers: Any, k: int) -> Any:
        greatest = np.sort(numbers.handle.data)[..., ::-1][..., :k]
        handle = interpreter.TensorHandle(np.ascontiguousarray(greatest), numbers.dtype)
        return language.tensor(handle, language.block_type(numbers.dtype, list(greatest.shape)))

    language.topk = topk


def _stay_within_tensors(interpreter: Any) -> None:
    """Checks that a kernel accesses only its tensors. A GPU faults only at unmapped memory."""
    memory, take = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
    starts, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def take_tensors(self: Any, positional: Any, named: Any) -> Any:
        nonlocal starts, ends
        taken = take(self, positional, named)
        storages = {(held.data_ptr(), held.nbytes()) for held in _storages((taken[0], *taken[1].values(), _by_address))}
        starts, lengths = np.array(sorted(storages), np.uint64).reshape(-1, 2).T
        ends = starts + lengths
        return taken

    def check(address: Any, mask: Any, size: int) -> None:
        touched = address[np.asarray(mask, bool)]
        place = np.searchsorted(starts, touched, side="right") - 1
        assert (place >= 0).all() and (touched + np.uint64(size) <= ends[place]).all(), "memory of no tensor"

    def load(address: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check(address, mask, np.dtype(dtype).itemsize)
        return memory.load(address, mask, other, dtype)

    def store(address: Any, value: Any, mask: Any) -> Any:
        check(address, mask, value.itemsize)
        return memory.store(address, value, mask)

    def atomic_rmw(step: Any, address: Any, value: Any, mask: Any, order: Any) -> Any:
        check(address, mask, value.itemsize)
        return memory.atomic_rmw(step, address, value, mask, order)

    interpreter.GridExecutor._init_args_hst = take_tensors
    interpreter._interpreter = SimpleNamespace(load=load, store=store, atomic_rmw=atomic_rmw)


def _storages(values: Any) -> Iterator[Any]:
    """Storages of tensors, alone, in tuples and under descriptors."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _storages(value)
        elif hasattr(tensor := getattr(value, "base", value), "untyped_storage"):
            yield tensor.untyped_storage()


@dataclass(frozen=True)
class Compiled:
    """A kernel that was launched, as compiled."""

    name: str
    ptx: str
    shared: int
    """Bytes of shared memory of a program."""


def compiled(run: Callable[[], object], capability: int = HOPPER, only: str | None = None) -> list[Compiled]:
    """Compiles the kernels that `run` launches, or those of a name, for a GPU that is absent. They are not executed, so
    that tensors may be on the device "meta". A kernel that takes part in dependent launch must wait before its first
    store."""
    triton = pytest.importorskip("triton")
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target, found = triton.backends.compiler.GPUTarget("cuda", capability, 32), list[Compiled]()
    backend = make_backend(target)

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if only not in (None, self.fn.__name__):
            return
        bound, types, _ = create_function_from_signature(self.signature, self.params, backend)(*args, **options)
        parsed, *signature = self._pack_args(backend, options, bound, types, options)
        source = (GluonASTSource if self.is_gluon() else ASTSource)(self, *signature)
        made = triton.compile(source, target=target, options=vars(parsed))
        ptx = str(made.asm["ptx"])
        assert not options.get("OVERLAP") or 0 < ptx.index("griddepcontrol.wait") < ptx.index("st.global")
        found.append(Compiled(self.fn.__name__, ptx, int(made.metadata.shared)))

    device = select.Device("cuda", divmod(capability, 10), 132, 228 * 1024)
    with pytest.MonkeyPatch.context() as patch, select.force("triton"), torch.no_grad():
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(select, "device_of", lambda _: device)
        run()
    return found
