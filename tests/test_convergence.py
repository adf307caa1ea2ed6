"""The convergence script's core on tiny models: fused training overlays unfused training, and wrong gradients show."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlhf_losses.benchmarks import convergence
from rlhf_losses.benchmarks.convergence import (
    ENTROPY_COEFFICIENT,
    FUSED,
    REORDERED,
    UNFUSED,
    compare,
    fused_policy_loss,
    gemma2,
    judge,
    rl_case,
    text_case,
    text_loss,
)

pytest.importorskip("transformers")
IDS = torch.arange(500).square() % 97 + torch.arange(500) % 3


def problems(runs):
    return {verdict.curve: verdict.problem for verdict in judge(runs) if verdict.problem}


@pytest.fixture(scope="module")
def text():
    model = gemma2(vocab=128, hidden=32, layers=2)
    case = text_case(model, IDS, batch=2, length=24, steps=12, learning_rate=3e-3)
    return case, compare(case)


@pytest.fixture(scope="module")
def rl():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    sizes = {"prompts": 2, "group": 6, "prompt_length": 6, "length": 8}
    model = LlamaForCausalLM(config)
    case = rl_case(model, IDS, torch.arange(128) % 3 == 0, **sizes, steps=12, learning_rate=3e-3)
    return case, compare(case)


def test_text_overlays_and_is_learned(text):
    _, runs = text
    assert not problems(runs)
    assert list(runs[FUSED]) == ["loss", "grad_norm"]
    loss = runs[UNFUSED]["loss"]
    assert sum(loss[-3:]) < sum(loss[:3]) - 0.3


def test_reinforcement_overlays(rl):
    _, runs = rl
    assert not problems(runs)
    assert list(runs[FUSED]) == ["loss", "grad_norm", "entropy"]
    reward = runs[UNFUSED]["reward"]
    # Two updates a sample.
    assert reward[::2] == reward[1::2]
    assert len(set(reward)) > 3


def again(case, runs, **changes):
    """The fused run replaced by one that the changes make wrong; the others are what they were."""
    return runs | {FUSED: compare(replace(case, **changes))[FUSED]}


def test_entropy_bonus_of_the_wrong_sign_is_found(rl):
    # Only the gradient's: the loss that is reported stays right, and what the wrong steps lead to is seen.
    case, runs = rl

    def wrong(model, batch):
        loss, metrics = fused_policy_loss(model, batch)
        flipped, _ = fused_policy_loss(model, batch, entropy_coefficient=-ENTROPY_COEFFICIENT)
        return flipped + (loss - flipped).detach(), metrics

    assert set(problems(again(case, runs, fused=wrong))) == {"loss", "grad_norm", "entropy"}


def test_gradient_without_the_caps_slope_is_found(text):
    case, runs = text

    def wrong(model, batch):
        cap = model.config.final_logit_softcapping
        products = model.lm_head(model.model(batch.ids, use_cache=False).last_hidden_state)[:, :-1]
        logits = products + (cap * torch.tanh(products / cap) - products).detach()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten()), {}

    assert set(problems(again(case, runs, fused=wrong, fuse=lambda model: None))) == {"loss", "grad_norm"}


def test_gradient_of_the_wrong_scale_is_found(text):
    # AdamW and the clip take the scale away: the losses alone would not tell.
    case, runs = text

    def wrong(model, batch):
        loss, _ = text_loss(model, batch)
        return 0.999 * loss + 0.001 * loss.detach(), {}

    assert "grad_norm" in problems(again(case, runs, fused=wrong))


def test_a_bound_that_shows_nothing_fails(text):
    _, runs = text
    assert "shows nothing" in problems(runs | {REORDERED: runs[UNFUSED]})["loss"]
    far = {"loss": [x + 1 for x in runs[UNFUSED]["loss"]], "grad_norm": runs[REORDERED]["grad_norm"]}
    assert "shows nothing" in problems(runs | {REORDERED: far})["loss"]
    # One update of the other order is far off, as one of 16 bits can be: then the median decides.
    norms = runs[REORDERED]["grad_norm"]
    once = runs | {REORDERED: runs[REORDERED] | {"grad_norm": [norms[0] + 100, *norms[1:]]}}
    assert not problems(once)
    assert [verdict.measure for verdict in judge(once)] == ["largest", "median"]
    shifted = [x * 1.001 for x in runs[UNFUSED]["grad_norm"]]
    assert "times the bound" in problems(once | {FUSED: runs[FUSED] | {"grad_norm": shifted}})["grad_norm"]
    norms = runs[FUSED]["grad_norm"]
    worse = once | {FUSED: runs[FUSED] | {"grad_norm": [norms[0] + 1000, *norms[1:]]}}
    assert "times the bound" in problems(worse)["grad_norm"]
    lost = runs[FUSED] | {"loss": [float("nan")] * 12}
    assert problems(runs | {FUSED: lost}) == {"loss": "not finite"}


def test_the_command_writes_and_judges(text, tmp_path, monkeypatch, capsys):
    case, _ = text
    monkeypatch.setattr(convergence, "make_case", lambda name, device, steps: (case, {"batch": 2}))
    command = partial(convergence.main, ["--case", "gemma2", "--device", "cpu", "--out", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 0
    written = json.loads((tmp_path / "new" / "gemma2-cpu.json").read_text())
    assert [verdict["curve"] for verdict in written["verdicts"]] == ["loss", "grad_norm"]
    assert {len(values) for run in written["curves"].values() for values in run.values()} == {12}
    assert (tmp_path / "new" / "gemma2-cpu.png").stat().st_size > 5000
    file = tmp_path / "new" / "gemma2-cpu.json"
    file.write_text(json.dumps({name: value for name, value in written.items() if name != "verdicts"}))
    with pytest.raises(SystemExit) as ended:
        convergence.main(["--judge", str(file)])
    assert ended.value.code == 0
    assert json.loads(file.read_text()) == written
    monkeypatch.setattr(convergence, "FACTOR", 0.0)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    assert "expected at most 0 times the bound" in capsys.readouterr().out
