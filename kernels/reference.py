"""The oracle: full logits, plain torch, gradients by autograd, any dtype. Holds [N, V] several times over."""

import torch
from torch import Tensor

from rlhf_losses.kernels.gemm import accumulator_dtype, finite_for_product
from rlhf_losses.kernels.statistics import TokenStats
from rlhf_losses.kernels.transform import LogitTransform


class _Product(torch.autograd.Function):
    """hidden [N, H] @ weight.T [H, V], whose backward takes 0 * inf for the 0 it stands for."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, d_logits: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return d_logits @ finite_for_product(weight), d_logits.T @ hidden


def linear_statistics(hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform) -> TokenStats:
    """hidden [N, H], weight [V, H], labels [N] (-1: none) -> every statistic, [N]."""
    wide = accumulator_dtype(hidden.dtype)
    return logits_statistics(_Product.apply(hidden.to(wide), weight.to(wide)), labels, transform)


def logits_statistics(logits: Tensor, labels: Tensor, transform: LogitTransform) -> TokenStats:
    """logits [N, V] before the transform, labels [N] (-1: none) -> every statistic, [N]."""
    z, _ = transform.apply(logits.to(accumulator_dtype(logits.dtype)))
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    return TokenStats(
        log_probs=log_p.gather(-1, labels.clamp(min=0)[:, None].long()).squeeze(-1),
        # Where p = 0 the product p * log p is 0, and so is its gradient; 0 * -inf would be NaN.
        entropy=-(p * log_p.masked_fill(p == 0, 0.0)).sum(-1),
        logsumexp=z.logsumexp(-1),
        sum_p_squared=p.square().sum(-1),
        argmax=z.argmax(-1),
    )
