"""The two autograd functions, which know tokens and gradients but no kernel: pack rows, call a back end, unpack.

Rows that ``rows`` leaves out are never multiplied; the backward also leaves out rows whose upstream gradients are all
exactly 0 (clipped tokens, zero advantage), at the price of one wait for their number.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_losses.kernels.backends import operations
from rlhf_losses.kernels.gemm import all_finite
from rlhf_losses.kernels.host_read import HostRead
from rlhf_losses.kernels.statistics import CallStats, Coefficients, Kept, RowStatistics, of_rows
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

    def can_keep(self, dtype: torch.dtype) -> bool:
        """Whether rows kept by the forward give the whole gradient, for operands of this dtype.

        An exponential of 16 bits that is 0 does not say what z was, and a soft cap's dz/da comes from it: as long as
        every term of dz is a multiple of p that does not matter, but smoothing has a gradient there, too.
        """
        exponentials = self.backend == "triton" and dtype.itemsize == 2
        return not (exponentials and self.omega is not None and self.transform.softcap is not None)


def _pack(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def unpack(values: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """[N, ...] -> [count, ...] with zeros in the rows left out."""
    if rows is None:
        return values
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, rows, values)


def without_autocast(tensor: Tensor):
    return torch.autocast(tensor.device.type, enabled=False)


def _outputs(ctx, statistics: RowStatistics, call: Call, count: int) -> tuple[Tensor | None, ...]:
    outputs = tuple(
        unpack(value, call.rows, count) if name in call.wanted and value is not None else None
        for name, value in ((name, getattr(statistics, name)) for name in CallStats._fields)
    )
    ctx.set_materialize_grads(False)
    if outputs[-1] is not None:
        ctx.mark_non_differentiable(outputs[-1])
    return outputs


def _save(ctx, call: Call, statistics: RowStatistics, kept: Kept | None, *inputs: Tensor | None) -> None:
    ctx.call = call
    # What no coefficient is made of need not be kept. Labels, temperatures and omega may lie in the caller's memory:
    # saved, they raise where somebody has written there since.
    temperature = call.transform.temperature
    guarded = (call.labels, temperature if isinstance(temperature, Tensor) else None, call.omega)
    statistics = statistics._replace(logsumexp=None, weighted_log_probs=None, argmax=None)
    ctx.save_for_backward(*guarded, *inputs, *statistics, *(kept or (None, None)))


def _saved(ctx) -> tuple[tuple[Tensor, ...], RowStatistics, Kept | None]:
    """The inputs, statistics and kept rows of ``_save``."""
    _, _, _, *saved, values, shift = ctx.saved_tensors
    parts = len(RowStatistics._fields)
    return tuple(saved[:-parts]), RowStatistics(*saved[-parts:]), None if values is None else Kept(values, shift)


def _rows_to_keep(call: Call, weight: Tensor) -> int:
    """As many as the cache holds."""
    if call.cache_bytes == 0 or not call.can_keep(weight.dtype):
        return 0
    return min(len(call.labels), call.cache_bytes // operations(call.backend).kept_row_bytes(weight))


def first_order(backward: Callable) -> Callable:
    """Refuses create_graph. (``once_differentiable`` sees a second derivative only through the upstream gradients.)"""

    @functools.wraps(backward)
    def checked(ctx, *upstream: Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected a backward without create_graph, got create_graph=True; the gradients of this op have no "
                "derivatives. Pass backend='reference' for second derivatives"
            )
        return backward(ctx, *upstream)

    return checked


def with_gradient(labels: Tensor, ignore_index: int, upstream: Sequence[Tensor | None]) -> Tensor:
    """[N] bool: the tokens that count and have any upstream gradient."""
    given = [gradient != 0 for gradient in upstream if gradient is not None]
    if not given:
        return torch.zeros_like(labels, dtype=torch.bool)
    return functools.reduce(torch.logical_or, given) & (labels != ignore_index)


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


def _backward_step(
    call: Call,
    statistics: RowStatistics,
    upstream: tuple[Tensor | None, ...],
    meanwhile: Callable[[], T],
) -> tuple[Call, RowStatistics, Coefficients, Tensor | None, T]:
    """What the backward works on, which of the call's tokens that are (None for all), and what ``meanwhile`` returns.

    The number of tokens with a gradient has to reach the host. All that can be launched before it does is, and
    ``meanwhile`` gives the device work for the time that the host needs to launch the next kernel.
    """
    # Contiguous: the gradient of a sum is one number with stride 0, and kernels step by one element.
    gradients = [None if g is None else _pack(g, call.rows).contiguous() for g in upstream[:-1]]
    some = with_gradient(call.labels, call.ignore_index, gradients)
    count = HostRead(some.sum())
    coefficients = Coefficients.from_upstream(statistics, *gradients, call.omega)
    result = meanwhile()
    if int(count.wait()) == len(some):
        return call, statistics, coefficients, None, result
    tokens = some.nonzero().squeeze(1)
    return *_narrow(call, statistics, coefficients, tokens), tokens, result


class LinearStatistics(torch.autograd.Function):
    """hidden [M, H], weight [V, H], bias [V] or None -> the fields of ``CallStats``, [M]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor | None, ...]:
        keep_rows = _rows_to_keep(call, weight) if any(ctx.needs_input_grad) else 0
        with without_autocast(hidden):
            statistics, kept = operations(call.backend).linear_forward(
                _pack(hidden, call.rows),
                weight,
                call.labels,
                call.transform.with_bias(bias),
                call.wanted,
                call.omega,
                call.ignore_index,
                call.workspace_bytes,
                keep_rows,
            )
        _save(ctx, call, statistics, kept, hidden, weight, bias)
        return _outputs(ctx, statistics, call, len(hidden))

    @staticmethod
    @first_order
    def backward(ctx, *upstream: Tensor | None):
        (hidden, weight, bias), statistics, kept = _saved(ctx)
        needs = ctx.needs_input_grad[:3]
        with without_autocast(hidden):
            call, statistics, coefficients, tokens, finite = _backward_step(
                ctx.call, statistics, upstream, lambda: all_finite(weight) if needs[0] else None
            )
            if len(call.labels) == 0:
                inputs = zip((hidden, weight, bias), needs, strict=True)
                return *(torch.zeros_like(x) if need else None for x, need in inputs), None
            source = None if kept is None or tokens is None else tokens[tokens < len(kept.values)]
            d_hidden, d_weight, d_bias = operations(call.backend).linear_backward(
                _pack(hidden, call.rows),
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
            )
        return (
            None if d_hidden is None else unpack(d_hidden, call.rows, len(hidden)),
            d_weight,
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
        )


