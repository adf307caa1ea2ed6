"""The same statistics and gradient for logits that somebody already holds: one read forward, one read and write back.

Bytes: N*V elements read in the forward; read and written in the backward, which may write over what it read. Every
number is computed in fp32 from the logits as they are stored. FLOPs are negligible; both kernels are bound by memory.
The formulas are those of triton_forward.py and triton_backward.py, whose helpers they share.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.statistics import Coefficients, RowStatistics
from rlhf_losses.kernels.transform import LogitTransform
from rlhf_losses.kernels.triton_forward import empty_statistics, store_statistics
from rlhf_losses.kernels.triton_gradient import product_gradient_tile, row_coefficients, with_label
from rlhf_losses.kernels.triton_problem import Transform, cdiv, launch_context
from rlhf_losses.kernels.triton_tile import absorb_tile, label_columns, transform_tile

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _source_row(rows, n):
    """Where row n of the packed tokens lies among the logits; int64, since N * V passes 2^31 early."""
    if rows is not None:
        return tl.load(rows + n)
    return n.to(tl.int64)


@triton.jit(do_not_specialize=["N", "ignore_index"])
def _statistics_kernel(
    logits,  # [.., V]
    rows,  # [N] int64, or None for all
    labels,  # [N]
    out: RowStatistics,  # [N] each
    transform: Transform,
    omega,  # [V] fp32, or None
    ignore_index,
    stride_n,
    N,
    V,
    BV: tl.constexpr,
    EXACT: tl.constexpr,
):
    n = tl.program_id(0)
    source = logits + _source_row(rows, n) * stride_n
    ns = n + tl.arange(0, 1)
    m = tl.full([1], float("-inf"), tl.float32)
    s = tl.zeros([1], tl.float32)
    u = tl.zeros([1], tl.float32)
    q = tl.zeros([1], tl.float32)
    arg = tl.zeros([1], tl.int32)
    wt = tl.zeros([1], tl.float32)
    w = tl.zeros([1], tl.float32)
    U, Q, ARG = out.entropy is not None, out.sum_p_squared is not None, out.argmax is not None
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        a = tl.load(source + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
        z, _ = transform_tile(a, transform, ns, v, N, V)
        z = tl.where((v < V)[None, :], z, float("-inf"))
        _, m, s, u, q, arg, wt, w = absorb_tile(z, v, V, omega, m, s, u, q, arg, wt, w, U, Q, ARG, EXACT)
    column = label_columns(labels, ns, N, V)
    a_y = tl.load(source + column, mask=column >= 0, other=0.0).to(tl.float32)
    z_y, _ = transform_tile(a_y[None, :], transform, ns, column, N, V)
    label = tl.load(labels + ns)
    store_statistics(out, ns, ns < N, V, label, ignore_index, m, s, u, q, arg, wt, w, tl.reshape(z_y, [1]))


@triton.jit(do_not_specialize=["N"])
def _gradient_kernel(
    logits,  # [.., V]
    d_logits,  # [.., V] out, may be logits
    rows,  # [N] int64, or None for all
    labels,  # [N]
    shift,  # [N]
    log_sum,  # [N]
    coefficients: Coefficients,  # [N] each
    transform: Transform,
    stride_n,
    stride_out,
    N,
    V,
    BV: tl.constexpr,
    EXACT: tl.constexpr,
):
    n = tl.program_id(0)
    row = _source_row(rows, n)
    ns = n + tl.arange(0, 1)
    v0 = tl.program_id(1) * BV
    v = v0 + tl.arange(0, BV)
    a = tl.load(logits + row * stride_n + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    z, slope = transform_tile(a, transform, ns, v, N, V)
    m, log_s, label = tl.load(shift + ns), tl.load(log_sum + ns), label_columns(labels, ns, N, V)
    c = row_coefficients(coefficients, ns, N)
    da = product_gradient_tile(z, slope, m, log_s, coefficients, c, v, V, EXACT)
    da = with_label(da, slope, coefficients, c, label, v, v0)
    tl.store(d_logits + row * stride_out + v[None, :], da.to(d_logits.dtype.element_ty), mask=(v < V)[None, :])


def logits_forward(
    logits: Tensor,
    rows: Tensor | None,
    labels: Tensor,
    transform: LogitTransform,
    wanted: frozenset[str],
    omega: Tensor | None,
    ignore_index: int,
    workspace_bytes: int,
) -> RowStatistics:
    """logits [.., V] before the transform, their rows [N], labels [N] -> statistics [N]."""
    del workspace_bytes
    vocab = logits.shape[1]
    out = empty_statistics(len(labels), wanted, logits.device)
    with launch_context(logits.device):
        _statistics_kernel[(len(labels),)](
            logits,
            rows,
            labels,
            out,
            Transform.of(transform),
            omega,
            ignore_index,
            logits.stride(0),
            len(labels),
            vocab,
            BV=min(_BLOCK, triton.next_power_of_2(vocab)),
            EXACT=logits.dtype == torch.float32,
            num_warps=_WARPS,
        )
    return out


def logits_backward(
    logits: Tensor,
    rows: Tensor | None,
    labels: Tensor,
    transform: LogitTransform,
    statistics: RowStatistics,
    coefficients: Coefficients,
    out: Tensor,
    workspace_bytes: int,
) -> None:
    """Writes dL/dlogits to the given rows of ``out`` [.., V], which may be ``logits`` itself."""
    del workspace_bytes
    vocab = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    with launch_context(logits.device):
        _gradient_kernel[(len(labels), cdiv(vocab, block))](
            logits,
            out,
            rows,
            labels,
            statistics.shift,
            statistics.norm,
            coefficients,
            Transform.of(transform),
            logits.stride(0),
            out.stride(0),
            len(labels),
            vocab,
            BV=block,
            EXACT=logits.dtype == torch.float32,
            num_warps=_WARPS,
        )
