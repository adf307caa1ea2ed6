"""How per-token losses become one number: every mode is a weight per token, so that loss = sum weight * value.

With M the tokens that count (of the global batch), S its sequences, T_s the tokens of sequence s that count and D the
data-parallel size, whose ranks' gradients a trainer averages:

    token-mean               D / M
    token-sum                D
    seq-mean-token-sum       D / S
    seq-mean-token-mean      D / (S T_s)
    seq-mean-token-sum-norm  D / (S L), L a constant length (Dr. GRPO, arXiv:2503.20783)

M and S are the caller's to give: a micro-batch that divides by its own counts weighs its tokens more than others', and
the gradient depends on the split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class Sequences:
    """Which sequence each of N tokens is of: ``index`` [N] int64, ``count`` sequences."""

    index: Tensor
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [count]."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[N] -> [count], over the tokens that ``mask`` keeps; 0 for a sequence without any."""
        kept = torch.where(mask, values, 0.0)
        return self.sum(kept) / self.sum(mask.to(values.dtype)).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[count] -> [N]."""
        return values[self.index]


def token_weights(
    mask: Tensor,
    sequences: Sequences,
    mode: str,
    *,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    data_parallel_size: int = 1,
    norm_length: float | None = None,
) -> Tensor:
    """The weight [N] of each token in the loss, fp32, 0 where ``mask`` [N] is; formulas at the head of this file.

    Without ``num_tokens`` or ``num_sequences`` those of this call count: all right for a batch that is one micro-batch
    on one rank. Sequences without a token that counts are none, then. Nothing to count gives weights of 0.

    Raises ValueError for an unknown mode, for a count that is needed and missing with more than one rank, and for
    "seq-mean-token-sum-norm" without ``norm_length``.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation: expected one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    kept = mask.float()
    if mode == "token-sum":
        return kept * data_parallel_size
    by_token = mode == "token-mean"
    total = num_tokens if by_token else num_sequences
    if total is None:
        if data_parallel_size > 1:
            raise ValueError(
                f"{mode} with data_parallel_size={data_parallel_size}: expected "
                f"{'num_tokens' if by_token else 'num_sequences'} of the global batch, got None; sum it over the ranks"
            )
        total = kept.sum() if by_token else (sequences.sum(kept) > 0).sum()
        total = total.clamp(min=1)
    weights = kept * data_parallel_size / total
    if mode == "seq-mean-token-mean":
        weights = weights / sequences.spread(sequences.sum(kept).clamp(min=1))
    if mode == "seq-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(
                f"{mode}: expected norm_length > 0, a constant such as the longest response, got {norm_length}"
            )
        weights = weights / norm_length
    return weights
