"""CUDA graphs: nothing on the path of forward and backward waits for the host, and a replay computes what a call would.

On a CPU, where nothing can be captured, ``host_read.capturing`` is made to say so: the same path is taken, and what
would wait for a GPU fails the test.
"""

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import DEVICE, DTYPE, FLOAT_OUTPUTS, PARAMETERS
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_losses import (
    PolicyBatch,
    PolicyLossConfig,
    linear_cross_entropy,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
)
from rlhf_losses.kernels import host_read

ROWS, VOCAB, DEPTH = 150, 300, 72
# What needs a result of the device on the host.
_WAITING = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::is_nonzero")


class NothingWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in _WAITING, func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def captured(monkeypatch):
    """Runs a function as if its launches went to a graph."""

    def run(function):
        with monkeypatch.context() as patch, NothingWaits():
            patch.setattr(host_read, "capturing", lambda: True)
            patch.setattr(host_read.HostRead, "__init__", None)
            return function()

    return run


def draw(feature="none", seed=0):
    """Inputs with masked, ignored and zero-gradient tokens, two of them with hidden states that are no numbers."""
    inputs = FEATURES[feature](random_inputs((3, ROWS // 3), VOCAB, DEPTH, DEVICE, seed=seed)).to(DTYPE)
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(inputs.labels.shape, generator=generator) < 0.7).to(DEVICE)
    mask[0, 3], mask[0, 4], mask[1, 1] = False, True, False
    inputs.labels[0, 4] = -100
    inputs.labels[1, 1] = 10 * VOCAB
    inputs.hidden[0, 3:5] = float("nan")
    zero = (torch.rand(inputs.labels.shape, generator=generator) < 0.4).to(DEVICE)
    upstream = {name: x.masked_fill(zero, 0.0) for name, x in inputs.upstream(("log_probs", "entropy"), seed).items()}
    # Nothing of a token that does not count may reach a gradient, what comes from above neither.
    upstream["log_probs"][0, 3] = float("inf")
    return inputs.with_options(mask=mask), upstream


def step(hidden, weight, bias, labels, upstream, outputs=("log_probs", "entropy"), **options):
    """Statistics and the gradients of all parameters."""
    stats = linear_log_probs(hidden, weight, labels, bias=bias, outputs=outputs, **options)
    parameters = [x for x in (hidden, weight, bias) if x is not None]
    found = [getattr(stats, name) for name in upstream]
    gradients = torch.autograd.grad(found, parameters, list(upstream.values()))
    return *(x.detach() for x in stats if x is not None), *gradients


def leaves(inputs):
    return [
        None if x is None else x.detach().clone().requires_grad_() for x in map(inputs.__getattribute__, PARAMETERS)
    ]


def assert_same_step(got, expected):
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert x.isfinite().all()
        # Other rows in a product, other sums of the weight's gradient: a few roundings.
        tolerance = 8 * torch.finfo(x.dtype).eps if x.is_floating_point() else 0
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * y.abs().max().item())


@pytest.mark.parametrize("feature", FEATURES)
def test_all_rows_give_what_some_would(feature, fused, captured):
    inputs, upstream = draw(feature)
    outputs = (*FLOAT_OUTPUTS, "argmax")

    def run():
        return step(*leaves(inputs), inputs.labels, upstream, outputs, backend=fused, **inputs.options)

    got, expected = captured(run), run()
    assert_same_step(got, expected)
    without_gradient = ~inputs.options["mask"] | (inputs.labels == -100)
    without_gradient |= (upstream["log_probs"] == 0) & (upstream["entropy"] == 0)
    assert (got[len(outputs)][without_gradient] == 0).all()


def test_a_temperature_that_no_token_has(fused, captured):
    inputs, upstream = draw()
    temperature = torch.ones(inputs.labels.shape, device=DEVICE)
    temperature[0, 3], temperature[1, 1] = 0.0, float("nan")
    inputs = inputs.with_options(temperature=temperature)

    def run():
        return step(*leaves(inputs), inputs.labels, upstream, backend=fused, **inputs.options)

    assert_same_step(captured(run), run())


def test_a_token_that_is_switched_off(fused, captured):
    inputs, upstream = draw()
    inputs.hidden.abs_()
    inputs.weight[7] = -torch.inf
    inputs.labels[inputs.labels == 7] = 8

    def run():
        return step(*leaves(inputs), inputs.labels, upstream, backend=fused, **inputs.options)

    assert_same_step(captured(run), run())


@pytest.mark.parametrize("in_place", [False, True])
def test_logits(in_place, fused, captured):
    inputs, upstream = draw()
    logits = torch.randn(*inputs.labels.shape, VOCAB, device=DEVICE).to(DTYPE)
    logits[0, 3:5] = float("nan")

    def run():
        leaf = logits.clone().requires_grad_()
        stats = log_probs_from_logits(
            leaf.clone(), inputs.labels, backend=fused, inplace_backward=in_place, **inputs.options
        )
        found = torch.autograd.grad((stats.log_probs, stats.entropy), leaf, list(upstream.values()))
        return stats.log_probs.detach(), stats.entropy.detach(), *found

    assert_same_step(captured(run), run())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_backward_alone(in_place, fused, captured):
    # The forward has packed its rows.
    inputs, upstream = draw()
    logits = torch.randn(*inputs.labels.shape, VOCAB, device=DEVICE).to(DTYPE)

    def run(backward):
        hidden, weight, _ = leaves(inputs)
        leaf = logits.clone().requires_grad_()
        one = linear_log_probs(hidden, weight, inputs.labels, backend=fused, **inputs.options)
        other = log_probs_from_logits(
            leaf.clone(), inputs.labels, backend=fused, inplace_backward=in_place, **inputs.options
        )
        outputs = (one.log_probs, one.entropy, other.log_probs, other.entropy)
        return backward(lambda: torch.autograd.grad(outputs, (hidden, weight, leaf), [*upstream.values()] * 2))

    assert_same_step(run(captured), run(lambda function: function()))


def test_a_bad_label_is_not_a_number(fused, captured):
    inputs = random_inputs((5,), VOCAB, DEPTH, DEVICE).to(DTYPE)
    inputs.labels[2] = VOCAB

    def run():
        hidden, weight, _ = leaves(inputs)
        stats = linear_log_probs(hidden, weight, inputs.labels, backend=fused)
        return stats.log_probs.detach(), torch.autograd.grad(stats.log_probs.sum(), hidden)[0]

    for x in captured(run):
        assert x.reshape(5, -1).isnan().any(-1).tolist() == [False, False, True, False, False]


def policy_step(hidden, weight, labels, mask, advantages, old, **options):
    batch = PolicyBatch(advantages=advantages, old_log_probs=old, mask=mask)
    config = PolicyLossConfig.preset("dapo", entropy_coefficient=0.01)
    loss, metrics = linear_policy_loss(hidden, weight, labels, batch, config, **options)
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight))), metrics


