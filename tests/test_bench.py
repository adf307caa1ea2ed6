"""The benchmark, by its command, on tiny shapes on the CPU: it runs whole, says what it left out, and stops on red."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import python

from rlhf_losses import TokenStats, cli, linear_log_probs, linear_policy_loss
from rlhf_losses.benchmarks import bench, report
from rlhf_losses.benchmarks.checks import token_truth
from rlhf_losses.benchmarks.data import load_real, peaked
from rlhf_losses.benchmarks.providers import PROVIDERS, TASKS, Provider, one_pass, two_passes
from rlhf_losses.benchmarks.shapes import TINY_MODELS

TINY = ["--size", "tiny", "--device", "cpu", "--turns", "1"]
OURS = {
    ("forward", "ours"),
    ("train", "ours, two passes"),
    ("train", "ours, all rows cached"),
    ("train", "ours, one pass"),
    ("cross_entropy", "ours"),
    ("skip", "ours, two passes"),
    ("skip", "ours, one pass"),
}


def read(out):
    return json.loads(out.with_name(out.name + ".json").read_text())


def of_row(row, task, provider):
    (result,) = [x for x in row["results"] if (x["task"], x["provider"]) == (task, provider)]
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Results and report of a run of everything, through the command."""
    out = tmp_path_factory.mktemp("bench") / "v1.0"
    cli.main(["bench", *TINY, "--out", str(out)])
    return read(out), out.with_name(out.name + ".md").read_text()


def test_every_task_of_every_provider_is_timed_or_named(whole):
    results, text = whole
    assert [(row["model"], row["N"]) for row in results["rows"]] == [
        (model.name, tokens) for model in TINY_MODELS for tokens in (128, 256)
    ]
    for row in results["rows"]:
        timed = {(x["task"], x["provider"]) for x in row["results"] if "ms" in x}
        assert timed >= OURS
        assert all(x["ours"] == x["provider"].startswith("ours") for x in row["results"])
        named = {provider for _, provider in timed} | set(results["absent"])
        assert named == {provider.name for provider in PROVIDERS}
    # Rivals have no business on a CPU, installed or not.
    rivals = {provider.name for provider in PROVIDERS if provider.needs}
    assert set(results["absent"]) == rivals
    assert all(why in ("not installed", "needs a GPU") for why in results["absent"].values())
    assert all(f"- {name}: {why}" in text for name, why in results["absent"].items())


def test_ratios_are_times_over_gemms(whole):
    for row in whole[0]["rows"]:
        for result in row["results"]:
            under = result["reference_ms"] if result["task"] == "skip" else row["gemms_ms"][str(result["gemms"])]
            assert result["ratio"] == pytest.approx(result["ms"] / under)
        unmasked, active, both = of_row(row, "skip", "ours, two passes")["parts_ms"]
        assert of_row(row, "skip", "ours, two passes")["reference_ms"] == pytest.approx(unmasked + both - active)
        unmasked, active = of_row(row, "skip", "ours, one pass")["parts_ms"]
        assert of_row(row, "skip", "ours, one pass")["reference_ms"] == pytest.approx(unmasked / 3 + active * 2 / 3)


def test_what_skipping_is_held_against():
    """Two passes: a forward of the unmasked tokens. One pass: a third of both, of which none may be idle."""
    problem = peaked(TINY_MODELS[0], 128, "cpu")
    case = bench.make_cases(problem, ("skip",))["skip"]
    for one_pass_too, idle in ((False, True), (True, False)):
        seen = []

        def run(case, seen=seen):
            seen.append(case.batch.advantages)
            return two_passes(case)

        for alone in bench.Skip(Provider("spy", {"skip": 3}, run, one_pass=one_pass_too), case).runs:
            alone()
        unmasked, *_, active = seen
        assert len(unmasked) == int(case.batch.mask.sum())
        assert bool((unmasked == 0).any()) == idle
        assert bool((active == 0).any()) is False
        assert len(active) == int((case.batch.mask & (case.batch.advantages != 0)).sum())


def test_errors_are_measured(whole):
    # bf16 gradients are never exact, and logits rounded to bf16 are off by more than ours may be.
    for row in whole[0]["rows"]:
        for task, provider in OURS - {("forward", "ours")}:
            assert 0 < of_row(row, task, provider)["errors"]["d_weight_error"] < 1e-2
        assert of_row(row, "forward", "naive")["errors"]["log_prob_error"] > 1e-3
        assert of_row(row, "forward", "ours")["errors"].keys() == {"log_prob_error", "entropy_error"}


