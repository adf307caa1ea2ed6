"""Exponentials, logarithms and differences as the running sums want them; in base 2, as the hardware computes them.

Called from the Hopper kernels too: nothing here makes a tensor out of nothing.
"""

import torch
import triton
import triton.language as tl

from rlhf_losses.kernels.backends import interpreting

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# 2^-200 is 0 in fp32: below it a term adds nothing to the entropy, where a distance of -inf would add NaN.
NOTHING = tl.constexpr(-200.0)
_PTX = tl.constexpr(torch.version.hip is None and not interpreting())


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """2^x: the hardware's, to 2 ulp, or with EXACT and x <= 0 to 1, for operands that are fp32 themselves."""
    if EXACT:
        # 2^n * 2^f with n whole and |f| <= 1/2, the second by its Taylor series: the first term left out is 5e-9.
        x = tl.where(x < NOTHING, NOTHING, x)
        n = tl.floor(x + 0.5)
        f = (x - n) * LN2
        series = 1.0 + f * (1.0 / 7.0)
        series = 1.0 + f * (1.0 / 6.0) * series
        series = 1.0 + f * (1.0 / 5.0) * series
        series = 1.0 + f * (1.0 / 4.0) * series
        series = 1.0 + f * (1.0 / 3.0) * series
        series = 1.0 + f * 0.5 * series
        return (1.0 + f * series) * tl.exp2(n)
    if _PTX:
        # The portable form spends four more instructions on denormal results, which are 0 to us.
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def distance(z, m):
    """z - m, both rounded before: fused with the product that z came from, it would keep digits that m has lost.

    The maximum's own distance would then not be 0, and at logits of 1e18 be large enough for a 2^t of infinity.
    """
    if _PTX:
        return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [z, m], tl.float32, is_pure=True, pack=1)
    return z - m


@triton.jit
def reciprocal(x):
    """1 / x of a normal x, to 1 ulp: the hardware's, where the portable form spends eight instructions."""
    if _PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def rough_log2(x):
    """log2(x) of a normal x > 0 to 2^-22, absolute: the hardware's, not the portable dozen of instructions."""
    if _PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def log2(x):
    """log2(x) for x >= 1, the hardware's with its error taken out by one Newton step."""
    y = tl.log2(x)
    return y + (x * exp2(-y, True) - 1.0) * LOG2E


@triton.jit
def finite_shift(m):
    """The maximum to subtract: 0 for a row of nothing but -inf, whose terms are then 0 and not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)
