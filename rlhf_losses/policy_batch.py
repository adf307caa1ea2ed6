"""What a policy loss needs beside the statistics: as the caller has it, and as vectors [N] to take rows of."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_losses import validation
from rlhf_losses.aggregation import Sequences, token_weights
from rlhf_losses.kernels.gemm import accumulator_dtype
from rlhf_losses.policy_losses import LOG_RATIO_BOUND, POLICY_LOSSES

if TYPE_CHECKING:
    from rlhf_losses.policy import PolicyLossConfig

ROLLOUT_CORRECTIONS = tuple(
    f"{level}-{how}" for level in ("token", "sequence", "geometric") for how in ("truncate", "mask")
)


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy loss needs beside the statistics; tensors are shaped like them.

    Padded [B, T]: a row is a sequence. Packed [N]: ``cu_seqlens`` [B + 1], int, tells where sequences begin; without it
    all is one. Nested (jagged): as they are.

    advantages         of each token
    mask               tokens that count: bool or 0/1, where all that is not 0 is 1; all if None. What the others hold
                       does not matter
    old_log_probs      of the policy that is improved on; None on the policy itself, where the ratio is 1
    ref_log_probs      of the reference policy, for kl_coefficient
    rollout_log_probs  as the sampler computed them, for rollout_correction
    rollout_weights    importance weights of the rollout that the caller has computed, one per token; they multiply each
                       token's value and have no gradient. In place of rollout_correction
    num_tokens, num_sequences, data_parallel_size: counts of the global batch, see aggregation.py
    """

    advantages: Tensor
    mask: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    rollout_weights: Tensor | None = None
    cu_seqlens: Tensor | None = None
    num_tokens: float | Tensor | None = None
    num_sequences: float | Tensor | None = None
    data_parallel_size: int = 1


def needed(name: str, values: Tensor | None, by: str) -> Tensor:
    if values is None:
        raise ValueError(f"{name}: expected a tensor, since {by} is set, got None")
    return values


def flat_values(name: str, values: Tensor | None, like_name: str, like: Tensor) -> Tensor | None:
    """``values``, shaped like ``like``, as a vector [N]."""
    if values is None:
        return None
    if like.is_nested != values.is_nested:
        raise ValueError(f"{name}: expected a {'nested' if like.is_nested else 'plain'} tensor like {like_name}")
    if like.is_nested:
        values, like = values.values(), like.values()
    if values.shape != like.shape:
        raise ValueError(f"{name}: expected {list(like.shape)}, the shape of {like_name}, got {list(values.shape)}")
    return values.reshape(-1)


