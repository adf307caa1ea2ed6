"""Policy losses against verl's own functions, the cases that broke others, and splits into micro-batches."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from rlhf_losses import PolicyBatch, PolicyLossConfig, TokenStats, policy_loss
from rlhf_losses.aggregation import AGGREGATIONS
from rlhf_losses.policy import KL_ESTIMATORS, PRESETS, ROLLOUT_CORRECTIONS, kl_penalty
from rlhf_losses.policy_losses import POLICY_LOSSES

needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")
B, T = 6, 9
# Our loss, verl's, settings of both, and verl's own config beside them.
VERL = {
    "ppo": ("vanilla", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0}, {"clip_ratio_c": 2.0}),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, {}),
    "cispo": ("cispo", {"clip_low": 0.1, "clip_high": 0.3}, {}),
    "sapo": ("sapo", {"tau_positive": 1.3, "tau_negative": 0.8}, {"tau_pos": 1.3, "tau_neg": 0.8}),
    "reinforce": ("gpg", {}, {}),
    "gmpo": ("geo_mean", {"clip_low": 0.2, "clip_high": 0.3}, {}),
    "dppo-tv": ("dppo_tv", {"clip_low": 0.05, "clip_high": 0.05, "ratio_bound": 1.2}, {"clip_ratio_c": 1.2}),
    "dppo-kl": ("dppo_kl", {"clip_low": 0.01, "clip_high": 0.02, "ratio_bound": 1.2}, {"clip_ratio_c": 1.2}),
    "clip-cov": ("clip_cov", {"cov_fraction": 0.2, "cov_bounds": (0.1, 5.0)}, {}),
    "kl-cov": ("kl_cov", {"cov_fraction": 0.2, "cov_kl_coefficient": 0.7}, {}),
    "dro": ("dro", {"dro_beta": 0.4}, {}),
}
# Losses of whole sequences, and one that verl always aggregates so.
ONE_MODE = {name: ["seq-mean-token-mean"] for name in ("gmpo", "sapo", "rloo")}
PAIRS = [(loss, mode) for loss in VERL for mode in ONE_MODE.get(loss, AGGREGATIONS)]
# verl's losses that mix the tokens of a micro-batch, or take the mean of its rows, depend on the split.
SPLITS = [
    (*pair, split)
    for pair in PAIRS
    for split in (1, 2, 3)
    if split == 1 or pair[0] == "gspo" or not POLICY_LOSSES[pair[0]].mixes_tokens
]
ALL = [(loss, mode) for loss in POLICY_LOSSES for mode in AGGREGATIONS if mode in ONE_MODE.get(loss, AGGREGATIONS)]


def draw(seed=0, rows=B):
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, T, generator=generator, dtype=torch.float64)
    l = (old + 0.4 * torch.randn(rows, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    mask = torch.arange(T) < torch.randint(2, T + 1, (rows, 1), generator=generator)
    mask[1, 1] = False
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, T)
    weights = 0.5 + torch.rand(rows, T, generator=generator, dtype=torch.float64)
    return l, old, advantages, mask, weights


def stats(l, entropy=None):
    return TokenStats(log_probs=l, entropy=entropy)


@needs_verl
@pytest.mark.parametrize(("loss", "mode", "split"), SPLITS)
def test_against_verl(loss, mode, split):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig as TheirConfig

    name, ours, theirs = VERL[loss]
    counts = {"num_tokens": 31, "num_sequences": 6, "data_parallel_size": 2}
    if loss == "gmpo":  # verl takes the mean over the micro-batch's rows
        counts = {}
    config = PolicyLossConfig(loss=loss, aggregation=mode, norm_length=7.0, **ours)
    policy = {
        "loss_mode": name,
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": 0.1,
        "clip_cov_ub": 5.0,
        "kl_cov_ratio": 0.2,
        "ppo_kl_coef": 0.7,
        "dro_beta": 0.4,
    }
    reference = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        clip_ratio_low=config.clip_low,
        clip_ratio_high=config.clip_high,
        policy_loss=TheirConfig(**policy),
        **theirs,
    )
    if counts:
        reference.global_batch_info.update(dp_size=2, batch_num_tokens=31, global_batch_size=6, loss_scale_factor=7.0)
    elif mode == "seq-mean-token-sum-norm":
        reference.global_batch_info.update(loss_scale_factor=7.0)
    l, old, advantages, mask, _ = draw()
    for rows in torch.arange(B).chunk(split):
        given = l[rows].clone().requires_grad_()
        torch.manual_seed(3)
        want, their_metrics = get_policy_loss_fn(name)(
            old_log_prob=old[rows],
            log_prob=given,
            advantages=advantages[rows],
            response_mask=mask[rows].double(),
            loss_agg_mode=mode,
            config=reference,
        )
        (want_gradient,) = torch.autograd.grad(want, given)
        torch.manual_seed(3)
        batch = PolicyBatch(advantages[rows], mask=mask[rows], old_log_probs=old[rows], **counts)
        got = policy_loss(stats(given), batch, config)
        (gradient,) = torch.autograd.grad(got.loss, given)
        torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-6, atol=1e-9)
        assert want_gradient.abs().max() > 1e-3
        for key, theirs_too in (("approx_kl", "actor/ppo_kl"), ("clip_fraction", "actor/pg_clipfrac")):
            if theirs_too in their_metrics and key in got.metrics and loss != "kl-cov":
                assert got.metrics[key].item() == pytest.approx(their_metrics[theirs_too], rel=1e-5, abs=1e-7)


@needs_verl
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_against_verl(estimator):
    from verl.trainer.ppo import core_algos

    l, ref, *_ = draw()
    l.requires_grad_()
    want, got = core_algos.kl_penalty(l, ref, estimator), kl_penalty(l, ref, estimator)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), l)[0], torch.autograd.grad(want.sum(), l)[0])


@pytest.mark.parametrize(("loss", "mode"), ALL)
def test_splits_padded_packed_and_nested_agree(loss, mode):
    l, old, advantages, mask, weights = draw(1)
    lengths = torch.tensor([9, 4, 7, 9, 2, 5])
    inside = torch.arange(T) < lengths[:, None]
    mask &= inside
    config = PolicyLossConfig(
        loss=loss,
        aggregation=mode,
        norm_length=T,
        dro_beta=0.5,
        cov_fraction=0.3,
        cov_bounds=(-9.0, 9.0),
        entropy_coefficient=0.01,
        kl_coefficient=0.1,
        rollout_correction="sequence-truncate",
    )
    counts = {"num_tokens": mask.sum(), "num_sequences": B}

    def loss_of(pick, **more):
        given = l.clone().requires_grad_()
        entropy = -given * weights
        batch = PolicyBatch(
            pick(advantages),
            mask=pick(mask),
            old_log_probs=pick(old),
            ref_log_probs=pick(old - 0.1),
            rollout_log_probs=pick(old + 0.02 * weights),
            **counts,
            **more,
        )
        torch.manual_seed(0)
        out = policy_loss(stats(pick(given), pick(entropy)), batch, config).loss
        return out.detach(), torch.autograd.grad(out, given)[0]

    whole, gradient = loss_of(lambda x: x)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    packed = loss_of(lambda x: x[inside], cu_seqlens=offsets.int())
    nested = loss_of(lambda x: torch.nested.nested_tensor_from_jagged(x[inside], offsets))
    for other, other_gradient in (packed, nested):
        torch.testing.assert_close(other, whole)
        torch.testing.assert_close(other_gradient, gradient)
    if loss not in ("clip-cov", "kl-cov"):
        parts = [loss_of(lambda x, rows=rows: x[rows]) for rows in torch.arange(B).split([1, 3, 2])]
        torch.testing.assert_close(sum(x for x, _ in parts), whole)
        torch.testing.assert_close(sum(g for _, g in parts), gradient)


def test_l1_token_mean_over_micro_batches():
    config = PolicyLossConfig(loss="reinforce")
    losses = []
    for count, value in ((1, -1.0), (9, 0.0)):
        l = torch.full((1, count), value, requires_grad=True)
        batch = PolicyBatch(torch.ones(1, count), num_tokens=10)
        losses.append(policy_loss(stats(l), batch, config).loss)
    assert sum(losses).item() == pytest.approx(0.1)


def test_p7_global_counts_divide():
    # Ranks of 1, 2, 3 and 4 tokens with losses 1, 2, 3, 4 each: the mean over tokens is 3; means of means are 2.5.
    total = 0.0
    for count in (1, 2, 3, 4):
        batch = PolicyBatch(torch.ones(1, count), num_tokens=10, data_parallel_size=4)
        out = policy_loss(stats(torch.full((1, count), -float(count))), batch, PolicyLossConfig(loss="reinforce"))
        total += out.loss.item() / 4
    assert total == pytest.approx(3.0)
    with pytest.raises(ValueError, match="expected num_tokens of the global batch"):
        policy_loss(stats(torch.zeros(1, 2)), PolicyBatch(torch.ones(1, 2), data_parallel_size=2), PolicyLossConfig())


@pytest.mark.parametrize(("loss", "mode"), ALL)
def test_l2_all_masked_is_zero(loss, mode):
    l = torch.full((2, 3), float("nan"), requires_grad=True)
    batch = PolicyBatch(torch.full((2, 3), torch.inf), mask=torch.zeros(2, 3), old_log_probs=torch.full((2, 3), 9e9))
    config = PolicyLossConfig(loss=loss, aggregation=mode, norm_length=3, dro_beta=1.0)
    out = policy_loss(stats(l, l), batch, replace(config, entropy_coefficient=0.1))
    assert out.loss == 0
    assert all(value == 0 for value in out.metrics.values())
    assert (torch.autograd.grad(out.loss, l)[0] == 0).all()


def test_l2_masked_completions_are_in_no_mean():
    l = torch.tensor([[-1.0, -2.0], [-3.0, -5.0], [-7.0, -9.0], [-11.0, -13.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0], [0, 0]])
    for mode, value in {"token-mean": 11 / 4, "seq-mean-token-sum": 11 / 2, "seq-mean-token-mean": 5.5 / 2}.items():
        config = PolicyLossConfig(loss="reinforce", aggregation=mode)
        assert policy_loss(stats(l), PolicyBatch(torch.ones(4, 2), mask=mask), config).loss.item() == pytest.approx(
            value
        )


def test_l3_rollout_mask_selects():
    l = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    batch = PolicyBatch(torch.ones(1, 2), old_log_probs=l.detach(), rollout_log_probs=torch.zeros(1, 2))
    config = PolicyLossConfig(rollout_correction="token-mask", rollout_low=0.5, rollout_high=5.0)
    out = policy_loss(stats(l), batch, config)
    assert out.loss.item() == pytest.approx(-0.5)
    assert torch.autograd.grad(out.loss, l)[0].tolist() == [[0.0, -0.5]]


def test_l4_masked_tokens_do_not_enter_gspo():
    config = PolicyLossConfig.preset("gspo", clip_low=10.0, clip_high=10.0)
    losses = []
    for masked in (-2.0, -6.0):
        l = torch.tensor([[0.1, masked, -0.2]], requires_grad=True)
        batch = PolicyBatch(torch.ones(1, 3), mask=torch.tensor([[1, 0, 1]]), old_log_probs=torch.zeros(1, 3))
        loss = policy_loss(stats(l), batch, config).loss
        losses.append(loss.item())
        assert torch.autograd.grad(loss, l)[0][0, 1] == 0
    assert losses[0] == losses[1]


def test_l5_straight_through_k3():
    l = torch.tensor([0.5], requires_grad=True)
    value = kl_penalty(l, torch.zeros(1), "k3+")
    assert value.item() == pytest.approx(0.106531, abs=1e-6)
    assert torch.autograd.grad(value, l)[0].item() == pytest.approx(0.5)


def test_l6_no_entropy_gradient_at_coefficient_0():
    l, entropy = torch.zeros(1, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    out = policy_loss(stats(l, entropy), PolicyBatch(torch.ones(1, 3)), PolicyLossConfig())
    assert torch.autograd.grad(out.loss, [l, entropy], allow_unused=True)[1] is None
    assert out.metrics["entropy"] == 1


@pytest.mark.parametrize("correction", ROLLOUT_CORRECTIONS)
def test_l7_rollout_weights(correction):
    l, old, advantages, mask, noise = draw(2)
    rollout = old + 0.3 * (noise - 1)
    config = PolicyLossConfig(loss="reinforce", rollout_correction=correction, rollout_low=0.8, rollout_high=1.2)
    batch = PolicyBatch(advantages, mask=mask, old_log_probs=old, rollout_log_probs=rollout)
    gap = torch.where(mask, old - rollout, 0.0)
    level, how = correction.split("-")
    if level != "token":
        gap = gap.sum(1, keepdim=True) / (mask.sum(1, keepdim=True) if level == "geometric" else 1)
        gap = gap.expand(B, T)
    weight = gap.exp()
    weight = weight.clamp(max=1.2) if how == "truncate" else weight * ((weight >= 0.8) & (weight <= 1.2))
    want = (-advantages * l * weight * mask).sum() / mask.sum()
    torch.testing.assert_close(policy_loss(stats(l), batch, config).loss, want)


@pytest.mark.parametrize(("loss", "mode"), ALL)
def test_rollout_weights_of_the_caller(loss, mode):
    # Those that a correction computes, given: the same loss; and they have no gradient.
    l, old, advantages, mask, noise = draw(2)
    rollout = old + 0.3 * (noise - 1)
    config = PolicyLossConfig(
        loss=loss, aggregation=mode, norm_length=T, dro_beta=0.5, cov_fraction=0.3, cov_bounds=(-9.0, 9.0)
    )
    weights = (old - rollout).exp().requires_grad_()
    results = []
    for changes, given in (
        ({"rollout_correction": "token-truncate", "rollout_high": 9.0}, {"rollout_log_probs": rollout}),
        ({}, {"rollout_weights": torch.where(mask, weights, torch.nan)}),
        ({}, {}),
    ):
        torch.manual_seed(0)
        l = l.detach().requires_grad_()
        batch = PolicyBatch(advantages, mask=mask, old_log_probs=old, **given)
        out = policy_loss(stats(l), batch, replace(config, **changes))
        results.append((out, *torch.autograd.grad(out.loss, [l, weights], allow_unused=True)))
    (corrected, want, _), (got, gradient, of_weights), (plain, plain_gradient, _) = results
    torch.testing.assert_close(got.loss, corrected.loss)
    torch.testing.assert_close(gradient, want)
    torch.testing.assert_close(got.metrics["rollout_weight"], corrected.metrics["rollout_weight"])
    torch.testing.assert_close(got.metrics["rollout_weight"], weights[mask].mean().float())
    assert (got.loss - plain.loss).abs() > 1e-4
    assert (gradient - plain_gradient).abs().max() > 1e-3
    assert "rollout_weight" not in plain.metrics
    assert of_weights is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollout_weights_are_one_per_token(dtype):
    l = torch.tensor([[-1.0, -2.0, float("nan")]], requires_grad=True)
    weights = torch.tensor([[0.5, 3.0, float("inf")]], dtype=dtype)
    batch = PolicyBatch(torch.ones(1, 3), mask=torch.tensor([[1, 1, 0]]), rollout_weights=weights)
    out = policy_loss(stats(l), batch, PolicyLossConfig(loss="reinforce"))
    assert out.loss == (0.5 * 1 + 3 * 2) / 2
    assert torch.autograd.grad(out.loss, l)[0].tolist() == [[-0.25, -1.5, 0.0]]
    assert out.metrics["rollout_weight"] == 1.75


def test_on_policy_ratio_is_one():
    l = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    out = policy_loss(stats(l), PolicyBatch(torch.tensor([[2.0, -1.0]])), PolicyLossConfig())
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1
    assert torch.autograd.grad(out.loss, l)[0].tolist() == [[-1.0, 0.5]]


def test_no_tokens_at_all():
    l = torch.zeros(0, requires_grad=True)
    out = policy_loss(stats(l, l), PolicyBatch(torch.zeros(0)), PolicyLossConfig(entropy_coefficient=0.1))
    assert out.loss == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    l, old, advantages, mask, _ = draw()
    config = PolicyLossConfig.preset(preset, norm_length=T)
    batch = PolicyBatch(advantages, mask=mask, old_log_probs=old, ref_log_probs=old)
    assert policy_loss(stats(l), batch, config).loss.isfinite()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PolicyLossConfig(loss="trpo"), "loss: expected one of ppo"),
        (lambda: PolicyLossConfig(aggregation="mean"), "aggregation: expected one of token-mean"),
        (lambda: PolicyLossConfig(dual_clip=0.5), "dual_clip"),
        (lambda: PolicyLossConfig.preset("nothing"), "preset: expected one of ppo"),
        (lambda: policy_loss(TokenStats(), PolicyBatch(torch.ones(1)), PolicyLossConfig()), "expected log_probs"),
        (
            lambda: policy_loss(stats(torch.zeros(2, 3)), PolicyBatch(torch.ones(3, 2)), PolicyLossConfig()),
            r"advantages: expected \[2, 3\]",
        ),
        (
            lambda: policy_loss(stats(torch.zeros(2, 3, 4)), PolicyBatch(torch.ones(2, 3, 4)), PolicyLossConfig()),
            "cu_seqlens",
        ),
        (
            lambda: policy_loss(
                stats(torch.zeros(2)),
                PolicyBatch(torch.ones(2), rollout_weights=torch.ones(2)),
                PolicyLossConfig(rollout_correction="token-mask"),
            ),
            "rollout_weights: expected None, since rollout_correction is set",
        ),
        (
            lambda: policy_loss(
                stats(torch.zeros(2)), PolicyBatch(torch.ones(2), rollout_weights=torch.ones(3)), PolicyLossConfig()
            ),
            r"rollout_weights: expected \[2\]",
        ),
        (
            lambda: policy_loss(
                stats(torch.zeros(2)), PolicyBatch(torch.ones(2)), PolicyLossConfig(kl_coefficient=0.1)
            ),
            "ref_log_probs: expected a tensor, since kl_coefficient is set",
        ),
        (
            lambda: policy_loss(
                stats(torch.zeros(2)),
                PolicyBatch(torch.ones(2)),
                PolicyLossConfig(aggregation="seq-mean-token-sum-norm"),
            ),
            "norm_length > 0",
        ),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
