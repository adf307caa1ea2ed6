"""A function of the logits of many tokens, from the logits of a few at a time: for losses that need whole rows of them.

Top-k distillation asks for the student's logits at the teacher's k tokens and for its own k largest. Nothing of it is
token statistics, so it costs a product of its own (2*N*H*V, and with its gradient 8*N*H*V operations); what it does not
cost is [N, V]: the logits of one chunk exist at a time, and the backward makes them once more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# logits [n, V], fp32 or fp64, and the number of their first row -> tensors [n]
LogitFunction = Callable[[Tensor, int], tuple[Tensor, ...]]
# The chunk's raw logits, those after each part of the transform, their softmax, and gradients, in fp32.
_COPIES = 8


def in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, function: LogitFunction, workspace_bytes: int
) -> tuple[Tensor, ...]:
    """``function`` of the raw products of hidden [N, H] and weight [V, H], chunk by chunk: a tuple of tensors [N].

    Differentiable once in hidden, weight and bias. The gradient of ``weight`` is summed in fp32.
    """
    rows = max(1, workspace_bytes // (4 * _COPIES * len(weight)))
    return _InChunks.apply(hidden.to(weight.dtype), weight, bias, function, rows)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, function: LogitFunction, rows: int):
        parts = []
        for start in range(0, max(1, len(hidden)), rows):
            parts.append(function(_logits(hidden[start : start + rows], weight, bias), start))
        results = tuple(torch.cat(values) for values in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.function, ctx.rows = function, rows
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None):
        hidden, weight, bias = ctx.saved_tensors
        with torch.autocast(weight.device.type, enabled=False):
            return *_InChunks._gradients(ctx, hidden, weight, bias, upstream), None, None

    @staticmethod
    def _gradients(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: tuple[Tensor | None, ...]):
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden) if need_hidden else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        d_bias = torch.zeros(len(weight), device=weight.device, dtype=wide) if need_bias else None
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            with torch.enable_grad():
                logits = _logits(hidden[chunk], weight, bias).requires_grad_()
                results = ctx.function(logits, start)
            used = [(x, g[chunk]) for x, g in zip(results, upstream, strict=True) if g is not None and x.requires_grad]
            if not used:
                continue
            d_logits = torch.autograd.grad([x for x, _ in used], logits, [g for _, g in used])[0]
            narrow = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[chunk] = narrow @ weight
            if d_weight is not None:
                d_weight += narrow.T @ hidden[chunk]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False), torch.no_grad():
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
