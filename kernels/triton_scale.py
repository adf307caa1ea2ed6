"""A matrix times a number that the device knows, rounded to another type on its way: out = x * scale.

One read and one write of the matrix; neither where it is its own result and the number is 1, as it is when a loss is
the last thing computed. (Waiting for the number on the host would drain the device.) ``x`` and ``out`` may be one
memory, or two stretches of one that do not overlap.
"""

import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.triton_problem import cdiv, launch_context

_BLOCK = 8192
_WARPS = 8


@triton.jit(do_not_specialize=["N"])
def _scale_kernel(x, out, scale, N, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(scale).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < (tl.where(factor == 1.0, 0, N) if IN_PLACE else N)
    values = tl.load(x + at, mask=inside).to(tl.float32) * factor
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def scale_to(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """out = x * scale: contiguous, of one shape and of any types but fp64; ``scale`` a number on their device."""
    in_place = x.data_ptr() == out.data_ptr() and x.dtype == out.dtype
    with launch_context(x.device):
        _scale_kernel[(cdiv(x.numel(), _BLOCK),)](
            x, out, scale, x.numel(), IN_PLACE=in_place, BLOCK=_BLOCK, num_warps=_WARPS
        )