def _sequences(name: str, like: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    if like.is_nested:
        offsets: Tensor = like.offsets()  # type: ignore[attr-defined]  # torch's stubs know plain tensors alone
        cu_seqlens, total = offsets, like.values().shape[0]
    elif like.dim() == 2 and cu_seqlens is None:
        rows, width = like.shape
        return Sequences(torch.arange(rows, device=like.device).repeat_interleave(width), rows)
    elif like.dim() == 1:
        total = like.shape[0]
        if cu_seqlens is None:
            return Sequences(torch.zeros(total, dtype=torch.int64, device=like.device), 1)
    else:
        raise ValueError(
            f"{name}: expected [B, T], nested, or [N] with cu_seqlens, got {list(like.shape)}"
            + ("" if cu_seqlens is None else " with cu_seqlens")
        )
    readable = not cu_seqlens.is_cuda and not torch.compiler.is_compiling()
    if readable and (cu_seqlens[0] != 0 or cu_seqlens[-1] != total):
        raise ValueError(
            f"cu_seqlens: expected offsets from 0 to {total}, the number of tokens, got {cu_seqlens.tolist()[:8]} ... "
            f"{int(cu_seqlens[-1])}"
        )
    places = torch.arange(total, device=like.device)
    index = torch.searchsorted(cu_seqlens[1:].to(places).contiguous(), places, right=True)
    return Sequences(index, len(cu_seqlens) - 1)


def _rollout_weights(
    old: Tensor, rollout: Tensor, mask: Tensor, sequences: Sequences, config: "PolicyLossConfig"
) -> tuple[Tensor, Tensor]:
    """The weights [N] of the policy that is improved on against the rollout's, and which tokens stay."""
    assert config.rollout_correction is not None
    level, how = config.rollout_correction.split("-")
    log_weight = old - rollout
    if level == "sequence":
        log_weight = sequences.spread(sequences.sum(log_weight))
    elif level == "geometric":
        log_weight = sequences.spread(sequences.mean(log_weight, mask))
    weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if how == "truncate":
        return weight.clamp(max=config.rollout_high), torch.ones_like(mask)
    return weight, (weight >= config.rollout_low) & (weight <= config.rollout_high)


@dataclass(frozen=True)
class FlatBatch:
    """``PolicyBatch`` as vectors [N], none with a gradient, 0 where ``mask`` is False.

    token_weights    of the aggregation, which has seen the whole batch: rows taken of this one keep theirs
    rollout_weights  and the tokens that they leave in, ``rollout_stays``; None where there are none, or where they need
                     old_log_probs that are the current policy's own
    """

    mask: Tensor
    sequences: Sequences
    token_weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    rollout_weights: Tensor | None
    rollout_stays: Tensor | None

    @classmethod
    def of(
        cls, name: str, like: Tensor, batch: PolicyBatch, config: "PolicyLossConfig", counts: Tensor | None = None
    ) -> "FlatBatch":
        """Of a batch shaped like ``like``, which errors call ``name``; ``counts`` [N] bool leaves out more tokens."""
        sequences = _sequences(name, like, batch.cu_seqlens)
        given_mask = flat_values("mask", batch.mask, name, like)
        if given_mask is not None:
            validation.require_real_mask(given_mask)
        mask = torch.ones_like(sequences.index, dtype=torch.bool) if given_mask is None else given_mask != 0
        if counts is not None:
            mask = mask & counts
        outside = ~mask

        def kept(field: str) -> Tensor | None:
            values = flat_values(field, getattr(batch, field), name, like)
            return None if values is None else kept_values(values.detach(), outside)

        advantages = kept("advantages")
        assert advantages is not None
        old, rollout, weights, stays = kept("old_log_probs"), kept("rollout_log_probs"), kept("rollout_weights"), None
        if weights is not None:
            stays = weights != 0
        if config.rollout_correction is not None:
            if weights is not None:
                raise ValueError(
                    "rollout_weights: expected None, since rollout_correction is set and computes them of "
                    "rollout_log_probs, got a tensor; leave one of the two out"
                )
            rollout = needed("rollout_log_probs", rollout, "rollout_correction")
            if old is not None:
                weights, stays = _rollout_weights(old, rollout, mask, sequences, config)
        return cls(
            mask=mask,
            sequences=sequences,
            token_weights=token_weights(
                mask,
                sequences,
                config.aggregation,
                num_tokens=batch.num_tokens,
                num_sequences=batch.num_sequences,
                data_parallel_size=batch.data_parallel_size,
                norm_length=config.norm_length,
            ),
            advantages=advantages,
            old_log_probs=old,
            ref_log_probs=kept("ref_log_probs"),
            rollout_log_probs=rollout,
            rollout_weights=weights,
            rollout_stays=stays,
        )

    def rows(self, rows: slice | Tensor) -> "FlatBatch":
        parts = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts, sequences=replace(self.sequences, index=self.sequences.index[rows]))

    def mixes_tokens(self, config: "PolicyLossConfig") -> bool:
        """Whether the loss of a token depends on others' log-probabilities."""
        whole_sequences = config.rollout_correction is not None and not config.rollout_correction.startswith("token")
        return POLICY_LOSSES[config.loss].mixes_tokens or (whole_sequences and self.rollout_weights is None)

    def rollout(self, old: Tensor, config: "PolicyLossConfig") -> tuple[Tensor, Tensor] | None:
        """The rollout's weights and the tokens that they leave in, None where there is no correction."""
        if self.rollout_weights is not None and self.rollout_stays is not None:
            return self.rollout_weights, self.rollout_stays
        if config.rollout_correction is None or self.rollout_log_probs is None:
            return None
        return _rollout_weights(old, self.rollout_log_probs, self.mask, self.sequences, config)


def kept_values(values: Tensor, outside: Tensor) -> Tensor:
    """[N] in the accumulator's dtype, 0 where ``outside`` [N] bool says so, whatever lies there."""
    return values.to(accumulator_dtype(values.dtype)).masked_fill(outside, 0.0)
