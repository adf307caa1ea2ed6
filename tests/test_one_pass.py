"""``linear_policy_loss``: one pass against full logits and against two passes, and the work that it leaves undone."""

from dataclasses import replace

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import DEVICE, DTYPE, HALF, PARAMETERS, Allocations, assert_right, dtypes_of
from torch.utils.checkpoint import checkpoint

import rlhf_losses
from rlhf_losses import (
    PolicyBatch,
    PolicyLossConfig,
    linear_cross_entropy,
    linear_log_probs,
    linear_policy_loss,
    policy_loss,
)
from rlhf_losses.kernels import one_pass, triton_scale
from rlhf_losses.policy_losses import POLICY_LOSSES, PolicyLoss

LOCAL = [name for name, loss in POLICY_LOSSES.items() if not loss.mixes_tokens]
MIXING = [name for name, loss in POLICY_LOSSES.items() if loss.mixes_tokens]
CONFIG = PolicyLossConfig(entropy_coefficient=0.3, kl_coefficient=0.1)


def batch_of(inputs, mask=None, zeros=0.0, **more):
    """Log-ratios that lie on either side of every bound, none near one; a share ``zeros`` of the advantages is 0."""
    generator = torch.Generator().manual_seed(7)
    shape = inputs.labels.shape
    wide = inputs.to(torch.float64)
    true = linear_log_probs(
        wide.hidden, wide.weight, wide.labels, bias=wide.bias, backend="reference", **inputs.options
    ).log_probs.float()
    steps = torch.tensor([-0.6, -0.1, 0.05, 0.6])[torch.randint(4, shape, generator=generator)].to(DEVICE)
    advantages = torch.randn(shape, generator=generator)
    advantages[torch.rand(shape, generator=generator) < zeros] = 0
    return PolicyBatch(
        advantages.to(DEVICE),
        mask=mask,
        old_log_probs=true - steps,
        ref_log_probs=true - 0.3 * torch.randn(shape, generator=generator).to(DEVICE),
        rollout_log_probs=true - 0.2,
        **more,
    )


def loss_and_gradients(
    inputs, backend, batch, config=CONFIG, wrt=PARAMETERS[:2], scale=1.0, call=linear_policy_loss, **options
):
    """The loss and its gradients, as ``helpers.evaluate`` gives those of ``linear_log_probs``."""
    parameters = {
        name: None if x is None else x.detach().requires_grad_(name in wrt)
        for name, x in zip(PARAMETERS, (inputs.hidden, inputs.weight, inputs.bias), strict=True)
    }
    hidden, weight, bias = parameters.values()
    loss, metrics = call(
        hidden, weight, inputs.labels, batch, config, bias=bias, backend=backend, **inputs.options | options
    )
    gradients = torch.autograd.grad(loss * scale, [parameters[name] for name in wrt])
    if call is linear_policy_loss:
        passes = 2 if backend == "reference" or POLICY_LOSSES[config.loss].mixes_tokens else 1
        assert metrics["passes"] == passes
    return {"loss": loss.detach()} | {f"d_{name}": x for name, x in zip(wrt, gradients, strict=True)}


def gradients(*args, **kwargs):
    """What the rule of helpers.py is applied to. The loss in fp32 is one sum in one order: it has a test of its own."""
    return {name: x for name, x in loss_and_gradients(*args, **kwargs).items() if name != "loss"}


def two_passes(hidden, weight, labels, batch, config, **options):
    stats = linear_log_probs(hidden, weight, labels, mask=batch.mask, **options)
    return policy_loss(stats, batch, config)


@pytest.mark.parametrize("feature", FEATURES)
def test_equals_full_logits(feature, fused):
    inputs = FEATURES[feature](random_inputs((4, 50), 300, 24, DEVICE))
    wrt = tuple(name for name in PARAMETERS if getattr(inputs, name) is not None)
    batch = batch_of(inputs, zeros=0.4)
    for dtype in dtypes_of(fused):
        assert_right(inputs, fused, dtype, gradients, batch=batch, wrt=wrt)
        # Without an entropy bonus and a penalty, tokens with advantage 0 and clipped ones drop out.
        assert_right(inputs, fused, dtype, gradients, batch=batch, wrt=wrt, config=PolicyLossConfig())


