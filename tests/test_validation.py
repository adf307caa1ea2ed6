"""What is refused, in which words, and when: every message says what was expected, what came and the way out."""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import random_inputs
from helpers import DEVICE, FLOAT_OUTPUTS, evaluate, evaluate_logits

import rlhf_losses
from rlhf_losses import LogitTransform, backend_for, linear_log_probs
from rlhf_losses.kernels.host_read import HostRead

V, H = 129, 16


def head(leading=(5,)):
    return random_inputs(leading, V, H, DEVICE)


def call(**changes):
    """A valid call of two sequences of three tokens, but for ``changes``."""
    inputs = head((2, 3))
    given = {"hidden_states": inputs.hidden, "weight": inputs.weight, "labels": inputs.labels} | changes
    return linear_log_probs(given.pop("hidden_states"), given.pop("weight"), given.pop("labels"), **given)


def on_device(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


# What is passed, the error, and what the message must hold: the argument, expected, got, and the way out where one
# does not follow from the first.
REFUSED = {
    "other hidden size": (
        lambda: {"hidden_states": on_device(2, 3, H + 1)},
        ValueError,
        ("hidden_states and weight", "[..., H] and [V, H]", "[2, 3, 17] and [129, 16]"),
    ),
    "weight of one dimension": (lambda: {"weight": on_device(H)}, ValueError, ("[..., H] and [V, H]", "[16]")),
    "hidden states of no dimension": (lambda: {"hidden_states": on_device()}, ValueError, ("[..., H]", "[]")),
    "empty vocabulary": (lambda: {"weight": on_device(0, H)}, ValueError, ("vocabulary", "at least 1", "[0, 16]")),
    "no hidden size": (
        lambda: {"weight": on_device(V, 0), "hidden_states": on_device(2, 3, 0)},
        ValueError,
        ("hidden size", "at least 1", "[129, 0]"),
    ),
    "two types": (
        lambda: {"weight": on_device(V, H, dtype=torch.float16)},
        TypeError,
        ("one floating dtype", "torch.float32 and torch.float16", "cast one of them, or run under torch.autocast"),
    ),
    "integer hidden states": (
        lambda: {"hidden_states": on_device(2, 3, H, dtype=torch.int64), "weight": on_device(V, H, dtype=torch.int64)},
        TypeError,
        ("one floating dtype", "torch.int64"),
    ),
    "weight elsewhere": (
        lambda: {"weight": on_device(V, H).to("meta")},
        ValueError,
        ("weight", "device", "meta", ".to()"),
    ),
    "bias of another shape": (lambda: {"bias": on_device(V + 1)}, ValueError, ("bias", "[129]", "[130]")),
    "bias of two dimensions": (lambda: {"bias": on_device(1, V)}, ValueError, ("bias", "[129]", "[1, 129]")),
    "integer bias": (lambda: {"bias": on_device(V, dtype=torch.int64)}, TypeError, ("bias", "floating", "torch.int64")),
    "bias elsewhere": (lambda: {"bias": on_device(V).to("meta")}, ValueError, ("bias", "device", "meta", ".to()")),
    "labels of another shape": (
        lambda: {"labels": on_device(3, 2, dtype=torch.int64)},
        ValueError,
        ("labels", "[2, 3]", "hidden_states [2, 3, 16]", "[3, 2]"),
    ),
    "float labels": (lambda: {"labels": on_device(2, 3)}, TypeError, ("labels", "integer", "torch.float32", ".long()")),
    "mask of another shape": (lambda: {"mask": on_device(3)}, ValueError, ("mask", "[2, 3]", "that of labels", "[3]")),
    "complex mask": (
        lambda: {"mask": on_device(2, 3, dtype=torch.complex64)},
        TypeError,
        ("mask", "bool", "real dtype", "torch.complex64", "mask != 0"),
    ),
    "no data": (
        lambda: {
            name: torch.empty(*shape, device="meta")
            for name, shape in (("hidden_states", (2, 3, H)), ("weight", (V, H)))
        },
        ValueError,
        ("hidden_states", "meta", "load_state_dict()"),
    ),
    "mask elsewhere": (lambda: {"mask": on_device(2, 3).to("meta")}, ValueError, ("mask", "device", "meta", ".to()")),
    "temperature 0": (
        lambda: {"temperature": 0},
        ValueError,
        ("temperature", "finite number > 0", "0.0", "pass the temperature of the policy"),
    ),
    "temperature of another shape": (
        lambda: {"temperature": on_device(3)},
        ValueError,
        ("temperature", "a number", "shaped like labels [2, 3]", "one value per sequence [2]", "[3]"),
    ),
    "temperature elsewhere": (
        lambda: {"temperature": on_device(2, 3).to("meta")},
        ValueError,
        ("temperature", "device", "meta", ".to()"),
    ),
    "softcap 0": (lambda: {"softcap": 0.0}, ValueError, ("softcap", "finite number > 0", "0.0", "softcap=None")),
    "softcap -1": (lambda: {"softcap": -1.0}, ValueError, ("softcap", "> 0", "-1.0", "softcap=None")),
    "softcap nan": (lambda: {"softcap": float("nan")}, ValueError, ("softcap", "finite", "nan")),
    "logit_scale inf": (lambda: {"logit_scale": float("inf")}, ValueError, ("logit_scale", "finite number", "inf")),
    "unknown output": (
        lambda: {"outputs": ("logits",)},
        ValueError,
        ("outputs", "'log_probs', 'entropy'", "('logits',)"),
    ),
    "outputs as a string": (lambda: {"outputs": "entropy"}, ValueError, ("outputs", "in a tuple", "'entropy'")),
    "no outputs": (lambda: {"outputs": ()}, ValueError, ("outputs", "expected some of", "()")),
    "unknown backend": (
        lambda: {"backend": "cuda"},
        ValueError,
        ("backend", "auto, triton, chunked, reference", "'cuda'"),
    ),
    "unknown validate": (lambda: {"validate": "never"}, ValueError, ("validate", "async, sync, off", "'never'")),
    "workspace_bytes 0": (lambda: {"workspace_bytes": 0}, ValueError, ("workspace_bytes", "> 0 or None", "0")),
    "fp64 on triton": (
        lambda: {
            "backend": "triton",
            "hidden_states": on_device(2, 3, H, dtype=torch.float64),
            "weight": on_device(V, H, dtype=torch.float64),
        },
        ValueError,
        ("backend='triton'", "fp16, bf16 and fp32", "torch.float64", "pass backend='chunked'"),
    ),
}


@pytest.mark.parametrize(("changes", "kind", "parts"), REFUSED.values(), ids=REFUSED)
def test_refusal_says_expected_got_and_the_way_out(changes, kind, parts):
    with pytest.raises(kind) as refused:
        call(**changes())
    assert type(refused.value) is kind
    for part in parts:
        assert part in str(refused.value)


def test_the_call_that_is_changed_is_valid():
    assert call().log_probs.shape == (2, 3)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's limit; a GPU multiplies bf16")
def test_interpreter_refuses_bf16():
    with pytest.raises(ValueError, match="interpreter multiplies the bits of bf16; pass backend='chunked'"):
        backend_for(torch.ones(1, dtype=torch.bfloat16), "triton")


def test_transform_checks_itself():
    with pytest.raises(ValueError, match="temperature"):
        LogitTransform(temperature=-1)
    with pytest.raises(ValueError, match="softcap"):
        LogitTransform(softcap=float("inf"))
    with pytest.raises(ValueError, match="logit_scale"):
        LogitTransform(scale=float("nan"))
    with pytest.raises(AttributeError):
        LogitTransform().scale = 2.0


@pytest.mark.parametrize("shape", [(2, 3), (2,), (2, 1), (1, 3), (1, 1), ()], ids=str)
def test_temperature_of_every_shape(shape, backend):
    inputs = head((2, 3))
    temperature = 0.5 + torch.rand(shape, device=DEVICE)
    spread = temperature[:, None] if shape == (2,) else temperature
    each = spread.expand(2, 3)
    got = evaluate(inputs, backend, temperature=temperature)["log_probs"]
    assert torch.equal(got, evaluate(inputs, backend, temperature=each.contiguous())["log_probs"])
    one = evaluate(
        replace(inputs, hidden=inputs.hidden[1], labels=inputs.labels[1]), backend, temperature=each[1, 2].item()
    )
    torch.testing.assert_close(got[1, 2], one["log_probs"][2], rtol=1e-6, atol=1e-6)


def test_only_what_is_asked_for_comes_back(backend):
    names = (*FLOAT_OUTPUTS, "argmax")
    for wanted in names:
        stats = linear_log_probs(head().hidden, head().weight, head().labels, outputs=(wanted,), backend=backend)
        assert [name for name in names if getattr(stats, name) is not None] == [wanted]
        assert getattr(stats, wanted).dtype == (torch.int64 if wanted == "argmax" else torch.float32)


BAD_LABELS = {"V": V, "-1": -1, "beyond int32": 2**32 + 3, "least": -(2**63)}


def with_bad_label(label):
    inputs = head()
    labels = inputs.labels.clone()
    labels[2] = label
    return replace(inputs, labels=labels), torch.tensor([0, 1, 3, 4], device=DEVICE)


@pytest.mark.parametrize("label", BAD_LABELS.values(), ids=BAD_LABELS)
@pytest.mark.parametrize("validate", ["async", "off"])
def test_bad_label_gives_nan_and_a_nan_gradient(label, validate, backend):
    inputs, good = with_bad_label(label)
    upstream = inputs.upstream(FLOAT_OUTPUTS)
    outputs = (*FLOAT_OUTPUTS, "argmax")
    want = evaluate(head(), backend, outputs, upstream, ("hidden",))
    got = evaluate(inputs, backend, outputs, upstream, ("hidden", "weight"), validate=validate)
    for name in FLOAT_OUTPUTS:
        assert got[name][2].isnan(), name
        assert torch.equal(got[name][good], want[name][good]), name
    assert got["argmax"][2] == -1
    assert torch.equal(got["argmax"][good], want["argmax"][good])
    assert got["d_hidden"][2].isnan().all()
    torch.testing.assert_close(got["d_hidden"][good], want["d_hidden"][good], rtol=1e-5, atol=1e-6)
    assert got["d_weight"].isnan().any()
    if validate == "async":
        with pytest.raises(
            ValueError, match=rf"its tokens are NaN:\nlabels: expected 0 <= label < {V} .* got {label} at"
        ):
            rlhf_losses.check()
    rlhf_losses.check()


@pytest.mark.parametrize("output", FLOAT_OUTPUTS)
def test_bad_label_reaches_the_gradient_through_every_output(output, backend):
    inputs, _ = with_bad_label(V)
    got = evaluate(inputs, backend, (output,), inputs.upstream((output,)), ("hidden",), validate="off")
    assert got[output][2].isnan()
    assert got["d_hidden"][2].isnan().all()
    assert got["d_hidden"][[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("label", BAD_LABELS.values(), ids=BAD_LABELS)
def test_bad_label_among_logits(label, backend):
    inputs, good = with_bad_label(label)
    logits = replace(inputs, hidden=inputs.hidden @ inputs.weight.T)
    got = evaluate_logits(logits, backend, upstream=inputs.upstream(("log_probs",)), validate="off")
    assert got["log_probs"][2].isnan()
    assert got["entropy"][2].isnan()
    assert got["d_logits"][2].isnan().all()
    assert got["d_logits"][good].isfinite().all()


def arrived():
    """The next call raises what has reached the host by then; it does not wait."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def test_async_raises_at_the_next_call_and_then_forgets(backend):
    inputs, _ = with_bad_label(V)
    evaluate(inputs, backend)
    arrived()
    with pytest.raises(
        ValueError, match=rf"an earlier call .*\n.* got {V} at .*token 2 \(1 such of 5\); mask that token, or"
    ):
        evaluate(head(), backend)
    assert evaluate(head(), backend)["log_probs"].isfinite().all()
    evaluate(inputs, backend)
    arrived()
    with pytest.raises(ValueError, match="an earlier call"):
        evaluate_logits(replace(head(), hidden=head().hidden @ head().weight.T), backend)


def test_check_has_a_line_for_every_faulty_call(monkeypatch):
    # As on a GPU that has not got to the checks of three calls yet.
    monkeypatch.setattr(HostRead, "arrived", lambda read: False)
    for label in (V, 1, -5):
        evaluate(with_bad_label(label)[0], "chunked")
    with pytest.raises(ValueError, match="an earlier call") as raised:
        rlhf_losses.check()
    _, *lines = str(raised.value).splitlines()
    assert len(lines) == 2
    assert f"got {V} at" in lines[0]
    assert "got -5 at" in lines[1]
    rlhf_losses.check()


def test_async_error_survives_new_labels_in_the_same_memory(backend):
    # A trainer that fills one buffer of labels step after step.
    inputs, _ = with_bad_label(V)
    evaluate(inputs, backend)
    inputs.labels.zero_()
    with pytest.raises(ValueError, match="an earlier call got bad input"):
        rlhf_losses.check()


def test_sync_raises_at_once_and_leaves_nothing(backend):
    inputs, _ = with_bad_label(V)
    with pytest.raises(ValueError, match=rf"^labels: expected 0 <= label < {V} .* got {V} at .*token 2"):
        evaluate(inputs, backend, validate="sync")
    rlhf_losses.check()


def test_off_leaves_nothing(backend):
    inputs, _ = with_bad_label(V)
    evaluate(inputs, backend, validate="off")
    rlhf_losses.check()


@pytest.mark.parametrize("validate", ["async", "sync", "off"])
def test_masked_bad_label_is_ignored(validate, backend):
    inputs, good = with_bad_label(10**6)
    mask = torch.tensor([1, 1, 0, 1, 1], device=DEVICE)
    got = evaluate(inputs, backend, mask=mask, validate=validate)
    want = evaluate(head(), backend)
    assert got["log_probs"][2] == got["entropy"][2] == 0
    for name in got:
        torch.testing.assert_close(got[name][good], want[name][good], rtol=1e-6, atol=1e-6)
    rlhf_losses.check()


def test_two_bad_labels_are_counted(backend):
    inputs, _ = with_bad_label(V)
    inputs.labels[4] = -7
    with pytest.raises(ValueError, match=r"got 129 at .*token 2 \(2 such of 5\)"):
        evaluate(inputs, backend, validate="sync")


@pytest.mark.parametrize("ignore_index", [-1, 0, V, 7])
def test_ignore_index_is_what_the_caller_says(ignore_index, backend):
    # In the vocabulary or out of it; another number of that kind is then a bad label.
    inputs = head()
    labels = inputs.labels.clamp(8, V - 2)
    labels[2] = ignore_index
    got = evaluate(replace(inputs, labels=labels), backend, ignore_index=ignore_index, validate="sync")["log_probs"]
    assert got[2] == 0
    assert (got[[0, 1, 3, 4]] < 0).all()
    labels[3] = -100
    with pytest.raises(ValueError, match=f"or ignore_index {ignore_index}, got -100 at"):
        evaluate(replace(inputs, labels=labels), backend, ignore_index=ignore_index, validate="sync")


def test_refused_call_leaves_nothing_behind():
    with pytest.raises(ValueError, match="softcap"):
        call(softcap=-1.0, labels=torch.full((2, 3), V, device=DEVICE))
    rlhf_losses.check()


@pytest.mark.parametrize("changed", ["labels", "temperature", "mask"])
def test_input_changed_before_the_backward_is_never_silent(changed, backend):
    # As of any saved tensor: the gradient of what the forward saw, or an error.
    inputs = head()
    options = {"temperature": torch.linspace(0.5, 1.5, 5, device=DEVICE), "mask": torch.arange(5, device=DEVICE) != 1}
    ones = {"log_probs": torch.ones(5, device=DEVICE)}
    want = evaluate(inputs, backend, upstream=ones, wrt=("hidden",), **options)["d_hidden"]
    hidden = inputs.hidden.requires_grad_()
    stats = linear_log_probs(hidden, inputs.weight, inputs.labels, backend=backend, **options)
    ({"labels": inputs.labels} | options)[changed].fill_(1)
    try:
        (got,) = torch.autograd.grad(stats.log_probs.sum(), hidden)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(got, want)


def results_of(seed, backend):
    inputs = random_inputs((20,), 300, H, DEVICE, seed=seed)
    upstream = inputs.upstream(("log_probs", "entropy"))
    return evaluate(inputs, backend, upstream=upstream, wrt=("hidden", "weight"))


@pytest.mark.parametrize(
    "backend",
    # The interpreter replaces parts of Triton's language while it runs a kernel: not from two threads.
    ["reference", "chunked", pytest.param("triton", marks=pytest.mark.gpu)],
)
def test_two_threads_at_once(backend):
    seeds = list(range(16))
    alone = [results_of(seed, backend) for seed in seeds]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(functools.partial(results_of, backend=backend), seeds))
    for one, other in zip(alone, together, strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name


def test_error_deferred_by_another_thread_is_raised():
    inputs, _ = with_bad_label(V)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(evaluate, inputs, "chunked").result()
    with pytest.raises(ValueError, match="an earlier call"):
        rlhf_losses.check()


def current_allocator():
    from triton.runtime import _allocation

    held = _allocation._allocator
    return held.get() if hasattr(held, "get") else held


def test_triton_allocator_is_left_as_found():
    before = current_allocator()
    results_of(0, "triton")
    assert current_allocator() is before


@pytest.mark.gpu
def test_triton_from_a_fresh_thread():
    want = results_of(0, "triton")
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(current_allocator).result()
        got = pool.submit(results_of, 0, "triton").result()
        assert pool.submit(current_allocator).result() is before
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_numbers_whose_reciprocal_leaves_fp32_are_refused(backend):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    for options in (
        {"temperature": 1e-40},
        {"temperature": torch.tensor([1.0, 1e-42, 1.0], device=DEVICE)},
        {"softcap": 1e300},
        {"logit_scale": 1e300},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected .*finite"):
            linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, backend=backend, **options)


def test_temperature_with_gradient_is_refused(backend):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    temperature = torch.ones(3, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match=r"temperature: expected .* without gradient.*detach"):
        linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, temperature=temperature, backend=backend)


def test_outputs_may_come_from_an_iterator(backend):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    stats = linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, outputs=iter(("entropy",)), backend=backend)
    assert stats.entropy is not None
    assert stats.log_probs is None


def test_results_without_any_token_can_be_written_to(backend):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    nobody = torch.zeros(3, device=DEVICE)
    stats = linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, mask=nobody, backend=backend)
    stats.log_probs.add_(1)
    assert stats.log_probs.tolist() == [1, 1, 1]
    assert stats.entropy.tolist() == [0, 0, 0]


def test_position_in_an_error_counts_masked_tokens_too(backend):
    inputs = random_inputs((4,), 129, 16, DEVICE)
    labels = torch.tensor([1, 2, 129, 3], device=DEVICE)
    mask = torch.tensor([0, 1, 1, 1], device=DEVICE)
    with pytest.raises(ValueError, match="got 129 at token 2"):
        linear_log_probs(inputs.hidden, inputs.weight, labels, mask=mask, validate="sync", backend=backend)
