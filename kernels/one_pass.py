"""A scalar loss of a head's statistics and its gradients, without a second look at the logits.

A chunk of tokens at a time: statistics and exponentials of all logits; the loss of these tokens and its gradient in
torch; da over the exponentials (triton_kept.py); d_hidden = da @ weight; d_weight += da^T @ hidden. The loss must be a
sum of terms that know one token each, so that a chunk needs no other. Its upstream gradient, a scalar, is not known
yet: the results wait for the backward, which multiplies them by it.

FLOPs 6*N*H*V, where a forward and a backward take 8*N*H*V. Memory: one chunk's block and the results, whatever N is.
Bytes: the block written once, rewritten once and read twice; d_weight in fp32 read and written once a chunk,
if there are several.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlhf_losses.kernels.autograd import first_order
from rlhf_losses.kernels.backends import operations
from rlhf_losses.kernels.call import Call, unpack, with_gradient, without_autocast
from rlhf_losses.kernels.gemm import (
    accumulator_dtype,
    added_product,
    all_finite,
    finite_for_product,
    is_narrow,
    narrow_product,
    narrowed,
    wide_product,
)
from rlhf_losses.kernels.host_read import HostRead, undivided
from rlhf_losses.kernels.statistics import CallStats, Coefficients, RowStatistics, of_rows

# Chunks are whole blocks of rows of every kernel, and slices of vectors start where kernels like them to.
_ROW_BLOCK = 128

Objective = Callable[[CallStats, slice | Tensor], Tensor]
Unit = Callable[[], Tensor]


def _chunk_rows(call: Call, weight: Tensor, keeps_weight_gradient: bool) -> int:
    """Rows of a chunk: equal chunks, as few as the workspace allows.

    Several chunks add up their d_weight in the accumulator's dtype; what that takes more goes off the block, so that
    more tokens than one chunk holds take no more memory.
    """
    total = len(call.labels)
    # The chunked back end needs room for its intermediate results beside the block.
    block = call.workspace_bytes if call.backend == "triton" else call.workspace_bytes // 2
    row = operations(call.backend).kept_row_bytes(weight)
    if total * row > block and keeps_weight_gradient:
        block -= weight.numel() * (accumulator_dtype(weight.dtype).itemsize - weight.element_size())
    most = max(1, block // row // _ROW_BLOCK) * _ROW_BLOCK
    chunks = -(-total // most)
    return -(-total // (chunks * _ROW_BLOCK)) * _ROW_BLOCK


def _in_front(some: Tensor, count: int) -> Tensor:
    """[count] int64: the rows that ``some`` [N] marks, in an order in which they can be moved to the front in place.

    A row among the first ``count`` stays where it is; in place of one that is not marked comes one from behind.
    """
    stays = some[:count]
    marked = some.nonzero().squeeze(1)
    holes = (~stays).cumsum(0)
    behind = marked[(count - holes[-1] + holes - 1).clamp(0, count - 1)]
    return torch.where(stays, torch.arange(count, device=some.device), behind)


def _value_and_upstream(
    objective: Objective, statistics: RowStatistics, rows: slice | Tensor, wanted: frozenset[str], unit: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of some tokens, and its gradients by all of ``CallStats`` but argmax, over ``unit``."""
    # This graph is gone before the call returns. The caller's hooks (checkpoint's run the forward again) are for hers.
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        given = [getattr(statistics, name) if name in wanted else None for name in CallStats._fields]
        leaves = [None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in given]
        value = objective(CallStats(*leaves), rows)
        asked = [leaf for leaf in leaves[:-1] if leaf is not None]
        scaled = value if unit is None else value / unit
        found = torch.autograd.grad(scaled, asked, allow_unused=True) if value.requires_grad else [None] * len(asked)
    # Contiguous: the gradient of a sum is one number with stride 0, and kernels step by one element.
    upstream = (None if gradient is None else gradient.contiguous() for gradient in found)
    return value.detach(), [None if leaf is None else next(upstream) for leaf in leaves[:-1]]


