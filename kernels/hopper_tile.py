"""The pipeline that the Hopper kernels share: operand stages, their loads, a product from them, results going out.

The program is cut into partitions of warps (Gluon's ``warp_specialize``):

    load       one warp keeps STAGES pairs of operand tiles on their way from memory, across tile borders
    product    two warpgroups, 64 rows each of the block's 128, multiply what has arrived and then work on their logits

The two product partitions share every stage but do not wait for each other: one may be up to STAGES stages ahead, so
its exponentials and sums run while the other one keeps the tensor cores busy.

128 x 256 x 64 tiles; the accumulator of a warpgroup is 64 x 256 fp32, 128 registers a thread.
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

# Launch options. Four stages of 48 KiB, and 32 KiB of results, fill the shared memory. The kernels start with three
# warpgroups of 168 registers a thread, redistributed below.
OPTIONS = {"STAGES": 4, "num_warps": 4, "maxnreg": 168}
PRODUCT_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)


@gluon.jit
def operand_stages(hidden, weight, STAGES: gl.constexpr):
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


@gluon.jit
def load_tile(hidden, weight, stages, count, n0, v0, H: gl.constexpr, BH: gl.constexpr):
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
def product_tile(stages, count, GROUP_ROWS: gl.constexpr, HALF: gl.constexpr, STEPS: gl.constexpr):
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
def store_tile(out, n0, v0, result, values):
    """Begin to write the tile [ROWS, BV] at (n0, v0), through a buffer for half of it, as far as ``out`` has rows.

    ``tma.store_wait(0)`` waits for the end.
    """
    HALF: gl.constexpr = values.shape[1] // 2
    halves = values.reshape([values.shape[0], 2, HALF]).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        # The store before this one must have left the buffer.
        tma.store_wait(0)
        result.store(halves[half])
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [n0, v0 + half * HALF], result)
