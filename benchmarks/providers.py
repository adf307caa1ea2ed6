"""Who computes what: one function a provider, and a row that says which tasks it serves.

A task is what is timed:

    forward        log_probs and entropy, no gradient
    train          forward and backward of a PPO loss with entropy bonus
    cross_entropy  forward and backward of the mean negative log-likelihood
    skip           train without a bonus, with masked tokens and tokens of advantage 0

A function returns the statistics of the tokens, from which the task makes its loss, or the loss itself. Rivals are
imported when they are called. Adding one is a function and a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf_losses import (
    LossOutput,
    TokenStats,
    linear_cross_entropy,
    linear_log_probs,
    linear_policy_loss,
    policy_loss,
)
from rlhf_losses.benchmarks.checks import Case, Outcome
from rlhf_losses.benchmarks.data import Problem

TASKS = ("forward", "train", "cross_entropy", "skip")
# Bytes of cache for a logit: a bf16 exponential, and room for what goes with a tile.
CACHED_LOGIT = 2.1
# Bytes for a logit that is held: bf16, fp32, their gradients, and what softmax and entropy keep.
NAIVE_LOGIT = 28
LIGER_PATH = "LigerFusedScaledCrossEntropySM90FunctionBackward"


@dataclass(frozen=True)
class Provider:
    """A row of the registry.

    ``tasks`` names the number of GEMMs that each is compared to, ``needs`` the package to import, ``softcap`` whether
    it can do heads with one, ``logit_bytes`` what it holds for each logit. A slow one runs with few tokens only.
    """

    name: str
    tasks: dict[str, int]
    run: Callable[[Case], TokenStats | LossOutput | Tensor]
    needs: str | None = None
    ours: bool = False
    one_pass: bool = False
    softcap: bool = False
    slow: bool = False
    logit_bytes: int = 0


def evaluate(provider: Provider, task: str, case: Case) -> TokenStats | Outcome:
    """A run of the task: the statistics in the forward, else the loss and its gradients."""
    if task == "forward":
        with torch.no_grad():
            stats = provider.run(case)
        assert isinstance(stats, TokenStats)
        return stats
    loss, metrics = loss_of(provider, task, case)
    gradients = torch.autograd.grad(loss, (case.problem.hidden, case.problem.weight))
    return Outcome(loss.detach(), metrics, *gradients)


def loss_of(provider: Provider, task: str, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The forward of a run."""
    result = provider.run(case)
    if isinstance(result, Tensor):
        return result, {}
    if isinstance(result, TokenStats):
        if task == "cross_entropy":
            assert result.log_probs is not None
            return -result.log_probs.mean(), {}
        return policy_loss(result, case.batch, case.config)
    return result


def two_passes(case: Case, cache_bytes: int = 0) -> TokenStats:
    x = case.problem
    return linear_log_probs(
        x.hidden, x.weight, x.labels, softcap=x.softcap, mask=case.batch.mask, cache_bytes=cache_bytes
    )


def all_rows_cached(case: Case) -> TokenStats:
    tokens, _, vocab = case.problem.shape
    return two_passes(case, cache_bytes=int(CACHED_LOGIT * tokens * vocab))


def one_pass(case: Case) -> LossOutput:
    x = case.problem
    return linear_policy_loss(x.hidden, x.weight, x.labels, case.batch, case.config, softcap=x.softcap)


def cross_entropy(case: Case) -> Tensor:
    x = case.problem
    return linear_cross_entropy(x.hidden, x.weight, x.labels, softcap=x.softcap, outputs=()).loss


def naive_logits(x: Problem) -> Tensor:
    z = (x.hidden @ x.weight.T).float()
    return z if x.softcap is None else x.softcap * torch.tanh(z / x.softcap)


def naive(case: Case) -> TokenStats:
    log_p = naive_logits(case.problem).log_softmax(-1)
    log_probs = log_p.gather(-1, case.problem.labels[:, None]).squeeze(-1)
    return TokenStats(log_probs=log_probs, entropy=-(log_p.exp() * log_p).sum(-1))


def naive_cross_entropy(case: Case) -> Tensor:
    return F.cross_entropy(naive_logits(case.problem), case.problem.labels)


def verl_torch(case: Case) -> TokenStats:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    x = case.problem
    log_probs, entropy = FusedLinearForPPO(impl_backend="torch")(x.hidden, x.weight, x.labels, 1.0)
    return TokenStats(log_probs=log_probs, entropy=entropy.float())


