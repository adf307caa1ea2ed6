"""The losses that are timed, the truth about them in fp64, and how far a provider is from that.

- Truth is of all tokens: log-probabilities, entropies, losses; gradients of 64 rows of the hidden states and of 64 rows
  of the head, half of them labels of tokens, half of them at random.
- The log-ratios of the policy losses are chosen, by old_log_probs, far from the bounds of the clip, so that no rounding
  moves a token over one. 64 tokens lie outside of all others: the largest and the smallest ratio, which every provider
  reports, tell how far its log-probabilities of these tokens are off.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_losses import PolicyBatch, PolicyLossConfig, TokenStats, policy_loss
from rlhf_losses.benchmarks.data import Problem

CHECKED = 64
# Tokens whose logits are held at once in fp64: 2.1 GB with a vocabulary of 262208.
TRUTH_CHUNK = 1024
# Of log-probabilities, entropies and loss absolute, of gradients relative to the largest entry of those checked.
BOUNDS = {
    "log_prob_error": 1e-4,
    "entropy_error": 4e-4,
    "loss_error": 1e-4,
    "d_hidden_error": 1e-2,
    "d_weight_error": 1e-2,
}


@dataclass(frozen=True)
class Case:
    """A problem, the truth about its tokens, and what the policy loss needs.

    The log-ratio of the probed tokens is +extreme and -extreme in turn; that of all others lies between.
    """

    problem: Problem
    true: TokenStats
    batch: PolicyBatch
    config: PolicyLossConfig
    extreme: float

    def gathered(self, rows: Tensor, *, none_idle: bool = False) -> "Case":
        """These tokens alone, as if there were no others; ``none_idle``: and as if all had a gradient."""
        problem, batch = self.problem, self.batch
        assert batch.old_log_probs is not None
        hidden = problem.hidden.detach()[rows].requires_grad_()
        advantages = batch.advantages[rows]
        if none_idle:
            advantages = advantages.where(advantages != 0, 1.0)
        picked = PolicyBatch(advantages=advantages, old_log_probs=batch.old_log_probs[rows])
        return replace(self, problem=replace(problem, hidden=hidden, labels=problem.labels[rows]), batch=picked)


class Outcome(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]
    d_hidden: Tensor
    d_weight: Tensor


class Truth(NamedTuple):
    """Of a loss in fp64, with the gradients of the checked tokens and of ``head_rows`` [CHECKED]."""

    loss: Tensor
    d_hidden: Tensor
    head_rows: Tensor
    d_weight: Tensor


def token_truth(problem: Problem) -> TokenStats:
    """log_probs, entropy and logsumexp of every token."""
    head = problem.weight.detach().double()
    parts = []
    rows, labels = problem.hidden.detach().split(TRUTH_CHUNK), problem.labels.split(TRUTH_CHUNK)
    for h, chosen in zip(rows, labels, strict=True):
        z, _ = logits(h.double(), head, problem.softcap)
        logsumexp = z.logsumexp(1)
        log_p = z.sub_(logsumexp[:, None])
        log_probs = log_p.gather(1, chosen[:, None]).squeeze(1)
        parts.append((log_probs, -(log_p.exp() * log_p).sum(1), logsumexp))
    log_probs, entropy, logsumexp = (torch.cat(x) for x in zip(*parts, strict=True))
    return TokenStats(log_probs=log_probs, entropy=entropy, logsumexp=logsumexp)


def logits(h: Tensor, w: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """z and dz/da of the products a."""
    a = h @ w.T
    if softcap is None:
        return a, 1.0
    bent = a.div_(softcap).tanh_()
    return bent * softcap, 1 - bent.square()


def spread(tokens: int, device: torch.device) -> Tensor:
    """The checked tokens."""
    return torch.linspace(0, tokens - 1, min(CHECKED, tokens), device=device).long()


def make_case(
    problem: Problem,
    true: TokenStats,
    *,
    steps: list[float],
    extreme: float,
    bonus: float,
    masked: float = 0.0,
    idle: float = 0.0,
) -> Case:
    """Log-ratios drawn from ``steps``; a random share ``masked`` of the tokens, and ``idle`` more of advantage 0."""
    assert true.log_probs is not None
    tokens, device = len(problem.labels), problem.labels.device
    generator = torch.Generator(device).manual_seed(1)
    choice = torch.randint(len(steps), (tokens,), device=device, generator=generator)
    log_ratio = torch.tensor(steps, device=device, dtype=torch.float64)[choice]
    # Neighbours of the tokens whose d_hidden is checked: those should be as all others are.
    probes = (spread(tokens, device) + 1) % tokens
    log_ratio[probes[::2]], log_ratio[probes[1::2]] = extreme, -extreme
    advantages = torch.randn(tokens, device=device, generator=generator)
    order = torch.rand(tokens, device=device, generator=generator)
    order[probes] = 2  # last: they must count
    order = order.argsort()
    few, more = round(masked * tokens), round((masked + idle) * tokens)
    mask = torch.ones(tokens, device=device, dtype=torch.bool)
    mask[order[:few]] = False
    advantages[order[few:more]] = 0
    batch = PolicyBatch(
        advantages=advantages, old_log_probs=(true.log_probs - log_ratio).float(), mask=mask if few else None
    )
    return Case(problem, true, batch, PolicyLossConfig.preset("ppo", entropy_coefficient=bonus), extreme)


def policy_truth(case: Case) -> Truth:
    assert case.true.log_probs is not None
    assert case.true.entropy is not None
    log_probs, entropy = case.true.log_probs.clone().requires_grad_(), case.true.entropy.clone().requires_grad_()
    loss, _ = policy_loss(TokenStats(log_probs=log_probs, entropy=entropy), case.batch, case.config)
    d_l, d_e = torch.autograd.grad(loss, (log_probs, entropy), materialize_grads=True)
    return _with_gradients(case, loss.detach(), d_l, d_e)


def cross_entropy_truth(case: Case) -> Truth:
    assert case.true.log_probs is not None
    d_l = torch.full_like(case.true.log_probs, -1 / len(case.true.log_probs))
    return _with_gradients(case, -case.true.log_probs.mean(), d_l, torch.zeros_like(d_l))


def _with_gradients(case: Case, loss: Tensor, d_l: Tensor, d_e: Tensor) -> Truth:
    problem, true = case.problem, case.true
    assert true.logsumexp is not None
    assert true.entropy is not None
    device, logsumexp, entropy = problem.labels.device, true.logsumexp[:, None], true.entropy[:, None]
    every = torch.arange(len(problem.labels), device=device)
    ids = torch.arange(len(problem.weight), device=device)
    tokens = spread(len(every), device)
    said = problem.labels[tokens[::2]]
    generator = torch.Generator(device).manual_seed(2)
    head_rows = torch.cat([said, torch.randint(len(ids), said.shape, device=device, generator=generator)])

    def d_products(rows: Tensor, columns: Tensor, h: Tensor, w: Tensor) -> Tensor:
        z, slope = logits(h, w, problem.softcap)
        log_p = z - logsumexp[rows]
        p, is_label = log_p.exp(), (problem.labels[rows, None] == columns).double()
        return slope * (d_l[rows, None] * (is_label - p) - d_e[rows, None] * p * (log_p + entropy[rows]))

    h, w = problem.hidden.detach().double(), problem.weight.detach().double()
    d_hidden = d_products(tokens, ids, h[tokens], w) @ w
    return Truth(loss, d_hidden, head_rows, d_products(every, head_rows, h, w[head_rows]).T @ h)


def worst(values: list[float]) -> float:
    """The largest, or NaN where there is one, which Python's max may pass over."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def token_errors(case: Case, stats: TokenStats) -> dict[str, float]:
    """Of the checked tokens."""
    rows = spread(len(case.problem.labels), case.problem.labels.device)
    found = {}
    for name, key in (("log_probs", "log_prob_error"), ("entropy", "entropy_error")):
        got, true = getattr(stats, name), getattr(case.true, name)
        found[key] = (got.double() - true)[rows].abs().max().item()
    return found


def loss_errors(case: Case, outcome: Outcome, truth: Truth) -> dict[str, float]:
    """The rows of the head that are labels dwarf the others, so each half has its own scale."""

    def relative(got: Tensor, true: Tensor) -> float:
        return ((got.double() - true).abs().max() / true.abs().max()).item()

    found = {}
    if "ratio_max" in outcome.metrics:
        largest, smallest = (math.log(outcome.metrics[name]) for name in ("ratio_max", "ratio_min"))
        found["log_prob_error"] = worst([abs(largest - case.extreme), abs(smallest + case.extreme)])
    tokens = spread(len(case.problem.labels), case.problem.labels.device)
    halves = zip(outcome.d_weight[truth.head_rows].chunk(2), truth.d_weight.chunk(2), strict=True)
    return found | {
        "loss_error": abs(float(outcome.loss) - float(truth.loss)),
        "d_hidden_error": relative(outcome.d_hidden[tokens], truth.d_hidden),
        "d_weight_error": worst([relative(got, true) for got, true in halves]),
    }


def is_right(errors: dict[str, float]) -> bool:
    return all(error <= BOUNDS[name] for name, error in errors.items())
