"""The statistics kernel for Hopper: loads, products and epilogues of different warps overlap.

Formulas, FLOPs and bytes are those of triton_forward.py; hopper_tile.py has the pipeline of the partitions of warps. A
warpgroup takes one half of the columns of a tile: a stretch leaves two partial results, and a tile that is kept has two
shifts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from rlhf_losses.kernels.hopper_tile import (
    HIDDEN_STAGES,
    HIDDEN_STAGES_BESIDE_RESULTS,
    WORKER_REGISTERS,
    WORKER_WARPS,
    finished,
    halves,
    load_tile,
    operand_rings,
    product_tile,
    store_tile,
)
from rlhf_losses.kernels.triton_tile import (
    NO_COLUMN,
    added_tile,
    grouped,
    kept_exponentials,
    label_columns,
    masked_tile,
    merged_sums,
    raised_maximum,
    raised_sums,
    store_label_logit,
    store_sums,
    stretch_of,
    transform_tile,
)

# Running sums of a row in a warpgroup: one for each of the threads that share it.
_LANES = gl.constexpr(4)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _tiles_of(labels, ignore_index, n0, split, splits, N, V, BN: gl.constexpr, BV: gl.constexpr):
    """First and last tile of a stretch; none for a block whose tokens are all ignored. Every partition asks alike."""
    n = n0 + gl.arange(0, BN, gl.BlockedLayout([BN // (32 * gl.num_warps())], [32], [gl.num_warps()], [0]))
    counts = gl.load(labels + n, mask=n < N, other=ignore_index) != ignore_index
    first, last = stretch_of(split, splits, gl.cdiv(V, BV))
    return first, last * gl.max(counts.to(gl.int32), 0)


@gluon.jit
def _tiles_with_labels(label, first, last, HALF: gl.constexpr, BV: gl.constexpr):
    """Bit t of 64: whether a label lies in this half of tile t, or of t + 64 ..., of the stretch."""
    tile = label // BV
    mine = (label >= 0) & (tile >= first) & (tile < last) & (label % BV // (BV // 2) == HALF)
    bits = gl.where(mine, label.to(gl.int64) * 0 + 1, 0) << (tile % 64).to(gl.int64)
    return gl.reduce(bits, 0, _either)


@gluon.jit
def _by_lanes(x):
    """x [BN, C] as [BN, C / L, L], so that each of the L threads that share a row has a column of its own."""
    C: gl.constexpr = x.shape[1]
    pairs = x.reshape([x.shape[0], C // (2 * _LANES), _LANES, 2]).permute((0, 1, 3, 2))
    return pairs.reshape([x.shape[0], C // _LANES, _LANES])


@gluon.jit
def _by_columns(x):
    """``_by_lanes`` undone."""
    COLUMNS: gl.constexpr = x.shape[1] * _LANES
    pairs = x.reshape([x.shape[0], x.shape[1] // 2, 2, _LANES]).permute((0, 1, 3, 2))
    return pairs.reshape([x.shape[0], COLUMNS])


@gluon.jit
def _agreed(m, arg):
    """One maximum [BN, L] for all lanes of a row, and its column in the lanes that have it."""
    row_max = gl.expand_dims(gl.max(m, 1), 1)
    return gl.maximum(m, row_max), gl.where(m < row_max, NO_COLUMN, arg)


@gluon.jit
def _statistics_load(
    hidden, weight, rings, labels, ignore_index, stretch,
    HALF: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    N, V, splits = stretch
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * splits, gl.num_programs(0)):
        block, split = grouped(item, row_blocks, splits, GROUP)
        first, last = _tiles_of(labels, ignore_index, block * BN, split, splits, N, V, BN, BV)
        for tile in range(first, last):
            count = load_tile(hidden, weight, rings, count, block * BN, tile * BV, HALF, H)


@gluon.jit
def _statistics_product(
    rings, tokens, partial, kept, stretch,
    PART: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    labels, label_logit, transform, omega, ignore_index = tokens
    exponentials, kept_shift, results, K = kept
    N, V, splits = stretch
    HALF: gl.constexpr = PART % 2
    ROWS: gl.constexpr = BN // 2
    COLUMNS: gl.constexpr = BV // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    column = gl.arange(0, 2 * COLUMNS, gl.SliceLayout(0, layout))
    lane_column = _by_lanes(
        gl.zeros([ROWS, COLUMNS], gl.int32, part_layout)
        + gl.arange(0, COLUMNS, gl.SliceLayout(0, part_layout))[None, :]
    )
    by_lane: gl.constexpr = gl.SliceLayout(1, lane_column.type.layout)
    by_lane_row: gl.constexpr = gl.SliceLayout(1, by_lane)
    U: gl.constexpr = partial.u is not None
    Q: gl.constexpr = partial.q is not None
    ARG: gl.constexpr = partial.arg is not None
    count = 0
    row_blocks = gl.cdiv(N, BN)
    for item in range(gl.program_id(0), row_blocks * splits, gl.num_programs(0)):
        block, split = grouped(item, row_blocks, splits, GROUP)
        n0 = block * BN + PART // 2 * ROWS
        first, last = _tiles_of(labels, ignore_index, block * BN, split, splits, N, V, BN, BV)
        n = n0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        lane_row = n0 + gl.arange(0, ROWS, by_lane_row)
        label = label_columns(labels, n, N, V)
        hits = _tiles_with_labels(label, first, last, HALF, BV)
        m = gl.full([ROWS, _LANES], float("-inf"), gl.float32, by_lane)
        s = gl.zeros([ROWS, _LANES], gl.float32, by_lane)
        u = gl.zeros([ROWS, _LANES], gl.float32, by_lane)
        q = gl.zeros([ROWS, _LANES], gl.float32, by_lane)
        arg = gl.zeros([ROWS, _LANES], gl.int32, by_lane)
        wt = gl.zeros([ROWS, _LANES], gl.float32, by_lane)
        w = gl.zeros([ROWS, _LANES], gl.float32, by_lane)
        for tile in range(first, last):
            v0 = tile * BV + HALF * 2 * COLUMNS
            v = v0 + column
            z, count = product_tile(rings, count, PART, (H + BH - 1) // BH)
            z = finished(z, rings, count, PART)
            z, _ = transform_tile(z, transform, n, v, N, V)
            z = masked_tile(z, v, v0, V, 2 * COLUMNS)
            if (hits >> (tile % 64)) & 1 == 1:
                store_label_logit(label_logit, z, n, v, v0, label, 2 * COLUMNS)
            parts = halves(z)
            m_new, arg = raised_maximum(_by_lanes(parts[0]), v0 + lane_column, m, arg, ARG)
            m_new, arg = raised_maximum(_by_lanes(parts[1]), v0 + COLUMNS + lane_column, m_new, arg, ARG)
            # Kept exponentials need it. Without any it costs nothing, and the sums are the same bits.
            m_new, arg = _agreed(m_new, arg)
            s, u, q, wt = raised_sums(m, m_new, s, u, q, wt, w, False)
            m = m_new
            for part in gl.static_range(2):
                # A half of the columns at a time takes fewer registers.
                v1 = v0 + part * COLUMNS
                weights = None
                if omega is not None:
                    vl = v1 + lane_column
                    weights = gl.load(omega + vl, mask=vl < V, other=0.0)
                e, s, u, q, wt, w = added_tile(_by_lanes(parts[part]), weights, m, s, u, q, wt, w, U, Q, False)
                if exponentials is not None:  # noqa: SIM102 (decided at compile time, the place of the block is not)
                    if block * BN < K:
                        e_part = gl.convert_layout(_by_columns(e), part_layout, assert_trivial=True)
                        values = kept_exponentials(e_part, exponentials.dtype)
                        store_tile(exponentials, n0, v1, results.index(PART), values)
            if exponentials is not None:
                gl.store(kept_shift + (2 * tile + HALF) * K + lane_row, gl.max(m, 1), mask=lane_row < K)
        m, s, u, q, arg, wt, w = merged_sums(m, s, u, q, arg, wt, w, 1, False)
        store_sums(partial, 2 * split + HALF, lane_row, N, m, s, u, q, arg, wt, w)
    if exponentials is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "K", "ignore_index"])
def statistics_kernel(
    hidden,  # [N, H] descriptor, blocks [BN, BH]
    weight,  # [V, H] descriptor, blocks [BV / 2, BH]
    labels,  # [N]
    label_logit,  # [N] fp32 out, written where the label lies in this stretch
    partial,  # Sums, [2 * splits, N] each
    exponentials,  # [K, tiles * BV] out, descriptor, blocks [BN, BV / 4]; or None
    kept_shift,  # [2 * tiles, K] out; or None
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
):
    rings = operand_rings(hidden, weight, HIDDEN_STAGES if exponentials is None else HIDDEN_STAGES_BESIDE_RESULTS)
    tokens = (labels, label_logit, transform, omega, ignore_index)
    stretch = (N, V, splits)
    kept = (None, None, None, K)
    if exponentials is not None:
        results = gl.allocate_shared_memory(exponentials.dtype, [4, BN // 2, BV // 4], exponentials.layout)
        kept = (exponentials, kept_shift, results, K)
    gl.warp_specialize(
        [
            (_statistics_product, (rings, tokens, partial, kept, stretch, 0, H, BN, BV, BH, GROUP)),
            (_statistics_product, (rings, tokens, partial, kept, stretch, 1, H, BN, BV, BH, GROUP)),
            (_statistics_product, (rings, tokens, partial, kept, stretch, 2, H, BN, BV, BH, GROUP)),
            (_statistics_product, (rings, tokens, partial, kept, stretch, 3, H, BN, BV, BH, GROUP)),
            (_statistics_load, (hidden, weight, rings, labels, ignore_index, stretch, 0, H, BN, BV, GROUP)),
            (_statistics_load, (hidden, weight, rings, labels, ignore_index, stretch, 1, H, BN, BV, GROUP)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )
