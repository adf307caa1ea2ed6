"""The rule of comparison itself: what it must refuse, it refuses."""

import pytest
import torch
from cases import random_inputs
from helpers import DEVICE, assert_close_to_truth, errors, evaluate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def d_weight(dtype, backend, as_dtype):
    inputs = random_inputs((40,), 257, 16, DEVICE).to(dtype).to(as_dtype)
    upstream = inputs.upstream(("log_probs", "entropy"))
    return evaluate(inputs, backend, upstream=upstream, wrt=("weight",))["d_weight"]


@pytest.fixture(params=DTYPES, ids=str)
def gradient(request):
    """(got, truth, low, dtype) of a gradient of the head, got from the chunked back end."""
    dtype = request.param
    return (
        d_weight(dtype, "chunked", dtype),
        d_weight(dtype, "reference", torch.float64),
        d_weight(dtype, "reference", dtype),
        dtype,
    )


def swap_rows(x):
    return x[[1, 0, *range(2, len(x))]]


def test_right_gradient_is_accepted(gradient):
    assert_close_to_truth(*gradient)


@pytest.mark.parametrize(
    "spoil",
    [
        torch.zeros_like,
        lambda x: x * 1.25,
        lambda x: x * 0.95,
        swap_rows,
        torch.neg,
        lambda x: torch.where(x == x.max(), float("nan"), x),
        lambda x: torch.where(x == x.max(), 0, x),
    ],
    ids=["all-zero", "times-1.25", "times-0.95", "two-rows-swapped", "negated", "one-nan", "largest-lost"],
)
def test_wrong_gradient_is_refused(gradient, spoil):
    got, truth, low, dtype = gradient
    with pytest.raises(AssertionError, match="error"):
        assert_close_to_truth(spoil(got), truth, low, dtype)


def test_bound_that_says_nothing_is_refused(gradient):
    got, truth, _, dtype = gradient
    with pytest.raises(AssertionError, match="says nothing"):
        assert_close_to_truth(got, truth, (truth * 1.1).to(dtype), dtype)


def test_truth_of_zeros_is_refused(gradient):
    got, truth, low, dtype = gradient
    with pytest.raises(AssertionError, match="all zero"):
        assert_close_to_truth(got, truth * 0, low, dtype)


def test_other_shape_is_refused(gradient):
    got, truth, low, dtype = gradient
    with pytest.raises(AssertionError):
        assert_close_to_truth(got[:1], truth, low, dtype)


def test_errors_are_relative_to_truth():
    truth = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert errors(torch.tensor([3.0, -3.0]), truth) == {"max": 0.25, "rms": pytest.approx((1 / 25) ** 0.5)}


def test_unwritten_memory_shows():
    assert torch.empty(3).isnan().all()
    assert torch.ones(2).new_empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3)).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
