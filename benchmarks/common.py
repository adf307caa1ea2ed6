"""What the benchmarks share: interleaved timing, peak memory, facts of the run."""

import random
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_losses import __version__

MIB = 2**20


class Timed(NamedTuple):
    """Something to time, and how often back to back."""

    run: Callable[[], object]
    runs: int


def moment(device: str) -> Any:
    """Now; on a GPU, when it has done what was launched so far."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, stop: Any) -> float:
    return (stop - start) * 1e3 if isinstance(start, float) else start.elapsed_time(stop)


def error_line(error: Exception) -> str:
    """What a table has room for."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def interleaved_medians(
    timed: dict[Any, Timed], turns: int, lead_in: Callable[[], object], device: str
) -> tuple[dict[Any, float], dict[Any, str]]:
    """Milliseconds a run, and the errors of those that raised, which take no further turns.

    Everything must have run before. ``lead_in`` is work for the device, not timed, before each: behind it the host's
    first launches hide, as they do in a trainer, and nobody starts on a device that has cooled down.
    """
    times: dict[Any, list[float]] = {name: [] for name in timed}
    failed: dict[Any, str] = {}
    for turn in range(turns):
        moments = {}
        # Whom one comes after decides about the card's clock.
        for name, (run, runs) in random.Random(turn).sample(list(timed.items()), len(timed)):
            if name in failed:
                continue
            lead_in()
            start = moment(device)
            try:
                for _ in range(runs):
                    run()
            except Exception as error:
                failed[name] = error_line(error)
            else:
                moments[name] = start, moment(device)
        if device != "cpu":
            torch.cuda.synchronize()
        for name, (start, stop) in moments.items():
            times[name].append(milliseconds(start, stop) / timed[name].runs)
    return {name: statistics.median(values) for name, values in times.items() if name not in failed}, failed


def with_peak_mib(run: Callable[[], Any], device: str) -> tuple[Any, float | None]:
    """The result, and the device memory it took beyond what was allocated before, the result included."""
    if device == "cpu":
        return run(), None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / MIB


def package_version(name: str) -> str | None:
    """The installed version, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def current_commit() -> str | None:
    """Of the checkout that this file lies in; None where it lies in none."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    question = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(question, capture_output=True, text=True, check=True, cwd=root).stdout.strip()


def facts(commit: str | None, device: str) -> dict[str, str | None]:
    """Date, card, versions and commit, which is what git says here unless given."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "rlhf_losses": __version__,
        "commit": commit or current_commit(),
    }