def test_bounds_are_judged():
    def row(**ms):
        timed = {"ours": ms["ours"], "Liger SM90": ms.get("liger")}
        results = [
            {"task": "forward", "provider": name, "gemms": 1, "ms": value, "ratio": value / 10}
            for name, value in timed.items()
            if value is not None
        ]
        return {"model": "m", "N": 8, "H": ms["depth"], "V": 9, "gemms_ms": {"1": 10.0}, "results": results}

    rows = [row(ours=10.2, depth=896), row(ours=10.2, depth=2048, liger=10.1), row(ours=9.9, depth=2048, liger=10.0)]
    lines = {line["what"]: line for line in report.required({"rows": rows})}
    forward, liger = lines["forward / 1 GEMM"], lines["Liger SM90 / forward"]
    assert (forward["shapes"], forward["shapes_met"], forward["met"]) == (3, 2, False)
    assert forward["worst_at"] == "m, 8 x 2048 x 9"
    assert forward["geometric_mean"] == pytest.approx((1.02 * 1.02 * 0.99) ** (1 / 3))
    assert (liger["shapes"], liger["shapes_met"], liger["worst"]) == (2, 1, pytest.approx(10.1 / 10.2))
    assert lines["one pass / 3 GEMMs"]["met"] is None
    assert report.required({"rows": rows[::2]})[0]["met"] is True


def test_figure_of_one_call_a_model_is_drawn(tmp_path):
    # Computed by logarithms, the mean of one ratio is rounded up at 3, down at 5.
    call = {"N": 8, "H": 4, "V": 9, "gemms_ms": {"1": 1.0}}
    rows = [
        call | {"model": f"m{ms}", "results": [{"task": "forward", "provider": "ours", "ms": ms}]} for ms in (3.0, 5.0)
    ]
    report.plot({"device": "none", "rows": rows}, tmp_path / "v1.0")
    assert (tmp_path / "v1.0.png").read_bytes().startswith(b"\x89PNG")


def off_by_a_thousandth(case):
    stats = two_passes(case)
    return stats._replace(log_probs=stats.log_probs + 1e-3)


def with_a_wrong_gradient(case, share=0.02):
    stats = two_passes(case)
    return stats._replace(entropy=(1 + share) * stats.entropy - share * stats.entropy.detach())


def not_a_number(case):
    stats = two_passes(case)
    return TokenStats(log_probs=stats.log_probs, entropy=stats.entropy * torch.nan)


@pytest.mark.parametrize(
    ("wrong", "task"), [(off_by_a_thousandth, "forward"), (with_a_wrong_gradient, "train"), (not_a_number, "train")]
)
def test_wrong_numbers_of_ours_end_it_before_any_timing(wrong, task, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "interleaved_medians", lambda *_: pytest.fail("timed"))
    provider = Provider("ours", {task: 1}, wrong, ours=True, softcap=True)
    with pytest.raises(SystemExit, match="wrong numbers, nothing timed"):
        bench.main([*TINY, "--tokens", "128", "--out", str(tmp_path / "red")], [provider])
    assert not list(tmp_path.iterdir())


def test_two_passes_are_not_taken_for_one(tmp_path):
    def by_reference(case):
        x = case.problem
        return linear_policy_loss(x.hidden, x.weight, x.labels, case.batch, case.config, backend="reference")

    provider = Provider("ours", {"train": 3}, by_reference, ours=True, one_pass=True)
    with pytest.raises(SystemExit, match="expected one pass, got 2"):
        bench.main([*TINY, "--models", "tiny", "--out", str(tmp_path / "red")], [provider])


def test_rivals_may_fail_be_wrong_or_lack_a_softcap(tmp_path):
    def fails(case):
        raise ZeroDivisionError("of the rival")

    providers = [
        Provider("ours, one pass", {"train": 3}, one_pass, ours=True, one_pass=True, softcap=True),
        Provider("broken", {"train": 3}, fails, softcap=True),
        Provider("wrong", {"train": 3}, lambda case: with_a_wrong_gradient(case, share=0.5)),
    ]
    out = tmp_path / "rivals"
    bench.main([*TINY, "--tokens", "128", "--tasks", "train", "--out", str(out)], providers)
    plain, capped = read(out)["rows"]
    for row in (plain, capped):
        assert of_row(row, "train", "broken")["left_out"] == "ZeroDivisionError: of the rival"
        assert of_row(row, "train", "ours, one pass")["ms"] > 0
    assert of_row(plain, "train", "wrong")["errors"]["d_weight_error"] > 1e-2
    assert of_row(capped, "train", "wrong")["left_out"] == "has no softcap"
    text = out.with_name("rivals.md").read_text()
    assert "broken, train: ZeroDivisionError: of the rival (2 shapes: tiny 128, tiny-softcap 128)" in text


