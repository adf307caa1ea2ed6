"""Shapes, labels, strides, types, heads and devices that broke programs of this kind: cases s1 to s15, h3, h6 to h8."""

import sys
from dataclasses import replace

import pytest
import torch
from cases import random_inputs
from helpers import (
    DEVICE,
    DTYPE,
    FLOAT_OUTPUTS,
    HALF,
    Allocations,
    assert_close_to_truth,
    assert_right,
    evaluate,
    literal,
    python,
)

from rlhf_losses import backend_for, linear_log_probs
from rlhf_losses.kernels import backends, call, tiles
from rlhf_losses.kernels.tiles import DeviceLimits, Tile, pick_tile

BOTH = ("log_probs", "entropy")


def with_gradients(inputs, outputs=BOTH):
    return {"outputs": outputs, "upstream": inputs.upstream(outputs), "wrt": ("hidden", "weight")}


@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_s1_no_tokens_no_launch(leading, backend, monkeypatch):
    def fail(name):
        raise AssertionError("a back end was called for no tokens")

    monkeypatch.setattr(call, "operations", fail)
    inputs = random_inputs(leading, 129, 16, DEVICE)
    got = evaluate(inputs, backend, (*FLOAT_OUTPUTS, "argmax"), inputs.upstream(FLOAT_OUTPUTS), ("hidden", "weight"))
    for name in (*FLOAT_OUTPUTS, "argmax"):
        assert got[name].shape == leading
        assert got[name].dtype == (torch.int64 if name == "argmax" else torch.float32)
    assert got["d_hidden"].shape == (*leading, 16)
    assert torch.equal(got["d_weight"], torch.zeros_like(inputs.weight))


@pytest.mark.parametrize(
    ("leading", "vocab", "depth"),
    [
        ((1,), 129, 16),
        ((), 129, 16),
        ((5,), 129, 17),
        ((5,), 300, 8),
        ((40,), 7, 8),
        ((1,), 2, 1),
        ((2, 3, 2), 129, 64),
    ],
    ids=["one-token", "one-token-no-dimension", "H17", "H8", "V-below-a-tile", "V2-H1", "three-dimensions"],
)
def test_s2_small_shapes(leading, vocab, depth, backend):
    inputs = random_inputs(leading, vocab, depth, DEVICE)
    assert_right(inputs, backend, DTYPE, **with_gradients(inputs))


def test_s2_vocabulary_of_one(backend):
    inputs = random_inputs((3,), 1, 8, DEVICE)
    got = evaluate(inputs, backend, (*FLOAT_OUTPUTS, "argmax"), inputs.upstream(BOTH), ("hidden", "weight"))
    assert got["log_probs"].tolist() == literal([0, 0, 0])
    assert got["entropy"].tolist() == literal([0, 0, 0])
    assert got["sum_p_squared"].tolist() == literal([1, 1, 1])
    assert got["argmax"].tolist() == [0, 0, 0]
    torch.testing.assert_close(got["logsumexp"], inputs.hidden @ inputs.weight[0], rtol=1e-6, atol=1e-6)
    assert got["d_hidden"].abs().max() < 1e-6
    assert got["d_weight"].abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("vocab", [129, 256, 40000])
def test_s3_labels_of_any_integer_type(vocab, dtype):
    # The bounds of the vocabulary need not fit the labels' type.
    inputs = random_inputs((5,), vocab, 8, DEVICE)
    labels = inputs.labels.clamp(max=min(100, vocab - 1))
    want = evaluate(replace(inputs, labels=labels), "chunked")
    got = evaluate(replace(inputs, labels=labels.to(dtype)), "chunked")
    for name in BOTH:
        assert torch.equal(got[name], want[name])


def test_s3_label_is_not_taken_for_ignore_index():
    # -100 is 156 in the arithmetic of uint8.
    inputs = random_inputs((3,), 200, 8, DEVICE)
    got = evaluate(replace(inputs, labels=torch.full((3,), 156, dtype=torch.uint8, device=DEVICE)), "chunked")
    assert (got["log_probs"] < 0).all()


