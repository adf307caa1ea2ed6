"""Which tile a device computes with: a table of measured choices, consulted by capability and shared memory.

Nothing is searched at import or at the first call, and the number of tokens is no part of the choice: a token's
numbers depend on the tile's width, so they must not depend on who shares the call.
"""

import functools
from dataclasses import dataclass

# Reductions across warps and the 16-bit copy of a result tile pass through shared memory beside the operand stages.
_SCRATCH_BYTES = 4096


@dataclass(frozen=True)
class DeviceLimits:
    """What decides about tiles: ``vendor`` "cuda" or "hip", ``capability`` 90 for sm_90, bytes a block may share."""

    vendor: str
    capability: int
    shared_memory: int
    multiprocessors: int


@dataclass(frozen=True)
class Tile:
    """rows x columns of the product per step, ``depth`` of the hidden size per stage of the operand pipeline.

    row_group  row blocks whose programs run side by side, so that they read one stretch of the weight from L2
    splits     stretches of the vocabulary a row block is cut into; each leaves one partial result
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    row_group: int = 16
    splits: int = 33

    def shared_bytes(self, itemsize: int, descriptors: bool) -> int:
        operands = (self.rows + self.columns) * self.depth * itemsize * self.stages
        result = self.rows * self.columns * itemsize
        # A descriptor's store reads a result tile of its own; elsewhere the operands' stages are used again.
        return _SCRATCH_BYTES + (operands + result if descriptors else max(operands, result))


# 128 x 256 is the widest accumulator that 8 warps hold in registers; on an H200 (docs/performance.md) it reaches what
# cuBLAS reaches, 128 x 128 and 64 x 256 stay at three quarters of it. Three stages of 48 KiB cover the load latency.
# The Hopper kernels are written for this tile.
OVERLAP_TILES = (Tile(128, 256, 64, warps=8, stages=3),)
# mma.sync keeps its operands in registers beside the accumulator, so the accumulator is half as wide. The first fits
# sm_80 (163 KiB); the later ones fit the 99 KiB of sm_86, sm_89 and sm_120, and the 64 KiB of CDNA.
_PORTABLE = (
    Tile(128, 128, 64, warps=8, stages=3),
    Tile(128, 128, 32, warps=8, stages=3),
    Tile(64, 128, 32, warps=4, stages=2),
    Tile(64, 64, 32, warps=4, stages=2),
)
# True fp32 products have no tensor core: a small accumulator leaves registers for the operands.
_FULL_PRECISION = (Tile(64, 64, 32, warps=4, stages=2), Tile(32, 32, 32, warps=4, stages=1))


def tiles_per_stretch(tiles: int, most: int, rows: int, depth: int) -> int:
    """How many tiles of the vocabulary the backward takes at a time, ``most`` at most.

    Stretches are equal: a short last one would leave multiprocessors idle. d_weight of a narrow head is few tiles of
    cuBLAS: with 35 or 46 of ours its rounds are full, with 60 it takes 15% longer (16384 x 896 on an H200).
    """
    if depth <= 1024 and rows >= 8192:
        most = min(most, 46)
    stretches = -(-tiles // most)
    return -(-tiles // stretches)


def has_descriptors(limits: DeviceLimits) -> bool:
    """Tensor-memory descriptors: Hopper and newer."""
    return limits.vendor == "cuda" and limits.capability >= 90


@functools.cache
def pick_tile(limits: DeviceLimits, itemsize: int) -> Tile | None:
    """The first tile of the table that fits, for operands of ``itemsize`` bytes; None if none does."""
    descriptors = has_descriptors(limits)
    candidates = _FULL_PRECISION if itemsize == 4 else (OVERLAP_TILES if descriptors else ()) + _PORTABLE
    fitting = (tile for tile in candidates if tile.shared_bytes(itemsize, descriptors) <= limits.shared_memory)
    return next(fitting, None)