def test_no_time_left_is_said_and_runs_are_merged(tmp_path):
    run = [*TINY, "--tasks", "forward", "--tokens", "128", "--commit", "abc"]
    bench.main([*run, "--models", "tiny", "--out", str(tmp_path / "a")])
    bench.main([*run, "--models", "tiny-softcap", "--providers", "ours", "--out", str(tmp_path / "b")])
    bench.main([*run, "--seconds", "1e-6", "--out", str(tmp_path / "none")])
    assert read(tmp_path / "none")["left_out"] == [
        f"{model.name}, 128 tokens: no time left of 1e-06 s" for model in TINY_MODELS
    ]
    parts = [str(tmp_path / f"{name}.json") for name in ("a", "b", "none")]
    bench.main(["--merge", *parts, "--out", str(tmp_path / "all")])
    whole = read(tmp_path / "all")
    assert [row["model"] for row in whole["rows"]] == ["tiny", "tiny-softcap"]
    assert "naive: not asked for (tiny-softcap 128)" in whole["left_out"]
    assert "naive" not in whole["absent"]
    with pytest.raises(ValueError, match=r"expected every shape once, got \[\('tiny', 128\)\] several times"):
        bench.main(["--merge", parts[0], str(tmp_path / "all.json"), "--out", str(tmp_path / "twice")])
    other = read(tmp_path / "b") | {"commit": "def"}
    (tmp_path / "b.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="expected one commit, got abc"):
        bench.main(["--merge", *parts, "--out", str(tmp_path / "all")])


def test_real_data_are_one_more_shape(tmp_path):
    problem = peaked(TINY_MODELS[0], 96, "cpu")
    tokens = {"name": "real", "hidden": problem.hidden.detach(), "labels": problem.labels}
    torch.save(tokens, tmp_path / "x.hidden.pt")
    torch.save({"weight": problem.weight.detach()}, tmp_path / "x.weight.pt")
    files = [str(tmp_path / f"x.{part}.pt") for part in ("hidden", "weight")]
    run = [*TINY, "--tasks", "forward", "--models", "tiny", "--tokens", "128"]
    bench.main([*run, "--out", str(tmp_path / "out"), "--real", *files])
    assert [(row["model"], row["N"]) for row in read(tmp_path / "out")["rows"]] == [("tiny", 128), ("real", 96)]
    with pytest.raises(ValueError, match=r"\['weight'\] are in none"):
        load_real(files[:1], "cpu")


def test_truth_is_the_references():
    model = TINY_MODELS[1]
    problem = peaked(model, 48, "cpu")
    exact = replace(problem, hidden=problem.hidden.double(), weight=problem.weight.double())
    options = {"softcap": model.softcap, "backend": "reference", "outputs": ("log_probs", "entropy", "logsumexp")}
    stats = linear_log_probs(exact.hidden, exact.weight, exact.labels, **options)
    true = token_truth(problem)
    for name in ("log_probs", "entropy", "logsumexp"):
        torch.testing.assert_close(getattr(true, name), getattr(stats, name).detach(), rtol=1e-12, atol=1e-12)


def test_registry_names_each_task_of_a_provider_once():
    keys = [(task, provider.name) for provider in PROVIDERS for task in provider.tasks]
    assert len(keys) == len(set(keys))
    assert {task for task, _ in keys} == set(TASKS)
    assert set(report.STANDARD.items()) <= set(keys)


def test_command_is_light_and_helps():
    code = "import sys, rlhf_losses.cli; print([name for name in sys.modules if name.startswith('rlhf_losses.bench')])"
    assert python(code).strip() == "[]"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--help"])
    assert stopped.value.code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "tiny"], "expected --out NAME"),
        ([*TINY, "--out", "x", "--models", "Qwen"], "expected some of tiny, tiny-softcap, got Qwen"),
        (["--device", "cuda", "--out", "x"], "try --device cpu --size tiny"),
    ],
)
def test_wrong_options_are_refused(options, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench.main(options)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "expected 8 or more, got 0"),
        (["--turns", "0"], "expected 1 or more, got 0"),
        (["--real", "no.pt"], "--real: expected files that exist, got no.pt"),
        (["--merge", "no.json"], "--merge: expected files that exist, got no.json"),
        (["--models"], "--models: expected names, or --real beside none"),
    ],
)
def test_odd_options_end_before_anything_is_measured(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--out", str(tmp_path / "x"), "--size", "tiny", "--device", "cpu", *options])
    assert message in capsys.readouterr().err