def test_the_policy_loss_takes_two_passes(fused, captured):
    inputs, upstream = draw()
    advantages = upstream["log_probs"].masked_fill(~inputs.options["mask"], 0.0)
    old = torch.full_like(advantages, -5.0)

    def run():
        hidden, weight, _ = leaves(inputs)
        return policy_step(hidden, weight, inputs.labels, inputs.options["mask"], advantages, old, backend=fused)

    (got, metrics), (expected, _) = captured(run), run()
    assert metrics["passes"] == 2
    assert_same_step(got, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_cross_entropy(reduction, fused, captured):
    inputs, _ = draw()
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": reduction, "mask": inputs.options["mask"]}

    def run():
        hidden, weight, _ = leaves(inputs)
        found = linear_cross_entropy(hidden, weight, inputs.labels, backend=fused, **options)
        loss = found.loss.sum()
        return loss.detach(), found.token_accuracy, *torch.autograd.grad(loss, (hidden, weight))

    assert_same_step(captured(run), run())


@pytest.mark.parametrize("options", [{"cache_bytes": 2**20}, {"cache_bytes": "auto"}, {"backend": "reference"}])
def test_what_needs_the_host_is_refused(options, captured):
    inputs = random_inputs((5,), VOCAB, DEPTH, DEVICE)
    with pytest.raises(ValueError, match="in a CUDA graph, got cache_bytes="):
        captured(lambda: linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, **options))


