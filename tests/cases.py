"""Inputs shared by tests and benchmarks. A new logit feature is one row of ``FEATURES``."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """hidden [..., H], weight [V, H], labels [...], bias [V] or None, and the public function's other arguments."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same values in another type; what does not enter a product keeps its own."""
        return replace(
            self,
            hidden=self.hidden.to(dtype),
            weight=self.weight.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
        )

    def with_options(self, **options: Any) -> "Inputs":
        return replace(self, options=self.options | options)

    def upstream(self, names: tuple[str, ...], seed: int = 1) -> dict[str, Tensor]:
        """A gradient for each output named, none of them zero, of both signs, shaped like labels, fp32."""
        generator = torch.Generator().manual_seed(seed)
        draws = {name: torch.randn(self.labels.shape, generator=generator) for name in names}
        return {name: (x.sign() * (x.abs() + 0.1)).to(self.labels.device) for name, x in draws.items()}


def random_inputs(
    leading: tuple[int, ...], vocab: int, depth: int, device: torch.device, spread: float = 2.0, seed: int = 0
) -> Inputs:
    """Logits of standard deviation ``spread``, in fp32; the first and the last entry are among the labels."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, depth, generator=generator)
    weight = torch.randn(vocab, depth, generator=generator) * (spread / depth**0.5)
    labels = torch.randint(vocab, leading, generator=generator)
    if labels.numel() > 1:
        labels.view(-1)[0], labels.view(-1)[-1] = 0, vocab - 1
    return Inputs(hidden.to(device), weight.to(device), labels.to(device))


def _positive(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    return 0.6 + 0.7 * torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(device)


def _bias(inputs: Inputs) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(inputs.weight), generator=generator).to(inputs.weight)


# Each row takes random inputs with labels [B, T] and gives the same with one logit feature.
FEATURES: dict[str, Callable[[Inputs], Inputs]] = {
    "none": lambda x: x,
    "bias": lambda x: replace(x, bias=_bias(x)),
    "scale": lambda x: x.with_options(logit_scale=0.125),
    "softcap": lambda x: x.with_options(softcap=3.0),
    "temperature": lambda x: x.with_options(temperature=0.7),
    "temperature-per-token": lambda x: x.with_options(temperature=_positive(x.labels.shape, x.labels.device)),
    "temperature-per-sequence": lambda x: x.with_options(temperature=_positive(x.labels.shape[:1], x.labels.device)),
    "all": lambda x: replace(
        x,
        bias=_bias(x),
        options={
            "logit_scale": 1.5,
            "softcap": 3.0,
            "temperature": _positive(x.labels.shape, x.labels.device),
        },
    ),
}
