"""What kernels in Gluon share: tensors of three dimensions, the first of which tells warps apart, and waiting."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetspec.ops import counters


@gluon.jit
def index(SIZE: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """0, 1, .. along one of three dimensions of a layout."""
    if DIM == 0:
        return gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    elif DIM == 1:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def wait(OVERLAP: gl.constexpr):
    """Until the kernel ahead has finished, as `overlap_triton` tells."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


MOST = tl.constexpr(counters.MOST)


@gluon.jit
def grid_barrier(counter_ptr, number, count):
    """Wait until `count` programs have come here, of which this is that `number`. What they stored before can be read
    then. Together they add MOST to the counter: nobody has to set it back, which all who come next would wait for."""
    tl.debug_barrier()
    share = gl.where(number == count - 1, MOST - number, 1)
    before = gl.atomic_add(counter_ptr, share, sem="acq_rel")
    here, goal = before + share, (before & -MOST) + MOST
    while here - goal < 0:
        here = gl.atomic_add(counter_ptr, 0, sem="acquire")