@pytest.mark.parametrize("rows", [1, 5, 127, 128, 129, 300])
@pytest.mark.parametrize(("vocab", "depth"), [(129, 17), (257, 72)])
def test_odd_sizes(rows, vocab, depth, fused):
    inputs = random_inputs((rows,), vocab, depth, DEVICE)
    assert_right(
        inputs,
        fused,
        HALF,
        loss_and_gradients,
        batch=batch_of(inputs, zeros=0.3),
        config=PolicyLossConfig(),
        wrt=("hidden", "weight"),
    )


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks(zeros, masked, fused):
    # A chunk has 128 rows at the least: three of them.
    inputs = FEATURES["bias"](random_inputs((3, 100), 260, 16, DEVICE))
    mask = (torch.rand(3, 100, generator=torch.Generator().manual_seed(3)) < 0.95).to(DEVICE) if masked else None
    batch = batch_of(inputs, mask, zeros)
    for config in (CONFIG, PolicyLossConfig()):
        assert_right(inputs, fused, DTYPE, gradients, batch=batch, wrt=PARAMETERS, config=config, workspace_bytes=2**10)


@pytest.mark.parametrize("loss", LOCAL)
def test_every_local_loss_takes_one_pass(loss, fused):
    inputs = random_inputs((4, 40), 129, 16, DEVICE)
    config = PolicyLossConfig(
        loss=loss,
        dro_beta=0.5,
        rollout_correction="sequence-truncate",
        aggregation="seq-mean-token-mean",
        entropy_coefficient=0.1,
    )
    mask = torch.arange(40, device=DEVICE) < torch.tensor([[40], [7], [23], [1]], device=DEVICE)
    options = {"batch": batch_of(inputs, mask), "config": config, "wrt": ("hidden", "weight")}
    assert_right(inputs, fused, DTYPE, gradients, workspace_bytes=2**10, **options)


@pytest.mark.parametrize("loss", MIXING)
def test_losses_that_mix_tokens_take_two(loss, fused):
    inputs = random_inputs((4, 10), 129, 16, DEVICE).to(DTYPE)
    config = PolicyLossConfig(loss=loss, aggregation="seq-mean-token-mean", cov_fraction=0.3, cov_bounds=(-9.0, 9.0))
    batch = batch_of(inputs)
    torch.manual_seed(0)
    got = loss_and_gradients(inputs, fused, batch, config)
    torch.manual_seed(0)
    want = loss_and_gradients(inputs, fused, batch, config, call=two_passes)
    for name in want:
        assert torch.equal(got[name], want[name])
    assert want["d_weight"].count_nonzero() > 0


def test_a_correction_of_sequences_needs_two_passes_on_the_policy_itself(fused):
    inputs = random_inputs((2, 10), 129, 16, DEVICE)
    hidden = inputs.hidden.requires_grad_()
    batch = replace(batch_of(inputs), old_log_probs=None)
    for correction, passes in ((None, 1), ("token-mask", 1), ("sequence-mask", 2), ("geometric-truncate", 2)):
        config = PolicyLossConfig(rollout_correction=correction)
        out = linear_policy_loss(hidden, inputs.weight, inputs.labels, batch, config, backend=fused)
        assert out.metrics["passes"] == passes
        want = two_passes(hidden, inputs.weight, inputs.labels, batch, config, backend=fused)
        torch.testing.assert_close(out.loss, want.loss)
        torch.testing.assert_close(
            torch.autograd.grad(out.loss, hidden)[0], torch.autograd.grad(want.loss, hidden)[0], rtol=1e-4, atol=1e-6
        )


def test_metrics_are_those_of_two_passes(fused):
    inputs = random_inputs((300,), 129, 16, DEVICE)
    hidden = inputs.hidden.requires_grad_()
    offsets = torch.tensor([0, 100, 101, 300], device=DEVICE)
    batch = batch_of(inputs, cu_seqlens=offsets)
    config = replace(CONFIG, aggregation="seq-mean-token-mean", rollout_correction="token-truncate")
    out = linear_policy_loss(hidden, inputs.weight, inputs.labels, batch, config, backend=fused, workspace_bytes=1)
    want = two_passes(hidden, inputs.weight, inputs.labels, batch, config, backend=fused)
    assert out.metrics.keys() == {*want.metrics, "passes"}
    for name, value in want.metrics.items():
        torch.testing.assert_close(out.metrics[name], value, msg=lambda m, name=name: f"{name}: {m}")
        assert not out.metrics[name].requires_grad
    torch.testing.assert_close(out.loss, want.loss)


@pytest.mark.parametrize("scale", [0.25, 3.0, 65536.0])
def test_upstream_gradient_scales(scale, fused):
    inputs = random_inputs((130,), 129, 16, DEVICE)
    for dtype in dtypes_of(fused):
        assert_right(inputs, fused, dtype, gradients, batch=batch_of(inputs), scale=scale / 64)


