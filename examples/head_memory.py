"""Peak memory of a language model head, forward and backward: full logits, or ``linear_log_probs``.

Run by rl_demo.py in a fresh process for each way, since a process that has worked before has a peak behind it; by hand:

    python examples/head_memory.py op --tokens 2048 --vocab 49152 --hidden 576

Prints one line of JSON. On the CPU the number is the growth of the resident set's peak, on a GPU that of the
allocator's; both count the gradients of the hidden states and the head, which either way has to hold.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from rlhf_losses import linear_log_probs

WORKSPACE_BYTES = 64 * 2**20


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The usual way: [N, V] logits in fp32, log_softmax, and the entropy from it."""
    log_p = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    log_probs = log_p.gather(-1, labels[..., None]).squeeze(-1)
    return log_probs, -(log_p.exp() * log_p).sum(-1)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same two numbers per token from the op."""
    stats = linear_log_probs(hidden, weight, labels, temperature=temperature, workspace_bytes=WORKSPACE_BYTES)
    return stats.log_probs, stats.entropy


WAYS = {"op": fused, "logits": full_logits}


def peak_bytes(device: torch.device) -> int:
    """The highest memory use of this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():
        # Not ru_maxrss: on Linux a child's starts at what its parent held when it was forked.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(way: str, tokens: int, vocab: int, hidden_size: int) -> dict[str, float]:
    """Growth of the peak, in bytes, and seconds, for one forward and backward over random values."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    weight = torch.randn(vocab, hidden_size, device=device, dtype=dtype).mul_(0.05).requires_grad_()
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device)

    def step(h: Tensor, w: Tensor, y: Tensor) -> None:
        log_probs, entropy = WAYS[way](h, w, y, 0.9)
        (-log_probs.mean() - 0.01 * entropy.mean()).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    # Libraries are loaded, threads started and kernels compiled before the measurement. On the CPU a small head does
    # it; on a GPU the kernels are those of the real shapes.
    if device.type == "cuda":
        step(hidden, weight, labels)
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        small = weight[:64].detach().requires_grad_()
        step(hidden[:8].detach().requires_grad_(), small, labels[:8] % 64)
    before = peak_bytes(device)
    start = time.perf_counter()
    step(hidden, weight, labels)
    return {"bytes": peak_bytes(device) - before, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=sorted(WAYS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    options = parser.parse_args()
    print(json.dumps(measure(options.way, options.tokens, options.vocab, options.hidden)))
