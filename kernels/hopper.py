"""The statistics and the gradient kernel for Hopper: loads, products and epilogues of different warps overlap.

Same formulas, same helpers and same results layout as triton_forward.py and triton_backward.py, and the same FLOPs and
bytes; hopper_tile.py has the pipeline of their partitions of warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from rlhf_losses.kernels.hopper_tile import (
    LOAD_REGISTERS,
    PRODUCT_REGISTERS,
    load_tile,
    operand_stages,
    product_tile,
    store_tile,
)
from rlhf_losses.kernels.triton_tile import (
    grouped,
    kept_exponentials,
    label_columns,
    product_gradient_tile,
    store_sums,
    stretch_of,
    take_tile,
    transform_tile,
)


@gluon.jit
def _tiles_of(labels, ignore_index, n0, split, splits, N, V, BN: gl.constexpr, BV: gl.constexpr):
    """First and last tile of a stretch; none for a block whose tokens are all ignored. Every partition asks alike."""
    n = n0 + gl.arange(0, BN, gl.BlockedLayout([BN // (32 * gl.num_warps())], [32], [gl.num_warps()], [0]))
    counts = gl.load(labels + n, mask=n < N, other=ignore_index) != ignore_index
    first, last = stretch_of(split, splits, gl.cdiv(V, BV))
    return first, last * gl.max(counts.to(gl.int32), 0)


@gluon.jit
def _statistics_load(
    hidden, weight, stages, labels, ignore_index, stretch,
    H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    N, V, splits = stretch
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * splits, gl.num_programs(0)):
        block, split = grouped(item, row_blocks, splits, GROUP)
        first, last = _tiles_of(labels, ignore_index, block * BN, split, splits, N, V, BN, BV)
        for tile in range(first, last):
            count = load_tile(hidden, weight, stages, count, block * BN, tile * BV, H, BH)


@gluon.jit
def _statistics_product(
    stages, tokens, partial, kept, stretch,
    HALF: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    labels, label_logit, transform, omega, ignore_index = tokens
    exponentials, kept_shift, result, K = kept
    N, V, splits = stretch
    ROWS: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * splits, gl.num_programs(0)):
        block, split = grouped(item, row_blocks, splits, GROUP)
        first, last = _tiles_of(labels, ignore_index, block * BN, split, splits, N, V, BN, BV)
        n = block * BN + HALF * ROWS + gl.arange(0, ROWS, by_row)
        label = label_columns(labels, n, N, V)
        m = gl.full([ROWS], float("-inf"), gl.float32, by_row)
        s = gl.zeros([ROWS], gl.float32, by_row)
        u = gl.zeros([ROWS], gl.float32, by_row)
        q = gl.zeros([ROWS], gl.float32, by_row)
        arg = gl.zeros([ROWS], gl.int32, by_row)
        wt = gl.zeros([ROWS], gl.float32, by_row)
        w = 0.0
        for tile in range(first, last):
            v0 = tile * BV
            v = v0 + gl.arange(0, BV, by_column)
            z, count = product_tile(stages, count, ROWS, HALF, (H + BH - 1) // BH)
            z, _ = transform_tile(z, transform, n, v, N, V)
            sums = (m, s, u, q, arg, wt, w)
            e, m, s, u, q, arg, wt, w = take_tile(
                z, n, v, v0, V, label, label_logit, omega, sums, partial, BV, False
            )  # fmt: skip
            if exponentials is not None:  # noqa: SIM102 (decided at compile time, the place of the block is not)
                if block * BN < K:
                    store_tile(
                        exponentials, block * BN + HALF * ROWS, v0, result, kept_exponentials(e, exponentials.dtype)
                    )
                    gl.store(kept_shift + tile * K + n, m, mask=n < K)
        store_sums(partial, split, n, N, m, s, u, q, arg, wt, w)
    if exponentials is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "K", "ignore_index"])
def statistics_kernel(
    hidden,  # [N, H] descriptor, blocks [BN, BH]
    weight,  # [V, H] descriptor, blocks [BV, BH]
    labels,  # [N]
    label_logit,  # [N] fp32 out, written where the label lies in this stretch
    partial,  # Sums, [splits, N] each
    exponentials,  # [K, tiles * BV] out, descriptor, blocks [BN / 2, BV / 2]; or None
    kept_shift,  # [tiles, K] out; or None
    transform,
    omega,  # [V] fp32, or None
    ignore_index,
    N,
    K,
    V,
    splits,
    H: gl.constexpr,
    BN: gl.constexpr,
    BV: gl.constexpr,
    BH: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    stages = operand_stages(hidden, weight, STAGES)
    tokens = (labels, label_logit, transform, omega, ignore_index)
    stretch = (N, V, splits)
    upper, lower = ((None, None, None, K), (None, None, None, K))
    if exponentials is not None:
        results = gl.allocate_shared_memory(exponentials.dtype, [2, BN // 2, BV // 2], exponentials.layout)
        upper = (exponentials, kept_shift, results.index(0), K)
        lower = (exponentials, kept_shift, results.index(1), K)
    gl.warp_specialize(
        [
            (_statistics_product, (stages, tokens, partial, upper, stretch, 0, H, BN, BV, BH, GROUP)),
            (_statistics_product, (stages, tokens, partial, lower, stretch, 1, H, BN, BV, BH, GROUP)),
            (_statistics_load, (hidden, weight, stages, labels, ignore_index, stretch, H, BN, BV, BH, GROUP)),
        ],
        [4, 1],
        [PRODUCT_REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit
def _gradient_load(
    hidden, weight, stages, stretch,
    H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    N, _, first_tile, tiles = stretch
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * tiles, gl.num_programs(0)):
        block, tile = grouped(item, row_blocks, tiles, GROUP)
        count = load_tile(hidden, weight, stages, count, block * BN, (first_tile + tile) * BV, H, BH)


@gluon.jit
def _gradient_product(
    stages, tokens, da, result, stretch,
    HALF: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    labels, shift, log_sum, coefficients, transform = tokens
    N, V, first_tile, tiles = stretch
    ROWS: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * tiles, gl.num_programs(0)):
        block, tile = grouped(item, row_blocks, tiles, GROUP)
        n0 = block * BN + HALF * ROWS
        n = n0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        v0 = (first_tile + tile) * BV
        v = v0 + gl.arange(0, BV, gl.SliceLayout(0, layout))
        m = gl.load(shift + n, mask=n < N, other=0.0)
        log_s = gl.load(log_sum + n, mask=n < N, other=0.0)
        label = label_columns(labels, n, N, V)
        z, count = product_tile(stages, count, ROWS, HALF, (H + BH - 1) // BH)
        z, slope = transform_tile(z, transform, n, v, N, V)
        out = product_gradient_tile(z, slope, m, log_s, coefficients, label, n, v, v0, N, V, False)
        store_tile(da, n0, tile * BV, result, out.to(da.dtype))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "first_tile", "tiles"])
def product_gradient_kernel(
    hidden,  # [N, H] descriptor, blocks [BN, BH]
    weight,  # [V, H] descriptor, blocks [BV, BH]
    labels,  # [N]
    shift,  # [N]
    log_sum,  # [N]
    coefficients,  # Coefficients, [N] each
    transform,
    da,  # [N, C] out, descriptor, blocks [BN / 2, BV / 2]: columns first_tile * BV ... of the vocabulary
    N,
    V,
    first_tile,
    tiles,
    H: gl.constexpr,
    BN: gl.constexpr,
    BV: gl.constexpr,
    BH: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    stages = operand_stages(hidden, weight, STAGES)
    results = gl.allocate_shared_memory(da.dtype, [2, BN // 2, BV // 2], da.layout)
    tokens = (labels, shift, log_sum, coefficients, transform)
    stretch = (N, V, first_tile, tiles)
    gl.warp_specialize(
        [
            (_gradient_product, (stages, tokens, da, results.index(0), stretch, 0, H, BN, BV, BH, GROUP)),
            (_gradient_product, (stages, tokens, da, results.index(1), stretch, 1, H, BN, BV, BH, GROUP)),
            (_gradient_load, (hidden, weight, stages, stretch, H, BN, BV, BH, GROUP)),
        ],
        [4, 1],
        [PRODUCT_REGISTERS, LOAD_REGISTERS],
    )
