"""Inputs that broke programs of this kind, with the right values: cases n1 to n14."""

import math
from dataclasses import replace

import pytest
import torch
from cases import Inputs, random_inputs
from helpers import (
    DEVICE,
    FLOAT_OUTPUTS,
    HALF,
    assert_close_to_truth,
    assert_right,
    errors,
    evaluate,
    even_head,
    literal,
    logits_as_head,
)

from rlhf_losses import linear_log_probs


def exact(backend: str, dtype: torch.dtype) -> torch.dtype:
    """In fp32 the reference, plain torch, loses digits that a back end must keep: its word on them is that in fp64."""
    return torch.float64 if backend == "reference" and dtype == torch.float32 else dtype


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
BIG = 129920


def outlier_statistics(vocab: int) -> dict[str, float]:
    """Case n1 in closed form: every logit -30, the label's -20."""
    rest = (vocab - 1) * math.exp(-10)
    log_sum = math.log1p(rest)
    return {
        "log_probs": -log_sum,
        "entropy": log_sum + 10 * rest / (1 + rest),
        "logsumexp": log_sum - 20,
        "sum_p_squared": (1 + rest * math.exp(-10)) / (1 + rest) ** 2,
    }


def check_n1(vocab, backend, dtype):
    inputs = even_head(vocab, -30, dtype, [vocab - 1])
    inputs.weight[-1] = -20 / 8
    got = evaluate(inputs, backend, FLOAT_OUTPUTS)
    for name, value in outlier_statistics(vocab).items():
        assert got[name].item() == literal(value), name


def test_n1_literals():
    assert outlier_statistics(129) == {
        "log_probs": literal(-0.005794),
        "entropy": literal(0.063571),
        "logsumexp": literal(-19.994206),
        "sum_p_squared": literal(0.988478),
    }


@DTYPES
@pytest.mark.parametrize("vocab", [127, 129, 255, 257, 1023, 1025])
def test_n1_padded_columns_have_no_probability(vocab, backend, dtype):
    check_n1(vocab, backend, dtype)


def test_n1_large_vocabulary(backend, quick_tiles):
    check_n1(BIG, backend, exact(backend, torch.float32))


@DTYPES
@pytest.mark.parametrize("value", [-200, -1e4])
def test_n2_all_logits_far_below_zero(value, backend, dtype):
    got = evaluate(even_head(512, value, dtype, [0, 511]), backend)
    assert got["log_probs"].tolist() == literal([-6.238325] * 2)
    assert got["entropy"].tolist() == literal([6.238325] * 2)


def test_n3_certain_token_has_log_prob_0_and_never_above(backend, quick_tiles):
    label, other = BIG - 1, 7
    inputs = even_head(BIG, 0, torch.float32, [label, other])
    inputs.weight[label] = 120 / 8
    got = evaluate(inputs, backend)
    assert got["log_probs"].tolist() == literal([0.0, -120.0])
    assert got["entropy"].tolist() == literal([0.0, 0.0])
    assert (got["log_probs"] <= 0).all()
    assert (got["entropy"] >= 0).all()


@DTYPES
def test_n4_padding_is_masked_after_the_cap(backend, dtype):
    got = evaluate(even_head(513, -1000, dtype, [512]), backend, softcap=1.0)
    assert got["log_probs"].item() == literal(-6.240276)
    assert got["entropy"].item() == literal(6.240276)


@DTYPES
@pytest.mark.parametrize("logit", [60, 100, 124, 152])
def test_n5_slope_of_a_capped_logit_keeps_its_digits(logit, backend, dtype):
    # With one entry in the vocabulary p = 1: the log-sum-exp is z, and its gradient dz/da. The nearer the cap, the
    # less of 1 - tanh^2 is left in fp32.
    dtype = exact(backend, dtype)
    inputs = logits_as_head([[float(logit)]], dtype)
    one = torch.ones(1, device=DEVICE)
    wrt = ("hidden", "weight")
    got = evaluate(inputs, backend, ("logsumexp",), upstream={"logsumexp": one}, wrt=wrt, softcap=30.0)
    slope = math.cosh(logit / 30) ** -2
    if logit == 124:
        assert slope == pytest.approx(0.00102723, rel=5e-6)
        assert got["logsumexp"].item() == literal(29.984588)
    # Six digits are asked for; 16-bit types hold fewer.
    digits = max(5e-6, torch.finfo(dtype).eps)
    assert got["d_weight"][0, 0].item() == pytest.approx(slope, rel=digits)
    assert got["d_hidden"][0, 0].item() == pytest.approx(slope * logit, rel=digits)


