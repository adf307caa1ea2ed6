"""A sampler for verl's trainer: batches sorted by their tokens, so that two runs sum them in the same order.

verl's own come in the order in which responses happened to be finished.
"""

from typing import Any

import transfer_queue
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedReplayBuffer(ReplayBuffer):
    def __init__(self, **options: Any):
        # verl's is 2 s, longer than such a step takes.
        super().__init__(poll_interval=0.1, **options)

    def _materialize_batch(self, partition_id: str, *selection: Any) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, *selection)
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["input_ids"])
        tokens = [row.tolist() for row in data["input_ids"].unbind()]
        batch.reorder(sorted(range(len(tokens)), key=tokens.__getitem__))
        return batch
