"""The gradient of a tile of logits, as the Triton kernels share it; called from the Hopper kernels too.

    dz = p (c_p + c_plogp log p + c_pp p) + c_y 1[v = y] + c_1 omega_v        da = dz * dz/da

Of a row's columns one has the label's term. To look for it in every tile takes instructions that the Hopper kernel has
no room for: it leaves the term out, and a pass over the rows puts the label's da in its place, from the label's
log-probability, which is known in fp32.
"""

import triton
import triton.language as tl

from rlhf_losses.kernels.triton_math import LN2, LOG2E, NOTHING, distance, exp2
from rlhf_losses.kernels.triton_tile import any_label


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
def row_coefficients(coefficients, n, N):
    """y, p, plogp * ln 2, pp and one of rows n, [BN] each; in the place of those that are None, anything.

    Asked for before a product they are there after it.
    """
    c_p = tl.load(coefficients.p + n, mask=n < N, other=0.0)
    c_y, c_plogp, c_pp, c_1 = c_p, c_p, c_p, c_p
    if coefficients.y is not None:
        c_y = tl.load(coefficients.y + n, mask=n < N, other=0.0)
    if coefficients.plogp is not None:
        c_plogp = tl.load(coefficients.plogp + n, mask=n < N, other=0.0) * LN2
    if coefficients.pp is not None:
        c_pp = tl.load(coefficients.pp + n, mask=n < N, other=0.0)
    if coefficients.one is not None:
        c_1 = tl.load(coefficients.one + n, mask=n < N, other=0.0)
    return c_y, c_p, c_plogp, c_pp, c_1


@triton.jit
def without_label(p, log2_p, coefficients, c):
    """p (c_p + c_plogp log p + c_pp p) of probabilities and their base-2 logarithms."""
    _, c_p, c_plogp, c_pp, _ = c
    inner = c_p[:, None]
    if coefficients.plogp is not None:
        inner = inner + c_plogp[:, None] * tl.maximum(log2_p, NOTHING)
    if coefficients.pp is not None:
        inner = inner + c_pp[:, None] * p
    return p * inner


@triton.jit
def smoothing_term(coefficients, c, v, V):
    """c_1 omega [BN, BV] of columns v, [1, BV] or [BN, BV]; 0 in the padding."""
    return c[4][:, None] * tl.load(coefficients.omega + v, mask=v < V, other=0.0)


@triton.jit
def product_gradient_tile(z, slope, shift, log_sum, coefficients, c, v, V, EXACT: tl.constexpr):
    """da [BN, BV] but for the label's term, from transformed logits z and dz/da; shift, log_sum [BN], v [BV].

    ``c`` are the rows' coefficients (row_coefficients).
    """
    log2_p = distance(z, shift[:, None]) * LOG2E - log_sum[:, None]
    dz = without_label(exp2(log2_p, EXACT), log2_p, coefficients, c)
    if coefficients.one is not None:
        dz = dz + smoothing_term(coefficients, c, v[None, :], V)
    return dz * slope


@triton.jit
def with_label(da, slope, coefficients, c, label, v, v0):
    """da [BN, BV] with the label's term, where a label is among the columns v [BV], v0 the first."""
    if coefficients.y is not None:  # noqa: SIM102 (decided at compile time, the vote is not)
        if any_label(label, v0, da.shape[1]):
            da = da + tl.where(v[None, :] == label[:, None], c[0][:, None] * slope, 0.0)
    return da


@triton.jit
def label_gradient(log_p, shift, log_sum, label, coefficients, c, transform, n, N, V):
    """da [BN, 1] of the rows' labels, all terms, from their log-probabilities; all but c [BN]."""
    log2_p = (log_p * LOG2E)[:, None]
    dz = without_label(exp2(log2_p, False), log2_p, coefficients, c)
    if coefficients.y is not None:
        dz = dz + c[0][:, None]
    if coefficients.one is not None:
        # Of a bad label, -1, nothing is wanted.
        dz = dz + smoothing_term(coefficients, c, tl.maximum(label, 0)[:, None], V)
    return dz * slope_tile((log_p + (log_sum * LN2 + shift))[:, None], transform, n, N)
