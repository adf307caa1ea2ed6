"""The training loss against ``torch.nn.functional.cross_entropy``: every reduction, feature and set of gradients."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import DEVICE, DTYPE, HALF, PARAMETERS, Allocations, assert_right, errors
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import rlhf_losses
from rlhf_losses import CrossEntropyLoss, LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy

REDUCTIONS = ("none", "mean", "sum")
FIELDS = ("loss", "z_loss", "entropy", "token_accuracy")
# Which outputs carry gradient, with z-loss and without.
CARRIERS = [("loss",), ("entropy",), ("loss", "entropy"), ("z_loss",), ("loss", "z_loss", "entropy")]
few = settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))


def class_weights(weight):
    """[V] numbers that belong to the rows of a head, in any order of these and of H; some of them 0."""
    of_row = weight.detach().double().abs().mean(-1)
    return (0.1 + of_row).masked_fill(of_row < of_row.mean() / 2, 0.0)


def truth_of(logits, labels, settings, softcap=None, logit_scale=None, temperature=1.0):
    """The four numbers by torch alone, from raw products [..., V] of any float type that is summed in."""
    z = logits * (1.0 if logit_scale is None else logit_scale)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(z).reshape(temperature.shape + (1,) * (z.dim() - temperature.dim()))
    z = (z / temperature).flatten(0, -2)
    flat, shape = labels.flatten().long(), labels.shape
    ignore_index, reduction = settings.get("ignore_index", -100), settings.get("reduction", "mean")
    counts = flat != ignore_index
    loss = functional.cross_entropy(
        z,
        flat,
        weight=settings.get("class_weight"),
        ignore_index=ignore_index,
        label_smoothing=settings.get("label_smoothing", 0.0),
        reduction=reduction,
    )
    log_p = z.log_softmax(-1)
    per_token = (
        settings.get("z_loss", 0.0) * z.logsumexp(-1).square(),
        -(log_p.exp() * log_p).sum(-1),
        (z.argmax(-1) == flat).to(z.dtype),
    )
    reduced = {
        "none": lambda x: x.reshape(shape),
        "mean": lambda x: x.sum() / counts.sum(),
        "sum": lambda x: x.sum(),
    }[reduction]
    z_loss, entropy, accuracy = (reduced(x * counts) for x in per_token)
    return (loss.reshape(shape) if reduction == "none" else loss) + z_loss, z_loss, entropy, accuracy


def evaluate(
    inputs, backend, wrt=("hidden", "weight"), carriers=("loss",), weighted=False, of_logits=False, **settings
):
    """As ``helpers.evaluate``. Backend "reference" is torch itself; the project's own is called "oracle"."""
    parameters = {
        name: None if x is None else x.detach().requires_grad_(name in wrt)
        for name, x in zip(PARAMETERS, (inputs.hidden, inputs.weight, inputs.bias), strict=True)
    }
    hidden, weight, bias = parameters.values()
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if weighted:
        settings["class_weight"] = class_weights(weight).to(wide)
    ours = settings | inputs.options | {"backend": "reference" if backend == "oracle" else backend}
    if backend == "reference":
        logits = hidden.to(wide) @ weight.to(wide).T
        out = truth_of(logits if bias is None else logits + bias, inputs.labels, settings, **inputs.options)
    elif of_logits:
        out = cross_entropy(hidden @ weight.T, inputs.labels, **ours)
    else:
        out = linear_cross_entropy(hidden, weight, inputs.labels, bias=bias, **ours)
    results = dict(zip(FIELDS, out, strict=True))
    if settings.get("z_loss", 0.0) == 0:
        assert (results.pop("z_loss") == 0).all()
    # A share for each, so that no output's gradient can stand in for another's; per token one that is nowhere alike.
    # A mean's gradient is scaled up, as fp16 is trained.
    objective, scale = 0.0, inputs.labels.numel() if settings.get("reduction") == "mean" else 1.0
    for share, name in zip((1.0, 0.5, -0.25), carriers, strict=False):
        values = results[name]
        spread = torch.linspace(0.5, 1.5, values.numel(), device=DEVICE).reshape(values.shape)
        objective = objective + share * (values * spread).sum()
    gradients = torch.autograd.grad(scale * objective, [parameters[name] for name in wrt])
    results |= {f"d_{name}": x for name, x in zip(wrt, gradients, strict=True)}
    assert not results["token_accuracy"].requires_grad
    return {name: x.detach() for name, x in results.items()}


