"""The statistics of a call as custom ops, for torch.compile: a compiler sees shapes and tensors, not what is inside.

So the inside is what it is without a compiler: tokens are packed, labels and temperatures looked at, back ends chosen
when the op runs; nothing of it is traced, and the number of tokens that count is in no shape. What an op returns has
one entry per given token. A graph that a compiler's back end captures (mode="reduce-overhead") is a capture like any
other (``host_read.capturing``).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlhf_losses import validation
from rlhf_losses.kernels import host_read
from rlhf_losses.kernels.backends import choose_backend
from rlhf_losses.kernels.call import (
    Call,
    linear_gradients,
    linear_rows,
    logits_gradient,
    logits_rows,
    packed,
    unpack,
)
from rlhf_losses.kernels.gemm import accumulator_dtype
from rlhf_losses.kernels.statistics import CallStats, RowStatistics, of_rows
from rlhf_losses.kernels.transform import LogitTransform


@dataclass(frozen=True)
class TracedCall(Call):
    """A call as a compiler sees it: every given token, those that don't count with the label ``ignore_index``.

    backend   as asked for
    validate  of ``linear_log_probs``
    masked    whether there was a mask: on a GPU, tokens are packed then
    """

    validate: str = "async"
    masked: bool = False
    traced: ClassVar[bool] = True


# A ``TracedCall`` as arguments of an op: tensors, then the rest.
_TENSORS = "Tensor labels, Tensor? temperatures, Tensor? omega"
_REST = (
    "float temperature, float? scale, float? softcap, str wanted, SymInt ignore_index, str backend, "
    "SymInt workspace_bytes, str validate, bool masked"
)
# What a forward returns: the two of ``RowStatistics`` for its backward, and ``CallStats``; empty where not wanted.
_FORWARD_FIELDS = ("shift", "norm", *CallStats._fields)
_FORWARD = f"({', '.join(['Tensor'] * len(_FORWARD_FIELDS))})"
# What a backward gets beside tensors and call: of ``RowStatistics`` what it uses, and the gradients of ``CallStats``.
_BACKWARD = (
    "Tensor shift, Tensor norm, Tensor? log_probs, Tensor? entropy, Tensor? sum_p_squared, "
    "Tensor? d_log_probs, Tensor? d_entropy, Tensor? d_logsumexp, Tensor? d_sum_p_squared, Tensor? d_weighted"
)
_STATISTICS = ("shift", "norm", "log_probs", "entropy", "sum_p_squared")


class _Rest(NamedTuple):
    """What ``_REST`` names."""

    temperature: float
    scale: float | None
    softcap: float | None
    wanted: str
    ignore_index: int
    backend: str
    workspace_bytes: int
    validate: str
    masked: bool

    @property
    def there(self) -> tuple[str, ...]:
        """Which of ``_FORWARD_FIELDS`` a forward computes."""
        return (*self.wanted.split(","), "shift", "norm")


def _arguments(call: TracedCall) -> tuple[tuple[Tensor | None, ...], _Rest]:
    transform, temperature = call.transform, call.transform.temperature
    return (call.labels, temperature if isinstance(temperature, Tensor) else None, call.omega), _Rest(
        temperature=1.0 if isinstance(temperature, Tensor) else float(temperature),
        scale=None if transform.scale is None else float(transform.scale),
        softcap=None if transform.softcap is None else float(transform.softcap),
        wanted=",".join(sorted(call.wanted)),
        ignore_index=call.ignore_index,
        backend=call.backend,
        workspace_bytes=call.workspace_bytes,
        validate=call.validate,
        masked=call.masked,
    )


def _call(like: Tensor, tensors: tuple, rest: _Rest) -> Call:
    """The call of ``_arguments``, for hidden states or logits ``like``, ready to run."""
    labels, temperatures, omega = tensors
    temperature = rest.temperature if temperatures is None else temperatures
    call = Call(
        labels=labels,
        rows=None,
        transform=LogitTransform(None, rest.scale, rest.softcap, temperature),
        wanted=frozenset(rest.wanted.split(",")),
        ignore_index=rest.ignore_index,
        backend=choose_backend(rest.backend, like.device, like.dtype).name,
        workspace_bytes=rest.workspace_bytes,
        omega=omega,
    )
    if host_read.capturing() or (labels.is_cuda and not rest.masked):
        return call
    return packed(call, labels != rest.ignore_index)


def _checked(call: Call, validate: str) -> Call:
    if not host_read.capturing():
        validation.check_arrived()
        if isinstance(call.transform.temperature, Tensor) and validate != "off":
            validation.check_temperatures(call.transform.temperature)
    return call


def _results(statistics: RowStatistics, call: Call, validate: str, count: int, vocab: int) -> tuple[Tensor, ...]:
    stats = CallStats(*(getattr(statistics, name) if name in call.wanted else None for name in CallStats._fields))
    validation.check_labels(call, vocab, validate, stats)
    found = (statistics.shift, statistics.norm, *stats)
    empty = statistics.norm.new_empty(0)
    return tuple(empty.clone() if x is None else unpack(x, call.rows, count) for x in found)


def _nothing(like: Tensor) -> RowStatistics:
    """The statistics of no rows. (What an op returns must not be one tensor twice.)"""
    wide = accumulator_dtype(like.dtype)
    dtypes = (torch.int64 if name == "argmax" else wide for name in RowStatistics._fields)
    return RowStatistics(*(like.new_empty(0, dtype=dtype) for dtype in dtypes))


def _fake_results(like: Tensor, rest: _Rest) -> tuple[Tensor, ...]:
    there, wide = rest.there, accumulator_dtype(like.dtype)

    def result(name: str) -> Tensor:
        if name not in there:
            return like.new_empty(0, dtype=wide)
        return like.new_empty(like.shape[0], dtype=torch.int64 if name == "argmax" else wide)

    return tuple(result(name) for name in _FORWARD_FIELDS)


def _remember(ctx: Any, tensors: tuple, rest: _Rest, output: tuple[Tensor, ...]) -> None:
    named = dict(zip(_FORWARD_FIELDS, output, strict=True))
    there = rest.there
    ctx.save_for_backward(*tensors, *(named[name] if name in there else None for name in _STATISTICS))
    ctx.rest = rest
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[0], output[1], output[-1])


def _wanted_gradients(rest: _Rest, upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Of what a forward has returned: those of ``CallStats`` but argmax, None for what was empty."""
    there = rest.there
    return [x if name in there else None for name, x in zip(CallStats._fields[:-1], upstream[2:-1], strict=True)]


