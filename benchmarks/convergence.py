"""Training with the fused head beside training with full logits: do the curves overlay?

    PYTHONPATH=. python benchmarks/convergence.py --out docs/convergence       # all cases, on a GPU where there is one
    PYTHONPATH=. python benchmarks/convergence.py --out docs/convergence --case gemma2 --device cpu

smollm2  SmolLM2-135M on text: ``fuse_head`` beside transformers' own loss
gemma2   a small Gemma 2 with random weights and a soft cap that bites, the same way
rl       SmolLM2-135M by reinforcement, clipped loss and entropy bonus: ``linear_policy_loss`` beside log_softmax

fp32 on a CPU; on a GPU bf16 (autocast over fp32 parameters). The runs of a case start from the same parameters and see
the same batches. Rounding alone drives two runs apart, and how far is measured by a second unfused run that sums in
another order: over tokens (the rows of each batch reversed), in every linear layer, head included (two products over
every other column), and over the vocabulary (reversed; logsumexp and entropy in chunks of it). The largest difference
of the two is the bound, and the fused run has to stay within FACTOR times it, in every curve: the loss; the gradient's
norm, since AdamW does not see a gradient's scale; in rl the entropy. In 16 bits one update can put two runs far apart:
where the largest difference is no small part of what its curve covers, the median of all updates is bounded, too, and
if that is none either the bound shows nothing, and the case fails.

Writes CASE-DEVICE.json and .png to --out, and ends with 1 and the numbers if a case fails; --judge FILES judges curves
that were written before, and rewrites their verdicts and figures. What has to be installed: docs/convergence.md.
"""

import argparse
import copy
import hashlib
import json
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

# Threads that spin while they wait take the time of whoever shares the cores. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor, nn

from rlhf_losses import PolicyBatch, PolicyLossConfig, check, linear_policy_loss
from rlhf_losses.benchmarks.common import facts, package_version
from rlhf_losses.benchmarks.data import load_smollm2, read_text
from rlhf_losses.integrations.transformers import fuse_head

# Of the fused curve's difference over the bound, and of the bound over the range of the curve.
FACTOR, LARGEST_BOUND = 3.0, 0.1
LARGEST_NORM = 1.0
VOCABULARY_CHUNKS = 32
TEMPERATURE, CLIP, ENTROPY_COEFFICIENT = 0.9, 0.2, 0.02
# The second update's ratio is not 1.
UPDATES_A_SAMPLE = 2
# Batch and length; prompts, completions of each, length of both. A CPU has minutes for what a GPU does in seconds.
TEXT_SIZES = {"smollm2": {"cpu": (2, 48), "cuda": (4, 256)}, "gemma2": {"cpu": (4, 64), "cuda": (8, 256)}}
RL_SIZES = {"cpu": (2, 6, 8, 12), "cuda": (4, 16, 16, 24)}
STEPS = {"smollm2": 100, "gemma2": 100, "rl": 30}

UNFUSED, REORDERED, FUSED = "unfused", "unfused, other order", "fused"
Curves = dict[str, list[float]]


@dataclass(frozen=True)
class Batch:
    """Token ids [B, T]; in reinforcement prompts and responses, the latter with advantages and the log-probabilities of
    the policy that sampled them [B, R], and rewards [B]."""

    ids: Tensor
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    rewards: Tensor | None = None

    def reversed(self) -> "Batch":
        others = (None if x is None else x.flip(0) for x in (self.advantages, self.old_log_probs, self.rewards))
        return Batch(self.ids.flip(0), *others)


# The loss, with gradient, and what else to record.
Objective = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Case:
    """What the runs share, and in what they differ.

    batches: is given the unfused run's model, from which it may sample; what it yields is kept for the other runs.
    fuse: what is done to the fused run's model before.
    """

    model: nn.Module
    batches: Callable[[nn.Module], Iterable[Batch]]
    unfused: Objective
    reordered: Objective
    fused: Objective
    fuse: Callable[[nn.Module], object]
    learning_rate: float


