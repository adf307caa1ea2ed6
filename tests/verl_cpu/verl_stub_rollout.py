"""A rollout for verl that needs no inference engine, "stub": a Ray actor that samples with transformers on a CPU.

Loaded by ``VERL_USE_EXTERNAL_MODULES=verl_stub_rollout``. Weights come by verl's own synchronisation, after every step.
"""

from collections.abc import Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl_stub_server import StubServer

# One for all workers: which of several a request goes to would depend on the moment.
_SERVER = "stub_server"


class StubReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        actor = ray.remote(StubServer).options(name=_SERVER, get_if_exists=True, num_cpus=0)
        self._server_handle = actor.remote(self.model_config.path, self.config.response_length)
        self._server_address = f"stub:{self.replica_rank}"
        self.servers = [self._server_handle]


class StubAdapter(base.BaseRollout):
    """The worker's end: gathers the weights, which every rank must take part in, and sends them from the first."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int = 0,
        **unused: Any,
    ) -> None:
        assert wire_format == "named_tensors", wire_format
        gathered = {name: weight.detach().cpu().clone() for name, weight in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(_SERVER).update_weights.remote(gathered, global_steps)


base._ROLLOUT_REGISTRY[("stub", "async")] = f"{__name__}.{StubAdapter.__name__}"
RolloutReplicaRegistry.register("stub", lambda: StubReplica)
