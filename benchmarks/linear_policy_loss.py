"""``linear_policy_loss`` in one pass beside two passes, a cache, bare cuBLAS GEMMs, Liger and verl, in one process.

    python benchmarks/linear_policy_loss.py --out benchmarks/results/NAME [--quick]
    python benchmarks/linear_policy_loss.py --out dry --size tiny --device cpu

Writes NAME.json and NAME.md. A run is forward and backward of a PPO loss with entropy bonus on peaked bf16 data, with
gradients to hidden states and head. Everybody gets the same tensors and, from log-probability and entropy on, the same
``policy_loss``. One pass can do with three GEMMs (logits, d_hidden, d_weight), two passes take a fourth: the logits
again. Providers take turns as in linear_log_probs.py. Nothing is timed before our numbers have been found right.

- Truth is fp64, of all tokens: what each ratio and each clip should be, and the gradients of 64 rows of the hidden
  states and of 64 rows of the head, half of them labels of tokens, half of them at random.
- The log-ratios are chosen, by old_log_probs, far from the bounds of the clip, so that no rounding moves a token over
  one. 64 tokens lie outside of all others: the largest and the smallest ratio, which every provider reports, tell how
  far its log-probabilities of these tokens are off.
- Skipping: half of the tokens, at random, have advantage 0. Without an entropy bonus they have no gradient. The full
  run beside it has no bonus either, and all of its tokens are inside of the clip.
- Liger: the function and arguments of verl's back end "liger". Any path but the SM90 kernel ends the benchmark.
- Memory: peak beyond the inputs, results included.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import MIB, facts, interleaved_medians, package_version, peak_extra_mib, peaked, truth
from policy_case import BOUNDS, Case, Outcome, errors, expected, make_case
from torch import Tensor

from rlhf_losses import (
    LossOutput,
    PolicyBatch,
    PolicyLossConfig,
    TokenStats,
    linear_log_probs,
    linear_policy_loss,
    policy_loss,
)

# (tokens, hidden size, vocabulary); the memory of one pass is taken with the last two of the first shape.
SHAPES = {
    "full": [(16384, 4096, 151936), (8192, 4096, 131072)],
    "tiny": [(256, 64, 1000), (192, 32, 700)],
}
MEMORY_TOKENS = {"full": (16384, 32768, 65536), "tiny": (256, 512, 1024)}
PARTS = ("one-pass", "two-passes", "cache", "gemms", "liger", "verl", "half", "memory")
LIGER_PATH = "LigerFusedScaledCrossEntropySM90FunctionBackward"
RIVAL_PACKAGES = {"liger": "liger_kernel", "verl": "verl"}
RUNS_A_TURN = 3
# Large for a bonus, so that a wrong gradient of the entropy is seen beside that of the policy.
ENTROPY_COEFFICIENT = 0.1
# Bytes of cache for a logit: a bf16 exponential, and room for what goes with a tile.
CACHED_LOGIT = 2.1
# What is divided by what, and the bound.
REQUIRED = [
    ("one pass to three GEMMs", "one pass", "three GEMMs", "<=", 1.10),
    ("Liger to one pass", "Liger SM90", "one pass", ">=", 1.25),
    ("verl triton to one pass", "verl triton", "one pass", ">=", 2.0),
    ("half of the advantages 0 to all tokens", "one pass, no bonus, half", "one pass, no bonus", "<=", 0.72),
]


@dataclass(frozen=True)
class Provider:
    """Something to time; ``case`` is None for what computes no loss."""

    run: Callable[[], object]
    case: Case | None = None
    ours: bool = False


def graded(case: Case, output: LossOutput) -> Outcome:
    gradients = torch.autograd.grad(output.loss, (case.hidden, case.weight))
    return Outcome(output.loss.detach(), output.metrics, *gradients)


def one_pass(case: Case, workspace_bytes: int | None = None) -> Outcome:
    inputs = (case.hidden, case.weight, case.labels, case.batch, case.config)
    return graded(case, linear_policy_loss(*inputs, workspace_bytes=workspace_bytes))


def by_stats(case: Case, head: Callable[[Tensor, Tensor, Tensor], TokenStats]) -> Outcome:
    return graded(case, policy_loss(head(case.hidden, case.weight, case.labels), case.batch, case.config))


def liger_head() -> Callable[[Tensor, Tensor, Tensor], TokenStats]:
    """Liger's fused linear, log-probability and entropy, called as verl's FusedLinearForPPO calls it."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> TokenStats:
        nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, labels, 1.0, -100, 1, True)
        path = type(nll.grad_fn).__name__
        if path != LIGER_PATH:
            sys.exit(f"Liger: expected its SM90 kernel, {LIGER_PATH}, got {path}; leave it out with --only")
        return TokenStats(log_probs=-nll, entropy=entropy)

    return head


def verl_head() -> Callable[[Tensor, Tensor, Tensor], TokenStats]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> TokenStats:
        log_probs, entropy = linear_cross_entropy(hidden, weight, labels, 1.0, "none")
        return TokenStats(log_probs=log_probs, entropy=entropy)

    return head


def gemms(case: Case, count: int) -> Callable[[], None]:
    """The products of a pass: logits (again, if there are four), d_hidden, d_weight, on logits of their true size."""
    h, w = case.hidden.detach(), case.weight.detach()
    logits = torch.mm(h, w.T)
    d_hidden, d_weight = torch.empty_like(h), torch.empty_like(w)

    def run() -> None:
        for _ in range(count - 2):
            torch.mm(h, w.T, out=logits)
        torch.mm(logits, w, out=d_hidden)
        torch.mm(logits.T, h, out=d_weight)

    return run


def providers(case: Case, inside: Case, half: Case, parts: set[str], workspaces: list[int]) -> dict[str, Provider]:
    found: dict[str, Provider] = {}

    def add(part: str, name: str, function: Callable[..., Outcome], case: Case = case, ours: bool = True) -> None:
        if part in parts:
            found[name] = Provider(partial(function, case), case, ours)

    add("one-pass", "one pass", one_pass)
    for size in workspaces:
        add("one-pass", f"one pass, workspace {size / MIB:g} MiB", partial(one_pass, workspace_bytes=size))
    add("two-passes", "two passes", partial(by_stats, head=linear_log_probs))
    everything = int(CACHED_LOGIT * len(case.labels) * len(case.weight))
    for rows, size in (("all", everything), ("half of the", everything // 2)):
        head = partial(linear_log_probs, cache_bytes=size)
        add("cache", f"two passes, {rows} rows cached", partial(by_stats, head=head))
    if "liger" in parts:
        add("liger", "Liger SM90", partial(by_stats, head=liger_head()), ours=False)
    if "verl" in parts:
        add("verl", "verl triton", partial(by_stats, head=verl_head()), ours=False)
    add("half", "one pass, no bonus", one_pass, inside)
    add("half", "one pass, no bonus, half", one_pass, half)
    if "gemms" in parts:
        found |= {f"{name} GEMMs": Provider(gemms(case, count)) for name, count in (("three", 3), ("four", 4))}
    return found


def check(name: str, provider: Provider, truths: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, float]:
    """The errors of a provider; ours has to be right, and in one pass where it says so."""
    assert provider.case is not None
    outcome = provider.run()
    found = errors(provider.case, outcome, truths)
    if provider.ours and not all(found[key] <= bound for key, bound in BOUNDS.items()):
        sys.exit(f"{name}: wrong numbers, nothing timed: {found}, bounds {BOUNDS}")
    if name.startswith("one pass") and int(outcome.metrics["passes"]) != 1:
        sys.exit(f"{name}: expected one pass, got {int(outcome.metrics['passes'])}; nothing timed")
    return found


def measure(shape: tuple[int, int, int], parts: set[str], arguments: argparse.Namespace) -> dict:
    data = peaked(*shape, device=arguments.device)
    true = truth(*data)
    data[0].requires_grad_()
    data[1].requires_grad_()
    case = make_case(data, true, steps=[-0.4, -0.1, 0.0, 0.1, 0.4], extreme=0.6, bonus=ENTROPY_COEFFICIENT)
    unclipped = partial(make_case, data, true, steps=[-0.1, 0.0, 0.1], extreme=0.15, bonus=0.0)
    inside, half = unclipped(), unclipped(kept=0.5)
    timed = providers(case, inside, half, parts, arguments.workspace_bytes)
    truths = {id(x): expected(x) for x in (case, inside, half)}
    rows: dict[str, dict] = {name: {} for name in timed}
    for name, provider in timed.items():
        if provider.case is not None:
            rows[name] |= check(name, provider, truths[id(provider.case)])
            if arguments.device == "cuda":
                rows[name]["memory_mib"] = peak_extra_mib(provider.run)
    runs = {name: provider.run for name, provider in timed.items()}
    for name, time_of_run in interleaved_medians(runs, arguments.turns, RUNS_A_TURN, arguments.device).items():
        rows[name]["ms"] = time_of_run
    return {"shape": " x ".join(map(str, shape)), "providers": rows}


def memory(tokens: int, depth: int, vocab: int, device: str) -> dict[str, float | None]:
    """Peak of one pass, and how much of it is its results."""
    hidden, weight, labels = peaked(tokens, depth, vocab, device)
    old = linear_log_probs(hidden, weight, labels, outputs=("log_probs",))
    batch = PolicyBatch(advantages=torch.randn(tokens, device=device), old_log_probs=old.log_probs)
    config = PolicyLossConfig.preset("ppo", entropy_coefficient=ENTROPY_COEFFICIENT)
    case = Case(hidden.requires_grad_(), weight.requires_grad_(), labels, old, batch, config, 0.0)
    outcome = one_pass(case)
    results = sum(gradient.nbytes for gradient in (outcome.d_hidden, outcome.d_weight)) / MIB
    del outcome
    peak = peak_extra_mib(partial(one_pass, case)) if device == "cuda" else None
    return {"tokens": tokens, "memory_mib": peak, "results_mib": results}


def required(results: dict) -> list[dict]:
    """The ratios asked for; value and met are None where a part of one was not measured."""
    table = []
    for row in results["rows"]:
        for what, above, below, sign, bound in REQUIRED:
            over, under = (row["providers"].get(name, {}).get("ms") for name in (above, below))
            value = None if over is None or under is None else over / under
            met = None if value is None else value <= bound if sign == "<=" else value >= bound
            table.append({"what": what, "shape": row["shape"], "value": value, "bound": f"{sign} {bound}", "met": met})
    if results["memory"]:
        few, many = results["memory"][0], results["memory"][-1]
        limit = None if few["memory_mib"] is None else few["memory_mib"] + many["results_mib"] - few["results_mib"]
        what = f"MiB of one pass: as with {few['tokens']} tokens, and the larger results"
        bound = "not measured" if limit is None else f"<= {limit:.1f}"
        met = None if limit is None else many["memory_mib"] <= limit
        shape = f"{many['tokens']} tokens"
        table.append({"what": what, "shape": shape, "value": many["memory_mib"], "bound": bound, "met": met})
    return table


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown(results: dict) -> str:
    packages = ", ".join(f"{name} {found or 'absent'}" for name, found in results["packages"].items())
    lines = [
        f"# linear_policy_loss beside two passes, cuBLAS, Liger and verl, {results['date']}",
        "",
        f"{results['device']}, torch {results['torch']}, Triton {results['triton']}, {packages}; rlhf_losses "
        f"{results['rlhf_losses']} at commit {results['commit']}. PPO with entropy bonus, forward and backward, bf16. "
        f"Medians of {results['turns']} interleaved turns in one process; errors against fp64 (of log-probabilities "
        f"and loss absolute, of gradients relative to the largest). Liger's path: {results['liger_path'] or 'not run'}."
        f" Left out: {', '.join(f'{name} ({why})' for name, why in results['absent'].items()) or 'nothing'}.",
        "",
        "| required | at | value | bound | met |",
        "|---|---|---|---|---|",
    ]
    verdict = {None: "not measured", True: "yes", False: "**no**"}
    for line in results["required"]:
        value, met = shown(line["value"], ".3f"), verdict[line["met"]]
        lines.append(f"| {line['what']} | {line['shape']} | {value} | {line['bound']} | {met} |")
    for row in results["rows"]:
        one = row["providers"].get("one pass", {}).get("ms")
        columns = "ms | to one pass | memory MiB | log-prob error | loss error | d_hidden error | d_weight error"
        lines += ["", f"| {row['shape']} | {columns} |", "|---|---|---|---|---|---|---|---|"]
        for name, found in row["providers"].items():
            cells = [shown(found["ms"], ".2f"), shown(None if one is None else found["ms"] / one, ".3f")]
            cells += [shown(found.get("memory_mib"), ".0f"), *(shown(found.get(key), ".1e") for key in BOUNDS)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if results["memory"]:
        lines += ["", "| tokens | memory of one pass, MiB | of it d_hidden and d_weight |", "|---|---|---|"]
    for line in results["memory"]:
        lines.append(f"| {line['tokens']} | {shown(line['memory_mib'], '.1f')} | {line['results_mib']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without suffix")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the first shape alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="leave out the other parts")
    parser.add_argument("--workspace-bytes", nargs="+", type=int, default=[], help="sizes to time one pass with, too")
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="what git says here, unless given")
    arguments = parser.parse_args()
    begin, parts, absent = time.monotonic(), set(arguments.only), {}
    for part in parts & set(RIVAL_PACKAGES):
        if importlib.util.find_spec(RIVAL_PACKAGES[part]) is None:
            absent[part] = "not installed"
        elif arguments.device == "cpu":
            absent[part] = "needs a GPU"
    parts -= set(absent)
    results = {
        **facts(arguments.commit, arguments.device),
        "packages": {name: package_version(name) for name in ("liger_kernel", "nvidia-cutlass-dsl", "verl")},
        "liger_path": LIGER_PATH if "liger" in parts else None,
        "absent": absent,
        "turns": arguments.turns,
        "rows": [],
    }
    for shape in SHAPES[arguments.size][: 1 if arguments.quick else None]:
        if parts - {"memory"}:
            results["rows"].append(measure(shape, parts, arguments))
            print(json.dumps(results["rows"][-1]), flush=True)
    _, depth, vocab = SHAPES[arguments.size][0]
    sizes = MEMORY_TOKENS[arguments.size] if "memory" in parts else ()
    results["memory"] = [memory(tokens, depth, vocab, arguments.device) for tokens in sizes]
    results["required"] = required(results)
    results["seconds"] = round(time.monotonic() - begin)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
