"""The same bits from run to run, and what a full-size call costs in memory; compilations are counted here too."""

import json
import sys

import pytest
import torch
from cases import FEATURES, random_inputs
from helpers import (
    DEVICE,
    FLOAT_OUTPUTS,
    HALF,
    PARAMETERS,
    assert_close_to_truth,
    evaluate,
    evaluate_logits,
    python,
)

from rlhf_losses import linear_log_probs

FULL = {"vocab": 151936, "depth": 4096}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_two_calls_give_the_same_bits(dtype, fused):
    inputs = FEATURES["all"](random_inputs((3, 60), 700, 24, DEVICE)).to(dtype)
    options = {"upstream": inputs.upstream(FLOAT_OUTPUTS), "wrt": PARAMETERS, "workspace_bytes": 200_000}
    first = evaluate(inputs, fused, (*FLOAT_OUTPUTS, "argmax"), **options)
    again = evaluate(inputs, fused, (*FLOAT_OUTPUTS, "argmax"), **options)
    for name in first:
        assert torch.equal(first[name], again[name]), name


def test_two_calls_on_logits_give_the_same_bits(fused):
    inputs = random_inputs((30,), 700, 700, DEVICE)
    first = evaluate_logits(inputs, fused, FLOAT_OUTPUTS, inputs.upstream(FLOAT_OUTPUTS))
    again = evaluate_logits(inputs, fused, FLOAT_OUTPUTS, inputs.upstream(FLOAT_OUTPUTS))
    for name in first:
        assert torch.equal(first[name], again[name]), name


def full_size(rows):
    """bf16 inputs made on the device; logits of standard deviation 2."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": DEVICE, "generator": generator}
    hidden = torch.randn(rows, FULL["depth"], **options)
    weight = torch.randn(FULL["vocab"], FULL["depth"], **options).mul_(2 / FULL["depth"] ** 0.5)
    labels = torch.randint(FULL["vocab"], (rows,), device=DEVICE, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.gpu
def test_full_size_gives_the_same_bits():
    hidden, weight, labels = full_size(16384)

    def run():
        stats = linear_log_probs(hidden, weight, labels, backend="triton")
        gradients = torch.autograd.grad(stats.log_probs.sum() + 0.1 * stats.entropy.mean(), (hidden, weight))
        return stats.log_probs.detach(), stats.entropy.detach(), *gradients

    for first, again in zip(run(), run(), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, again)


@pytest.mark.gpu
def test_full_size_is_right():
    # Truth in fp64 from the chunked back end, which test_gradients holds to the reference by 1e-12.
    hidden, weight, labels = full_size(2048)
    upstream = torch.randn(2, 2048, device=DEVICE)

    def run(backend, dtype):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        stats = linear_log_probs(h, w, labels, backend=backend)
        loss = (upstream[0] * stats.log_probs).sum() + (upstream[1] * stats.entropy).sum()
        return (stats.log_probs.detach(), stats.entropy.detach(), *torch.autograd.grad(loss, (h, w)))

    truth = run("chunked", torch.float64)
    low = run("reference", torch.bfloat16)
    for name, got, t, l in zip(
        ("log_probs", "entropy", "d_hidden", "d_weight"), run("triton", torch.bfloat16), truth, low, strict=True
    ):
        assert_close_to_truth(got, t, l, torch.bfloat16, name)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4096, 16384, 65536])
def test_memory_beside_the_results_is_bounded(rows):
    # The gradients, d_hidden once in fp32, the workspace of 512 MiB, and small change: never N x V.
    hidden, weight, labels = full_size(rows)

    def run():
        stats = linear_log_probs(hidden, weight, labels, backend="triton")
        return torch.autograd.grad(stats.log_probs.sum() + 0.1 * stats.entropy.sum(), (hidden, weight))

    # The first call brings cuBLAS's workspace along.
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    extra = torch.cuda.max_memory_allocated() - before
    d_weight = weight.numel() * weight.element_size()
    assert extra <= d_weight + 4 * hidden.numel() + 640 * 2**20, f"{extra / 2**20:.0f} MiB"


@pytest.mark.gpu
def test_short_products_do_not_hang():
    # At a small H a tile has fewer stages of operands than are kept on their way, and the halves of a block, which wait
    # for each other, drift whole tiles apart. In a process of its own, since what hangs can't be stopped from within.
    python(
        """