def test_s3_labels_int32_on_every_backend(backend):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    assert_right(replace(inputs, labels=inputs.labels.int()), backend, DTYPE, **with_gradients(inputs))


def test_s3_other_labels_raise(backend):
    inputs = random_inputs((5,), 129, 16, DEVICE)
    with pytest.raises(TypeError, match=r"labels: expected an integer dtype, got torch.float32; pass labels.long\(\)"):
        evaluate(replace(inputs, labels=inputs.labels.float()), backend)
    with pytest.raises(TypeError, match=r"labels: expected an integer dtype, got torch\.bool"):
        evaluate(replace(inputs, labels=inputs.labels > 0), backend)
    with pytest.raises(ValueError, match=f"labels: expected device {DEVICE}, got meta; move it"):
        evaluate(replace(inputs, labels=inputs.labels.to("meta")), backend)


def test_s4_labels_of_another_shape_name_both(backend):
    hidden, weight = torch.randn(1, 12, 64, device=DEVICE), torch.randn(129, 64, device=DEVICE)
    labels = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"expected shape \[1, 12\].*hidden_states \[1, 12, 64\].*got \[3, 4\]"):
        linear_log_probs(hidden, weight, labels, backend=backend)


@pytest.mark.parametrize("how", ["ignored", "masked", "masked-float"])
def test_s5_no_token_counts(how, backend):
    inputs = random_inputs((3, 4), 129, 16, DEVICE)
    # Whatever the hidden states hold.
    inputs = inputs.to(DTYPE)
    inputs = replace(
        inputs, hidden=torch.full_like(inputs.hidden, float("nan")), bias=torch.zeros(129, device=DEVICE, dtype=DTYPE)
    )
    if how == "ignored":
        inputs = replace(inputs, labels=torch.full_like(inputs.labels, -100))
    else:
        none = torch.zeros_like(inputs.labels, dtype=torch.bool if how == "masked" else torch.float32)
        inputs = inputs.with_options(mask=none)
    got = evaluate(
        inputs, backend, (*FLOAT_OUTPUTS, "argmax"), inputs.upstream(FLOAT_OUTPUTS), ("hidden", "weight", "bias")
    )
    for name, values in got.items():
        assert torch.equal(values, torch.zeros_like(values)), name


@pytest.mark.parametrize("how", ["ignored", "masked", "both"])
def test_s5_half_of_the_tokens_count(how, backend):
    inputs = random_inputs((4, 5), 300, 16, DEVICE).to(DTYPE)
    keep = torch.arange(20, device=DEVICE).reshape(4, 5) % 2 == 0
    # A masked token may hold anything: NaN, a label out of range.
    hidden = torch.where(keep[..., None], inputs.hidden, float("nan"))
    labels, options = inputs.labels, {}
    if how in ("ignored", "both"):
        labels = torch.where(keep, labels, -100)
    if how == "masked":
        labels = torch.where(keep, labels, 10**9)
    if how in ("masked", "both"):
        options = {"mask": keep}
    upstream = inputs.upstream(FLOAT_OUTPUTS)
    got = evaluate(
        replace(inputs, hidden=hidden, labels=labels, options=options),
        backend,
        (*FLOAT_OUTPUTS, "argmax"),
        upstream,
        ("hidden", "weight"),
    )
    for name in (*FLOAT_OUTPUTS, "argmax", "d_hidden"):
        assert got[name][~keep].count_nonzero() == 0, name
        assert got[name].isfinite().all(), name
    kept = replace(inputs, hidden=inputs.hidden[keep], labels=inputs.labels[keep])
    options = {"outputs": FLOAT_OUTPUTS, "upstream": {k: g[keep] for k, g in upstream.items()}}
    truth = evaluate(kept.to(torch.float64), "reference", wrt=("hidden", "weight"), **options)
    low = evaluate(kept, "reference", wrt=("hidden", "weight"), **options)
    for name in (*FLOAT_OUTPUTS, "d_hidden", "d_weight"):
        ours = got[name] if name == "d_weight" else got[name][keep]
        assert_close_to_truth(ours, truth[name], low[name], DTYPE, name)


