"""Gradients of hidden states, head and bias: products once more, da by stretches of the vocabulary, two GEMMs each.

    log p = (z - m) - log s        dz = p (c_p + c_plogp log p + c_pp p) + c_y 1[v = y] + c_1 omega_v
    da = dz * dz/da
    d_hidden = da @ weight         d_weight = da^T @ hidden         d_bias = column sums of da

A tile kernel recomputes z and writes da [N, C] for C columns at a time, as many as ``workspace_bytes`` holds; cuBLAS
multiplies it. d_weight[C] is one GEMM over all rows, rounded once; d_hidden is summed over the stretches in fp32. The
label's term joins in fp32, before da's one rounding to the operands' dtype.

Rows whose exponentials the forward has kept need no z: triton_kept.py writes their part of da.

FLOPs 2*N*H*V for z and 2*N*H*V for each of the two products. Bytes beside the operands: da written once and read
twice, and d_hidden in fp32 read and written once per stretch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.gemm import added_tall_product, finite_for_product, narrowed
from rlhf_losses.kernels.host_read import HostRead
from rlhf_losses.kernels.statistics import Coefficients, Kept, RowStatistics, of_rows
from rlhf_losses.kernels.tiles import tiles_per_stretch
from rlhf_losses.kernels.transform import LogitTransform
from rlhf_losses.kernels.triton_gradient import label_gradient, product_gradient_tile, row_coefficients, with_label
from rlhf_losses.kernels.triton_kept import write_kept_gradient
from rlhf_losses.kernels.triton_problem import Problem, Transform, cdiv, launch_context, overlapped_kernels, tile_of
from rlhf_losses.kernels.triton_tile import grouped, label_columns, product_tile, transform_tile

# Rows of a program that writes the labels' da.
_LABELS = 128


@triton.jit(do_not_specialize=["N", "first_tile", "tiles", "stride_da"])
def _product_gradient_kernel(
    hidden,  # [N, H]
    weight,  # [V, H]
    labels,  # [N]
    shift,  # [N]
    log_sum,  # [N]
    coefficients: Coefficients,  # [N] each
    transform: Transform,
    da,  # [N, C] out: columns first_tile * BV ... of the vocabulary
    stride_n,
    stride_v,
    stride_da,
    N,
    V,
    first_tile,
    tiles,
    H: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    row_blocks = tl.cdiv(N, BN)
    for item in range(tl.program_id(0), row_blocks * tiles, tl.num_programs(0)):
        block, tile = grouped(item, row_blocks, tiles, GROUP)
        n0 = block * BN
        v0 = (first_tile + tile) * BV
        n = n0 + tl.arange(0, BN)
        v = v0 + tl.arange(0, BV)
        m = tl.load(shift + n, mask=n < N, other=0.0)
        log_s = tl.load(log_sum + n, mask=n < N, other=0.0)
        c = row_coefficients(coefficients, n, N)
        a = product_tile(hidden, weight, stride_n, stride_v, n0, v0, N, V, H, BN, BV, BH, DESCRIPTORS, PRECISION)
        z, slope = transform_tile(a, transform, n, v, N, V)
        out = product_gradient_tile(z, slope, m, log_s, coefficients, c, v, V, EXACT)
        out = with_label(out, slope, coefficients, c, label_columns(labels, n, N, V), v, v0)
        if DESCRIPTORS:
            da.store([n0, tile * BV], out.to(da.dtype))
        else:
            # Columns past V land in the padding of da, which no GEMM reads.
            at = n.to(tl.int64)[:, None] * stride_da + (tile * BV + tl.arange(0, BV))[None, :]
            tl.store(da + at, out.to(da.dtype.element_ty), mask=(n < N)[:, None])


@triton.jit(do_not_specialize=["N", "first_column", "columns", "stride_da"])
def _label_gradient_kernel(
    labels,  # [N]
    log_probs,  # [N]
    shift,  # [N]
    log_sum,  # [N]
    coefficients: Coefficients,  # [N] each
    transform: Transform,
    da,  # [N, C] out: columns first_column ... of the vocabulary
    stride_da,
    N,
    V,
    first_column,
    columns,
    BN: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    label = label_columns(labels, n, N, V)
    here = (label >= first_column) & (label < first_column + columns)
    m = tl.load(shift + n, mask=n < N, other=0.0)
    log_s = tl.load(log_sum + n, mask=n < N, other=0.0)
    log_p = tl.load(log_probs + n, mask=n < N, other=0.0)
    c = row_coefficients(coefficients, n, N)
    da_y = label_gradient(log_p, m, log_s, label, coefficients, c, transform, n, N, V)
    at = n.to(tl.int64) * stride_da + (label - first_column)
    tl.store((da + at)[:, None], da_y.to(da.dtype.element_ty), mask=here[:, None])


def _write_product_gradient(
    problem: Problem,
    labels: Tensor,
    statistics: RowStatistics,
    coefficients: Coefficients,
    out: Tensor,
    vocab: int,
    first_tile: int,
    tiles: int,
) -> None:
    """da of the problem's rows, and of ``tiles`` tiles of the vocabulary, to ``out`` [N, tiles * columns of a tile]."""
    rows = (statistics.shift, statistics.norm, coefficients)
    result = problem.result_blocks(out)
    stretch = (problem.rows, vocab, first_tile, tiles)
    grid = (problem.programs(tiles),)
    with launch_context(out.device):
        if not problem.overlapped:
            arguments = (problem.hidden, problem.weight, labels, *rows, problem.transform, result)
            strides = (problem.stride_n, problem.stride_v, out.stride(0))
            _product_gradient_kernel[grid](*arguments, *strides, *stretch, **problem.constants)
            return
        kernels = overlapped_kernels()
        # Under a soft cap the slope at the label is known to the tile alone, to all of its digits.
        inside = labels if problem.transform.softcap is not None else None
        arguments = (problem.hidden, problem.weight, inside, *rows, problem.transform, result)
        kernels.product_gradient[grid](*arguments, *stretch, **problem.constants, **kernels.options)
        if inside is None and coefficients.y is not None:
            width = problem.tile.columns
            _label_gradient_kernel[(cdiv(problem.rows, _LABELS),)](
                labels,
                statistics.log_probs,
                *rows,
                problem.transform,
                out,
                out.stride(0),
                problem.rows,
                vocab,
                first_tile * width,
                tiles * width,
                BN=_LABELS,
            )


