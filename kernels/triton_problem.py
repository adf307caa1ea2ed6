"""A call made ready for the Triton kernels: operands as descriptors or pointers, tile, constants, which kernel."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
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
# An error of 2^-22 of it is 1.5e-5, that of a product of 16 bits and a few thousand terms.
_ROUGH_CAP = 64
_TRITON_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Transform(NamedTuple):
    """``LogitTransform`` for a kernel: a part that is None vanishes at compile time, a value compiles nothing anew.

    softcap_rate  2 log2(e) / softcap, None where a logit must not be off by 2^-22 of the cap
    """

    bias: Tensor | None  # [V]
    scale: float | None
    softcap: float | None
    softcap_rate: float | None
    inverse_temperature: float | None
    inverse_temperatures: Tensor | None  # [N] fp32

    @classmethod
    def of(cls, transform: LogitTransform, dtype: torch.dtype = torch.float32) -> "Transform":
        """``dtype``: of the operands whose products are transformed. With 16 bits those have an error of their own."""
        cap = transform.softcap
        rough = cap is not None and cap <= _ROUGH_CAP and dtype.itemsize == 2
        per_token = isinstance(transform.temperature, Tensor)
        return cls(
            bias=None if transform.bias is None else transform.bias.contiguous(),
            scale=None if transform.scale is None else float(transform.scale),
            softcap=None if cap is None else float(cap),
            softcap_rate=2 * math.log2(math.e) / cap if rough else None,
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
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def _fits_descriptors(*matrices: Tensor) -> bool:
    """A descriptor wants a 16-byte aligned start and rows that are a multiple of 16 bytes apart."""
    return all(
        matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0 for matrix in matrices
    )


def has_overlapped_kernels(limits: DeviceLimits) -> bool:
    """Whether the Hopper kernels serve this device."""
    known = triton.__version__.startswith(_OVERLAP_TRITON)
    return known and limits.vendor == "cuda" and limits.capability == 90 and not interpreting()


class OverlappedKernels(NamedTuple):
    """The Hopper kernels, and the options that they start with."""

    statistics: Any
    product_gradient: Any
    options: dict[str, int]


@functools.cache
def overlapped_kernels() -> OverlappedKernels:
    """Imported where they are used alone."""
    from rlhf_losses.kernels.hopper_gradient import product_gradient_kernel
    from rlhf_losses.kernels.hopper_statistics import statistics_kernel
    from rlhf_losses.kernels.hopper_tile import OPTIONS

    return OverlappedKernels(statistics_kernel, product_gradient_kernel, OPTIONS)


@functools.cache
def _triton_has_descriptors() -> bool:
    """From Triton 3.4."""
    return find_spec("triton.tools.tensor_descriptor") is not None


@functools.cache
def _descriptor_maker(dtype: torch.dtype, rows: int, columns: int, overlapped: bool) -> Callable[[Tensor], Any]:
    """From a matrix to its descriptor with such blocks, for the Hopper kernels or the others.

    Descriptors are made on the host, so that no allocator of Triton's is touched.
    """
    block = [rows, columns]
    if not overlapped:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return lambda matrix: TensorDescriptor.from_tensor(matrix, block)
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

    layout = NVMMASharedLayout.get_default_for(block, getattr(triton.language, _TRITON_DTYPES[dtype]))
    return lambda matrix: HopperDescriptor.from_tensor(matrix, block, layout)


@functools.cache
def _constants(tile: Tile, depth: int, dtype: torch.dtype, descriptors: bool, overlapped: bool) -> dict[str, Any]:
    """What a kernel is compiled for. Not to be changed."""
    constants = {"H": depth, "BN": tile.rows, "BV": tile.columns, "BH": tile.depth, "GROUP": tile.row_group}
    if overlapped:
        return constants
    # TF32's 10 bits, or an exponential to 2 ulp, would be the largest error of an fp32 model.
    exact = dtype == torch.float32
    # Where one step is the whole product, tiles are pipelined, and their epilogue needs the third stage's memory.
    stages = tile.stages if depth > tile.depth else min(tile.stages, 2)
    return constants | {
        "DESCRIPTORS": descriptors,
        "PRECISION": "ieee" if exact else "tf32",
        "EXACT": exact,
        "num_warps": tile.warps,
        "num_stages": stages,
    }


class Problem(NamedTuple):
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
        descriptors = has_descriptors(limits) and _triton_has_descriptors() and _fits_descriptors(hidden, weight)
        overlapped = descriptors and tile in OVERLAP_TILES and has_overlapped_kernels(limits)
        # Each half of a block has its own columns.
        columns = tile.columns // (2 if overlapped else 1)
        return cls(
            hidden=_blocks(hidden, tile.rows, tile.depth, descriptors, overlapped),
            weight=_blocks(weight, columns, tile.depth, descriptors, overlapped),
            transform=Transform.of(transform, hidden.dtype),
            stride_n=hidden.stride(0),
            stride_v=weight.stride(0),
            tile=tile,
            limits=limits,
            rows=rows,
            descriptors=descriptors,
            overlapped=overlapped,
            constants=_constants(tile, depth, hidden.dtype, descriptors, overlapped),
        )

    def result_blocks(self, matrix: Tensor) -> Any:
        """``matrix`` [N, C] as the kernels write it: by tiles, or quarters, two for each half of a block."""
        rows, columns = (2, 4) if self.overlapped else (1, 1)
        tile = self.tile
        return _blocks(matrix, tile.rows // rows, tile.columns // columns, self.descriptors, self.overlapped)

    def programs(self, columns: int) -> int:
        """One program per multiprocessor, or per item of row blocks x columns where those are fewer."""
        return min(self.limits.multiprocessors, cdiv(self.rows, self.tile.rows) * columns)


def _blocks(matrix: Tensor, rows: int, columns: int, descriptors: bool, overlapped: bool) -> Any:
    """``matrix`` as the kernel takes it: a descriptor with such blocks, or the tensor itself."""
    return _descriptor_maker(matrix.dtype, rows, columns, overlapped)(matrix) if descriptors else matrix
