"""The training loss of a head's distributions: cross entropy with everything that heads and recipes add to it.

A token's loss is -(1 - eps) w_y log p_y - sum omega_v log p_v, omega = eps w / V, and its z-loss is c lse^2: numbers of
one pass over the vocabulary, of which torch makes the rest. No kernel knows this loss (docs/math.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_losses import validation
from rlhf_losses.functions import (
    for_one_pass,
    head_call,
    head_statistics,
    logits_call,
    logits_statistics,
    wants_gradient,
)
from rlhf_losses.kernels import host_read
from rlhf_losses.kernels.autograd import Call, Recomputed, unpack
from rlhf_losses.kernels.gemm import accumulator_dtype
from rlhf_losses.kernels.one_pass import OnePass
from rlhf_losses.kernels.statistics import CallStats, RowStatistics
from rlhf_losses.kernels.transform import LogitTransform

REDUCTIONS = ("none", "mean", "sum")
# Fields of ``CrossEntropyOutput`` that cost something, and the statistic they come from.
_OUTPUTS = {"entropy": "entropy", "token_accuracy": "argmax"}


class CrossEntropyOutput(NamedTuple):
    """Scalars, or shaped like labels with reduction="none"; fp32 (fp64 for fp64 inputs).

    loss            the cross entropy, smoothed and weighted, and the z-loss
    z_loss          the z-loss alone, which ``loss`` holds already; 0 without one
    entropy         entropy of the distributions in nats; None where not asked for
    token_accuracy  share of tokens whose label is the most probable entry, without gradient; None where not asked for
    """

    loss: Tensor
    z_loss: Tensor
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    outputs: Sequence[str] = ("entropy", "token_accuracy"),
    backend: str = "auto",
    workspace_bytes: int | None = None,
    validate: str = "async",
    cache_bytes: int | str = 0,
) -> CrossEntropyOutput:
    """``torch.nn.functional.cross_entropy`` of a head's logits, and what belongs beside it, without the logits.

    A mean or sum computes its gradients along with the loss: 6 N H V FLOPs for both, not 8. Every other output has its
    gradient as well. That of the entropy or z_loss of a mean or sum takes the logits' product once more, and its own
    two; a loss that always holds the entropy is cheaper made of reduction="none", whose backward serves all at once.

    Args:
        hidden_states, weight, labels, bias, temperature, softcap, logit_scale, mask, ignore_index, backend, validate:
            as for ``linear_log_probs``. Labels are not shifted here: labels[i] is scored by hidden_states[i].
        reduction: "none", a loss per token; "sum"; or "mean", divided by the number of tokens that count, the
            cross entropy with class_weight by the sum of their labels' weights. Where no token counts, everything is 0,
            and so are the gradients (torch: NaN); where tokens count and their weights sum to 0, NaN or infinite, as in
            torch.
        label_smoothing: in [0, 1]: the target is 1 - label_smoothing at the label, and 1 / V of the rest everywhere.
        z_loss: coefficient of logsumexp^2, which is added to each token's loss, no matter what its class weighs.
        class_weight: [V], weights of the classes, in the smoothed part of the target too, as in torch.
        outputs: which of "entropy" and "token_accuracy" to compute as well. Both cost a little.
        workspace_bytes: as for ``linear_policy_loss`` in one pass, and for ``linear_log_probs`` with reduction="none".
        cache_bytes: with reduction="none", as for ``linear_log_probs``; one pass keeps nothing but gradients.

    Returns:
        ``CrossEntropyOutput(loss, z_loss, entropy, token_accuracy)``.

    Raises:
        ValueError or TypeError that says what was expected, what came and the way out. In one pass a second backward of
        the loss raises RuntimeError.

    The one pass holds gradients from the call to the backward, those of the parameters at the call. A smoothed loss of
    soft-capped logits in 16 bits, of which the kept exponentials do not say enough, takes two passes with triton, and
    so do backend="reference" and every call under torch.compile or in a CUDA graph.
    """
    settings = _Settings(reduction, label_smoothing, z_loss, class_weight, outputs)
    hidden, head, head_bias, call = head_call(
        hidden_states,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        ignore_index=ignore_index,
        outputs=("log_probs",),
        backend=backend,
        workspace_bytes=workspace_bytes,
        validate=validate,
        cache_bytes=cache_bytes,
    )
    call, terms = settings.terms(call, labels, len(head), hidden.dtype)
    no_host = torch.compiler.is_compiling() or host_read.capturing()
    one_pass = not no_host and reduction != "none" and call.backend != "reference" and call.can_keep(hidden.dtype)
    if one_pass and wants_gradient(hidden, head, head_bias) and len(call.labels) > 0:
        call = for_one_pass(call, workspace_bytes)
        loss, *fields = OnePass.apply(hidden, head, head_bias, call, terms.loss, terms.unit)
        stats = CallStats(*Recomputed.apply(hidden, head, head_bias, call, RowStatistics(*fields)))
    else:
        stats = head_statistics(hidden, head, head_bias, call)
        loss = terms.loss(stats, slice(None))
    # Last, so that its launches delay no kernel.
    validation.check_labels(call, len(head), validate, stats)
    return terms.output(loss, stats)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    outputs: Sequence[str] = ("entropy", "token_accuracy"),
    backend: str = "auto",
    workspace_bytes: int | None = None,
    validate: str = "async",
    inplace_backward: bool = False,
) -> CrossEntropyOutput:
    """The numbers of ``linear_cross_entropy`` from logits [..., V] that somebody already holds; one read of them.

    The vocabulary is the last dimension, whatever the others are (torch has it second). ``softcap``, ``logit_scale``,
    ``temperature`` and ``inplace_backward`` are as for ``log_probs_from_logits``, everything else, errors included, as
    for ``linear_cross_entropy``. One backward serves all outputs, at one more read and one write of the logits.
    """
    settings = _Settings(reduction, label_smoothing, z_loss, class_weight, outputs)
    flat, call = logits_call(
        logits,
        labels,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        ignore_index=ignore_index,
        outputs=("log_probs",),
        backend=backend,
        workspace_bytes=workspace_bytes,
        validate=validate,
    )
    call, terms = settings.terms(call, labels, logits.shape[-1], logits.dtype)
    stats = logits_statistics(flat, call, inplace_backward)
    validation.check_labels(call, logits.shape[-1], validate, stats)
    return terms.output(terms.loss(stats, slice(None)), stats)


class _Module(nn.Module):
    """Arguments of either function, checked once; class_weight is a buffer, and moves with the module."""

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        _Settings(reduction, label_smoothing, z_loss, class_weight, ())
        LogitTransform(scale=logit_scale, softcap=softcap, temperature=temperature)
        self.register_buffer("class_weight", class_weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "temperature": temperature,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "backend": backend,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(_Module):
    """``linear_cross_entropy`` in the manner of ``torch.nn.CrossEntropyLoss``: a call returns the loss alone.

    Keywords are the function's that say which loss it is, and backend; class_weight becomes a buffer. Errors are the
    function's.
    """

    def forward(self, hidden_states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden_states [..., H], weight [V, H], labels [...], bias [V] -> a scalar, or [...]."""
        return linear_cross_entropy(
            hidden_states, weight, labels, bias=bias, class_weight=self.class_weight, outputs=(), **self.options
        ).loss