def test_small_gradients_live_through_fp16(fused):
    # A token's weight is 1e-6, and fp16 has nothing below 6e-8: unscaled, most of the gradient would be 0.
    inputs = random_inputs((130,), 129, 16, DEVICE)
    batch = batch_of(inputs, num_tokens=1e6)
    assert_right(inputs, fused, torch.float16, gradients, batch=batch, scale=1e5)


def test_accumulates_over_micro_batches(fused):
    inputs = random_inputs((8, 20), 129, 16, DEVICE)
    batch = batch_of(inputs, num_tokens=160)
    weight = inputs.weight.requires_grad_()

    def part(rows):
        pick = {name: x[rows] for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
        return linear_policy_loss(
            inputs.hidden[rows], weight, inputs.labels[rows], replace(batch, **pick), CONFIG, backend=fused
        ).loss

    whole = part(slice(None))
    parts = [part(rows) for rows in (slice(0, 3), slice(3, 4), slice(4, 8))]
    torch.testing.assert_close(sum(parts), whole)
    got, want = torch.autograd.grad(sum(parts), weight)[0], torch.autograd.grad(whole, weight)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_second_backward_says_why_not(fused):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    hidden = inputs.hidden.requires_grad_()
    loss = linear_policy_loss(hidden, inputs.weight, inputs.labels, batch_of(inputs), CONFIG, backend=fused).loss
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"got a second.*backend='reference'"):
        loss.backward()


def _cross_entropy(hidden, inputs, fused):
    return linear_cross_entropy(hidden, inputs.weight, inputs.labels, z_loss=0.1, outputs=(), backend=fused).loss


def _policy(hidden, inputs, fused):
    return linear_policy_loss(hidden, inputs.weight, inputs.labels, batch_of(inputs), CONFIG, backend=fused).loss


@pytest.mark.parametrize("call", [_cross_entropy, _policy])
def test_checkpoint_runs_the_function_twice(call, fused):
    inputs = random_inputs((20,), 129, 16, DEVICE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    layer, runs = torch.nn.Linear(16, 16, device=DEVICE), []

    def function(hidden):
        runs.append(1)
        return call(torch.nn.functional.dropout(layer(hidden), 0.5), inputs, fused)

    torch.manual_seed(0)
    want = torch.autograd.grad(function(hidden), (hidden, weight, layer.weight))
    runs.clear()
    torch.manual_seed(0)
    loss = checkpoint(function, hidden, use_reentrant=False)
    got = torch.autograd.grad(loss, (hidden, weight, layer.weight))
    assert len(runs) == 2
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("call", [_cross_entropy, _policy])
def test_hooks_of_saved_tensors_see_nothing_of_the_loss(call, fused):
    inputs = random_inputs((20,), 129, 16, DEVICE)
    hidden = inputs.hidden.requires_grad_()
    want = torch.autograd.grad(call(hidden, inputs, fused), hidden)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: 0 * x, lambda x: x):
        loss = call(hidden, inputs, fused)
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], want)


@pytest.fixture
def multiplied(monkeypatch):
    """Rows of each chunk that the two gradient products are given."""
    rows = []
    real = one_pass._Gradients.add

    def add(self, da, hidden, places):
        assert len(da) == len(hidden)
        rows.append(len(da))
        return real(self, da, hidden, places)

    monkeypatch.setattr(one_pass._Gradients, "add", add)
    return rows


def test_rows_without_a_gradient_are_not_multiplied(fused, multiplied):
    inputs = random_inputs((300,), 129, 16, DEVICE)
    batch = batch_of(inputs, zeros=0.5)
    loss_and_gradients(inputs, fused, batch, PolicyLossConfig())
    stats = linear_log_probs(inputs.hidden, inputs.weight, inputs.labels)
    log_probs = stats.log_probs.requires_grad_()
    policy_loss(stats, batch, PolicyLossConfig()).loss.backward()
    assert multiplied == [int(log_probs.grad.count_nonzero())]
    assert 30 < multiplied[0] < 150
    multiplied.clear()
    loss_and_gradients(inputs, fused, replace(batch, advantages=torch.zeros(300, device=DEVICE)), PolicyLossConfig())
    assert multiplied == []


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_nothing_to_learn_gives_zeros(advantage, fused):
    inputs = random_inputs((2, 5), 129, 16, DEVICE)
    # All masked, or all of advantage 0; what masked tokens hold does not matter.
    batch = PolicyBatch(torch.full((2, 5), advantage, device=DEVICE))
    if advantage:
        batch = replace(batch, mask=torch.zeros(2, 5, device=DEVICE))
        inputs = replace(inputs, hidden=torch.full_like(inputs.hidden, float("nan")))
    got = loss_and_gradients(inputs, fused, batch, PolicyLossConfig())
    assert all((x == 0).all() for x in got.values())


