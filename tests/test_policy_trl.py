"""Policy losses against TRL's own: its trainers' ``_compute_loss``, given the log-probabilities of a model.

Every loss type of TRL's GRPO trainer is here, with what can be switched on beside it, and its RLOO and GMPO trainers.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rlhf_losses import PolicyBatch, PolicyLossConfig, TokenStats, policy_loss

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]
B, T = 6, 9
CLIP = {"epsilon": 0.1, "epsilon_high": 0.3}
CLIPPED = {"clip_low": 0.1, "clip_high": 0.3}
ONE_SIDED = CLIPPED | {"dual_clip": None}
# Small ones, for means over sequences.
NARROW = {"epsilon": 0.03, "epsilon_high": 0.05}
NARROWED = {"clip_low": 0.03, "clip_high": 0.05}
SEQUENCE = {"importance_sampling_level": "sequence"}


@dataclass(frozen=True)
class Case:
    """TRL's settings and ours; the parts of the batch that they ask for, by their names in TRL's inputs."""

    theirs: dict[str, Any]
    ours: dict[str, Any]
    inputs: tuple[str, ...] = ()
    trainer: str = "GRPO"


CASES = {
    "grpo": Case({"loss_type": "grpo"} | CLIP, {"aggregation": "seq-mean-token-mean"} | ONE_SIDED),
    "bnpo": Case({"loss_type": "bnpo"} | CLIP, ONE_SIDED),
    "dr_grpo": Case({"loss_type": "dr_grpo"} | CLIP, {"aggregation": "seq-mean-token-sum-norm"} | ONE_SIDED),
    "dapo": Case({"loss_type": "dapo"} | CLIP, ONE_SIDED),
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.2}, {"loss": "cispo", "clip_low": 1.0, "clip_high": 1.2 - 1}
    ),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_pos": 1.3, "sapo_temperature_neg": 0.8},
        {"loss": "sapo", "aggregation": "seq-mean-token-mean", "tau_positive": 1.3, "tau_negative": 0.8},
    ),
    "luspo": Case(
        {"loss_type": "luspo"} | SEQUENCE | NARROW, {"loss": "gspo", "aggregation": "seq-mean-token-sum"} | NARROWED
    ),
    "luspo, of tokens": Case({"loss_type": "luspo"} | CLIP, {"aggregation": "seq-mean-token-sum"} | ONE_SIDED),
    "vespo": Case({"loss_type": "vespo"}, {"loss": "vespo"}),
    "vespo, other exponents": Case(
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 0.5,
            "vespo_k_neg": 0.5,
            "vespo_lambda_neg": 1.5,
        },
        {
            "loss": "vespo",
            "vespo_k_positive": 1.5,
            "vespo_lambda_positive": 0.5,
            "vespo_k_negative": 0.5,
            "vespo_lambda_negative": 1.5,
        },
    ),
    # TRL multiplies the sampler's ratio into the sequence's; here the sampler is the policy that is improved on.
    "vespo, from the sampler": Case({"loss_type": "vespo"}, {"loss": "vespo"}, ("importance_sampling_ratio",)),
    "gspo": Case(
        {"loss_type": "grpo"} | SEQUENCE | NARROW, {"loss": "gspo", "aggregation": "seq-mean-token-mean"} | NARROWED
    ),
    "gspo, mean of tokens": Case({"loss_type": "dapo"} | SEQUENCE | NARROW, {"loss": "gspo"} | NARROWED),
    "gspo, constant length": Case(
        {"loss_type": "dr_grpo"} | SEQUENCE | NARROW,
        {"loss": "gspo", "aggregation": "seq-mean-token-sum-norm"} | NARROWED,
    ),
    "on the policy itself": Case({"loss_type": "dapo"} | CLIP, ONE_SIDED, ("no old_per_token_logps",)),
    # Its upper bound of a ratio with A < 0 is the dual clip.
    "delta": Case({"loss_type": "dapo", "delta": 1.5} | CLIP, CLIPPED | {"dual_clip": 1.5}),
    "kl": Case(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False} | CLIP,
        {"aggregation": "seq-mean-token-mean", "kl_coefficient": 0.3, "kl_estimator": "k3"} | ONE_SIDED,
    ),
    # TRL's bonus is a mean over tokens whatever the loss's aggregation.
    "entropy": Case({"loss_type": "bnpo", "entropy_coef": 0.2} | CLIP, {"entropy_coefficient": 0.2} | ONE_SIDED),
    # Tokens and sequences that TRL leaves out of the loss, not of its counts, have advantages of 0.
    "top entropy": Case({"loss_type": "dapo", "top_entropy_quantile": 0.4} | CLIP, ONE_SIDED),
    "top entropy, gspo": Case(
        {"loss_type": "grpo", "top_entropy_quantile": 0.4} | SEQUENCE | NARROW,
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"} | NARROWED,
    ),
    "off-policy sequences": Case({"loss_type": "dapo", "off_policy_mask_threshold": 0.02} | CLIP, ONE_SIDED),
    "rollout, token-truncate": Case(
        {"loss_type": "dapo"} | CLIP,
        {"rollout_correction": "token-truncate", "rollout_high": 1.05} | ONE_SIDED,
        ("importance_sampling_ratio",),
    ),
    "rollout, sequence-mask": Case(
        {"loss_type": "grpo"} | CLIP,
        {"aggregation": "seq-mean-token-mean", "rollout_correction": "sequence-mask", "rollout_high": 1.2} | ONE_SIDED,
        ("importance_sampling_ratio",),
    ),
    "rloo": Case(CLIP, {"loss": "rloo", "aggregation": "seq-mean-token-mean"} | CLIPPED, trainer="RLOO"),
    "gmpo": Case(CLIP, {"loss": "gmpo", "aggregation": "seq-mean-token-mean"} | CLIPPED, trainer="GMPO"),
}
# The counts by which TRL divides are those of a window of accumulation; generations may span several.
SPLITS = [(1, 1), (2, 1), (3, 1), (3, 2)]


@dataclass(frozen=True)
class Batch:
    """[B, T] each, fp64, but for advantages [B]; ``truncated``: one sequence without a token that counts."""

    truncated: bool
    log_probs: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(5)

        def uniform(*shape):
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        old = -3 * uniform(B, T) - 0.5
        completion = torch.arange(T) < torch.tensor([9, 4, 7, 9, 3, 5])[:, None]
        tool = torch.ones_like(completion)
        tool[1, 1] = False
        completion[4] &= not self.truncated
        for name, value in {
            "old": old,
            "log_probs": (old + 0.8 * uniform(B, T) - 0.4).clamp(max=-0.01),
            "ref": old + 0.6 * uniform(B, T) - 0.3,
            "rollout": old + 0.2 * uniform(B, T) - 0.1,
            "weights": 0.5 + uniform(B, T),
            "advantages": torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.6], dtype=torch.float64),
            "completion": completion,
            "tool": tool,
            "mask": completion & tool,
        }.items():
            object.__setattr__(self, name, value)


def config_of(case, folder, split, windows):
    from trl import GRPOConfig, RLOOConfig
    from trl.experimental.gmpo import GMPOConfig

    make = {"GRPO": GRPOConfig, "RLOO": RLOOConfig, "GMPO": GMPOConfig}[case.trainer]
    return make(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=B // split,
        gradient_accumulation_steps=split,
        steps_per_generation=split * windows,
        num_generations=2,
        max_completion_length=T,
        **case.theirs,
    )


def trainer_of(case, config):
    """TRL's trainer as far as its loss reads it: no model, no data."""
    from accelerate import Accelerator
    from trl import GRPOTrainer, RLOOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    kind = {"GRPO": GRPOTrainer, "RLOO": RLOOTrainer, "GMPO": GMPOTrainer}[case.trainer]
    trainer = kind.__new__(kind)
    trainer.args = config
    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = torch.nn.Identity()
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    trainer.epsilon_low = config.epsilon
    trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    trainer.max_completion_length = config.max_completion_length
    trainer.beta = config.beta
    trainer.aux_loss_enabled = False
    trainer._metrics = {"train": defaultdict(list)}
    if case.trainer != "RLOO":
        trainer.use_vllm = "importance_sampling_ratio" in case.inputs
        trainer._entropy_bonus_enabled = config.entropy_coef != 0
        for name in (
            "vllm_importance_sampling_correction",
            "loss_type",
            "importance_sampling_level",
            "off_policy_mask_threshold",
            "top_entropy_quantile",
            "entropy_coef",
            "use_adaptive_entropy",
        ):
            setattr(trainer, name, getattr(config, name))
    return trainer


