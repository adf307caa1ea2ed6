"""Which back end serves a call, and why. ``auto`` never takes one that holds [N, V]."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from rlhf_losses.kernels.tiles import DeviceLimits, pick_tile

BACKENDS = ("auto", "triton", "chunked", "reference")


class BackendChoice(NamedTuple):
    """``name`` is "triton", "chunked" or "reference"; ``reason`` says in words why."""

    name: str
    reason: str


def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1): for tests, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        # What the interpreter imitates: sm_90's limits, on few multiprocessors.
        return DeviceLimits("cuda", 90, 232448, 4)
    from triton.runtime.driver import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceLimits(
        vendor="cuda" if torch.version.hip is None else "hip",
        capability=major * 10 + minor,
        shared_memory=properties["max_shared_mem"],
        multiprocessors=properties["multiprocessor_count"],
    )


def free_bytes(device: torch.device) -> int:
    """Memory that a call could take: the device's that nobody holds, and what torch's allocator holds in vain."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_NOT_INSTALLED = "triton is not installed"


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason that the Triton kernels can't serve this call, or None."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the Triton kernels take fp16, bf16 and fp32, not {dtype}"
    if device.type != "cuda" and not interpreting():
        # Before the search for a package, which every call on a CPU would make.
        return f"tensors are on {device.type}, the Triton kernels need a GPU"
    if not triton_installed():
        return _NOT_INSTALLED
    if device.type != "cuda":
        return "Triton's interpreter multiplies the bits of bf16" if dtype == torch.bfloat16 else None
    limits = device_limits(device)
    if limits.vendor == "cuda" and limits.capability < 80:
        return f"the Triton kernels need compute capability 8.0, this device has {limits.capability / 10}"
    if pick_tile(limits, dtype.itemsize) is None:
        return f"no tile fits the {limits.shared_memory} bytes of shared memory of this device"
    return None


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> BackendChoice:
    """Raises ValueError for an unknown name, ImportError or ValueError where ``triton`` is asked for in vain."""
    if requested not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {requested!r}")
    if requested in ("chunked", "reference"):
        return BackendChoice(requested, "asked for")
    why_not = _why_not_triton(device, dtype)
    if requested == "auto":
        if why_not is None and not (interpreting() and device.type != "cuda"):
            return BackendChoice("triton", f"a GPU with Triton ({device})")
        return BackendChoice("chunked", why_not or "the interpreter is for tests, and only on request")
    if why_not is None:
        return BackendChoice("triton", "asked for")
    if why_not == _NOT_INSTALLED:
        raise ImportError(
            "backend='triton': triton is not installed; install it (pip install 'rlhf-losses[triton]') or pass "
            "backend='chunked'"
        )
    raise ValueError(f"backend='triton': {why_not}; pass backend='chunked' or 'auto'")


class Operations(NamedTuple):
    """The functions that a back end is."""

    linear_forward: Callable
    linear_prepare: Callable
    linear_backward: Callable
    logits_forward: Callable
    logits_backward: Callable
    kept_row_bytes: Callable
    kept_gradient: Callable
    scale_to: Callable


@functools.cache
def operations(backend: str) -> Operations:
    """The functions of "chunked" or "triton"; Triton is imported here, on first use."""
    if backend == "triton":
        from rlhf_losses.kernels import triton_backward, triton_forward, triton_kept, triton_logits, triton_scale

        backward, logits, kept = ((module,) * 2 for module in (triton_backward, triton_logits, triton_kept))
        modules: tuple = (triton_forward, *backward, *logits, *kept, triton_scale)
    else:
        from rlhf_losses.kernels import chunked

        modules = (chunked,) * len(Operations._fields)
    return Operations(*(getattr(module, name) for module, name in zip(modules, Operations._fields, strict=True)))
