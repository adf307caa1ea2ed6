"""What the benchmarks of the ops share: data, truth, interleaved timing, peak memory, facts of the run."""

import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from rlhf_losses import TokenStats, __version__

MIB = 2**20
# Tokens whose logits are held at once in fp64: 1.2 GB with a vocabulary of 151936.
TRUTH_CHUNK = 1024


def peaked(tokens: int, depth: int, vocab: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden states, head and labels whose distributions range from flat to certain, as trained models' do."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16)

    weight = normal(vocab, depth)
    weight = weight / weight.float().norm(dim=1, keepdim=True).to(torch.bfloat16)
    labels = torch.randint(vocab, (tokens,), device=device, generator=generator)
    peak = torch.rand(tokens, 1, device=device, generator=generator) * 28
    hidden = (2 * normal(tokens, depth).float() + peak * weight[labels].float()).to(torch.bfloat16)
    return hidden, weight, labels


def truth(hidden: Tensor, weight: Tensor, labels: Tensor) -> TokenStats:
    """log_probs, entropy and logsumexp in fp64."""
    head = weight.detach().double()
    chunks = []
    for rows, chosen in zip(hidden.detach().split(TRUTH_CHUNK), labels.split(TRUTH_CHUNK), strict=True):
        z = rows.double() @ head.T
        logsumexp = z.logsumexp(1)
        log_p = z.sub_(logsumexp[:, None])
        entropy = -(log_p.exp() * log_p).sum(1)
        chunks.append((log_p.gather(1, chosen[:, None]).squeeze(1), entropy, logsumexp))
    log_probs, entropy, logsumexp = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return TokenStats(log_probs=log_probs, entropy=entropy, logsumexp=logsumexp)


def milliseconds(run: Callable[[], object], runs: int, device: str) -> float:
    """Milliseconds a run, of several back to back after one that does not count."""
    run()
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(runs):
            run()
        return (time.perf_counter() - begin) * 1e3 / runs
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / runs


def interleaved_medians(
    providers: dict[str, Callable[[], object]], turns: int, runs: int = 4, device: str = "cuda"
) -> dict[str, float]:
    """Milliseconds a run by provider; the first turn of each does not count."""
    times: dict[str, list[float]] = {name: [] for name in providers}
    for turn in range(turns + 1):
        for name, run in providers.items():
            time_of_run = milliseconds(run, runs, device)
            if turn > 0:
                times[name].append(time_of_run)
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


def package_version(name: str) -> str | None:
    """The installed version, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def current_commit() -> str:
    question = ["git", "rev-parse", "--short", "HEAD"]
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(question, capture_output=True, text=True, check=True, cwd=root).stdout.strip()


def facts(commit: str | None, device: str = "cuda") -> dict[str, str | None]:
    """Date, card, versions and commit, which is what git says here unless given."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "rlhf_losses": __version__,
        "commit": current_commit() if commit is None else commit,
    }
