"""The policy loss straight from hidden states and the head, in one pass over the logits where the loss allows it."""

import torch
from torch import Tensor

from rlhf_losses import validation
from rlhf_losses.functions import for_one_pass, head_call, head_statistics, wants_gradient
from rlhf_losses.kernels import host_read
from rlhf_losses.kernels.one_pass import OnePass
from rlhf_losses.kernels.statistics import CallStats
from rlhf_losses.policy import LossOutput, PolicyLossConfig, loss_of_rows, require_kinds
from rlhf_losses.policy_batch import FlatBatch, PolicyBatch
from rlhf_losses.policy_losses import Metrics


def linear_policy_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    batch: PolicyBatch,
    config: PolicyLossConfig,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    validate: str = "async",
    cache_bytes: int | str = 0,
) -> LossOutput:
    """``policy_loss`` of ``linear_log_probs``, with the gradients computed along with the loss: 6 N H V FLOPs, not 8.

    A chunk of tokens at a time: log-probabilities and entropies, the loss of these tokens, and at once its gradients by
    hidden states, head and bias, which the backward multiplies by the loss's own upstream gradient (a loss scale, 1 /
    the number of micro-batches). Tokens without a gradient (clipped, advantage 0) are
    in none of the gradients' products.

    Losses that mix tokens (gspo, gmpo, clip-cov, kl-cov, ..., and rollout corrections of whole sequences without
    old_log_probs) take the usual two passes, as does backend="reference", and every call under torch.compile or in a
    CUDA graph. ``metrics["passes"]`` says which: 1 or 2.

    Args:
        hidden_states, weight, labels, bias, temperature, softcap, logit_scale, ignore_index, backend, validate: as for
            ``linear_log_probs``. labels are [B, T], or packed [N].
        batch: tensors shaped like labels. Tokens that ``batch.mask`` leaves out are not multiplied; tokens whose label
            is ignore_index are left out, too.
        config: which loss, and its numbers.
        workspace_bytes: what a call may hold beside its results, whatever N is (128 tokens' logits at the least). If
            None, 4.75 GiB in one pass with triton, which holds 16384 tokens at a vocabulary of 151936, else 512 MiB.
        cache_bytes: in two passes, as for ``linear_log_probs``; one pass keeps nothing but gradients.

    Returns:
        The loss, a scalar with gradient, and the metrics of ``policy_loss``, with "passes".

    Raises:
        What ``linear_log_probs`` and ``policy_loss`` raise. In one pass a second backward raises RuntimeError.

    The gradients are those of the parameters at the call, whatever is written to these before the backward. They are
    held from the call to the backward: as much as the parameters' own, d_weight in fp32 (and with it
    the peak memory) where more than one chunk adds to it.
    """
    require_kinds(batch, config)
    if labels.is_nested or hidden_states.is_nested:
        raise ValueError(
            "labels: expected [B, T], or packed [N] with batch.cu_seqlens, got a nested tensor; pass the .values() "
            "of all, and .offsets() as cu_seqlens"
        )
    flat = FlatBatch.of("labels", labels, batch, config, (labels != ignore_index).reshape(-1))
    hidden, head, head_bias, call = head_call(
        hidden_states,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=batch.mask,
        ignore_index=ignore_index,
        outputs=("log_probs", "entropy"),
        backend=backend,
        workspace_bytes=workspace_bytes,
        validate=validate,
        cache_bytes=cache_bytes,
    )
    learns = wants_gradient(hidden, head, head_bias)
    no_host = torch.compiler.is_compiling() or host_read.capturing()
    two_passes = flat.mixes_tokens(config) or call.backend == "reference" or no_host
    if two_passes or not learns or len(call.labels) == 0:
        stats = head_statistics(hidden, head, head_bias, call)
        loss, metrics = loss_of_rows(stats, flat, config)
    else:
        call = for_one_pass(call, workspace_bytes)
        of_one_chunk: Metrics = {}

        def objective(stats: CallStats, rows: slice | Tensor) -> Tensor:
            assert stats.log_probs is not None
            whole = len(stats.log_probs) == len(call.labels)
            loss, found = loss_of_rows(stats, flat.rows(rows), config, all_metrics=whole)
            if whole:
                of_one_chunk.update((name, value.detach()) for name, value in found.items())
            return loss

        def unit() -> Tensor:
            largest = flat.token_weights.amax()
            return torch.where(largest > 0, largest, 1.0)

        loss, *fields = OnePass.apply(hidden, head, head_bias, call, objective, unit)
        stats = CallStats(*fields[2:])
        metrics = of_one_chunk
        if not metrics:
            with torch.no_grad():
                metrics = loss_of_rows(stats, flat, config).metrics
    # Last, so that its launches delay no kernel.
    validation.check_labels(call, len(head), validate, stats)
    metrics["passes"] = torch.full_like(metrics["policy_loss"], 2.0 if two_passes and learns else 1.0)
    return LossOutput(loss, metrics)
