"""The two autograd functions, which know tokens and gradients but no kernel: pack rows, call a back end, unpack.

Rows that ``rows`` leaves out are never multiplied; the backward also leaves out rows whose upstream gradients are all
exactly 0 (clipped tokens, zero advantage), at the price of one wait for their number.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_losses.kernels.backends import operations
from rlhf_losses.kernels.gemm import all_finite
from rlhf_losses.kernels.host_read import HostRead
from rlhf_losses.kernels.statistics import OUTPUTS, Coefficients, RowStatistics, of_rows
from rlhf_losses.kernels.transform import LogitTransform

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What a call is beside its differentiable tensors.

    labels     [N] of the tokens in ``rows``, any integer dtype, as the caller gave them
    rows       [N] int64, which of the given tokens count; None for all of them
    transform  without its bias, with per-token temperatures already those of ``rows``
    """

    labels: Tensor
    rows: Tensor | None
    transform: LogitTransform
    wanted: frozenset[str]
    ignore_index: int
    backend: str
    workspace_bytes: int


def _pack(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def _unpack(values: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """[N, ...] -> [count, ...] with zeros in the rows left out."""
    if rows is None:
        return values
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, rows, values)


def _without_autocast(tensor: Tensor):
    return torch.autocast(tensor.device.type, enabled=False)


def _outputs(ctx, statistics: RowStatistics, call: Call, count: int) -> tuple[Tensor | None, ...]:
    outputs = tuple(
        _unpack(value, call.rows, count) if name in call.wanted and value is not None else None
        for name, value in ((name, getattr(statistics, name)) for name in OUTPUTS)
    )
    ctx.set_materialize_grads(False)
    if outputs[-1] is not None:
        ctx.mark_non_differentiable(outputs[-1])
    return outputs


def _save(ctx, call: Call, statistics: RowStatistics, *inputs: Tensor | None) -> None:
    ctx.call = call
    # What no coefficient is made of need not be kept. Labels and temperatures may lie in the caller's memory: saved,
    # they raise where somebody has written there since.
    temperature = call.transform.temperature
    guarded = (call.labels, temperature if isinstance(temperature, Tensor) else None)
    kept = statistics._replace(log_probs=None, logsumexp=None, argmax=None)
    ctx.save_for_backward(*guarded, *inputs, *kept)


def _first_order(backward: Callable) -> Callable:
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


def _with_gradient(call: Call, upstream: list[Tensor | None]) -> Tensor:
    """[N] bool: the tokens that count and have any upstream gradient."""
    given = [gradient != 0 for gradient in upstream if gradient is not None]
    if not given:
        return torch.zeros_like(call.labels, dtype=torch.bool)
    return functools.reduce(torch.logical_or, given) & (call.labels != call.ignore_index)


def _narrow(
    call: Call, statistics: RowStatistics, coefficients: Coefficients, kept: Tensor
) -> tuple[Call, RowStatistics, Coefficients]:
    """All three for the tokens ``kept`` (indices among the call's)."""
    narrowed = replace(
        call,
        rows=kept if call.rows is None else call.rows[kept],
        labels=call.labels[kept],
        transform=call.transform.for_rows(kept),
    )
    return narrowed, of_rows(statistics, kept), of_rows(coefficients, kept)


def _backward_step(
    call: Call, statistics: RowStatistics, upstream: tuple[Tensor | None, ...], meanwhile: Callable[[], T]
) -> tuple[Call, RowStatistics, Coefficients, T]:
    """What the backward works on, and what ``meanwhile`` returns.

    The number of tokens with a gradient has to reach the host. All that can be launched before it does is, and
    ``meanwhile`` gives the device work for the time that the host needs to launch the next kernel.
    """
    # Contiguous: the gradient of a sum is one number with stride 0, and kernels step by one element.
    gradients = [None if g is None else _pack(g, call.rows).contiguous() for g in upstream[:4]]
    some = _with_gradient(call, gradients)
    count = HostRead(some.sum())
    coefficients = Coefficients.from_upstream(statistics, *gradients)
    result = meanwhile()
    if int(count.wait()) < len(some):
        return *_narrow(call, statistics, coefficients, some.nonzero().squeeze(1)), result
    return call, statistics, coefficients, result


class LinearStatistics(torch.autograd.Function):
    """hidden [M, H], weight [V, H], bias [V] or None -> the five fields of ``TokenStats``, [M]."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor | None, ...]:
        with _without_autocast(hidden):
            statistics = operations(call.backend).linear_forward(
                _pack(hidden, call.rows),
                weight,
                call.labels,
                call.transform.with_bias(bias),
                call.wanted,
                call.ignore_index,
                call.workspace_bytes,
            )
        _save(ctx, call, statistics, hidden, weight, bias)
        return _outputs(ctx, statistics, call, len(hidden))

    @staticmethod
    @_first_order
    def backward(ctx, *upstream: Tensor | None):
        _, _, hidden, weight, bias, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with _without_autocast(hidden):
            call, statistics, coefficients, finite = _backward_step(
                ctx.call, RowStatistics(*saved), upstream, lambda: all_finite(weight) if needs[0] else None
            )
            if len(call.labels) == 0:
                inputs = zip((hidden, weight, bias), needs, strict=True)
                return *(torch.zeros_like(x) if need else None for x, need in inputs), None
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
            )
        return (
            None if d_hidden is None else _unpack(d_hidden, call.rows, len(hidden)),
            d_weight,
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
        )


class LogitsStatistics(torch.autograd.Function):
    """logits [M, V] -> the five fields of ``TokenStats``, [M]; with ``in_place`` the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx, logits: Tensor, call: Call, in_place: bool) -> tuple[Tensor | None, ...]:
        statistics = operations(call.backend).logits_forward(
            logits, call.rows, call.labels, call.transform, call.wanted, call.ignore_index, call.workspace_bytes
        )
        ctx.in_place = in_place
        ctx.overwritten = False
        _save(ctx, call, statistics, logits)
        return _outputs(ctx, statistics, call, len(logits))

    @staticmethod
    @_first_order
    def backward(ctx, *upstream: Tensor | None):
        if ctx.overwritten:
            raise RuntimeError(
                "log_probs_from_logits: expected one backward with inplace_backward=True, got a second; "
                "the first wrote the gradient over the logits. Pass inplace_backward=False to keep them"
            )
        _, _, logits, *saved = ctx.saved_tensors
        call, statistics, coefficients, _ = _backward_step(ctx.call, RowStatistics(*saved), upstream, lambda: None)
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
