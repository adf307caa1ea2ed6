"""A reinforcement-learning run on a real language model, end to end, with ``linear_log_probs`` as the head.

    python examples/rl_demo.py                  # what `make demo` runs; with a GPU: Triton and bf16
    python examples/rl_demo.py --self-made      # a small model with random weights instead of SmolLM2

The task is alliteration: continue a sentence with words that begin with "s". The reward of a completion is the number
of different such words over the number of its words, in [0, 1]. Each step samples a group of completions per prompt,
normalises the rewards within the group (GRPO), scores the samples with the op for the old log-probs, and takes two
optimizer steps on halves of the batch with a clipped policy loss and an entropy bonus. The loss of the second half is
taken where the policy has already moved, so that the ratio differs from 1 and the clip has work.

The rewards before and after are of fresh samples of held-out prompts, at the temperature of the training.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# A model read from a local file needs no hub; the progress bar is this script's own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Threads that wait for each other give their core away: on a machine that does other work too, spinning ones cost more
# than they gain. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# In a checkout that is not installed, the package lies one folder up.
if importlib.util.find_spec("rlhf_losses") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from demo_actors import Actor, self_made, smollm2, why_not_smollm2
from head_memory import WORKSPACE_BYTES, full_logits, fused
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

import rlhf_losses
from rlhf_losses import TokenStats, backend_for, linear_log_probs

LETTER = "s"
# Fewer words than this count as this many: silence and a lone "so" are no way to a high reward.
FEWEST_WORDS = 8
TEMPERATURE = 0.9
NEW_TOKENS = 12
PROMPTS_PER_STEP = 4
MINI_BATCHES = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ENTROPY_COEFFICIENT = 0.015
WARM_UP_STEPS = 4
HELD_OUT_GROUP = 8
MEMORY_TOKENS, MEMORY_VOCAB, MEMORY_HIDDEN = 2048, 49152, 576


@dataclass(frozen=True)
class Batch:
    """Sampled sequences, prompts padded on the left: ids, attention and response mask [B, L]; the responses' texts."""

    ids: Tensor
    attention: Tensor
    response: Tensor
    texts: list[str]

    def positions(self) -> Tensor:
        return (self.attention.cumsum(-1) - 1).clamp(min=0)

    def rows(self, index: Tensor) -> "Batch":
        picked = [self.texts[i] for i in index.tolist()]
        return Batch(self.ids[index], self.attention[index], self.response[index], picked)


@dataclass(frozen=True)
class StepMetrics:
    """Means over the response tokens of one training step; reward over its completions."""

    reward: float
    entropy: float
    kl: float
    clipped: float
    loss: float


def autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """bf16 for the products on a GPU, over fp32 parameters; fp32 on the CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@torch.no_grad()
def sample(actor: Actor, prompts: Sequence[str], group: int, generator: torch.Generator) -> Batch:
    """``group`` completions of every prompt. Each prompt is read once, its key-value cache repeated for the group."""
    from transformers import DynamicCache

    trunk, head = actor.model.model, actor.model.lm_head
    device = head.weight.device
    encoded = [actor.encode(prompt) for prompt in prompts]
    width = max(map(len, encoded))
    ids = torch.tensor([[0] * (width - len(e)) + e for e in encoded], device=device)
    attention = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded], device=device)
    position = attention.cumsum(-1) - 1
    stops = torch.tensor(actor.stop_ids, dtype=torch.long, device=device)
    cache = DynamicCache(config=actor.model.config)
    with autocast(device):
        hidden = trunk(
            input_ids=ids,
            attention_mask=attention,
            position_ids=position.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        cache.batch_repeat_interleave(group)
        hidden, ids, attention, position = (
            x.repeat_interleave(group, 0) for x in (hidden, ids, attention, position[:, -1:])
        )
        response = torch.zeros_like(attention)
        alive = torch.ones_like(position)
        for step in range(NEW_TOKENS):
            p = torch.softmax(head(hidden).float() / TEMPERATURE, -1)
            token = torch.multinomial(p, 1, generator=generator)
            ids = torch.cat([ids, token], 1)
            response = torch.cat([response, alive], 1)
            attention = torch.cat([attention, torch.ones_like(token)], 1)
            alive = alive * ~torch.isin(token, stops)
            if step + 1 < NEW_TOKENS:
                position = position + 1
                hidden = trunk(
                    input_ids=token,
                    attention_mask=attention,
                    position_ids=position,
                    past_key_values=cache,
                    use_cache=True,
                ).last_hidden_state[:, -1]
    texts = [actor.decode(row[kept.bool()].tolist()) for row, kept in zip(ids, response, strict=True)]
    return Batch(ids, attention, response, texts)


def reward(text: str, whole_words: frozenset[str]) -> float:
    """Different words of the vocabulary that begin with the letter, over all words of the completion."""
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", text)]
    hits = {word for word in words if word.startswith(LETTER) and word in whole_words}
    return len(hits) / max(len(words), FEWEST_WORDS)


def rewards(actor: Actor, batch: Batch) -> Tensor:
    return torch.tensor([reward(text, actor.whole_words) for text in batch.texts], device=batch.ids.device)


def group_advantages(values: Tensor, group: int) -> Tensor:
    """Rewards [B] -> advantages [B], mean 0 and deviation 1 within each prompt's group."""
    grouped = values.view(-1, group)
    spread = grouped.std(-1, keepdim=True) + 1e-2
    return ((grouped - grouped.mean(-1, keepdim=True)) / spread).view(-1)


