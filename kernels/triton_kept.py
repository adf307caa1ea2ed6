"""The gradient of rows whose exponentials the forward has kept: no product, one read and one write of the block.

With e = 2^((z - m_t) log2(e)) as kept, m_t the row's maximum up to that tile, m and log s its statistics:

    log p = (m_t - m) - log s + log e          p = e * exp((m_t - m) - log s)

and from there da as in triton_backward.py. An e has the operands' few digits, so what must not lose any is taken from
elsewhere: the label's own p comes from its log-probability, in fp32, and the largest p of a row has e = 1, exactly. The
other p are wrong by half a unit in the last place of the operands' dtype, as da itself, which is rounded to it next. Of
fp32 operands the raw products are kept instead: as large, and nothing is lost at all.

Bytes: 2 * 2 of a 16-bit block [A, V], read and written; FLOPs are negligible. ``out`` may be the kept block itself: row
n then either stays where it is, or takes the place of a row before all that are still to be read (``one_pass.py``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.backends import interpreting
from rlhf_losses.kernels.statistics import Coefficients, Kept, RowStatistics
from rlhf_losses.kernels.tiles import OVERLAP_TILES
from rlhf_losses.kernels.transform import LogitTransform
from rlhf_losses.kernels.triton_gradient import (
    label_gradient,
    product_gradient_tile,
    row_coefficients,
    slope_tile,
    smoothing_term,
    with_label,
    without_label,
)
from rlhf_losses.kernels.triton_math import LN2, LOG2E, exp2, rough_log2
from rlhf_losses.kernels.triton_problem import Transform, cdiv, launch_context, tile_of
from rlhf_losses.kernels.triton_tile import FP16_UNIT, any_label, label_columns, transform_tile

# Tiles of a row, or rows of a tile, that a program takes, so many or as make so many elements. The interpreter takes as
# long for a few as for many.
_PAIRS, _ELEMENTS = (256, 0) if interpreting() else (16, 4096)
_WARPS = 8


@triton.jit(do_not_specialize=["A", "K", "first_tile", "tiles", "kept_tiles"])
def _kept_gradient_kernel(
    values,  # [K, kept_tiles * BV]: e, or for fp32 the raw products
    kept_shift,  # [kept_tiles, K]; read for e alone
    source,  # [A] int64, or None: which row of the two is row n
    labels,  # [A]
    shift,  # [A]
    log_sum,  # [A]
    log_probs,  # [A]
    coefficients: Coefficients,  # [A] each
    transform: Transform,
    out,  # [A, tiles * BV] out: columns first_tile * BV ... of the vocabulary; may be values
    A,
    K,
    V,
    kept_tiles,
    first_tile,
    tiles,
    BT: tl.constexpr,
    BV: tl.constexpr,
    EXACT: tl.constexpr,
):
    # A block is [BT, BV]: BT times a row and a tile of it, neighbours in memory; or BT rows of one tile, so that
    # transform_tile can tell its columns.
    pairs = tl.arange(0, BT)
    if EXACT:
        n = tl.program_id(0) // tiles * BT + pairs
        tile = tl.program_id(0) % tiles + 0 * pairs
    else:
        n = (tl.program_id(0) * BT + pairs) // tiles
        tile = (tl.program_id(0) * BT + pairs) % tiles
    inside = n < A
    column = tl.arange(0, BV)
    row = n.to(tl.int64)
    if source is not None:
        row = tl.load(source + n, mask=inside, other=0)
    at = row[:, None] * (kept_tiles * BV) + (first_tile + tile)[:, None] * BV + column[None, :]
    kept = tl.load(values + at, mask=inside[:, None], other=0.0).to(tl.float32)
    m = tl.load(shift + n, mask=inside, other=0.0)
    log_s = tl.load(log_sum + n, mask=inside, other=0.0)
    label = label_columns(labels, n, A, V)
    c = row_coefficients(coefficients, n, A)
    if EXACT:
        v0 = (first_tile + tl.program_id(0) % tiles) * BV
        v = v0 + column
        z, slope = transform_tile(kept, transform, n, v, A, V)
        da = product_gradient_tile(z, slope, m, log_s, coefficients, c, v, V, True)
        da = with_label(da, slope, coefficients, c, label, v, v0)
    else:
        if values.dtype.element_ty == tl.float16:
            kept = kept * (1.0 / FP16_UNIT)
        tile_m = tl.load(kept_shift + (first_tile + tile) * K + row, mask=inside, other=0.0)
        gap = (tile_m - m) * LOG2E - log_s
        p = kept * exp2(gap, False)[:, None]
        # Of e = 0 comes 2^-126 instead, whose p is 0 all the same.
        log2_e = rough_log2(tl.maximum(kept, 1.1754944e-38))
        da = without_label(p, log2_e + gap[:, None], coefficients, c)
        slope = slope_tile(log2_e * LN2 + tile_m[:, None], transform, n, A)
        if coefficients.one is not None:
            # Where e = 0 as well: there no slope comes from z, see ``Call.can_keep``.
            v = (first_tile + tile)[:, None] * BV + column[None, :]
            da = da + smoothing_term(coefficients, c, v, V)
        da = da * slope
        # Counted from the tile's first column.
        here = label - (first_tile + tile) * BV
        if any_label(here, 0, BV):
            log_p = tl.load(log_probs + n, mask=inside, other=0.0)
            da_y = label_gradient(log_p, m, log_s, label, coefficients, c, transform, n, A, V)
            da = tl.where(column[None, :] == here[:, None], da_y, da)
    to = n.to(tl.int64)[:, None] * (tiles * BV) + tile[:, None] * BV + column[None, :]
    tl.store(out + to, da.to(out.dtype.element_ty), mask=inside[:, None])


def kept_row_bytes(weight: Tensor) -> int:
    """What a row takes that the forward keeps."""
    tile = tile_of(weight)
    shifts = 2 if tile in OVERLAP_TILES else 1
    return cdiv(len(weight), tile.columns) * (tile.columns * weight.element_size() + shifts * torch.float32.itemsize)


def write_kept_gradient(
    kept: Kept,
    source: Tensor | None,
    labels: Tensor,
    transform: LogitTransform,
    statistics: RowStatistics,
    coefficients: Coefficients,
    out: Tensor,
    vocab: int,
    first_column: int = 0,
) -> None:
    """da of A rows of ``kept``, from ``first_column`` of the vocabulary on, to ``out`` [A, whole tiles].

    ``source`` [A] int64 says which rows of ``kept`` they are, the first A if None. labels, statistics and coefficients
    are those of the A rows, [A] each.
    """
    assert kept.shift is not None
    rows, exact = len(labels), kept.values.dtype == torch.float32
    width = kept.values.shape[1] // len(kept.shift)
    tiles, pairs = out.shape[1] // width, max(_PAIRS, _ELEMENTS // width)
    programs = cdiv(rows, pairs) * tiles if exact else cdiv(rows * tiles, pairs)
    with launch_context(out.device):
        _kept_gradient_kernel[(programs,)](
            kept.values,
            kept.shift,
            source,
            labels,
            statistics.shift,
            statistics.norm,
            statistics.log_probs,
            coefficients,
            Transform.of(transform),
            out,
            rows,
            kept.shift.shape[1],
            vocab,
            len(kept.shift),
            first_column // width,
            tiles,
            BT=pairs,
            BV=width,
            EXACT=exact,
            num_warps=_WARPS,
        )


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
    del workspace_bytes
    assert kept.shift is not None
    assert kept.values.dtype == dtype
    out = kept.values[: len(labels)]
    write_kept_gradient(kept, source, labels, transform, statistics, coefficients, out, vocab)
    return out[:, :vocab]
