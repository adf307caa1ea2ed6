"""The policy-gradient losses, one function each: per-token values [N] from log-probabilities and advantages.

Notation: l = log pi(y), l_old that of the policy that is improved on, r = exp(l - l_old), A the advantage, sg stops the
gradient. A function gets ``Tokens``, whose masked entries are harmless zeros, and the config; it returns the values to
be aggregated and its metrics. Exponents are clamped in log space to 20, where a ratio is 5e8.

A new loss is one function here and a row in tests/test_policy.py or tests/test_policy_trl.py. One whose value at a
token depends on other tokens says ``mixes_tokens=True``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlhf_losses.aggregation import Sequences

if TYPE_CHECKING:
    from rlhf_losses.policy import PolicyLossConfig

LOG_RATIO_BOUND = 20.0
Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Tokens:
    """[N] each; where ``mask`` is False, log_probs, old_log_probs and advantages are 0 and have no gradient.

    ``outside`` is what ``mask`` is not, for masked_fill: torch.where with a number makes a tensor of it first, a launch
    more, and once more in the backward.
    Every loss or its metrics use log_ratio and ratio. (torch.compile can't look into a cached_property's lock.)
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    outside: Tensor
    sequences: Sequences
    log_ratio: Tensor = field(init=False)
    ratio: Tensor = field(init=False)
    count: Tensor = field(init=False)

    def __post_init__(self) -> None:
        log_ratio = self.log_probs - self.old_log_probs
        object.__setattr__(self, "log_ratio", log_ratio)
        object.__setattr__(self, "ratio", log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp())
        object.__setattr__(self, "count", self.mask.sum().clamp(min=1))

    def mean(self, values: Tensor) -> Tensor:
        """Over the tokens that count, without gradient; 0 where none does."""
        return values.detach().float().masked_fill(self.outside, 0.0).sum() / self.count


class PolicyLoss(NamedTuple):
    function: Callable[[Tokens, "PolicyLossConfig"], tuple[Tensor, Metrics]]
    mixes_tokens: bool


POLICY_LOSSES: dict[str, PolicyLoss] = {}


def _loss(name: str, mixes_tokens: bool = False) -> Callable:
    def register(function: Callable) -> Callable:
        POLICY_LOSSES[name] = PolicyLoss(function, mixes_tokens)
        return function

    return register


def _clipped(ratio: Tensor, config: "PolicyLossConfig") -> Tensor:
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


def _clip(t: Tokens, ratio: Tensor, config: "PolicyLossConfig") -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and where the clip is the larger."""
    slope = -t.advantages
    # Where the clipped one is the larger, the bound holds and there is no gradient.
    plain, bound = slope * ratio, slope * _clipped(ratio.detach(), config)
    clipped = bound > plain
    return torch.where(clipped, bound, plain), clipped


def _of_whole_sequences(name: str, config: "PolicyLossConfig") -> None:
    if config.aggregation != "seq-mean-token-mean":
        raise ValueError(
            f"{name} is a loss of whole sequences: expected aggregation 'seq-mean-token-mean', "
            f"got {config.aggregation!r}"
        )


@_loss("ppo")
def ppo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A ``dual_clip``.

    PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; separate bounds, DAPO, arXiv:2503.14476.
    """
    values, clipped = _clip(t, t.ratio, c)
    metrics = {"clip_fraction": t.mean(clipped)}
    if c.dual_clip is not None:
        most = -t.advantages * c.dual_clip
        above = (values > most) & (t.advantages < 0)
        metrics["dual_clip_fraction"] = t.mean(above)
        values = torch.where(above, most, values)
    return values, metrics


@_loss("gspo", mixes_tokens=True)
def gspo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """PPO's clip of s = exp(l - sg(l) + sg(mean over the sequence of l - l_old)). GSPO-token, arXiv:2507.18071."""
    mean = t.sequences.spread(t.sequences.mean(t.log_ratio.detach(), t.mask))
    ratio = (t.log_probs - t.log_probs.detach() + mean).clamp(max=10.0).exp()
    values, clipped = _clip(t, ratio, c)
    return values, {"clip_fraction": t.mean(clipped)}


@_loss("cispo")
def cispo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A l. CISPO, arXiv:2506.13585; its upper bound alone at clip_low = 1."""
    clipped = _clipped(t.ratio, c)
    return -clipped.detach() * t.advantages * t.log_probs, {"clip_fraction": t.mean(clipped != t.ratio)}


@_loss("sapo")
def sapo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. SAPO, arXiv:2511.20347."""
    tau = torch.where(t.advantages > 0, c.tau_positive, c.tau_negative)
    return -t.advantages * torch.sigmoid(tau * (t.ratio - 1)) * (4 / tau), {}