def linear_prepare(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Problem:
    """The part of ``linear_backward`` that can be done before anybody knows its coefficients."""
    return Problem.of(hidden, weight, transform)


def linear_backward(
    hidden: Tensor,
    weight: Tensor,
    finite: HostRead | None,
    labels: Tensor,
    transform: LogitTransform,
    statistics: RowStatistics,
    coefficients: Coefficients,
    needs: tuple[bool, bool, bool],
    workspace_bytes: int,
    kept: Kept | None = None,
    source: Tensor | None = None,
    prepared: Problem | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden [N, H], weight [V, H] and bias [V], None where ``needs`` says so.

    ``finite`` says whether ``weight`` is, None where nobody asks or can (gemm.finite_for_product).
    The first rows are the ones of ``kept``, or as many as ``source`` holds, at its places in ``kept``.
    ``prepared`` is what ``linear_prepare`` has made of hidden and weight.
    The workspace holds at least one tile's columns of all rows, even where ``workspace_bytes`` is less.
    """
    need_hidden, need_weight, need_bias = needs
    rows, vocab, dtype = len(hidden), len(weight), hidden.dtype
    known = 0 if kept is None else len(kept.values if source is None else source)

    def of(part: slice | Tensor) -> tuple[Tensor, LogitTransform, RowStatistics, Coefficients]:
        return labels[part], transform.for_rows(part), of_rows(statistics, part), coefficients.for_rows(part)

    kept_part = of(slice(known)) if known else ()
    if known:
        # An index copies: for vectors that start where no tensor does, a kernel would be compiled once more.
        labels, transform, statistics, coefficients = of(torch.arange(known, rows, device=hidden.device))
    problem = prepared
    if problem is None and known < rows:
        problem = Problem.of(hidden[known:], weight, transform)
    width = tile_of(weight).columns
    tiles = cdiv(vocab, width)
    most = max(1, workspace_bytes // (rows * width * hidden.element_size()))
    per_stretch = tiles_per_stretch(tiles, most, rows, hidden.shape[1])

    d_hidden = None
    d_weight = weight.new_empty(weight.shape) if need_weight else None
    d_bias = weight.new_empty(vocab, dtype=torch.float32) if need_bias else None
    workspace = hidden.new_empty(rows * per_stretch * width)
    for first_tile in range(0, tiles, per_stretch):
        count = min(per_stretch, tiles - first_tile)
        padded = workspace[: rows * count * width].view(rows, count * width)
        if kept is not None and known:
            write_kept_gradient(kept, source, *kept_part, padded[:known], vocab, first_tile * width)
        if problem is not None:
            _write_product_gradient(problem, labels, statistics, coefficients, padded[known:], vocab, first_tile, count)
        columns = slice(first_tile * width, min((first_tile + count) * width, vocab))
        da = padded[:, : columns.stop - columns.start]
        if d_bias is not None:
            torch.sum(da, 0, dtype=torch.float32, out=d_bias[columns])
        if d_weight is not None:
            torch.mm(da.T, hidden, out=d_weight[columns])
        if need_hidden:
            d_hidden = added_tall_product(d_hidden, da, finite_for_product(weight[columns], finite))
    del workspace, padded, da
    return None if d_hidden is None else narrowed(d_hidden, dtype), d_weight, d_bias