def test_masked_and_ignored_tokens(fused):
    inputs = random_inputs((2, 70), 129, 16, DEVICE)
    mask = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    mask[0, 60:], mask[1, 3] = False, False
    hidden, labels = inputs.hidden.clone(), inputs.labels.clone()
    hidden[~mask] = float("inf")
    labels[1, 5], labels[0, 61] = -100, -100
    batch = batch_of(inputs, mask)
    spoiled = replace(
        batch, **{n: torch.where(mask, getattr(batch, n), torch.nan) for n in ("advantages", "old_log_probs")}
    )
    got = loss_and_gradients(replace(inputs, hidden=hidden, labels=labels), fused, spoiled)
    mask[1, 5] = False
    want = loss_and_gradients(inputs, "reference", replace(batch, mask=mask))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)
    assert (got["d_hidden"][~mask] == 0).all()


def test_a_bad_label_is_no_plausible_number(fused):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    batch = batch_of(inputs)
    inputs.labels[2] = 129
    got = loss_and_gradients(inputs, fused, batch)
    assert got["loss"].isnan()
    assert got["d_hidden"][2].isnan().all()
    with pytest.raises(ValueError, match="label"):
        rlhf_losses.check()


def test_heads_with_a_token_switched_off(fused):
    inputs = random_inputs((40,), 129, 16, DEVICE)
    inputs.weight[7] = 0.0
    inputs.hidden[:, 0] = inputs.hidden[:, 0].abs() + 0.5
    inputs.weight[7, 0] = float("-inf")
    inputs.labels[inputs.labels == 7] = 8
    batch = batch_of(inputs)
    got, want = loss_and_gradients(inputs, fused, batch), loss_and_gradients(inputs, fused, batch, call=two_passes)
    for name in want:
        assert got[name].isfinite().all()
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrt", [("hidden",), ("weight",), ("bias",)])
def test_frozen_parts_get_no_buffer(wrt, fused):
    inputs = FEATURES["bias"](random_inputs((6,), 300, 40, DEVICE)).to(DTYPE)
    batch = batch_of(inputs)
    hidden = inputs.hidden.requires_grad_("hidden" in wrt)
    weight = inputs.weight.requires_grad_("weight" in wrt)
    bias = inputs.bias.requires_grad_("bias" in wrt)
    with Allocations(hidden, weight, bias) as allocated:
        linear_policy_loss(hidden, weight, inputs.labels, batch, CONFIG, bias=bias, backend=fused).loss.backward()
    assert (300 * 40 in allocated.sizes) == ("weight" in wrt)
    assert (6 * 40 in allocated.sizes) == ("hidden" in wrt)
    for x, name in ((hidden, "hidden"), (weight, "weight"), (bias, "bias")):
        assert (x.grad is not None) == (name in wrt)


def test_without_gradients_nothing_is_kept(fused):
    inputs = random_inputs((200,), 300, 16, DEVICE)
    batch = batch_of(inputs)
    with torch.no_grad(), Allocations() as allocated:
        out = linear_policy_loss(
            inputs.hidden.requires_grad_(),
            inputs.weight,
            inputs.labels,
            batch,
            CONFIG,
            backend=fused,
            workspace_bytes=300 * 4 * 10,
        )
    assert max(allocated.sizes) < 200 * 300
    assert out.metrics["passes"] == 1
    assert not out.loss.requires_grad


