"""The op beside bare cuBLAS products, other implementations and itself, on the heads that people train.

    rlhf-losses bench --out NAME                          # all of it: about 8 minutes of an H200
    rlhf-losses bench --out NAME --models Qwen3-8B --tokens 16384 --tasks train
    rlhf-losses bench --out NAME --size tiny --device cpu
    rlhf-losses bench --make-real FILE                    # hidden states of SmolLM2-135M on text
    rlhf-losses bench --out NAME --real FILE.hidden.pt FILE.weight.pt [--models]
    rlhf-losses bench --out NAME --merge A.json B.json    # one report of several runs

Writes NAME.json and NAME.md after every shape, and NAME.png at the end (with matplotlib). Tasks and providers are in
providers.py, shapes in shapes.py, what has to be reached in report.py.

- Data are bf16. Truth is fp64. Nothing of a shape is timed before our numbers on it have been found right; rivals'
  errors stand beside their times.
- All providers of a shape take turns in one process, in another order each turn, each behind untimed products of about
  8 ms: a card that has just copied memory is cooler, and faster, than one in training. A median of 5 turns is reported,
  of 3 where a GEMM takes longer than 15 ms. In a turn a provider runs as often as fits into 12 ms.
- GEMMs are products on logits of their true size: 1 writes the logits, 3 are a pass (logits, d_hidden, d_weight), and 4
  are two passes (the logits again).
- Skipping: a quarter of the tokens, at random, is masked, a quarter more has advantage 0. The reference is made from
  the op on the active tokens alone, gathered beforehand: forward of the unmasked + backward of those with a gradient.
  In one pass, where these can't be timed apart, one third of the time for the unmasked, had all of them a gradient,
  + two thirds of that for those which have one, as of the three products.
- Slow rivals run up to 8192 tokens, and at 16384 x 4096 x 151936.
- Memory: peak beyond the inputs, results included.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from rlhf_losses import TokenStats
from rlhf_losses.benchmarks import report
from rlhf_losses.benchmarks.checks import (
    BOUNDS,
    Case,
    Outcome,
    Truth,
    cross_entropy_truth,
    is_right,
    loss_errors,
    make_case,
    policy_truth,
    token_errors,
    token_truth,
)
from rlhf_losses.benchmarks.common import (
    MIB,
    Timed,
    error_line,
    facts,
    interleaved_medians,
    package_version,
    with_peak_mib,
)
from rlhf_losses.benchmarks.data import Problem, load_real, make_real, peaked
from rlhf_losses.benchmarks.providers import PROVIDERS, TASKS, Provider, evaluate, loss_of
from rlhf_losses.benchmarks.shapes import SIZES

# What an H200 reaches on long bf16 products once it is warm. From it follow runs and turns, and no result.
FLOPS_A_MS = 660e9
LEAD_IN_MS, TURN_MS, MOST_LEAD_INS, MOST_RUNS = 8, 12, 16, 8
LONG_MS, LONG_TURNS = 15, 3
SLOW_TOKENS, SLOW_TOO = 8192, (16384, 4096, 151936)
MASKED, IDLE = 0.25, 0.25
# With fewer, no token of both signs is left to be active, masked and idle.
LEAST_TOKENS = 8
# Large for a bonus, so that a wrong gradient of the entropy is seen beside that of the policy.
ENTROPY_COEFFICIENT = 0.1
PACKAGES = ("verl", "liger_kernel", "nvidia-cutlass-dsl", "cut-cross-entropy", "quack-kernels")
Key = tuple[str, str]  # task, provider


def make_cases(problem: Problem, tasks: Sequence[str]) -> dict[str, Case]:
    """By task."""
    true = token_truth(problem)
    train = make_case(problem, true, steps=[-0.4, -0.1, 0.0, 0.1, 0.4], extreme=0.6, bonus=ENTROPY_COEFFICIENT)
    cases = dict.fromkeys(tasks, train)
    if "skip" in tasks:
        # All inside of the clip, so that no other token is without a gradient.
        steps = [-0.1, 0.0, 0.1]
        cases["skip"] = make_case(problem, true, steps=steps, extreme=0.15, bonus=0.0, masked=MASKED, idle=IDLE)
    return cases


def errors_of(
    task: str, case: Case, provider: Provider, result: TokenStats | Outcome, truths: dict[str, Truth]
) -> dict[str, float]:
    if isinstance(result, TokenStats):
        return token_errors(case, result)
    if provider.one_pass and int(result.metrics["passes"]) != 1:
        sys.exit(f"{provider.name}, {task}: expected one pass, got {int(result.metrics['passes'])}; nothing timed")
    if task not in truths:
        truths[task] = cross_entropy_truth(case) if task == "cross_entropy" else policy_truth(case)
    return loss_errors(case, result, truths[task])


def checked(provider: Provider, task: str, case: Case, truths: dict[str, Truth], known: set[Key], device: str) -> dict:
    """Errors and memory of a provider, or why it is left out. Wrong numbers of ours end the benchmark."""
    row: dict = {"task": task, "provider": provider.name, "ours": provider.ours, "gemms": provider.tasks[task]}
    run = partial(evaluate, provider, task, case)
    try:
        if (task, provider.name) not in known:
            run()  # compiles, which takes memory of its own
            known.add((task, provider.name))
        result, row["memory_mib"] = with_peak_mib(run, device)
        row["errors"] = errors_of(task, case, provider, result, truths)
    except Exception as error:
        if provider.ours:
            raise
        torch.cuda.empty_cache()
        return row | {"left_out": error_line(error)}
    if provider.ours and not is_right(row["errors"]):
        sys.exit(f"{provider.name}, {task}: wrong numbers, nothing timed: {row['errors']}, bounds {BOUNDS}")
    return row


def why_not(provider: Provider, problem: Problem, device: str) -> str | None:
    """Why a provider that is there does not serve a problem."""
    if problem.softcap is not None and not provider.softcap:
        return "has no softcap"
    if provider.slow and len(problem.labels) > SLOW_TOKENS and problem.shape != SLOW_TOO:
        return f"slow: up to {SLOW_TOKENS} tokens"
    if device != "cpu" and provider.logit_bytes:
        torch.cuda.empty_cache()
        tokens, _, vocab = problem.shape
        needed, free = provider.logit_bytes * tokens * vocab, torch.cuda.mem_get_info()[0]
        if needed > free:
            return f"needs {needed / MIB:.0f} MiB, {free / MIB:.0f} MiB are free"
    return None


def gemms(problem: Problem) -> dict[int, Callable[[], None]]:
    """The products of a forward, a pass and two passes, into buffers they share."""
    h, w = problem.hidden.detach(), problem.weight.detach()
    logits = torch.mm(h, w.T)
    d_hidden, d_weight = torch.empty_like(h), torch.empty_like(w)

    def forward() -> None:
        torch.mm(h, w.T, out=logits)

    def passes(forwards: int) -> None:
        for _ in range(forwards):
            forward()
        torch.mm(logits, w, out=d_hidden)
        torch.mm(logits.T, h, out=d_weight)

    return {1: forward, 3: partial(passes, 1), 4: partial(passes, 2)}


def lead_in(problem: Problem) -> Callable[[], object]:
    """Products of the first tokens, of about LEAD_IN_MS together."""
    share = LEAD_IN_MS * FLOPS_A_MS / problem.flops
    tokens = min(len(problem.labels), max(1, int(len(problem.labels) * share)))
    h, w = problem.hidden.detach()[:tokens], problem.weight.detach()
    out = h.new_empty(tokens, len(w))

    def products() -> None:
        for _ in range(min(MOST_LEAD_INS, max(1, round(share)))):
            torch.mm(h, w.T, out=out)

    return products


class Skip:
    """Runs of the op on active tokens alone, and what they say that a run with idle ones should take."""

    def __init__(self, provider: Provider, case: Case):
        mask, advantages = case.batch.mask, case.batch.advantages
        assert mask is not None
        # Where forward and backward are one, only a run with all gradients says what its forward takes.
        unmasked = case.gathered(mask.nonzero().squeeze(1), none_idle=provider.one_pass)
        active = case.gathered((mask & (advantages != 0)).nonzero().squeeze(1))
        both = partial(evaluate, provider, "skip")
        forward = partial(loss_of, provider, "skip")
        self.one_pass = provider.one_pass
        self.runs: list[Callable[[], object]] = (
            [partial(both, unmasked), partial(both, active)]
            if self.one_pass
            else [partial(forward, unmasked), partial(forward, active), partial(both, active)]
        )

    def reference(self, ms: list[float]) -> float:
        if self.one_pass:
            unmasked, active = ms
            return unmasked / 3 + 2 * active / 3
        forward_unmasked, forward_active, both_active = ms
        return forward_unmasked + both_active - forward_active


def measure(
    problem: Problem, providers: Sequence[Provider], tasks: Sequence[str], known: set[Key], turns: int, device: str
) -> dict:
    """A row of the results: every task of every provider on one problem."""
    tokens, depth, vocab = problem.shape
    cases = make_cases(problem, tasks)
    truths: dict[str, Truth] = {}
    rows: dict[Key, dict] = {}
    timed: dict[object, Timed] = {}
    skips: dict[Key, Skip] = {}

    def add(key: object, run: Callable[[], object], gemms: int) -> None:
        expected = gemms * problem.flops / FLOPS_A_MS
        timed[key] = Timed(run, min(MOST_RUNS, max(1, round(TURN_MS / expected))))

    for provider in providers:
        for task in (task for task in tasks if task in provider.tasks):
            key = task, provider.name
            if (reason := why_not(provider, problem, device)) is not None:
                rows[key] = {"task": task, "provider": provider.name, "ours": provider.ours, "left_out": reason}
                continue
            rows[key] = checked(provider, task, cases[task], truths, known, device)
            if "left_out" in rows[key]:
                continue
            add(key, partial(evaluate, provider, task, cases[task]), provider.tasks[task])
            if task == "skip":
                skips[key] = Skip(provider, cases[task])
                for part, alone in enumerate(skips[key].runs):
                    alone()
                    add((task, provider.name, part), alone, provider.tasks[task])
    for count, products in gemms(problem).items():
        products()
        add(count, products, count)
    long = problem.flops / FLOPS_A_MS > LONG_MS
    turns = min(turns, LONG_TURNS) if long else turns
    ms, failed = interleaved_medians(timed, turns, lead_in(problem), device)
    rivals = {key for key, row in rows.items() if not row["ours"]}
    for key in failed.keys() - rivals:
        sys.exit(f"{key}: {failed[key]}")
    for key, row in rows.items():
        if key in failed:
            row["left_out"] = failed[key]
        elif key in ms:
            row["ms"] = ms[key]
            row["ratio"] = ms[key] / ms[row["gemms"]]
    for (task, name), skip in skips.items():
        parts, row = [ms[task, name, part] for part in range(len(skip.runs))], rows[task, name]
        row |= {"parts_ms": parts, "reference_ms": skip.reference(parts)}
        row["ratio"] = row["ms"] / row["reference_ms"]
    return {
        "model": problem.name,
        "N": tokens,
        "H": depth,
        "V": vocab,
        "softcap": problem.softcap,
        "turns": turns,
        "gemms_ms": {str(count): ms[count] for count in (1, 3, 4)},
        "results": list(rows.values()),
    }


def available(providers: Sequence[Provider], chosen: Sequence[str] | None, device: str) -> tuple[list, dict[str, str]]:
    """Those to run, and why the others are not."""
    found, absent = [], {}
    for provider in providers:
        if chosen and provider.name not in chosen:
            absent[provider.name] = "not asked for"
        elif provider.needs and importlib.util.find_spec(provider.needs) is None:
            absent[provider.name] = "not installed"
        elif provider.needs and device == "cpu":
            absent[provider.name] = "needs a GPU"
        else:
            found.append(provider)
    return found, absent


def problems(arguments: argparse.Namespace) -> Iterator[tuple[str, int, int, Callable[[], Problem]]]:
    """Name, tokens, FLOPs of a product, and the problem when it is called for."""
    models, counts = SIZES[arguments.size]
    for model in models:
        for tokens in arguments.tokens or counts:
            if arguments.models is None or model.name in arguments.models:
                flops = 2 * tokens * model.depth * model.vocab
                yield model.name, tokens, flops, partial(peaked, model, tokens, arguments.device)
    if arguments.real:
        problem = load_real(arguments.real, arguments.device)
        yield problem.name, len(problem.labels), problem.flops, lambda: problem


def run(arguments: argparse.Namespace, providers: Sequence[Provider]) -> dict:
    begin, pace, last = time.monotonic(), 0.0, 0.0
    found, absent = available(providers, arguments.providers, arguments.device)
    results: dict = {
        **facts(arguments.commit, arguments.device),
        "packages": {name: package_version(name) for name in PACKAGES},
        "absent": absent,
        "tasks": list(arguments.tasks),
        "rows": [],
        "left_out": [],
        "seconds": 0,
    }
    known: set[Key] = set()
    model = None
    for name, tokens, flops, make in problems(arguments):
        started = time.monotonic()
        # By the model's shape before it; the first of a model compiles, and says no more than how long it took.
        least = pace * flops if pace and name == model else last
        if arguments.seconds and started - begin + least > arguments.seconds:
            results["left_out"].append(f"{name}, {tokens} tokens: no time left of {arguments.seconds} s")
            continue
        compiles = name != model
        if compiles:
            known, model = set(), name
        row = measure(make(), found, arguments.tasks, known, arguments.turns, arguments.device)
        last = time.monotonic() - started
        pace = 0.0 if compiles else last / flops
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
        results["rows"].append(row)
        results["seconds"] = round(time.monotonic() - begin)
        print(report.line(row), flush=True)
        report.write(results, arguments.out)
    return results


def merged(files: Sequence[Path]) -> dict:
    """One result of several, whose facts must be the same but for date and time."""
    parts = [json.loads(file.read_text()) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        for fact in ("device", "torch", "triton", "rlhf_losses", "commit", "packages", "tasks"):
            if part[fact] != first[fact]:
                raise ValueError(f"--merge: expected one {fact}, got {first[fact]} and, in {file}, {part[fact]}")
    rows = [(row["model"], row["N"]) for part in parts for row in part["rows"]]
    have = set(rows)
    if len(have) < len(rows):
        twice = sorted(shape for shape in have if rows.count(shape) > 1)
        raise ValueError(f"--merge: expected every shape once, got {twice} several times")
    left_out = {line for part in parts for line in part["left_out"]}
    everywhere = set.intersection(*(set(part["absent"]) for part in parts))
    for part in (part for part in parts if part["rows"]):
        shapes = ", ".join(f"{row['model']} {row['N']}" for row in part["rows"])
        left_out |= {f"{name}: {why} ({shapes})" for name, why in part["absent"].items() if name not in everywhere}
    return first | {
        "absent": {name: why for name, why in first["absent"].items() if name in everywhere},
        "rows": [row for part in parts for row in part["rows"]],
        "left_out": sorted(x for x in left_out if not any(x.startswith(f"{m}, {n} tokens:") for m, n in have)),
        "seconds": sum(part["seconds"] for part in parts),
    }


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return int(text)

    return whole_number


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="rlhf-losses bench", description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, help="path of the results, without suffix")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--models", nargs="*", metavar="NAME", help="of the table, instead of all; none for --real alone"
    )
    parser.add_argument("--tokens", nargs="+", type=_at_least(LEAST_TOKENS), metavar="N", help="instead of the table's")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--providers", nargs="+", choices=sorted({provider.name for provider in PROVIDERS}))
    parser.add_argument("--turns", type=_at_least(1), default=5)
    parser.add_argument("--seconds", type=float, help="begin no shape that would end later")
    parser.add_argument("--real", nargs="+", type=Path, metavar="FILE", help="one more shape: what --make-real wrote")
    parser.add_argument("--make-real", type=Path, metavar="FILE", help="write this shape's two files, and no more")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="report these results, time nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="what git says of the checkout, unless given")
    arguments = parser.parse_args(argv)
    if arguments.out is None and arguments.make_real is None:
        parser.error("expected --out NAME, the path of the results without suffix")
    computes = arguments.make_real is None and arguments.merge is None
    if computes and arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU, torch sees none; try --device cpu --size tiny")
    names = [model.name for model in SIZES[arguments.size][0]]
    for option in ("real", "merge"):
        files: list[Path] = getattr(arguments, option) or []
        if missing := [str(file) for file in files if not file.is_file()]:
            parser.error(f"--{option}: expected files that exist, got {', '.join(missing)}")
        if len(set(files)) < len(files):
            parser.error(f"--{option}: expected each file once, got {', '.join(map(str, files))}")
    if arguments.seconds is not None and arguments.seconds <= 0:
        parser.error(f"--seconds: expected a number above 0, got {arguments.seconds}")
    if arguments.models == [] and not arguments.real:
        parser.error("--models: expected names, or --real beside none, got neither")
    if unknown := set(arguments.models or ()) - set(names):
        parser.error(f"--models: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    return arguments


def main(argv: Sequence[str], providers: Sequence[Provider] = PROVIDERS) -> None:
    arguments = parsed(argv)
    if arguments.make_real:
        print(*make_real(arguments.make_real), sep="\n")
        return
    if not arguments.out.name:
        raise SystemExit(f"--out: expected a path with a name, got {arguments.out}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # Before anything is measured, whether it can be written.
    with tempfile.TemporaryFile(dir=arguments.out.parent):
        pass
    results = merged(arguments.merge) if arguments.merge else run(arguments, providers)
    report.write(results, arguments.out)
    report.plot(results, arguments.out)
    print(report.markdown(results))
