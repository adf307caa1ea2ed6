"""``cache_bytes``: rows whose exponentials wait for the backward, which then multiplies no logits of them again."""

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import DEVICE, DTYPE, FLOAT_OUTPUTS, PARAMETERS, Allocations, assert_right, dtypes_of

from rlhf_losses import linear_log_probs
from rlhf_losses.kernels import call
from rlhf_losses.kernels.backends import operations

# Several steps of the product: where one is all, Triton adds the bias inside of it in one version of a kernel and after
# it in another, and forward and backward of fp32 differ in their last bit.
ROWS, VOCAB, DEPTH = 150, 300, 72
# Of the rows: none, some of the first block, more than it, all.
SHARES = [0.0, 0.3, 0.9, 1.0]


def bytes_for(share, inputs, backend):
    return int(share * inputs.labels.numel()) * operations(backend).kept_row_bytes(inputs.weight)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_are_right(feature, share, fused):
    inputs = FEATURES[feature](random_inputs((3, 50), VOCAB, DEPTH, DEVICE))
    wrt = tuple(name for name in PARAMETERS if getattr(inputs, name) is not None)
    for dtype in dtypes_of(fused):
        cache = bytes_for(share, inputs.to(dtype), fused)
        upstream = inputs.upstream(("log_probs", "entropy"))
        assert_right(inputs, fused, dtype, upstream=upstream, wrt=wrt, cache_bytes=cache)


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("used", FLOAT_OUTPUTS)
def test_every_output(used, share, fused):
    inputs = random_inputs((ROWS,), VOCAB, DEPTH, DEVICE)
    cache = bytes_for(share, inputs.to(DTYPE), fused)
    assert_right(
        inputs,
        fused,
        DTYPE,
        outputs=FLOAT_OUTPUTS,
        upstream=inputs.upstream((used,)),
        wrt=("hidden",),
        cache_bytes=cache,
    )


@pytest.mark.parametrize("workspace_bytes", [1, 2**17, None])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_rows_without_a_gradient_and_masked_ones(share, workspace_bytes, fused):
    inputs = random_inputs((ROWS,), VOCAB, DEPTH, DEVICE)
    generator = torch.Generator().manual_seed(5)
    inputs = inputs.with_options(mask=(torch.rand(ROWS, generator=generator) < 0.8).to(DEVICE))
    upstream = inputs.upstream(("log_probs", "entropy"))
    zero = (torch.rand(ROWS, generator=generator) < 0.5).to(DEVICE)
    upstream = {name: x.masked_fill(zero, 0.0) for name, x in upstream.items()}
    cache = bytes_for(share, inputs.to(DTYPE), fused)
    options = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
    assert_right(inputs, fused, DTYPE, upstream=upstream, wrt=("hidden", "weight"), cache_bytes=cache, **options)


@pytest.mark.parametrize("cache", [0.3, 1.0, "auto"])
def test_forward_bits_do_not_depend_on_it(cache, fused):
    inputs = random_inputs((ROWS,), VOCAB, DEPTH, DEVICE).to(DTYPE)
    inputs.hidden.requires_grad_()
    given = cache if cache == "auto" else bytes_for(cache, inputs, fused)
    plain, kept = (
        linear_log_probs(
            inputs.hidden, inputs.weight, inputs.labels, outputs=FLOAT_OUTPUTS, backend=fused, cache_bytes=b
        )
        for b in (0, given)
    )
    for name in FLOAT_OUTPUTS:
        assert torch.equal(getattr(plain, name), getattr(kept, name))


def test_second_backward_through_a_kept_graph(fused):
    inputs = random_inputs((ROWS,), VOCAB, DEPTH, DEVICE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    stats = linear_log_probs(hidden, weight, inputs.labels, backend=fused, cache_bytes="auto")
    first, again = (torch.autograd.grad(stats.entropy.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def kept_rows(monkeypatch):
    """How many rows each forward was told to keep."""
    rows = []
    real = call.operations

    def recording(name):
        def linear_forward(*args):
            rows.append(args[-1])
            return real(name).linear_forward(*args)

        return real(name)._replace(linear_forward=linear_forward)

    monkeypatch.setattr(call, "operations", recording)
    return rows


def test_nothing_is_kept_where_no_gradient_can_be_asked_for(fused, kept_rows):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    options = {"backend": fused, "cache_bytes": 10**9}
    linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, **options)
    with torch.no_grad():
        linear_log_probs(inputs.hidden.requires_grad_(), inputs.weight, inputs.labels, **options)
    assert kept_rows == [0, 0]
    linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, **options)
    assert kept_rows == [0, 0, 5]


@pytest.mark.parametrize("rows", [0, 1, 77, 150])
def test_memory_obeys_it(rows, fused):
    inputs = random_inputs((ROWS,), VOCAB, 8, DEVICE).to(DTYPE)
    hidden = inputs.hidden.requires_grad_()
    each = operations(fused).kept_row_bytes(inputs.weight)

    def new_bytes(cache_bytes):
        with Allocations(hidden, inputs.weight) as allocated:
            # Chunked: a row at a time, so that its own blocks are smaller than what is kept.
            linear_log_probs(
                hidden, inputs.weight, inputs.labels, backend=fused, cache_bytes=cache_bytes, workspace_bytes=1
            )
        return sum(x.untyped_storage().nbytes() for x in allocated.kept)

    got = new_bytes(rows * each + each - 1) - new_bytes(0)
    assert rows * each * 0.9 <= got <= rows * each * 1.1 + 64


@pytest.mark.parametrize("cache_bytes", [-1, 1.5, True, "all", None])
def test_errors(cache_bytes):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    with pytest.raises(ValueError, match=r'cache_bytes: expected an integer >= 0 or "auto", got'):
        linear_log_probs(inputs.hidden, inputs.weight, inputs.labels, cache_bytes=cache_bytes)
