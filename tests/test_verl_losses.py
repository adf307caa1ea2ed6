"""Our policy losses in verl: registered by every way the integration is loaded, and computed by verl's own ppo_loss."""

from copy import deepcopy
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, python

from rlhf_losses import PolicyBatch, PolicyLossConfig, TokenStats, policy_loss
from rlhf_losses.aggregation import AGGREGATIONS

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")

# Those that verl 0.9.1 has none like, and how each may be aggregated.
LOSSES = {"rloo": ["seq-mean-token-mean"], "vespo": AGGREGATIONS}
PAIRS = [(loss, mode) for loss, modes in LOSSES.items() for mode in modes]
WHOSE = """
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as found
ours = [name for name, loss in found.items() if getattr(loss, "func", loss).__module__.startswith("rlhf_losses.")]
print("ours:", *ours)
"""
LISTED = f"ours: {' '.join(LOSSES)}"
PROMPTS, RESPONSES = [3, 1, 2, 4, 2, 1], [9, 4, 7, 9, 2, 5]
B = len(RESPONSES)


def actor_config(loss, mode, *overrides):
    """The actor's config as verl makes it of a run's command line; a loss writes its counts into it."""
    return deepcopy(_composed(loss, mode, *overrides))


@cache
def _composed(loss, mode, *overrides):
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    import rlhf_losses.integrations.verl  # noqa: F401

    given = [
        "ppo_micro_batch_size_per_gpu=2",
        f"policy_loss.loss_mode={loss}",
        f"loss_agg_mode={mode}",
        "clip_ratio_low=0.1",
        "clip_ratio_high=0.3",
        *overrides,
    ]
    given = [f"+actor_rollout_ref.actor.{x[1:]}" if x[0] == "+" else f"actor_rollout_ref.actor.{x}" for x in given]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=given)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


SETTINGS = (
    "policy_loss._target_=rlhf_losses.integrations.verl.config.PolicyLossConfig",
    "+policy_loss.settings.vespo_k_negative=1.5",
)


class Batch:
    """Packed tokens, fp64: ``log_probs`` of whole sequences, the rest of responses."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4)

        def uniform(count):
            return torch.rand(count, generator=generator, dtype=torch.float64)

        count = sum(RESPONSES)
        self.log_probs = -3 * uniform(count + sum(PROMPTS)) - 0.1
        ends = torch.tensor([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]).cumsum(0)
        # A response token is scored by the row before it.
        self.rows = [torch.arange(end - r - 1, end - 1) for end, r in zip(ends, RESPONSES, strict=True)]
        near = self.log_probs[torch.cat(self.rows)]
        self.old = near + 0.3 * uniform(count) - 0.15
        self.ref = near + 0.3 * uniform(count) - 0.15
        self.weights = 0.5 + uniform(count)
        self.entropy = 0.5 + uniform(len(self.log_probs))
        signs = torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.6], dtype=torch.float64)
        self.advantages = signs.repeat_interleave(torch.tensor(RESPONSES))
        self.mask = torch.ones(count, dtype=torch.int64)
        # A tool's tokens, and a sequence that is left out.
        self.mask[[10, 11]] = 0
        self.mask[29:31] = 0

    def of_verl(self, sequences, given, weighted, counts):
        """Model output and data as verl's engine hands them to its loss."""
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        def nested(parts):
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        def responses(values):
            parts = values.split(RESPONSES)
            return nested([parts[i] for i in sequences])

        both = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]

        def whole(values):
            parts = values.split(both)
            return torch.nested.nested_tensor_from_jagged(
                torch.cat([parts[i] for i in sequences]),
                torch.tensor([0, *(both[i] for i in sequences)]).cumsum(0),
            )

        fields = {
            "prompts": nested([torch.zeros(PROMPTS[i], dtype=torch.int64) for i in sequences]),
            "responses": nested([torch.zeros(RESPONSES[i], dtype=torch.int64) for i in sequences]),
            "response_mask": responses(self.mask),
            "old_log_probs": responses(self.old),
            "advantages": responses(self.advantages),
            "ref_log_prob": responses(self.ref),
        }
        if weighted:
            fields["rollout_is_weights"] = responses(self.weights)
        data = TensorDict(fields, batch_size=len(sequences))
        tu.assign_non_tensor(data, **counts)
        return {"log_probs": whole(given), "entropy": whole(self.entropy)}, data

    def of_ours(self, sequences, given, weighted, **counts):
        def part(values):
            parts = values.split(RESPONSES)
            return torch.cat([parts[i] for i in sequences])

        rows = torch.cat([self.rows[i] for i in sequences])
        lengths = torch.tensor([0, *(RESPONSES[i] for i in sequences)])
        batch = PolicyBatch(
            part(self.advantages),
            mask=part(self.mask),
            old_log_probs=part(self.old),
            ref_log_probs=part(self.ref),
            rollout_log_probs=part(self.old - self.weights.log()) if weighted else None,
            cu_seqlens=lengths.cumsum(0),
            **counts,
        )
        return TokenStats(log_probs=given[rows], entropy=self.entropy[rows]), batch


