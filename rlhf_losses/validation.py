"""Checks of what a caller passes, and the errors that wait for the next call (``validate="async"``)."""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_losses.kernels import host_read
from rlhf_losses.kernels.call import Call
from rlhf_losses.kernels.host_read import HostRead, undivided
from rlhf_losses.kernels.statistics import OUTPUTS, CallStats, has_column
from rlhf_losses.kernels.transform import usable_temperatures

VALIDATE = ("async", "sync", "off")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Findings:
    """A check of labels on its way to the host: ``read`` is NaN if one may be bad.

    Which one it is takes a dozen small steps, taken if it comes to that. Until then the labels are kept.
    """

    read: HostRead
    labels: Tensor
    rows: Tensor | None
    vocab: int
    ignore_index: int

    def message(self) -> str | None:
        if not math.isnan(self.read.wait()):
            return None
        bad = _bad(self.labels, self.vocab, self.ignore_index).nonzero().squeeze(1)
        if len(bad) == 0:
            # The NaN came with the hidden states or the head.
            return None
        at = int(bad[0] if self.rows is None else self.rows[bad[0]])
        return (
            f"labels: expected 0 <= label < {self.vocab} (the rows of the head) or ignore_index {self.ignore_index}, "
            f"got {int(self.labels[bad[0]])} at token {at} ({len(bad)} such of {len(self.labels)}); mask that token, "
            "or compare the tokenizer's vocabulary with the head's"
        )


_pending: deque[_Findings] = deque()
_lock = threading.Lock()


def check() -> None:
    """Raise what earlier calls with ``validate="async"`` found, if anything; then it is forgotten.

    Waits for the device to have reached the end of those calls' checks. Raises ValueError with a line per faulty call.
    """
    _raise_for(lambda call: True)


def check_arrived() -> None:
    """``check`` for the answers that are here: what a call does first, and it must not wait for the call before it."""
    _raise_for(lambda call: call.read.arrived())


def _raise_for(due: Callable[[_Findings], bool]) -> None:
    calls = []
    with _lock:
        while _pending and due(_pending[0]):
            calls.append(_pending.popleft())
    messages = [message for call in calls if (message := call.message()) is not None]
    if messages:
        raise ValueError("an earlier call got bad input, its tokens are NaN:\n" + "\n".join(messages))


def check_labels(call: Call, vocab: int, validate: str, found: CallStats) -> None:
    """The labels that count: raise for a bad one now ("sync"), at a later call ("async"), or never ("off").

    ``found`` are the call's statistics: NaN for every bad label, so that one sum of them asks for all.
    """
    labels, rows, ignore_index = call.labels, call.rows, call.ignore_index
    # A traced call is checked by its op; in a CUDA graph there is nobody to tell.
    if validate == "off" or call.traced or host_read.capturing() or len(labels) == 0:
        return
    numbers = next((x for x in found if x is not None and x.is_floating_point()), None)
    if numbers is None:
        numbers = torch.where(_bad(labels, vocab, ignore_index), torch.nan, 0.0)
    if validate == "async":
        # By the time that anybody asks, other labels may lie in the same memory.
        labels, rows = _on_host(labels), None if rows is None else _on_host(rows)
    findings = _Findings(HostRead(numbers.detach().sum()), labels, rows, vocab, ignore_index)
    if validate == "async":
        with _lock:
            _pending.append(findings)
    elif message := findings.message():
        raise ValueError(message)


@undivided
def _on_host(values: Tensor) -> Tensor:
    """A copy, arrived when a later ``HostRead`` has. (In a GPU's memory it might be held in the pool of a graph.)"""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values, non_blocking=True)


def _bad(labels: Tensor, vocab: int, ignore_index: int) -> Tensor:
    return (labels != ignore_index) & ~has_column(labels, vocab)


def require_plain(**tensors: Tensor | None) -> None:
    """Parameters that FSDP2 or DeepSpeed has taken apart must not reach a kernel."""
    for name, tensor in tensors.items():
        if tensor is not None:
            require_tensor(name, tensor)
            _require_plain(name, tensor)


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def require_data(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name}: expected a tensor with data, got one on the meta device; load the model's weights first "
            "(from_pretrained, or to_empty() and load_state_dict())"
        )


def _require_plain(name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor sharded over {tensor.device_mesh}; a gradient through "
            "full_tensor() would not be reduced over ranks. Call the op from the forward of the module that owns "
            f"the parameter, where FSDP2 has gathered it, or unshard() that module first and pass its {name}"
        )
    if tensor.numel() == 0 and hasattr(tensor, "ds_id"):
        raise ValueError(
            f"{name}: expected a gathered parameter, got a ZeRO-3 partition (ds_id {tensor.ds_id}, 0 elements); "
            f"wrap the call in deepspeed.zero.GatheredParameters([{name}])"
        )