def graph_of(function):
    """``function`` captured, after the three runs that torch asks for on a stream of their own, and what it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_replays_on_new_inputs(feature, fused):
    inputs, upstream = draw(feature)
    places = leaves(inputs)
    options = inputs.options

    def run():
        return step(*places, inputs.labels, upstream, (*FLOAT_OUTPUTS, "argmax"), backend=fused, **options)

    graph, results = graph_of(run)
    for seed in (1, 2):
        other, other_upstream = draw(feature, seed)
        with torch.no_grad():
            for place, x in zip(places, leaves(other), strict=True):
                if place is not None:
                    place.copy_(x)
            inputs.labels.copy_(other.labels)
            for name, x in other_upstream.items():
                upstream[name].copy_(x)
            for name, x in other.options.items():
                if isinstance(x, torch.Tensor):
                    options[name].copy_(x)
        graph.replay()
        expected = step(
            *leaves(other), other.labels, other_upstream, (*FLOAT_OUTPUTS, "argmax"), backend=fused, **other.options
        )
        assert_same_step(results, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_replays_on_new_logits(in_place, fused):
    inputs, upstream = draw()
    place = torch.zeros(*inputs.labels.shape, VOCAB, device=DEVICE, dtype=DTYPE, requires_grad=True)

    def run():
        stats = log_probs_from_logits(
            place.clone(), inputs.labels, backend=fused, inplace_backward=in_place, **inputs.options
        )
        found = torch.autograd.grad((stats.log_probs, stats.entropy), place, list(upstream.values()))
        return stats.log_probs.detach(), stats.entropy.detach(), *found

    graph, results = graph_of(run)
    with torch.no_grad():
        place.copy_(torch.randn(place.shape, device=DEVICE))
        place[0, 3:5] = float("nan")
    graph.replay()
    got = [x.clone() for x in results]
    assert_same_step(got, run())


@pytest.mark.gpu
def test_the_policy_loss_replays(fused):
    inputs, upstream = draw()
    hidden, weight, _ = leaves(inputs)
    advantages, mask = torch.zeros_like(upstream["log_probs"]), inputs.options["mask"]
    old = torch.full_like(advantages, -5.0)

    def run():
        return policy_step(hidden, weight, inputs.labels, mask, advantages, old, backend=fused)[0]

    graph, results = graph_of(run)
    advantages.copy_(upstream["entropy"])
    graph.replay()
    got = [x.clone() for x in results]
    assert_same_step(got, run())


@pytest.mark.gpu
def test_compiled_code_replays():
    inputs, upstream = draw()

    def loss(hidden, weight, labels, mask, advantages):
        stats = linear_log_probs(hidden, weight, labels, mask=mask)
        return (stats.log_probs * advantages).sum() - 0.01 * stats.entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    hidden, weight, _ = leaves(inputs)
    for _ in range(4):
        arguments = (hidden, weight, inputs.labels, inputs.options["mask"], upstream["entropy"])
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(*arguments)
        got = (value.detach().clone(), *(x.clone() for x in torch.autograd.grad(value, (hidden, weight))))
        value = loss(*arguments)
        assert_same_step(got, (value.detach(), *torch.autograd.grad(value, (hidden, weight))))
