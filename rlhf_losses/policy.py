"""From token statistics to a policy loss: mask, loss, rollout weights, entropy bonus, KL penalty, aggregation, metrics.

    stats = linear_log_probs(hidden_states, weight, labels, mask=mask, temperature=temperature)
    batch = PolicyBatch(advantages=advantages, old_log_probs=old_log_probs, mask=mask)
    loss, metrics = policy_loss(stats, batch, PolicyLossConfig.preset("dapo", entropy_coefficient=0.001))
    loss.backward()

Plain torch on [N] vectors, on any device, without waiting for it (clip-cov and kl-cov apart).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_losses.aggregation import AGGREGATIONS
from rlhf_losses.kernels.statistics import CallStats, TokenStats
from rlhf_losses.policy_batch import ROLLOUT_CORRECTIONS, FlatBatch, PolicyBatch, flat_values, kept_values, needed
from rlhf_losses.policy_losses import LOG_RATIO_BOUND, POLICY_LOSSES, Metrics, Tokens

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": None},
    "grpo": {"aggregation": "seq-mean-token-mean", "dual_clip": None, "kl_coefficient": 0.04, "kl_estimator": "k3"},
    "dapo": {"aggregation": "token-mean", "clip_high": 0.28, "dual_clip": None},
    "dr-grpo": {"aggregation": "seq-mean-token-sum-norm", "dual_clip": None},
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss": "sapo", "aggregation": "seq-mean-token-mean"},
    "gmpo": {"loss": "gmpo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4, "clip_high": 0.4},
    "gpg": {"loss": "reinforce"},
    "luspo": {"loss": "gspo", "aggregation": "seq-mean-token-sum", "clip_low": 2e-3, "clip_high": 2.5e-3},
    "rloo": {"loss": "rloo", "aggregation": "seq-mean-token-mean"},
    "vespo": {"loss": "vespo"},
}


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which loss, and its numbers; every field has the meaning of the paper that the loss names.

    loss                a key of ``POLICY_LOSSES``; gmpo and rloo, of whole sequences, want seq-mean-token-mean, and
                        clip-cov draws by torch's generator
    aggregation         one of ``AGGREGATIONS`` (aggregation.py has the formulas); norm_length for the last of them
    clip_low, clip_high distance of the ratio's bounds from 1 (of the divergence, for dppo-*; of the log-ratio, gmpo)
    dual_clip           bound of the ratio for negative advantages, None for none
    ratio_bound         of dppo-*: the largest ratio that weighs a token
    tau_*               temperatures of sapo, by the sign of the advantage
    vespo_*             exponents k and decays lambda of vespo, by the sign of the advantage
    cov_*               clip-cov's and kl-cov's share of tokens, bounds, and coefficient
    entropy_coefficient bonus: minus this times the entropy; at 0 the entropy gets no gradient
    kl_coefficient      penalty against ``batch.ref_log_probs`` by ``kl_estimator`` (Schulman 2020): k1 = l - l_ref,
                        abs its absolute value, k2 half its square, k3 = exp(-k1) + k1 - 1; a "+" takes the value of one
                        with the gradient of k2, which is the KL's
    rollout_correction  weight exp(l_old - l_rollout) of ``batch.rollout_log_probs``, per token, of the sequence's
                        product or of its geometric mean; "truncate" bounds it by rollout_high, "mask" drops what lies
                        outside of [rollout_low, rollout_high]. None for none

    Raises ValueError for unknown names and numbers out of range.
    """

    loss: str = "ppo"
    aggregation: str = "token-mean"
    norm_length: float | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    ratio_bound: float = 20.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    vespo_k_positive: float = 2.0
    vespo_k_negative: float = 3.0
    vespo_lambda_positive: float = 3.0
    vespo_lambda_negative: float = 2.0
    cov_fraction: float = 0.0002
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    cov_kl_coefficient: float = 1.0
    dro_beta: float = 0.0
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    rollout_correction: str | None = None
    rollout_low: float = 0.0
    rollout_high: float = 2.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("loss", self.loss, tuple(POLICY_LOSSES)),
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("kl_estimator", self.kl_estimator, KL_ESTIMATORS),
            ("rollout_correction", self.rollout_correction, (None, *ROLLOUT_CORRECTIONS)),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip: expected a ratio > 1 or None, got {self.dual_clip}")
        if not (0 < self.cov_fraction <= 1 and self.clip_low >= 0 and self.clip_high >= 0):
            raise ValueError(
                f"expected 0 < cov_fraction <= 1, clip_low >= 0 and clip_high >= 0, got {self.cov_fraction}, "
                f"{self.clip_low}, {self.clip_high}"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "PolicyLossConfig":
        """The settings of a paper, with some of them changed; ``PRESETS`` lists them."""
        if name not in PRESETS:
            raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
        return replace(cls(**PRESETS[name]), **changes)


class LossOutput(NamedTuple):
    """``loss`` is a scalar with gradient; ``metrics`` are scalar tensors without, means over the tokens that count."""

    loss: Tensor
    metrics: Metrics


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || ref); the estimators are listed at ``PolicyLossConfig``.

    Source: http://joschu.net/blog/kl-approx.html.
    """
    difference = log_probs - ref_log_probs
    base = estimator.removesuffix("+")
    if base == "k1":
        value = difference
    elif base == "abs":
        value = difference.abs()
    elif base == "k2":
        value = 0.5 * difference.square()
    else:
        bounded = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        value = (bounded.exp() - bounded - 1).clamp(-10, 10)
    if estimator == base:
        return value
    k2 = 0.5 * difference.square()
    return k2 - k2.detach() + value.detach()


def require_kinds(batch: object, config: object) -> None:
    for name, value, kind in (("batch", batch, PolicyBatch), ("config", config, PolicyLossConfig)):
        if not isinstance(value, kind):
            way_out = f"; PolicyLossConfig.preset({value!r}) makes one" if isinstance(value, str) else ""
            raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}{way_out}")


def policy_loss(token_stats: TokenStats, batch: PolicyBatch, config: PolicyLossConfig) -> LossOutput:
    """The loss of ``config`` on a (micro-)batch, and the metrics to watch.

    token_stats.entropy is needed for entropy_coefficient, and reported where it is there.

    Raises ValueError for shapes that do not fit, for a tensor that the config needs and the batch lacks, and for
    rollout_weights beside a rollout_correction.
    """
    require_kinds(batch, config)
    log_probs = token_stats.log_probs
    if log_probs is None:
        raise ValueError("token_stats: expected log_probs, got None; ask linear_log_probs for them")
    flat = FlatBatch.of("log_probs", log_probs, batch, config)
    l, entropy = (
        flat_values(name, getattr(token_stats, name), "log_probs", log_probs) for name in ("log_probs", "entropy")
    )
    return loss_of_rows(TokenStats(log_probs=l, entropy=entropy), flat, config)


def loss_of_rows(
    stats: TokenStats | CallStats, batch: FlatBatch, config: PolicyLossConfig, all_metrics: bool = True
) -> LossOutput:
    """``policy_loss`` of vectors [N]. Over the parts of a batch the losses add up, unless its loss mixes tokens.

    Without ``all_metrics`` those are left out that the loss does not have in passing: each is some launches.
    """
    mask, weights = batch.mask, batch.token_weights
    assert stats.log_probs is not None
    outside = ~mask
    l = kept_values(stats.log_probs, outside)
    entropy = None if stats.entropy is None else kept_values(stats.entropy, outside)
    old = l.detach() if batch.old_log_probs is None else batch.old_log_probs
    tokens = Tokens(l, old, batch.advantages, mask, outside, batch.sequences)

    def aggregate(per_token: Tensor) -> Tensor:
        return (per_token * weights).masked_fill(outside, 0.0).sum()

    values, metrics = POLICY_LOSSES[config.loss].function(tokens, config)
    rollout = batch.rollout(old, config)
    if rollout is not None:
        weight, stays = rollout
        values = torch.where(stays, values * weight, 0.0)
        metrics["rollout_weight"] = tokens.mean(weight)
        if config.rollout_correction is not None:
            metrics["rollout_dropped"] = tokens.mean(~stays)
    loss = aggregate(values)
    # A copy: callers scale the loss in place (loss /= steps).
    metrics["policy_loss"] = loss.detach().clone()
    if config.entropy_coefficient != 0:
        loss = loss - config.entropy_coefficient * aggregate(needed("entropy", entropy, "entropy_coefficient"))
    if config.kl_coefficient != 0:
        kl = kl_penalty(l, needed("ref_log_probs", batch.ref_log_probs, "kl_coefficient"), config.kl_estimator)
        loss = loss + config.kl_coefficient * aggregate(kl)
        metrics["kl"] = tokens.mean(kl)
    if not all_metrics:
        return LossOutput(loss, metrics)
    if entropy is not None:
        metrics["entropy"] = tokens.mean(entropy)
    ratio = tokens.ratio.detach()
    least = ratio.masked_fill(outside, torch.inf).amin() if len(ratio) else ratio.sum()
    metrics |= {
        "approx_kl": tokens.mean(-tokens.log_ratio),
        "ratio_mean": tokens.mean(ratio),
        "ratio_min": least.masked_fill(outside.all(), 0.0),
        "ratio_max": ratio.masked_fill(outside, 0.0).amax() if len(ratio) else ratio.sum(),
    }
    return LossOutput(loss, metrics)