def loss_of_trl(trainer, case, batch, rows, given, ratio):
    """TRL's loss of some rows, and what it logged."""
    ids = torch.zeros(len(rows), T, dtype=torch.int64)
    completion, tool = batch.completion[rows], batch.tool[rows]
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": completion.long(),
        "tool_mask": tool.long(),
        "advantages": batch.advantages[rows],
        "old_per_token_logps": batch.old[rows],
        "ref_per_token_logps": batch.ref[rows],
        # Of the whole generation batch, whose windows are alike here.
        "num_items_in_batch": batch.mask.sum()
        * (trainer.args.steps_per_generation // trainer.args.gradient_accumulation_steps),
    }
    if case.trainer == "RLOO":
        mask = completion & tool
        inputs |= {"completion_mask": mask.long(), "old_logps": (batch.old[rows] * mask).sum(1)}
    if "no old_per_token_logps" in case.inputs:
        del inputs["old_per_token_logps"]
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
    entropy = -given * batch.weights[rows]
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (given, entropy, None)
    loss = trainer._compute_loss(trainer.model, inputs)
    # Transformers' trainer divides RLOO's loss, TRL its others.
    loss = loss / trainer.current_gradient_accumulation_steps if case.trainer == "RLOO" else loss
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def rollout_ratio(case, batch, rows):
    """The ratio of the policy to its sampler that TRL's generation makes by the mode of ``rollout_correction``."""
    mask = batch.mask[rows]
    gap = torch.where(mask, batch.old[rows] - batch.rollout[rows], 0.0)
    high = case.ours.get("rollout_high")
    match case.ours.get("rollout_correction"):
        case None:
            return gap.exp()
        case "token-truncate":
            return gap.exp().clamp(max=high)
        case "sequence-mask":
            ratio = gap.sum(1, keepdim=True).exp()
            return ratio.masked_fill(ratio > high, 0.0)


