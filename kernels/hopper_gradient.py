"""The gradient kernel for Hopper: as triton_backward.py's, with loads, products and epilogues side by side.

FLOPs and bytes are the same; hopper_tile.py has the pipeline of the partitions of warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from rlhf_losses.kernels.hopper_tile import (
    HIDDEN_STAGES_BESIDE_RESULTS,
    WORKER_REGISTERS,
    WORKER_WARPS,
    finished,
    halves,
    joined,
    load_tile,
    operand_rings,
    product_tile,
    store_tile,
)
from rlhf_losses.kernels.triton_gradient import product_gradient_tile, row_coefficients, with_label
from rlhf_losses.kernels.triton_tile import grouped, label_columns, transform_tile


@gluon.jit
def _gradient_load(
    hidden, weight, rings, stretch,
    HALF: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    N, _, first_tile, tiles = stretch
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * tiles, gl.num_programs(0)):
        block, tile = grouped(item, row_blocks, tiles, GROUP)
        count = load_tile(hidden, weight, rings, count, block * BN, (first_tile + tile) * BV, HALF, H)


@gluon.jit
def _gradient(a, m, log_s, coefficients, c, labels, transform, n, v, v0, N, V):
    z, slope = transform_tile(a, transform, n, v, N, V)
    da = product_gradient_tile(z, slope, m, log_s, coefficients, c, v, V, False)
    if labels is not None:
        da = with_label(da, slope, coefficients, c, label_columns(labels, n, N, V), v, v0)
    return da


@gluon.jit
def _gradient_product(
    rings, tokens, da, results, stretch,
    PART: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    labels, shift, log_sum, coefficients, transform = tokens
    N, V, first_tile, tiles = stretch
    HALF: gl.constexpr = PART % 2
    ROWS: gl.constexpr = BN // 2
    COLUMNS: gl.constexpr = BV // 8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    count = 0
    row_blocks = gl.cdiv(N, BN)
    items = row_blocks * tiles
    block, tile = grouped(gl.program_id(0), row_blocks, tiles, GROUP)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n0 = block * BN + PART // 2 * ROWS
        n = n0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        # Asked for here, these numbers arrive behind the products.
        m = gl.load(shift + n, mask=n < N, other=0.0)
        log_s = gl.load(log_sum + n, mask=n < N, other=0.0)
        c = row_coefficients(coefficients, n, N)
        a, count = product_tile(rings, count, PART, (H + BH - 1) // BH)
        # While its last step runs: whose turn it is next.
        this = tile
        block, tile = grouped(min(item + gl.num_programs(0), items - 1), row_blocks, tiles, GROUP)
        parts = halves(finished(a, rings, count, PART))
        for part in gl.static_range(2):
            column = (4 * HALF + 2 * part) * COLUMNS
            v0 = (first_tile + this) * BV + column
            v = v0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            # A quarter at a time: under a soft cap a logit takes two registers, and there are few.
            left, right = halves(parts[part])
            left = _gradient(left, m, log_s, coefficients, c, labels, transform, n, v, v0, N, V)
            right = _gradient(right, m, log_s, coefficients, c, labels, transform, n, v + COLUMNS, v0 + COLUMNS, N, V)
            store_tile(da, n0, this * BV + column, results.index(PART), joined(left.to(da.dtype), right.to(da.dtype)))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "first_tile", "tiles"])
def product_gradient_kernel(
    hidden,  # [N, H] descriptor, blocks [BN, BH]
    weight,  # [V, H] descriptor, blocks [BV / 2, BH]
    labels,  # [N], or None: the label's term is left out
    shift,  # [N]
    log_sum,  # [N]
    coefficients,  # Coefficients, [N] each
    transform,
    da,  # [N, C] out, descriptor, blocks [BN, BV / 4]: columns first_tile * BV ... of the vocabulary
    N,
    V,
    first_tile,
    tiles,
    H: gl.constexpr,
    BN: gl.constexpr,
    BV: gl.constexpr,
    BH: gl.constexpr,
    GROUP: gl.constexpr,
):
    rings = operand_rings(hidden, weight, HIDDEN_STAGES_BESIDE_RESULTS)
    results = gl.allocate_shared_memory(da.dtype, [4, BN // 2, BV // 4], da.layout)
    tokens = (labels, shift, log_sum, coefficients, transform)
    stretch = (N, V, first_tile, tiles)
    gl.warp_specialize(
        [
            (_gradient_product, (rings, tokens, da, results, stretch, 0, H, BN, BV, BH, GROUP)),
            (_gradient_product, (rings, tokens, da, results, stretch, 1, H, BN, BV, BH, GROUP)),
            (_gradient_product, (rings, tokens, da, results, stretch, 2, H, BN, BV, BH, GROUP)),
            (_gradient_product, (rings, tokens, da, results, stretch, 3, H, BN, BV, BH, GROUP)),
            (_gradient_load, (hidden, weight, rings, stretch, 0, H, BN, BV, GROUP)),
            (_gradient_load, (hidden, weight, rings, stretch, 1, H, BN, BV, GROUP)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )
