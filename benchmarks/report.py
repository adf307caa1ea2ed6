"""What has to be reached, and the results as JSON, Markdown and a figure."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_losses.benchmarks.checks import BOUNDS, CHECKED
from rlhf_losses.benchmarks.providers import STANDARD

TITLES = {
    "forward": "Forward: log_probs and entropy",
    "train": "Forward and backward of a PPO loss with entropy bonus",
    "cross_entropy": "Forward and backward of the mean negative log-likelihood",
    "skip": "A quarter of the tokens masked, a quarter more without a gradient",
}
REQUIRED_SHAPE = (16384, 4096, 151936)


class Bound(NamedTuple):
    """``value`` of a row of the results, None where it was not measured; at most ``limit``, or at least."""

    what: str
    value: Callable[[dict], float | None]
    limit: Callable[[dict], float]
    at_least: bool = False
    applies: Callable[[dict], bool] = lambda row: True

    def holds(self, row: dict) -> bool | None:
        value = self.value(row)
        if value is None:
            return None
        return value >= self.limit(row) if self.at_least else value <= self.limit(row)


def found(row: dict, task: str, provider: str, key: str = "ms") -> Any:
    """Of a provider's result; None where there is none."""
    for result in row["results"]:
        if (result["task"], result["provider"]) == (task, provider):
            return result.get(key)
    return None


def to_gemms(task: str, provider: str) -> Callable[[dict], float | None]:
    return lambda row: found(row, task, provider, "ratio")


def rival_to_ours(task: str, rival: str, ours: str) -> Callable[[dict], float | None]:
    def value(row: dict) -> float | None:
        over, under = found(row, task, rival), found(row, task, ours)
        return None if over is None or under is None else over / under

    return value


def at_required_shape(row: dict) -> bool:
    return (row["N"], row["H"], row["V"]) == REQUIRED_SHAPE


BOUNDS_OF_TIME = (
    Bound("forward / 1 GEMM", to_gemms("forward", "ours"), lambda row: 1.00 if row["H"] >= 1536 else 1.03),
    Bound("two passes / 4 GEMMs", to_gemms("train", "ours, two passes"), lambda row: 1.00),
    Bound("one pass / 3 GEMMs", to_gemms("train", "ours, one pass"), lambda row: 1.05 if row["H"] >= 2048 else 1.15),
    Bound("Liger SM90 / forward", rival_to_ours("forward", "Liger SM90", "ours"), lambda row: 1.0, True),
    Bound("Liger SM90 / two passes", rival_to_ours("train", "Liger SM90", "ours, two passes"), lambda row: 1.0, True),
    Bound("Liger SM90 / one pass", rival_to_ours("train", "Liger SM90", "ours, one pass"), lambda row: 1.35, True),
    Bound("two passes, idle tokens / active alone", to_gemms("skip", "ours, two passes"), lambda row: 1.05),
    Bound("one pass, idle tokens / active alone", to_gemms("skip", "ours, one pass"), lambda row: 1.05),
    *(
        Bound(
            f"{rival} / cross entropy",
            rival_to_ours("cross_entropy", rival, "ours"),
            lambda row: 1.0,
            at_least=True,
            applies=at_required_shape,
        )
        for rival in ("Liger FLCE", "Liger SM90", "quack", "cut-cross-entropy")
    ),
)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def required(results: dict) -> list[dict]:
    """A line a bound: on how many shapes it is met, the geometric mean, and the worst shape."""
    lines = []
    for bound in BOUNDS_OF_TIME:
        rows = [row for row in results["rows"] if bound.applies(row)]
        limits = sorted({bound.limit(row) for row in rows})
        asked = f"{'>=' if bound.at_least else '<='} {' or '.join(f'{limit:.2f}' for limit in limits)}"
        values = [(value, row) for row in rows if (value := bound.value(row)) is not None]
        line: dict = {"what": bound.what, "bound": asked if limits else "-", "shapes": len(values), "met": None}
        if values:
            margins = [value / bound.limit(row) for value, row in values]
            worst, worst_row = values[margins.index(min(margins) if bound.at_least else max(margins))]
            met = sum(bool(bound.holds(row)) for _, row in values)
            line |= {"shapes_met": met, "met": met == len(values)}
            line |= {"geometric_mean": geometric_mean([value for value, _ in values])}
            line |= {"worst": worst, "worst_at": name_of(worst_row)}
        lines.append(line)
    return lines


def name_of(row: dict) -> str:
    return f"{row['model']}, {row['N']} x {row['H']} x {row['V']}"


