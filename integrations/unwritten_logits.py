"""What a model's head returns in its place while it trains: logits that are described, not computed.

A transformers model writes its logits, scales or caps them, shifts and masks them against the labels, and hands them to
``torch.nn.functional.cross_entropy``. ``UnwrittenLogits`` goes the same way through the model's own code: it keeps the
hidden states, takes the rows that the model takes, notes scale and softcap, and computes a loss at the end. So the
shift of the labels, the normalisation and every loss that the model adds to that of its head stay the model's own.

What it can't follow is refused by name.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# hidden states [..., H], labels [...], scale and softcap as ``linear_log_probs`` takes them, arguments of cross_entropy
LossFunction = Callable[[Tensor, Tensor, dict[str, float], dict[str, Any]], Tensor]


class Unfollowed(ValueError):
    """The model does something to its logits that can't be done to hidden states."""


class _NoSuchAttribute(Unfollowed, AttributeError):
    """What ``hasattr`` asks for as well."""


class UnwrittenLogits:
    """Logits [..., V] of ``hidden_states`` [..., H], for which ``loss`` computes the cross entropy.

    ``sample`` holds the real logits of some tokens, and sees what is done to each logit: scale, cap, type.
    """

    def __init__(self, hidden_states: Tensor, vocab: int, loss: LossFunction, sample: Tensor | None = None):
        self._hidden, self._vocab, self._loss = hidden_states, vocab, loss
        self.sample = sample
        # z = factor / divisor * a, and where there is a cap, z = cap * tanh(factor / divisor * a)
        self._factor, self._divisor, self._cap = 1.0, 1.0, None

    def transform(self) -> dict[str, float]:
        """Scale and softcap so far, as arguments of ``linear_log_probs``."""
        scale = self._factor * (1.0 if self._cap is None else self._cap) / self._divisor
        found = {} if self._cap is None else {"softcap": self._cap}
        return found | ({} if scale == 1.0 else {"logit_scale": scale})

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._vocab))

    @property
    def dtype(self) -> torch.dtype:
        return self._hidden.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    def dim(self) -> int:
        return self._hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        raise _NoSuchAttribute(
            f"logits.{name} is asked for: expected a scale, a cap, some rows or the cross entropy of logits that are "
            "not written"
        )

    def _with(self, hidden_states: Tensor | None = None, each: Callable[[Tensor], Tensor] | None = None):
        """The same description of other rows, or with something done to each logit."""
        new = UnwrittenLogits(self._hidden if hidden_states is None else hidden_states, self._vocab, self._loss)
        new.sample = self.sample if each is None or self.sample is None else each(self.sample)
        new._factor, new._divisor, new._cap = self._factor, self._divisor, self._cap
        return new

    # What leaves every logit where it is. The loss is computed from fp32 products, whatever type is asked for.

    def float(self):
        return self._with(each=lambda z: z.float())

    def to(self, *args: Any, **kwargs: Any):
        return self._with(each=lambda z: z.to(*args, **kwargs))

    def contiguous(self):
        return self

    # Rows.

    def __getitem__(self, index: Any):
        parts = index if isinstance(index, tuple) else (index,)
        used = sum(x.ndim if isinstance(x, Tensor) and x.dtype == torch.bool else 1 for x in parts if x is not None)
        has_rest = any(x is Ellipsis for x in parts)
        if (has_rest and parts[-1] is not Ellipsis) or used == self.ndim:
            last = parts[-1]
            if not (isinstance(last, slice) and last == slice(None)):
                raise Unfollowed(f"logits[{index}] takes a part of the vocabulary")
        return self._with(self._hidden[index])

    def view(self, *shape: Any):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        rest = shape[:-1]
        # -1 may stand for the vocabulary: where the other sides hold all tokens.
        whole = shape[-1] == -1 and -1 not in rest and math.prod(rest) == self._hidden.shape[:-1].numel()
        if shape[-1] != self._vocab and not whole:
            raise Unfollowed(f"logits.view{shape} of logits {list(self.shape)} breaks the vocabulary up")
        return self._with(self._hidden.reshape(*rest, self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1):
        if end_dim % self.ndim == self.ndim - 1:
            raise Unfollowed(f"logits.flatten({start_dim}, {end_dim}) breaks the vocabulary up")
        return self._with(self._hidden.flatten(start_dim, end_dim))

    # Scale and cap.

    def _scaled(self, by: Any, each: Callable[[Tensor], Tensor], divide: bool = False):
        if isinstance(by, bool) or not isinstance(by, (int, float)):
            raise Unfollowed(f"the logits are scaled by a {type(by).__name__}, not by a number")
        new = self._with(each=each)
        if new._cap is not None:
            new._cap = new._cap / by if divide else new._cap * by
        elif divide:
            new._divisor *= by
        else:
            new._factor *= by
        return new

    def __mul__(self, by: Any):
        return self._scaled(by, lambda z: z * by)

    __rmul__ = __mul__

    def __truediv__(self, by: Any):
        return self._scaled(by, lambda z: z / by, divide=True)

    def tanh(self):
        if self._cap is not None:
            raise Unfollowed("the logits are capped twice")
        new = self._with(each=torch.tanh)
        new._cap = 1.0
        return new

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls):
            if func is F.cross_entropy:
                return args[0]._cross_entropy(*args[1:], **kwargs)
            if func in (torch.tanh, Tensor.tanh):
                return args[0].tanh()
            if func is torch.flatten:
                return args[0].flatten(*args[1:], **kwargs)
        raise Unfollowed(f"{getattr(func, '__name__', func)}() is called on the logits")

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        if size_average is not None or reduce is not None:
            raise Unfollowed("cross_entropy() is called with size_average or reduce, which torch has deprecated")
        if target.is_floating_point():
            raise Unfollowed("cross_entropy() is called with probabilities as its target")
        settings = {"ignore_index": ignore_index, "reduction": reduction}
        settings |= {"class_weight": weight, "label_smoothing": label_smoothing}
        return self._loss(self._hidden, target, self.transform(), self.sample, settings)
