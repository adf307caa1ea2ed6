"""``torch.compile(fullgraph=True)`` of code around the op: the same numbers, to the bit, as without a compiler."""

import shutil
from itertools import combinations

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import DEVICE, FLOAT_OUTPUTS, PARAMETERS, evaluate, evaluate_logits
from torch._dynamo.testing import CompileCounterWithBackend

from rlhf_losses import (
    PolicyBatch,
    PolicyLossConfig,
    check,
    compiled,
    linear_cross_entropy,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
    policy_loss,
)
from rlhf_losses.policy import PRESETS

SHAPE, VOCAB, DEPTH = (3, 7), 40, 16


@pytest.fixture(autouse=True)
def without_earlier_code():
    torch._dynamo.reset()


def compile_whole(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def masked(inputs):
    generator = torch.Generator().manual_seed(4)
    mask = (torch.rand(inputs.labels.shape, generator=generator) < 0.7).to(DEVICE)
    inputs.labels[0, 1] = -100
    inputs.labels[~mask] = 10 * VOCAB
    inputs.hidden[~mask] = float("nan")
    return inputs.with_options(mask=mask)


def differentiated(inputs, backend, outputs, used, wrt, compile_with, **options):
    """``evaluate`` with the call compiled: what is differentiated is its results, outside of the compiled code."""
    call = linear_log_probs if compile_with is None else compile_whole(linear_log_probs, compile_with)
    parameters = {name: getattr(inputs, name) for name in PARAMETERS}
    leaves = {k: None if x is None else x.detach().clone().requires_grad_(k in wrt) for k, x in parameters.items()}
    stats = call(
        leaves["hidden"],
        leaves["weight"],
        inputs.labels,
        bias=leaves["bias"],
        outputs=outputs,
        backend=backend,
        **inputs.options | options,
    )
    upstream = inputs.upstream(used)
    found = torch.autograd.grad(
        [getattr(stats, name) for name in used], [leaves[name] for name in wrt], [upstream[name] for name in used]
    )
    return {name: x.detach() for name, x in stats._asdict().items() if x is not None} | dict(
        zip(wrt, found, strict=True)
    )


def assert_same(inputs, backend, outputs, used, wrt, compile_with="aot_eager", **options):
    got = differentiated(inputs, backend, outputs, used, wrt, compile_with, **options)
    expected = differentiated(inputs, backend, outputs, used, wrt, None, **options)
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature, fused):
    inputs = masked(FEATURES[feature](random_inputs(SHAPE, VOCAB, DEPTH, DEVICE)))
    wrt = tuple(name for name in PARAMETERS if getattr(inputs, name) is not None)
    assert_same(inputs, fused, (*FLOAT_OUTPUTS, "argmax"), FLOAT_OUTPUTS, wrt)


@pytest.mark.parametrize("used", [c for n in (1, 2) for c in combinations(FLOAT_OUTPUTS, n)], ids="-".join)
def test_outputs_that_no_loss_uses(used):
    inputs = random_inputs(SHAPE, VOCAB, DEPTH, DEVICE)
    assert_same(inputs, "auto", FLOAT_OUTPUTS, used, ("hidden", "weight"))
    assert_same(inputs, "auto", used, used, ("hidden", "weight"))


@pytest.mark.parametrize("wrt", [c for n in (1, 2, 3) for c in combinations(PARAMETERS, n)], ids="-".join)
def test_parameters_that_need_no_gradient(wrt):
    inputs = FEATURES["bias"](random_inputs(SHAPE, VOCAB, DEPTH, DEVICE))
    assert_same(inputs, "auto", ("log_probs", "entropy"), ("log_probs",), wrt)


