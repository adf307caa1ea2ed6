"""The device, the evaluation of a back end, and the one rule by which two results are compared.

truth is the reference in fp64, low the reference in the tested type, on the same inputs. An error is taken relative to
truth, as a maximum and as a root mean square,

    err(x) = max|x - truth| / max|truth|        and        sqrt(mean (x - truth)^2) / sqrt(mean truth^2),

and both must be at most 2 * err(low) + eps(type), a bound that must itself stay below 0.1: all zeros have error 1.
No test brings a tolerance of its own. The error of one evaluation can be small by chance, in fp32 above all, where
eps leaves no room: ``assert_right`` takes the largest of five, which sum the same terms in different orders.
(Of three, one in thirty draws of inputs failed the sum of squared probabilities without any fault.)
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import Inputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_losses import linear_log_probs, log_probs_from_logits

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# Triton's interpreter multiplies the bits of bf16 numbers: there fp16 stands for both 16-bit types.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TRITON_DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE.type == "cuda" else ())
# A GPU has kernels of its own for 16 bits; the interpreter runs the same ones, and fp32 leaves the least room.
DTYPE = HALF if DEVICE.type == "cuda" else torch.float32
FLOAT_OUTPUTS = ("log_probs", "entropy", "logsumexp", "sum_p_squared")
PARAMETERS = ("hidden", "weight", "bias")


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return TRITON_DTYPES if backend == "triton" else (torch.float32, torch.float16, torch.bfloat16)


def literal(value, **tolerance):
    """A value given with six decimals: half a unit of the last, and a few roundings of fp32, are no difference."""
    return pytest.approx(value, **({"abs": 2e-6, "rel": 3e-7} | tolerance))


def errors(x: Tensor, truth: Tensor) -> dict[str, float]:
    gap, truth = x.double() - truth, truth.double()
    return {
        "max": (gap.abs().max() / truth.abs().max()).item(),
        "rms": (gap.square().mean().sqrt() / truth.square().mean().sqrt()).item(),
    }


def assert_close_to_truth(
    got: Tensor, truth: Tensor, low: Tensor | Sequence[Tensor], dtype: torch.dtype, name: str = "result"
) -> None:
    """The rule at the head of this file; ``low`` is one result or several."""
    lows = [low] if isinstance(low, Tensor) else low
    assert all(x.shape == truth.shape for x in (got, *lows)), name
    assert truth.dtype == torch.float64, name
    assert truth.isfinite().all(), f"{name}: truth is not finite"
    assert truth.count_nonzero() > 0, f"{name}: truth is all zero, any bound relative to it is void"
    for form, error in errors(got, truth).items():
        bound = 2 * max(errors(x, truth)[form] for x in lows) + torch.finfo(dtype).eps
        assert bound < 0.1, f"{name}: a {form} bound of {bound:.3g} says nothing"
        assert error <= bound, f"{name}: {form} error {error:.3g}, at most {bound:.3g} allowed"


def evaluate(
    inputs: Inputs,
    backend: str,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    upstream: dict[str, Tensor] | None = None,
    wrt: tuple[str, ...] = (),
    **options,
) -> dict[str, Tensor]:
    """The outputs asked for, and "d_hidden", "d_weight", "d_bias" for the parameters in ``wrt``.

    ``upstream`` holds the gradient of each output that the loss uses.
    """
    parameters = {
        name: None if x is None else x.detach().requires_grad_(name in wrt)
        for name, x in zip(PARAMETERS, (inputs.hidden, inputs.weight, inputs.bias), strict=True)
    }
    stats = linear_log_probs(
        parameters["hidden"],
        parameters["weight"],
        inputs.labels,
        bias=parameters["bias"],
        outputs=outputs,
        backend=backend,
        **inputs.options | options,
    )
    return _with_gradients(stats, outputs, upstream, {name: parameters[name] for name in wrt})


def evaluate_logits(
    inputs: Inputs,
    backend: str,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    upstream: dict[str, Tensor] | None = None,
    **options,
) -> dict[str, Tensor]:
    """As ``evaluate``, of inputs whose ``hidden`` are the logits; "d_logits" where there is an upstream gradient."""
    logits = inputs.hidden.detach().requires_grad_(upstream is not None)
    # An in-place gradient may not go to a leaf's own memory as long as the test needs its values.
    held = logits.clone() if options.get("inplace_backward") else logits
    stats = log_probs_from_logits(held, inputs.labels, outputs=outputs, backend=backend, **inputs.options | options)
    return _with_gradients(stats, outputs, upstream, {"logits": logits})


def _with_gradients(stats, outputs, upstream, parameters) -> dict[str, Tensor]:
    results = {name: getattr(stats, name) for name in outputs}
    if upstream:
        used = [results[name] for name in upstream]
        given = [gradient.to(x) for gradient, x in zip(upstream.values(), used, strict=True)]
        gradients = torch.autograd.grad(used, list(parameters.values()), given)
        results |= {f"d_{name}": gradient for name, gradient in zip(parameters, gradients, strict=True)}
    return {name: x.detach() for name, x in results.items()}


def _flipped_vocabulary(inputs: Inputs, of_logits: bool) -> Inputs:
    """The same distributions with the entries in reverse order."""
    vocab = inputs.hidden.shape[-1] if of_logits else len(inputs.weight)
    inside = (inputs.labels >= 0) & (inputs.labels < vocab)
    labels = torch.where(inside, vocab - 1 - inputs.labels, inputs.labels)
    if of_logits:
        return replace(inputs, hidden=inputs.hidden.flip(-1), labels=labels)
    bias = None if inputs.bias is None else inputs.bias.flip(0)
    return replace(inputs, weight=inputs.weight.flip(0), bias=bias, labels=labels)


def lows(inputs: Inputs, evaluate: Callable, **options) -> list[dict[str, Tensor]]:
    """The reference in the inputs' type: as they are, with the vocabulary reversed, and in other orders of H."""
    of_logits = evaluate is evaluate_logits
    results = [evaluate(inputs, "reference", **options)]
    flipped = evaluate(_flipped_vocabulary(inputs, of_logits), "reference", **options)
    for name, axis in {"d_weight": 0, "d_bias": 0, "d_logits": -1}.items():
        if name in flipped:
            flipped[name] = flipped[name].flip(axis)
    results.append(flipped)
    if not of_logits:
        depth = inputs.hidden.shape[-1]
        generator = torch.Generator().manual_seed(0)
        orders = [torch.arange(depth).flip(0)] + [torch.randperm(depth, generator=generator) for _ in range(2)]
        for order in (order.to(inputs.hidden.device) for order in orders):
            mixed = replace(inputs, hidden=inputs.hidden[..., order], weight=inputs.weight[..., order])
            result = evaluate(mixed, "reference", **options)
            for name in {"d_hidden", "d_weight"} & result.keys():
                result[name] = result[name][..., order.argsort()]
            results.append(result)
    return results


