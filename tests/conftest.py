"""What every test gets: a device, no deferred errors, a seed, and garbage in memory that nobody has written.

Without a CUDA device the Triton kernels run in Triton's interpreter on the CPU, so that backend="triton" is tested
everywhere; the interpreter must be chosen before anything imports Triton. With one, they are the compiled kernels.
"""

import os
import sys
from dataclasses import replace

# The interpreter's products are numpy's. OpenBLAS has kernels (Haswell's, Zen's) that sum a row by its place in the
# matrix; these do not. numpy reads it when torch imports it.
os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    assert "triton" not in sys.modules, "Triton was imported before its interpreter could be chosen"
    os.environ["TRITON_INTERPRET"] = "1"
    # The tensors are tiny: a second thread would be waited for more than it helps.
    torch.set_num_threads(1)

import rlhf_losses  # noqa: E402
from rlhf_losses.kernels import backends, tiles  # noqa: E402

# On Hopper "triton" is its own kernels; those for other devices with descriptors are then reached by name alone.
_HOPPER = HAS_CUDA and torch.cuda.get_device_capability() == (9, 0)
TRITON_PATHS = ("triton", "triton-pointers", "triton-portable")[: 3 if _HOPPER else 2]

_skipped = pytest.StashKey[list[str]]()


def pytest_configure(config):
    # The interpreter computes rows beyond N too, which hold zeros; what they give is never stored.
    for warning in ("RuntimeWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", rf"ignore::{warning}:triton\.runtime\.interpreter")
    config.stash[_skipped] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} takes minutes; run it with -m slow"))
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} needs a CUDA device"))
            config.stash[_skipped].append(item.name)


def pytest_terminal_summary(terminalreporter, config):
    if names := config.stash[_skipped]:
        terminalreporter.write_line(f"{len(names)} gpu tests skipped: no CUDA device: {', '.join(names)}")


@pytest.fixture(autouse=True, scope="session")
def unwritten_memory_is_nan():
    """An output that a kernel forgot to write shows: floats start as NaN, integers as the largest of their kind."""

    def filled(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                if tensor.is_floating_point():
                    tensor.detach().fill_(float("nan"))
                elif tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
                    tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return made

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, filled(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def seeded_and_without_leftovers():
    """A deferred error belongs to the test that caused it: one left behind fails that test, not the next."""
    torch.manual_seed(0)
    yield
    rlhf_losses.check()


def _replace_everywhere(monkeypatch, name, value):
    """Wherever a module of the kernels has imported ``name``."""
    backends.operations("triton")
    for module in [m for key, m in sys.modules.items() if key.startswith("rlhf_losses.kernels.")]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


def _choose_path(name, monkeypatch):
    """A back end's name, or "triton-..." for the kernels of other devices than the one at hand.

    pointers  devices without tensor-memory descriptors: sm_80, sm_89, ROCm
    portable  devices with them, for which there are no kernels of their own
    """
    backend, _, path = name.partition("-")
    if path:
        real = backends.device_limits
        capability = {"pointers": 80, "portable": 100}[path]
        limited = lambda device: replace(real(device), capability=capability)  # noqa: E731
        _replace_everywhere(monkeypatch, "device_limits", limited)
    return backend


@pytest.fixture
def choose_path(monkeypatch):
    return lambda name: _choose_path(name, monkeypatch)


@pytest.fixture
def choose_tile(monkeypatch):
    return lambda tile: _replace_everywhere(monkeypatch, "pick_tile", lambda limits, itemsize: tile)


@pytest.fixture(params=["reference", "chunked", *TRITON_PATHS])
def backend(request, monkeypatch):
    return _choose_path(request.param, monkeypatch)


@pytest.fixture(params=["chunked", *TRITON_PATHS])
def fused(request, monkeypatch):
    """The back ends that never hold [N, V]."""
    return _choose_path(request.param, monkeypatch)


@pytest.fixture(params=TRITON_PATHS)
def triton_path(request, monkeypatch):
    return _choose_path(request.param, monkeypatch)


@pytest.fixture
def quick_tiles(choose_tile):
    """For vocabularies of 100,000 and more: a step takes the interpreter 15 ms, so it takes few, wide ones.

    The kernels and the stretches of the vocabulary stay as they are. With a GPU nothing is changed.
    """
    if not HAS_CUDA:
        choose_tile(tiles.Tile(16, 2048, 16, warps=4, stages=1))