def precision(device: torch.device) -> AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def train(model: nn.Module, batches: Iterable[Batch], objective: Objective, learning_rate: float) -> Curves:
    """One update a batch. Curves: loss, grad_norm, and what the objective adds."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model.train()
    seen: list[dict[str, Tensor]] = []
    for batch in batches:
        with precision(device):
            loss, others = objective(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append({"loss": loss.detach(), "grad_norm": norm.detach(), **others})
    # Not before, so that no update waits for the device.
    return {name: [update[name].item() for update in seen] for name in seen[0]}


def compare(case: Case) -> dict[str, Curves]:
    """The curves of the three runs."""
    kept: list[Batch] = []

    def sampled(model: nn.Module) -> Iterator[Batch]:
        for batch in case.batches(model):
            kept.append(batch)
            yield batch

    def run(
        name: str,
        objective: Objective,
        prepare: Callable[[nn.Module], object],
        batches: Callable[[nn.Module], Iterable[Batch]],
    ) -> Curves:
        start = time.perf_counter()
        model = copy.deepcopy(case.model)
        prepare(model)
        curves = train(model, batches(model), objective, case.learning_rate)
        print(f"  {name}: {len(kept)} updates in {time.perf_counter() - start:.0f} s", flush=True)
        return curves

    return {
        UNFUSED: run(UNFUSED, case.unfused, lambda model: None, sampled),
        REORDERED: run(REORDERED, case.reordered, reorder, lambda model: [batch.reversed() for batch in kept]),
        FUSED: run(FUSED, case.fused, case.fuse, lambda model: kept),
    }


def reorder(model: Any) -> None:
    """Every linear layer as the sum of two products, over every other column; the rows of the head reversed, over which
    the gradient of the hidden states is summed."""

    def forward(layer: nn.Linear, flipped: bool, x: Tensor) -> Tensor:
        weight = layer.weight.flip(0) if flipped else layer.weight
        even, odd = (nn.functional.linear(x[..., k::2], weight[:, k::2]) for k in (0, 1))
        both = (even + odd).flip(-1) if flipped else even + odd
        return both if layer.bias is None else both + layer.bias

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            vars(layer)["forward"] = partial(forward, layer, layer is model.get_output_embeddings())


@dataclass(frozen=True)
class Verdict:
    """Of one curve: how far the fused run is from the unfused one, and the one in another order, which bounds it; and
    the range of the unfused values. ``measure``: the "largest" of all updates; their "median" as well where that bound,
    which one update decides, is no small part of the range."""

    curve: str
    measure: str
    fused: float
    bound: float
    span: float
    problem: str | None

    @classmethod
    def of(cls, curve: str, runs: dict[str, Curves]) -> "Verdict":
        values = runs[UNFUSED][curve]
        span = max(values) - min(values)
        fused, others = (
            [abs(a - b) for a, b in zip(runs[name][curve], values, strict=True)] for name in (FUSED, REORDERED)
        )
        measure, difference, bound = "largest", max(fused), max(others)
        if bound >= LARGEST_BOUND * span:
            measure, difference, bound = "median", statistics.median(fused), statistics.median(others)
        problem = None
        if not all(math.isfinite(x) for run in runs.values() for x in run[curve]):
            problem = "not finite"
        elif not 0 < bound < LARGEST_BOUND * span:
            problem = f"expected a bound above 0 and below {LARGEST_BOUND} of the range, this one shows nothing"
        elif difference > FACTOR * bound or max(fused) > FACTOR * max(others):
            problem = f"expected at most {FACTOR:g} times the bound"
        return cls(curve, measure, difference, bound, span, problem)

    def line(self) -> str:
        times = self.fused / self.bound if self.bound else math.inf
        return (
            f"{self.curve}, {self.measure}: fused {self.fused:.2e}, bound {self.bound:.2e}, {times:.2f} times it; "
            f"range {self.span:.2e}: {self.problem or 'ok'}"
        )


def judge(runs: dict[str, Curves]) -> list[Verdict]:
    """One verdict a curve of the fused run; a case is right if none has a problem."""
    return [Verdict.of(curve, runs) for curve in runs[FUSED]]


def text_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' own, of a fused model without logits."""
    return model(input_ids=batch.ids, labels=batch.ids, use_cache=False).loss, {}