def left_out_by_trl(trainer, batch, rows, given):
    """[rows, T]: 0 where TRL leaves a token out of the loss, 1 elsewhere, by its own functions; a sequence's share."""
    mask, advantages = batch.mask[rows], batch.advantages[rows, None]
    kept = torch.ones(len(rows), T, dtype=torch.float64)
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1:
        entropy = -given.detach() * batch.weights[rows]
        kept = kept * trainer.get_high_entropy_mask(entropy, mask.long(), 1 - trainer.top_entropy_quantile)
    if getattr(trainer, "off_policy_mask_threshold", None) is not None:
        kept = kept * trainer.get_off_policy_mask(
            advantages, given, batch.old[rows], mask.long(), trainer.off_policy_mask_threshold
        )
    if getattr(trainer, "importance_sampling_level", "token") == "sequence":
        # One value of each sequence, as often as it has tokens that stay.
        kept = ((kept * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand(-1, T)
    return kept


@pytest.mark.parametrize(("split", "windows"), SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_against_trl(name, split, windows, tmp_path):
    case = CASES[name]
    # Of a sequence that is masked altogether, TRL's RLOO and GMPO add the constant -A: a ratio of 1.
    batch = Batch(truncated=case.trainer == "GRPO")
    trainer = trainer_of(case, config_of(case, tmp_path, split, windows))
    config = PolicyLossConfig(norm_length=T, **case.ours)
    largest, dropped = 0.0, 0
    for rows in torch.arange(B).chunk(split):
        given = batch.log_probs[rows].clone().requires_grad_()
        ratio = rollout_ratio(case, batch, rows) if "importance_sampling_ratio" in case.inputs else None
        want, logged = loss_of_trl(trainer, case, batch, rows, given, ratio)
        (want_gradient,) = torch.autograd.grad(want, given)

        mask = batch.mask[rows]
        kept = left_out_by_trl(trainer, batch, rows, given)
        dropped += (mask & (kept < 1)).sum()
        old = batch.rollout[rows] if name == "vespo, from the sampler" else batch.old[rows]
        of_ours = PolicyBatch(
            batch.advantages[rows, None] * kept,
            mask=mask,
            old_log_probs=None if "no old_per_token_logps" in case.inputs else old,
            ref_log_probs=batch.ref[rows],
            rollout_log_probs=batch.rollout[rows],
            # bnpo divides by the tokens of each micro-batch, and then by the number of these.
            num_tokens=mask.sum() * split if case.theirs.get("loss_type") == "bnpo" else batch.mask.sum(),
            num_sequences=B,
        )
        stats = TokenStats(log_probs=given, entropy=-given * batch.weights[rows])
        got = policy_loss(stats, of_ours, config)
        (gradient,) = torch.autograd.grad(got.loss, given)
        torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-6, atol=1e-9)
        largest = max(largest, want_gradient.abs().max().item())
        if config.loss == "ppo" and not dropped and name != "delta":
            assert got.metrics["clip_fraction"].item() == pytest.approx(logged["clip_ratio/region_mean"], abs=1e-6)
        if config.loss in ("ppo", "gspo", "rloo", "gmpo") and old is batch.old and split == 1:
            assert 0 < got.metrics["clip_fraction"] < 1
    assert largest > 1e-3
    assert (dropped > 0) == (name in ("top entropy", "top entropy, gspo", "off-policy sequences"))


def test_every_loss_type_of_trl_is_here():
    from trl import GRPOConfig

    described = re.findall(r"'(\w+)'(?: \(default\))?:", GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"])
    assert set(described) == {x.theirs["loss_type"] for x in CASES.values() if x.trainer == "GRPO"}


@pytest.mark.parametrize("preset", ["sapo", "vespo"])
def test_presets_are_trls_defaults(preset, tmp_path):
    theirs = config_of(Case({"loss_type": preset}, {}), tmp_path, 1, 1)
    ours = PolicyLossConfig.preset(preset)
    assert (ours.tau_positive, ours.tau_negative) == (theirs.sapo_temperature_pos, theirs.sapo_temperature_neg)
    assert (ours.vespo_k_positive, ours.vespo_k_negative) == (theirs.vespo_k_pos, theirs.vespo_k_neg)
    assert ours.vespo_lambda_positive == theirs.vespo_lambda_pos
    assert ours.vespo_lambda_negative == theirs.vespo_lambda_neg
