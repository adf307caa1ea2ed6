"""A matrix times a number that the device knows, rounded to another type on its way: out = x * scale.

One read and one write of the matrix; neither where it is its own result and the number is 1, as it is when a loss is
the last thing computed. (Waiting for the number on the host would drain the device.) ``x`` and ``out`` may be one
memory, or two stretches of one that do not overlap.
"""

import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.triton_problem import cdiv, launch_context

_BLOCK = 4096
_WARPS = 8
_PROGRAMS = 2048


@triton.jit(do_not_specialize=["N"])
def _scale_kernel(x, out, scale, N, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(scale).to(tl.float32)
    # Not cdiv: N + BLOCK may pass 2^31.
    blocks = (N - 1) // BLOCK + 1
    if IN_PLACE:
        blocks = tl.where(factor == 1.0, 0, blocks)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < N).to(tl.float32) * factor
        tl.store(out + at, values.to(out.dtype.element_ty), mask=at < N)


def scale_to(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """out = x * scale: contiguous, of one shape and of any types but fp64; ``scale`` a number on their device."""
    in_place = x.data_ptr() == out.data_ptr() and x.dtype == out.dtype
    with launch_context(x.device):
        # As many as run at once: with nothing to do, a program per block would take half a millisecond to say so.
        _scale_kernel[(min(cdiv(x.numel(), _BLOCK), _PROGRAMS),)](
            x, out, scale, x.numel(), IN_PLACE=in_place, BLOCK=_BLOCK, num_warps=_WARPS
        )