def vocabulary_sum(terms: Tensor) -> Tensor:
    """[..., V] -> [...], in another order than torch's."""
    return torch.stack([part.sum(-1) for part in terms.chunk(VOCABULARY_CHUNKS, -1)]).sum(0)


def vocabulary_log_softmax(z: Tensor) -> Tensor:
    parts = torch.stack([part.logsumexp(-1) for part in z.chunk(VOCABULARY_CHUNKS, -1)])
    return z - parts.logsumexp(0)[..., None]


def reordered_text_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1].float()
    return -vocabulary_log_softmax(logits).gather(-1, batch.ids[:, 1:, None]).mean(), {}


def text_case(
    model: nn.Module, ids: Tensor, *, batch: int, length: int, steps: int, learning_rate: float, seed: int = 0
) -> Case:
    """Next tokens of ``ids`` [N], rows cut out of it at random."""
    starts = torch.randint(len(ids) - length, (steps, batch, 1), generator=torch.Generator().manual_seed(seed))
    device = next(model.parameters()).device
    rows = ids[starts + torch.arange(length)].to(device)
    return Case(
        model, lambda model: map(Batch, rows), text_loss, reordered_text_loss, text_loss, fuse_head, learning_rate
    )


def response_hidden(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states [B, R, H], which score the response, and its tokens [B, R]."""
    assert batch.advantages is not None
    length = batch.advantages.shape[1]
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return hidden[:, -length - 1 : -1], batch.ids[:, -length:]


def clipped_loss(log_probs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert batch.advantages is not None
    assert batch.rewards is not None
    assert batch.old_log_probs is not None
    ratio = (log_probs - batch.old_log_probs).exp()
    gain = torch.minimum(batch.advantages * ratio, batch.advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    loss = -(gain + ENTROPY_COEFFICIENT * entropy).mean()
    return loss, {"entropy": entropy.detach().mean(), "reward": batch.rewards.mean()}


def full_log_probs(
    model: Any, batch: Batch, log_softmax: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [B, R] from all logits."""
    hidden, labels = response_hidden(model, batch)
    log_p = log_softmax(model.lm_head(hidden).float() / TEMPERATURE)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -total(log_p.exp() * log_p)


IN_ORDER = (partial(torch.log_softmax, dim=-1), partial(torch.sum, dim=-1))


def unfused_policy_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_loss(*full_log_probs(model, batch, *IN_ORDER), batch)


def reordered_policy_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_loss(*full_log_probs(model, batch, vocabulary_log_softmax, vocabulary_sum), batch)


def fused_policy_loss(
    model: Any, batch: Batch, entropy_coefficient: float = ENTROPY_COEFFICIENT
) -> tuple[Tensor, dict[str, Tensor]]:
    assert batch.advantages is not None
    hidden, labels = response_hidden(model, batch)
    policy_batch = PolicyBatch(advantages=batch.advantages, old_log_probs=batch.old_log_probs)
    config = PolicyLossConfig(clip_low=CLIP, clip_high=CLIP, dual_clip=None, entropy_coefficient=entropy_coefficient)
    loss, metrics = linear_policy_loss(
        hidden, model.lm_head.weight, labels, policy_batch, config, temperature=TEMPERATURE
    )
    return loss, {"entropy": metrics["entropy"]}


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Prompts [B, P] and what the model goes on with: [B, P + length]."""
    ids = token = prompts
    cache = None
    for _ in range(length):
        output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        token = torch.multinomial(torch.softmax(output.logits[:, -1].float() / TEMPERATURE, -1), 1, generator=generator)
        ids = torch.cat([ids, token], 1)
    return ids


def rl_case(
    model: nn.Module,
    ids: Tensor,
    rewarded: Tensor,
    *,
    prompts: int,
    group: int,
    prompt_length: int,
    length: int,
    steps: int,
    learning_rate: float,
    seed: int = 0,
) -> Case:
    """The reward of a completion is the share of its tokens that ``rewarded`` [V] names; within the completions of one
    prompt, cut out of ``ids`` [N], rewards are normalised to advantages. Sampled by the unfused run."""
    device = next(model.parameters()).device
    rewarded = rewarded.to(device)

    def batches(model: nn.Module) -> Iterator[Batch]:
        chooser, generator = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
        for step in range(steps):
            if step % UPDATES_A_SAMPLE == 0:
                starts = torch.randint(len(ids) - prompt_length, (prompts, 1), generator=chooser)
                rows = ids[starts + torch.arange(prompt_length)].to(device).repeat_interleave(group, 0)
                with precision(device):
                    sampled = sample(model, rows, length, generator)
                    rewards = rewarded[sampled[:, -length:]].float().mean(1)
                    grouped = rewards.view(prompts, group)
                    spread = grouped.std(1, keepdim=True) + 1e-2
                    advantages = ((grouped - grouped.mean(1, keepdim=True)) / spread).view(-1, 1).expand(-1, length)
                    batch = Batch(sampled, advantages.contiguous())
                    with torch.no_grad():
                        old_log_probs, _ = full_log_probs(model, batch, *IN_ORDER)
            yield Batch(sampled, batch.advantages, old_log_probs, rewards)

    return Case(
        model, batches, unfused_policy_loss, reordered_policy_loss, fused_policy_loss, lambda model: None, learning_rate
    )


def gemma2(vocab: int, hidden: int, layers: int) -> nn.Module:
    """Random weights. The cap is low and the weights are wide, so that logits reach it: with Gemma 2's own, 30 and
    0.02, a small model's never would."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        query_pre_attn_scalar=hidden // 4,
        sliding_window=64,
        final_logit_softcapping=6.0,
        initializer_range=0.1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def word_ids(text: str, vocab: int) -> Tensor:
    """Words and signs by their frequency; those beyond the vocabulary share the last id."""
    words = re.findall(r"\w+|[^\w\s]", text)
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocab - 1))}
    return torch.tensor([ranks.get(word, vocab - 1) for word in words])


