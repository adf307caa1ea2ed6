"""Statistics of every token's logits in one pass over the vocabulary; no logit reaches memory.

For row n and z = f(hidden_n . weight_v), over tiles of the vocabulary, the running sums of triton_tile.py in fp32, and
z_y, the label's logit. From them, u, wt and log s in base 2 until the end:

    log_prob = z_y - m - log s       entropy = log s - u / s       logsumexp = m + log s       sum_p_squared = q / s^2
    weighted_log_probs = wt - w log s

A program keeps one block of rows and walks one stretch of the vocabulary; a second kernel merges the stretches by the
rule of the running sums. The stretches depend on V and the tile alone, and nothing is summed by atomics: bits repeat
from run to run, and from batch to batch.

FLOPs 2*N*H*V. Bytes from device memory: hidden once, weight once per ``row_group`` of row blocks; partial results
12 to 28 bytes per row and stretch. Products are accumulated in fp32 from 16-bit (or fp32) operands.
Online sums: Milakov and Gimelshein 2018, arXiv:1805.02867; here with the entropy's sum beside them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_losses.kernels.statistics import Kept, RowStatistics
from rlhf_losses.kernels.transform import LogitTransform
from rlhf_losses.kernels.triton_math import LN2, finite_shift, log2
from rlhf_losses.kernels.triton_problem import Problem, Transform, cdiv, launch_context, overlapped_kernels
from rlhf_losses.kernels.triton_tile import (
    NO_COLUMN,
    absorb_tile,
    any_label,
    grouped,
    kept_exponentials,
    label_columns,
    masked_tile,
    merged_sums,
    product_tile,
    store_label_logit,
    store_sums,
    stretch_of,
    transform_tile,
)


class Sums(NamedTuple):
    """The running sums of one stretch of the vocabulary each, [splits, N] in a row; None where not wanted."""

    m: Tensor
    s: Tensor
    u: Tensor | None
    q: Tensor | None
    arg: Tensor | None
    wt: Tensor | None
    w: Tensor | None


@triton.jit(do_not_specialize=["N", "K", "ignore_index"])
def _statistics_kernel(
    hidden,  # [N, H]
    weight,  # [V, H]
    labels,  # [N]
    label_logit,  # [N] fp32 out, written where the label lies in this stretch
    partial: Sums,  # [splits, N] each
    values,  # [K, tiles * BV] out; or None
    kept_shift,  # [tiles, K] out; or None
    transform: Transform,
    omega,  # [V] fp32, or None
    ignore_index,
    stride_n,
    stride_v,
    N,
    K,
    V,
    splits,
    H: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    row_blocks = tl.cdiv(N, BN)
    for item in range(tl.program_id(0), row_blocks * splits, tl.num_programs(0)):
        block, split = grouped(item, row_blocks, splits, GROUP)
        n0 = block * BN
        n = n0 + tl.arange(0, BN)
        label = label_columns(labels, n, N, V)
        m = tl.full([BN], float("-inf"), tl.float32)
        s = tl.zeros([BN], tl.float32)
        u = tl.zeros([BN], tl.float32)
        q = tl.zeros([BN], tl.float32)
        arg = tl.zeros([BN], tl.int32)
        wt = tl.zeros([BN], tl.float32)
        w = tl.zeros([BN], tl.float32)
        # A block whose tokens are all ignored walks no tile.
        counts = tl.load(labels + n, mask=n < N, other=ignore_index) != ignore_index
        first, last = stretch_of(split, splits, tl.cdiv(V, BV))
        for tile in range(first, last * tl.max(counts.to(tl.int32), 0)):
            v0 = tile * BV
            v = v0 + tl.arange(0, BV)
            a = product_tile(
                hidden, weight, stride_n, stride_v, n0, v0, N, V, H, BN, BV, BH, DESCRIPTORS, PRECISION
            )  # fmt: skip
            z, _ = transform_tile(a, transform, n, v, N, V)
            z = masked_tile(z, v, v0, V, BV)
            if any_label(label, v0, BV):
                store_label_logit(label_logit, z, n, v, v0, label, BV)
            e, m, s, u, q, arg, wt, w = absorb_tile(
                z, v, V, omega, m, s, u, q, arg, wt, w,
                partial.u is not None, partial.q is not None, partial.arg is not None, EXACT,
            )  # fmt: skip
            if values is not None:  # noqa: SIM102 (decided at compile time, the place of the block is not)
                if n0 < K:
                    # Of fp32, whose products are true, those: as large as e, and exact.
                    kept = (
                        a if EXACT else kept_exponentials(e, hidden.dtype if DESCRIPTORS else hidden.dtype.element_ty)
                    )
                    if DESCRIPTORS:
                        values.store([n0, v0], kept)
                    else:
                        at = n.to(tl.int64)[:, None] * (tl.cdiv(V, BV) * BV) + v[None, :]
                        tl.store(values + at, kept, mask=(n < K)[:, None])
                    tl.store(kept_shift + tile * K + n, m, mask=n < K)
        store_sums(partial, split, n, N, m, s, u, q, arg, wt, w)


@triton.jit
def _settled(value, bad, ignored):
    return tl.where(ignored, 0.0, tl.where(bad, float("nan"), value))


@triton.jit
def store_statistics(out, n, inside, V, label, ignore_index, m, s, u, q, arg, wt, w, z_y):
    """The closed forms of statistics.py in their range, NaN kept; then as ``settle`` has it: 0 ignored, NaN bad."""
    ignored = label == ignore_index
    bad = (label < 0) | (label >= V)
    log_sum = log2(s)
    log_prob = (z_y - finite_shift(m)) - log_sum * LN2
    tl.store(out.shift + n, _settled(m, bad, ignored), mask=inside)
    tl.store(out.norm + n, _settled(log_sum, bad, ignored), mask=inside)
    tl.store(out.log_probs + n, _settled(tl.where(log_prob > 0.0, 0.0, log_prob), bad, ignored), mask=inside)
    if out.entropy is not None:
        entropy = (log_sum - u / s) * LN2
        most = tl.log2(V * 1.0) * LN2
        entropy = tl.where(entropy < 0.0, 0.0, tl.where(entropy > most, most, entropy))
        tl.store(out.entropy + n, _settled(entropy, bad, ignored), mask=inside)
    if out.logsumexp is not None:
        tl.store(out.logsumexp + n, _settled(m + log_sum * LN2, bad, ignored), mask=inside)
    if out.sum_p_squared is not None:
        ratio = q / (s * s)
        tl.store(out.sum_p_squared + n, _settled(tl.where(ratio > 1.0, 1.0, ratio), bad, ignored), mask=inside)
    if out.weighted_log_probs is not None:
        weighted = (wt - w * log_sum) * LN2
        tl.store(out.weighted_log_probs + n, _settled(weighted, bad, ignored), mask=inside)
    if out.argmax is not None:
        tl.store(out.argmax + n, tl.where(ignored, 0, tl.where(bad, -1, arg.to(tl.int64))), mask=inside)


@triton.jit(do_not_specialize=["N", "ignore_index"])
def _merge_kernel(
    partial: Sums,  # [splits, N] each
    labels,  # [N]
    label_logit,  # [N]
    out: RowStatistics,  # [N] each
    ignore_index,
    N,
    V,
    splits,
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & (n < N)[None, :]
    at = split.to(tl.int64)[:, None] * N + n[None, :]
    m = tl.load(partial.m + at, mask=inside, other=float("-inf"))
    s = tl.load(partial.s + at, mask=inside, other=0.0)
    u = s
    q = s
    arg = s.to(tl.int32)
    wt = s
    w = s
    if partial.u is not None:
        u = tl.load(partial.u + at, mask=inside, other=0.0)
    if partial.q is not None:
        q = tl.load(partial.q + at, mask=inside, other=0.0)
    if partial.arg is not None:
        arg = tl.load(partial.arg + at, mask=inside, other=NO_COLUMN)
    if partial.wt is not None:
        wt = tl.load(partial.wt + at, mask=inside, other=0.0)
        w = tl.load(partial.w + at, mask=inside, other=0.0)
    m, s, u, q, arg, wt, w = merged_sums(m, s, u, q, arg, wt, w, 0, True)
    label = tl.load(labels + n, mask=n < N, other=0)
    z_y = tl.load(label_logit + n, mask=n < N, other=0.0)
    store_statistics(out, n, n < N, V, label, ignore_index, m, s, u, q, arg, wt, w, z_y)


def empty_statistics(rows: int, wanted: frozenset[str], device: torch.device) -> RowStatistics:
    always = ("shift", "norm", "log_probs")
    return RowStatistics(
        **{
            name: torch.empty(rows, device=device, dtype=torch.int64 if name == "argmax" else torch.float32)
            if name in wanted or name in always
            else None
            for name in RowStatistics._fields
        }
    )


def linear_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    wanted: frozenset[str],
    omega: Tensor | None,
    ignore_index: int,
    workspace_bytes: int,
    keep_rows: int,
) -> tuple[RowStatistics, Kept | None]:
    """hidden [N, H], weight [V, H] of one dtype, labels [N] -> statistics [N], and what is kept of the first rows."""
    del workspace_bytes  # partial results take 12 to 28 bytes per row and stretch, whatever the workspace
    rows, vocab, device = len(hidden), len(weight), hidden.device
    problem = Problem.of(hidden, weight, transform)
    width, tiles = problem.tile.columns, cdiv(vocab, problem.tile.columns)
    splits = min(problem.tile.splits, tiles)
    # The halves of a Hopper block leave results of their own.
    halves = 2 if problem.overlapped else 1

    there = {
        "u": "entropy" in wanted,
        "q": "sum_p_squared" in wanted,
        "arg": "argmax" in wanted,
        "wt": omega is not None,
        "w": omega is not None,
    }
    # One allocation; each part starts where a tensor would, for which the kernels are compiled.
    size = cdiv(halves * splits * rows, 16) * 16
    label_logit, m, s, *others = torch.empty(3 + sum(there.values()), size, device=device).unbind()
    parts = dict.fromkeys(there) | dict(zip((name for name, needed in there.items() if needed), others, strict=True))
    if parts["arg"] is not None:
        parts["arg"] = parts["arg"].view(torch.int32)
    sums = Sums(m, s, **parts)
    out = empty_statistics(rows, wanted, device)
    kept = None
    if keep_rows:
        kept = Kept(hidden.new_empty(keep_rows, tiles * width), torch.empty(halves * tiles, keep_rows, device=device))
    with launch_context(device):
        keeping = (None, None) if kept is None else (problem.result_blocks(kept.values), kept.shift)
        arguments = (
            problem.hidden,
            problem.weight,
            labels,
            label_logit,
            sums,
            *keeping,
            problem.transform,
            omega,
            ignore_index,
        )
        stretches = (rows, keep_rows, vocab, splits)
        grid = (problem.programs(splits),)
        if problem.overlapped:
            kernels = overlapped_kernels()
            kernels.statistics[grid](*arguments, *stretches, **problem.constants, **kernels.options)
        else:
            strides = (problem.stride_n, problem.stride_v)
            _statistics_kernel[grid](*arguments, *strides, *stretches, **problem.constants)
        merge_rows = 64
        _merge_kernel[(cdiv(rows, merge_rows),)](
            sums,
            labels,
            label_logit,
            out,
            ignore_index,
            rows,
            vocab,
            halves * splits,
            SPLITS=triton.next_power_of_2(halves * splits),
            BN=merge_rows,
        )
    return out, kept
