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
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton

from rlhf_losses import __version__, linear_log_probs

MIB = 2**20
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
RUNS_A_TURN = 4


def peaked(tokens: int, depth: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 hidden states, head and labels whose distributions range from flat to certain, as trained models' do."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    weight = normal(vocab, depth)
    weight = weight / weight.float().norm(dim=1, keepdim=True).to(torch.bfloat16)
    labels = torch.randint(vocab, (tokens,), device="cuda", generator=generator)
    peak = torch.rand(tokens, 1, device="cuda", generator=generator) * 28
    hidden = (2 * normal(tokens, depth).float() + peak * weight[labels].float()).to(torch.bfloat16)
    return hidden, weight, labels


def truth(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probabilities and entropies in fp64."""
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def errors(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    rows = torch.linspace(0, len(hidden) - 1, CHECKED_ROWS, device="cuda").long()
    log_probs, entropy = truth(hidden[rows], weight, labels[rows])
    stats = linear_log_probs(hidden, weight, labels)
    return {
        "log_prob_error": (stats.log_probs[rows] - log_probs).abs().max().item(),
        "entropy_error": (stats.entropy[rows] - entropy).abs().max().item(),
    }


def interleaved_medians(providers: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Milliseconds a run by provider; the first turn of each does not count."""
    times: dict[str, list[float]] = {name: [] for name in providers}
    for turn in range(turns + 1):
        for name, run in providers.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            start.record()
            for _ in range(RUNS_A_TURN):
                run()
            stop.record()
            stop.synchronize()
            if turn > 0:
                times[name].append(start.elapsed_time(stop) / RUNS_A_TURN)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_extra_mib(run: Callable[[], object]) -> float:
    """Device memory that a call needs beyond what was allocated before it, its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    del kept
    return extra / MIB


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
    commit = (
        arguments.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    shapes = SHAPES[:3] if arguments.quick else SHAPES
    results = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rlhf_losses": __version__,
        "commit": commit,
        "rows": [],
    }
    for tokens, depth, vocab, *_ in shapes:
        results["rows"].append(measure(tokens, depth, vocab, arguments.turns))
        torch.cuda.empty_cache()
        print(json.dumps(results["rows"][-1]), flush=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