def _statistics(call: Call, parts: tuple[Tensor | None, ...]) -> RowStatistics:
    """Of the call's rows, from those of all tokens."""
    named: dict[str, Any] = dict.fromkeys(RowStatistics._fields) | dict(zip(_STATISTICS, parts, strict=True))
    statistics = RowStatistics(**named)
    return statistics if call.rows is None else of_rows(statistics, call.rows)


@torch.library.custom_op(
    "rlhf_losses::linear_statistics",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, {_TENSORS}, {_REST}) -> {_FORWARD}",
)
def _linear_forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    rest = _Rest(*arguments[3:])
    call = _checked(_call(hidden, arguments[:3], rest), rest.validate)
    statistics = linear_rows(hidden, weight, bias, call)[0] if len(call.labels) else _nothing(hidden)
    return _results(statistics, call, rest.validate, len(hidden), len(weight))


@_linear_forward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    return _fake_results(hidden, _Rest(*arguments[3:]))


@torch.library.custom_op(
    "rlhf_losses::linear_statistics_backward",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, {_TENSORS}, {_BACKWARD}, bool[] needs, {_REST}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _linear_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    tensors, statistics, upstream, needs, rest = _split(arguments)
    call = _call(hidden, tensors, rest)
    found = linear_gradients(
        hidden, weight, bias, call, _statistics(call, statistics), None, (*upstream, None), tuple(needs)
    )
    return tuple(hidden.new_empty(0) if x is None else x.contiguous() for x in found)


def _split(arguments: tuple) -> tuple:
    """Of a backward: the call's tensors, statistics, upstream gradients, what is needed, the call's rest."""
    return arguments[:3], arguments[3:8], arguments[8:13], arguments[13], _Rest(*arguments[14:])


@_linear_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    given = (x if need else None for x, need in zip((hidden, weight, bias), arguments[13], strict=True))
    return tuple(hidden.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _linear_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _remember(ctx, inputs[:6], _Rest(*inputs[6:]), output)


def _linear_autograd(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    found = _linear_backward(*ctx.saved_tensors, *_wanted_gradients(ctx.rest, upstream), needs, *ctx.rest)
    return *(x if need else None for x, need in zip(found, needs, strict=True)), *[None] * (3 + len(ctx.rest))


_linear_forward.register_autograd(_linear_autograd, setup_context=_linear_setup)


@torch.library.custom_op(
    "rlhf_losses::logits_statistics",
    mutates_args=(),
    schema=f"(Tensor logits, {_TENSORS}, {_REST}) -> {_FORWARD}",
)
def _logits_forward(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    rest = _Rest(*arguments[3:])
    call = _checked(_call(logits, arguments[:3], rest), rest.validate)
    statistics = logits_rows(logits, call) if len(call.labels) else _nothing(logits)
    return _results(statistics, call, rest.validate, len(logits), logits.shape[1])


@_logits_forward.register_fake
def _(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _fake_results(logits, _Rest(*arguments[3:]))


@torch.library.custom_op(
    "rlhf_losses::logits_statistics_backward",
    mutates_args=(),
    schema=f"(Tensor logits, {_TENSORS}, {_BACKWARD}, {_REST}) -> Tensor",
)
def _logits_backward(logits: Tensor, *arguments: Any) -> Tensor:
    tensors, statistics, upstream, rest = arguments[:3], arguments[3:8], arguments[8:13], _Rest(*arguments[13:])
    call = _call(logits, tensors, rest)
    return logits_gradient(logits, call, _statistics(call, statistics), (*upstream, None), in_place=False)


@_logits_backward.register_fake
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits)


def _logits_setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _remember(ctx, inputs[:4], _Rest(*inputs[4:]), output)


def _logits_autograd(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    d_logits = _logits_backward(*ctx.saved_tensors, *_wanted_gradients(ctx.rest, upstream), *ctx.rest)
    return d_logits, *[None] * (3 + len(ctx.rest))


_logits_forward.register_autograd(_logits_autograd, setup_context=_logits_setup)


def _stats(call: TracedCall, results: tuple[Tensor, ...]) -> CallStats:
    return CallStats(
        *(x if name in call.wanted else None for name, x in zip(CallStats._fields, results[2:], strict=True))
    )


def linear_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: TracedCall) -> CallStats:
    """hidden [N, H], weight [V, H], bias [V] or None -> the statistics wanted, [N]."""
    tensors, rest = _arguments(call)
    return _stats(call, _linear_forward(hidden, weight, bias, *tensors, *rest))


def logits_statistics(logits: Tensor, call: TracedCall) -> CallStats:
    """logits [N, V] -> the statistics wanted, [N]."""
    tensors, rest = _arguments(call)
    return _stats(call, _logits_forward(logits, *tensors, *rest))
