"""The one map from the raw product of hidden state and head to the logit the distribution is over.

    a = <hidden_n, weight_v>        z = f(a):  + bias  ->  * scale  ->  cap * tanh(. / cap)  ->  / temperature

Every step is optional. ``LogitTransform.apply`` is the torch form, used by the reference and the chunked back end;
``triton_tile.transform_tile`` is the Triton form. A new logit feature is a line in each of the two and a row in
``tests/cases.py``; one that changes dz/da has a line in ``triton_tile.slope_tile``, too, which takes it from z.
"""

from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

# Of smaller numbers the reciprocal overflows fp32.
_SMALLEST = 2.0**-126


def _representable(number: object) -> bool:
    """A real number, no bool, that is finite as fp32 too."""
    return isinstance(number, Real) and not isinstance(number, bool) and abs(float(number)) <= 3.4e38


def usable_temperatures(temperature: Tensor) -> Tensor:
    """[N] bool: which entries ``LogitTransform`` would take as numbers."""
    return (temperature >= _SMALLEST) & (temperature <= 3.4e38)


@dataclass(frozen=True)
class LogitTransform:
    """z = cap * tanh(scale * (a + bias) / cap) / temperature, each part optional; checks itself.

    bias         [V] tensor, added to the raw product (``lm_head.bias``).
    scale        finite number that multiplies (Cohere's ``logit_scale``; Granite divides: pass 1 / logits_scaling).
    softcap      positive number (Gemma 2's ``final_logit_softcapping``).
    temperature  positive number, or a tensor with one positive entry per token, [N].

    Raises ValueError for what is no finite number of fp32, and for a softcap or temperature <= 0. The entries of a
    temperature tensor are checked where the call is validated, since reading them may wait for the device.
    """

    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if self.scale is not None and not _representable(self.scale):
            raise ValueError(f"logit_scale: expected a finite number, got {self.scale!r}")
        if self.softcap is not None and not (_representable(self.softcap) and self.softcap >= _SMALLEST):
            raise ValueError(
                f"softcap: expected a finite number > 0, got {self.softcap!r}; "
                "pass softcap=None for a head without a cap"
            )
        if isinstance(self.temperature, Tensor):
            return
        if not (_representable(self.temperature) and self.temperature >= _SMALLEST):
            got = float(self.temperature) if isinstance(self.temperature, Real) else repr(self.temperature)
            raise ValueError(
                f"temperature: expected a finite number > 0, got {got} (its reciprocal must be finite in fp32, too); "
                "greedy sampling (temperature 0) has no log-probabilities, pass the temperature of the policy to train"
            )

    def for_rows(self, rows: Tensor | slice | None) -> "LogitTransform":
        """The same transform for some of the tokens: an index tensor, a slice, or None for all of them."""
        if rows is None or not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[rows])

    def with_bias(self, bias: Tensor | None) -> "LogitTransform":
        return self if bias is self.bias else replace(self, bias=bias)

    def apply(self, a: Tensor) -> tuple[Tensor, Tensor | float]:
        """z and dz/da of raw products ``a`` [N, V]; dz/da is a number where it is the same for every entry."""
        z, slope = a, 1.0  # type: tuple[Tensor, Tensor | float]
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)
        if self.scale is not None:
            z, slope = z * self.scale, slope * self.scale
        if self.softcap is not None:
            capped = torch.tanh(z / self.softcap)
            # 1 - tanh^2 as a square of 1/cosh keeps its digits where tanh rounds to 1 (a hard-capped logit).
            z, slope = capped * self.softcap, torch.cosh(z / self.softcap).reciprocal().square() * slope
        if isinstance(self.temperature, Tensor):
            inverse = self.temperature.to(z.dtype).reciprocal()[:, None]
            z, slope = z * inverse, inverse * slope
        elif self.temperature != 1.0:
            z, slope = z / self.temperature, slope / self.temperature
        return z, slope
