"""What holds for every input, with inputs made up by hypothesis; few and small ones, since some are interpreted."""

import math
from dataclasses import replace

import pytest
import torch
from cases import FEATURES, Inputs, random_inputs
from helpers import (
    DEVICE,
    FLOAT_OUTPUTS,
    HALF,
    TRITON_DTYPES,
    assert_close_to_truth,
    assert_right,
    evaluate,
    evaluate_logits,
    lows,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

BACKENDS = ["reference", "chunked", "triton"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
fused_backends = pytest.mark.parametrize("backend", BACKENDS[1:])
# For the rule of comparison: enough tokens, neither certain nor even, that no error is small or large by chance.
ordinary = st.builds(
    lambda count, vocab, spread, seed: random_inputs((count, 2), vocab, 8, DEVICE, spread=spread, seed=seed),
    st.integers(3, 8),
    st.sampled_from([129, 256, 300]),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.integers(0, 2**16),
)
# The examples are small as they come; to shrink one costs the interpreter minutes.
few = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)

# Sizes on both sides of a tile's width, and of nothing.
vocabularies = st.sampled_from([1, 2, 5, 64, 127, 129, 256, 300])
rows = st.integers(1, 6)
seeds = st.integers(0, 2**16)
# From uniform distributions to certain ones.
spreads = st.sampled_from([0.0, 1e-3, 0.1, 1.0, 5.0, 40.0, 1e3])


@st.composite
def heads(draw, spread=spreads, vocab=vocabularies):
    return random_inputs((draw(rows),), draw(vocab), 8, DEVICE, spread=draw(spread), seed=draw(seeds))


@st.composite
def featured_heads(draw):
    inputs = random_inputs((draw(rows), 2), draw(vocabularies), 8, DEVICE, spread=draw(spreads), seed=draw(seeds))
    return FEATURES[draw(st.sampled_from(sorted(FEATURES)))](inputs)


# The reference, plain torch, strays from the range by some units of its last digit.
@fused_backends
@few
@given(inputs=featured_heads())
def test_every_number_is_in_its_range(backend, inputs):
    vocab = len(inputs.weight)
    got = evaluate(inputs, backend, (*FLOAT_OUTPUTS, "argmax"))
    assert (got["log_probs"] <= 0).all()
    assert (got["entropy"] >= 0).all()
    # log V as fp32 has it, rounded up.
    assert (got["entropy"].cpu() <= torch.nextafter(torch.tensor(math.log(vocab)), torch.tensor(math.inf))).all()
    assert (got["sum_p_squared"] <= 1).all()
    assert (got["sum_p_squared"] * vocab >= 1 - 16 * torch.finfo(torch.float32).eps).all()
    assert ((got["argmax"] >= 0) & (got["argmax"] < vocab)).all()


@every_backend
@few
@given(
    inputs=heads(),
    scale=st.sampled_from([1e-30, 1.0, 1e4, 1e12, 1e18]),
    softcap=st.sampled_from([None, 1e-3, 30.0]),
    temperature=st.sampled_from([1e-2, 1.0, 1e3]),
)
def test_finite_input_gives_finite_numbers_and_gradients(backend, inputs, scale, softcap, temperature):
    # Logits of up to about 1e24 in size; their gradient is at most that of the label, times 1/T.
    inputs = replace(inputs, hidden=inputs.hidden * scale)
    options = {"softcap": softcap, "temperature": temperature}
    got = evaluate(inputs, backend, FLOAT_OUTPUTS, inputs.upstream(FLOAT_OUTPUTS[:2]), ("hidden", "weight"), **options)
    for name, values in got.items():
        assert values.isfinite().all(), name


@every_backend
@few
@given(inputs=heads(spread=st.sampled_from([0.1, 1.0, 5.0])), shift=st.sampled_from([1e4, -1e4, 4096.0]))
def test_a_shift_of_all_logits_changes_nothing(backend, inputs, shift):
    vocab = len(inputs.weight)
    plain = evaluate(inputs, backend)
    shifted = evaluate(replace(inputs, bias=torch.full((vocab,), shift, device=DEVICE)), backend)
    # Each logit is rounded to fp32 at the height of the shift, by half a unit at most, and nothing else is lost.
    unit = torch.finfo(torch.float32).eps * 2 ** math.floor(math.log2(2 * abs(shift)))
    assert (shifted["log_probs"] - plain["log_probs"]).abs().max() <= 2 * unit
    assert (shifted["entropy"] - plain["entropy"]).abs().max() <= 2 * unit * (1 + math.log(vocab))


@every_backend
@few
@given(inputs=heads(spread=st.sampled_from([1.0, 5.0]), vocab=st.sampled_from([5, 129, 300])), seed=seeds)
def test_logits_shifted_by_1e4_lose_nothing_but_their_own_rounding(backend, inputs, seed):
    # The rounded logits as input: against fp64 on the same ones the error is that of numbers near 0.
    logits = torch.randn(len(inputs.labels), len(inputs.weight), generator=torch.Generator().manual_seed(seed))
    inputs = replace(inputs, hidden=(3 * logits + 1e4).to(DEVICE))
    truth = evaluate_logits(inputs.to(torch.float64), "reference")
    got = evaluate_logits(inputs, backend)
    for name in got:
        assert (got[name] - truth[name]).abs().max() <= 1e-5


@every_backend
@few
@given(inputs=ordinary, seed=seeds)
def test_the_order_of_the_vocabulary_does_not_matter(backend, inputs, seed):
    inputs = inputs.to(HALF)
    order = torch.randperm(len(inputs.weight), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    permuted = replace(inputs, weight=inputs.weight[order], labels=order.argsort()[inputs.labels])
    options = {"upstream": inputs.upstream(("log_probs", "entropy")), "wrt": ("hidden", "weight")}
    truth = evaluate(inputs.to(torch.float64), "reference", **options)
    low = lows(inputs, evaluate, **options)
    got = evaluate(permuted, backend, **options)
    got["d_weight"] = got["d_weight"][order.argsort()]
    for name in got:
        assert_close_to_truth(got[name], truth[name], [x[name] for x in low], HALF, name)


@fused_backends
@few
@given(
    inputs=heads(spread=st.sampled_from([1.0, 40.0]), vocab=st.sampled_from([5, 129, 300])),
    bits=st.integers(0, 63),
    garbage=st.sampled_from([0.0, 1e30, math.nan, math.inf]),
    temperatures=st.booleans(),
)
def test_masked_rows_are_as_if_removed(backend, inputs, bits, garbage, temperatures):
    count = len(inputs.labels)
    mask = torch.tensor([bool(bits >> i & 1) for i in range(count)], device=DEVICE)
    if temperatures:
        inputs = inputs.with_options(temperature=torch.linspace(0.5, 1.5, count, device=DEVICE))
    names = ("log_probs", "entropy")
    upstream = inputs.upstream(names)
    hidden = torch.where(mask[:, None], inputs.hidden, garbage)
    masked = replace(inputs, hidden=hidden).with_options(mask=mask)
    got = evaluate(masked, backend, names, upstream, ("hidden", "weight"))
    removed = Inputs(inputs.hidden[mask], inputs.weight, inputs.labels[mask])
    if temperatures:
        removed = removed.with_options(temperature=inputs.options["temperature"][mask])
    want = evaluate(removed, backend, names, {n: g[mask] for n, g in upstream.items()}, ("hidden", "weight"))
    for name in (*names, "d_hidden"):
        assert torch.equal(got[name][mask], want[name]), name
        assert got[name][~mask].count_nonzero() == 0, name
    assert torch.equal(got["d_weight"], want["d_weight"])


@fused_backends
@few
@given(inputs=ordinary, feature=st.sampled_from(sorted(FEATURES)), dtype=st.sampled_from(TRITON_DTYPES))
def test_all_backends_agree(backend, inputs, feature, dtype):
    inputs = FEATURES[feature](inputs)
    names = ("log_probs", "entropy", "logsumexp")
    wrt = ("hidden", "weight", "bias")[: 2 + (inputs.bias is not None)]
    assert_right(inputs, backend, dtype, outputs=names, upstream=inputs.upstream(names), wrt=wrt)
