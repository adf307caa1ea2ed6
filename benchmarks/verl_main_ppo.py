"""verl's whole trainer on a CPU, with its own logits and with its head in rlhf_losses, from the same seeds.

    python benchmarks/verl_main_ppo.py --out benchmarks/results/NAME [--steps 12] [--workers 1]

Writes NAME.json, the metrics of every step as verl's own logger has them, and NAME.png: the curves over each other,
and below them by how much they differ. For scale there is a third run, unfused with eager attention, which sums the
same terms in another order. Where a draw falls between the roundings of two runs, their samples part, and with them
all that follows. No speed is measured here. It needs verl with its trainer, and matplotlib.
"""

import argparse
import json
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import matplotlib

from rlhf_losses.benchmarks.common import current_commit

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from rlhf_losses import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from verl_cpu.main_ppo import EAGER, FUSED, UNFUSED, train  # noqa: E402

VARIANTS = {"unfused": UNFUSED, "eager": EAGER, "fused": FUSED}
# How each is drawn; the fused run lies dashed on the unfused one.
LINES = {
    "unfused": {"label": "unfused", "color": "0.7", "linewidth": 5},
    "eager": {"label": "unfused, eager attention", "color": "tab:blue", "linewidth": 1.2},
    "fused": {"label": "fused", "color": "tab:red", "linewidth": 1.6, "linestyle": "--"},
}
CURVES = {
    "critic/score/mean": "reward",
    "actor/entropy": "entropy [nats]",
    "actor/pg_loss": "policy loss",
    "actor/grad_norm": "norm of the gradient",
    "actor/ppo_kl": "KL to the policy before the update",
    "training/rollout_probs_diff_max": "rollout against actor: largest |p - p'|",
}


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    canvas, (above, below) = plt.subplots(
        2, len(CURVES), figsize=(3.4 * len(CURVES), 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    steps = range(1, len(runs["unfused"]) + 1)
    for upper, lower, (key, title) in zip(above, below, CURVES.items(), strict=True):
        values = {name: [metrics[key] for metrics in run] for name, run in runs.items()}
        for name, curve in values.items():
            upper.plot(steps, curve, **LINES[name])
            if name != "unfused":
                apart = [abs(x - y) for x, y in zip(curve, values["unfused"], strict=True)]
                lower.plot(steps, apart, **LINES[name], marker=".")
        upper.set_title(title, fontsize=10)
        upper.xaxis.set_major_locator(MaxNLocator(integer=True))
        if key.startswith("training/rollout"):
            upper.set_ylim(bottom=0)
        # Zeros, too, have a place on this axis.
        lower.set_yscale("symlog", linthresh=1e-9)
        lower.set_ylim(0, 1)
        lower.set_xlabel("step")
    below[0].set_ylabel("|difference from unfused|")
    canvas.legend(*above[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LINES))
    canvas.suptitle("verl.trainer.main_ppo, GRPO on a CPU in fp32, the same seeds")
    canvas.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without suffix")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1200, help="seconds after which to give up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = train(Path(folder), VARIANTS, arguments.steps, arguments.workers, arguments.timeout)
    results = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": current_commit(),
        "rlhf_losses": __version__,
        **{package: version(package) for package in ("torch", "verl", "ray", "transformers")},
        "workers": arguments.workers,
        "largest_difference": {
            name: {key: max(abs(x[key] - y[key]) for x, y in zip(run, runs["unfused"], strict=True)) for key in CURVES}
            for name, run in runs.items()
            if name != "unfused"
        },
        "runs": runs,
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    draw(runs, arguments.out.with_suffix(".png"))
    print(json.dumps(results["largest_difference"], indent=1))


if __name__ == "__main__":
    main()