def hidden_states(actor: Actor, batch: Batch) -> Tensor:
    """Last hidden states [B, L - 1, H], each of which scores the token after it."""
    return actor.model.model(
        input_ids=batch.ids, attention_mask=batch.attention, position_ids=batch.positions(), use_cache=False
    ).last_hidden_state[:, :-1]


def score(actor: Actor, batch: Batch, outputs: Sequence[str] = ("log_probs", "entropy")) -> TokenStats:
    """Log-probs and entropy [B, L - 1] of the response tokens; rows of the prompt are masked and never multiplied."""
    with autocast(batch.ids.device):
        return linear_log_probs(
            hidden_states(actor, batch),
            actor.model.lm_head.weight,
            batch.ids[:, 1:],
            temperature=TEMPERATURE,
            mask=batch.response[:, 1:],
            outputs=outputs,
        )


def clipped_policy_loss(
    stats: TokenStats, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped loss minus the entropy bonus, a mean over the tokens of ``mask``; log-probs [B, L], advantages [B].

    Metrics: "clipped", the share of tokens whose gradient the clip removed; "kl", the k3 estimate of KL(old || new).
    """
    log_ratio = stats.log_probs - old_log_probs
    ratio = log_ratio.exp()
    gain = advantages[:, None] * ratio
    clipped_gain = advantages[:, None] * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    objective = torch.minimum(gain, clipped_gain) + ENTROPY_COEFFICIENT * stats.entropy

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum() / mask.sum()

    loss = -mean(objective)
    with torch.no_grad():
        metrics = {
            "loss": loss.item(),
            "entropy": mean(stats.entropy).item(),
            "kl": mean(ratio - 1 - log_ratio).item(),
            "clipped": mean((clipped_gain < gain).float()).item(),
        }
    return loss, metrics


def training_step(
    actor: Actor,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[str],
    generator: torch.Generator,
) -> StepMetrics:
    """Sample, reward, old log-probs, and one optimizer step per mini-batch."""
    batch = sample(actor, prompts, actor.group, generator)
    values = rewards(actor, batch)
    advantages = group_advantages(values, actor.group)
    with torch.no_grad():
        old_log_probs = score(actor, batch, outputs=("log_probs",)).log_probs
    order = torch.randperm(len(values), generator=generator, device=generator.device)
    seen: list[dict[str, float]] = []
    for index in order.chunk(MINI_BATCHES):
        part = batch.rows(index)
        loss, metrics = clipped_policy_loss(
            score(actor, part), old_log_probs[index], advantages[index], part.response[:, 1:]
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seen.append(metrics)
    means = {name: sum(metrics[name] for metrics in seen) / len(seen) for name in seen[0]}
    # The first mini-batch is on-policy, its ratio is 1: what the policy moved by shows in the last.
    return StepMetrics(
        reward=values.mean().item(),
        entropy=means["entropy"],
        loss=means["loss"],
        kl=seen[-1]["kl"],
        clipped=seen[-1]["clipped"],
    )


@dataclass(frozen=True)
class HeldOut:
    """Reward of fresh completions of the held-out prompts."""

    mean: float
    standard_error: float
    completions: int
    example: str


def held_out(actor: Actor, seed: int, device: torch.device) -> HeldOut:
    """The same prompts and the same seed before and after the training, none of them used by it."""
    batch = sample(actor, actor.held_out_prompts, HELD_OUT_GROUP, torch.Generator(device).manual_seed(seed))
    values = rewards(actor, batch)
    # The completion whose reward is the median: neither the best nor the worst.
    middle = int(values.argsort()[len(values) // 2])
    prompt = actor.held_out_prompts[middle // HELD_OUT_GROUP]
    return HeldOut(
        mean=values.mean().item(),
        standard_error=values.std().item() / len(values) ** 0.5,
        completions=len(values),
        example=f"{prompt}{batch.texts[middle]}".replace("\n", " "),
    )


@dataclass(frozen=True)
class Agreement:
    """Largest differences of the op from fp32 logits of the same head; gradients relative to the largest entry."""

    tokens: int
    log_prob: float
    entropy: float
    d_hidden: float
    d_weight: float


def agreement(actor: Actor, batch: Batch) -> Agreement:
    """The op against log_softmax over the model's own full logits, in fp32, on sampled tokens.

    On a GPU both sides start from the same bf16 hidden states and head, and the reference multiplies them in fp32.
    """
    weight = actor.model.lm_head.weight.detach()
    with torch.no_grad(), autocast(batch.ids.device):
        hidden = hidden_states(actor, batch)
    chosen = batch.response[:, 1:].bool()
    if weight.is_cuda:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    hidden, labels = hidden[chosen], batch.ids[:, 1:][chosen]

    def graded(dtype: torch.dtype, way: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        log_probs, entropy = way(h, w)
        (-log_probs.mean() - ENTROPY_COEFFICIENT * entropy.mean()).backward()
        return [log_probs.detach(), entropy.detach(), h.grad, w.grad]

    own = graded(torch.float32, lambda h, w: full_logits(h, w, labels, TEMPERATURE))
    ours = graded(weight.dtype, lambda h, w: fused(h, w, labels, TEMPERATURE))
    gaps = [(a.float() - b).abs().max().item() for a, b in zip(ours, own, strict=True)]
    d_hidden, d_weight = (gap / grad.abs().max().item() for gap, grad in zip(gaps[2:], own[2:], strict=True))
    return Agreement(len(labels), gaps[0], gaps[1], d_hidden, d_weight)


def head_memory(way: str) -> dict[str, float]:
    """Peak memory of the head in a fresh process (head_memory.py)."""
    script = Path(__file__).with_name("head_memory.py")
    sizes = {"tokens": MEMORY_TOKENS, "vocab": MEMORY_VOCAB, "hidden": MEMORY_HIDDEN}
    package = str(Path(rlhf_losses.__file__).resolve().parent.parent)
    answer = subprocess.run(
        [sys.executable, str(script), way, *(word for name, n in sizes.items() for word in (f"--{name}", str(n)))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout)


@dataclass(frozen=True)
class Report:
    """All that the table and the figure show."""

    actor: str
    backend: str
    dtype: str
    before: HeldOut
    after: HeldOut
    history: list[StepMetrics]
    agreement: Agreement
    with_logits: dict[str, float]
    with_op: dict[str, float]
    seconds: float


def tables(report: Report) -> list[Table]:
    """The result as one table, and one completion of before and after."""
    mib = 2**20
    result = Table(title=f"{report.actor}, {report.backend} back end, {report.dtype}", box=box.ROUNDED)
    result.add_column("what")
    result.add_column("value", justify="right")
    result.add_column("how", style="dim")
    same = report.agreement
    result.add_row("log-prob, largest difference", f"{same.log_prob:.1e}", f"to fp32 logits, {same.tokens} tokens")
    result.add_row("entropy, largest difference", f"{same.entropy:.1e}", "the same, in nats")
    result.add_row("gradient of hidden states", f"{same.d_hidden:.1e}", "difference over largest entry")
    result.add_row("gradient of the head", f"{same.d_weight:.1e}", "the same", end_section=True)
    for label, seen in (("reward before", report.before), ("reward after", report.after)):
        result.add_row(
            label,
            f"{seen.mean:.2f} ± {seen.standard_error:.2f}",
            f"{seen.completions} samples, held-out prompts",
            end_section=seen is report.after,
        )
    shape = f"{MEMORY_TOKENS} x {MEMORY_HIDDEN} x {MEMORY_VOCAB}"
    result.add_row("head's peak, full logits", f"{report.with_logits['bytes'] / mib:.0f} MiB", f"both passes, {shape}")
    result.add_row(
        "head's peak, the op",
        f"{report.with_op['bytes'] / mib:.0f} MiB",
        f"workspace of {WORKSPACE_BYTES / mib:.0f} MiB",
    )
    result.add_row("head's time, full logits", f"{report.with_logits['seconds']:.2g} s", "the same, one run")
    result.add_row("head's time, the op", f"{report.with_op['seconds']:.2g} s", "the same, one run", end_section=True)
    result.add_row("training steps", str(len(report.history)), f"{report.seconds:.0f} s in all")

    texts = Table(title="a completion of median reward", box=box.ROUNDED, show_header=False)
    # As Text: a model may well write what rich would take for its markup.
    texts.add_row("before", Text(report.before.example), end_section=True)
    texts.add_row("after", Text(report.after.example))
    return [result, texts]


INK, MUTED, GRID = "#1f2933", "#66707a", "#e4e7eb"
BLUE, ORANGE, GREEN, RED = "#2563a8", "#d9822b", "#2f8f5b", "#c0392b"


def figure(report: Report, path: Path) -> None:
    """Reward, entropy, distance from the old policy, and the head's memory."""
    steps = range(1, len(report.history) + 1)
    style = {
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "font.size": 10,
        "lines.linewidth": 2,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        canvas, ((rewarded, unsure), (moved, memory)) = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained")
        canvas.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        canvas.suptitle(
            f"{report.actor}, {len(report.history)} steps, {report.backend} back end, {report.dtype}",
            fontsize=14,
            color=INK,
        )
        for panel in (rewarded, unsure, moved):
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        rewarded.plot(steps, [m.reward for m in report.history], color=BLUE, label="training batches")
        rewarded.errorbar(
            [0, len(report.history) + 1],
            [report.before.mean, report.after.mean],
            yerr=[report.before.standard_error, report.after.standard_error],
            fmt="o",
            color=ORANGE,
            markersize=7,
            capsize=4,
            label="held-out prompts",
            zorder=3,
        )
        rewarded.set(title="Reward", xlabel="step", ylabel=f'share of different "{LETTER}" words', ylim=(0, 1.02))
        rewarded.legend(loc="best")

        unsure.plot(steps, [m.entropy for m in report.history], color=GREEN)
        unsure.set(title="Entropy of the policy", xlabel="step", ylabel="nats per token")
        unsure.set_ylim(0, 1.1 * max(m.entropy for m in report.history))

        moved.plot(steps, [100 * m.clipped for m in report.history], color=RED)
        moved.set(title="Last mini-batch of each step, off-policy", xlabel="step")
        moved.set_ylabel("clipped tokens, %", color=RED)
        moved.set_ylim(bottom=0)
        distance = moved.twinx()
        distance.plot(steps, [m.kl for m in report.history], color=BLUE)
        distance.set_ylabel("KL from the old policy, nats", color=BLUE)
        distance.set_ylim(bottom=0)
        distance.grid(False)

        sizes = [report.with_logits["bytes"] / 2**20, report.with_op["bytes"] / 2**20]
        bars = memory.barh(["full logits", "the op"], sizes, color=[MUTED, BLUE], height=0.55)
        memory.bar_label(bars, [f"{size:,.0f} MiB" for size in sizes], padding=6, color=INK)
        memory.invert_yaxis()
        memory.grid(axis="y", visible=False)
        memory.set_xlim(0, max(sizes) * 1.25)
        memory.set(
            title=f"Peak memory of the head, {MEMORY_TOKENS} tokens",
            xlabel=f"MiB, forward and backward, V = {MEMORY_VOCAB}, H = {MEMORY_HIDDEN}",
        )
        canvas.savefig(path, dpi=150)
        plt.close(canvas)


def choose_actor(forced: bool, seed: int, console: Console) -> Actor:
    """SmolLM2 where its package is installed; otherwise the self-made model, and the reason is printed."""
    reason = "asked for with --self-made" if forced else why_not_smollm2()
    if reason is None:
        with console.status("reading SmolLM2-135M-Instruct"):
            return smollm2()
    if not forced:
        console.print(f"[bold yellow]SmolLM2 can't be had ({reason}).[/] Going on with a small model initialised here.")
    return self_made(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-made", action="store_true", help="train the small self-initialised model")
    parser.add_argument("--steps", type=int, help="training steps (default: what suits the model)")
    parser.add_argument("--seconds", type=float, default=190, help="no step starts so long after the start (190)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder of the figure and the table")
    options = parser.parse_args()

    start = time.perf_counter()
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    actor = choose_actor(options.self_made, options.seed, console)
    actor.model.to(device).eval()
    parameters = actor.trained_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=actor.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    # AdamW's first steps are full-size whatever the gradient: without a warm-up they leave the trust region.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = backend_for(torch.empty(0, device=device, dtype=dtype))
    vocab, hidden_size = actor.model.lm_head.weight.shape
    console.print(
        f"[bold]{actor.name}[/], V = {vocab}, H = {hidden_size}, {sum(p.numel() for p in parameters) / 1e6:.0f} M "
        f"parameters trained\nback end: {choice.name} ({choice.reason})"
    )

    count = options.steps or actor.steps
    generator = torch.Generator(device).manual_seed(options.seed)
    chooser = random.Random(options.seed)
    history: list[StepMetrics] = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        checks = progress.add_task("checks before", total=2, note="reward on held-out prompts")
        before = held_out(actor, options.seed + 1, device)
        progress.update(checks, advance=1, note="agreement with full logits")
        one_each = sample(actor, actor.held_out_prompts, 2, torch.Generator(device).manual_seed(options.seed + 2))
        agreed = agreement(actor, one_each)
        progress.update(checks, advance=1, note=f"reward {before.mean:.2f}")

        training = progress.add_task("training", total=count, note="")
        for _ in range(count):
            if time.perf_counter() - start > options.seconds:
                progress.console.print(f"{options.seconds:.0f} s are over: training ends after {len(history)} steps")
                progress.update(training, total=len(history))
                break
            prompts = chooser.sample(actor.prompts, PROMPTS_PER_STEP)
            history.append(training_step(actor, parameters, optimizer, prompts, generator))
            schedule.step()
            note = f"reward {history[-1].reward:.2f}  entropy {history[-1].entropy:.2f}"
            progress.update(training, advance=1, note=note)

        checks = progress.add_task("checks after", total=3, note="reward on held-out prompts")
        after = held_out(actor, options.seed + 1, device)
        progress.update(checks, advance=1, note="memory of the head, full logits")
        with_logits = head_memory("logits")
        progress.update(checks, advance=1, note="memory of the head, the op")
        with_op = head_memory("op")
        progress.update(checks, advance=1, note=f"reward {after.mean:.2f}")
    # Errors about labels wait for the next call; there is none.
    rlhf_losses.check()

    report = Report(
        actor=actor.name,
        backend=choice.name,
        dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        before=before,
        after=after,
        history=history,
        agreement=agreed,
        with_logits=with_logits,
        with_op=with_op,
        seconds=time.perf_counter() - start,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    figure(report, options.output / "rl_demo.png")
    with (options.output / "rl_demo.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=110).print(*tables(report))
    console.print(*tables(report))
    console.print(f"figure and table: {options.output}/rl_demo.png, {options.output}/rl_demo.txt")


if __name__ == "__main__":
    main()