def vectors(*args, **kwargs):
    """What the rule of helpers.py is for: no scalar, which is one sum in one order, and no count of tokens."""
    return {name: x for name, x in evaluate(*args, **kwargs).items() if x.dim() > 0 and name != "token_accuracy"}


def with_ignored(inputs, share, ignore_index=-100, seed=4):
    draws = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return replace(inputs, labels=inputs.labels.masked_fill(draws < share, ignore_index))


def assert_equal_to_1e_12(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape
        assert got[name].dtype == torch.float64
        if want[name].count_nonzero() == 0:
            assert (got[name] == 0).all(), name
        else:
            assert errors(got[name], want[name])["max"] <= 1e-12, name


GRID = list(itertools.product(REDUCTIONS, (0.0, 0.1), (False, True), (0.0, 1e-2), (None, 3.0), (0.0, 0.4)))


@pytest.mark.parametrize("of_logits", [False, True])
@pytest.mark.parametrize("carriers", CARRIERS)
def test_fp64_is_torch_to_1e_12(carriers, of_logits):
    for reduction, smoothing, weighted, z_loss, softcap, share in GRID:
        if z_loss == 0 and "z_loss" in carriers:
            continue
        inputs = random_inputs((3, 5), 23, 8, DEVICE).to(torch.float64)
        inputs.labels[1] = (inputs.hidden @ inputs.weight.T).argmax(-1)[1]
        inputs = with_ignored(inputs, share)
        options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss, "weighted": weighted}
        inputs = inputs.with_options(softcap=softcap)
        got = evaluate(inputs, "chunked", carriers=carriers, of_logits=of_logits, **options)
        assert_equal_to_1e_12(got, evaluate(inputs, "reference", carriers=carriers, **options))


@st.composite
def losses(draw, dtypes):
    """Inputs and the settings of a loss of them."""
    inputs = random_inputs(
        (draw(st.integers(3, 8)), 3),
        draw(st.sampled_from([5, 129, 300])),
        8,
        DEVICE,
        spread=draw(st.sampled_from([1.0, 2.0])),
        seed=draw(st.integers(0, 2**16)),
    )
    inputs = FEATURES[draw(st.sampled_from(sorted(FEATURES)))](inputs)
    ignore_index = draw(st.sampled_from([-100, 2]))
    inputs = with_ignored(inputs, draw(st.sampled_from([0.0, 0.5])), ignore_index, draw(st.integers(0, 2**16)))
    # One token at the least counts, and is not of a weight of 0 alone.
    inputs.labels[0] = 3
    z_loss = draw(st.sampled_from([0.0, 0.1]))
    options = {
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": z_loss,
        "weighted": draw(st.booleans()),
        "ignore_index": ignore_index,
        "carriers": draw(st.sampled_from(CARRIERS[: 5 if z_loss else 3])),
        "wrt": PARAMETERS[: 2 + (inputs.bias is not None)],
    }
    return inputs, options, draw(st.sampled_from(dtypes))


@pytest.mark.parametrize("backend", ["oracle", "chunked"])
@settings(few, max_examples=60)
@given(case=losses([torch.float64]))
def test_any_fp64_is_torch_to_1e_12(backend, case):
    inputs, options, dtype = case
    got = evaluate(inputs.to(dtype), backend, **options)
    assert_equal_to_1e_12(got, evaluate(inputs.to(dtype), "reference", **options))


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@few
@given(case=losses([torch.float32, HALF]))
def test_any_is_right(backend, case):
    inputs, options, dtype = case
    assert_right(inputs, backend, dtype, vectors, **options)