def test_a_loss_in_the_compiled_code_and_rows_without_a_gradient(fused):
    inputs = masked(random_inputs(SHAPE, VOCAB, DEPTH, DEVICE))
    advantages = torch.randn(SHAPE).masked_fill(torch.rand(SHAPE) < 0.4, 0.0).to(DEVICE)

    def loss(hidden, weight, labels, mask, advantages):
        stats = linear_log_probs(hidden, weight, labels, mask=mask, outputs=("log_probs", "argmax"), backend=fused)
        return (stats.log_probs * advantages).sum() + (stats.argmax * advantages).sum().detach()

    found = []
    for function in (loss, compile_whole(loss)):
        hidden, weight = (x.detach().clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
        value = function(hidden, weight, inputs.labels, inputs.options["mask"], advantages)
        found.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
    for eager, compiled_ in zip(*found, strict=True):
        assert torch.equal(eager, compiled_)


@pytest.mark.skipif(DEVICE.type == "cpu" and shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor(fused):
    inputs = masked(FEATURES["all"](random_inputs(SHAPE, VOCAB, DEPTH, DEVICE)))
    assert_same(inputs, fused, FLOAT_OUTPUTS, FLOAT_OUTPUTS, PARAMETERS, "inductor")


def test_logits(fused):
    inputs = random_inputs(SHAPE, 1, VOCAB, DEVICE)
    inputs.labels.random_(VOCAB, generator=torch.Generator(DEVICE).manual_seed(1))
    inputs = masked(inputs)
    for used in (("log_probs",), ("entropy", "sum_p_squared")):
        options = {"outputs": FLOAT_OUTPUTS, "backend": fused, "temperature": 0.7, **inputs.options}
        expected = evaluate_logits(inputs, upstream=inputs.upstream(used), **options)
        logits = inputs.hidden.detach().requires_grad_()
        stats = compile_whole(log_probs_from_logits)(logits, inputs.labels, **options)
        upstream = inputs.upstream(used)
        (d_logits,) = torch.autograd.grad([getattr(stats, name) for name in used], logits, list(upstream.values()))
        assert torch.equal(d_logits, expected["d_logits"])
        for name in FLOAT_OUTPUTS:
            assert torch.equal(getattr(stats, name), expected[name]), name


def test_no_grad_and_nothing_that_counts(fused):
    inputs = random_inputs(SHAPE, VOCAB, DEPTH, DEVICE)
    call = compile_whole(linear_log_probs)
    with torch.no_grad():
        got = call(inputs.hidden, inputs.weight, inputs.labels, backend=fused)
    assert torch.equal(got.log_probs, evaluate(inputs, fused)["log_probs"])
    nothing = inputs.with_options(mask=torch.zeros(SHAPE, device=DEVICE))
    assert_same(nothing, fused, FLOAT_OUTPUTS, FLOAT_OUTPUTS, ("hidden", "weight"))
    none = random_inputs((0,), VOCAB, DEPTH, DEVICE)
    assert_same(none, fused, FLOAT_OUTPUTS, FLOAT_OUTPUTS, ("hidden", "weight"))


def test_autocast_casts_in_the_compiled_code():
    inputs = random_inputs(SHAPE, VOCAB, DEPTH, DEVICE)

    def loss(hidden, weight):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return linear_log_probs(hidden, weight, inputs.labels).entropy.sum()

    found = []
    for function in (loss, compile_whole(loss)):
        hidden, weight = (x.detach().clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
        found.append(torch.autograd.grad(function(hidden, weight), (hidden, weight)))
    for eager, compiled_ in zip(*found, strict=True):
        assert eager.dtype == torch.float32
        assert torch.equal(eager, compiled_)


def test_numbers_of_tokens_share_one_compilation():
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(linear_log_probs, fullgraph=True, backend=counter)
    for tokens in (5, 9, 6, 17, 33):
        inputs = masked(random_inputs((2, tokens), VOCAB, DEPTH, DEVICE))
        got = call(inputs.hidden, inputs.weight, inputs.labels, mask=inputs.options["mask"])
        assert torch.equal(got.log_probs, evaluate(inputs, "auto")["log_probs"])
    # The first, of one number, and the second, of any.
    assert counter.frame_count <= 2


def test_bad_labels_and_temperatures_are_found():
    inputs = random_inputs((5,), VOCAB, DEPTH, DEVICE)
    inputs.labels[2] = VOCAB
    call = compile_whole(linear_log_probs)
    assert call(inputs.hidden, inputs.weight, inputs.labels).log_probs.isnan().tolist() == [0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=rf"labels: expected 0 <= label < {VOCAB} .* at token 2"):
        check()
    with pytest.raises(ValueError, match="labels: expected"):
        call(inputs.hidden, inputs.weight, inputs.labels, validate="sync")
    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], device=DEVICE)
    with pytest.raises(ValueError, match=r"temperature: expected finite numbers > 0, got 0.0"):
        call(inputs.hidden, inputs.weight, inputs.labels.clamp(max=3), temperature=temperature)
    # At tokens that don't count they are nobody's concern.
    call(inputs.hidden, inputs.weight, inputs.labels, temperature=temperature, mask=temperature)


def test_what_no_op_does_breaks_the_graph():
    inputs = random_inputs(SHAPE, VOCAB, DEPTH, DEVICE)
    options = {"cache_bytes": 2**20}
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight

    def loss(hidden):
        return linear_log_probs(hidden, weight, inputs.labels, **options).log_probs.sum()

    with pytest.raises(Exception, match="expected cache_bytes=0"):
        compile_whole(loss)(hidden)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found = [torch.autograd.grad(f(hidden), hidden)[0] for f in (loss, torch.compile(loss, backend=counter))]
    assert torch.equal(*found)
    # The pieces between the breaks hold no part of the op, whose kernels and copies are not the compiler's.
    assert not [node for graph in counter.graphs for node in graph.graph.nodes if "empty" in str(node.target)]


@pytest.mark.parametrize("preset", PRESETS)
def test_policy_losses(preset):
    inputs = masked(random_inputs(SHAPE, VOCAB, DEPTH, DEVICE))
    changes = {"norm_length": 10.0} if preset == "dr-grpo" else {}
    config = PolicyLossConfig.preset(preset, entropy_coefficient=0.01, **changes)
    numbers = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def loss(hidden, weight, labels, mask, numbers):
        batch = PolicyBatch(
            advantages=numbers[0], old_log_probs=numbers[1] - 3, ref_log_probs=numbers[2] - 3, mask=mask
        )
        return linear_policy_loss(hidden, weight, labels, batch, config)

    found = []
    for function in (loss, compile_whole(loss)):
        hidden, weight = (x.detach().clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
        value, metrics = function(hidden, weight, inputs.labels, inputs.options["mask"], numbers)
        found.append((value.detach(), metrics, torch.autograd.grad(value, (hidden, weight))))
    (eager, _, eager_gradients), (value, metrics, gradients) = found
    assert metrics["passes"] == 2
    # One pass sums by chunks of tokens.
    torch.testing.assert_close(value, eager)
    for x, y in zip(gradients, eager_gradients, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_ops_are_what_they_declare(per_token):
    tokens, empty = 6, None
    hidden = torch.randn(tokens, DEPTH, device=DEVICE, requires_grad=True)
    weight = torch.randn(VOCAB, DEPTH, device=DEVICE, requires_grad=True)
    bias = torch.randn(VOCAB, device=DEVICE, requires_grad=True)
    labels = torch.randint(VOCAB, (tokens,), device=DEVICE)
    labels[1] = -100
    temperatures = torch.rand(tokens, device=DEVICE) + 0.5 if per_token else empty
    wanted = "entropy,log_probs,sum_p_squared"
    rest = (0.7, 1.5, 3.0, wanted, -100, "auto", 2**20, "async", True)
    torch.library.opcheck(compiled._linear_forward, (hidden, weight, bias, labels, temperatures, None, *rest))
    torch.library.opcheck(compiled._linear_forward, (hidden, weight, None, labels, temperatures, None, *rest))
    torch.library.opcheck(compiled._logits_forward, (hidden, labels % DEPTH, temperatures, None, *rest))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"reduction": "none"}])
def test_the_cross_entropy_in_a_whole_graph(options):
    hidden, weight = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 7, 16), (50, 16)))
    labels = torch.randint(50, (3, 7))
    labels[0, 2:] = -100

    def loss(hidden, weight):
        out = linear_cross_entropy(hidden, weight, labels, **options)
        return out.loss.sum() + 0.1 * out.entropy.mean()

    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_packed_sequences_in_a_whole_graph():
    offsets = torch.tensor([0, 3, 10])
    config = PolicyLossConfig.preset("dapo")

    def loss(hidden, weight, labels, offsets):
        batch = PolicyBatch(
            advantages=torch.ones(10), old_log_probs=torch.full((10,), -3.0), mask=torch.ones(10), cu_seqlens=offsets
        )
        return policy_loss(linear_log_probs(hidden, weight, labels), batch, config).loss

    arguments = (torch.randn(10, 8), torch.randn(20, 8), torch.randint(20, (10,)), offsets)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), loss(*arguments))
