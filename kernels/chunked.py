"""Plain torch over chunks of tokens: for the CPU, old GPUs, and wherever there is no Triton.

Holds a few [chunk, V] blocks at a time, within ``workspace_bytes`` (one row at the least), whatever N is. Beside them,
where torch has no product of 16-bit operands that is summed in fp32 (a CPU), an fp32 copy of the head while it is used.
8 * N * H * V FLOPs for forward and backward: the products are computed once more in the backward.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_losses.kernels.gemm import accumulator_dtype, added_product, finite_for_product, wide_operand, wide_product
from rlhf_losses.kernels.host_read import HostRead
from rlhf_losses.kernels.statistics import Coefficients, Kept, RowStatistics, has_column, of_rows, settle
from rlhf_losses.kernels.transform import LogitTransform

# [chunk, V] blocks alive at once, at most: products, logits, dz/da, distance to the maximum, p.
_BLOCKS = 5
# e^-1e4 is 0 in fp64 too: below it a term of the entropy is 0, where a distance of -inf would make it NaN.
_NOTHING = -1e4


def _chunks(rows: int, vocab: int, dtype: torch.dtype, workspace_bytes: int, border: int = 0) -> Iterator[slice]:
    """Slices of the rows that the workspace holds; none reaches over ``border``."""
    size = max(1, workspace_bytes // (_BLOCKS * vocab * accumulator_dtype(dtype).itemsize))
    for first, last in ((0, border), (border, rows)):
        for start in range(first, last, size):
            yield slice(start, min(start + size, last))


def _source(rows: Tensor | None, chunk: slice) -> Tensor | slice:
    return chunk if rows is None else rows[chunk]


def _columns(labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """[N, 1] columns of the labels, 0 where there is none, and [N] whether there is one."""
    there = has_column(labels, vocab)
    return labels.where(there, 0)[:, None].long(), there


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    wanted: frozenset[str],
    omega: Tensor | None,
    ignore_index: int,
) -> RowStatistics:
    """One block of raw products [N, V] in the accumulator's dtype -> its statistics.

    The sums and their closed forms are [N], and fp64: only the terms carry the block's rounding.
    """
    z, _ = transform.apply(logits)
    row_max = z.amax(-1)
    argmax = z.argmax(-1) if "argmax" in wanted else None
    gap = z - row_max[:, None]
    columns, _ = _columns(labels, logits.shape[1])
    label_gap = gap.gather(-1, columns).squeeze(-1)
    weighted = None
    if omega is not None:
        # A token that is switched off and weighs nothing adds 0; 0 * -inf would be NaN.
        weighted = gap.masked_fill(omega == 0, 0.0).mul_(omega).sum(-1, dtype=torch.float64)
    e = gap.exp()
    s = e.sum(-1, dtype=torch.float64)
    log_sum = s.log()
    entropy = sum_p_squared = None
    if "sum_p_squared" in wanted:
        sum_p_squared = (e.square().sum(-1, dtype=torch.float64) / s.square()).clamp(max=1.0)
    if "entropy" in wanted:
        u = e.mul_(gap.clamp_(min=_NOTHING)).sum(-1, dtype=torch.float64)
        entropy = (log_sum - u / s).clamp(0.0, math.log(logits.shape[1]))
    statistics = RowStatistics(
        shift=row_max,
        norm=s,
        log_probs=(label_gap - log_sum).clamp(max=0.0),
        entropy=entropy,
        logsumexp=row_max + log_sum if "logsumexp" in wanted else None,
        sum_p_squared=sum_p_squared,
        weighted_log_probs=None if omega is None else weighted - omega.sum(dtype=torch.float64) * log_sum,
        argmax=argmax,
    )
    narrow = (x if x is None or not x.is_floating_point() else x.to(logits.dtype) for x in statistics)
    return settle(RowStatistics(*narrow), labels, logits.shape[1], ignore_index)


def product_gradient(
    logits: Tensor, labels: Tensor, transform: LogitTransform, statistics: RowStatistics, coefficients: Coefficients
) -> Tensor:
    """One block of raw products [N, V] -> dL/da [N, V], in the accumulator's dtype."""
    z, slope = transform.apply(logits)
    gap = z - statistics.shift[:, None]
    p = gap.exp().div_(statistics.norm[:, None])
    inner = coefficients.p[:, None]
    if coefficients.plogp is not None:
        log_p = gap.sub_(statistics.norm.log()[:, None]).clamp_(min=_NOTHING)
        inner = log_p.mul_(coefficients.plogp[:, None]).add_(inner)
    if coefficients.pp is not None:
        inner = inner + coefficients.pp[:, None] * p
    dz = p.mul_(inner)
    if coefficients.y is not None:
        columns, there = _columns(labels, logits.shape[1])
        dz.scatter_add_(-1, columns, coefficients.y.where(there, 0.0)[:, None])
    if coefficients.one is not None:
        dz.addr_(coefficients.one, coefficients.omega)
    return dz if isinstance(slope, float) and slope == 1.0 else dz.mul_(slope)