class _Gradients:
    """d_hidden [M, H], d_weight [V, H] and d_bias [V] as they come, chunk by chunk; None where not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool], chunks: int) -> None:
        wide = accumulator_dtype(hidden.dtype)
        # The gradient of a mean over many tokens would be 0 in fp16: it stays wide until the backward's scale is known.
        self._narrow = hidden.dtype != torch.float16
        self._one = chunks == 1 and self._narrow
        self._needs = needs
        self._weight = weight
        self._finite = all_finite(weight) if needs[0] else None
        self.d_hidden = (
            hidden.new_zeros(hidden.shape, dtype=hidden.dtype if self._narrow else wide) if needs[0] else None
        )
        self.d_weight: Tensor | None = None
        self.d_bias = weight.new_zeros(len(weight), dtype=wide) if needs[2] else None

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """All three, to be scaled and rounded to their parameters' dtypes."""
        if self._needs[1] and self.d_weight is None:
            self.d_weight = torch.zeros_like(self._weight)
        return self.d_hidden, self.d_weight, self.d_bias

    def add(self, da: Tensor, hidden: Tensor, rows: slice | Tensor) -> None:
        """The part of tokens ``rows`` of all, with hidden states [A, H] and da [A, V]."""
        if self.d_bias is not None:
            self.d_bias += da.sum(0, dtype=self.d_bias.dtype)
        if self.d_hidden is not None:
            assert self._finite is not None
            weight = finite_for_product(self._weight, self._finite)
            if self._narrow and is_narrow(weight):
                self.d_hidden[rows] = narrow_product(da, weight, weight.dtype)
            elif self._narrow and isinstance(rows, slice):
                torch.mm(da, weight, out=self.d_hidden[rows])
            else:
                self.d_hidden[rows] = da @ weight if self._narrow else wide_product(da, weight)
        if self._needs[1]:
            self.d_weight = da.T @ hidden if self._one else added_product(self.d_weight, da.T, hidden)


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    chunk: slice,
    objective: Objective,
    unit: Tensor | None,
    gradients: _Gradients,
) -> tuple[Tensor, RowStatistics]:
    """The loss and the statistics of a chunk of the call's tokens; its gradients go to ``gradients``."""
    back_end = operations(call.backend)
    rows = chunk if call.rows is None else call.rows[chunk]
    part, labels, transform = hidden[rows], call.labels[chunk], call.transform.for_rows(chunk).with_bias(bias)
    found, kept = back_end.linear_forward(
        part,
        weight,
        labels,
        transform,
        call.wanted,
        call.omega,
        call.ignore_index,
        call.workspace_bytes // 2,
        len(labels),
    )
    value, upstream = _value_and_upstream(objective, found, rows, call.wanted, unit)
    some = with_gradient(labels, call.ignore_index, upstream)
    number = HostRead(some.sum())
    statistics, coefficients = found, Coefficients.from_upstream(found, *upstream, call.omega)
    count, source = number.wait(), None
    if count == 0:
        return value, found
    if count < len(labels):
        source = _in_front(some, count)
        part, labels, transform = part[source], labels[source], transform.for_rows(source)
        statistics, coefficients = of_rows(statistics, source), coefficients.for_rows(source)
        rows = source + chunk.start if call.rows is None else rows[source]
    da = back_end.kept_gradient(
        kept, source, labels, transform, statistics, coefficients, len(weight), hidden.dtype, call.workspace_bytes // 2
    )
    gradients.add(da, part, rows)
    return value, found


class OnePass(torch.autograd.Function):
    """hidden [M, H], weight [V, H], bias [V] or None -> the loss; ``RowStatistics`` [M], field by field, no gradient.

    ``objective(stats, rows)`` is the loss of the tokens ``rows`` of the M, whose statistics are given; differentiable
    torch. The loss is the sum over all tokens that ``call`` counts, in any cut. ``unit()``, a number on the device, is
    as large as the loss's gradients are; fp16, which has few small numbers, computes in it, and nobody else asks.
    """

    @staticmethod
    @undivided
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, objective: Objective, unit: Unit
    ) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        size = _chunk_rows(call, weight, needs[1])
        total = len(call.labels)
        chunks = [slice(start, min(start + size, total)) for start in range(0, total, size)]
        with without_autocast(hidden):
            ctx.unit = unit() if hidden.dtype == torch.float16 else None
            gradients = _Gradients(hidden, weight, needs, len(chunks))
            parts = [_chunk(hidden, weight, bias, call, chunk, objective, ctx.unit, gradients) for chunk in chunks]
        loss, joined = parts[0]
        if len(parts) > 1:
            loss = torch.stack([value for value, _ in parts]).sum()
            fields = zip(*(found for _, found in parts), strict=True)
            joined = RowStatistics(*(None if of[0] is None else torch.cat(of) for of in fields))
        fields = tuple(None if x is None else unpack(x, call.rows, len(hidden)) for x in joined)
        ctx.mark_non_differentiable(*(x for x in fields if x is not None))
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients.results()
        ctx.backend = call.backend
        ctx.dtype, ctx.bias_dtype = hidden.dtype, None if bias is None else bias.dtype
        return loss, *fields

    @staticmethod
    @first_order
    def backward(ctx, d_loss: Tensor | None, *unused: Tensor | None):
        if ctx.gradients is None:
            raise RuntimeError(
                "expected one backward, got a second; the gradients are computed with the loss, in one pass, and the "
                "first backward has given them away. Compute the loss again, or take a loss whose graph can be kept: "
                "linear_log_probs and policy_loss, linear_cross_entropy with reduction='none', or backend='reference', "
                "which holds all logits; of a fused model, unfuse_head, or fuse_head(model, backend='reference')"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if d_loss is None:
            return (None,) * 6
        scale = d_loss if ctx.unit is None else d_loss * ctx.unit
        scale_to = operations(ctx.backend).scale_to

        def scaled(x: Tensor | None) -> Tensor | None:
            return None if x is None else narrowed(x, ctx.dtype, lambda out, part: scale_to(out, part, scale))

        d_hidden, d_weight, d_bias = gradients
        return (
            scaled(d_hidden),
            scaled(d_weight),
            None if d_bias is None else (d_bias * scale).to(ctx.bias_dtype),
            None,
            None,
            None,
        )
