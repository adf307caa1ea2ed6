"""verl's whole trainer on a CPU, twice from the same seeds: with its own logits, and with its head in rlhf_losses.

Two unfused runs have the same metrics to the last bit. With micro-batches of other sizes, which sum the same terms in
another order, eight steps of an unfused run differ by up to 1e-6 in entropies (ulps of 6.9 are 4.8e-7), 8e-8 in losses
and 3e-6 of a gradient's norm; what follows from the samples alone, such as rewards and lengths, is equal. The fused run
may be twice as far away from the unfused one.
"""

import math

import pytest

for _module, _needed in (("verl", "the trainer"), ("ray", "verl's workers"), ("transfer_queue", "verl's trainer")):
    pytest.importorskip(_module, reason=f"{_module} ({_needed}) is not installed")

from verl_cpu.main_ppo import FUSED, UNFUSED, train

# What is a function of the samples, and so of weights only as long as a draw does not fall into a rounding.
OF_SAMPLES = (
    "critic/",
    "global_seqlen/",
    "num_turns/",
    "prompt_length/",
    "response",
    "training/global_step",
    "training/num_turns",
    "training/off_policy",
)
LEARNT = ("actor/loss", "actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/entropy_loss", "actor/grad_norm")


def assert_same_step(unfused: dict[str, float], fused: dict[str, float]) -> None:
    assert fused.keys() == unfused.keys()
    for key, expected in unfused.items():
        if key.startswith(OF_SAMPLES):
            assert fused[key] == expected, key
        elif key == "actor/grad_norm":
            assert fused[key] == pytest.approx(expected, rel=6e-6), key
        else:
            assert fused[key] == pytest.approx(expected, rel=0, abs=2e-6 * max(1, abs(expected))), key


def compare(folder, steps: int, workers: int, timeout: float) -> None:
    runs = train(folder, {"unfused": UNFUSED, "fused": FUSED}, steps, workers, timeout)
    assert "rlhf_losses: " in (folder / "fused.log").read_text(), "no worker said that its head is fused"
    for step, (unfused, fused) in enumerate(zip(runs["unfused"], runs["fused"], strict=True), 1):
        assert all(math.isfinite(unfused[key]) and unfused[key] != 0 for key in LEARNT), f"step {step}: {unfused}"
        for name, metrics in (("unfused", unfused), ("fused", fused)):
            # The rollout has the weights of this step, and rounds in its own way.
            assert 0 < metrics["training/rollout_probs_diff_max"] < 1e-7, f"{name}, step {step}"
        assert_same_step(unfused, fused)
    assert unfused["actor/entropy"] < runs["unfused"][0]["actor/entropy"], "nothing was learnt"


@pytest.mark.timeout(300)
def test_two_steps(tmp_path):
    compare(tmp_path, steps=2, workers=1, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_steps_of_two_workers(tmp_path):
    compare(tmp_path, steps=8, workers=2, timeout=580)