@pytest.mark.parametrize("weighted", [False, True], ids=["", "rollout-weights"])
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(("loss", "mode"), PAIRS)
def test_ppo_loss_of_verl_is_policy_loss(loss, mode, split, weighted):
    from verl.workers.utils.losses import ppo_loss

    # Without a constant verl divides by the width of the micro-batch.
    constant = None if split == 1 else 7
    overrides = ["entropy_coeff=0.01", "use_kl_loss=True", "kl_loss_coef=0.2", "kl_loss_type=low_var_kl"]
    actor = actor_config(loss, mode, *overrides, f"loss_scale_factor={constant or 'null'}", *SETTINGS)
    batch = Batch()
    ours = PolicyLossConfig(
        loss=loss,
        aggregation=mode,
        norm_length=constant or max(RESPONSES),
        clip_low=0.1,
        clip_high=0.3,
        vespo_k_negative=1.5,
        entropy_coefficient=0.01,
        kl_coefficient=0.2,
        rollout_correction="token-truncate" if weighted else None,
        rollout_high=100.0,
    )
    for sequences in torch.arange(B).chunk(split):
        given = batch.log_probs.clone().requires_grad_()
        counts = {"dp_size": 2, "batch_num_tokens": 41, "global_batch_size": 8}
        got, metrics = ppo_loss(actor, *batch.of_verl(sequences, given, weighted, counts))
        (gradient,) = torch.autograd.grad(got, given)
        counts = {"data_parallel_size": 2, "num_tokens": 41, "num_sequences": 8}
        want, expected = policy_loss(*batch.of_ours(sequences, given, weighted, **counts), ours)
        (want_gradient,) = torch.autograd.grad(want, given)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-6, atol=1e-9)
        assert want_gradient.abs().max() > 1e-3
        names = {"actor/pg_loss": "policy_loss", "actor/ppo_kl": "approx_kl", "actor/ratio_mean": "ratio_mean"}
        names |= {"actor/rollout_weight": "rollout_weight"} if weighted else {}
        names |= {"actor/vespo_weight": "vespo_weight"} if loss == "vespo" else {"actor/pg_clipfrac": "clip_fraction"}
        assert {key for key in metrics if key.startswith("actor/")} == {*names, "actor/entropy_loss"}
        for theirs, name in names.items():
            assert metrics[theirs].aggregate() == pytest.approx(expected[name].item(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("loss", "mode"), PAIRS)
def test_without_global_counts_those_of_the_call_are_taken(loss, mode):
    # As verl's own losses: a sequence without a token that counts is none.
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    actor = actor_config(loss, mode)
    l, old = -torch.rand(4, 5, dtype=torch.float64), -torch.rand(4, 5, dtype=torch.float64)
    advantages, mask = torch.randn(4, 1, dtype=torch.float64).expand(4, 5), torch.rand(4, 5) < 0.7
    mask[:, 0], mask[2] = True, False
    l.requires_grad_()
    got, _ = get_policy_loss_fn(loss)(old, l, advantages, mask, mode, actor)
    config = PolicyLossConfig(loss=loss, aggregation=mode, norm_length=5, clip_low=0.1, clip_high=0.3)
    want = policy_loss(TokenStats(log_probs=l), PolicyBatch(advantages, mask=mask, old_log_probs=old), config).loss
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, l)[0], torch.autograd.grad(want, l)[0])


