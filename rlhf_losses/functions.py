"""The public functions over a head: from hidden states, and from logits that somebody already holds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_losses import compiled, validation
from rlhf_losses.kernels import host_read, reference
from rlhf_losses.kernels.autograd import LinearStatistics, LogitsStatistics
from rlhf_losses.kernels.backends import BackendChoice, choose_backend, free_bytes
from rlhf_losses.kernels.call import Call, packed
from rlhf_losses.kernels.gemm import accumulator_dtype, with_separate_rows
from rlhf_losses.kernels.statistics import CallStats, TokenStats
from rlhf_losses.kernels.transform import LogitTransform

DEFAULT_WORKSPACE_BYTES = 512 * 2**20
# The block of exponentials of 16384 tokens and a vocabulary of 151936, in 16 bits. Larger ones are no faster.
ONE_PASS_WORKSPACE_BYTES = 4864 * 2**20


def linear_log_probs(
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
    outputs: Sequence[str] = ("log_probs", "entropy"),
    backend: str = "auto",
    workspace_bytes: int | None = None,
    validate: str = "async",
    cache_bytes: int | str = 0,
) -> TokenStats:
    """Log-probability of each label and entropy of each distribution, without the logits.

    The distribution of a token is softmax(z), z = softcap * tanh(logit_scale * (h @ weight.T + bias) / softcap) /
    temperature, every step optional. Differentiable in hidden_states, weight and bias, for every subset of outputs.

    Args:
        hidden_states: [..., H], any strides; fp16, bf16, fp32, or fp64 (reference and chunked back ends).
        weight: [V, H], the head, of the same dtype. Under torch.autocast both are cast, and gradients come back in
            the parameters' own dtype. A row of -inf switches a token off; other infinities make NaN, as in torch.
        labels: [...], integers, the sampled tokens, already shifted: labels[i] is scored by hidden_states[i].
        bias: [V], added to the raw product.
        temperature: a number, or a tensor with one value per token or per sequence (leading dimensions of labels).
        softcap: Gemma 2's final_logit_softcapping.
        logit_scale: multiplies the product (Cohere's logit_scale; for Granite pass 1 / logits_scaling).
        mask: [...], bool or 0/1 of any real dtype: what is not 0 counts, 0.5, -1 and NaN too; no weights. Tokens with
            0, like those whose label is ignore_index, are not multiplied: their outputs are 0, their gradients exactly
            0, whatever their hidden states and labels hold.
        outputs: which fields of ``TokenStats`` to compute: "log_probs", "entropy", "logsumexp", "sum_p_squared",
            "argmax".
        backend: "auto", "triton", "chunked" or "reference"; ``backend_for`` says what "auto" takes and why.
        workspace_bytes: what a call may hold beside its results, 512 MiB if None; at least one tile's columns of all
            tokens (triton, whose forward needs next to none), or one token's logits (chunked, forward and backward,
            where less also means smaller and slower products).
        validate: what happens with a label outside of [0, V) at a token that counts: "async" gives NaN for that token,
            its gradient included, and raises at the next call that finds the device's answer arrived, or at
            ``check()``; "sync" raises at once, and waits for the device; "off" gives NaN.
        cache_bytes: what the forward may keep until the backward, so that the backward need not multiply the logits
            again: 2 bytes and a little per logit (triton, 16 bits; 4 elsewhere) make it 6 instead of 8 products' worth,
            for as many tokens as fit. "auto" takes half of the memory that is free at the call. Nothing is kept where
            no gradient can be asked for, and by the reference, which keeps all.

    Under torch.compile this is a custom op. In a CUDA graph all tokens are multiplied, and neither labels nor
    temperatures are checked. Both want cache_bytes=0.

    Returns:
        ``TokenStats`` with the fields asked for, shaped like labels, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError or TypeError that says what was expected, what came and the way out: shapes, dtypes, devices,
        numbers out of range, sharded parameters. ImportError for backend="triton" without Triton.

    Formulas: docs/math.md.
    """
    hidden, weight, bias, call = head_call(
        hidden_states,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        ignore_index=ignore_index,
        outputs=outputs,
        backend=backend,
        workspace_bytes=workspace_bytes,
        validate=validate,
        cache_bytes=cache_bytes,
    )
    stats = head_statistics(hidden, weight, bias, call)
    return _finish(stats, call, weight.shape[0], labels.shape, validate)


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("log_probs", "entropy"),
    backend: str = "auto",
    workspace_bytes: int | None = None,
    validate: str = "async",
    inplace_backward: bool = False,
) -> TokenStats:
    """The numbers of ``linear_log_probs`` from logits [..., V] that somebody already holds; one read of them.

    ``softcap``, ``logit_scale`` and ``temperature`` are applied to the logits as given: leave out what the model has
    applied itself. With ``inplace_backward`` the gradient is written over the logits, so that no second [N, V] block
    exists; nothing else may need them then, and a second backward raises RuntimeError. (The reference keeps them.)

    Everything else, errors included, is as for ``linear_log_probs``.
    """
    flat, call = logits_call(
        logits,
        labels,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        ignore_index=ignore_index,
        outputs=outputs,
        backend=backend,
        workspace_bytes=workspace_bytes,
        validate=validate,
    )
    stats = logits_statistics(flat, call, inplace_backward)
    return _finish(stats, call, logits.shape[-1], labels.shape, validate)


def backend_for(tensor: Tensor, backend: str = "auto") -> BackendChoice:
    """What a call on hidden states or logits like ``tensor`` is served by, and why.

    Raises what the call would raise: ValueError for an unknown name, ImportError or ValueError where ``backend`` is
    "triton" and can't be had.
    """
    return choose_backend(backend, tensor.device, tensor.dtype)


def head_call(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float | None,
    cache_bytes: int | str = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Call]:
    """Arguments of ``linear_log_probs``, checked: hidden states [N, H], weight and bias as multiplied, and the call."""
    validation.require_plain(hidden_states=hidden_states, weight=weight, bias=bias)
    validation.require_data("hidden_states", hidden_states)
    hidden_states, weight, bias = _autocast(hidden_states, weight, bias)
    validation.require_head(hidden_states, weight, bias)
    validation.require_tokens(labels, options["mask"], hidden_states.shape[:-1], hidden_states, "hidden_states")
    per_token = validation.per_token_temperature(temperature, labels)
    call = _prepare(
        labels=labels,
        dtype=hidden_states.dtype,
        transform=LogitTransform(scale=logit_scale, softcap=softcap, temperature=per_token),
        cache_bytes=validation.require_cache_bytes(cache_bytes),
        **options,
    )
    return hidden_states.reshape(-1, hidden_states.shape[-1]), weight, bias, call


def head_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> CallStats:
    """What ``head_call`` has prepared -> every statistic asked for, [N], and maybe others."""
    if isinstance(call, compiled.TracedCall):
        return compiled.linear_statistics(hidden, weight, bias, call)
    if len(call.labels) == 0:
        # Nothing to score, but a graph: every parameter gets its zeros.
        return _nothing(len(hidden), hidden[:0].sum() + weight[:0].sum() + (0 if bias is None else bias[:0].sum()))
    if call.backend == "reference":
        picked, transform = hidden if call.rows is None else hidden[call.rows], call.transform.with_bias(bias)
        stats = reference.linear_statistics(picked, weight, call.labels, transform, call.ignore_index, call.omega)
        return _scattered(stats, call.rows, len(hidden))
    return CallStats(*LinearStatistics.apply(hidden, weight, bias, call))


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record what is computed of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def for_one_pass(call: Call, workspace_bytes: int | None) -> Call:
    """The call with the workspace that one pass takes, where the caller has named none."""
    if workspace_bytes is None and call.backend == "triton":
        return replace(call, workspace_bytes=ONE_PASS_WORKSPACE_BYTES)
    return call


def logits_call(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float | None,
    **options: Any,
) -> tuple[Tensor, Call]:
    """Arguments of ``log_probs_from_logits``, checked: logits [N, V], and the call."""
    validation.require_plain(logits=logits)
    validation.require_data("logits", logits)
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits: expected [..., V] with at least one entry, got {list(logits.shape)}")
    if logits.dtype not in validation.DTYPES:
        raise TypeError(f"logits: expected a floating dtype, got {logits.dtype}; fp16, bf16, fp32 and fp64 are served")
    validation.require_tokens(labels, options["mask"], logits.shape[:-1], logits, "logits")
    per_token = validation.per_token_temperature(temperature, labels)
    call = _prepare(
        labels=labels,
        dtype=logits.dtype,
        transform=LogitTransform(scale=logit_scale, softcap=softcap, temperature=per_token),
        **options,
    )
    return with_separate_rows(logits.reshape(-1, logits.shape[-1])), call


def logits_statistics(flat: Tensor, call: Call, inplace_backward: bool) -> CallStats:
    """What ``logits_call`` has prepared -> every statistic asked for, [N], and maybe others."""
    if isinstance(call, compiled.TracedCall):
        if inplace_backward:
            raise ValueError(
                "inplace_backward: expected False under torch.compile, which must know what is written over, got True; "
                "leave it out, or this call out of the compiled code (torch.compiler.disable)"
            )
        return compiled.logits_statistics(flat, call)
    if len(call.labels) == 0:
        return _nothing(len(flat), flat[:0].sum())
    if call.backend == "reference":
        picked = flat if call.rows is None else flat[call.rows]
        stats = reference.logits_statistics(picked, call.labels, call.transform, call.ignore_index, call.omega)
        return _scattered(stats, call.rows, len(flat))
    return CallStats(*LogitsStatistics.apply(flat, call, inplace_backward))


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What torch.nn.functional.linear would see under autocast: both operands in its dtype, fp64 left alone."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), bias


def _prepare(
    *,
    labels: Tensor,
    dtype: torch.dtype,
    transform: LogitTransform,
    mask: Tensor | None,
    ignore_index: int,
    outputs: Sequence[str],
    backend: str,
    workspace_bytes: int | None,
    validate: str,
    cache_bytes: int | str = 0,
) -> Call:
    """Raise what earlier calls left, check this one, and pack its tokens.

    Packing waits for the device to say how many tokens count. Without a mask that wait would buy little: there all
    tokens on a GPU are kept, and the kernels pass over blocks of ignored ones. (The reference always packs: what an
    ignored token's hidden state holds must not reach autograd.)
    """
    validation.require_validate(validate)
    wanted = validation.require_outputs(outputs)
    if workspace_bytes is None:
        workspace_bytes = DEFAULT_WORKSPACE_BYTES
    elif not isinstance(workspace_bytes, int) or workspace_bytes <= 0:
        raise ValueError(f"workspace_bytes: expected an integer > 0 or None, got {workspace_bytes!r}")
    if not isinstance(ignore_index, int) or abs(ignore_index) >= 2**63:
        raise TypeError(f"ignore_index: expected an integer of 64 bits, got {ignore_index!r}")
    labels = labels.reshape(-1).contiguous()
    if labels.dtype.itemsize < 4:
        # Compared as they are, -100 and the vocabulary's size would wrap around.
        labels = labels.int()
    # Not in a function of its own: where the graph breaks, that would be compiled alone, and answer True.
    if torch.compiler.is_compiling() or host_read.capturing():
        if backend == "reference" or cache_bytes != 0:
            raise ValueError(
                "expected cache_bytes=0 and a back end other than the reference under torch.compile and in a CUDA "
                f"graph, got cache_bytes={cache_bytes!r} and backend={backend!r}, which need the host's answers; leave "
                "them out, or leave this call out (torch.compiler.disable)"
            )
        if mask is not None:
            # Any ignore_index fits 64 bits.
            labels = labels.long().masked_fill(mask.reshape(-1) == 0, ignore_index)
    if torch.compiler.is_compiling():
        return compiled.TracedCall(
            labels,
            None,
            transform,
            wanted,
            ignore_index,
            backend,
            workspace_bytes,
            validate=validate,
            masked=mask is not None,
        )
    choice = choose_backend(backend, labels.device, dtype)
    if host_read.capturing():
        return Call(labels, None, transform, wanted, ignore_index, choice.name, workspace_bytes)
    validation.check_arrived()
    if not torch.is_grad_enabled():
        cache_bytes = 0
    elif isinstance(cache_bytes, str):
        cache_bytes = free_bytes(labels.device) // 2
    call = Call(labels, None, transform, wanted, ignore_index, choice.name, workspace_bytes, cache_bytes)
    if mask is not None or not labels.is_cuda or choice.name == "reference":
        counts = labels != ignore_index
        if mask is not None:
            counts &= mask.reshape(-1) != 0
        call = packed(call, counts)
    if isinstance(call.transform.temperature, Tensor) and validate != "off":
        validation.check_temperatures(call.transform.temperature)
    return call


def _nothing(count: int, link: Tensor) -> CallStats:
    """Zeros for all tokens, hanging on the graph of ``link``, a scalar 0."""
    zeros = link.to(accumulator_dtype(link.dtype)).expand(count)
    argmax = torch.zeros(count, dtype=torch.int64, device=link.device)
    return CallStats(**{name: zeros.clone() for name in CallStats._fields if name != "argmax"}, argmax=argmax)


def _scattered(stats: CallStats, rows: Tensor | None, count: int) -> CallStats:
    """Statistics of packed rows, spread to all tokens."""
    if rows is None:
        return stats
    return CallStats(*(None if x is None else x.new_zeros(count).index_copy(0, rows, x) for x in stats))


def _finish(stats: CallStats, call: Call, vocab: int, shape: torch.Size, validate: str) -> TokenStats:
    """Only what was asked for, in the labels' shape. The labels' check comes last: its launches delay no kernel."""
    validation.check_labels(call, vocab, validate, stats)
    asked = {name: getattr(stats, name) for name in TokenStats._fields if name in call.wanted}
    return TokenStats(**{name: values.reshape(shape) for name, values in asked.items()})
