"""A number on its way from the device to the host, asked for early and waited for late; who may not ask."""

import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def capturing() -> bool:
    """Whether launches go to a CUDA graph: then nothing runs yet, and nobody may wait for it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def undivided(function: Callable) -> Callable:
    """``function`` run as it is where a graph breaks around it: torch.compile would go on with the pieces inside.

    It breaks where a call asks for what no compiled code can have: the host's answers.
    """

    left_alone: Callable | None = None

    @functools.wraps(function)
    def call(*args):
        nonlocal left_alone
        # Dynamo takes a second to import: where nobody has, nobody compiles.
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if left_alone is None:
            left_alone = torch.compiler.disable(function)
        return left_alone(*args)

    return call


class _Slot(NamedTuple):
    """Where a number lands: pinned memory, and the event behind its copy. Both cost more to make than to use."""

    number: Tensor
    landed: torch.cuda.Event


# Free ones, by the device that copies and the type. (A deque's own methods are safe from any thread.)
_free: defaultdict[tuple[torch.device, torch.dtype], deque[_Slot]] = defaultdict(deque)


def _slot(device: torch.device, dtype: torch.dtype) -> _Slot:
    try:
        return _free[device, dtype].pop()
    except IndexError:
        return _Slot(torch.empty((), dtype=dtype, pin_memory=True), torch.cuda.Event())


class HostRead:
    """Copies a scalar to the host behind what has been launched so far; what is launched later does not delay it.

    ``.item()`` waits for everything launched before it; this waits for its own copy alone.
    """

    @undivided
    def __init__(self, scalar: Tensor) -> None:
        self._slot: _Slot | None = None
        self._value: int | float | bool = 0
        if scalar.is_cuda:
            self._key = (scalar.device, scalar.dtype)
            # One that nobody waits for is not used again: its copy might still be on its way.
            self._slot = _slot(*self._key)
            self._slot.number.copy_(scalar, non_blocking=True)
            self._slot.landed.record(torch.cuda.current_stream(scalar.device))
        else:
            self._value = scalar.item()

    @undivided
    def arrived(self) -> bool:
        return self._slot is None or self._slot.landed.query()

    @undivided
    def wait(self) -> int | float | bool:
        """The number, on the host."""
        if self._slot is not None:
            self._slot.landed.synchronize()
            self._value = self._slot.number.item()
            _free[self._key].append(self._slot)
            self._slot = None
        return self._value