class CrossEntropyLoss(_Module):
    """``cross_entropy`` in the manner of ``torch.nn.CrossEntropyLoss``: a call returns the loss alone.

    Keywords are the function's that say which loss it is, and backend; class_weight becomes a buffer. Errors are the
    function's. The vocabulary is the logits' last dimension, where torch has it second: [N, d, C], not [N, C, d].
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [..., V], labels [...] -> a scalar, or [...]."""
        return cross_entropy(logits, labels, class_weight=self.class_weight, outputs=(), **self.options).loss


@dataclass(frozen=True)
class _Settings:
    """Which cross entropy; checks itself."""

    reduction: str
    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None
    outputs: Sequence[str]

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")
        for name, value, most in (("label_smoothing", self.label_smoothing, 1.0), ("z_loss", self.z_loss, 3.4e38)):
            if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 <= value <= most:
                span = "in [0, 1]" if name == "label_smoothing" else "that is finite and >= 0"
                raise ValueError(f"{name}: expected a number {span}, got {value!r}; 0.0 switches it off")
        if isinstance(self.outputs, str) or not set(self.outputs) <= set(_OUTPUTS):
            raise ValueError(
                f"outputs: expected some of {tuple(_OUTPUTS)} in a tuple, or (), got {self.outputs!r}; "
                "loss and z_loss are always there"
            )
        if self.class_weight is not None:
            validation.require_plain(class_weight=self.class_weight)
            if not self.class_weight.is_floating_point():
                raise TypeError(f"class_weight: expected a floating dtype, got {self.class_weight.dtype}")
            if self.class_weight.requires_grad:
                raise ValueError(
                    "class_weight: expected a tensor without gradient, which none would reach; pass .detach()"
                )

    def terms(self, call: Call, labels: Tensor, vocab: int, dtype: torch.dtype) -> tuple[Call, "_Terms"]:
        """The call with the statistics that this loss is made of, and the loss of the call's tokens."""
        wide, weights = accumulator_dtype(dtype), None
        if self.class_weight is not None:
            if self.class_weight.shape != (vocab,) or self.class_weight.device != labels.device:
                raise ValueError(
                    f"class_weight: expected shape [{vocab}] on {labels.device}, a weight per entry of the vocabulary, "
                    f"got {list(self.class_weight.shape)} on {self.class_weight.device}"
                )
            weights = self.class_weight.to(wide)
        omega = None
        if self.label_smoothing > 0:
            ones = torch.ones(vocab, dtype=wide, device=labels.device) if weights is None else weights
            omega = ones * (self.label_smoothing / vocab)
        wanted = {_OUTPUTS[name] for name in self.outputs} | ({"logsumexp"} if self.z_loss > 0 else set())
        wanted |= {"log_probs"} | ({"weighted_log_probs"} if self.label_smoothing > 0 else set())
        call = replace(call, omega=omega, wanted=frozenset(wanted))
        counts = call.labels != call.ignore_index
        count = counts.sum(dtype=wide)
        of_label, total = None, count
        if weights is not None:
            # A label that no column has is NaN by its log-probability.
            of_label = weights[call.labels.clamp(0, vocab - 1).long()].masked_fill(~counts, 0.0)
            total = of_label.sum()
            of_label = unpack(of_label, call.rows, labels.numel())
        return call, _Terms(
            self,
            labels,
            unpack(counts, call.rows, labels.numel()),
            of_label,
            largest=None if weights is None else weights.amax(),
            total=torch.where(count == 0, 1.0, total),
            count=count.clamp(min=1.0),
        )


