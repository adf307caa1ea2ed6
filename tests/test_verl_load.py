"""How the verl integration is loaded: lightly, by every way verl has, and only with versions that it knows."""

from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
from helpers import ROOT, python

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")

WHOSE = """
import verl.models.transformers.monkey_patch as patch
print(patch.patch_forward_with_backends.__globals__["__name__"])
from verl.workers.engine import EngineRegistry
print(EngineRegistry._engines["language_model"]["fsdp2"].get(("cuda", "nvidia")).__module__)
"""
OURS = ["rlhf_losses.integrations.verl.hook", "rlhf_losses.integrations.verl.engine"]


def test_importing_it_loads_neither_verl_nor_transformers_and_starts_no_cuda():
    python(
        """
import sys, torch
import rlhf_losses.integrations.verl
assert not {"verl", "transformers", "triton"} & sys.modules.keys()
assert not torch.cuda.is_initialized()
"""
    )


def test_imported_before_verl():
    assert python("import rlhf_losses.integrations.verl" + WHOSE).split()[-2:] == OURS


def test_imported_after_verl():
    code = "import verl.workers.engine, rlhf_losses.integrations.verl" + WHOSE
    assert python(code, VERL_USE_EXTERNAL_PLUGINS="none").split()[-2:] == OURS


def test_by_environment():
    environment = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "rlhf_losses.integrations.verl"}
    assert python(WHOSE, **environment).split()[-2:] == OURS


def test_by_entry_point():
    if not [point for point in entry_points(group="verl.plugins") if point.name == "rlhf_losses"]:
        pytest.skip("rlhf_losses runs from its source tree, not installed: there is no entry point")
    assert python(WHOSE).split()[-2:] == OURS


def test_a_bare_look_for_the_module_does_not_lose_the_hook():
    look = "import importlib.util as u; u.find_spec('verl.models.transformers.monkey_patch')"
    assert python(f"import rlhf_losses.integrations.verl\n{look}{WHOSE}").split()[-2:] == OURS


def test_entropy_has_a_gradient_wherever_the_loss_is_not_verls_own():
    # At verl's entropy_coeff = 0 it is left out; another loss may have a weight of its own.
    python(
        """
from functools import partial
from types import SimpleNamespace
import rlhf_losses.integrations.verl, verl.workers.engine
from rlhf_losses.integrations.verl.engine import _entropy_coefficient
from verl.workers.utils.losses import ppo_loss

config = SimpleNamespace(entropy_coeff=0.0)
assert _entropy_coefficient(partial(ppo_loss, config=config)) == 0
assert _entropy_coefficient(partial(lambda config: None, config=config)) is None
assert _entropy_coefficient(ppo_loss) is None
"""
    )


def test_other_versions_are_refused():
    from rlhf_losses.integrations.verl import VERSIONS, require_version

    for version in (*VERSIONS, "0.9.1.post1"):
        require_version(version)
    for version in ("0.6.1", "0.9.2", "0.10.0.dev0", "0.9.10"):
        with pytest.raises(ImportError, match=r"expected one of 0\.7\.1, 0\.8\.0, 0\.9\.0, 0\.9\.1"):
            require_version(version)


def test_hook_hands_on_what_is_not_ours():
    out = python(
        """
import rlhf_losses.integrations.verl
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers.monkey_patch import apply_monkey_patch
size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30)
for backend in ("rlhf_losses", "torch"):
    model = LlamaForCausalLM(LlamaConfig(**size))
    apply_monkey_patch(model, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend=backend)
    print(model.forward.__func__.__module__)
model = LlamaForCausalLM(LlamaConfig(**size))
try:
    apply_monkey_patch(model, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend="rlhf_losses")
except ValueError as error:
    print(error)
"""
    ).splitlines()
    assert "verl.models.transformers.dense_common" in out
    # The class is verl's from here on: one owner.
    assert "expected one owner of its head" in out[-1]


def test_config_group():
    out = python(
        """
import sys
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose(
        "ppo_trainer",
        overrides=["hydra.searchpath=[pkg://rlhf_losses.configs]", "model@actor_rollout_ref.model=rlhf_losses"],
    )
model = config.actor_rollout_ref.model
print(model.external_lib, model.use_fused_kernels, model.fused_kernel_options.impl_backend)
""",
    )
    assert out.split()[-3:] == ["rlhf_losses.integrations.verl", "True", "rlhf_losses"]


def test_ray_actor_and_setup_hook(tmp_path):
    pytest.importorskip("ray")
    python(
        f"""
import os, ray, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from rlhf_losses.integrations.ray import LogProbActor
size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**size))
model.save_pretrained({str(tmp_path)!r})
hook = "rlhf_losses.integrations.ray.setup"
environment = dict(worker_process_setup_hook=hook, env_vars=dict(PYTHONPATH={str(ROOT)!r}))
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=2**27, runtime_env=environment)
actor = ray.remote(LogProbActor).remote({str(tmp_path)!r}, temperature=0.7)
ids = torch.randint(30, (2, 6))
mask = torch.ones_like(ids)
mask[0, :3] = 0
scores = ray.get(actor.score.remote(ids.numpy(), loss_mask=mask.numpy()))
log_p = (model(ids).logits / 0.7).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
assert (torch.from_numpy(scores["log_probs"]) - log_p).abs().max().item() < 1e-6
modules = ray.get(ray.remote(lambda: os.environ["VERL_USE_EXTERNAL_MODULES"]).remote())
assert modules == "rlhf_losses.integrations.verl", modules
"""
    )
