"""``impl_backend=rlhf_losses`` beside verl's own fused back ends.

verl looks up ``patch_forward_with_backends`` in its module at every call, after it has loaded a model and before LoRA
and FSDP wrap it; the function here takes the calls that name our back end and hands on the others. It serves verl's
own engines, whose calls it translates; engine.py lifts what those can't pass on.
"""

import functools
from typing import Any

import torch
from verl.models.transformers import monkey_patch

from rlhf_losses.integrations.fused_head import HeadRequest, fuse_head
from rlhf_losses.integrations.verl import BACKEND


@functools.cache
def install() -> None:
    """Put our function in place of verl's, once."""
    theirs = monkey_patch.patch_forward_with_backends

    @functools.wraps(theirs)
    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        if use_fused_kernels and fused_kernels_backend == BACKEND:
            fuse_head(model, translate=_request)
        else:
            theirs(model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend)

    monkey_patch.patch_forward_with_backends = patch_forward_with_backends


def _request(args: tuple, kwargs: dict[str, Any]) -> HeadRequest | None:
    """verl's arguments for a fused forward, taken out of ``kwargs``; a call without temperature is an ordinary one."""
    if "temperature" not in kwargs:
        return None
    temperature = kwargs.pop("temperature")
    labels = kwargs.pop("shift_labels", None)
    if labels is None:
        # Without remove-padding: verl's own back ends roll the padded ids, whose last label verl never uses.
        labels = torch.roll(kwargs["input_ids"], -1, -1)
    return HeadRequest(labels, temperature=temperature)
