"""Helpers of Gluon kernels: indices of three-dimensional tensors, whose first dimension is the warp, and barriers."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetspec.ops import layouts


@gluon.jit
def index(SIZE: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """Returns 0, 1, .. along one of three dimensions of a layout."""
    if DIM == 0:
        return gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    elif DIM == 1:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


MAX_PROGRAMS = tl.constexpr(layouts.MAX_BARRIER_PROGRAMS)


@gluon.jit
def grid_barrier(counter_ptr, number, count):
    """Waits for `count` programs, of which this is `number`; their earlier stores are visible afterwards. Together they
    add MAX_PROGRAMS to the counter, so that it needs no reset, which the next kernel would wait for."""
    tl.debug_barrier()
    share = gl.where(number == count - 1, MAX_PROGRAMS - number, 1)
    before = gl.atomic_add(counter_ptr, share, sem="acq_rel")
    here, goal = before + share, (before & -MAX_PROGRAMS) + MAX_PROGRAMS
    while here - goal < 0:
        here = gl.atomic_add(counter_ptr, 0, sem="acquire")
