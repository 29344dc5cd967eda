"""What kernels in Gluon share: tensors of three dimensions, the first of which tells warps apart, and waiting."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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


@gluon.jit
def meet(counter_ptr, count):
    """Wait until `count` programs have come here. What they stored before can be read then."""
    tl.debug_barrier()
    here = gl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while here < count:
        here = gl.atomic_add(counter_ptr, 0, sem="acquire")


@gluon.jit
def leave(counter_ptr, count):
    """Where they have met. The last one sets the counter back to zero."""
    if gl.atomic_add(counter_ptr, 1, sem="relaxed") + 1 == 2 * count:
        gl.store(counter_ptr, 0)