# Every pair of values of the first six meets at least once. Half of the target is smoothed: of a tenth, spread over 300
# entries, 16 bits would hardly see that it is gone.
ROWS = [
    ("none", 0.0, False, 0.0, None, 0.4, ("loss",)),
    ("none", 0.5, True, 0.1, 3.0, 0.0, ("loss", "z_loss", "entropy")),
    ("mean", 0.0, True, 0.0, 3.0, 0.4, ("entropy",)),
    ("mean", 0.5, False, 0.1, None, 0.0, ("loss",)),
    ("mean", 0.5, True, 0.0, None, 0.4, ("loss", "entropy")),
    ("mean", 0.0, False, 0.1, 3.0, 0.4, ("z_loss",)),
    ("sum", 0.0, True, 0.1, None, 0.4, ("loss", "entropy")),
    ("sum", 0.5, False, 0.0, 3.0, 0.4, ("loss",)),
    ("sum", 0.0, False, 0.0, 3.0, 0.0, ("loss", "entropy")),
]


@pytest.mark.parametrize(("reduction", "smoothing", "weighted", "z_loss", "softcap", "share", "carriers"), ROWS)
def test_grid(reduction, smoothing, weighted, z_loss, softcap, share, carriers, fused):
    inputs = with_ignored(random_inputs((4, 35), 300, 16, DEVICE), share).with_options(softcap=softcap)
    options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss, "weighted": weighted}
    options |= {"carriers": carriers}
    # Chunks of 128 rows: two of them, or one.
    assert_right(inputs, fused, HALF, vectors, workspace_bytes=2**10, **options)
    inputs = inputs.to(torch.float32)
    got, want = (evaluate(inputs, backend, **options) for backend in (fused, "reference"))
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("weighted", [False, True])
def test_logits(weighted, fused):
    inputs = with_ignored(random_inputs((3, 7), 300, 16, DEVICE), 0.3).with_options(softcap=3.0)
    for reduction in REDUCTIONS:
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3, "weighted": weighted}
        got, want = (
            evaluate(inputs, backend, carriers=CARRIERS[-1], of_logits=True, **options)
            for backend in (fused, "reference")
        )
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")


def ready(inputs):
    return inputs.hidden.requires_grad_(), inputs.weight.requires_grad_(), inputs.labels


def is_one_pass(loss):
    return loss.grad_fn.name() == "OnePassBackward"