def assert_right(inputs: Inputs, backend: str, dtype: torch.dtype, evaluate: Callable = evaluate, **options) -> None:
    """What ``backend`` computes in ``dtype`` against the reference, output by output and gradient by gradient."""
    inputs = inputs.to(dtype)
    got = evaluate(inputs, backend, **options)
    for name in ("workspace_bytes", "cache_bytes", "inplace_backward"):
        options.pop(name, None)
    truth = evaluate(inputs.to(torch.float64), "reference", **options)
    low = lows(inputs, evaluate, **options)
    assert got.keys() == truth.keys()
    for name in got:
        if name == "argmax":
            assert torch.equal(got[name], truth[name]), name
        else:
            assert_close_to_truth(got[name], truth[name], [x[name] for x in low], dtype, name)


def logits_as_head(logits: list[list[float]] | Tensor, dtype: torch.dtype, depth: int = 16) -> Inputs:
    """Inputs whose raw products are exactly ``logits`` [N, V]: one-hot hidden states; the labels are 0."""
    logits = torch.as_tensor(logits, dtype=torch.float64).to(DEVICE, dtype)
    rows, vocab = logits.shape
    hidden = torch.eye(rows, depth, dtype=dtype, device=DEVICE)
    weight = torch.zeros(vocab, depth, dtype=dtype, device=DEVICE)
    weight[:, :rows] = logits.T
    return Inputs(hidden, weight, torch.zeros(rows, dtype=torch.int64, device=DEVICE))


def even_head(vocab: int, value: float, dtype: torch.dtype, labels: list[int], depth: int = 8) -> Inputs:
    """Hidden states of ones, and a weight that makes every logit ``value``: padding of zeros would stand out."""
    hidden = torch.ones(len(labels), depth, dtype=dtype, device=DEVICE)
    weight = torch.full((vocab, depth), value / depth, dtype=dtype, device=DEVICE)
    return Inputs(hidden, weight, torch.tensor(labels, device=DEVICE))


class Allocations(TorchDispatchMode):
    """Records the number of elements of every new storage that an operation inside of the block makes."""

    def __init__(self, *known: Tensor):
        super().__init__()
        # The tensors are kept, so that no address is used twice.
        self.kept = list(known)
        self.seen = {x.untyped_storage().data_ptr() for x in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.seen:
                self.kept.append(x)
                self.seen.add(x.untyped_storage().data_ptr())
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return result


def python(code: str, cwd: Path = ROOT, timeout: float = 120, **environment: str) -> str:
    """Standard output of a fresh interpreter in ``cwd``, which is on its path; fails with its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(path: Path, *args: str | Path, ranks: int = 1, timeout: float = 280, **environment: str) -> str:
    """Standard output of a script on one rank, or on several that torchrun starts; fails with its errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", port] if ranks > 1 else []
    given = os.environ.get("PYTHONPATH")
    more = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(path.parent), *([given] if given else [])]),
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launch, str(path), *map(str, args)],
            env=os.environ | more | environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
