"""A call on packed rows: which tokens count, their statistics, and their gradients; no kernel and no autograd.

Rows that ``rows`` leaves out are never multiplied; the backward also leaves out rows whose upstream gradients are all
exactly 0 (clipped tokens, zero advantage), at the price of one wait for their number. A CUDA graph waits for nothing:
there all rows are multiplied, and those without a gradient are made such that none comes of them.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rlhf_losses.kernels import host_read
from rlhf_losses.kernels.backends import operations
from rlhf_losses.kernels.gemm import all_finite
from rlhf_losses.kernels.host_read import HostRead
from rlhf_losses.kernels.statistics import Coefficients, Kept, RowStatistics, of_rows
from rlhf_losses.kernels.transform import LogitTransform

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What a call is beside its differentiable tensors.

    labels     [N] of the tokens in ``rows``, any integer dtype, as the caller gave them
    rows       [N] int64, which of the given tokens count; None for all of them
    transform  without its bias, with per-token temperatures already those of ``rows``
    omega      [V] weights of "weighted_log_probs" in the accumulator's dtype, where that is wanted
    """

    labels: Tensor
    rows: Tensor | None
    transform: LogitTransform
    wanted: frozenset[str]
    ignore_index: int
    backend: str
    workspace_bytes: int
    cache_bytes: int = 0
    omega: Tensor | None = None
    # A compiler looks at it, it is not run (rlhf_losses/compiled.py).
    traced: ClassVar[bool] = False

    def can_keep(self, dtype: torch.dtype) -> bool:
        """Whether rows kept by the forward give the whole gradient, for operands of this dtype.

        An exponential of 16 bits that is 0 does not say what z was, and a soft cap's dz/da comes from it: as long as
        every term of dz is a multiple of p that does not matter, but smoothing has a gradient there, too.
        """
        exponentials = self.backend == "triton" and dtype.itemsize == 2
        return not (exponentials and self.omega is not None and self.transform.softcap is not None)


def pack(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def packed(call: Call, counts: Tensor) -> Call:
    """A call of all tokens, for those that ``counts`` [N] marks. Waits for the device to say how many they are."""
    rows = counts.nonzero().squeeze(1)
    if len(rows) == len(counts):
        return call
    return replace(call, rows=rows, labels=call.labels[rows], transform=call.transform.for_rows(rows))


def unpack(values: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """[N, ...] -> [count, ...] with zeros in the rows left out."""
    if rows is None:
        return values
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, rows, values)


def without_autocast(tensor: Tensor):
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def with_gradient(labels: Tensor, ignore_index: int, upstream: Sequence[Tensor | None]) -> Tensor:
    """[N] bool: the tokens that count and have any upstream gradient."""
    counts = labels != ignore_index
    given = [gradient for gradient in upstream if gradient is not None]
    if not given:
        return torch.zeros_like(counts)
    # Not 0 is True, NaN too.
    return functools.reduce(torch.logical_or, given).logical_and(counts)


def _narrow(
    call: Call, statistics: RowStatistics, coefficients: Coefficients, tokens: Tensor
) -> tuple[Call, RowStatistics, Coefficients]:
    """All three for some of the tokens, indices among the call's."""
    narrowed = replace(
        call,
        rows=tokens if call.rows is None else call.rows[tokens],
        labels=call.labels[tokens],
        transform=call.transform.for_rows(tokens),
    )
    return narrowed, of_rows(statistics, tokens), coefficients.for_rows(tokens)


# p is 0 where such a maximum is subtracted.
_FAR = 3e38


def _without(
    some: Tensor, call: Call, statistics: RowStatistics, coefficients: Coefficients
) -> tuple[Call, RowStatistics, Coefficients]:
    """The three for a gradient that is 0 at the tokens which ``some`` [N] does not mark, whatever these hold."""

    def kept(values: Tensor | None, other: float) -> Tensor | None:
        return None if values is None else torch.where(some, values, other)

    temperature = call.transform.temperature
    if isinstance(temperature, Tensor):
        call = replace(call, transform=replace(call.transform, temperature=kept(temperature, 1.0)))
    statistics = statistics._replace(
        shift=kept(statistics.shift, _FAR), norm=kept(statistics.norm, 1.0), log_probs=kept(statistics.log_probs, 0.0)
    )
    *terms, omega = coefficients
    return call, statistics, Coefficients(*(kept(term, 0.0) for term in terms), omega)


def _backward_step(
    call: Call,
    statistics: RowStatistics,
    upstream: Sequence[Tensor | None],
    meanwhile: Callable[[], T],
) -> tuple[Call, RowStatistics, Coefficients, Tensor | None, T | None]:
    """What the backward works on, which of the call's tokens that are (None for all), and what ``meanwhile`` returns.

    The number of tokens with a gradient has to reach the host. All that can be launched before it does is, which is
    what ``meanwhile`` is for. In a CUDA graph, where nothing does, all tokens are worked on, and the fourth result is
    the mask [N] of those that have a gradient.
    """
    # Contiguous: the gradient of a sum is one number with stride 0, and kernels step by one element.
    gradients = [None if g is None else pack(g, call.rows).contiguous() for g in upstream[:-1]]
    some = with_gradient(call.labels, call.ignore_index, gradients)
    count = None if host_read.capturing() else HostRead(some.sum())
    coefficients = Coefficients.from_upstream(statistics, *gradients, call.omega)
    if count is None:
        return *_without(some, call, statistics, coefficients), some, None
    result = meanwhile()
    if count.wait() == len(some):
        return call, statistics, coefficients, None, result
    tokens = some.nonzero().squeeze(1)
    return *_narrow(call, statistics, coefficients, tokens), tokens, result


def linear_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, keep_rows: int = 0
) -> tuple[RowStatistics, Kept | None]:
    """hidden [M, H], weight [V, H], bias [V] or None -> statistics of the call's rows; what is kept of the first."""
    with without_autocast(hidden):
        return operations(call.backend).linear_forward(
            pack(hidden, call.rows),
            weight,
            call.labels,
            call.transform.with_bias(bias),
            call.wanted,
            call.omega,
            call.ignore_index,
            call.workspace_bytes,
            keep_rows,
        )


