"""The same numbers from logits that somebody already holds."""

from dataclasses import replace

import pytest
import torch
from cases import FEATURES, Inputs, random_inputs
from helpers import DEVICE, FLOAT_OUTPUTS, HALF, assert_right, dtypes_of, errors, evaluate, evaluate_logits

from rlhf_losses import log_probs_from_logits

# A bias belongs to the product.
LOGIT_FEATURES = {name: make for name, make in FEATURES.items() if name not in ("bias", "all")} | {
    "all": lambda x: replace(FEATURES["all"](x), bias=None)
}


def logits(leading, vocab, spread=3.0):
    """Inputs whose hidden states are the logits; there is no head."""
    inputs = random_inputs(leading, vocab, 8, DEVICE)
    generator = torch.Generator().manual_seed(4)
    values = spread * torch.randn(*leading, vocab, generator=generator)
    return Inputs(values.to(DEVICE), inputs.weight, inputs.labels)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 129, 1025, 5000])
def test_logits_match_the_reference(vocab, dtype, inplace, backend):
    if dtype not in dtypes_of(backend):
        dtype = HALF
    inputs = logits((2, 3), vocab)
    if vocab == 1:
        # p = 1: the gradient of everything but the log-sum-exp is 0.
        options = {"outputs": ("logsumexp",), "upstream": inputs.upstream(("logsumexp",))}
    else:
        options = {"outputs": (*FLOAT_OUTPUTS, "argmax"), "upstream": inputs.upstream(FLOAT_OUTPUTS)}
    assert_right(inputs, backend, dtype, evaluate_logits, inplace_backward=inplace, **options)


@pytest.mark.parametrize("feature", LOGIT_FEATURES)
def test_every_logit_feature_of_logits(feature, backend):
    inputs = LOGIT_FEATURES[feature](logits((3, 4), 300))
    options = {"outputs": FLOAT_OUTPUTS, "upstream": inputs.upstream(FLOAT_OUTPUTS)}
    assert_right(inputs, backend, torch.float32, evaluate_logits, **options)


