"""The tile code that the Triton kernels share: products, logit transform, running sums, gradient, program order.

N tokens, V vocabulary, H hidden size; BN, BV, BH the tile's sides. Row offsets are int64: N * V passes 2^31 early.
Called from the Hopper kernels too, so nothing here makes a tensor out of nothing: Gluon would want its layout.
(``product_tile`` does; it is the portable kernels' alone.)
"""

import triton
import triton.language as tl

# e^-200 is 0 in fp32: below it a logit's gap adds nothing to u, and a gap of -inf would add NaN.
NO_GAP = tl.constexpr(-200.0)


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
        # With e = exp(-2|x|): tanh = (1 - e) / (1 + e), and 1 - tanh^2 = 4e / (1 + e)^2 without cancellation.
        x = z / transform.softcap
        e = tl.exp(-2.0 * tl.abs(x))
        r = 1.0 / (1.0 + e)
        z = tl.where(x < 0, -transform.softcap, transform.softcap) * (1.0 - e) * r
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
def grouped(item, row_blocks, columns, GROUP: tl.constexpr):
    """(row block, column) number ``item``: GROUP row blocks run through all columns before the next GROUP begins.

    Programs that run at the same time then share a few stretches of the weight and GROUP blocks of hidden rows in L2.
    """
    first = item // (GROUP * columns) * GROUP
    size = min(row_blocks - first, GROUP)
    rest = item % (GROUP * columns)
    return first + rest % size, rest // size


@triton.jit
def absorb_tile(z, v, m, s, u, q, arg, U: tl.constexpr, Q: tl.constexpr, ARG: tl.constexpr):
    """Running sums [BN] after one more tile of logits z [BN, BV], its columns v [BV] in rising order."""
    tile_max = tl.max(z, 1)
    if ARG:
        tile_arg = tl.min(tl.where(z == tile_max[:, None], v[None, :], 2147483647), 1)
        arg = tl.where(tile_max > m, tile_arg, arg)
    m_new = tl.maximum(m, tile_max)
    # A row with nothing but -inf so far: gaps of -inf, not NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    gap = z - shift[:, None]
    e = tl.exp(gap)
    step = tl.maximum(m - shift, NO_GAP)
    decay = tl.exp(step)
    if U:
        u = decay * (u + step * s) + tl.sum(tl.maximum(gap, NO_GAP) * e, 1)
    if Q:
        q = decay * decay * q + tl.sum(e * e, 1)
    s = decay * s + tl.sum(e, 1)
    return m_new, s, u, q, arg


@triton.jit
def product_gradient_tile(z, slope, row_max, log_sum, coefficients, label, n, v, N):
    """da [BN, BV] from transformed logits z and dz/da, both [BN, BV]; row_max, log_sum, label, n [BN], v [BV]."""
    log_p = (z - row_max[:, None]) - log_sum[:, None]
    p = tl.exp(log_p)
    inner = tl.load(coefficients.p + n, mask=n < N, other=0.0)[:, None]
    if coefficients.plogp is not None:
        c_plogp = tl.load(coefficients.plogp + n, mask=n < N, other=0.0)
        inner = inner + c_plogp[:, None] * tl.maximum(log_p, NO_GAP)
    if coefficients.pp is not None:
        inner = inner + tl.load(coefficients.pp + n, mask=n < N, other=0.0)[:, None] * p
    dz = p * inner
    if coefficients.y is not None:
        c_y = tl.load(coefficients.y + n, mask=n < N, other=0.0)
        dz = dz + tl.where(v[None, :] == label[:, None], c_y[:, None], 0.0)
    return dz * slope