@DTYPES
@pytest.mark.parametrize("cap", [1.0, 30.0, 64.0, 100.0])
def test_a_capped_logit_is_off_by_ulps_of_the_cap(cap, backend, dtype):
    logits = torch.tensor([-1e4, -152, -40, -8, -1, -0.125, 0, 0.125, 1, 5, 40, 152, 1e4], device=DEVICE)[:, None]
    # With one entry in the vocabulary the log-sum-exp is z.
    inputs = logits_as_head(logits.tolist(), exact(backend, dtype))
    got = evaluate(inputs, backend, ("logsumexp",), softcap=cap)["logsumexp"]
    products = inputs.hidden.double() @ inputs.weight[0].double()
    assert ((got - cap * torch.tanh(products / cap)).abs() <= 2**-21 * cap).all()


@DTYPES
@pytest.mark.parametrize(
    ("scale", "log_prob", "entropy"), [(0.125, -1.682615, 2.039440), (1 / 16, -1.870924, 2.069252)]
)
def test_n6_logit_scale_multiplies(scale, log_prob, entropy, backend, dtype):
    inputs = logits_as_head([list(range(8))], dtype)
    inputs = replace(inputs, labels=torch.tensor([7], device=DEVICE))
    got = evaluate(inputs, backend, logit_scale=scale)
    assert got["log_probs"].item() == literal(log_prob)
    assert got["entropy"].item() == literal(entropy)


@DTYPES
def test_n7_one_temperature_per_row(backend, dtype):
    temperature = torch.tensor([0.6, 1.0, 1.3], device=DEVICE)
    weight = torch.zeros(8, 16, dtype=dtype, device=DEVICE)
    weight[:, 0] = torch.arange(8)
    hidden = torch.zeros(3, 16, dtype=dtype, device=DEVICE)
    hidden[:, 0] = 1
    inputs = Inputs(hidden, weight, torch.full((3,), 7, device=DEVICE), options={"temperature": temperature})
    got = evaluate(inputs, backend)
    assert got["log_probs"].tolist() == literal([-0.209332, -0.458340, -0.620318])
    assert got["entropy"].tolist() == literal([0.597405, 1.037632, 1.271426])
    # d log p_7 / d hidden = (7 - E[v]) / T, in the one direction that the weight has.
    only = {"log_probs": torch.ones(3, device=DEVICE)}
    d_hidden = evaluate(inputs, backend, upstream=only, wrt=("hidden",))["d_hidden"]
    p = torch.softmax(torch.arange(8.0).double() / temperature.cpu().double()[:, None], -1)
    expected = (7 - (p * torch.arange(8)).sum(-1)) / temperature.cpu().double()
    # A sum of eight terms of up to 7.
    assert d_hidden[:, 0].tolist() == pytest.approx(expected.tolist(), abs=16 * torch.finfo(dtype).eps)


@DTYPES
def test_n8_token_switched_off_by_minus_infinity(backend, dtype):
    inputs = even_head(3, 0, dtype, [2])
    inputs.weight[1], inputs.weight[2] = -math.inf, 1 / 8
    upstream = {name: torch.ones(1, device=DEVICE) for name in FLOAT_OUTPUTS}
    got = evaluate(inputs, backend, FLOAT_OUTPUTS, upstream=upstream, wrt=("hidden", "weight"))
    assert got["log_probs"].item() == literal(-0.313262)
    assert got["entropy"].item() == literal(0.582203)
    assert got["logsumexp"].item() == literal(math.log(1 + math.e))
    assert got["d_hidden"].isfinite().all()
    assert got["d_weight"].isfinite().all()
    assert got["d_weight"][1].count_nonzero() == 0
    # Without the row, the same numbers and gradients.
    short = Inputs(inputs.hidden, inputs.weight[[0, 2]], torch.ones_like(inputs.labels))
    want = evaluate(short, backend, FLOAT_OUTPUTS, upstream=upstream, wrt=("hidden", "weight"))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got["d_hidden"], want["d_hidden"], rtol=4 * eps, atol=0)
    torch.testing.assert_close(got["d_weight"][[0, 2]], want["d_weight"], rtol=4 * eps, atol=0)