@cache
def smollm2() -> tuple[Any, Any]:
    """Read once, since no run touches the model itself."""
    return load_smollm2(attn_implementation="eager")


def make_case(name: str, device: str, steps: int) -> tuple[Case, dict[str, Any]]:
    """One of STEPS by name, and what its report says of it."""
    if name == "gemma2":
        batch, length = TEXT_SIZES[name][device]
        model, ids = gemma2(vocab=4096, hidden=256, layers=4), word_ids(read_text(), 4096)
        rate = 1e-3
        case = text_case(model.to(device), ids, batch=batch, length=length, steps=steps, learning_rate=rate)
        return case, {"batch": batch, "length": length, "learning_rate": rate, "softcap": 6.0}
    model, tokenizer = smollm2()
    ids = torch.tensor(tokenizer(read_text())["input_ids"])
    if name == "smollm2":
        batch, length = TEXT_SIZES[name][device]
        rate = 1e-4
        case = text_case(model.to(device), ids, batch=batch, length=length, steps=steps, learning_rate=rate)
        return case, {"batch": batch, "length": length, "learning_rate": rate}
    prompts, group, prompt_length, length = RL_SIZES[device]
    sizes = {"prompts": prompts, "group": group, "prompt_length": prompt_length, "length": length}
    pieces = tokenizer.batch_decode(
        [[token] for token in range(model.config.vocab_size)], clean_up_tokenization_spaces=False
    )
    rewarded = torch.tensor([piece[:2].lower() == " s" for piece in pieces])
    rate = 2e-5
    case = rl_case(model.to(device), ids, rewarded, **sizes, steps=steps, learning_rate=rate)
    return case, {**sizes, "learning_rate": rate, "clip": CLIP, "entropy_coefficient": ENTROPY_COEFFICIENT}