def test_clip_ratio_where_its_halves_are_not_given():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    l, old = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.full((1, 2), -2.0)
    losses = []
    for overrides in (("clip_ratio=0.5", "clip_ratio_low=null", "clip_ratio_high=null"), ("clip_ratio=0.5",)):
        actor = actor_config("rloo", "seq-mean-token-mean", *overrides)
        ones = torch.ones(1, 2)
        losses.append(get_policy_loss_fn("rloo")(old, l, ones, ones, actor.loss_agg_mode, actor))
    # A ratio of e^2, clipped to 1 + 0.5 and to 1 + 0.3.
    assert [loss.item() for loss, _ in losses] == pytest.approx([-1.5, -1.3])
    assert losses[0][1]["actor/pg_clipfrac"] == 1


def test_masked_tokens_may_hold_anything():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    actor = actor_config("vespo", "token-mean")
    l = torch.tensor([[-1.0, float("nan")], [float("-inf"), -2.0]], requires_grad=True)
    old = torch.tensor([[-1.5, float("inf")], [float("nan"), -2.5]])
    mask = torch.tensor([[1, 0], [0, 1]])
    loss, _ = get_policy_loss_fn("vespo")(old, l, torch.ones(2, 2), mask, "token-mean", actor)
    (gradient,) = torch.autograd.grad(loss, l)
    assert loss.isfinite()
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask == 1] < 0).all()


def test_registered_by_the_entry_point():
    if not [point for point in entry_points(group="verl.plugins") if point.name == "rlhf_losses"]:
        pytest.skip("rlhf_losses runs from its source tree, not installed: there is no entry point")
    assert LISTED in python(WHOSE)


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        ("", {"VERL_USE_EXTERNAL_MODULES": "rlhf_losses.integrations.verl"}),
        # Before verl, as hydra does for a worker's ``_target_``.
        ("import rlhf_losses.integrations.verl.config", {}),
    ],
    ids=["by the environment", "by the config's class"],
)
def test_registered(code, environment):
    assert LISTED in python(code + WHOSE, VERL_USE_EXTERNAL_PLUGINS="none", **environment)


def test_registered_after_verl_and_what_is_there_stays():
    code = """
from verl.trainer.ppo import core_algos
mine = core_algos.register_policy_loss("vespo")(lambda **arguments: None)
before = dict(core_algos.POLICY_LOSS_REGISTRY)
import rlhf_losses.integrations.verl
after = core_algos.POLICY_LOSS_REGISTRY
assert {name: after[name] for name in before} == before
print(*after.keys() - before.keys())
"""
    assert python(code, VERL_USE_EXTERNAL_PLUGINS="none").split()[-1] == "rloo"


def test_a_verl_without_the_table_is_left_alone():
    code = """
from verl.trainer.ppo import core_algos
from verl.models.transformers import monkey_patch
table, register = core_algos.POLICY_LOSS_REGISTRY, core_algos.register_policy_loss
names = list(table)
del core_algos.register_policy_loss
import rlhf_losses.integrations.verl
from rlhf_losses.integrations.verl.losses import install
assert list(table) == names
core_algos.register_policy_loss = register
del core_algos.POLICY_LOSS_REGISTRY
install.cache_clear()
install()
assert list(table) == names
print(monkey_patch.patch_forward_with_backends.__globals__["__name__"])
"""
    out = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert out.split()[-1] == "rlhf_losses.integrations.verl.hook"


@pytest.mark.parametrize("key", ["vespo_k", "aggregation", "kl_coefficient", "rollout_high"])
def test_settings_of_another_name_are_refused(key):
    # hydra wraps it, and says ours.
    with pytest.raises(Exception, match=r"policy_loss\.settings: expected keys out of clip_low, "):
        actor_config("vespo", "token-mean", SETTINGS[0], f"+policy_loss.settings.{key}=1")


def test_a_loss_of_sequences_refuses_other_aggregations():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    actor = actor_config("rloo", "token-mean")
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="rloo is a loss of whole sequences: expected aggregation"):
        get_policy_loss_fn("rloo")(x, x, x, x, "token-mean", actor)


def test_the_page_lists_them():
    page = (ROOT / "docs/verl.md").read_text()
    assert all(f"| `{loss}` |" in page for loss in LOSSES)
