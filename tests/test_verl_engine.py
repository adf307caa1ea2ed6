"""verl's FSDP engine, fused against unfused and against transformers, on one rank and on two (gloo)."""

import json
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, script

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {"final_logit_softcapping": 2.0},
    "Gemma3Text": {},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "Phi": {},
    "GPTNeoX": {},
    "Olmo2": {},
    "Qwen2_5_VL": {},
}
TIED = {"model": {"tie_word_embeddings": True}}
LORA = {"lora": {"lora_rank": 8, "target_modules": ["q_proj", "lm_head"]}}
TEACHER = {"loss_mode": "forward_kl_topk", "use_policy_gradient": False}
ALONE = {
    # Packed, verl's Qwen2.5-VL wants flash-attn; its patches are on the class, so unpacked is all there is here.
    **{name: {"family": name, "model": model, "packed": name != "Qwen2_5_VL"} for name, model in FAMILIES.items()},
    "padded": {"packed": False},
    "temperature-per-sample": {"temperature_per_sample": True, "sum_of_squares": True},
    "temperature-per-sample-padded": {"temperature_per_sample": True, "sum_of_squares": True, "packed": False},
    "no-entropy-coefficient": {"entropy_coefficient": 0.0},
    "lora": TIED | LORA,
    "cached": {"options": {"cache_bytes": 8192}},
    "top-k-distillation": {"distillation": TEACHER},
    "top-k-distillation-padded": {"distillation": TEACHER, "temperature_per_sample": True, "packed": False},
}
TOGETHER = {
    "untied": {},
    "tied": TIED,
    "temperature-per-sample": {"temperature_per_sample": True, "sum_of_squares": True},
    "lora": TIED | LORA,
    "sequence-parallel": {"sequence_parallel": 2, "temperature_per_sample": True, "sum_of_squares": True},
    "sequence-parallel-distillation": {"sequence_parallel": 2, "distillation": TEACHER},
}
# Not compared with an unfused run.
SINGLE = {
    "all-rows": {"options": {"rows": "all"}},
    "triton": {"options": {"backend": "triton", "workspace_bytes": 2**20}},
    "unknown-option": {"options": {"cache_size": 1}},
    "unknown-transform": {"family": "Qwen2", "model": {"logit_multiplier": 3.0}},
}


def run(cases, folder, ranks=1):
    """The results of tests/verl_cpu/engine_cases.py, by name."""
    given, results = folder / "cases.json", folder / "results.pt"
    given.write_text(json.dumps(cases))
    printed = script(ROOT / "tests/verl_cpu/engine_cases.py", given, results, folder, ranks=ranks)
    return torch.load(results, weights_only=False), printed


def both_ways(cases):
    return {
        f"{name}/{way}": case | {"fused": way == "fused", "reference": True}
        for name, case in cases.items()
        for way in ("fused", "unfused")
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(both_ways(ALONE) | SINGLE, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run(both_ways(TOGETHER), tmp_path_factory.mktemp("together"), ranks=2)


def assert_same_training(results, name):
    fused, unfused = (results[f"{name}/{way}"] for way in ("fused", "unfused"))
    for case in (fused, unfused):
        if isinstance(case, Exception):
            raise case
    mask = fused["mask"]
    assert fused["before"].keys() == unfused["before"].keys()
    for when, most in {"before": 3e-6, "after": 1e-4}.items():
        for output in fused[when]:
            torch.testing.assert_close(fused[when][output][mask], unfused[when][output][mask], rtol=0, atol=most)
    for mine, theirs in zip(fused["updates"], unfused["updates"], strict=True):
        # Of the first update to rounding; the second starts from weights that Adam has moved by lr * sign(gradient).
        assert mine == pytest.approx(theirs, rel=1e-5 if mine is fused["updates"][0] else 1e-4, abs=1e-6)
    moved = (fused["after"]["log_probs"] - fused["before"]["log_probs"])[mask]
    assert moved.abs().max() > 1e-2


@pytest.mark.parametrize("name", ALONE)
def test_fused_is_unfused(alone, name):
    assert_same_training(alone[0], name)


@pytest.mark.parametrize("name", TOGETHER)
def test_fused_is_unfused_on_two_ranks(together, name):
    assert_same_training(together[0], name)


@pytest.mark.parametrize("name", [*FAMILIES, "padded", "temperature-per-sample", "temperature-per-sample-padded"])
def test_log_probs_of_transformers(alone, name):
    found = alone[0][f"{name}/fused"]
    mask = found["mask"]
    log_probs, entropy = found["reference"]
    torch.testing.assert_close(found["before"]["log_probs"][mask], log_probs[mask], rtol=0, atol=1e-6)
    torch.testing.assert_close(found["before"]["entropy"][mask], entropy[mask], rtol=0, atol=3e-6)


def test_lora_on_the_head_moves(alone):
    first, second = alone[0]["lora/fused"]["updates"]
    assert first["grad_norm"] > 0.1
    assert second["loss"] != first["loss"]


def test_rows_outside_of_the_loss_are_left_out(alone):
    some, all_rows, unfused = (
        alone[0][name]["before"]["log_probs"] for name in ("Llama/fused", "all-rows", "Llama/unfused")
    )
    mask = alone[0]["all-rows"]["mask"]
    assert (some[~mask] == 0).all()
    torch.testing.assert_close(all_rows, unfused, rtol=0, atol=1e-6)
    assert (unfused[~mask] != 0).any()


def test_options_reach_the_worker(alone):
    results, printed = alone
    assert "computed by the triton back end" in printed
    mask = results["triton"]["mask"]
    expected = results["Llama/unfused"]["before"]["log_probs"]
    torch.testing.assert_close(results["triton"]["before"]["log_probs"][mask], expected[mask], rtol=0, atol=1e-6)


def test_what_is_on_is_said_once(alone):
    lines = [line for line in alone[1].splitlines() if "LlamaForCausalLM's head is computed by the chunked" in line]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown-option", "expected keys out of"),
        ("unknown-transform", "logit_multiplier"),
    ],
)
def test_refused(alone, name, words):
    error = alone[0][name]
    assert isinstance(error, ValueError)
    assert words in str(error)
