"""Ray: a hook for worker processes, and an actor that scores tokens outside of any trainer."""

import os
from typing import Any

import numpy as np
import torch

from rlhf_losses.integrations.fused_head import HeadOptions, HeadRequest, fuse_head

_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
_MODULE = "rlhf_losses.integrations.verl"


def setup() -> None:
    """Make every worker process of a job load the verl integration together with verl.

        ray.init(runtime_env={"worker_process_setup_hook": "rlhf_losses.integrations.ray.setup"})

    For clusters on whose nodes the package is on the path but not installed, so that verl finds no entry point. Adds to
    what the environment names already; a process that never imports verl is not touched.
    """
    modules = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
    if _MODULE not in modules:
        os.environ[_VARIABLE] = ",".join([*modules, _MODULE])


class LogProbActor:
    """A causal language model that scores given tokens: a teacher, a reference policy, an old policy.

        actor = ray.remote(num_gpus=1)(LogProbActor).remote("path/to/model", temperature=0.7)
        scores = ray.get(actor.score.remote(input_ids, attention_mask, loss_mask))

    Args:
        path: directory or name of a transformers model.
        temperature: of the policy whose log-probabilities are asked for.
        dtype: of the weights, "auto" for the checkpoint's.
        backend, workspace_bytes, validate: as of ``linear_log_probs``.
    """

    def __init__(self, path: str, temperature: float = 1.0, dtype: str = "auto", **options: Any):
        from transformers import AutoModelForCausalLM

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(self.device).eval()
        self.temperature = temperature
        fuse_head(self.model, HeadOptions(**options))

    @torch.no_grad()
    def score(
        self, input_ids: np.ndarray, attention_mask: np.ndarray | None = None, loss_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """log_probs and entropy [B, T - 1], fp32, of tokens 1 to T - 1 of input_ids [B, T] given those before them.

        ``attention_mask`` [B, T] is 0 in the padding; ``loss_mask`` [B, T] picks the tokens to score, all that are no
        padding if None. The others, and a first token after padding, get 0, and no work is done for them.

        Raises ValueError for shapes that do not fit, and for ids outside of the vocabulary.
        """
        ids = torch.as_tensor(np.asarray(input_ids)).to(self.device)
        shapes = [np.shape(mask) for mask in (attention_mask, loss_mask) if mask is not None]
        if ids.dim() != 2 or any(shape != tuple(ids.shape) for shape in shapes):
            raise ValueError(f"expected input_ids [B, T] and masks of that shape, got {list(ids.shape)} and {shapes}")
        entries = self.model.get_input_embeddings().weight.shape[0]
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= entries:
            raise ValueError(f"input_ids: expected 0 <= id < {entries}, got {low} to {high}")
        attention = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask).to(ids)
        scored = attention if loss_mask is None else attention * torch.as_tensor(loss_mask).to(ids)
        # Row t scores token t + 1; the last row scores nothing, and its label is any token.
        mask = torch.nn.functional.pad(scored[:, 1:] * attention[:, :-1], (0, 1))
        request = HeadRequest(torch.roll(ids, -1, 1), mask=mask, temperature=self.temperature)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        scores = self.model(
            input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False, head_request=request
        )
        return {name: getattr(scores, name)[:, :-1].float().cpu().numpy() for name in ("log_probs", "entropy")}