class Recomputed(LinearStatistics):
    """hidden, weight and bias of a call whose statistics [M] somebody has found -> ``CallStats`` of them.

    The forward computes nothing; the backward, should there be one, takes the products once more.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, found: RowStatistics):
        # Aliases: these get a gradient, what was found has none.
        statistics = RowStatistics(*(None if x is None else _pack(x.detach(), call.rows) for x in found))
        _save(ctx, call, statistics, None, hidden, weight, bias)
        return _outputs(ctx, statistics, call, len(hidden))

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        return *LinearStatistics.backward(ctx, *upstream), None


class LogitsStatistics(torch.autograd.Function):
    """logits [M, V] -> the fields of ``CallStats``, [M]; with ``in_place`` the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx, logits: Tensor, call: Call, in_place: bool) -> tuple[Tensor | None, ...]:
        statistics = operations(call.backend).logits_forward(
            logits,
            call.rows,
            call.labels,
            call.transform,
            call.wanted,
            call.omega,
            call.ignore_index,
            call.workspace_bytes,
        )
        ctx.in_place = in_place
        ctx.overwritten = False
        _save(ctx, call, statistics, None, logits)
        return _outputs(ctx, statistics, call, len(logits))

    @staticmethod
    @first_order
    def backward(ctx, *upstream: Tensor | None):
        if ctx.overwritten:
            raise RuntimeError(
                "log_probs_from_logits: expected one backward with inplace_backward=True, got a second; "
                "the first wrote the gradient over the logits. Pass inplace_backward=False to keep them"
            )
        (logits,), statistics, _ = _saved(ctx)
        call, statistics, coefficients, _, _ = _backward_step(ctx.call, statistics, upstream, lambda: None)
        complete = call.rows is None
        if ctx.in_place:
            ctx.overwritten = True
            d_logits = logits.detach()
        else:
            d_logits = torch.empty_like(logits) if complete else torch.zeros_like(logits)
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
        if ctx.in_place:
            if not complete:
                left_out = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
                left_out[call.rows] = False
                d_logits.masked_fill_(left_out[:, None], 0)
            # Whoever else saved these logits for a backward must hear of it.
            torch.autograd.graph.increment_version(logits)
        return d_logits, None, None