def _join(blocks: list[RowStatistics]) -> RowStatistics:
    return RowStatistics(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*blocks, strict=True)))


def linear_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    wanted: frozenset[str],
    omega: Tensor | None,
    ignore_index: int,
    workspace_bytes: int,
    keep_rows: int,
) -> tuple[RowStatistics, Kept | None]:
    """hidden [N, H], weight [V, H], labels [N] -> statistics [N], and the raw products of the first rows."""
    wide_weight = wide_operand(weight)
    wide = accumulator_dtype(hidden.dtype)
    kept = hidden.new_empty(keep_rows, len(weight), dtype=wide) if keep_rows else None
    blocks = []
    for rows in _chunks(len(hidden), len(weight), hidden.dtype, workspace_bytes, keep_rows):
        products = wide_product(hidden[rows], wide_weight.T)
        if kept is not None and rows.start < keep_rows:
            kept[rows] = products
        blocks.append(row_statistics(products, labels[rows], transform.for_rows(rows), wanted, omega, ignore_index))
    return _join(blocks), None if kept is None else Kept(kept, None)


def kept_row_bytes(weight: Tensor) -> int:
    """What a row takes that the forward keeps."""
    return len(weight) * accumulator_dtype(weight.dtype).itemsize


def kept_gradient(
    kept: Kept,
    source: Tensor | None,
    labels: Tensor,
    transform: LogitTransform,
    statistics: RowStatistics,
    coefficients: Coefficients,
    vocab: int,
    dtype: torch.dtype,
    workspace_bytes: int,
) -> Tensor:
    """da [A, V] of A rows of ``kept``, in its memory.

    ``source`` [A] int64 says which rows, the first A if None: row n is row n of ``kept``, or one beyond the first A.
    labels, statistics and coefficients are those of the A rows.
    """
    rows = len(labels)
    # Narrower rows end before wide ones of the same number: none is written over that is still to be read.
    da = kept.values.view(-1).view(dtype)[: rows * vocab].view(rows, vocab)
    for chunk in _chunks(rows, vocab, dtype, workspace_bytes):
        da[chunk] = product_gradient(
            kept.values[_source(source, chunk)],
            labels[chunk],
            transform.for_rows(chunk),
            of_rows(statistics, chunk),
            coefficients.for_rows(chunk),
        )
    return da


def linear_prepare(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> None:
    """Nothing of ``linear_backward`` can be done before its coefficients are known."""


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
    prepared: None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden [N, H], weight [V, H] and bias [V], None where ``needs`` says so; summed in fp32.

    ``finite`` says whether ``weight`` is, None where nobody asks or can (gemm.finite_for_product).
    The first rows are the ones of ``kept``, or as many as ``source`` holds, at its places in ``kept``.
    """
    wide = accumulator_dtype(hidden.dtype)
    need_hidden, need_weight, need_bias = needs
    d_hidden = hidden.new_empty(hidden.shape) if need_hidden else None
    d_weight = None
    d_bias = weight.new_zeros(len(weight), dtype=wide) if need_bias else None
    wide_weight = wide_operand(weight)
    product_weight = finite_for_product(weight, finite) if need_hidden else None
    known = 0 if kept is None else len(kept.values if source is None else source)
    for rows in _chunks(len(hidden), len(weight), hidden.dtype, workspace_bytes, known):
        kept_rows = kept is not None and rows.start < known
        da = product_gradient(
            kept.values[_source(source, rows)] if kept_rows else wide_product(hidden[rows], wide_weight.T),
            labels[rows],
            transform.for_rows(rows),
            of_rows(statistics, rows),
            coefficients.for_rows(rows),
        )
        if d_bias is not None:
            d_bias += da.sum(0)
        da = da.to(hidden.dtype)
        if d_hidden is not None:
            d_hidden[rows] = da @ product_weight
        if need_weight:
            d_weight = added_product(d_weight, da.T, hidden[rows])
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), d_bias


def scale_to(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """out = x * scale, rounded to its type; they may be one."""
    torch.mul(x, scale, out=out)


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
    wide = accumulator_dtype(logits.dtype)
    return _join(
        [
            row_statistics(
                logits[_source(rows, chunk)].to(wide),
                labels[chunk],
                transform.for_rows(chunk),
                wanted,
                omega,
                ignore_index,
            )
            for chunk in _chunks(len(labels), logits.shape[1], logits.dtype, workspace_bytes)
        ]
    )


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
    wide = accumulator_dtype(logits.dtype)
    for chunk in _chunks(len(labels), logits.shape[1], logits.dtype, workspace_bytes):
        at = _source(rows, chunk)
        out[at] = product_gradient(
            logits[at].to(wide),
            labels[chunk],
            transform.for_rows(chunk),
            of_rows(statistics, chunk),
            coefficients.for_rows(chunk),
        ).to(out.dtype)