@DTYPES
def test_n9_two_of_a_hundred_share_the_probability(backend, dtype):
    logits = torch.full((1, 100), -50.0)
    logits[0, [0, 99]] = 50
    got = evaluate(logits_as_head(logits, dtype), backend)
    assert got["log_probs"].item() == literal(-0.693147)
    assert got["entropy"].item() == literal(0.693147)


def large_vocabulary_errors(vocab, leading, depth, dtype, backend):
    inputs = random_inputs(leading, vocab, depth, DEVICE).to(dtype)
    # Gradients of the size that a mean over tokens gives.
    upstream = {name: x / x.numel() for name, x in inputs.upstream(("logsumexp", "entropy")).items()}
    options = {"outputs": ("logsumexp", "entropy"), "upstream": upstream, "wrt": ("weight",)}
    truth = evaluate(inputs.to(torch.float64), "reference", **options)
    low = evaluate(inputs, "reference", **options)
    got = evaluate(inputs, backend, **options)
    for name in got:
        assert_close_to_truth(got[name], truth[name], low[name], dtype, name)
    return {name: errors(got[name], truth[name])["rms"] for name in got}


def check_n10(vocab, leading, depth, dtype, backend):
    base = large_vocabulary_errors(32000, leading, depth, dtype, backend)
    for name, error in large_vocabulary_errors(vocab, leading, depth, dtype, backend).items():
        assert error <= 2 * base[name] + torch.finfo(torch.float32).eps, name


@pytest.mark.parametrize("fused", ["chunked", "triton"])
def test_n10_vocabulary_of_256000_is_as_exact_as_one_of_32000(fused, quick_tiles):
    check_n10(256000, (2,), 16, torch.float32, fused)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", ["chunked", "triton"])
@pytest.mark.parametrize("vocab", [256000, 262144])
def test_n10_full_size(vocab, fused):
    check_n10(vocab, (64,), 512, torch.bfloat16, fused)


def check_n11(vocab, leading, depth, dtype, slices_bytes):
    """d_hidden from one stretch of the vocabulary, and from as many as there are tiles: the same error."""
    inputs = random_inputs(leading, vocab, depth, DEVICE).to(dtype)
    upstream = inputs.upstream(("log_probs", "entropy"))
    options = {"upstream": upstream, "wrt": ("hidden",)}
    truth = evaluate(inputs.to(torch.float64), "reference", **options)["d_hidden"]
    low = evaluate(inputs, "reference", **options)["d_hidden"]
    whole = evaluate(inputs, "triton", **options)["d_hidden"]
    sliced = evaluate(inputs, "triton", workspace_bytes=slices_bytes, **options)["d_hidden"]
    assert_close_to_truth(sliced, truth, low, dtype)
    # What differs is the order of sums in fp32, far below the 16-bit rounding that both end with.
    assert errors(sliced, truth)["rms"] <= 1.05 * errors(whole, truth)["rms"]


def test_n11_d_hidden_is_summed_over_slices_in_fp32():
    # 34 tiles: each of the forward's stretches of the vocabulary has two.
    check_n11(33 * 256 + 1, (4,), 16, HALF, slices_bytes=1)


@pytest.mark.gpu
def test_n11_full_size():
    check_n11(131072, (64,), 512, torch.bfloat16, slices_bytes=1)