import torch
from rlhf_losses import linear_log_probs

for _ in range(40):
    for depth in (16, 64, 128, 192, 256, 320):
        hidden = torch.randn(4096, depth, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.randn(32000, depth, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        labels = torch.randint(32000, (4096,), device="cuda")
        stats = linear_log_probs(hidden, weight, labels, backend="triton", workspace_bytes=2**25)
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
    torch.cuda.synchronize()
""",
        timeout=100,
    )


def compiled_kernels() -> int:
    """Compiled versions of this package's kernels in this process."""
    from triton.runtime import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("rlhf_losses.kernels")]
    functions = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(caches[0]) for f in functions.values() for caches in f.device_caches.values())


def score(rows, workspace_bytes=None, logits=False):
    inputs = random_inputs((rows,), 4000, 64, DEVICE).to(HALF)
    upstream = inputs.upstream(("log_probs", "entropy"))
    if logits:
        inputs = random_inputs((rows,), 4000, 4000, DEVICE).to(HALF)
        return evaluate_logits(inputs, "triton", upstream=upstream)
    return evaluate(inputs, "triton", upstream=upstream, wrt=("hidden", "weight"), workspace_bytes=workspace_bytes)


@pytest.mark.gpu
def test_s11_token_counts_compile_nothing():
    score(1000)
    before = compiled_kernels()
    assert before > 0
    for rows in (*range(1000, 1011), 1, 2, 16, 17, 128, 129, 4096):
        score(rows)
        assert compiled_kernels() == before, f"{rows} tokens"


@pytest.mark.gpu
def test_s11_token_counts_compile_nothing_for_logits():
    score(1000, logits=True)
    before = compiled_kernels()
    for rows in (*range(1000, 1011), 1, 16, 17):
        score(rows, logits=True)
        assert compiled_kernels() == before, f"{rows} tokens"


@pytest.mark.gpu
def test_s11_stretches_of_the_vocabulary_compile_nothing():
    # Token counts that cut the 16 tiles of the vocabulary into one stretch, into several, and into single tiles.
    workspace = 16 * 256 * 2 * 1000
    score(1000, workspace)
    before = compiled_kernels()
    for rows in (1000, 1001, 1400, 2000, 4000, 6000, 16000):
        score(rows, workspace)
        assert compiled_kernels() == before, f"{rows} tokens"


@pytest.mark.gpu
def test_values_compile_nothing():
    # Temperature, cap, scale and ignore_index are values, not versions of a kernel.
    inputs = random_inputs((100,), 4000, 64, DEVICE).to(HALF)

    def run(**options):
        evaluate(inputs, "triton", upstream=inputs.upstream(("log_probs",)), wrt=("hidden",), **options)

    run(temperature=0.7, softcap=30.0, logit_scale=0.5)
    before = compiled_kernels()
    run(temperature=0.9, softcap=50, logit_scale=2, ignore_index=0)
    run(temperature=2, softcap=1.0, logit_scale=1.0, ignore_index=16)
    assert compiled_kernels() == before


@pytest.mark.gpu
def test_s11_first_call_on_an_empty_cache_takes_less_than_10_seconds(tmp_path):
    took = json.loads(
        python(
            """
import json, time, torch
from rlhf_losses import linear_log_probs

hidden = torch.randn(1000, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
weight = torch.randn(32000, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
labels = torch.randint(32000, (1000,), device="cuda")
(hidden[:8] @ weight[:8].T).sum().backward()
torch.cuda.synchronize()
start = time.perf_counter()
stats = linear_log_probs(hidden, weight, labels, backend="triton")
(stats.log_probs.sum() + stats.entropy.sum()).backward()
torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - start))
""",
            TRITON_CACHE_DIR=str(tmp_path),
        )
    )
    assert any(tmp_path.iterdir()), "nothing was compiled"
    assert took < 10