UPSTREAM = {
    "log_probs.sum()": lambda s, w: s.log_probs.sum(),
    "entropy.sum()": lambda s, w: s.entropy.sum(),
    "logsumexp.sum()": lambda s, w: s.logsumexp.sum(),
    "sum_p_squared.sum()": lambda s, w: s.sum_p_squared.sum(),
    "mean of both": lambda s, w: (s.log_probs + 0.5 * s.entropy).mean(),
    "transposed": lambda s, w: (s.log_probs.T * w.T).sum() + (s.entropy.T.contiguous() * w.T).sum(),
    "only log_probs": lambda s, w: (s.log_probs * w).sum(),
    "only entropy": lambda s, w: (s.entropy * w).sum(),
    "every second": lambda s, w: (s.log_probs[:, ::2] * w[:, ::2]).sum(),
    "expanded": lambda s, w: (s.log_probs * w[:, :1]).sum(),
}


@pytest.mark.parametrize("loss", UPSTREAM.values(), ids=UPSTREAM)
def test_s6_upstream_gradients_of_any_strides(loss, fused):
    inputs = random_inputs((3, 4), 300, 16, DEVICE).to(DTYPE)
    w = inputs.upstream(("log_probs",))["log_probs"]

    def gradients(inputs, backend):
        hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
        stats = linear_log_probs(hidden, weight, inputs.labels, outputs=FLOAT_OUTPUTS, backend=backend)
        return torch.autograd.grad(loss(stats, w.to(stats.log_probs)), (hidden, weight))

    truth, low = gradients(inputs.to(torch.float64), "reference"), gradients(inputs, "reference")
    for got, t, l in zip(gradients(inputs, fused), truth, low, strict=True):
        assert_close_to_truth(got, t, l, DTYPE)


@pytest.mark.parametrize("layout", ["stride 0", "stride 2", "transposed"])
def test_s6_upstream_gradients_handed_in(layout, fused):
    inputs = random_inputs((4,) if layout != "transposed" else (4, 2), 129, 16, DEVICE)
    made = {
        "stride 0": lambda: torch.tensor(0.5, device=DEVICE).expand(4),
        "stride 2": lambda: torch.arange(1.0, 9.0, device=DEVICE)[::2],
        "transposed": lambda: torch.arange(1.0, 9.0, device=DEVICE).reshape(2, 4).T,
    }
    upstream = {name: made[layout]() for name in FLOAT_OUTPUTS}
    assert_right(inputs, fused, DTYPE, outputs=FLOAT_OUTPUTS, upstream=upstream, wrt=("hidden", "weight"))


def test_s7_every_token_has_its_own_weight(backend):
    inputs = random_inputs((2, 4), 15, 10, DEVICE).to(DTYPE)
    inputs.labels[0, 0] = -100
    upstream = {"log_probs": torch.rand(2, 4, device=DEVICE) + 0.1}
    got = evaluate(inputs, backend, upstream=upstream, wrt=("weight",))["d_weight"]

    def weighted_sum(inputs):
        total = torch.zeros_like(inputs.weight)
        for b in range(2):
            for t in range(4):
                one = replace(inputs, hidden=inputs.hidden[b, t], labels=inputs.labels[b, t])
                unit = {"log_probs": torch.ones((), device=DEVICE)}
                gradient = evaluate(one, "reference", upstream=unit, wrt=("weight",))["d_weight"]
                total += upstream["log_probs"][b, t] * gradient
        return total

    assert_close_to_truth(got, weighted_sum(inputs.to(torch.float64)), weighted_sum(inputs), DTYPE)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_s8_autocast_is_followed(kind, backend):
    if backend == "triton":
        kind = HALF if kind == torch.bfloat16 else kind
    inputs = random_inputs((4,), 129, 16, DEVICE)
    inputs = replace(inputs, bias=torch.randn(129, device=DEVICE))
    options = {"upstream": inputs.upstream(BOTH), "wrt": ("hidden", "weight", "bias")}
    with torch.autocast(DEVICE.type, dtype=kind):
        got = evaluate(inputs, backend, **options)
    # The same as casting by hand, to the bit; bias is added in fp32 and need not be cast.
    hidden, weight = inputs.hidden.to(kind), inputs.weight.to(kind)
    want = evaluate(replace(inputs, hidden=hidden, weight=weight), backend, **options)
    for name in got:
        assert got[name].dtype == torch.float32, name
        assert torch.equal(got[name], want[name].float()), name


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_s8_autocast_leaves_fp64_alone(backend):
    inputs = random_inputs((4,), 129, 16, DEVICE).to(torch.float64)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        got = evaluate(inputs, backend)
    assert torch.equal(got["log_probs"], evaluate(inputs, backend)["log_probs"])
    assert got["log_probs"].dtype == torch.float64


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_s9_mixed_types_are_a_clear_error(types, backend):
    inputs = random_inputs((4,), 129, 16, DEVICE)
    inputs = replace(inputs, hidden=inputs.hidden.to(types[0]), weight=inputs.weight.to(types[1]))
    with pytest.raises(TypeError, match=rf"one floating dtype, got {types[0]} and {types[1]}; cast .* torch.autocast"):
        evaluate(inputs, backend)


