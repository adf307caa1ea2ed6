"""Time, memory and accuracy of ``linear_log_probs`` beside bare cuBLAS GEMMs of the same shape, in one process.

    python benchmarks/linear_log_probs.py --out benchmarks/results/NAME [--quick]

Writes NAME.json and NAME.md. The GEMMs are what no version of this op can do without: one for the forward
(hidden @ weight.T, which writes the logits), four for forward and backward (logits, logits again, d_hidden, d_weight).
Providers take turns, so that a clock that drifts drifts for all; at its turn a provider runs several times back to back
and the runs after the first are timed, as in a trainer that never lets the device run dry. Medians of the turns are
reported. Nothing is timed before the numbers have been found right against fp64.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from common import MIB, facts, interleaved_medians, peak_extra_mib, peaked, truth

from rlhf_losses import linear_log_probs

# (tokens, hidden size, vocabulary), and the most that forward and forward + backward may take relative to the GEMMs.
SHAPES = [
    (16384, 4096, 151936, 1.03, 1.05),
    (8192, 2048, 131072, 1.03, 1.05),
    (16384, 896, 151936, 1.12, 1.05),
    (4096, 4096, 151936, None, None),
    (8192, 4096, 131072, None, None),
]
LOG_PROB_BOUND, ENTROPY_BOUND = 1e-4, 4e-4
CHECKED_ROWS = 64


def errors(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    rows = torch.linspace(0, len(hidden) - 1, CHECKED_ROWS, device="cuda").long()
    true = truth(hidden[rows], weight, labels[rows])
    stats = linear_log_probs(hidden, weight, labels)
    return {
        "log_prob_error": (stats.log_probs[rows] - true.log_probs).abs().max().item(),
        "entropy_error": (stats.entropy[rows] - true.entropy).abs().max().item(),
    }


def measure(tokens: int, depth: int, vocab: int, turns: int) -> dict[str, float]:
    hidden, weight, labels = peaked(tokens, depth, vocab)
    row: dict[str, float] = {"N": tokens, "H": depth, "V": vocab, **errors(hidden, weight, labels)}
    if row["log_prob_error"] > LOG_PROB_BOUND or row["entropy_error"] > ENTROPY_BOUND:
        sys.exit(f"wrong numbers, nothing timed: {row}")
    upstream = torch.randn(2, tokens, device="cuda")
    hidden.requires_grad_()
    weight.requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            linear_log_probs(hidden, weight, labels)

    def both() -> tuple[torch.Tensor, ...]:
        stats = linear_log_probs(hidden, weight, labels)
        return torch.autograd.grad((stats.log_probs, stats.entropy), (hidden, weight), tuple(upstream))

    row["memory_mib"] = peak_extra_mib(both)
    row["memory_bound_mib"] = (vocab * depth * 2 + tokens * depth * 4) / MIB + 640
    h, w = hidden.detach(), weight.detach()
    logits = torch.empty(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    d_hidden, d_weight = torch.empty_like(h), torch.empty_like(w)

    def one_gemm() -> None:
        torch.mm(h, w.T, out=logits)

    def four_gemms() -> None:
        torch.mm(h, w.T, out=logits)
        torch.mm(h, w.T, out=logits)
        torch.mm(logits, w, out=d_hidden)
        torch.mm(logits.T, h, out=d_weight)

    # GEMMs on logits of their true size: zeros would run faster.
    one_gemm()
    row |= {
        f"{name}_ms": time
        for name, time in interleaved_medians(
            {"forward": forward, "one_gemm": one_gemm, "both": both, "four_gemms": four_gemms}, turns
        ).items()
    }
    row["forward_ratio"] = row["forward_ms"] / row["one_gemm_ms"]
    row["both_ratio"] = row["both_ms"] / row["four_gemms_ms"]
    row["tflops_both"] = 8 * tokens * depth * vocab / row["both_ms"] / 1e9
    return row


def markdown(results: dict) -> str:
    lines = [
        f"# linear_log_probs beside cuBLAS, {results['date']}",
        "",
        f"{results['device']}, torch {results['torch']}, Triton {results['triton']}, rlhf_losses "
        f"{results['rlhf_losses']} at commit {results['commit']}; bf16, log_probs and entropy, both with gradient. "
        "Medians of interleaved runs in one process. Ratios: forward to one GEMM of the shape (which writes the "
        "logits), forward and backward to four; in brackets the most they may be. Errors: largest against fp64 on "
        f"{CHECKED_ROWS} rows of peaked data. Memory: peak beyond the inputs, results included, and its bound "
        "(d_weight + d_hidden in fp32 + 640 MiB).",
        "",
        "| N x H x V | forward ms | ratio | forward+backward ms | ratio | TFLOP/s (8NHV) | log-prob error | "
        "entropy error | memory MiB | bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, shape in zip(results["rows"], SHAPES, strict=False):
        bounds = ["" if bound is None else f" ({bound:.2f})" for bound in shape[3:]]
        lines.append(
            f"| {row['N']} x {row['H']} x {row['V']} | {row['forward_ms']:.2f} | {row['forward_ratio']:.3f}{bounds[0]} "
            f"| {row['both_ms']:.2f} | {row['both_ratio']:.3f}{bounds[1]} | {row['tflops_both']:.0f} "
            f"| {row['log_prob_error']:.1e} | {row['entropy_error']:.1e} | {row['memory_mib']:.0f} "
            f"| {row['memory_bound_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without suffix")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the first three shapes alone")
    parser.add_argument("--commit", help="what git says here, unless given")
    arguments = parser.parse_args()
    shapes = SHAPES[:3] if arguments.quick else SHAPES
    results = {**facts(arguments.commit), "rows": []}
    for tokens, depth, vocab, *_ in shapes:
        results["rows"].append(measure(tokens, depth, vocab, arguments.turns))
        torch.cuda.empty_cache()
        print(json.dumps(results["rows"][-1]), flush=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
