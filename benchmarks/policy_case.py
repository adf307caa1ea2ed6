"""A policy loss on a head with chosen ratios, the truth about it in fp64, and how far an outcome is from that."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_losses import PolicyBatch, PolicyLossConfig, TokenStats, policy_loss

CHECKED = 64
# Of the log-probabilities and the loss absolute, of the gradients relative to the largest entry of those checked.
BOUNDS = {"log_prob_error": 1e-4, "loss_error": 1e-4, "d_hidden_error": 1e-2, "d_weight_error": 1e-2}


@dataclass(frozen=True)
class Case:
    """A head's inputs, the truth about them, and what the policy loss needs.

    The log-ratio of the checked tokens is +extreme and -extreme in turn; that of all others lies between.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    true: TokenStats
    batch: PolicyBatch
    config: PolicyLossConfig
    extreme: float


class Outcome(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]
    d_hidden: Tensor
    d_weight: Tensor


def spread(tokens: int, device: torch.device) -> Tensor:
    return torch.linspace(0, tokens - 1, min(CHECKED, tokens), device=device).long()


def make_case(
    data: tuple[Tensor, Tensor, Tensor], true: TokenStats, *, steps: list[float], extreme: float, bonus: float, kept=1.0
) -> Case:
    """Log-ratios drawn from ``steps``; advantages that are 0 but for a random part ``kept`` of the tokens."""
    tokens, device = len(data[2]), data[2].device
    generator = torch.Generator(device).manual_seed(1)
    choice = torch.randint(len(steps), (tokens,), device=device, generator=generator)
    log_ratio = torch.tensor(steps, device=device, dtype=torch.float64)[choice]
    # Neighbours of the tokens whose d_hidden is checked: those should be as all others are.
    probes = (spread(tokens, device) + 1) % tokens
    log_ratio[probes[::2]], log_ratio[probes[1::2]] = extreme, -extreme
    advantages = torch.randn(tokens, device=device, generator=generator)
    dropped = torch.randperm(tokens, device=device, generator=generator)[round(kept * tokens) :]
    advantages[dropped] = 0
    batch = PolicyBatch(advantages=advantages, old_log_probs=(true.log_probs - log_ratio).float())
    return Case(*data, true, batch, PolicyLossConfig.preset("ppo", entropy_coefficient=bonus), extreme)


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In fp64: the loss, d_hidden of the checked tokens, the checked rows of the head, and d_weight of those."""
    log_probs, entropy = case.true.log_probs.clone().requires_grad_(), case.true.entropy.clone().requires_grad_()
    loss, _ = policy_loss(TokenStats(log_probs=log_probs, entropy=entropy), case.batch, case.config)
    d_l, d_e = torch.autograd.grad(loss, (log_probs, entropy), materialize_grads=True)
    every = torch.arange(len(case.labels), device=case.labels.device)
    ids = torch.arange(len(case.weight), device=case.labels.device)
    tokens = spread(len(every), every.device)
    said = case.labels[tokens[::2]]
    generator = torch.Generator(every.device).manual_seed(2)
    head_rows = torch.cat([said, torch.randint(len(ids), said.shape, device=every.device, generator=generator)])

    def d_logits(rows: Tensor, columns: Tensor, h: Tensor, w: Tensor) -> Tensor:
        log_p = h @ w.T - case.true.logsumexp[rows, None]
        p, is_label = log_p.exp(), case.labels[rows, None] == columns
        return d_l[rows, None] * (is_label.double() - p) - d_e[rows, None] * p * (log_p + case.true.entropy[rows, None])

    h, w = case.hidden.detach().double(), case.weight.detach().double()
    d_hidden = d_logits(tokens, ids, h[tokens], w) @ w
    return loss.detach(), d_hidden, head_rows, d_logits(every, head_rows, h, w[head_rows]).T @ h


def worst(values: list[float]) -> float:
    """The largest, or NaN where there is one, which Python's max may pass over."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def errors(case: Case, outcome: Outcome, truths: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Against ``truths``. The rows of the head that are labels dwarf the others, so each half has its own scale."""
    loss, d_hidden, head_rows, d_weight = truths

    def relative(got: Tensor, true: Tensor) -> float:
        return ((got.double() - true).abs().max() / true.abs().max()).item()

    largest, smallest = (math.log(outcome.metrics[name]) for name in ("ratio_max", "ratio_min"))
    halves = zip(outcome.d_weight[head_rows].chunk(2), d_weight.chunk(2), strict=True)
    return {
        "log_prob_error": worst([abs(largest - case.extreme), abs(smallest + case.extreme)]),
        "loss_error": abs(float(outcome.loss) - float(loss)),
        "d_hidden_error": relative(outcome.d_hidden[spread(len(case.labels), case.labels.device)], d_hidden),
        "d_weight_error": worst([relative(got, true) for got, true in halves]),
    }
