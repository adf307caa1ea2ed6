"""A CPU platform for verl, so that its engines, workers and trainers run where there is no GPU.

Loaded by ``VERL_USE_EXTERNAL_MODULES=verl_cpu_platform`` and chosen by ``VERL_PLATFORM=cpu``. verl registers no engine
for a CPU: ``VERL_ENGINE_DEVICE=cuda`` makes it take the ones that it has for CUDA.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _device_module() -> types.ModuleType:
    """What verl asks of ``torch.cuda``: torch.cpu where it has it, no memory to free, and the one generator."""
    module = types.ModuleType("verl_cpu_device")
    module.__dict__.update(
        {name: getattr(torch.cpu, name) for name in ("is_available", "synchronize", "current_stream", "stream")}
        | dict.fromkeys(("empty_cache", "ipc_collect", "set_device", "reset_peak_memory_stats"), _nothing)
        | dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _zero)
        | {
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda *device: "cpu",
            "mem_get_info": lambda *device: (2**30, 2**30),
            "get_rng_state": lambda *device: torch.get_rng_state(),
            "set_rng_state": lambda state, *device: torch.set_rng_state(state),
        }
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = _nothing
    cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_ipc_supported(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        # verl hands it to Tensor.to, for which an index would be a CUDA device.
        return torch.device("cpu")

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # main_ppo counts GPUs before it starts; Ray believes whoever says how many there are.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here, and torch refuses that.
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group
