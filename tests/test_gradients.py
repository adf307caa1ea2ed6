"""Gradients of every subset of inputs from every subset of outputs, and the work that is left undone."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import (
    DEVICE,
    DTYPE,
    FLOAT_OUTPUTS,
    HALF,
    PARAMETERS,
    TRITON_DTYPES,
    Allocations,
    assert_close_to_truth,
    assert_right,
    dtypes_of,
    evaluate,
)

from rlhf_losses import linear_log_probs
from rlhf_losses.kernels import call, gemm
from rlhf_losses.kernels.tiles import Tile


def subsets(names):
    return [chosen for count in range(1, len(names) + 1) for chosen in combinations(names, count)]


def with_bias(inputs):
    return FEATURES["bias"](inputs)


def ids(names):
    return "+".join(names)


@pytest.mark.parametrize("wrt", subsets(PARAMETERS), ids=ids)
@pytest.mark.parametrize("outputs", subsets(FLOAT_OUTPUTS), ids=ids)
def test_partial_gradients_in_fp64(outputs, wrt):
    # One row of a chunk and 7 tokens: several chunks.
    inputs = with_bias(random_inputs((7,), 33, 9, DEVICE)).to(torch.float64)
    options = {"outputs": FLOAT_OUTPUTS, "upstream": inputs.upstream(outputs), "wrt": wrt}
    got = evaluate(inputs, "chunked", workspace_bytes=6 * 33 * 8 * 2, **options)
    want = evaluate(inputs, "reference", **options)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("wrt", subsets(PARAMETERS), ids=ids)
@pytest.mark.parametrize("outputs", subsets(FLOAT_OUTPUTS), ids=ids)
def test_partial_gradients(outputs, wrt):
    inputs = with_bias(random_inputs((5,), 129, 16, DEVICE))
    # Only the outputs that the loss uses are asked for: what the others would need is compiled away.
    assert_right(inputs, "triton", DTYPE, outputs=outputs, upstream=inputs.upstream(outputs), wrt=wrt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), FLOAT_OUTPUTS], ids=ids)
def test_every_type(outputs, dtype, fused):
    if dtype not in dtypes_of(fused):
        dtype = HALF
    inputs = with_bias(random_inputs((40,), 300, 24, DEVICE))
    assert_right(inputs, fused, dtype, outputs=outputs, upstream=inputs.upstream(outputs), wrt=PARAMETERS)


# V: one below and one above a tile, and not a multiple of four; N: one row, one block, one more than a block and 1;
# H: below one step of the product, not a multiple of eight, a whole step, more than one.
@pytest.mark.parametrize("vocab", [127, 129, 255, 257, 1023, 1025])
@pytest.mark.parametrize(("rows", "depth"), [(1, 17), (5, 8), (5, 72), (130, 64)])
def test_odd_sizes(rows, depth, vocab, fused):
    inputs = random_inputs((rows,), vocab, depth, DEVICE)
    upstream = inputs.upstream(("log_probs", "entropy"))
    assert_right(inputs, fused, HALF, upstream=upstream, wrt=("hidden", "weight"))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", TRITON_DTYPES[:2], ids=str)
def test_every_logit_feature(feature, dtype, backend):
    inputs = FEATURES[feature](random_inputs((3, 4), 300, 16, DEVICE))
    wrt = PARAMETERS if inputs.bias is not None else PARAMETERS[:2]
    assert_right(
        inputs,
        backend,
        dtype,
        outputs=(*FLOAT_OUTPUTS, "argmax"),
        upstream=inputs.upstream(FLOAT_OUTPUTS),
        wrt=wrt,
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature):
    inputs = FEATURES[feature](random_inputs((2, 3), 11, 5, DEVICE)).to(torch.float64)
    given = [inputs.hidden, inputs.weight] + ([] if inputs.bias is None else [inputs.bias])

    def numbers(hidden, weight, bias=None):
        stats = linear_log_probs(
            hidden, weight, inputs.labels, bias=bias, outputs=FLOAT_OUTPUTS, backend="chunked", **inputs.options
        )
        return stats[:4]

    assert torch.autograd.gradcheck(numbers, [x.requires_grad_() for x in given])


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("vocab", [129, 256, 257])
def test_first_and_last_entry_as_label(where, vocab, fused):
    inputs = random_inputs((4,), vocab, 16, DEVICE)
    inputs = replace(inputs, labels=torch.full_like(inputs.labels, 0 if where == "first" else vocab - 1))
    upstream = inputs.upstream(("log_probs",))
    assert_right(inputs, fused, DTYPE, upstream=upstream, wrt=("hidden", "weight"))


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_sums_carry_on_from_tile_to_tile(order, triton_path, choose_tile):
    # Several tiles in each stretch of the vocabulary, and a maximum that grows, falls, or does both along the way.
    vocab = 17000
    if DEVICE.type == "cpu":
        vocab = 1025
        choose_tile(Tile(16, 128, 16, warps=4, stages=1, splits=2))
    inputs = random_inputs((8,), vocab, 16, DEVICE)
    size = torch.linspace(0.1, 3.0, vocab, device=DEVICE)
    size = {"rising": size, "falling": size.flip(0), "mixed": size.roll(vocab // 3)}[order]
    inputs = replace(inputs, weight=inputs.weight * size[:, None])
    outputs = (*FLOAT_OUTPUTS, "argmax")
    upstream = inputs.upstream(FLOAT_OUTPUTS)
    assert_right(inputs, triton_path, DTYPE, outputs=outputs, upstream=upstream, wrt=("hidden", "weight"))


@pytest.mark.parametrize("workspace_bytes", [1, 50_000, 200_000, None])
def test_workspace_changes_nothing(workspace_bytes, fused):
    # From one token, or one tile of the vocabulary, at a time to all at once.
    inputs = FEATURES["all"](random_inputs((3, 50), 1025, 16, DEVICE))
    upstream = inputs.upstream(("log_probs", "entropy"))
    assert_right(inputs, fused, HALF, upstream=upstream, wrt=PARAMETERS, workspace_bytes=workspace_bytes)


def test_upstream_gradient_of_zero_leaves_a_token_out(fused):
    inputs = random_inputs((3, 4), 300, 16, DEVICE)
    upstream = inputs.upstream(("log_probs", "entropy"))
    keep = torch.arange(12, device=DEVICE).reshape(3, 4) % 3 == 0
    upstream = {name: g * keep for name, g in upstream.items()}
    options = {"upstream": upstream, "wrt": ("hidden", "weight")}
    temperature = torch.rand(3, 4, device=DEVICE) + 0.5
    inputs = inputs.with_options(temperature=temperature)
    assert_right(inputs, fused, DTYPE, **options)
    assert evaluate(inputs, fused, **options)["d_hidden"][~keep].count_nonzero() == 0
    # One of the two gradients is enough to keep a token.
    upstream["entropy"] = inputs.upstream(("entropy",))["entropy"]
    assert_right(inputs, fused, DTYPE, **options)


def test_upstream_gradient_of_zero_everywhere(fused):
    inputs = with_bias(random_inputs((3, 4), 129, 16, DEVICE))
    zeros = {"log_probs": torch.zeros(3, 4, device=DEVICE)}
    got = evaluate(inputs, fused, upstream=zeros, wrt=PARAMETERS)
    for name in PARAMETERS:
        assert torch.equal(got[f"d_{name}"], torch.zeros_like(getattr(inputs, name)))


@pytest.fixture
def coefficients(monkeypatch):
    """The ``Coefficients`` and ``needs`` that each backward hands to its back end."""
    handed = []
    real = call.operations

    def recording(name):
        operations = real(name)

        def linear_backward(*args, **kwargs):
            handed.extend(x for x in args if hasattr(x, "plogp"))
            return operations.linear_backward(*args, **kwargs)

        return operations._replace(linear_backward=linear_backward)

    monkeypatch.setattr(call, "operations", recording)
    return handed


@pytest.mark.parametrize("used", subsets(("log_probs", "entropy", "sum_p_squared")), ids=ids)
def test_no_coefficient_for_what_nothing_asks_for(used, fused, coefficients):
    # All outputs are computed, the loss uses some.
    inputs = random_inputs((5,), 129, 16, DEVICE)
    evaluate(inputs, fused, FLOAT_OUTPUTS, inputs.upstream(used), ("hidden",))
    (handed,) = coefficients
    assert (handed.y is not None) == ("log_probs" in used)
    assert (handed.plogp is not None) == ("entropy" in used)
    assert (handed.pp is not None) == ("sum_p_squared" in used)


def allocated_in_backward(fused, wrt):
    # N * H and V * H are sizes that nothing else has. (In 16 bits the chunked back end on a CPU widens the weight.)
    inputs = random_inputs((6,), 300, 40, DEVICE).to(DTYPE)
    hidden = inputs.hidden.requires_grad_("hidden" in wrt)
    weight = inputs.weight.requires_grad_("weight" in wrt)
    stats = linear_log_probs(hidden, weight, inputs.labels, backend=fused)
    with Allocations(hidden, weight) as allocated:
        (stats.log_probs.sum() + stats.entropy.square().sum()).backward()
    assert (hidden.grad is None) == ("hidden" not in wrt)
    assert (weight.grad is None) == ("weight" not in wrt)
    return allocated.sizes


def test_h5_frozen_head_makes_no_buffer_of_its_size(fused):
    assert 300 * 40 in allocated_in_backward(fused, ("hidden", "weight"))
    assert 300 * 40 not in allocated_in_backward(fused, ("hidden",))


def test_frozen_hidden_states_get_no_buffer(fused):
    assert 6 * 40 in allocated_in_backward(fused, ("hidden", "weight"))
    assert 6 * 40 not in allocated_in_backward(fused, ("weight",))


def test_second_backward_through_a_kept_graph(fused):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    stats = linear_log_probs(hidden, weight, inputs.labels, backend=fused)
    first = torch.autograd.grad(stats.log_probs.sum(), (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(stats.log_probs.sum(), (hidden, weight), retain_graph=True)
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)
    # Output by output, the sum of what one call for both gives.
    both = evaluate(
        inputs, fused, upstream={n: torch.ones(5, device=DEVICE) for n in ("log_probs", "entropy")}, wrt=("weight",)
    )
    entropy = torch.autograd.grad(stats.entropy.sum(), weight)[0]
    torch.testing.assert_close(first[1] + entropy, both["d_weight"], rtol=1e-4, atol=1e-5)


def test_gradient_accumulates_over_calls(fused):
    inputs = random_inputs((8,), 129, 16, DEVICE)

    def gradient(inputs, backend, parts):
        weight = inputs.weight.detach().clone().requires_grad_()
        for part in parts:
            linear_log_probs(
                inputs.hidden[part], weight, inputs.labels[part], backend=backend
            ).log_probs.sum().backward()
        return weight.grad

    whole = [slice(0, 8)]
    truth = gradient(inputs.to(torch.float64), "reference", whole)
    low = gradient(inputs, "reference", whole)
    assert_close_to_truth(gradient(inputs, fused, [slice(0, 3), slice(3, 8)]), truth, low, torch.float32)


def test_no_second_derivative_is_claimed(fused):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    hidden = inputs.hidden.requires_grad_()
    stats = linear_log_probs(hidden, inputs.weight, inputs.labels, backend=fused)
    # Whether or not the upstream gradient has a graph: a penalty on this gradient must not vanish beside another loss.
    for loss in (stats.entropy.square().sum(), stats.log_probs.sum()):
        with pytest.raises(RuntimeError, match=r"expected .* got create_graph=True; .*backend='reference'"):
            torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("changed", ["labels", "temperature"])
def test_tokens_changed_before_the_backward_are_noticed(changed, fused):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    given = {"labels": inputs.labels, "temperature": torch.ones(3, device=DEVICE)}
    stats = linear_log_probs(
        inputs.hidden.requires_grad_(), inputs.weight, given["labels"], temperature=given["temperature"], backend=fused
    )
    given[changed].fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.log_probs.sum().backward()


@pytest.mark.parametrize("cap", [30.0, 1e4, 1e7])
def test_softcap_far_above_the_logits_costs_no_digits(cap, fused):
    inputs = random_inputs((3,), 129, 16, DEVICE).with_options(softcap=cap)
    assert_right(inputs, fused, torch.float32, upstream=inputs.upstream(("log_probs", "entropy")), wrt=("hidden",))


def test_argmax_carries_no_gradient(backend):
    inputs = random_inputs((3,), 129, 16, DEVICE)
    hidden = inputs.hidden.requires_grad_()
    argmax = linear_log_probs(hidden, inputs.weight, inputs.labels, outputs=("argmax",), backend=backend).argmax
    assert argmax.dtype == torch.int64
    assert not argmax.requires_grad
    assert torch.equal(argmax, (inputs.hidden @ inputs.weight.T).argmax(-1))


def test_argmax_of_a_tie_is_the_lowest_index(backend):
    # The first and the last of three tiles, and two neighbours.
    logits = torch.zeros(1, 16, device=DEVICE)
    logits[0, 0] = 1
    weight = torch.zeros(600, 16, device=DEVICE)
    weight[[70, 71, 599], 0] = 5
    labels = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert linear_log_probs(logits, weight, labels, outputs=("argmax",), backend=backend).argmax.item() == 70


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 150])
@pytest.mark.parametrize("bytes_", [1, 100, 2**20])
def test_a_matrix_is_narrowed_in_its_own_memory(rows, bytes_, monkeypatch):
    monkeypatch.setattr(gemm, "_NARROWING_BYTES", bytes_)
    wide = torch.randn(rows, 5, device=DEVICE)
    want, memory = (2 * wide).to(HALF), wide.data_ptr()
    got = gemm.narrowed(wide, HALF, lambda out, x: out.copy_(2 * x))
    assert got.dtype == HALF
    assert torch.equal(got, want)
    # What fits the buffer is the buffer.
    assert (got.data_ptr() == memory) == (rows > max(1, bytes_ // 10))


@pytest.mark.parametrize("rows", [1, 8, 21])
def test_products_with_narrow_heads_keep_their_rows_aligned(rows):
    a, b = torch.randn(rows, 40, device=DEVICE).to(HALF), torch.randn(40, 24, device=DEVICE).to(HALF)
    got = gemm.narrow_product(a, b, HALF)
    assert got.shape == (rows, 24)
    assert got.stride(1) * got.element_size() % 16 == 0
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=2**-8, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 21])
def test_products_with_narrow_heads_add_up_in_place(rows):
    a, b = torch.randn(rows, 40, device=DEVICE).to(HALF), torch.randn(40, 24, device=DEVICE).to(HALF)
    first = gemm.added_tall_product(None, a, b)
    memory = first.data_ptr()
    got = gemm.added_tall_product(first, a, b)
    assert got.data_ptr() == memory
    assert got.dtype == torch.float32
    assert got.stride(1) * got.element_size() % 16 == 0
    torch.testing.assert_close(got.double(), 2 * (a.double() @ b.double()), rtol=1e-5, atol=1e-5)
