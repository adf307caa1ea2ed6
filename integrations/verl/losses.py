"""Our policy losses that verl has none like, under ``actor.policy_loss.loss_mode``.

verl keeps its losses in a table, and asks it at every micro-batch. Ours are added under their names in
``POLICY_LOSSES``; what verl has, by that name or another, stays verl's.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from rlhf_losses import PolicyBatch, PolicyLossConfig, TokenStats, policy_loss
from rlhf_losses.policy_losses import POLICY_LOSSES

# verl's names for ours, where they differ by more than hyphens.
_ALIASES = {"ppo": "vanilla", "reinforce": "gpg", "gmpo": "geo_mean"}
_METRICS = {"clip_fraction": "pg_clipfrac", "dual_clip_fraction": "pg_clipfrac_lower", "approx_kl": "ppo_kl"}
# verl reports the loss itself, and takes means over micro-batches, which say nothing of extremes.
_LEFT_OUT = ("policy_loss", "ratio_min", "ratio_max")


@functools.cache
def install() -> None:
    """Add them, once; to a verl without such a table, nothing."""
    from verl.trainer.ppo import core_algos

    register = getattr(core_algos, "register_policy_loss", None)
    known = getattr(core_algos, "POLICY_LOSS_REGISTRY", None)
    if register is None or known is None:
        return
    for name in POLICY_LOSSES:
        if not known.keys() & {name, _ALIASES.get(name, name.replace("-", "_"))}:
            register(name)(functools.partial(policy_loss_of_verl, name))


def policy_loss_of_verl(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss ``name`` as verl's ``ppo_loss`` calls its own: the scalar, and metrics.

    Tensors are [sequences, response], padded; ``rollout_is_weights`` multiplies each token's value. ``config`` is the
    actor's: its ``global_batch_info`` has the counts by which is aggregated, as verl's own losses aggregate.
    """
    counts = config.global_batch_info
    batch = PolicyBatch(
        advantages=advantages,
        mask=response_mask,
        old_log_probs=old_log_prob,
        rollout_weights=rollout_is_weights,
        num_tokens=counts.get("batch_num_tokens"),
        num_sequences=counts.get("global_batch_size"),
        data_parallel_size=counts.get("dp_size") or 1,
    )
    # Without a constant verl divides by the width of what it is given.
    norm_length = counts.get("loss_scale_factor") or log_prob.shape[1]
    settings = _settings(config, loss=name, aggregation=loss_agg_mode, norm_length=norm_length)
    loss, metrics = policy_loss(TokenStats(log_probs=log_prob), batch, settings)
    found = {_METRICS.get(key, key): value for key, value in metrics.items() if key not in _LEFT_OUT}
    # One wait for the device, for all of them.
    numbers = torch.stack([value.float() for value in found.values()]).tolist()
    return loss, {f"actor/{key}": number for key, number in zip(found, numbers, strict=True)}


def _settings(actor: Any, **of_the_call: Any) -> PolicyLossConfig:
    """The numbers of verl's config under our names, and over them what ``policy_loss.settings`` says (config.py)."""
    given = actor.policy_loss
    numbers = {
        "clip_low": actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        "clip_high": actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        "dual_clip": actor.clip_ratio_c,
        "tau_positive": actor.tau_pos,
        "tau_negative": actor.tau_neg,
        "dro_beta": given.get("dro_beta") or 0.0,
    }
    return PolicyLossConfig(**of_the_call | numbers | dict(given.get("settings") or {}))
