"""verl's actor with its head computed by rlhf_losses: importing this package is what switches it on.

    actor_rollout_ref.model.external_lib=rlhf_losses.integrations.verl
    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=rlhf_losses

It is imported in every process of a run, drivers and CPU-only actors too, and may be imported while verl itself is
(``VERL_USE_EXTERNAL_MODULES``, entry points). So it imports none of verl's modules: it waits for the three that it
extends, and nothing happens in a process that never loads them.

Raises ImportError for a version of verl that this integration has not been run with.
"""

import sys
from collections.abc import Callable
from importlib import import_module, machinery
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

BACKEND = "rlhf_losses"
VERSIONS = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
# Whose engines can't be chosen by vendor: they keep their own, and get the hook alone.
_HOOK_ALONE = ("0.7.1", "0.8.0")


def require_version(found: str) -> str:
    """Which of ``VERSIONS`` it is; ImportError where ``found`` is none of them."""
    known = [x for x in VERSIONS if found == x or found.startswith((f"{x}.post", f"{x}+"))]
    if not known:
        raise ImportError(
            f"verl {found}: expected one of {', '.join(VERSIONS)}, the versions that rlhf_losses.integrations.verl is "
            "made for; install one of them, or leave external_lib and impl_backend=rlhf_losses out"
        )
    return known[0]


class _After:
    """Finds one module as everybody else does, and calls back when it has been executed."""

    def __init__(self, name: str, callback: Callable[[], None]):
        self.name = name
        self.callback = callback

    def find_spec(self, name: str, path=None, target: ModuleType | None = None) -> machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.callback()

            spec.loader.exec_module = exec_module
        return spec


def _after_import(name: str, callback: Callable[[], None]) -> None:
    """Call back once module ``name`` is there: now, or when somebody has imported it."""
    if name in sys.modules:
        import_module(name)  # waits for a thread that is at it
        callback()
    else:
        sys.meta_path.insert(0, _After(name, callback))


def _install(module: str) -> Callable[[], None]:
    return lambda: import_module(f"{__name__}.{module}").install()


try:
    _version = require_version(version("verl"))
except PackageNotFoundError:
    raise ImportError("verl is not installed: pip install 'rlhf-losses[verl]'") from None
_after_import("verl.models.transformers.monkey_patch", _install("hook"))
_after_import("verl.trainer.ppo.core_algos", _install("losses"))
if _version not in _HOOK_ALONE:
    _after_import("verl.workers.engine.fsdp.transformer_impl", _install("engine"))