def line(row: dict) -> str:
    """A row in short, for the screen."""
    cells = [f"{name_of(row)}: GEMMs " + " / ".join(f"{ms:.2f}" for ms in row["gemms_ms"].values()) + " ms"]
    for result in row["results"]:
        what = f"{result['task']} {result['provider']}"
        cells.append(f"{what} {result['ms']:.2f} ({result['ratio']:.3f})" if "ms" in result else f"{what} left out")
    return "; ".join(cells)


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)] + [""]


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _required_tables(results: dict) -> list[str]:
    verdict = {None: "not measured", True: "met", False: "**not met**"}
    lines = []
    for x in required(results):
        met = f"{x['shapes_met']} of {x['shapes']}" if x["shapes"] else "-"
        worst = f"{x['worst']:.3f} at {x['worst_at']}" if x["shapes"] else "-"
        lines.append([x["what"], x["bound"], verdict[x["met"]], met, shown(x.get("geometric_mean"), ".3f"), worst])
    text = table(["required", "bound", "", "shapes that meet it", "geometric mean", "worst"], lines)
    used = [b for b in BOUNDS_OF_TIME if any(b.applies(row) and b.value(row) is not None for row in results["rows"])]
    lines = []
    for row in results["rows"]:
        cells = [shown(bound.value(row) if bound.applies(row) else None, ".3f") for bound in used]
        missed = [bound.applies(row) and bound.holds(row) is False for bound in used]
        lines.append([name_of(row), *(f"**{x}**" if bad else x for x, bad in zip(cells, missed, strict=True))])
    return [*text, "By shape; what is not met is bold.", "", *table(["shape", *(b.what for b in used)], lines)]


def _task_tables(results: dict, task: str) -> list[str]:
    """Times, rivals beside ours, memory, and the largest errors."""
    rows = results["rows"]
    every = [result for row in rows for result in row["results"] if result["task"] == task]
    names = list(dict.fromkeys(result["provider"] for result in every))
    if not names:
        return []
    count = {result["provider"]: result["gemms"] for result in every if "gemms" in result}
    against = "active tokens alone" if task == "skip" else "GEMMs"
    text = [f"## {TITLES[task]}", "", f"Milliseconds, and in brackets the ratio to {against}.", ""]

    def by_shape(header: list[str], cell: Callable[[dict, str], str], names: list[str] = names) -> list[str]:
        return table(["shape", *header], [[name_of(row), *(cell(row, name) for name in names)] for row in rows])

    def time_cell(row: dict, name: str) -> str:
        ms, ratio = found(row, task, name), found(row, task, name, "ratio")
        return "-" if ms is None else f"{ms:.2f} ({ratio:.3f})"

    over = {name: f" / {count[name]}" if name in count and task != "skip" else "" for name in names}
    text += by_shape([f"{name}{over[name]}" for name in names], time_cell)
    rivals = [name for name in names if not name.startswith("ours")]
    if rivals and task in STANDARD:
        text += [f"Times as long as {STANDARD[task]}.", ""]
        text += by_shape(rivals, lambda row, name: shown(rival_to_ours(task, name, STANDARD[task])(row), ".2f"), rivals)
    text += ["Memory, MiB.", ""]
    text += by_shape(names, lambda row, name: shown(found(row, task, name, "memory_mib"), ".0f"))
    lines = []
    for name in names:
        errors = [x["errors"] for x in every if x["provider"] == name and "errors" in x]
        known = {key: [e[key] for e in errors if key in e] for key in BOUNDS}
        if errors:
            worst = {key: None if not values else max(values, key=_nan_first) for key, values in known.items()}
            lines.append([name, *(shown(worst[key], ".1e") for key in BOUNDS)])
    text += ["Largest errors over the shapes.", ""]
    return text + table(["provider", *(key.replace("_", " ") for key in BOUNDS)], lines)


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def left_out(results: dict) -> list[str]:
    """Everything that was not measured, and why."""
    text = [f"{name}: {why}" for name, why in results["absent"].items()] + results["left_out"]
    reasons: dict[str, list[str]] = {}
    for row in results["rows"]:
        for result in row["results"]:
            if "left_out" in result:
                what = f"{result['provider']}, {result['task']}: {result['left_out']}"
                reasons.setdefault(what, []).append(f"{row['model']} {row['N']}")
    return text + [f"{what} ({len(where)} shapes: {', '.join(where)})" for what, where in reasons.items()]