def linear_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    statistics: RowStatistics,
    kept: Kept | None,
    upstream: Sequence[Tensor | None],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden [M, H], weight [V, H] and bias [V], None where ``needs`` says so.

    ``statistics`` and ``kept`` are those of the call's rows; ``upstream`` [M] are the gradients of ``CallStats``.
    """
    back_end = operations(call.backend)
    rows, transform = pack(hidden, call.rows), call.transform.with_bias(bias)

    def before_the_wait() -> tuple[HostRead | None, object]:
        finite = all_finite(weight) if needs[0] else None
        whole = kept is None and len(rows) > 0
        return finite, back_end.linear_prepare(rows, weight, transform) if whole else None

    with without_autocast(hidden):
        call, statistics, coefficients, tokens, early = _backward_step(call, statistics, upstream, before_the_wait)
        finite, prepared = early or (None, None)
        if len(call.labels) == 0:
            inputs = zip((hidden, weight, bias), needs, strict=True)
            d_hidden, d_weight, d_bias = (torch.zeros_like(x) if need else None for x, need in inputs)
            return d_hidden, d_weight, d_bias
        source = None
        if host_read.capturing():
            # Ones, of which a head's row of -inf makes -inf; zeros would make NaN.
            rows, kept = torch.where(tokens[:, None], rows, 1.0), None
        elif tokens is not None:
            rows, prepared = rows[tokens], None
            source = None if kept is None else tokens[tokens < len(kept.values)]
        d_hidden, d_weight, d_bias = back_end.linear_backward(
            rows,
            weight,
            finite,
            call.labels,
            call.transform.with_bias(bias),
            statistics,
            coefficients,
            needs,
            call.workspace_bytes,
            kept,
            source,
            prepared,
        )
    return (
        None if d_hidden is None else unpack(d_hidden, call.rows, len(hidden)),
        d_weight,
        None if d_bias is None else d_bias.to(bias.dtype),
    )


def logits_rows(logits: Tensor, call: Call) -> RowStatistics:
    """logits [M, V] -> statistics of the call's rows."""
    return operations(call.backend).logits_forward(
        logits,
        call.rows,
        call.labels,
        call.transform,
        call.wanted,
        call.omega,
        call.ignore_index,
        call.workspace_bytes,
    )


def logits_gradient(
    logits: Tensor, call: Call, statistics: RowStatistics, upstream: Sequence[Tensor | None], in_place: bool
) -> Tensor:
    """Gradient of logits [M, V], over the logits themselves with ``in_place``; else as ``linear_gradients``."""
    call, statistics, coefficients, tokens, _ = _backward_step(call, statistics, upstream, lambda: None)
    complete = call.rows is None
    empty = torch.empty_like if complete else torch.zeros_like
    d_logits = logits.detach() if in_place else empty(logits)
    if len(call.labels) > 0:
        operations(call.backend).logits_backward(
            logits,
            call.rows,
            call.labels,
            call.transform,
            statistics,
            coefficients,
            d_logits,
            call.workspace_bytes,
        )
    captured = host_read.capturing()
    if captured or (in_place and not complete):
        left_out = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        left_out[slice(None) if complete else call.rows] = ~tokens if captured else False
        d_logits.masked_fill_(left_out[:, None], 0)
    return d_logits