@_loss("reinforce")
def reinforce(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-A l: REINFORCE (Williams 1992), and GPG (arXiv:2504.02546), whose rescaling lies in the advantages.

    Off the policy that sampled, weigh it: ``rollout_correction``.
    """
    return -t.advantages * t.log_probs, {}


@_loss("gmpo", mixes_tokens=True)
def gmpo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-A exp(mean over the sequence of the log-ratio, clipped to [-low, high] where that lowers A r), per sequence.

    That is, -A times the geometric mean of the ratios; A is the sequence's mean. GMPO, arXiv:2507.20673.
    """
    _of_whole_sequences("gmpo", c)
    sign = t.advantages.sign()
    clipped = t.log_ratio.clamp(-c.clip_low, c.clip_high)
    least = sign * torch.minimum(sign * t.log_ratio, sign * clipped)
    ratio = t.sequences.mean(least, t.mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    values = -t.sequences.mean(t.advantages, t.mask) * ratio
    outside = clipped != t.log_ratio
    metrics = {
        "clip_fraction": t.mean(outside & (t.advantages > 0)),
        "clip_fraction_low": t.mean(outside & (t.advantages < 0)),
    }
    return t.sequences.spread(values), metrics


@_loss("rloo", mixes_tokens=True)
def rloo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """PPO's clip of R = exp(sum over the sequence of l - l_old), per sequence: the whole answer is one action.

    RLOO, arXiv:2402.14740, whose leave-one-out baseline lies in the advantages.
    """
    _of_whole_sequences("rloo", c)
    ratio = t.sequences.sum(t.log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    values, clipped = _clip(t, t.sequences.spread(ratio), c)
    return values, {"clip_fraction": t.mean(clipped)}


@_loss("vespo", mixes_tokens=True)
def vespo(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-sg(R^k exp(lambda (1 - R))) A l with R = exp(sum over the sequence of l - l_old); k and lambda by the sign of A.

    The weight is 1 on the policy itself, where R = 1, and falls on either side of k / lambda. VESPO, arXiv:2602.10693.
    """
    if not min(c.vespo_lambda_positive, c.vespo_lambda_negative) > 0:
        raise ValueError(
            "vespo: expected vespo_lambda_* > 0, without which the weight has no bound, got "
            f"{c.vespo_lambda_positive}, {c.vespo_lambda_negative}"
        )
    log_ratio = t.log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    total = t.sequences.spread(t.sequences.sum(log_ratio)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    up = t.advantages >= 0
    k = torch.where(up, c.vespo_k_positive, c.vespo_k_negative)
    decay = torch.where(up, c.vespo_lambda_positive, c.vespo_lambda_negative)
    weight = (k * total + decay * (1 - total.exp())).exp()
    return -weight * t.advantages * t.log_probs, {"vespo_weight": t.mean(weight)}


def _divergence_masked(t: Tokens, c: "PolicyLossConfig", valid: Tensor) -> tuple[Tensor, Metrics]:
    """-sg(min(r, bound)) A l where ``valid``, else 0."""
    ratio = t.ratio.detach()
    values = torch.where(valid, -t.advantages * ratio.clamp(max=c.ratio_bound) * t.log_probs, 0.0)
    bounded = valid & (ratio > c.ratio_bound)
    return values, {"clip_fraction": t.mean(~valid), "bounded_fraction": t.mean(bounded)}


@_loss("dppo-tv")
def dppo_tv(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """Tokens stay while |p - p_old|, in the direction that A pushes, is at most clip_high (up) or clip_low (down).

    DPPO with the binary total variation, arXiv:2602.04879; the ratio is bounded and has no gradient.
    """
    moved = t.log_probs.detach().exp() - t.old_log_probs.exp()
    return _divergence_masked(t, c, torch.where(t.advantages > 0, moved <= c.clip_high, moved >= -c.clip_low))


@_loss("dppo-kl")
def dppo_kl(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """As dppo-tv with the binary KL p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). arXiv:2602.04879."""
    l, old = t.log_probs.detach(), t.old_log_probs
    p, p_old = l.exp(), old.exp()
    kl = p_old * (old - l) + (1 - p_old) * torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    up, down = (kl <= c.clip_high) | (p <= p_old), (kl <= c.clip_low) | (p >= p_old)
    return _divergence_masked(t, c, torch.where(t.advantages > 0, up, down))


def _covariance(t: Tokens) -> Tensor:
    """(A - mean A)(l - mean l) of each token that counts, without gradient."""
    return (t.advantages - t.mean(t.advantages)) * (t.log_probs.detach() - t.mean(t.log_probs))


@_loss("clip-cov", mixes_tokens=True)
def clip_cov(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """PPO's clip; of the tokens it leaves whose covariance lies in cov_bounds, a random share cov_fraction gets 0.

    Clip-Cov, arXiv:2505.22617. The draw is torch's on the CPU; covariances are over the tokens of this call.
    """
    values, clipped = _clip(t, t.ratio, c)
    covariance = _covariance(t)
    low, high = c.cov_bounds
    candidates = (t.mask & ~clipped & (covariance > low) & (covariance < high)).nonzero().squeeze(1)
    number = min(max(int(c.cov_fraction * t.mask.sum()), 1), len(candidates))
    chosen = candidates[torch.randperm(len(candidates)).to(candidates.device)[:number]]
    dropped = torch.zeros_like(t.mask).index_fill(0, chosen, True)
    return torch.where(dropped, 0.0, values), {"clip_fraction": t.mean(dropped)}


@_loss("kl-cov", mixes_tokens=True)
def kl_cov(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-A r, plus cov_kl_coefficient |l - l_old| at the share cov_fraction of tokens with the largest covariance.

    KL-Cov, arXiv:2505.22617; covariances are over the tokens of this call.
    """
    covariance = torch.where(t.mask, _covariance(t), -torch.inf)
    count = int(t.mask.sum())
    number = max(1, int(c.cov_fraction * count)) if count else 0
    chosen = torch.zeros_like(t.mask).index_fill(0, covariance.topk(number).indices, True)
    penalty = torch.where(chosen, c.cov_kl_coefficient * t.log_ratio.abs(), 0.0)
    return -t.advantages * t.ratio + penalty, {"penalized_fraction": t.mean(chosen)}


@_loss("dro")
def dro(t: Tokens, c: "PolicyLossConfig") -> tuple[Tensor, Metrics]:
    """-(A l - beta / 2 (l - l_old)^2). DRO, arXiv:2405.19107."""
    if not c.dro_beta > 0:
        raise ValueError(f"dro: expected dro_beta > 0, got {c.dro_beta}")
    return -(t.advantages * t.log_probs - 0.5 * c.dro_beta * t.log_ratio.square()), {}
