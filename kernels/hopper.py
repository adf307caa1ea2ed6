"""The statistics and the gradient kernel for Hopper: loads, products and epilogues of different warps overlap.

Same formulas, same helpers and same results layout as triton_forward.py and triton_backward.py; here the program is cut
into partitions of warps (Gluon's ``warp_specialize``):

    load       one warp keeps STAGES pairs of operand tiles on their way from memory, across tile borders
    product    two warpgroups, 64 rows each of the block's 128, multiply what has arrived and then work on their logits

The two product partitions share every stage but do not wait for each other: one may be up to STAGES stages ahead, so
its exponentials and sums run while the other one keeps the tensor cores busy.

FLOPs and bytes are those of the portable kernels. 128 x 256 x 64 tiles; the accumulator of a warpgroup is 64 x 256
fp32, 128 registers a thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlhf_losses.kernels.triton_tile import (
    grouped,
    label_columns,
    product_gradient_tile,
    store_sums,
    stretch_of,
    take_tile,
    transform_tile,
)

# Launch options. Four stages of 48 KiB, and the gradient's 32 KiB of results, fill the shared memory. The kernels start
# with three warpgroups of 168 registers a thread, redistributed below.
OPTIONS = {"STAGES": 4, "num_warps": 4, "maxnreg": 168}
_PRODUCT_REGISTERS = gl.constexpr(240)
_LOAD_REGISTERS = gl.constexpr(24)


@gluon.jit
def _load_tile(hidden, weight, stages, count, n0, v0, H: gl.constexpr, BH: gl.constexpr):
    """Fetch hidden[n0:, :] and weight[v0:, :], stage by stage, as stages fall empty; ``count`` stages went before."""
    a, b, full, empty, _ = stages
    STAGES: gl.constexpr = a.shape[0]
    for h0 in range(0, H, BH):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
        arrived = full.index(stage)
        mbarrier.expect(arrived, hidden.block_type.nbytes + weight.block_type.nbytes)
        tma.async_copy_global_to_shared(hidden, [n0, h0], arrived, a.index(stage))
        tma.async_copy_global_to_shared(weight, [v0, h0], arrived, b.index(stage))
        count += 1
    return count


@gluon.jit
def _product_tile(stages, count, GROUP_ROWS: gl.constexpr, HALF: gl.constexpr, STEPS: gl.constexpr):
    """[GROUP_ROWS, BV] product of this warpgroup's half of the hidden rows, from STEPS stages.

    The second half begins a tile when the first has a stage of it behind: left to themselves the two would meet, and
    do their epilogues at the same time. A barrier tells two tiles apart but not three, so this holds only where the
    first half can't be two tiles ahead: it gets STAGES stages beyond what the second has given back.
    """
    a, b, full, empty, lead = stages
    STAGES: gl.constexpr = a.shape[0]
    LEAD: gl.constexpr = STEPS >= STAGES
    BV: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    acc = gl.zeros([GROUP_ROWS, BV], gl.float32, layout)
    if LEAD and HALF == 1:
        mbarrier.wait(lead, count // STEPS & 1)
    for step in range(STEPS):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        rows = a.index(stage).slice(HALF * GROUP_ROWS, GROUP_ROWS)
        # [GROUP_ROWS, BH] @ [BH, BV]
        acc = warpgroup_mma(rows, b.index(stage).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
        # One product stays in flight; the stage of the one before it is free.
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
        if LEAD and HALF == 0:
            mbarrier.arrive(lead, pred=step == 0)
        count += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
    return acc, count


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
            count = _load_tile(hidden, weight, stages, count, block * BN, tile * BV, H, BH)


@gluon.jit
def _statistics_product(
    stages, tokens, partial, stretch,
    HALF: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    labels, label_logit, transform, ignore_index = tokens
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
        for tile in range(first, last):
            v0 = tile * BV
            v = v0 + gl.arange(0, BV, by_column)
            z, count = _product_tile(stages, count, ROWS, HALF, (H + BH - 1) // BH)
            z, _ = transform_tile(z, transform, n, v, N, V)
            m, s, u, q, arg = take_tile(z, n, v, v0, V, label, label_logit, (m, s, u, q, arg), partial, BV, False)
        store_sums(partial, split, n, N, m, s, u, q, arg)


@gluon.jit
def _operand_stages(hidden, weight, STAGES: gl.constexpr):
    """Shared memory for STAGES operand pairs, and the barriers that say a stage is full or empty."""
    a = gl.allocate_shared_memory(
        hidden.dtype, [STAGES, hidden.block_type.shape[0], hidden.block_type.shape[1]], hidden.layout
    )
    b = gl.allocate_shared_memory(
        weight.dtype, [STAGES, weight.block_type.shape[0], weight.block_type.shape[1]], weight.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(lead, count=1)
    return a, b, full, empty, lead


@gluon.jit(do_not_specialize=["N", "ignore_index"])
def statistics_kernel(
    hidden,  # [N, H] descriptor, blocks [BN, BH]
    weight,  # [V, H] descriptor, blocks [BV, BH]
    labels,  # [N]
    label_logit,  # [N] fp32 out, written where the label lies in this stretch
    partial,  # Sums, [splits, N] each
    transform,
    ignore_index,
    N,
    V,
    splits,
    H: gl.constexpr,
    BN: gl.constexpr,
    BV: gl.constexpr,
    BH: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    stages = _operand_stages(hidden, weight, STAGES)
    tokens = (labels, label_logit, transform, ignore_index)
    stretch = (N, V, splits)
    gl.warp_specialize(
        [
            (_statistics_product, (stages, tokens, partial, stretch, 0, H, BN, BV, BH, GROUP)),
            (_statistics_product, (stages, tokens, partial, stretch, 1, H, BN, BV, BH, GROUP)),
            (_statistics_load, (hidden, weight, stages, labels, ignore_index, stretch, H, BN, BV, BH, GROUP)),
        ],
        [4, 1],
        [_PRODUCT_REGISTERS, _LOAD_REGISTERS],
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
        count = _load_tile(hidden, weight, stages, count, block * BN, (first_tile + tile) * BV, H, BH)


@gluon.jit
def _store_half(da, n0, v0, result, values):
    """Write [ROWS, BV / 2] values; the store before this one must have left the buffer."""
    tma.store_wait(0)
    result.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(da, [n0, v0], result)


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
        z, count = _product_tile(stages, count, ROWS, HALF, (H + BH - 1) // BH)
        z, slope = transform_tile(z, transform, n, v, N, V)
        out = product_gradient_tile(z, slope, m, log_s, coefficients, label, n, v, v0, N, False)
        left, right = out.to(da.dtype).reshape([ROWS, 2, BV // 2]).permute((0, 2, 1)).split()
        _store_half(da, n0, tile * BV, result, left)
        _store_half(da, n0, tile * BV + BV // 2, result, right)
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
    stages = _operand_stages(hidden, weight, STAGES)
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
        [_PRODUCT_REGISTERS, _LOAD_REGISTERS],
    )
