"""Every Triton kernel compiles for GPUs that are not there, within their shared memory and without spilling much."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Capability, and the shared memory that a block of such a device may use: A100, H100 and H200, B200, RTX 50.
DEVICES = [(80, 166912), (90, 232448), (100, 232448), (120, 101376)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    def compile_for(*numbers):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "compile_kernels.py", *map(str, numbers)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return compile_for


@pytest.mark.parametrize(("capability", "shared_memory"), DEVICES)
def test_kernels_compile_within_shared_memory(compiled, capability, shared_memory):
    kernels = compiled(capability, shared_memory)
    names = {kernel["kernel"] for kernel in kernels}
    portable = {"_statistics_kernel", "_merge_kernel", "_product_gradient_kernel", "_gradient_kernel"}
    assert portable <= names
    assert ({"statistics_kernel", "product_gradient_kernel"} <= names) == (capability == 90)
    assert max(kernel["shared"] for kernel in kernels) <= shared_memory
    # The first variant is what trainers run: bf16, log_probs and entropy, no logit feature.
    common = kernels[: len(portable)]
    assert all(kernel["stack"] <= 256 for kernel in common), common


def test_tiles_too_large_for_the_device_would_be_noticed(compiled):
    with pytest.raises(AssertionError, match="out of resource: shared memory"):
        compiled(90, 232448, 65536)