@dataclass(frozen=True)
class _Terms:
    """The loss of a call's M tokens, as functions of their statistics.

    labels        as given, M of them
    counts        [M] bool
    label_weight  [M], class weights of the labels, 0 where a token does not count; None for 1
    largest       the largest class weight; None for 1
    total         what a mean of the cross entropy is divided by
    count         what any other mean is
    """

    settings: _Settings
    labels: Tensor
    counts: Tensor
    label_weight: Tensor | None
    largest: Tensor | None
    total: Tensor
    count: Tensor

    def loss(self, stats: CallStats, rows: slice | Tensor) -> Tensor:
        """Of the tokens ``rows``, whose statistics are given: what they add to the loss, or the loss of each."""
        assert stats.log_probs is not None
        loss = -stats.log_probs
        if self.label_weight is not None:
            loss = loss * self.label_weight[rows]
        if self.settings.label_smoothing > 0:
            assert stats.weighted_log_probs is not None
            loss = (1.0 - self.settings.label_smoothing) * loss - stats.weighted_log_probs
        loss = self._reduced(loss, self.total)
        return loss if self.settings.z_loss == 0 else loss + self._z_loss(stats)

    def unit(self) -> Tensor:
        """As large as the loss's gradients by log-probabilities are."""
        largest = torch.ones_like(self.total) if self.largest is None else self.largest
        unit = largest / self.total if self.settings.reduction == "mean" else largest
        return torch.where(unit > 0, unit, 1.0)

    def output(self, loss: Tensor, stats: CallStats) -> CrossEntropyOutput:
        assert stats.log_probs is not None
        z_loss = torch.zeros_like(loss) if self.settings.z_loss == 0 else self._z_loss(stats)
        entropy = accuracy = None
        if "entropy" in self.settings.outputs:
            assert stats.entropy is not None
            entropy = self._reduced(stats.entropy, self.count)
        if "token_accuracy" in self.settings.outputs:
            assert stats.argmax is not None
            right = ((stats.argmax == self.labels.reshape(-1)) & self.counts).to(stats.log_probs.dtype)
            # -1 is the argmax of a token whose label no column has.
            accuracy = self._reduced(right.masked_fill(stats.argmax < 0, float("nan")), self.count)
        return CrossEntropyOutput(
            self._shaped(loss),
            self._shaped(z_loss),
            None if entropy is None else self._shaped(entropy),
            None if accuracy is None else self._shaped(accuracy),
        )

    def _shaped(self, values: Tensor) -> Tensor:
        return values.reshape(self.labels.shape) if self.settings.reduction == "none" else values

    def _z_loss(self, stats: CallStats) -> Tensor:
        assert stats.logsumexp is not None
        return self._reduced(self.settings.z_loss * stats.logsumexp.square(), self.count)

    def _reduced(self, values: Tensor, divisor: Tensor) -> Tensor:
        if self.settings.reduction == "none":
            return values
        return values.sum() / divisor if self.settings.reduction == "mean" else values.sum()
