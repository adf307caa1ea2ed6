"""The tile code that the Triton kernels share: operand loads, the product, the logit transform, program order.

N tokens, V vocabulary, H hidden size; BN, BV, BH the tile's sides. Row offsets are int64: N * V passes 2^31 early.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.backends import device_limits
from rlhf_losses.kernels.tiles import DeviceLimits, Tile, has_descriptors, pick_tile
from rlhf_losses.kernels.transform import LogitTransform


class Transform(NamedTuple):
    """``LogitTransform`` for a kernel: a part that is None vanishes at compile time, a value compiles nothing anew."""

    bias: Tensor | None  # [V]
    scale: float | None
    softcap: float | None
    inverse_temperature: float | None
    inverse_temperatures: Tensor | None  # [N] fp32

    @classmethod
    def of(cls, transform: LogitTransform) -> "Transform":
        per_token = isinstance(transform.temperature, Tensor)
        return cls(
            bias=transform.bias,
            scale=None if transform.scale is None else float(transform.scale),
            softcap=None if transform.softcap is None else float(transform.softcap),
            inverse_temperature=None if per_token or transform.temperature == 1 else 1.0 / transform.temperature,
            inverse_temperatures=transform.temperature.float().reciprocal().contiguous() if per_token else None,
        )


@triton.jit
def transform_tile(a, transform, n, v, N, V):
    """z and dz/da of raw products a [BN, BV], n [BN] and v [BV] their rows and columns."""
    z = a
    slope = tl.full(a.shape, 1.0, tl.float32)
    if transform.bias is not None:
        z = z + tl.load(transform.bias + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    if transform.scale is not None:
        z = z * transform.scale
        slope = slope * transform.scale
    if transform.softcap is not None:
        # With e = exp(-2|x|): tanh = (1 - e) / (1 + e), and 1 - tanh^2 = 4e / (1 + e)^2 without cancellation.
        x = z / transform.softcap
        e = tl.exp(-2.0 * tl.abs(x))
        r = 1.0 / (1.0 + e)
        z = tl.where(x < 0, -transform.softcap, transform.softcap) * (1.0 - e) * r
        slope = slope * (4.0 * e * r * r)
    if transform.inverse_temperature is not None:
        z = z * transform.inverse_temperature
        slope = slope * transform.inverse_temperature
    if transform.inverse_temperatures is not None:
        inverse = tl.load(transform.inverse_temperatures + n, mask=n < N, other=1.0)[:, None]
        z = z * inverse
        slope = slope * inverse
    return z, slope


@triton.jit
def product_tile(
    hidden,  # [N, H] pointer or descriptor with blocks [BN, BH]
    weight,  # [V, H] pointer or descriptor with blocks [BV, BH]
    stride_n,
    stride_v,
    n0,
    v0,
    N,
    V,
    H: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a [BN, BV] = hidden[n0:, :] @ weight[v0:, :].T in fp32; 0 outside of the matrices."""
    acc = tl.zeros([BN, BV], tl.float32)
    if DESCRIPTORS:
        for h0 in range(0, H, BH):
            b_hidden = hidden.load([n0, h0])
            b_weight = weight.load([v0, h0])
            # [BN, BH] @ [BH, BV]
            acc = tl.dot(b_hidden, b_weight.T, acc, input_precision=PRECISION)
    else:
        n = n0 + tl.arange(0, BN)
        v = v0 + tl.arange(0, BV)
        h = tl.arange(0, BH)
        p_hidden = hidden + n.to(tl.int64)[:, None] * stride_n + h[None, :]
        p_weight = weight + v.to(tl.int64)[:, None] * stride_v + h[None, :]
        for h0 in range(0, H, BH):
            inside = (h0 + h < H)[None, :]
            b_hidden = tl.load(p_hidden, mask=(n < N)[:, None] & inside, other=0.0)
            b_weight = tl.load(p_weight, mask=(v < V)[:, None] & inside, other=0.0)
            # [BN, BH] @ [BH, BV]
            acc = tl.dot(b_hidden, b_weight.T, acc, input_precision=PRECISION)
            p_hidden += BH
            p_weight += BH
    return acc


@triton.jit
def label_columns(labels, n, N, V):
    """[BN] int32 columns of the labels of rows n; -1 where the label is no column, or the row no row."""
    label = tl.load(labels + n, mask=n < N, other=-1)
    return tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)


@triton.jit
def grouped(item, row_blocks, columns, GROUP: tl.constexpr):
    """(row block, column) number ``item``: GROUP row blocks run through all columns before the next GROUP begins.

    Programs that run at the same time then share a few stretches of the weight and GROUP blocks of hidden rows in L2.
    """
    first = item // (GROUP * columns) * GROUP
    size = min(row_blocks - first, GROUP)
    rest = item % (GROUP * columns)
    return first + rest % size, rest // size


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def launch_context(device: torch.device):
    """Kernels launch on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _fits_descriptors(*matrices: Tensor) -> bool:
    """A descriptor wants a 16-byte aligned start and rows that are a multiple of 16 bytes apart."""
    return all(
        matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0 for matrix in matrices
    )


@dataclass(frozen=True)
class Problem:
    """hidden [N, H] and weight [V, H] made ready for ``product_tile``: descriptors or pointers, tile and constants."""

    hidden: Any
    weight: Any
    transform: Transform
    stride_n: int
    stride_v: int
    tile: Tile
    limits: DeviceLimits
    rows: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, transform: LogitTransform) -> "Problem":
        limits = device_limits(hidden.device)
        tile = pick_tile(limits, hidden.element_size())
        assert tile is not None  # choose_backend has asked
        rows, depth = hidden.shape
        # TF32's 10 bits would show in every log-probability of an fp32 model.
        precision = "ieee" if hidden.dtype == torch.float32 else "tf32"
        hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
        stride_n, stride_v = hidden.stride(0), weight.stride(0)
        descriptors = (
            has_descriptors(limits)
            and find_spec("triton.tools.tensor_descriptor") is not None  # from Triton 3.4
            and _fits_descriptors(hidden, weight)
        )
        if descriptors:
            # Made on the host, so no allocator of Triton's is touched.
            from triton.tools.tensor_descriptor import TensorDescriptor

            hidden = TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth])
            weight = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth])
        return cls(
            hidden=hidden,
            weight=weight,
            transform=Transform.of(transform),
            stride_n=stride_n,
            stride_v=stride_v,
            tile=tile,
            limits=limits,
            rows=rows,
            constants={
                "H": depth,
                "BN": tile.rows,
                "BV": tile.columns,
                "BH": tile.depth,
                "GROUP": tile.row_group,
                "DESCRIPTORS": descriptors,
                "PRECISION": precision,
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            },
        )

    def programs(self, columns: int) -> int:
        """One program per multiprocessor, or per item of row blocks x columns where those are fewer."""
        return min(self.limits.multiprocessors, cdiv(self.rows, self.tile.rows) * columns)

    def result(self, matrix: Tensor) -> Any:
        """An [N, C] output of tiles [BN, BV] in the form that the operands have."""
        if not self.constants["DESCRIPTORS"]:
            return matrix
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(matrix, [self.tile.rows, self.tile.columns])
