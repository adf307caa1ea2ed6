"""The tile code that the Triton kernels share: products, logit transform, running sums, program order.

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

from rlhf_losses.kernels.triton_math import LOG2E, NOTHING, distance, exp2, finite_shift, reciprocal

# The argmax of no column; above every column.
NO_COLUMN = tl.constexpr(2147483647)
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
    if transform.softcap_rate is not None:
        # With e = exp(2x): tanh = 1 - 2 / (1 + e), and 1 - tanh^2 = 4e / (1 + e)^2. The reciprocal of 2^126 is normal.
        e = exp2(tl.minimum(z * transform.softcap_rate, 126.0, propagate_nan=tl.PropagateNan.ALL), False)
        r = reciprocal(1.0 + e)
        z = transform.softcap - 2.0 * transform.softcap * r
        slope = slope * (4.0 * (e * r) * r)
    elif transform.softcap is not None:
        # With e = exp(-2|x|): tanh = (1 - e) / (1 + e), and 1 - tanh^2 = 4e / (1 + e)^2 without cancellation. Near 0,
        # where 1 - e cancels, the Taylor series of tanh; the first term left out is 5e-8 of it.
        x = z * (1.0 / transform.softcap)
        e = exp2(tl.abs(x) * (-2.0 * LOG2E), False)
        r = reciprocal(1.0 + e)
        w = x * x
        series = 1.0 + w * (-1.0 / 3.0 + w * (2.0 / 15.0 + w * (-17.0 / 315.0 + w * (62.0 / 2835.0))))
        t = (1.0 - e) * r
        z = transform.softcap * tl.where(w < 0.09, x * series, tl.where(x < 0, -t, t))
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
def raised_maximum(z, v, m, arg, ARG: tl.constexpr):
    """The maximum [BN] after one more tile of logits z [BN, BV], and its column; columns v rise, broadcast to z."""
    tile_max = tl.max(z, 1)
    if ARG:
        tile_arg = tl.min(tl.where(z == tl.expand_dims(tile_max, 1), v, NO_COLUMN), 1)
        arg = tl.where(tile_max > m, tile_arg, arg)
    return tl.maximum(m, tile_max), arg


@triton.jit
def raised_sums(m, m_new, s, u, q, wt, w, EXACT: tl.constexpr):
    """The running sums, from relative to m to relative to m_new."""
    gap = (m - finite_shift(m_new)) * LOG2E
    step = tl.maximum(gap, NOTHING)
    decay = exp2(step, EXACT)
    return decay * s, decay * (u + step * s), decay * decay * q, wt + tl.where(w != 0.0, gap * w, 0.0)


@triton.jit
def added_tile(z, weights, m, s, u, q, wt, w, U: tl.constexpr, Q: tl.constexpr, EXACT: tl.constexpr):
    """2^t [BN, BV] of a tile of logits, and the running sums [BN] with it; m is the maximum of all of them.

    ``weights``: omega's of the columns, broadcast to z; or None.
    """
    t = distance(z, tl.expand_dims(finite_shift(m), 1)) * LOG2E
    e = exp2(t, EXACT)
    if weights is not None:
        # A column that weighs nothing, padding too, adds 0; 0 * -inf would be NaN.
        wt += tl.sum(tl.where(weights != 0.0, weights * t, 0.0), 1)
        w += tl.sum(weights, 1)
    if U:
        u += tl.sum(tl.maximum(t, NOTHING) * e, 1)
    if Q:
        q += tl.sum(e * e, 1)
    return e, s + tl.sum(e, 1), u, q, wt, w


@triton.jit
def absorb_tile(
    z, v, V, omega, m, s, u, q, arg, wt, w, U: tl.constexpr, Q: tl.constexpr, ARG: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """2^t [BN, BV] of one more tile of logits z, of columns v [BV] (rising), and the sums [BN] after it.

    The 2^t are relative to the m returned: where a row has its maximum so far, 2^t is exactly 1.
    """
    m_new, arg = raised_maximum(z, v[None, :], m, arg, ARG)
    s, u, q, wt = raised_sums(m, m_new, s, u, q, wt, w, EXACT)
    weights = None
    if omega is not None:
        # Loaded as a vector: with a second axis, Triton keeps the load's layout for what it meets, whole tiles of z.
        weights = tl.load(omega + v, mask=v < V, other=0.0)[None, :]
    e, s, u, q, wt, w = added_tile(z, weights, m_new, s, u, q, wt, w, U, Q, EXACT)
    return e, m_new, s, u, q, arg, wt, w


@triton.jit
def merged_sums(m, s, u, q, arg, wt, w, AXIS: tl.constexpr, EXACT: tl.constexpr):
    """The running sums of columns that were summed apart: [BN] from [BN, L], or with AXIS 0 from [L, BN]."""
    m_all = tl.max(m, AXIS)
    s, u, q, wt = raised_sums(m, tl.expand_dims(m_all, AXIS), s, u, q, wt, w, EXACT)
    # Of several columns with the maximum the first is meant.
    arg = tl.min(tl.where(m == tl.expand_dims(m_all, AXIS), arg, NO_COLUMN), AXIS)
    return m_all, tl.sum(s, AXIS), tl.sum(u, AXIS), tl.sum(q, AXIS), arg, tl.sum(wt, AXIS), tl.sum(w, AXIS)


@triton.jit
def masked_tile(z, v, v0, V, BV: tl.constexpr):
    """z [BN, BV] of columns v, v0 the first, with -inf in the padding of the vocabulary."""
    if v0 + BV > V:
        z = tl.where((v < V)[None, :], z, float("-inf"))
    return z


@triton.jit
def any_label(label, v0, BV: tl.constexpr):
    """Whether a label lies in the tile at v0. At V = 150k four tiles in five hold none of their 128 rows."""
    return tl.max(((label >= v0) & (label < v0 + BV)).to(tl.int32), 0) > 0


@triton.jit
def store_label_logit(label_logit, z, n, v, v0, label, BV: tl.constexpr):
    """The logits of the labels that lie in the tile z [BN, BV] at v0, to the places of their rows."""
    z_y = tl.sum(tl.where(v[None, :] == label[:, None], z, 0.0), 1)
    tl.store(label_logit + n, z_y, mask=(label >= v0) & (label < v0 + BV))


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
        tl.store(partial.w + at, w, mask=n < N)
