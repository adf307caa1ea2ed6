"""The oracle: full logits, plain torch, gradients by autograd, any dtype. Holds [N, V] several times over."""

import torch
from torch import Tensor

from rlhf_losses.kernels.gemm import accumulator_dtype, all_finite, finite_for_product
from rlhf_losses.kernels.statistics import CallStats, has_column
from rlhf_losses.kernels.transform import LogitTransform


class _Product(torch.autograd.Function):
    """hidden [N, H] @ weight.T [H, V], whose backward takes 0 * inf for the 0 it stands for."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden @ weight.T

    @staticmethod
    def backward(ctx, d_logits: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            return d_logits @ finite_for_product(weight, all_finite(weight)), d_logits.T @ hidden


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    ignore_index: int,
    omega: Tensor | None,
) -> CallStats:
    """hidden [N, H], weight [V, H], labels [N] -> every statistic, [N]; the weighted one where there is omega [V]."""
    wide = accumulator_dtype(hidden.dtype)
    return logits_statistics(_Product.apply(hidden.to(wide), weight.to(wide)), labels, transform, ignore_index, omega)


def logits_statistics(
    logits: Tensor, labels: Tensor, transform: LogitTransform, ignore_index: int, omega: Tensor | None
) -> CallStats:
    """logits [N, V] before the transform, labels [N] -> every statistic, [N]; 0 where ignored, NaN where bad."""
    z, _ = transform.apply(logits.to(accumulator_dtype(logits.dtype)))
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    ignored = labels == ignore_index
    in_range = has_column(labels, logits.shape[-1])
    # A factor, not a fill: the gradient of a token whose label no column has must be NaN as well.
    factor = torch.where(ignored | in_range, 1.0, float("nan")).to(z.dtype)

    def select(values: Tensor) -> Tensor:
        return torch.where(ignored, 0.0, values * factor)

    weighted = None
    if omega is not None:
        # A token that is switched off and weighs nothing adds 0; 0 * -inf would be NaN.
        weighted = select((log_p.masked_fill(omega == 0, 0.0) * omega).sum(-1))
    return CallStats(
        log_probs=select(log_p.gather(-1, labels.where(in_range, 0)[:, None].long()).squeeze(-1)),
        # Where p = 0 the product p * log p is 0, and so is its gradient; 0 * -inf would be NaN.
        entropy=select(-(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)),
        logsumexp=select(z.logsumexp(-1)),
        sum_p_squared=select(p.square().sum(-1)),
        weighted_log_probs=weighted,
        argmax=z.argmax(-1).where(in_range, -1).where(~ignored, 0),
    )