def test_when_one_pass_is_taken(fused):
    for dtype in (torch.float32, HALF):
        hidden, weight, labels = ready(random_inputs((10,), 129, 16, DEVICE).to(dtype))
        for options, expected in (
            ({"reduction": "mean"}, True),
            ({"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3}, True),
            ({"reduction": "none"}, False),
            ({"softcap": 3.0}, True),
            ({"softcap": 3.0, "label_smoothing": 0.1}, fused == "chunked" or dtype == torch.float32),
        ):
            loss = linear_cross_entropy(hidden, weight, labels, backend=fused, **options).loss
            assert is_one_pass(loss) == expected, options
            with torch.no_grad():
                assert linear_cross_entropy(hidden, weight, labels, backend=fused, **options).loss.grad_fn is None
    hidden, weight, labels = ready(random_inputs((10,), 129, 16, DEVICE))
    assert not is_one_pass(linear_cross_entropy(hidden, weight, labels, backend="reference").loss)


@pytest.fixture
def products(monkeypatch):
    """Names of the back end's functions that multiply hidden states and head, as they are called."""
    from rlhf_losses.kernels import chunked
    from rlhf_losses.kernels.backends import operations

    calls = []
    for name in ("linear_forward", "linear_backward"):
        real = getattr(chunked, name)
        monkeypatch.setattr(chunked, name, lambda *args, _real=real, _name=name: calls.append(_name) or _real(*args))
    operations.cache_clear()
    yield calls
    operations.cache_clear()


def test_logits_are_multiplied_once_unless_another_output_has_a_gradient(products):
    hidden, weight, labels = ready(random_inputs((10,), 129, 16, DEVICE))
    out = linear_cross_entropy(hidden, weight, labels, z_loss=1e-3, backend="chunked")
    (2.0 * out.loss).backward()
    assert products == ["linear_forward"]
    # The loss's gradients are given away, the others' are computed when they are asked for, as often as that is.
    with pytest.raises(RuntimeError, match="expected one backward, got a second"):
        out.loss.backward(retain_graph=True)
    torch.autograd.grad(out.entropy + out.z_loss, weight, retain_graph=True)
    torch.autograd.grad(out.entropy, weight)
    assert products == ["linear_forward", "linear_backward", "linear_backward"]


def test_a_weight_per_token(fused):
    # Case s7: a fault known elsewhere scales all of the gradient by the first token's weight.
    inputs = random_inputs((2, 4), 15, 10, DEVICE)
    inputs.labels[0, 0] = -100
    hidden, weight, labels = ready(inputs)
    shares = torch.rand(2, 4, device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, labels, reduction="none", backend=fused).loss
    assert loss.shape == (2, 4)
    assert loss[0, 0] == 0
    got = torch.autograd.grad((loss * shares).sum(), (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, 1)
    want = functional.cross_entropy(logits, labels.flatten(), reduction="none") * shares.flatten()
    for x, y in zip(got, torch.autograd.grad(want.sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(x, y)
    assert (got[0][0, 0] == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("nothing", ["ignored", "masked", "empty"])
def test_nothing_that_counts_is_0_and_not_nan(nothing, reduction, fused):
    inputs = random_inputs((0, 5) if nothing == "empty" else (2, 5), 129, 16, DEVICE)
    hidden, weight, labels = ready(replace(inputs, hidden=torch.full_like(inputs.hidden, math.nan)))
    mask = None
    if nothing == "ignored":
        labels.fill_(-100)
        hidden = inputs.hidden.requires_grad_()
    elif nothing == "masked":
        mask = torch.zeros_like(labels)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weight": torch.rand(129, device=DEVICE)}
    out = linear_cross_entropy(hidden, weight, labels, mask=mask, reduction=reduction, backend=fused, **options)
    gradients = torch.autograd.grad((out.loss + out.entropy + out.z_loss).sum(), (hidden, weight))
    for x in (*out, *gradients):
        assert (x == 0).all()
    assert out.loss.shape == (labels.shape if reduction == "none" else ())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_mean_by_weights_that_sum_to_0_divides_by_it(share, smoothing, fused):
    # All of the weights are 0, or those of the labels alone.
    inputs = random_inputs((12,), 129, 16, DEVICE)
    weights = torch.full((129,), share, device=DEVICE).index_fill(0, inputs.labels, 0.0)
    options = {"label_smoothing": smoothing, "reduction": "mean"}
    for dtype in (torch.float16, torch.float32):
        hidden, weight, labels = ready(inputs.to(dtype))
        got = linear_cross_entropy(hidden, weight, labels, class_weight=weights, backend=fused, **options).loss
        want = functional.cross_entropy(hidden.float() @ weight.float().T, labels, weights, **options)
        # torch adds 0 / 0 to what smoothing gives over 0: NaN; in one sum that is infinite.
        assert not want.isfinite()
        assert got.isnan() if smoothing == 0.0 else not got.isfinite()
        for x in torch.autograd.grad(got, (hidden, weight)):
            assert not x.isfinite().any()
    options["reduction"] = "sum"
    loss = linear_cross_entropy(hidden, weight, labels, class_weight=weights, backend=fused, **options).loss
    want = functional.cross_entropy(hidden @ weight.T, labels, weights, **options)
    torch.testing.assert_close(loss, want)


def test_a_label_out_of_range_is_no_plausible_number(fused):
    for bad in (129, -1):
        hidden, weight, labels = ready(random_inputs((6,), 129, 16, DEVICE))
        labels[2] = bad
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weight": torch.rand(129, device=DEVICE)}
        out = linear_cross_entropy(hidden, weight, labels, reduction="none", backend=fused, **options)
        for values in out:
            assert values[2].isnan()
            assert values.isnan().sum() == 1
        gradient = torch.autograd.grad(out.loss.sum(), hidden)[0]
        assert gradient[2].isnan().all()
        assert gradient[[0, 1, 3, 4, 5]].isfinite().all()
        with pytest.raises(ValueError, match=f"got {bad} at token 2"):
            rlhf_losses.check()
        out = linear_cross_entropy(hidden, weight, labels, backend=fused, validate="off", **options)
        assert all(values.isnan() for values in out)
        assert torch.autograd.grad(out.loss, hidden)[0][2].isnan().all()
        with pytest.raises(ValueError, match="labels: expected 0 <= label < 129"):
            linear_cross_entropy(hidden, weight, labels, backend=fused, validate="sync")


@pytest.mark.parametrize("ignore_index", [0, -1, 7])
def test_what_is_ignored_is_not_accurate(ignore_index, fused):
    # argmax is 0 at a token that is left out, and -1 at one whose label is bad.
    hidden, weight, labels = ready(random_inputs((6,), 8, 4, DEVICE))
    labels[:3], labels[3:] = ignore_index, (hidden @ weight.T).argmax(-1)[3:]
    labels[3:] = labels[3:].masked_fill(labels[3:] == ignore_index, 3)
    right = (hidden @ weight.T).argmax(-1) == labels
    mask = torch.tensor([1, 1, 1, 0, 1, 1], device=DEVICE)
    options = {"ignore_index": ignore_index, "backend": fused, "mask": mask}
    each = linear_cross_entropy(hidden, weight, labels, reduction="none", **options).token_accuracy
    want = right & (labels != ignore_index) & (mask != 0)
    assert torch.equal(each, want.float())
    assert linear_cross_entropy(hidden, weight, labels, **options).token_accuracy == want.float().sum() / 2


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_of_minus_infinity(reduction, fused):
    logits = torch.randn(4, 129, device=DEVICE)
    logits[:, 5] = -math.inf
    logits.requires_grad_()
    labels = torch.tensor([0, 1, 128, 7], device=DEVICE)
    for smoothing in (0.0, 0.1):
        out = cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction, backend=fused)
        want = functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)
        # Smoothed, the loss is infinite, and its gradient is not.
        torch.testing.assert_close(out.loss, want)
        assert out.loss.isinf().all() == (smoothing > 0)
        got, want = (torch.autograd.grad(x.sum(), logits)[0] for x in (out.loss, want))
        torch.testing.assert_close(got, want)
        assert got.isfinite().all()
    # An entry that weighs nothing is as if it were not there; of torch's 0 * inf comes NaN.
    weights = torch.rand(129, device=DEVICE) + 0.5
    weights[5] = 0.0
    out = cross_entropy(logits, labels, label_smoothing=0.1, class_weight=weights, reduction=reduction, backend=fused)
    there = torch.arange(129, device=DEVICE) != 5
    moved = labels - (labels > 5).long()
    want = functional.cross_entropy(
        logits[:, there], moved, weight=weights[there], label_smoothing=0.1 * 128 / 129, reduction="none"
    )
    plain = functional.cross_entropy(logits[:, there], moved, weight=weights[there], reduction="none")
    want = want + (0.1 * 128 / 129 - 0.1) * plain
    total = {"none": lambda x: x, "sum": torch.sum, "mean": lambda x: x.sum() / weights[labels].sum()}[reduction]
    torch.testing.assert_close(out.loss, total(want))


def test_heads_with_a_token_switched_off(fused):
    inputs = random_inputs((40,), 129, 16, DEVICE)
    inputs.weight[7] = 0.0
    inputs.hidden[:, 0] = inputs.hidden[:, 0].abs() + 0.5
    inputs.weight[7, 0] = -math.inf
    inputs.labels[inputs.labels == 7] = 8
    weights = torch.ones(129, device=DEVICE)
    weights[7] = 0.0
    hidden, weight, labels = ready(inputs)
    options = {"label_smoothing": 0.1, "class_weight": weights, "backend": fused}
    results = []
    for reduction in ("sum", "none"):
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, **options).loss.sum()
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_autocast(fused):
    inputs = random_inputs((40,), 129, 16, DEVICE)
    hidden, weight, labels = ready(inputs)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "backend": fused}
    with torch.autocast(DEVICE.type, dtype=HALF):
        out = linear_cross_entropy(hidden, weight, labels, **options)
    got = torch.autograd.grad(out.loss + out.entropy, (hidden, weight))
    cast = [inputs.hidden.detach().to(HALF).requires_grad_(), inputs.weight.detach().to(HALF).requires_grad_()]
    want = linear_cross_entropy(*cast, labels, **options)
    assert all(torch.equal(x, y) for x, y in zip(out, want, strict=True))
    for x, y in zip(got, torch.autograd.grad(want.loss + want.entropy, cast), strict=True):
        assert x.dtype == torch.float32
        assert y.dtype == HALF
        torch.testing.assert_close(x, y.float(), rtol=4 * torch.finfo(HALF).eps, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_strides(reduction, fused):
    inputs = random_inputs((6, 8), 129, 16, DEVICE)
    hidden, weight = torch.randn(8, 6, 32, device=DEVICE), torch.randn(16, 129, device=DEVICE)
    views = hidden.requires_grad_().transpose(0, 1)[..., ::2], weight.requires_grad_().T, inputs.labels.T.clone().T
    weights = torch.rand(129, 2, device=DEVICE)[:, 0]
    results = []
    for make in (lambda x: x, lambda x: x.contiguous()):
        out = linear_cross_entropy(
            *map(make, views), class_weight=make(weights), label_smoothing=0.1, reduction=reduction, backend=fused
        )
        # A sum's gradient is one number of stride 0, a transposed view's is not contiguous.
        loss = out.loss.sum() if reduction == "mean" else (out.loss.T * torch.arange(6, device=DEVICE)).sum()
        results.append((*out, *torch.autograd.grad(loss + out.entropy.sum(), (hidden, weight))))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_frozen_parts_get_no_buffer_and_logits_are_not_held(fused):
    for wrt in ("hidden", "weight"):
        inputs = random_inputs((200,), 300, 40, DEVICE).to(DTYPE)
        hidden = inputs.hidden.requires_grad_(wrt == "hidden")
        weight = inputs.weight.requires_grad_(wrt == "weight")
        with Allocations(hidden, weight) as allocated:
            linear_cross_entropy(
                hidden, weight, inputs.labels, label_smoothing=0.1, workspace_bytes=1, backend=fused
            ).loss.backward()
        assert (300 * 40 in allocated.sizes) == (wrt == "weight")
        assert (200 * 40 in allocated.sizes) == (wrt == "hidden")
        # A block of 128 rows, its columns padded to whole tiles.
        assert max(allocated.sizes) <= 128 * 512
        assert (hidden.grad is None, weight.grad is None) == (wrt == "weight", wrt == "hidden")


def test_small_gradients_live_through_fp16(fused):
    # A mean over a million tokens: a token's share is 1e-6, and fp16 has nothing below 6e-8.
    hidden, weight, labels = ready(random_inputs((20,), 129, 16, DEVICE).to(torch.float16))
    loss = linear_cross_entropy(
        hidden, weight, labels, class_weight=torch.full((129,), 1e-6, device=DEVICE), reduction="sum", backend=fused
    ).loss
    got = torch.autograd.grad(loss * 1e6, (hidden, weight))
    want = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, reduction="sum", backend=fused).loss, (hidden, weight)
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=4e-3, atol=1e-3)


def test_accumulates_over_micro_batches(fused):
    hidden, weight, labels = ready(with_ignored(random_inputs((40,), 129, 16, DEVICE), 0.3))
    options = {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3, "backend": fused}
    whole = linear_cross_entropy(hidden, weight, labels, **options).loss
    parts = sum(
        linear_cross_entropy(hidden[rows], weight, labels[rows], **options).loss
        for rows in (slice(0, 1), slice(1, 30), slice(30, 40))
    )
    torch.testing.assert_close(parts, whole)
    for x, y in zip(*(torch.autograd.grad(x / 17, (hidden, weight)) for x in (parts, whole)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_outputs_not_asked_for_are_none(fused):
    hidden, weight, labels = ready(random_inputs((4,), 129, 16, DEVICE))
    for outputs in ((), ("entropy",), ("token_accuracy",)):
        out = linear_cross_entropy(hidden, weight, labels, outputs=outputs, backend=fused)
        assert {name for name in FIELDS[2:] if getattr(out, name) is not None} == set(outputs)


def test_modules_are_torchs(fused):
    weights = torch.rand(129) + 0.1
    hidden, weight, labels = ready(with_ignored(random_inputs((3, 5), 129, 16, DEVICE), 0.3))
    bias = torch.randn(129, device=DEVICE)
    logits = hidden @ weight.T + bias
    for reduction in REDUCTIONS:
        options = {"reduction": reduction, "label_smoothing": 0.1}
        theirs = torch.nn.CrossEntropyLoss(weight=weights, **options).to(DEVICE)
        want = theirs(logits.flatten(0, 1), labels.flatten()).reshape(labels.shape if reduction == "none" else ())
        ours = CrossEntropyLoss(class_weight=weights, backend=fused, **options).to(DEVICE)
        torch.testing.assert_close(ours(logits, labels), want)
        head = LinearCrossEntropyLoss(class_weight=weights, backend=fused, **options).to(DEVICE)
        loss = head(hidden, weight, labels, bias)
        torch.testing.assert_close(loss, want)
        for x, y in zip(
            *(torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True) for x in (loss, want)), strict=True
        ):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert list(head.state_dict()) == ["class_weight"]
    assert "reduction='sum'" in repr(head)
    assert LinearCrossEntropyLoss(z_loss=1e-3).state_dict() == {}


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {"reduction": "avg"}, "reduction: expected one of none, mean, sum, got 'avg'"),
        (ValueError, {"label_smoothing": 1.5}, r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
        (ValueError, {"label_smoothing": math.nan}, "label_smoothing: .* got nan"),
        (ValueError, {"z_loss": -1e-4}, "z_loss: expected a number that is finite and >= 0, got -0.0001"),
        (ValueError, {"z_loss": math.inf}, "z_loss"),
        (ValueError, {"z_loss": True}, "z_loss: .*got True; 0.0 switches it off"),
        (ValueError, {"outputs": "entropy"}, "outputs: expected some of .* in a tuple"),
        (ValueError, {"outputs": ("loss",)}, "loss and z_loss are always there"),
        (ValueError, {"class_weight": torch.ones(5)}, r"class_weight: expected shape \[129\] on .*, got \[5\]"),
        (TypeError, {"class_weight": torch.ones(129, dtype=torch.int64)}, "class_weight: expected a floating dtype"),
        (TypeError, {"class_weight": [1.0] * 129}, "class_weight: expected a torch.Tensor, got list"),
        (ValueError, {"class_weight": torch.ones(129, requires_grad=True)}, r"class_weight: .*pass \.detach"),
        (ValueError, {"softcap": 0.0}, "softcap"),
        (ValueError, {"cache_bytes": -1}, "cache_bytes"),
    ],
)
def test_errors(error, options, words):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    with pytest.raises(error, match=words):
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, **options)
    if not options.keys() & {"cache_bytes"}:
        with pytest.raises(error, match=words):
            cross_entropy(inputs.hidden @ inputs.weight.T, inputs.labels, **options)
    if options.keys() <= {"reduction", "label_smoothing", "z_loss", "softcap"}:
        with pytest.raises(error, match=words):
            LinearCrossEntropyLoss(**options)


def test_inplace_backward_writes_over_the_logits(fused):
    inputs = random_inputs((7,), 129, 16, DEVICE)
    logits = (inputs.hidden @ inputs.weight.T).requires_grad_()
    want = torch.autograd.grad(functional.cross_entropy(logits, inputs.labels), logits)[0]
    held = logits.detach().clone().requires_grad_()
    given = held * 1.0
    cross_entropy(given, inputs.labels, backend=fused, inplace_backward=True).loss.backward()
    torch.testing.assert_close(held.grad, want)
    assert torch.equal(given.detach(), held.grad)
