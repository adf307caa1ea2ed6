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
        options: arguments of ``HeadOptions``: backend, workspace_bytes, validate.
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
        padding if None. The others get 0, and no work is done for them.
        """
        ids = torch.as_tensor(np.asarray(input_ids)).to(self.device)
        attention = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask).to(ids)
        mask = attention if loss_mask is None else attention * torch.as_tensor(loss_mask).to(ids)
        # The last row scores nothing; its label is any token.
        mask = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        request = HeadRequest(torch.roll(ids, -1, 1), mask=mask, temperature=self.temperature)
        scores = self.model(input_ids=ids, attention_mask=attention, use_cache=False, head_request=request)
        return {name: getattr(scores, name)[:, :-1].float().cpu().numpy() for name in ("log_probs", "entropy")}