def test_workspace_holds_whatever_the_number_of_tokens(fused):
    inputs = random_inputs((1000,), 300, 16, DEVICE).to(DTYPE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    batch = batch_of(inputs)
    with Allocations(hidden, weight) as allocated:
        linear_policy_loss(
            hidden, weight, inputs.labels, batch, CONFIG, backend=fused, workspace_bytes=1
        ).loss.backward()
    # A block of 128 rows, its columns padded to whole tiles.
    assert max(allocated.sizes) <= 128 * 512


def test_autocast(fused):
    inputs = random_inputs((40,), 129, 16, DEVICE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    batch = batch_of(inputs)
    with torch.autocast(DEVICE.type, dtype=HALF):
        loss = linear_policy_loss(hidden, weight, inputs.labels, batch, CONFIG, backend=fused).loss
    got = torch.autograd.grad(loss, (hidden, weight))
    cast = replace(inputs.to(HALF), hidden=inputs.hidden.to(HALF).detach(), weight=inputs.weight.to(HALF).detach())
    want = loss_and_gradients(cast, fused, batch)
    for x, name in zip(got, ("d_hidden", "d_weight"), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, want[name].float())


def test_bits_repeat(fused):
    inputs = random_inputs((300,), 260, 16, DEVICE).to(DTYPE)
    batch = batch_of(inputs, zeros=0.5)
    first, again = (loss_and_gradients(inputs, fused, batch, workspace_bytes=1) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99, 1.0])
def test_rows_in_front_are_an_order_in_place(share):
    generator = torch.Generator().manual_seed(int(100 * share))
    for rows in (1, 2, 7, 130):
        some = torch.rand(rows, generator=generator) < share
        count = int(some.sum())
        if count == 0:
            continue
        source = one_pass._in_front(some, count)
        assert source.sort().values.tolist() == some.nonzero().squeeze(1).tolist()
        places = torch.arange(count)
        assert ((source == places) | (source >= count)).all()


@pytest.mark.parametrize("workspace_bytes", [None, 1])
def test_loss_and_metrics_share_no_memory_and_no_graph(workspace_bytes, fused, monkeypatch):
    inputs = random_inputs((300,), 40, 16, DEVICE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()

    def largest(tokens, config):
        return -tokens.advantages * tokens.ratio, {"largest": tokens.ratio.max()}

    monkeypatch.setitem(POLICY_LOSSES, "largest", PolicyLoss(largest, mixes_tokens=False))
    loss, metrics = linear_policy_loss(
        hidden,
        weight,
        inputs.labels,
        batch_of(inputs),
        replace(CONFIG, loss="largest", entropy_coefficient=0.0, kl_coefficient=0.0),
        backend=fused,
        workspace_bytes=workspace_bytes,
    )
    assert int(metrics["passes"]) == 1
    assert not any(value.requires_grad for value in metrics.values())
    before = metrics["policy_loss"].item()
    loss /= 4
    assert metrics["policy_loss"].item() == before
    assert loss.item() == pytest.approx(before / 4)


@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gradients_are_scaled_to_the_last_block(dtype, factor, monkeypatch):
    monkeypatch.setattr(triton_scale, "_PROGRAMS", 2)
    x, scale = torch.randn(3, 6001, device=DEVICE), torch.tensor(factor, device=DEVICE)
    in_place, other = x.to(dtype, copy=True), torch.zeros_like(x, dtype=dtype)
    expected = [(values.float() * factor).to(dtype) for values in (in_place, x)]
    triton_scale.scale_to(in_place, in_place, scale)
    triton_scale.scale_to(other, x, scale)
    assert torch.equal(in_place, expected[0])
    assert torch.equal(other, expected[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"batch": {"mask": torch.ones(5, dtype=torch.complex64)}},
            "mask: expected a bool tensor.*got torch.complex64",
        ),
        ({"batch": {"advantages": torch.ones(3)}}, r"advantages: expected \[5\], the shape of labels, got \[3\]"),
        (
            {"config": {"rollout_correction": "token-mask"}, "batch": {"rollout_log_probs": None}},
            "rollout_log_probs: expected a tensor",
        ),
        (
            {"batch": {"rollout_weights": torch.ones(5)}, "config": {"rollout_correction": "token-mask"}},
            "leave one of the two out",
        ),
        ({"batch": {"cu_seqlens": torch.tensor([0, 3])}}, r"cu_seqlens: expected offsets from 0 to 5"),
        ({"workspace_bytes": 0}, "workspace_bytes"),
        ({"cache_bytes": -1}, "cache_bytes"),
    ],
)
def test_errors(change, words):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    parts = {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) and name != "cu_seqlens" else x
        for name, x in change.pop("batch", {}).items()
    }
    batch = replace(batch_of(inputs), **parts)
    config = replace(CONFIG, **change.pop("config", {}))
    with pytest.raises((ValueError, TypeError), match=words):
        linear_policy_loss(inputs.hidden, inputs.weight, inputs.labels, batch, config, **change)


def test_other_kinds_are_refused():
    inputs = random_inputs((2, 5), 129, 16, DEVICE)
    given, batch = (inputs.hidden, inputs.weight, inputs.labels), batch_of(inputs)
    with pytest.raises(TypeError, match=r"config: expected a PolicyLossConfig, got str; .*preset\('ppo'\)"):
        linear_policy_loss(*given, batch, "ppo")
    with pytest.raises(TypeError, match="batch: expected a PolicyBatch, got dict"):
        policy_loss(linear_log_probs(*given), {}, CONFIG)
    nested = torch.nested.nested_tensor([inputs.labels[0], inputs.labels[1, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"got a nested tensor; pass the \.values\(\)"):
        linear_policy_loss(inputs.hidden, inputs.weight, nested, batch, CONFIG)
