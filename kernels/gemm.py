"""Matrix products whose result or accumulator is wider than their operands, and matrices made ready for them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_losses.kernels.host_read import HostRead

# torch.mm(..., out_dtype=float32) for 16-bit CUDA operands came with torch 2.8.
_TORCH_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

_NARROWING_BYTES = 8 * 2**20


def _has_wide_product(a: Tensor) -> bool:
    return _TORCH_HAS_OUT_DTYPE and a.is_cuda and a.dtype in (torch.float16, torch.bfloat16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is summed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_operand(b: Tensor) -> Tensor:
    """``b`` as ``wide_product`` will multiply it: widened here, once, where every product would widen it anew."""
    return b if _has_wide_product(b) else b.to(accumulator_dtype(b.dtype))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] -> [M, N] in the accumulator's dtype, never rounded to 16 bits on the way."""
    wide = accumulator_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if _has_wide_product(a):
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def added_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total [M, N] + a [M, K] @ b [K, N] in the accumulator's dtype; in total's memory, or in new where it is None."""
    if total is None:
        return wide_product(a, b)
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if _has_wide_product(a):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype))


def is_narrow(b: Tensor) -> bool:
    """Whether cuBLAS multiplies tall a @ b faster as (b^T @ a^T)^T: by 12% at 896 columns, by nothing from 1536 on."""
    return b.is_cuda and b.element_size() == 2 and b.shape[1] <= 1024


def narrow_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [K, N] of 16 bits, b narrow, rounded once, to ``dtype``: a view of (b^T @ a^T)^T.

    M is any number of tokens, and cuBLAS keeps its fast kernels for rows that begin at multiples of 16 bytes.
    """
    rows = len(a)
    transposed = a.new_empty(b.shape[1], rows + -rows % 8, dtype=dtype)[:, :rows]
    if dtype == a.dtype:
        return torch.mm(b.T, a.T, out=transposed).T
    return torch.mm(b.T, a.T, out_dtype=dtype, out=transposed).T


def added_tall_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``added_product``, whose result may be a transposed view, where a is tall and b may be narrow."""
    if not is_narrow(b):
        return added_product(total, a, b)
    if total is None and _has_wide_product(a):
        return narrow_product(a, b, accumulator_dtype(a.dtype))
    return added_product(None if total is None else total.T, b.T, a.T).T


def all_finite(weight: Tensor) -> HostRead:
    """A number that is finite where no row of ``weight`` [V, H] is infinite as a whole; one column says so.

    A head switches a token off by a row of -inf. Of an infinity here or there products make NaN, as torch's own do.
    """
    return HostRead(weight.detach()[:, 0].sum(dtype=accumulator_dtype(weight.dtype)))


def finite_for_product(weight: Tensor, finite: HostRead | None) -> Tensor:
    """``weight`` with its infinite entries set to 0; itself, not a copy, where ``all_finite`` has found none.

    The probability and the da of a token that is switched off are exactly 0, but 0 * -inf in the product da @ weight
    would be NaN. Without ``finite``, the host's answer, a copy is made.
    """
    if finite is not None and math.isfinite(finite.wait()):
        return weight
    return weight.masked_fill(weight.isinf(), 0)


def with_separate_rows(matrix: Tensor) -> Tensor:
    """Itself, or a copy, whose rows do not lie over each other and hold their entries side by side, as kernels step."""
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()


def narrowed(wide: Tensor, dtype: torch.dtype, write: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> Tensor:
    """``wide`` [M, N] rounded to ``dtype`` in its own memory, which it gives up; in new if small or a transposed view.

    A second buffer would cost as much as half of the accumulator. Rows are narrowed in doubling blocks [k, 2k): the
    block's narrow form lands where the rows before it have already been read. The first block passes through a small
    buffer, so that the blocks are few. ``write(out, x)`` may do more than round.
    """
    if not wide.is_contiguous():
        narrow = wide.new_empty(wide.shape, dtype=dtype)
        write(narrow, wide)
        return narrow
    if wide.dtype == dtype:
        write(wide, wide)
        return wide
    rows, columns = wide.shape
    start = min(rows, max(1, _NARROWING_BYTES // (columns * dtype.itemsize)))
    first = wide.new_empty(start, columns, dtype=dtype)
    write(first, wide[:start])
    if start == rows:
        return first
    narrow = wide.view(-1).view(dtype)[: rows * columns].view(rows, columns)
    narrow[:start] = first
    while start < rows:
        stop = min(2 * start, rows)
        write(narrow[start:stop], wide[start:stop])
        start = stop
    return narrow