def test_logits_of_a_head_give_the_head_s_numbers(backend):
    inputs = random_inputs((5,), 300, 16, DEVICE).to(torch.float32)
    held = replace(inputs, hidden=inputs.hidden @ inputs.weight.T)
    head, ours = evaluate(inputs, backend, FLOAT_OUTPUTS), evaluate_logits(held, backend, FLOAT_OUTPUTS)
    for name in FLOAT_OUTPUTS:
        assert errors(ours[name], head[name].double())["max"] < 1e-6


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
@pytest.mark.parametrize("how", ["masked", "ignored"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3.0])
def test_masked_rows_get_exactly_zero(garbage, how, inplace, backend):
    inputs = logits((4, 5), 129)
    keep = torch.arange(20, device=DEVICE).reshape(4, 5) % 2 == 0
    values = torch.where(keep[..., None], inputs.hidden, garbage)
    upstream = inputs.upstream(FLOAT_OUTPUTS)
    options = {"labels": torch.where(keep, inputs.labels, -100)} if how == "ignored" else {"options": {"mask": keep}}
    got = evaluate_logits(
        replace(inputs, hidden=values, **options), backend, FLOAT_OUTPUTS, upstream, inplace_backward=inplace
    )
    assert got["d_logits"][~keep].count_nonzero() == 0
    for name in FLOAT_OUTPUTS:
        assert got[name][~keep].count_nonzero() == 0
    kept = replace(inputs, hidden=inputs.hidden[keep], labels=inputs.labels[keep])
    want = evaluate_logits(kept, backend, FLOAT_OUTPUTS, {name: g[keep] for name, g in upstream.items()})
    for name, values in want.items():
        if backend == "triton" or how == "masked":
            assert torch.equal(got[name][keep], values), name
        else:
            # A GPU keeps ignored rows in the call, and torch's sums depend on the number of rows.
            torch.testing.assert_close(got[name][keep], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
def test_rows_without_upstream_gradient_get_exactly_zero(inplace, fused):
    inputs = logits((6,), 129)
    upstream = inputs.upstream(("log_probs",))
    upstream["log_probs"][::2] = 0
    got = evaluate_logits(inputs, fused, upstream=upstream, inplace_backward=inplace)["d_logits"]
    assert got[::2].count_nonzero() == 0
    assert (got[1::2].count_nonzero(-1) > 100).all()
    assert_right(inputs, fused, torch.float32, evaluate_logits, upstream=upstream, inplace_backward=inplace)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
def test_no_row_counts(inplace, backend):
    inputs = replace(logits((2, 3), 129), hidden=torch.full((2, 3, 129), float("nan"), device=DEVICE))
    inputs = inputs.with_options(mask=torch.zeros(2, 3, device=DEVICE))
    got = evaluate_logits(inputs, backend, FLOAT_OUTPUTS, inputs.upstream(FLOAT_OUTPUTS), inplace_backward=inplace)
    for name, values in got.items():
        assert values.count_nonzero() == 0, name


LAYOUTS = {
    "rows of a wider matrix": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.T.contiguous().T,
    "every second column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(6, -1),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logits_of_any_strides(layout, inplace, backend):
    inputs = logits((6,), 129)
    inputs = replace(inputs, hidden=layout(inputs.hidden))
    if inplace:
        # The gradient of an expanded tensor has no place in it; nor could a clone keep the layout.
        values, upstream = inputs.hidden, inputs.upstream(("log_probs", "entropy"))
        if values.stride(0) == 0:
            pytest.skip("logits that share memory can't hold their gradient")
        want = evaluate_logits(inputs, backend, upstream=upstream)["d_logits"]
        leaf = values.detach().requires_grad_()
        held = layout(leaf.contiguous())
        stats = log_probs_from_logits(held, inputs.labels, backend=backend, inplace_backward=True)
        got = torch.autograd.grad([stats.log_probs, stats.entropy], leaf, list(upstream.values()))[0]
        assert torch.equal(got, want)
    else:
        upstream = inputs.upstream(("log_probs", "entropy"))
        assert_right(inputs, backend, torch.float32, evaluate_logits, upstream=upstream)


def test_in_place_gradient_takes_the_logits_memory(fused):
    inputs = logits((4,), 129)
    leaf = inputs.hidden.requires_grad_()
    held = leaf * 1
    stats = log_probs_from_logits(held, inputs.labels, backend=fused, inplace_backward=True)
    (gradient,) = torch.autograd.grad(stats.log_probs.sum(), held)
    assert gradient.data_ptr() == held.data_ptr()
    want = evaluate_logits(inputs, fused, ("log_probs",), {"log_probs": torch.ones(4, device=DEVICE)})["d_logits"]
    assert torch.equal(gradient, want)


def test_gradient_leaves_the_logits_alone_by_default(backend):
    inputs = logits((4,), 129)
    before = inputs.hidden.clone()
    evaluate_logits(inputs, backend, upstream=inputs.upstream(("log_probs",)))
    assert torch.equal(inputs.hidden, before)


def test_second_backward_of_an_in_place_gradient_raises(fused):
    inputs = logits((4,), 129)
    held = inputs.hidden.requires_grad_() * 1
    stats = log_probs_from_logits(held, inputs.labels, backend=fused, inplace_backward=True)
    stats.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"expected one backward with inplace_backward=True, got a second.*Pass"):
        stats.entropy.sum().backward()


def test_second_backward_works_otherwise(fused):
    inputs = logits((4,), 129)
    leaf = inputs.hidden.requires_grad_()
    stats = log_probs_from_logits(leaf, inputs.labels, backend=fused)
    first = torch.autograd.grad(stats.entropy.sum(), leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(stats.entropy.sum(), leaf)[0], first)


def test_who_else_saved_overwritten_logits_hears_of_it(fused):
    inputs = logits((4,), 129)
    held = inputs.hidden.requires_grad_() * 1
    square = held.square()
    stats = log_probs_from_logits(held, inputs.labels, backend=fused, inplace_backward=True)
    stats.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_no_tokens(backend):
    inputs = logits((0,), 129)
    got = evaluate_logits(inputs, backend, (*FLOAT_OUTPUTS, "argmax"), inputs.upstream(FLOAT_OUTPUTS))
    assert all(values.numel() == 0 for values in got.values())
    assert got["d_logits"].shape == (0, 129)


@pytest.mark.parametrize("workspace_bytes", [1, 10_000])
def test_chunks_of_logits_change_nothing(workspace_bytes):
    inputs = LOGIT_FEATURES["temperature-per-token"](logits((3, 4), 300))
    upstream = inputs.upstream(("log_probs", "entropy"))
    want = evaluate_logits(inputs, "chunked", upstream=upstream)
    got = evaluate_logits(inputs, "chunked", upstream=upstream, workspace_bytes=workspace_bytes)
    for name in want:
        assert torch.equal(got[name], want[name])


def test_logits_that_are_no_logits_raise():
    labels = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"logits: expected \[..., V\] with at least one entry, got \[3, 0\]"):
        log_probs_from_logits(torch.zeros(3, 0, device=DEVICE), labels)
    with pytest.raises(TypeError, match=r"logits: expected a floating dtype, got torch\.int64"):
        log_probs_from_logits(torch.zeros(3, 5, dtype=torch.int64, device=DEVICE), labels)
    with pytest.raises(ValueError, match=r"labels: expected shape \[2, 2\].*logits \[2, 2, 5\].*got \[3\]"):
        log_probs_from_logits(torch.zeros(2, 2, 5, device=DEVICE), labels)