def draw(file: Path, title: str, runs: dict[str, Curves], verdicts: list[Verdict]) -> None:
    """Curves above, differences from the unfused run below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(verdicts), figsize=(4.6 * len(verdicts), 5.4), squeeze=False, sharex=True)
    for (above, below), verdict in zip(axes.T, verdicts, strict=True):
        values = runs[UNFUSED][verdict.curve]
        updates = range(1, len(values) + 1)
        above.plot(updates, values, color="0.6", linewidth=3, label=UNFUSED)
        above.plot(updates, runs[FUSED][verdict.curve], color="tab:red", linewidth=1, label=FUSED)
        above.set_title(verdict.curve.replace("_", " "))
        for name, color in ((REORDERED, "tab:blue"), (FUSED, "tab:red")):
            gaps = [abs(a - b) for a, b in zip(runs[name][verdict.curve], values, strict=True)]
            below.plot(updates, gaps, color=color, linewidth=1, label=name)
        below.axhline(FACTOR * verdict.bound, color="black", linestyle=":", label=f"{FACTOR:g} times the bound")
        below.set_yscale("log")
        below.set_xlabel("update")
    axes[0, 0].legend(fontsize=8)
    axes[1, 0].legend(fontsize=8)
    axes[1, 0].set_ylabel("difference from unfused")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def run_case(name: str, device: str, steps: int, out: Path, commit: str | None) -> bool:
    """Trains, and ``write``s."""
    print(f"{name}, {steps} updates on {device}", flush=True)
    case, settings = make_case(name, device, steps)
    runs = compare(case)
    check()
    about = facts(commit, device) | {
        "transformers": package_version("transformers"),
        "text": hashlib.sha256(read_text().encode()).hexdigest()[:12],
        "dtype": "float32" if device == "cpu" else "bfloat16 (autocast)",
    }
    result = {
        "case": name,
        "about": about,
        "settings": {"steps": steps, "factor": FACTOR, **settings},
        "curves": {run: {k: [float(f"{x:.9g}") for x in xs] for k, xs in seen.items()} for run, seen in runs.items()},
    }
    short = "cpu" if device == "cpu" else str(about["device"]).lower().replace(" ", "-")
    return write(out / f"{name}-{short}.json", result)


def write(file: Path, result: dict[str, Any]) -> bool:
    """The curves judged, written and drawn, and what came out; whether all is well."""
    verdicts = judge(result["curves"])
    result |= {"verdicts": [asdict(verdict) for verdict in verdicts]}
    file.write_text(json.dumps(result) + "\n")
    about = result["about"]
    draw(file.with_suffix(".png"), f"{result['case']}: {about['device']}, {about['dtype']}", result["curves"], verdicts)
    for verdict in verdicts:
        print(f"  {verdict.line()}", flush=True)
    return all(verdict.problem is None for verdict in verdicts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=STEPS, default=list(STEPS), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="updates a run; default 100, of rl 30")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the results")
    where.add_argument("--judge", type=Path, nargs="+", metavar="JSON", help="judge these results, train nothing")
    parser.add_argument("--commit", help="where git can't say it")
    options = parser.parse_args(arguments)
    if options.judge:
        right = [write(file, json.loads(file.read_text())) for file in options.judge]
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        right = [
            run_case(name, options.device, options.steps or STEPS[name], options.out, options.commit)
            for name in options.case
        ]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
