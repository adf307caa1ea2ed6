"""Log-probabilities and entropy of a language model's head, with gradients, without ever holding the logits.

    from rlhf_losses import linear_log_probs

    stats = linear_log_probs(hidden_states, lm_head.weight, labels, temperature=0.7)
    stats.log_probs, stats.entropy      # fp32, shaped like labels, both differentiable

Importing this package needs no GPU, starts no CUDA and imports no Triton.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a source checkout the folders kernels/, integrations/ and configs/ lie beside this one; an installed wheel holds
# them inside. (A top-level ``kernels`` package would shadow the one transformers imports: docs/decisions.md.)
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels" / "transform.py").is_file():
    __path__.append(str(_checkout))

from rlhf_losses.cross_entropy import (  # noqa: E402
    CrossEntropyLoss,
    CrossEntropyOutput,
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
)
from rlhf_losses.functions import backend_for, linear_log_probs, log_probs_from_logits  # noqa: E402
from rlhf_losses.kernels.backends import BackendChoice  # noqa: E402
from rlhf_losses.kernels.statistics import TokenStats  # noqa: E402
from rlhf_losses.kernels.transform import LogitTransform  # noqa: E402
from rlhf_losses.linear_policy import linear_policy_loss  # noqa: E402
from rlhf_losses.policy import LossOutput, PolicyLossConfig, policy_loss  # noqa: E402
from rlhf_losses.policy_batch import PolicyBatch  # noqa: E402
from rlhf_losses.validation import check  # noqa: E402

__all__ = [
    "BackendChoice",
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "LinearCrossEntropyLoss",
    "LogitTransform",
    "LossOutput",
    "PolicyBatch",
    "PolicyLossConfig",
    "TokenStats",
    "backend_for",
    "check",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_policy_loss",
    "log_probs_from_logits",
    "policy_loss",
]
