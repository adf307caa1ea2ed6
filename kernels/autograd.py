"""The two autograd functions: what is kept from a call's forward for its backward (call.py), and what is refused."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_losses.kernels.backends import operations
from rlhf_losses.kernels.call import Call, linear_gradients, linear_rows, logits_gradient, logits_rows, pack, unpack
from rlhf_losses.kernels.host_read import undivided
from rlhf_losses.kernels.statistics import CallStats, Kept, RowStatistics


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


class LinearStatistics(torch.autograd.Function):
    """hidden [M, H], weight [V, H], bias [V] or None -> the fields of ``CallStats``, [M]."""

    @staticmethod
    @undivided
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor | None, ...]:
        keep_rows = _rows_to_keep(call, weight) if any(ctx.needs_input_grad) else 0
        statistics, kept = linear_rows(hidden, weight, bias, call, keep_rows)
        _save(ctx, call, statistics, kept, hidden, weight, bias)
        return _outputs(ctx, statistics, call, len(hidden))

    @staticmethod
    @first_order
    def backward(ctx, *upstream: Tensor | None):
        inputs, statistics, kept = _saved(ctx)
        return *linear_gradients(*inputs, ctx.call, statistics, kept, upstream, ctx.needs_input_grad[:3]), None


class Recomputed(LinearStatistics):
    """hidden, weight and bias of a call whose statistics [M] somebody has found -> ``CallStats`` of them.

    The forward computes nothing; the backward, should there be one, takes the products once more.
    """

    @staticmethod
    @undivided
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, found: RowStatistics):
        # Aliases: these get a gradient, what was found has none.
        statistics = RowStatistics(*(None if x is None else pack(x.detach(), call.rows) for x in found))
        _save(ctx, call, statistics, None, hidden, weight, bias)
        return _outputs(ctx, statistics, call, len(hidden))

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        return *LinearStatistics.backward(ctx, *upstream), None


class LogitsStatistics(torch.autograd.Function):
    """logits [M, V] -> the fields of ``CallStats``, [M]; with ``in_place`` the gradient overwrites the logits."""

    @staticmethod
    @undivided
    def forward(ctx, logits: Tensor, call: Call, in_place: bool) -> tuple[Tensor | None, ...]:
        statistics = logits_rows(logits, call)
        ctx.in_place = in_place
        ctx.overwritten = False
        _save(ctx, call, statistics, None, logits)
        return _outputs(ctx, statistics, call, len(logits))

    @staticmethod
    @first_order
    def backward(ctx, *upstream: Tensor | None):
        if ctx.overwritten:
            raise RuntimeError(
                "expected one backward with inplace_backward=True, got a second (each output's is one); "
                "the first wrote the gradient over the logits. Pass inplace_backward=False to keep them"
            )
        (logits,), statistics, _ = _saved(ctx)
        ctx.overwritten = ctx.in_place
        d_logits = logits_gradient(logits, ctx.call, statistics, upstream, ctx.in_place)
        if ctx.in_place:
            # Whoever else saved these logits for a backward must hear of it.
            torch.autograd.graph.increment_version(logits)
        return d_logits, None, None
