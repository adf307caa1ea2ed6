"""The numbers of one pass over the vocabulary, and how a loss of them enters the backward.

With z the transformed logits of a token, m its maximum and s, u, q the sums over the vocabulary

    s = sum e^(z-m)        u = sum (z-m) e^(z-m)        q = sum e^(2(z-m))

    log_prob  = (z_y - m) - log s          entropy        = log s - u / s
    logsumexp = m + log s                  sum_p_squared  = q / s^2

s >= 1 and u <= 0, so entropy >= 0; both are clamped to their mathematical range, where rounding could leave it by an
ulp. m and log s are kept apart: nothing is lost when logits sit at 1e4, where fp32 steps by 1e-3.

Label smoothing wants, beside them, the log-probabilities weighted by a vector omega of the vocabulary,

    weighted_log_probs = sum omega_v log p_v = sum omega_v (z_v - m) - log s sum omega_v

Any loss L of these numbers reaches the logits as

    dL/dz_v = p_v * (c_p + c_plogp * log p_v + c_pp * p_v) + c_y * 1[v = y] + c_1 * omega_v

with c_y = g_logp, c_plogp = -g_ent, c_pp = 2 * g_q, c_1 = g_weighted,
c_p = -g_logp + g_lse - g_ent * entropy - 2 * g_q * sum_p_squared - g_weighted * sum omega
and g_* the upstream gradients of that token. Back ends see only these vectors: a new loss changes no kernel.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

OUTPUTS = ("log_probs", "entropy", "logsumexp", "sum_p_squared", "argmax")


class TokenStats(NamedTuple):
    """Per-token numbers, each shaped like ``labels`` and fp32 (fp64 for fp64 inputs); None where not asked for.

    log_probs      log-probability of the label, <= 0; 0 at masked tokens
    entropy        entropy of the whole distribution in nats, in [0, log V]
    logsumexp      log of the partition function of the transformed logits
    sum_p_squared  sum of squared probabilities, in [1/V, 1]
    argmax         most probable entry, int64, not differentiable; the lowest index of a tie
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    sum_p_squared: Tensor | None = None
    argmax: Tensor | None = None


class CallStats(NamedTuple):
    """``TokenStats`` [M], and what of a call's statistics only the cross entropy asks for: sum omega_v log p_v."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    sum_p_squared: Tensor | None = None
    weighted_log_probs: Tensor | None = None
    argmax: Tensor | None = None


class RowStatistics(NamedTuple):
    """What a back end's forward returns for N rows: [N] each, None where not wanted.

    ``shift``, the maximum of z, and ``norm`` are for the same back end's backward, which takes p from them: ``norm`` is
    s where p is e^(z - shift) / s (chunked), log2 s where p is a power of 2 (triton).
    """

    shift: Tensor
    norm: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor | None
    sum_p_squared: Tensor | None
    weighted_log_probs: Tensor | None
    argmax: Tensor | None


class Kept(NamedTuple):
    """What a forward keeps of its first K rows, so that their gradient needs no product; a back end reads its own.

    triton   values [K, tiles * columns of a tile], e^(z - shift) in the operands' dtype, or raw products if that is
             fp32; shift [tiles, K], fp32
    chunked  values [K, V], raw products in the accumulator's dtype; no shift
    """

    values: Tensor
    shift: Tensor | None


def has_column(labels: Tensor, vocab: int) -> Tensor:
    """[N] bool: the labels that are one of ``vocab`` columns."""
    return (labels >= 0) & (labels < vocab)


Parts = TypeVar("Parts", bound=tuple)


def of_rows(parts: Parts, rows: Tensor | slice) -> Parts:
    """A tuple of per-row tensors, some of them None, for some of the rows."""
    return type(parts)(*(None if part is None else part[rows] for part in parts))


def settle(statistics: RowStatistics, labels: Tensor, vocab: int, ignore_index: int) -> RowStatistics:
    """0 where the label is ``ignore_index``; NaN, which the backward then meets too, where no column has the label."""
    ignored = labels == ignore_index
    bad = ~ignored & ~has_column(labels, vocab)

    def floats(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.masked_fill(bad, float("nan")).masked_fill(ignored, 0.0)

    *values, argmax = statistics
    settled = None if argmax is None else argmax.masked_fill(bad, -1).masked_fill(ignored, 0)
    return RowStatistics(*map(floats, values), settled)


class Coefficients(NamedTuple):
    """[N] vectors of the formula at the head, and omega [V]; None where no wanted gradient has that term."""

    y: Tensor | None
    p: Tensor
    plogp: Tensor | None
    pp: Tensor | None
    one: Tensor | None
    omega: Tensor | None

    def for_rows(self, rows: Tensor | slice) -> "Coefficients":
        return of_rows(self._replace(omega=None), rows)._replace(omega=self.omega)

    @classmethod
    def from_upstream(
        cls,
        statistics: RowStatistics,
        log_probs: Tensor | None,
        entropy: Tensor | None,
        logsumexp: Tensor | None,
        sum_p_squared: Tensor | None,
        weighted_log_probs: Tensor | None,
        omega: Tensor | None,
    ) -> "Coefficients":
        """From the upstream gradients of the outputs, None for an output that nothing depends on; omega [V]."""
        p = torch.zeros_like(statistics.norm) if log_probs is None else -log_probs
        if logsumexp is not None:
            p = p + logsumexp
        if entropy is not None:
            assert statistics.entropy is not None
            p = p - entropy * statistics.entropy
        if sum_p_squared is not None:
            assert statistics.sum_p_squared is not None
            p = p - 2 * sum_p_squared * statistics.sum_p_squared
        if weighted_log_probs is not None:
            assert omega is not None
            p = p - weighted_log_probs * omega.sum()
        return cls(
            y=log_probs,
            p=p,
            plogp=None if entropy is None else -entropy,
            pp=None if sum_p_squared is None else 2 * sum_p_squared,
            one=weighted_log_probs,
            omega=None if weighted_log_probs is None else omega,
        )
