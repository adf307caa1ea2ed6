"""Compile every Triton kernel for a GPU that is not there, through the launchers that a real call goes through.

    python tests/compile_kernels.py CAPABILITY SHARED_BYTES [GRANTED_BYTES]   prints one JSON line per compiled kernel

SHARED_BYTES is what the tiles are chosen for, GRANTED_BYTES (the same unless given) what the device then grants.

A stand-in for Triton's driver names the target and takes the binaries without running them; the compiler, ptxas and
Triton's own check of the shared memory are the real ones. Run as a script of its own: the rest of the suite runs the
kernels in Triton's interpreter, and a process does one or the other.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from rlhf_losses.kernels import backends, triton_problem
from rlhf_losses.kernels.autograd import Call, LinearStatistics, LogitsStatistics
from rlhf_losses.kernels.statistics import OUTPUTS
from rlhf_losses.kernels.tiles import DeviceLimits
from rlhf_losses.kernels.transform import LogitTransform


class _Utils:
    def __init__(self, shared_memory: int, compiled: list) -> None:
        self.shared_memory, self.compiled = shared_memory, compiled

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_memory, "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        self.compiled.append((name, binary, shared))
        return object(), object(), 0, 0, 1024


class _Driver:
    """What Triton asks of a driver to compile and to launch; launching does nothing."""

    def __init__(self, capability: int, shared_memory: int, compiled: list) -> None:
        self.capability = capability
        self.utils = _Utils(shared_memory, compiled)
        self.launcher_cls = lambda source, metadata: lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(binary: bytes) -> dict[str, int]:
    """Registers, stack and spilled bytes of a kernel, as the disassembler reads them off the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":", 1) for part in text.split() if ":" in part and part.split(":", 1)[1].isdigit())
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"])}


SMOOTHED = ("log_probs", "entropy", "logsumexp", "weighted_log_probs", "argmax")
# outputs, dtype, H (17 has rows no descriptor can step over), whether every logit feature is on, bytes to keep
VARIANTS = [
    (("log_probs", "entropy"), torch.bfloat16, 128, False, 0),
    (("log_probs", "entropy"), torch.bfloat16, 128, False, 2**20),
    (("log_probs", "entropy"), torch.bfloat16, 17, False, 2**20),
    (OUTPUTS, torch.bfloat16, 128, True, 0),
    (OUTPUTS, torch.bfloat16, 128, True, 2**20),
    (OUTPUTS, torch.float16, 128, False, 2**20),
    (OUTPUTS, torch.float16, 17, True, 2**20),
    (OUTPUTS, torch.float32, 128, True, 2**20),
    (("log_probs",), torch.float32, 17, False, 0),
    (SMOOTHED, torch.bfloat16, 128, False, 0),
    (SMOOTHED, torch.bfloat16, 128, False, 2**20),
    (SMOOTHED, torch.bfloat16, 16, False, 2**20),
    (SMOOTHED, torch.bfloat16, 17, True, 0),
    (SMOOTHED, torch.float32, 128, True, 2**20),
]


def run_variant(outputs: tuple[str, ...], dtype: torch.dtype, depth: int, features: bool, cache_bytes: int) -> None:
    """Forward and backward of both entry points; the numbers mean nothing, the launches are real."""
    rows, vocab = 130, 515
    parts = {"scale": 0.5, "softcap": 30.0, "temperature": torch.rand(rows) + 0.5} if features else {}
    hidden = torch.randn(rows, depth).to(dtype).requires_grad_()
    weight = torch.randn(vocab, depth).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_() if features else None
    logits = torch.randn(rows, vocab).to(dtype).requires_grad_()
    labels = torch.zeros(rows, dtype=torch.int32)
    transform = LogitTransform(**parts)
    call = Call(
        labels,
        None,
        transform,
        frozenset(outputs),
        -100,
        "triton",
        workspace_bytes=2**20,
        cache_bytes=cache_bytes,
        omega=torch.rand(vocab) if "weighted_log_probs" in outputs else None,
    )
    for results in (LinearStatistics.apply(hidden, weight, bias, call), LogitsStatistics.apply(logits, call, False)):
        sum(r.sum() for r in results if r is not None and r.is_floating_point()).backward()


def main(capability: int, shared_memory: int, granted: int) -> None:
    assert not backends.interpreting(), "unset TRITON_INTERPRET"
    compiled: list = []
    driver.set_active(_Driver(capability, granted, compiled))
    limits = DeviceLimits("cuda", capability, shared_memory, 132)
    # Tensors lie on the CPU: the launchers are told what device to choose tiles for.
    triton_problem.device_limits = lambda device: limits
    for variant in VARIANTS:
        run_variant(*variant)
    for name, binary, shared in compiled:
        print(json.dumps({"kernel": name, "shared": shared, **resources(binary)}))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    main(numbers[0], numbers[1], numbers[-1])