def verl_triton(case: Case) -> TokenStats:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    x = case.problem
    log_probs, entropy = linear_cross_entropy(x.hidden, x.weight, x.labels, 1.0, "none")
    return TokenStats(log_probs=log_probs, entropy=entropy)


def _liger_sm90(x: Problem, entropy: bool) -> tuple[Tensor, ...]:
    """Called as verl's FusedLinearForPPO calls it. Any path but the SM90 kernel is an error."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    # Its path shows in the graph, which costs the forward nothing: what it keeps are its inputs.
    with torch.enable_grad():
        results = LigerFusedLinearScaledCrossEntropyFunction.apply(x.hidden, x.weight, x.labels, 1.0, -100, 1, entropy)
    results = results if isinstance(results, tuple) else (results,)
    path = type(results[0].grad_fn).__name__
    if path != LIGER_PATH:
        raise RuntimeError(f"expected Liger's SM90 kernel, {LIGER_PATH}, got {path}")
    return results


def liger_sm90(case: Case) -> TokenStats:
    nll, entropy = _liger_sm90(case.problem, entropy=True)
    return TokenStats(log_probs=-nll, entropy=entropy)


def liger_sm90_cross_entropy(case: Case) -> Tensor:
    (nll,) = _liger_sm90(case.problem, entropy=False)
    return nll.mean()


def liger_sm90_mean(case: Case) -> Tensor:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    x = case.problem
    tokens, _, vocab = x.shape
    if tokens % 128 or vocab % 256:
        raise ValueError(f"takes whole tiles of 128 x 256, not {tokens} x {vocab}")
    return liger_fused_linear_cross_entropy_sm90(x.hidden, x.weight, x.labels)


def liger_flce(case: Case) -> Tensor:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    x = case.problem
    # bias, class weights, ignore_index, z loss, label smoothing, reduction, softcap
    options = (None, None, -100, 0.0, 0.0, "mean", x.softcap)
    return LigerFusedLinearCrossEntropyFunction.apply(x.hidden, x.weight, x.labels, *options)[0]


def cut_cross_entropy(case: Case) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    x = case.problem
    return linear_cross_entropy(x.hidden, x.weight, x.labels, softcap=x.softcap)


def quack(case: Case) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    x = case.problem
    # tuned searches among GEMMs for minutes, and only where quack's faster path can't be taken (V % 128 != 0).
    return chunked_linear_cross_entropy(x.hidden, x.weight, x.labels, tuned=False)


PROVIDERS = (
    Provider("ours", {"forward": 1}, two_passes, ours=True, softcap=True),
    Provider("ours, two passes", {"train": 4, "skip": 4}, two_passes, ours=True, softcap=True),
    Provider("ours, all rows cached", {"train": 3}, all_rows_cached, ours=True, softcap=True),
    Provider("ours, one pass", {"train": 3, "skip": 3}, one_pass, ours=True, one_pass=True, softcap=True),
    Provider("ours", {"cross_entropy": 3}, cross_entropy, ours=True, softcap=True),
    Provider("naive", {"forward": 1, "train": 3}, naive, softcap=True, slow=True, logit_bytes=NAIVE_LOGIT),
    Provider("naive", {"cross_entropy": 3}, naive_cross_entropy, softcap=True, slow=True, logit_bytes=NAIVE_LOGIT),
    Provider("verl torch", {"forward": 1, "train": 4}, verl_torch, needs="verl", slow=True),
    Provider("verl triton", {"forward": 1, "train": 4}, verl_triton, needs="verl"),
    Provider("Liger SM90", {"forward": 1, "train": 4}, liger_sm90, needs="liger_kernel"),
    Provider("Liger SM90", {"cross_entropy": 3}, liger_sm90_cross_entropy, needs="liger_kernel"),
    Provider("Liger SM90, mean", {"cross_entropy": 3}, liger_sm90_mean, needs="liger_kernel"),
    Provider("Liger FLCE", {"cross_entropy": 3}, liger_flce, needs="liger_kernel", softcap=True),
    Provider(
        "cut-cross-entropy",
        {"cross_entropy": 3},
        cut_cross_entropy,
        needs="cut_cross_entropy",
        softcap=True,
        slow=True,
    ),
    Provider("quack", {"cross_entropy": 3}, quack, needs="quack"),
)
# What rivals are compared to.
STANDARD = {"forward": "ours", "train": "ours, one pass", "cross_entropy": "ours"}
