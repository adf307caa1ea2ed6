"""What every test gets: a device, no deferred errors, a seed, and garbage in memory that nobody has written.

Without a CUDA device the Triton kernels run in Triton's interpreter on the CPU, so that backend="triton" is tested
everywhere; the interpreter must be chosen before anything imports Triton. With one, they are the compiled kernels.
"""

import os
import sys
from dataclasses import replace

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    assert "triton" not in sys.modules, "Triton was imported before its interpreter could be chosen"
    os.environ["TRITON_INTERPRET"] = "1"

import rlhf_losses  # noqa: E402
from rlhf_losses.kernels import backends, tiles  # noqa: E402

_skipped = pytest.StashKey[list[str]]()


def pytest_configure(config):
    # The interpreter computes rows beyond N too, which hold zeros; what they give is never stored.
    for warning in ("RuntimeWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", rf"ignore::{warning}:triton\.runtime\.interpreter")
    config.stash[_skipped] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
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


def _limit_devices(monkeypatch, **limits):
    """The kernels see a device with other limits than the one at hand."""
    from rlhf_losses.kernels import triton_tile

    real = backends.device_limits
    for module in (backends, triton_tile):
        monkeypatch.setattr(module, "device_limits", lambda device: replace(real(device), **limits))


def _choose_path(name, monkeypatch):
    """"triton-pointers": the loads of devices without tensor-memory descriptors (sm_80, sm_89, ROCm)."""
    if name == "triton-pointers":
        _limit_devices(monkeypatch, capability=80)
    return name.removesuffix("-pointers")


@pytest.fixture
def choose_path(monkeypatch):
    return lambda name: _choose_path(name, monkeypatch)


@pytest.fixture(params=["reference", "chunked", "triton", "triton-pointers"])
def backend(request, monkeypatch):
    return _choose_path(request.param, monkeypatch)


@pytest.fixture(params=["chunked", "triton", "triton-pointers"])
def fused(request, monkeypatch):
    """The back ends that never hold [N, V]."""
    return _choose_path(request.param, monkeypatch)


@pytest.fixture
def quick_tiles(monkeypatch):
    """For vocabularies of 100,000 and more: a step takes the interpreter 15 ms, so it takes few, wide ones.

    The kernels and the 33 stretches of the vocabulary stay as they are. With a GPU nothing is changed.
    """
    if not HAS_CUDA:
        from rlhf_losses.kernels import triton_tile

        wide = tiles.Tile(16, 2048, 16, warps=4, stages=1)
        monkeypatch.setattr(triton_tile, "pick_tile", lambda limits, itemsize: wide)