def require_outputs(outputs: Sequence[str]) -> frozenset[str]:
    wanted = frozenset((outputs,) if isinstance(outputs, str) else outputs)
    if isinstance(outputs, str) or not wanted or not wanted <= set(OUTPUTS):
        raise ValueError(f"outputs: expected some of {OUTPUTS} in a tuple, got {outputs!r}")
    return wanted


def require_validate(validate: str) -> None:
    if validate not in VALIDATE:
        raise ValueError(f"validate: expected one of {', '.join(VALIDATE)}, got {validate!r}")


def require_cache_bytes(cache_bytes: int | str) -> int | str:
    number = isinstance(cache_bytes, int) and not isinstance(cache_bytes, bool) and cache_bytes >= 0
    if not number and cache_bytes != "auto":
        raise ValueError(f'cache_bytes: expected an integer >= 0 or "auto", got {cache_bytes!r}')
    return cache_bytes


def require_head(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Shapes, types and devices of hidden states [.., H], weight [V, H] and bias [V]."""
    if weight.dim() != 2 or hidden_states.dim() < 1 or hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden_states and weight: expected [..., H] and [V, H] with one H, got "
            f"{list(hidden_states.shape)} and {list(weight.shape)}"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight: expected a vocabulary and a hidden size of at least 1, got {list(weight.shape)}")
    if hidden_states.dtype not in DTYPES or hidden_states.dtype != weight.dtype:
        raise TypeError(
            "hidden_states and weight: expected one floating dtype, got "
            f"{hidden_states.dtype} and {weight.dtype}; cast one of them, or run under torch.autocast "
            "(fp16, bf16, fp32 and fp64 are served)"
        )
    _require_device("weight", weight, hidden_states)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {list(bias.shape)}")
        if not bias.is_floating_point():
            raise TypeError(f"bias: expected a floating dtype, got {bias.dtype}")
        _require_device("bias", bias, hidden_states)


def require_tokens(labels: Tensor, mask: Tensor | None, leading: torch.Size, beside: Tensor, name: str) -> None:
    """Labels and mask against the leading shape of the tensor they belong to."""
    require_tensor("labels", labels)
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(
            f"labels: expected an integer dtype, got {labels.dtype}; pass labels.long(), or, of probabilities, take "
            "torch's cross_entropy: they are not served"
        )
    if labels.shape != leading:
        raise ValueError(
            f"labels: expected shape {list(leading)}, that of {name} {list(beside.shape)} without its last dimension, "
            f"got {list(labels.shape)}"
        )
    _require_device("labels", labels, beside)
    if mask is not None:
        require_tensor("mask", mask)
        require_real_mask(mask)
        if mask.shape != labels.shape:
            raise ValueError(f"mask: expected shape {list(labels.shape)}, that of labels, got {list(mask.shape)}")
        _require_device("mask", mask, beside)


def require_real_mask(mask: Tensor) -> None:
    if mask.is_complex():
        raise TypeError(f"mask: expected a bool tensor, or 0 and 1 of a real dtype, got {mask.dtype}; pass mask != 0")


def per_token_temperature(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """A number as it is; a tensor spread to one value per token, [N].

    A tensor has the shape of labels, or their leading dimensions (one value per sequence), or broadcasts to labels.
    """
    if not isinstance(temperature, Tensor):
        return temperature
    if temperature.requires_grad:
        raise ValueError("temperature: expected a tensor without gradient, which none would reach; pass .detach()")
    if not temperature.is_floating_point() and temperature.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"temperature: expected a real dtype, got {temperature.dtype}")
    _require_device("temperature", temperature, labels)
    spread = temperature
    if spread.dim() < labels.dim() and spread.shape == labels.shape[: spread.dim()]:
        spread = spread.reshape(*spread.shape, *(1,) * (labels.dim() - spread.dim()))
    if spread.dim() != labels.dim() or any(
        have not in (1, want) for have, want in zip(spread.shape, labels.shape, strict=True)
    ):
        raise ValueError(
            f"temperature: expected a number, a tensor shaped like labels {list(labels.shape)}, or one value per "
            f"sequence {list(labels.shape[:1])}, got a tensor of shape {list(temperature.shape)}"
        )
    return spread.detach().expand(labels.shape).reshape(-1)


def check_temperatures(temperature: Tensor) -> None:
    """temperature [N]: one bad entry raises; waits for the device."""
    bad = ~usable_temperatures(temperature)
    if bad.any():
        at = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"temperature: expected finite numbers > 0, got {float(temperature[at])} at unmasked token {at}; "
            "pass the temperature that the policy is trained at"
        )


def _require_device(name: str, tensor: Tensor, beside: Tensor) -> None:
    if tensor.device != beside.device:
        raise ValueError(f"{name}: expected device {beside.device}, got {tensor.device}; move it with .to()")
