"""The tile code that the Triton kernels share: products, logit transform, running sums, gradient, program order.

N tokens, V vocabulary, H hidden size; BN, BV, BH the tile's sides. Row offsets are int64: N * V passes 2^31 early.
With m the maximum of z so far, the running sums over the vocabulary are

    s = sum 2^t        u = sum t 2^t        q = sum 2^(2t)        t = (z - m) * log2(e)
    wt = sum omega t        w = sum omega

in base 2, which is what the hardware computes. When m grows to m', with r = (m - m') * log2(e), s becomes 2^r s, u
becomes 2^r (u + r s), q becomes 2^(2r) q and wt becomes wt + r w. z - m is exact where it matters, so s >= 1 and
u <= 0, and a token that is certain has log-probability 0.

Called from the Hopper kernels too, so nothing here makes a tensor out of nothing: Gluon would want its layout.
(``product_tile`` does; it is the portable kernels' alone.)
"""

import triton
import triton.language as tl

from rlhf_losses.kernels.triton_math import LN2, LOG2E, NOTHING, distance, exp2, finite_shift

# Exponentials lie in [0, 1]; kept in fp16 they are multiplied by 2^14, or those below 6e-8 would all be 0.
FP16_UNIT = tl.constexpr(16384.0)


@triton.jit
def transform_tile(a, transform, n, v, N, V):
    """z and dz/da of raw products a [BN, BV], n [BN] and v [BV] their rows and columns."""
    z = a
    slope = 1.0
    if transform.bias is not None:
        z = z + tl.load(transform.bias + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    if transform.scale is not None:
        z = z * transform.scale
        slope = slope * transform.scale
    if transform.softcap is not None:
        # With e = exp(-2|x|): tanh = (1 - e) / (1 + e), and 1 - tanh^2 = 4e / (1 + e)^2 without cancellation. Near 0,
        # where 1 - e cancels, the Taylor series of tanh; the first term left out is 5e-8 of it.
        x = z / transform.softcap
        e = tl.exp(-2.0 * tl.abs(x))
        r = 1.0 / (1.0 + e)
        w = x * x
        series = 1.0 + w * (-1.0 / 3.0 + w * (2.0 / 15.0 + w * (-17.0 / 315.0 + w * (62.0 / 2835.0))))
        z = transform.softcap * tl.where(w < 0.09, x * series, tl.where(x < 0, -1.0, 1.0) * (1.0 - e) * r)
        slope = slope * (4.0 * e * r * r)
    if transform.inverse_temperature is not None:
        z = z * transform.inverse_temperature
        slope = slope * transform.inverse_temperature
    if transform.inverse_temperatures is not None:
        inverse = tl.load(transform.inverse_temperatures + n, mask=n < N, other=1.0)[:, None]
        z = z * inverse
        slope = slope * inverse
    return z, slope


@triton.jit
def slope_tile(z, transform, n, N):
    """dz/da [BN, BV], or a number, from z alone: what ``transform_tile`` gives beside it, to the digits that z has."""
    temperature = 1.0
    if transform.inverse_temperature is not None:
        temperature = 1.0 / transform.inverse_temperature
    if transform.inverse_temperatures is not None:
        temperature = (1.0 / tl.load(transform.inverse_temperatures + n, mask=n < N, other=1.0))[:, None]
    slope = 1.0
    if transform.scale is not None:
        slope = slope * transform.scale
    if transform.softcap is not None:
        # 1 - tanh^2; that of z = -inf, which no softcap gives, is of no account.
        x = tl.minimum(tl.maximum(z * temperature / transform.softcap, -1.0), 1.0)
        slope = slope * (1.0 - x) * (1.0 + x)
    return slope / temperature


@triton.jit
def product_tile(
    hidden,  # [N, H] pointer or descriptor with blocks [BN, BH]
    weight,  # [V, H] pointer or descriptor with blocks [BV, BH]
    stride_n,
    stride_v,
    n0,
    v0,
    N,
    V,
    H: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a [BN, BV] = hidden[n0:, :] @ weight[v0:, :].T in fp32; 0 outside of the matrices."""
    acc = tl.zeros([BN, BV], tl.float32)
    if DESCRIPTORS:
        for h0 in range(0, H, BH):
            b_hidden = hidden.load([n0, h0])
            b_weight = weight.load([v0, h0])
            # [BN, BH] @ [BH, BV]
            acc = tl.dot(b_hidden, b_weight.T, acc, input_precision=PRECISION)
    else:
        n = n0 + tl.arange(0, BN)
        v = v0 + tl.arange(0, BV)
        h = tl.arange(0, BH)
        p_hidden = hidden + n.to(tl.int64)[:, None] * stride_n + h[None, :]
        p_weight = weight + v.to(tl.int64)[:, None] * stride_v + h[None, :]
        for h0 in range(0, H, BH):
            inside = (h0 + h < H)[None, :]
            b_hidden = tl.load(p_hidden, mask=(n < N)[:, None] & inside, other=0.0)
            b_weight = tl.load(p_weight, mask=(v < V)[:, None] & inside, other=0.0)
            # [BN, BH] @ [BH, BV]
            acc = tl.dot(b_hidden, b_weight.T, acc, input_precision=PRECISION)
            p_hidden += BH
            p_weight += BH
    return acc


@triton.jit
def label_columns(labels, n, N, V):
    """[BN] int32 columns of the labels of rows n; -1 where the label is no column, or the row no row."""
    label = tl.load(labels + n, mask=n < N, other=-1)
    return tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)


@triton.jit
def stretch_of(split, splits, tiles):
    """First and last (exclusive) tile of stretch number ``split``: lengths differ by one tile at the most."""
    return split * tiles // splits, (split + 1) * tiles // splits


@triton.jit
def grouped(item, row_blocks, columns, GROUP: tl.constexpr):
    """(row block, column) number ``item``: GROUP row blocks run through all columns before the next GROUP begins.

    Programs that run at the same time then share a few stretches of the weight and GROUP blocks of hidden rows in L2.
    Every group begins one column later than the last: a program whose stretches are all the longer ones in one group
    gets shorter ones in the next (3% of the time at V = 131072, whose 512 tiles make stretches of 15 and 16).
    """
    group = item // (GROUP * columns)
    first = group * GROUP
    size = min(row_blocks - first, GROUP)
    rest = item % (GROUP * columns)
    return first + rest % size, (rest // size + group) % columns


@triton.jit
def absorb_tile(
    z, v, V, omega, m, s, u, q, arg, wt, w, U: tl.constexpr, Q: tl.constexpr, ARG: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """2^t [BN, BV] of one more tile of logits z, columns v [BV] in rising order, and the running sums [BN] after it.

    The 2^t are relative to the m returned: where a row has its maximum so far, 2^t is exactly 1. w is a number.
    """
    tile_max = tl.max(z, 1)
    if ARG:
        tile_arg = tl.min(tl.where(z == tile_max[:, None], v[None, :], 2147483647), 1)
        arg = tl.where(tile_max > m, tile_arg, arg)
    m_new = tl.maximum(m, tile_max)
    shift = finite_shift(m_new)
    t = distance(z, shift[:, None]) * LOG2E
    e = exp2(t, EXACT)
    if omega is not None:
        weights = tl.load(omega + v, mask=v < V, other=0.0)
        # A column that weighs nothing, padding too, adds 0; 0 * -inf would be NaN.
        wt = (
            wt + tl.where(w != 0.0, (m - shift) * LOG2E * w, 0.0)
            + tl.sum(tl.where((weights != 0.0)[None, :], weights[None, :] * t, 0.0), 1)
        )  # fmt: skip
        w += tl.sum(weights, 0)
    step = tl.maximum((m - shift) * LOG2E, NOTHING)
    decay = exp2(step, EXACT)
    if U:
        u = decay * (u + step * s) + tl.sum(tl.maximum(t, NOTHING) * e, 1)
    if Q:
        q = decay * decay * q + tl.sum(e * e, 1)
    s = decay * s + tl.sum(e, 1)
    return e, m_new, s, u, q, arg, wt, w


@triton.jit
def take_tile(z, n, v, v0, V, label, label_logit, omega, sums, partial, BV: tl.constexpr, EXACT: tl.constexpr):
    """``absorb_tile`` of the tile z [BN, BV] at column v0, its padding masked; stores the labels' logits it holds."""
    if v0 + BV > V:
        z = tl.where((v < V)[None, :], z, float("-inf"))
    # At V = 150k four tiles in five hold no label of their 128 rows; a vote is cheaper than the search.
    here = (label >= v0) & (label < v0 + BV)
    if tl.max(here.to(tl.int32), 0) > 0:
        z_y = tl.sum(tl.where(v[None, :] == label[:, None], z, 0.0), 1)
        tl.store(label_logit + n, z_y, mask=here)
    m, s, u, q, arg, wt, w = sums
    U, Q, ARG = partial.u is not None, partial.q is not None, partial.arg is not None
    return absorb_tile(z, v, V, omega, m, s, u, q, arg, wt, w, U, Q, ARG, EXACT)


@triton.jit
def kept_exponentials(e, dtype: tl.constexpr):
    """2^t as they are kept for the backward (triton_kept.py)."""
    if dtype == tl.float16:
        e = e * FP16_UNIT
    return e.to(dtype)


@triton.jit
def store_sums(partial, split, n, N, m, s, u, q, arg, wt, w):
    """The running sums [BN] of stretch ``split``, to their places [splits, N]."""
    at = split.to(tl.int64) * N + n
    tl.store(partial.m + at, m, mask=n < N)
    tl.store(partial.s + at, s, mask=n < N)
    if partial.u is not None:
        tl.store(partial.u + at, u, mask=n < N)
    if partial.q is not None:
        tl.store(partial.q + at, q, mask=n < N)
    if partial.arg is not None:
        tl.store(partial.arg + at, arg, mask=n < N)
    if partial.wt is not None:
        tl.store(partial.wt + at, wt, mask=n < N)
        tl.store(partial.w + at, tl.where(n < N, w, 0.0), mask=n < N)


@triton.jit
def without_label(p, log2_p, coefficients, n, N):
    """dz but for the label's term: p (c_p + c_plogp log p + c_pp p), of probabilities and their base-2 logarithms."""
    inner = tl.load(coefficients.p + n, mask=n < N, other=0.0)[:, None]
    if coefficients.plogp is not None:
        c_plogp = tl.load(coefficients.plogp + n, mask=n < N, other=0.0) * LN2
        inner = inner + c_plogp[:, None] * tl.maximum(log2_p, NOTHING)
    if coefficients.pp is not None:
        inner = inner + tl.load(coefficients.pp + n, mask=n < N, other=0.0)[:, None] * p
    return p * inner


@triton.jit
def smoothing_term(coefficients, n, v, N, V):
    """c_1 omega [BN, BV] of columns v, [BV] or [BN, BV]; 0 in the padding."""
    c_1 = tl.load(coefficients.one + n, mask=n < N, other=0.0)
    return c_1[:, None] * tl.load(coefficients.omega + v, mask=v < V, other=0.0)


@triton.jit
def product_gradient_tile(z, slope, shift, log_sum, coefficients, label, n, v, v0, N, V, EXACT: tl.constexpr):
    """da [BN, BV] from transformed logits z and dz/da, both [BN, BV]; shift, log_sum, label, n [BN], v [BV]."""
    log2_p = distance(z, shift[:, None]) * LOG2E - log_sum[:, None]
    dz = without_label(exp2(log2_p, EXACT), log2_p, coefficients, n, N)
    if coefficients.one is not None:
        dz = dz + smoothing_term(coefficients, n, v[None, :], N, V)
    if coefficients.y is not None:  # noqa: SIM102 (decided at compile time, the vote is not)
        if tl.max(((label >= v0) & (label < v0 + dz.shape[1])).to(tl.int32), 0) > 0:
            c_y = tl.load(coefficients.y + n, mask=n < N, other=0.0)
            dz = dz + tl.where(v[None, :] == label[:, None], c_y[:, None], 0.0)
    return dz * slope
