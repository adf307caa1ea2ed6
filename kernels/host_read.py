"""A number on its way from the device to the host, asked for early and waited for late."""

import torch
from torch import Tensor


def capturing() -> bool:
    """Whether launches go to a CUDA graph: then nothing runs yet, and nobody may wait for it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class HostRead:
    """Copies a small tensor to the host behind what has been launched so far; what is launched later does not delay it.

    ``.item()`` and ``.tolist()`` wait for everything launched before them; this waits for its own copy alone.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = tensor.detach()
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The tensor, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
