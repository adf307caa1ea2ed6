"""A call made ready for the Triton kernels: operands as descriptors or pointers, tile, constants, which kernel."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rlhf_losses.kernels.backends import device_limits, interpreting
from rlhf_losses.kernels.gemm import with_separate_rows
from rlhf_losses.kernels.tiles import OVERLAP_TILES, DeviceLimits, Tile, has_descriptors, pick_tile
from rlhf_losses.kernels.transform import LogitTransform

# Gluon is experimental: the Hopper kernels run with the versions of Triton that they have been run with.
_OVERLAP_TRITON = ("3.6.",)
_TRITON_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


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
            bias=None if transform.bias is None else transform.bias.contiguous(),
            scale=None if transform.scale is None else float(transform.scale),
            softcap=None if transform.softcap is None else float(transform.softcap),
            inverse_temperature=None if per_token or transform.temperature == 1 else 1.0 / transform.temperature,
            inverse_temperatures=transform.temperature.float().reciprocal().contiguous() if per_token else None,
        )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def tile_of(operand: Tensor) -> Tile:
    """What the kernels compute such operands' products with."""
    tile = pick_tile(device_limits(operand.device), operand.element_size())
    assert tile is not None  # choose_backend has asked
    return tile


def launch_context(device: torch.device):
    """Kernels launch on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _fits_descriptors(*matrices: Tensor) -> bool:
    """A descriptor wants a 16-byte aligned start and rows that are a multiple of 16 bytes apart."""
    return all(
        matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0 for matrix in matrices
    )


def has_overlapped_kernels(limits: DeviceLimits) -> bool:
    """Whether the Hopper kernels serve this device."""
    known = triton.__version__.startswith(_OVERLAP_TRITON)
    return known and limits.vendor == "cuda" and limits.capability == 90 and not interpreting()


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
    descriptors: bool
    overlapped: bool
    constants: dict[str, Any]

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, transform: LogitTransform) -> "Problem":
        limits, tile = device_limits(hidden.device), tile_of(hidden)
        rows, depth = hidden.shape
        hidden, weight = with_separate_rows(hidden), with_separate_rows(weight)
        stride_n, stride_v = hidden.stride(0), weight.stride(0)
        descriptors = (
            has_descriptors(limits)
            and find_spec("triton.tools.tensor_descriptor") is not None  # from Triton 3.4
            and _fits_descriptors(hidden, weight)
        )
        overlapped = descriptors and tile in OVERLAP_TILES and has_overlapped_kernels(limits)
        constants = {"H": depth, "BN": tile.rows, "BV": tile.columns, "BH": tile.depth, "GROUP": tile.row_group}
        if not overlapped:
            # TF32's 10 bits, or an exponential to 2 ulp, would be the largest error of an fp32 model.
            exact = hidden.dtype == torch.float32
            constants |= {
                "DESCRIPTORS": descriptors,
                "PRECISION": "ieee" if exact else "tf32",
                "EXACT": exact,
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            }
        problem = cls(
            hidden=hidden,
            weight=weight,
            transform=Transform.of(transform),
            stride_n=stride_n,
            stride_v=stride_v,
            tile=tile,
            limits=limits,
            rows=rows,
            descriptors=descriptors,
            overlapped=overlapped,
            constants=constants,
        )
        return replace(
            problem,
            hidden=problem.blocks(hidden, tile.rows, tile.depth),
            # Each half of a block has its own columns.
            weight=problem.blocks(weight, tile.columns // (2 if overlapped else 1), tile.depth),
        )

    def blocks(self, matrix: Tensor, rows: int, columns: int) -> Any:
        """``matrix`` as the kernel takes it: a descriptor with such blocks, or the tensor itself.

        Descriptors are made on the host, so that no allocator of Triton's is touched.
        """
        if not self.descriptors:
            return matrix
        if self.overlapped:
            from triton.experimental.gluon.language import NVMMASharedLayout
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            kind = getattr(triton.language, _TRITON_DTYPES[matrix.dtype])
            layout = NVMMASharedLayout.get_default_for([rows, columns], kind)
            return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(matrix, [rows, columns])

    def result_blocks(self, matrix: Tensor) -> Any:
        """``matrix`` [N, C] as the kernels write it: by tiles, or quarters, two for each half of a block."""
        rows, columns = (2, 4) if self.overlapped else (1, 1)
        return self.blocks(matrix, self.tile.rows // rows, self.tile.columns // columns)

    def programs(self, columns: int) -> int:
        """One program per multiprocessor, or per item of row blocks x columns where those are fewer."""
        return min(self.limits.multiprocessors, cdiv(self.rows, self.tile.rows) * columns)
