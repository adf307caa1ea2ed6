"""The order in which the kernels' programs walk (row block, stretch of the vocabulary): complete, and fair to all."""

import pytest
import torch
from helpers import DEVICE

from rlhf_losses.kernels.tiles import OVERLAP_TILES

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_tile = pytest.importorskip("rlhf_losses.kernels.triton_tile")
grouped, stretch_of = triton_tile.grouped, triton_tile.stretch_of


@triton.jit
def _items(places, lengths, row_blocks, columns, tiles, GROUP: tl.constexpr):
    item = tl.program_id(0)
    block, column = grouped(item, row_blocks, columns, GROUP)
    first, last = stretch_of(column, columns, tiles)
    tl.store(places + item, block * columns + column)
    tl.store(lengths + item, last - first)


def schedule(row_blocks, columns, tiles, group):
    """Of every item: its place, row block * columns + stretch; and its length in tiles."""
    places, lengths = torch.full((2, row_blocks * columns), -1, dtype=torch.int32, device=DEVICE)
    _items[(row_blocks * columns,)](places, lengths, row_blocks, columns, tiles, GROUP=group)
    return places, lengths


@pytest.mark.parametrize(("row_blocks", "columns", "group"), [(1, 1, 16), (3, 33, 16), (16, 7, 16), (37, 33, 8)])
def test_every_item_once(row_blocks, columns, group):
    places, _ = schedule(row_blocks, columns, columns, group)
    assert torch.equal(places.sort().values.cpu(), torch.arange(row_blocks * columns, dtype=torch.int32))


# 132 multiprocessors. 33 stretches divide them, and V / 256 into 18 tiles each at 151936, 15 or 16 at 131072.
@pytest.mark.parametrize("vocab", [128256, 131072, 151936, 256000])
def test_programs_get_equal_work(vocab):
    tile, programs = OVERLAP_TILES[0], 132
    tiles = -(-vocab // tile.columns)
    row_blocks = 8192 // tile.rows
    _, lengths = schedule(row_blocks, tile.splits, tiles, tile.row_group)
    work = [lengths[program::programs].sum().item() for program in range(programs)]
    assert max(work) < 1.01 * row_blocks * tiles / programs
