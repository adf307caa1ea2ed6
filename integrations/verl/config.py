"""Settings of our policy losses that verl's config has no place for.

    actor_rollout_ref.actor.policy_loss.loss_mode=vespo
    actor_rollout_ref.actor.policy_loss._target_=rlhf_losses.integrations.verl.config.PolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.settings.vespo_k_negative=2.5

verl makes the class that ``_target_`` names, in the driver and in every worker.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import PolicyLossConfig as TheirConfig

from rlhf_losses import PolicyLossConfig as OurConfig

# Which the run's config says elsewhere, and verl does itself.
_VERLS = ("loss", "aggregation", "norm_length", "entropy_coefficient")
SETTINGS = tuple(
    x.name for x in fields(OurConfig) if x.name not in _VERLS and not x.name.startswith(("kl_", "rollout_"))
)


@dataclass
class PolicyLossConfig(TheirConfig):
    """verl's, and ``settings``: fields of ``rlhf_losses.PolicyLossConfig``, over what verl's config says of them.

    Raises ValueError for a field that is not there, or that verl has a key of its own for: ``SETTINGS`` are left.
    """

    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.settings) - set(SETTINGS))
        if unknown:
            raise ValueError(f"policy_loss.settings: expected keys out of {', '.join(SETTINGS)}, got {unknown}")