def markdown(results: dict) -> str:
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in results["packages"].items())
    lines = [
        f"# rlhf-losses bench, {results['date']}",
        "",
        f"{results['device']}, torch {results['torch']}, Triton {results['triton']}, {packages}; rlhf_losses "
        f"{results['rlhf_losses']} at commit {results['commit'] or 'unknown'}. bf16, peaked data; medians of "
        "interleaved turns in one process, behind an untimed product each (benchmarks/bench.py says how). Errors are "
        f"the largest against fp64 on {CHECKED} rows: of log-probabilities, entropies and loss absolute, of gradients "
        f"relative to the largest. Memory is the peak beyond the inputs, results included. {results['seconds']} s.",
        "",
        *_required_tables(results),
    ]
    for task in results["tasks"]:
        lines += _task_tables(results, task)
    lines += ["## Left out", "", *(f"- {x}" for x in left_out(results) or ["nothing"]), ""]
    return "\n".join(lines)


def write(results: dict, out: Path) -> None:
    """JSON and Markdown."""
    results["required"] = required(results)
    out.with_name(out.name + ".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_name(out.name + ".md").write_text(markdown(results))


# Okabe and Ito's colours, told apart by everybody.
COLOURS = {
    "ours": "#0072B2",
    "ours, one pass": "#0072B2",
    "ours, two passes": "#56B4E9",
    "ours, all rows cached": "#009E73",
    "Liger SM90": "#D55E00",
    "Liger FLCE": "#E69F00",
    "quack": "#CC79A7",
    "verl triton": "#8C6D31",
    "cut-cross-entropy": "#555555",
    "verl torch": "#999999",
    "naive": "#BBBBBB",
}
PANELS = {"forward": 1, "train": 3, "cross_entropy": 3}
# Of the ratios, those that matter most first.
TICKS = (1, 2, 5, 10, 20, 50, 0.5, 1.5, 3, 7, 1.2, 0.8, 1.1, 0.9, 0.7, 1.3, 4, 2.5, 1.75)


def plot(results: dict, out: Path) -> None:
    """Ratios to the GEMMs by model; needs matplotlib, and says so where there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    panels = [task for task in PANELS if any(found_times(results, task))]
    if not panels:
        return
    models = list(dict.fromkeys((row["model"], row["H"], row["V"]) for row in results["rows"]))
    figure = Figure(figsize=(max(6.0, 1.5 + 0.95 * len(models)), 3.1 * len(panels)), layout="constrained", dpi=150)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, task in zip(axes, panels, strict=True):
        _panel(ax, results, task, models)
    axes[-1].set_xticks(range(len(models)), [f"{name}\n{h}\nx {v}" for name, h, v in models], fontsize=8)
    tokens = sorted({row["N"] for row in results["rows"]})
    figure.suptitle(
        f"Time over the time of bare cuBLAS products, {results['device']}\nmarkers: geometric mean over calls of "
        f"{', '.join(map(str, tokens))} tokens; bars: their range",
        fontsize=10,
    )
    figure.savefig(out.with_name(out.name + ".png"))


def found_times(results: dict, task: str) -> list[str]:
    """Providers that have been timed."""
    timed = [x["provider"] for row in results["rows"] for x in row["results"] if x["task"] == task and "ms" in x]
    return list(dict.fromkeys(timed))


def _panel(ax: Any, results: dict, task: str, models: list[tuple[str, int, int]]) -> None:
    """A dot is the geometric mean over the numbers of tokens, its bar their range."""
    names = found_times(results, task)
    for place, name in enumerate(names):
        xs, means, below, above = [], [], [], []
        for index, model in enumerate(models):
            rows = [row for row in results["rows"] if (row["model"], row["H"], row["V"]) == model]
            times = [(found(row, task, name), row["gemms_ms"][str(PANELS[task])]) for row in rows]
            ratios = [ms / gemms for ms, gemms in times if ms is not None]
            if ratios:
                mean = geometric_mean(ratios)
                xs.append(index + 0.7 * ((place + 0.5) / len(names) - 0.5))
                means.append(mean)
                # The mean of one ratio may be rounded past it.
                below.append(max(0.0, mean - min(ratios)))
                above.append(max(0.0, max(ratios) - mean))
        ours = name.startswith("ours")
        style = {"color": COLOURS.get(name, "black"), "marker": "o" if ours else "D", "markersize": 6 if ours else 4}
        ax.errorbar(xs, means, [below, above], linestyle="none", elinewidth=1.2, label=name, **style)
    ax.axhline(1, color="black", linewidth=0.8)
    for edge in range(1, len(models)):
        ax.axvline(edge - 0.5, color="0.9", linewidth=0.8, zorder=0)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    room = 0.07 * math.log(high / low)
    ticks: list[float] = []
    for tick in TICKS:
        if low <= tick <= high and all(abs(math.log(tick / other)) >= room for other in ticks):
            ticks.append(tick)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_xlim(-0.5, len(models) - 0.5)
    plural = "s" if PANELS[task] > 1 else ""
    ax.set_ylabel(f"time / {PANELS[task]} GEMM{plural}")
    ax.set_title(TITLES[task], fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