@pytest.mark.parametrize("width", [64, pytest.param(2048, marks=pytest.mark.gpu)])
def test_n12_log_prob_has_the_error_of_the_fp32_product(width, backend):
    # Logits of 20 to 40 out of 16-bit operands; a vocabulary of 600 is three tiles.
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.rand(6, width, generator=generator) + 0.5).to(DEVICE, HALF)
    weight = ((20 + 20 * torch.rand(600, 1, generator=generator)) / width).expand(-1, width)
    weight = (weight * (1 + 0.3 * torch.randn(600, width, generator=generator))).to(DEVICE, HALF)
    labels = torch.arange(0, 600, 100, device=DEVICE)
    logits = hidden.double() @ weight.double().T
    assert 15 < logits.min() < 25
    assert 35 < logits.max() < 50
    truth = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    rounded = logits.to(HALF).double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    error = (evaluate(Inputs(hidden, weight, labels), backend)["log_probs"].double() - truth).abs().max()
    # Ten times less than 16-bit logits would give.
    assert error < 5e-4
    assert (rounded - truth).abs().max() > 10 * 5e-4


def test_n13_small_gradients_are_not_filtered(backend):
    # The label has p = 0.5, the 128 others 0.5 / 128 each.
    logits = torch.zeros(1, 129)
    logits[0, 0] = math.log(128)
    inputs = logits_as_head(logits, HALF)
    upstream = {"log_probs": torch.full((1,), 1e-3, device=DEVICE)}
    got = evaluate(inputs, backend, upstream=upstream, wrt=("hidden", "weight"))
    assert_right(inputs, backend, HALF, upstream=upstream, wrt=("hidden", "weight"))
    d_weight = got["d_weight"][:, 0].double()
    assert d_weight[0].item() == pytest.approx(1e-3 * 0.5, rel=4 * torch.finfo(HALF).eps)
    # 3.9e-6 is a subnormal number of fp16, of which 6e-8 is the smallest.
    assert d_weight[1:].tolist() == pytest.approx([-1e-3 * 0.5 / 128] * 128, rel=0.02)


def sequences(dtype):
    """Eight sequences of 20 tokens: together more than one block of rows, alone less."""
    inputs = random_inputs((8, 20), 300, 16, DEVICE).to(dtype)
    return inputs.hidden, inputs.weight, inputs.labels


def score(hidden, weight, labels, backend):
    stats = linear_log_probs(hidden, weight, labels, backend=backend, outputs=FLOAT_OUTPUTS)
    return torch.stack([getattr(stats, name) for name in FLOAT_OUTPUTS])


@DTYPES
def test_n14_numbers_of_a_token_do_not_depend_on_who_shares_the_call(triton_path, dtype):
    backend = triton_path
    hidden, weight, labels = sequences(dtype)
    together = score(hidden, weight, labels, backend)
    alone = torch.stack([score(hidden[i], weight, labels[i], backend) for i in range(8)], 1)
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4], device=DEVICE)
    permuted = score(hidden[order], weight, labels[order], backend)
    one = score(hidden[4, 7], weight, labels[4, 7], backend)
    assert torch.equal(alone, together)
    assert torch.equal(permuted, together[:, order])
    assert torch.equal(one, together[:, 4, 7])
    # With other tokens masked away, the rest is packed, and lands in other rows of the tile.
    mask = torch.rand(labels.shape, device=DEVICE) < 0.5
    stats = linear_log_probs(hidden, weight, labels, mask=mask, backend=backend)
    assert torch.equal(stats.log_probs[mask], together[0][mask])


def test_n14_chunked_agrees_to_rounding():
    # Its products are a BLAS's, whose order of sums may depend on the number of rows: no bits are promised.
    hidden, weight, labels = sequences(torch.float32)
    together = score(hidden, weight, labels, "chunked")
    alone = torch.stack([score(hidden[i], weight, labels[i], "chunked") for i in range(8)], 1)
    truth = score(hidden.double(), weight.double(), labels, "reference")
    low = score(hidden, weight, labels, "reference")
    for i, name in enumerate(FLOAT_OUTPUTS):
        assert_close_to_truth(together[i], truth[i], low[i], torch.float32, name)
        assert_close_to_truth(alone[i], truth[i], low[i], torch.float32, name)
