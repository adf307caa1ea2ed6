"""The pipeline that the Hopper kernels share: operand rings, their loads, a product from them, results going out.

The program is cut into partitions of warps (Gluon's ``warp_specialize``):

    load       one warp keeps tiles of hidden states and of the left half of the weight's on their way from memory,
               another those of the right half, both across tile borders
    product    four warpgroups, a quarter of the tile's rows x columns each, multiply what has arrived, then work on
               their logits. ``PART`` is 2 * (lower half of the rows) + (right half of the columns)

What hides the work on the logits: while the two warpgroups of one half of the columns are at it, the other two have the
tensor cores to themselves; the right half begins a tile LEAD stages behind the left. (Two warpgroups of twice the size
issued an instruction every third cycle in that time, since each multiprocessor's quarter had one warp to choose from.)
A tile of hidden states is held until both halves have read it, so its ring is the longer one; a tile of the weight is
read by two warpgroups in step and given back at once. That is why the halves that are apart are columns: of rows, it
would be the larger operand that waits.

128 x 256 x 64 tiles; the accumulator of a warpgroup is 64 x 128 fp32, 64 registers a thread.
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

# Places of 16 KiB in the shared memory, which holds 14: the two rings of the weight, and with the rest hidden states,
# two less where results of 16 bits go out. Six places instead of eight cost a forward 4% at H = 896.
WEIGHT_STAGES = gl.constexpr(3)
HIDDEN_STAGES = gl.constexpr(8)
HIDDEN_STAGES_BESIDE_RESULTS = gl.constexpr(6)
LEAD = gl.constexpr(2)
# Five warpgroups start with 96 registers a thread, all that 65536 have room for; the loads' go to the products.
OPTIONS = {"num_warps": 4, "maxnreg": 96}
WORKER_WARPS = gl.constexpr((4, 4, 4, 1, 1))
WORKER_REGISTERS = gl.constexpr((112, 112, 112, 24, 24))


@gluon.jit
def _ring(operand, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Shared memory for STAGES tiles of an operand, and the barriers that say a place is full or empty."""
    ROWS: gl.constexpr = operand.block_type.shape[0]
    DEPTH: gl.constexpr = operand.block_type.shape[1]
    buffer = gl.allocate_shared_memory(operand.dtype, [STAGES, ROWS, DEPTH], operand.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return buffer, full, empty


@gluon.jit
def operand_rings(hidden, weight, STAGES: gl.constexpr):
    """The rings of hidden states, the left and the right half of the weight; and the barrier of the lead."""
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(lead, count=2)
    return (
        _ring(hidden, STAGES, 4),
        _ring(weight, WEIGHT_STAGES, 2),
        _ring(weight, WEIGHT_STAGES, 2),
        lead,
    )


@gluon.jit
def _load(operand, ring, count, row, h0):
    """Fetch operand[row:, h0:] when its place falls empty; ``count`` tiles went before."""
    buffer, full, empty = ring
    STAGES: gl.constexpr = buffer.shape[0]
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), operand.block_type.nbytes)
    tma.async_copy_global_to_shared(operand, [row, h0], full.index(stage), buffer.index(stage))


@gluon.jit
def load_tile(hidden, weight, rings, count, n0, v0, HALF: gl.constexpr, H: gl.constexpr):
    """Fetch hidden[n0:, :] and a half of weight[v0:, :], step by step; the right half alone, as the left has hidden."""
    BH: gl.constexpr = hidden.block_type.shape[1]
    for h0 in range(0, H, BH):
        if HALF == 0:
            _load(hidden, rings[0], count, n0, h0)
        _load(weight, rings[1 + HALF], count, v0 + HALF * weight.block_type.shape[0], h0)
        count += 1
    return count


@gluon.jit
def product_tile(rings, count, PART: gl.constexpr, STEPS: gl.constexpr):
    """[BN / 2, BV / 2] product of this warpgroup's hidden rows and columns, from STEPS stages; see ``finished``.

    The right half begins a tile when the left has LEAD stages of it behind: left to themselves the two would meet, and
    do their epilogues at the same time. A barrier tells two tiles apart but not three, so this holds only where the
    left half can't be two tiles ahead: it gets as many stages as its ring has beyond what the right has given back.
    """
    a, a_full, a_empty = rings[0]
    b, b_full, b_empty = rings[1 + PART % 2]
    A_STAGES: gl.constexpr = a.shape[0]
    B_STAGES: gl.constexpr = b.shape[0]
    ORDERED: gl.constexpr = STEPS >= A_STAGES
    ROWS: gl.constexpr = a.shape[1] // 2
    COLUMNS: gl.constexpr = b.shape[1]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    if ORDERED and PART % 2 == 1:
        mbarrier.wait(rings[3], count // STEPS & 1)
    for step in range(STEPS):
        a_stage = count % A_STAGES
        b_stage = count % B_STAGES
        mbarrier.wait(a_full.index(a_stage), count // A_STAGES & 1)
        mbarrier.wait(b_full.index(b_stage), count // B_STAGES & 1)
        # [BN, BH] @ [BH, BV / 2]
        acc = warpgroup_mma(
            a.index(a_stage).slice(PART // 2 * ROWS, ROWS),
            b.index(b_stage).permute((1, 0)),
            acc,
            use_acc=step > 0,
            is_async=True,
        )
        # One product stays in flight; the places of the one before it are free.
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(a_empty.index((count + A_STAGES - 1) % A_STAGES), pred=step > 0)
        mbarrier.arrive(b_empty.index((count + B_STAGES - 1) % B_STAGES), pred=step > 0)
        if ORDERED and PART % 2 == 0:
            mbarrier.arrive(rings[3], pred=step == LEAD)
        count += 1
    return acc, count


@gluon.jit
def finished(acc, rings, count, PART: gl.constexpr):
    """The result of ``product_tile``, whose last step runs until then; ``count`` as it was returned."""
    a, _, a_empty = rings[0]
    b, _, b_empty = rings[1 + PART % 2]
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(a_empty.index((count + a.shape[0] - 1) % a.shape[0]))
    mbarrier.arrive(b_empty.index((count + b.shape[0] - 1) % b.shape[0]))
    return acc


@gluon.jit
def halves(x):
    """Left and right half of the columns of x [BN, C], in the layout of a product of that width."""
    WIDTH: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left, right = x.reshape([x.shape[0], 2, WIDTH]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def joined(left, right):
    """``halves`` undone."""
    WIDTH: gl.constexpr = 2 * left.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    both = gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], WIDTH])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def store_tile(out, n0, v0, buffer, values):
    """Begin to write the tile ``values`` at (n0, v0), through a buffer of its size, as far as ``out`` has rows.

    ``tma.store_wait(0)`` waits for the end.
    """
    # The store before this one must have left the buffer.
    tma.store_wait(0)
    buffer.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [n0, v0], buffer)