LAYOUTS = {
    "hidden transposed": lambda x: replace(x, hidden=x.hidden.transpose(0, 1), labels=x.labels.T),
    "hidden columns transposed": lambda x: replace(x, hidden=x.hidden.transpose(1, 2).contiguous().transpose(1, 2)),
    "hidden every second token": lambda x: replace(x, hidden=x.hidden[:, ::2], labels=x.labels[:, ::2]),
    "hidden every second column": lambda x: replace(x, hidden=x.hidden[..., ::2], weight=x.weight[:, ::2]),
    "hidden expanded": lambda x: replace(x, hidden=x.hidden[:1, :1].expand(4, 6, -1)),
    "hidden expanded, one dimension": lambda x: replace(x, hidden=x.hidden[0, 0].expand(6, -1), labels=x.labels[0]),
    "hidden sliced off the front": lambda x: replace(x, hidden=x.hidden[..., 1:], weight=x.weight[:, 1:]),
    "weight transposed": lambda x: replace(x, weight=x.weight.T.contiguous().T),
    "weight of a wider matrix": lambda x: replace(x, weight=torch.cat([x.weight, x.weight], 1)[:, :16]),
    "labels expanded": lambda x: replace(x, labels=x.labels[:1].expand(4, 6)),
    "bias every second": lambda x: replace(x, bias=torch.randn(2 * len(x.weight), device=DEVICE)[::2]),
    "temperature transposed": lambda x: x.with_options(temperature=torch.rand(6, 4, device=DEVICE).T + 0.5),
    "mask transposed": lambda x: x.with_options(mask=torch.rand(6, 4, device=DEVICE).T < 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_s10_inputs_of_any_strides(layout, dtype, backend):
    inputs = layout(random_inputs((4, 6), 129, 16, DEVICE))
    wrt = ("hidden", "weight", "bias")[: 2 + (inputs.bias is not None)]
    assert_right(inputs, backend, dtype, outputs=BOTH, upstream=inputs.upstream(BOTH), wrt=wrt)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_s12_forward_only(mode, backend):
    inputs = random_inputs((40,), 129, 16, DEVICE)
    want = evaluate(inputs, backend)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    with mode(), Allocations(hidden, weight) as allocated:
        stats = linear_log_probs(hidden, weight, inputs.labels, backend=backend)
    for name in BOTH:
        values = getattr(stats, name)
        assert values.grad_fn is None
        assert not values.requires_grad
        assert torch.equal(values, want[name])
    assert inputs.weight.numel() not in allocated.sizes


BAD = [0.0, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize("bad", BAD)
def test_s13_bad_temperature_is_named(bad, backend):
    inputs = random_inputs((2, 3), 129, 16, DEVICE)
    with pytest.raises(ValueError, match=rf"temperature: expected a finite number > 0, got {bad}"):
        evaluate(inputs, backend, temperature=bad)
    entries = torch.ones(2, 3, device=DEVICE)
    entries[1, 1] = bad
    with pytest.raises(
        ValueError, match=rf"temperature: expected finite numbers > 0, got {bad} at (unmasked )?token 4"
    ):
        evaluate(inputs, backend, temperature=entries)
    with pytest.raises(ValueError, match=rf"got {bad} at (unmasked )?token 3"):
        evaluate(inputs, backend, temperature=entries[:, 1])
    # At a masked token it enters nothing.
    mask = torch.arange(6, device=DEVICE).reshape(2, 3) != 4
    got = evaluate(inputs, backend, temperature=entries, mask=mask)
    assert torch.equal(
        got["log_probs"], evaluate(inputs, backend, temperature=torch.ones_like(entries), mask=mask)["log_probs"]
    )


def test_s13_integer_temperature_works(backend):
    inputs = random_inputs((2, 3), 129, 16, DEVICE)
    want = evaluate(inputs, backend)
    for one in (1, torch.tensor(1, device=DEVICE), torch.ones(2, 3, dtype=torch.int64, device=DEVICE)):
        assert torch.equal(evaluate(inputs, backend, temperature=one)["log_probs"], want["log_probs"])


CAPABILITIES = [("cuda", 80), ("cuda", 89), ("cuda", 90), ("cuda", 100), ("cuda", 120), ("hip", 94)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("vendor", "capability"), CAPABILITIES)
@pytest.mark.parametrize("shared", [65536, 101376, 166912, 232448])
def test_s14_tile_fits_the_shared_memory(shared, vendor, capability, itemsize):
    tile = pick_tile(DeviceLimits(vendor, capability, shared, 64), itemsize)
    # All stages of both operands, counted here anew.
    assert (tile.rows + tile.columns) * tile.depth * itemsize * tile.stages <= shared


def test_s14_wide_tile_only_where_it_fits():
    assert pick_tile(DeviceLimits("cuda", 90, 232448, 132), 2).columns == 256
    assert pick_tile(DeviceLimits("cuda", 120, 101376, 170), 2).columns == 128
    assert pick_tile(DeviceLimits("cuda", 80, 166912, 108), 2).columns == 128


def test_s14_picker_looks_at_no_token_count():
    # A token's numbers depend on the tile's width: it must be the same for every call of a device.
    assert set(DeviceLimits.__dataclass_fields__) == {"vendor", "capability", "shared_memory", "multiprocessors"}


def test_s14_without_a_tile_that_fits_chunked_serves_and_says_why(monkeypatch):
    small = DeviceLimits("cuda", 120, 8192, 84)
    assert pick_tile(small, 2) is None
    monkeypatch.setattr(backends, "device_limits", lambda device: small)
    gpu = torch.device("cuda", 0)
    choice = backends.choose_backend("auto", gpu, torch.float16)
    assert choice.name == "chunked"
    assert choice.reason == "no tile fits the 8192 bytes of shared memory of this device"
    with pytest.raises(ValueError, match=r"backend='triton': no tile fits the 8192 bytes .* pass backend='chunked'"):
        backends.choose_backend("triton", gpu, torch.float16)


def test_s14_device_of_101376_bytes_takes_triton(monkeypatch):
    monkeypatch.setattr(backends, "device_limits", lambda device: DeviceLimits("cuda", 120, 101376, 84))
    for dtype in (torch.float16, torch.float32):
        assert backends.choose_backend("auto", torch.device("cuda", 0), dtype).name == "triton"


def test_s14_old_gpu_takes_chunked(monkeypatch):
    monkeypatch.setattr(backends, "device_limits", lambda device: DeviceLimits("cuda", 75, 65536, 40))
    choice = backends.choose_backend("auto", torch.device("cuda", 0), torch.float16)
    assert choice == ("chunked", "the Triton kernels need compute capability 8.0, this device has 7.5")


@pytest.mark.parametrize("tile", [Tile(64, 128, 32, warps=4, stages=2), Tile(64, 64, 32, warps=4, stages=2)], ids=str)
def test_s14_smaller_tiles_compute_the_same(tile, choose_path, choose_tile):
    choose_path("triton-pointers")
    choose_tile(tile)
    inputs = random_inputs((70,), 300, 40, DEVICE)
    assert_right(inputs, "triton", HALF, **with_gradients(inputs))


def test_every_block_of_rows_meets_every_tile(choose_path, choose_tile):
    # Five row blocks in groups of two, the last one alone; eight tiles in three stretches, the last one short; the
    # gradient in stretches of its own. With the tiles of the table that takes thousands of tokens.
    choose_path("triton-pointers")
    choose_tile(Tile(64, 64, 32, warps=4, stages=2, row_group=2, splits=3))
    inputs = random_inputs((310,), 449, 16, DEVICE)
    outputs = (*FLOAT_OUTPUTS, "argmax")
    options = {"outputs": outputs, "upstream": inputs.upstream(FLOAT_OUTPUTS), "wrt": ("hidden", "weight")}
    assert_right(inputs, "triton", HALF, workspace_bytes=310 * 64 * 2 * 3, **options)


def test_s15_without_triton(monkeypatch):
    # An entry of None is how Python itself marks a module that can't be imported.
    monkeypatch.setitem(sys.modules, "triton", None)
    here = torch.ones(1, device=DEVICE)
    assert backend_for(here) == ("chunked", "triton is not installed")
    with pytest.raises(
        ImportError, match=r"triton is not installed; install it \(pip install .*\) or pass backend='ch"
    ):
        backend_for(here, "triton")
    inputs = random_inputs((3,), 129, 16, DEVICE)
    with pytest.raises(ImportError, match="triton is not installed"):
        evaluate(inputs, "triton")
    # Installed, it would not serve these either.
    with pytest.raises(ValueError, match=r"take fp16, bf16 and fp32, not torch\.float64"):
        backend_for(here.double(), "triton")
    assert torch.equal(evaluate(inputs, "auto")["log_probs"], evaluate(inputs, "chunked")["log_probs"])


def test_s15_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = backend_for(torch.ones(1))
    assert choice.name == "chunked"
    assert "tensors are on cpu" in choice.reason
    with pytest.raises(ValueError, match="the Triton kernels need a GPU; pass backend='chunked' or 'auto'"):
        linear_log_probs(torch.ones(1, 8), torch.ones(4, 8), torch.zeros(1, dtype=torch.int64), backend="triton")


def test_s15_fp64_takes_chunked():
    choice = backend_for(torch.ones(1, dtype=torch.float64, device=DEVICE))
    assert choice == ("chunked", "the Triton kernels take fp16, bf16 and fp32, not torch.float64")


def test_auto_never_takes_the_reference():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert backend_for(torch.ones(1, dtype=dtype, device=DEVICE)).name != "reference"


@pytest.mark.gpu
def test_auto_takes_triton_on_a_gpu():
    assert backend_for(torch.ones(1, dtype=torch.bfloat16, device=DEVICE)).name == "triton"


def test_no_logits_of_all_tokens_are_held(fused):
    inputs = random_inputs((300,), 1200, 16, DEVICE)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    # A quarter of the logits' size, in fp32.
    with Allocations(hidden, weight) as allocated:
        stats = linear_log_probs(hidden, weight, inputs.labels, backend=fused, workspace_bytes=300 * 1200)
        (stats.log_probs.sum() + stats.entropy.mean()).backward()
    # Triton's workspace holds at least a tile's columns of all rows.
    assert max(allocated.sizes) <= 300 * 1200 // 3


def test_h3_tied_embedding_gets_one_summed_gradient(backend):
    inputs = random_inputs((6,), 129, 16, DEVICE).to(DTYPE)
    ids = torch.tensor([3, 3, 128, 0, 7, 9], device=DEVICE)

    def gradient(inputs, backend):
        shared = inputs.weight.clone().requires_grad_()
        stats = linear_log_probs(shared[ids] + inputs.hidden, shared, inputs.labels, backend=backend)
        (stats.log_probs.sum() + 0.3 * stats.entropy.square().sum()).backward()
        return shared.grad

    truth, low = gradient(inputs.to(torch.float64), "reference"), gradient(inputs, "reference")
    assert_close_to_truth(gradient(inputs, backend), truth, low, DTYPE)


def test_h6_sharded_weight_is_refused(tmp_path):
    pytest.importorskip("torch.distributed.fsdp")
    python(
        f"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rlhf_losses import linear_log_probs

dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
head = torch.nn.Linear(256, 1024, dtype=torch.float16)
fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
hidden, labels = torch.randn(1, 32, 256, dtype=torch.float16), torch.zeros(1, 32, dtype=torch.int64)
plain = torch.randn(1024, 256, dtype=torch.float16)
for name, arguments in (("weight", (head.weight, None)), ("bias", (plain, head.bias))):
    for backend in ("auto", "chunked", "reference"):
        try:
            linear_log_probs(hidden, arguments[0], labels, bias=arguments[1], backend=backend)
        except TypeError as error:
            for part in (name + ": expected a plain tensor, got a DTensor", "from the forward of the", "unshard()"):
                assert part in str(error), error
        else:
            raise SystemExit("a sharded " + name + " was accepted")
head.unshard()
assert linear_log_probs(hidden, head.weight, labels, bias=head.bias).log_probs.isfinite().all()
dist.destroy_process_group()
"""
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_h7_partitioned_weight_is_a_clear_error(autocast, backend):
    # What DeepSpeed's ZeRO-3 leaves of a parameter between uses.
    weight = torch.nn.Parameter(torch.empty(0, device=DEVICE))
    weight.ds_id = 42
    inputs = random_inputs((3,), 129, 16, DEVICE)
    with (
        torch.autocast(DEVICE.type, dtype=HALF, enabled=autocast),
        pytest.raises(ValueError, match=r"ZeRO-3 partition \(ds_id 42.*GatheredParameters\(\[weight\]\)"),
    ):
        linear_log_probs(inputs.hidden, weight, inputs.labels, backend=backend)


def test_h8_id_beyond_the_head_counts_only_where_it_is_not_masked(backend, quick_tiles):
    # An embedding of 128264 rows, a head of 128256.
    inputs = random_inputs((3,), 128256, 8, DEVICE)
    inputs.labels[1] = 128256
    mask = torch.tensor([True, False, True], device=DEVICE)
    masked = evaluate(inputs, backend, mask=mask, validate="sync")["log_probs"]
    assert masked[1] == 0
    assert (masked[[0, 2]] < 0).all()
    with pytest.raises(
        ValueError, match=r"expected 0 <= label < 128256 .* got 128256 at (unmasked )?token 1 \(1 such of 3\)"
    ):
        evaluate(inputs, backend, validate="sync")


def test_tiles_are_a_table():
    # Nothing is searched: the choice is a pure function of the device and the operands' size.
    limits = DeviceLimits("cuda", 90, 232448, 132)
    assert tiles.pick_tile(limits, 2) is tiles.pick_tile(limits, 2)


def test_labels_mask_bias_and_temperature_of_any_strides(fused):
    inputs = random_inputs((6,), 129, 16, DEVICE)
    bias, temperature = torch.randn(129, device=DEVICE), torch.rand(6, device=DEVICE) + 0.5
    mask = torch.tensor([1, 1, 0, 1, 1, 1], device=DEVICE)

    def stretched(x):
        """The same values, every third number of a longer vector."""
        return torch.full((3 * len(x),), -7, dtype=x.dtype, device=DEVICE).index_copy_(
            0, 3 * torch.arange(len(x), device=DEVICE), x
        )[::3]

    options = {"mask": mask, "temperature": temperature}
    want = evaluate(replace(inputs.with_options(**options), bias=bias), fused)
    strided = replace(
        inputs.with_options(**{name: stretched(x) for name, x in options.items()}),
        labels=stretched(inputs.labels),
        bias=stretched(bias),
    )
    got = evaluate(strided, fused)
    assert all(torch.equal(got[name], want[name]) for name in want)
