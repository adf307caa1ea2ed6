"""verl's FSDP2 engine with each of its heads and with ours: log-probabilities and one update, time, memory, agreement.

    python benchmarks/verl_engine.py --out benchmarks/results/NAME [--gpus 2]
    python benchmarks/verl_engine.py --out dry --size tiny --device cpu

Writes NAME.json, NAME.md and NAME.png. The engine, its configs and ``ppo_loss`` are verl's own, called as its trainer
calls them: ``infer_batch`` with entropy, then ``train_batch``. The model has the shape of Qwen2.5-1.5B with fewer
layers and random weights that predict, now surely, now not at all, that a token comes again; half of the tokens do.

- Head part = update - the same update with the head left out: body, loss, gradient clipping and optimizer remain.
- Attention is transformers' sdpa on a [sequences, length] view of the packed tokens, all of one length. Its own way
  with packed position ids is a mask of tokens x tokens, which would cost more than the body, and without
  remove-padding verl's triton back end does not run.
- verl's unfused path takes packed tokens one by one where flash-attn is not installed ("flash_attn" in the results).
- The learning rate is zero: every turn does the same work on the same weights.
- Agreement is the largest difference on response tokens from fp64 scores of the very hidden states that the head got.
- verl's own fused back ends crash with an untied head under FSDP2: "none" and rlhf_losses alone are run with one.
- One process a back end, since verl patches model classes. They start up, build and compile beside each other on a
  short batch, and are then let through one at a time, with the card to themselves.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_losses.benchmarks.common import current_commit

MIB = 2**20
ROOT = Path(__file__).resolve().parent.parent
TIED, UNTIED = ["none", "torch", "triton", "liger", "rlhf_losses"], ["none", "rlhf_losses"]
# How many times as fast as verl's back ends the head part of the update has to be.
REQUIRED = {"triton": 1.8, "torch": 4.0}
ATTENTION = "sdpa_by_sequence"
MEMORY = ("update_mib", "head_update_mib", "log_prob_mib", "head_log_prob_mib")


@dataclass(frozen=True)
class Size:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    sequences: int
    prompt: int
    response: int

    @property
    def length(self) -> int:
        return self.prompt + self.response


SIZES = {
    "1.5b": Size(1536, 8960, 12, 2, 151936, 16, 256, 768),
    "tiny": Size(64, 128, 4, 2, 1000, 4, 4, 12),
}


def make_models(directory: Path, size: Size, layers: int, heads: list[str]) -> None:
    """The same bf16 weights for all, tied or with the embedding copied to an own head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        # Hidden states stay near their token's embedding, whose length decides how sure a tied model is of that token.
        lengths = 30 / size.hidden * torch.rand(size.vocab, 1)
        model.model.embed_tokens.weight.copy_(torch.randn(size.vocab, size.hidden) * lengths)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
            layer.mlp.down_proj.weight *= 0.02
    if "tied" in heads:
        model.save_pretrained(directory / "tied")
    if "untied" in heads:
        model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model.save_pretrained(directory / "untied")


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name}: expected word from the parent within {seconds:.0f} s")
        time.sleep(0.05)


def attend_by_sequence(length: int) -> Callable[..., tuple[Tensor, None]]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
        tokens = query.shape[2]  # [1, heads, tokens, head size]; a model may be tried on fewer than one sequence
        q, k, v = (x[0].unflatten(1, (-1, min(length, tokens))).transpose(0, 1) for x in (query, key, value))
        return sdpa_attention_forward(module, q, k, v, None, **options)[0].flatten(0, 1)[None], None

    return attention


class Bench:
    """One engine of verl, and what is done with it."""

    def __init__(self, model: Path, backend: str, size: Size, device: str):
        from transformers import AttentionInterface
        from verl.utils.distributed import initialize_global_process_group
        from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine import EngineRegistry
        from verl.workers.utils.losses import ppo_loss

        _, self.rank, self.world = initialize_global_process_group()
        AttentionInterface.register(ATTENTION, attend_by_sequence(size.length))
        self.size, self.device, self.fused = size, device, backend != "none"
        self.model_path = model
        model_config = HFModelConfig(
            path=str(model),
            load_tokenizer=False,
            use_remove_padding=True,
            use_fused_kernels=self.fused,
            fused_kernel_options={"impl_backend": backend},
            external_lib="rlhf_losses.integrations.verl" if backend == "rlhf_losses" else None,
            override_config={"attn_implementation": ATTENTION},
        )
        dtype = "bf16" if device == "cuda" else "fp32"
        self.engine = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=model_config,
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=device == "cuda",
                mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            ),
            optimizer_config=FSDPOptimizerConfig(lr=0.0, lr_warmup_steps=0, total_training_steps=1000),
            checkpoint_config=None,
        )
        self.engine.initialize()
        actor = ActorConfig(
            strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=size.sequences, entropy_coeff=0.001
        )
        self.loss = partial(ppo_loss, config=actor)
        generator = torch.Generator().manual_seed(self.rank)
        # Half of the tokens repeat the one before, which is what the model predicts.
        ids = torch.randint(size.vocab, (size.sequences, size.length), generator=generator)
        repeats = torch.rand(ids.shape, generator=generator) < 0.5
        for place in range(1, size.length):
            ids[:, place] = torch.where(repeats[:, place], ids[:, place - 1], ids[:, place])
        self.ids = ids
        self.advantages = torch.randn(size.sequences, size.response, generator=generator)
        self.old_log_probs = torch.zeros(size.sequences, size.response)

    def batch(self, sequences: int, fused: bool) -> Any:
        from verl import DataProto
        from verl.utils import tensordict_utils as tu
        from verl.utils.device import get_device_id
        from verl.workers.utils.padding import left_right_2_no_padding

        ids, prompt = self.ids[:sequences], self.size.prompt
        mask = torch.ones_like(ids)
        padded = {
            "input_ids": ids,
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "attention_mask": mask,
            "response_mask": mask[:, prompt:],
            "position_ids": torch.arange(ids.shape[1]).expand(sequences, -1).contiguous(),
            "old_log_probs": self.old_log_probs[:sequences],
            "advantages": self.advantages[:sequences],
        }
        data = left_right_2_no_padding(DataProto.from_single_dict(padded).to_tensordict())
        tu.assign_non_tensor(
            data,
            temperature=1.0,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=sequences,
            use_remove_padding=True,
            use_fused_kernels=fused,
            calculate_entropy=True,
            global_batch_size=sequences * self.world,
        )
        return data.to(get_device_id())

    def log_probs(self, data: Any) -> dict[str, Any]:
        with self.engine.eval_mode():
            return self.engine.infer_batch(data, loss_function=None)

    def update(self, data: Any) -> dict[str, Any]:
        with self.engine.train_mode():
            return self.engine.train_batch(data, loss_function=self.loss)

    def responses(self, output: dict[str, Any], name: str) -> Tensor:
        from verl.workers.utils.padding import no_padding_2_padding

        data = self.batch(self.size.sequences, self.fused).cpu()
        return no_padding_2_padding(output["model_output"][name].cpu(), data).double()

    @contextmanager
    def without_head(self) -> Iterator[None]:
        """The model's scores are two of its hidden states; everything else of a step is as it was."""
        from verl.models.transformers.dense_common import CausalLMOutputForPPO
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        engine, module = self.engine, self.engine.module
        head = module.get_output_embeddings()
        own_head = not module.config.tie_word_embeddings

        def forward(input_ids: Tensor, attention_mask: None, position_ids: Tensor, **_: Any) -> Any:
            hidden = module.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0].float()
            if own_head and torch.is_grad_enabled():
                # The optimizer has as much to do as with a head.
                head.weight.grad = torch.zeros_like(head.weight)
            return CausalLMOutputForPPO(log_probs=hidden[..., 0], entropy=hidden[..., 1])

        patched = vars(module).get("forward")
        module.forward = forward
        engine.prepare_model_inputs = MethodType(FSDPEngineWithLMHead.prepare_model_inputs, engine)
        engine.prepare_model_outputs = MethodType(FSDPEngineWithLMHead.prepare_model_outputs, engine)
        try:
            yield
        finally:
            del module.forward, engine.prepare_model_inputs, engine.prepare_model_outputs
            if patched is not None:
                module.forward = patched

    def errors(self) -> dict[str, float]:
        from safetensors.torch import load_file

        seen: list[Tensor] = []
        hook = self.engine.module.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
        output = self.log_probs(self.batch(self.size.sequences, self.fused))
        hook.remove()
        prompt = self.size.prompt
        hidden = seen[-1].detach().view(*self.ids.shape, -1)[:, prompt - 1 : -1].flatten(0, 1)
        labels = self.ids[:, prompt:].flatten().to(hidden.device)
        weight = load_file(self.model_path / "model.safetensors")["model.embed_tokens.weight"].to(hidden.device)
        weight = weight.double()
        scores = []
        for h, y in zip(hidden.split(1024), labels.split(1024), strict=True):
            log_p = (h.double() @ weight.T).log_softmax(-1)
            scores.append(torch.stack([log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)]).cpu())
        log_probs, entropy = torch.cat(scores, 1).view(2, self.size.sequences, -1)
        self.old_log_probs = self.responses(output, "log_probs").float()
        return {
            "log_prob_error": (self.responses(output, "log_probs") - log_probs).abs().max().item(),
            "entropy_error": (self.responses(output, "entropy") - entropy).abs().max().item(),
            "mean_log_prob": log_probs.mean().item(),
            "mean_entropy": entropy.mean().item(),
        }

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, step: Callable[[Any], object], fused: bool) -> float:
        data = self.batch(self.size.sequences, fused)
        self.synchronize()
        start = time.perf_counter()
        step(data)
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def medians(self, turns: int) -> dict[str, float]:
        """Milliseconds of the four passes, which take turns."""
        times: dict[str, list[float]] = {name: [] for name in ("log_prob", "update", "body_log_prob", "body_update")}
        start = time.perf_counter()
        while len(times["update"]) < turns and (len(times["update"]) < 3 or time.perf_counter() - start < 8):
            times["log_prob"].append(self.timed(self.log_probs, self.fused))
            times["update"].append(self.timed(self.update, self.fused))
            with self.without_head():
                times["body_log_prob"].append(self.timed(self.log_probs, True))
                times["body_update"].append(self.timed(self.update, True))
        row = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
        row["update_spread_ms"] = max(times["update"]) - min(times["update"])
        row["head_log_prob_ms"] = row["log_prob_ms"] - row["body_log_prob_ms"]
        row["head_update_ms"] = row["update_ms"] - row["body_update_ms"]
        return row

    def memory(self) -> dict[str, float]:
        """Peaks of the passes beyond what was allocated before, and of their heads beyond what was when they began.

        A head's part begins with the hidden states and ends with their gradient. The whole pass may peak elsewhere:
        in the body, or in the optimizer.
        """
        if self.device != "cuda":
            return {}
        row: dict[str, float] = {}

        def begin() -> Callable[[], float]:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return lambda: (torch.cuda.max_memory_allocated() - before) / MIB

        peak = begin()

        def head_begins(module: nn.Module, inputs: Any, hidden: Tensor) -> None:
            nonlocal peak
            peak = begin()
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: row.update(head_update_mib=peak()))

        for name, run in (("update", self.update), ("log_prob", self.log_probs)):
            data = self.batch(self.size.sequences, self.fused)
            peak = begin()
            run(data)
            row[f"{name}_mib"] = peak()
            hook = self.engine.module.model.norm.register_forward_hook(head_begins)
            run(self.batch(self.size.sequences, self.fused))
            hook.remove()
            row.setdefault(f"head_{name}_mib", peak())
        return row

    def warm_up(self, sequences: int) -> dict[str, Any]:
        self.log_probs(self.batch(sequences, self.fused))
        with self.without_head():
            self.update(self.batch(sequences, True))
        return self.update(self.batch(sequences, self.fused))


def work(task: dict[str, Any]) -> None:
    """What a process does for one back end; the files that it waits for and writes are named by its parent."""
    directory, rank = Path(task["directory"]), os.environ["RANK"]
    import verl.workers.engine  # noqa: F401  (the slow import, while the parent makes the models)

    wait_for(directory / "models", task["seconds"])
    bench = Bench(directory / task["head"], task["backend"], SIZES[task["size"]], task["device"])
    bench.warm_up(max(1, bench.size.sequences // 8))
    if task["device"] == "cuda":
        torch.cuda.empty_cache()
    (directory / f"ready-{task['name']}-{rank}").touch()
    wait_for(directory / f"go-{task['name']}", task["seconds"])
    row = bench.errors()
    row["grad_norm"] = bench.warm_up(bench.size.sequences)["metrics"]["grad_norm"]
    row |= bench.medians(task["turns"])
    row |= bench.memory()
    if bench.rank == 0:
        (directory / f"{task['name']}.json").write_text(json.dumps(row))
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(task: dict[str, Any], gpus: int) -> subprocess.Popen:
    environment = dict(
        os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), TOKENIZERS_PARALLELISM="false"
    )
    if task["device"] == "cpu":
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "tests" / "verl_cpu")])
        environment |= {
            "PYTHONPATH": path,
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
            "OMP_NUM_THREADS": "1",
        }
    if task["backend"] == "rlhf_losses":
        environment["VERL_ENGINE_VENDOR"] = "rlhf_losses"
    launcher = [sys.executable]
    if gpus == 1:
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    else:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={gpus}"]
        launcher += [f"--master-port={environment['MASTER_PORT']}"]
    command = [*launcher, __file__, "--worker", json.dumps(task)]
    with open(Path(task["directory"]) / f"{task['name']}.log", "w") as log:
        # A group of its own, so that what it starts can be ended with it.
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(tasks: list[dict[str, Any]], gpus: int, make: Callable[[], None], seconds: float) -> list[dict[str, Any]]:
    """All processes start at once; when each is ready or dead, they are let through one after the other."""
    deadline = time.monotonic() + seconds
    directory = Path(tasks[0]["directory"])
    processes = {task["name"]: start(task, gpus) for task in tasks}
    rows: dict[str, dict[str, Any]] = {}
    try:
        make()
        (directory / "models").touch()

        def starting(name: str) -> bool:
            ready = all((directory / f"ready-{name}-{rank}").exists() for rank in range(gpus))
            return not ready and processes[name].poll() is None

        while any(starting(name) for name in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        print(f"started after {time.monotonic() - deadline + seconds:.0f} s", file=sys.stderr)
        # The unfused ones last: they take longest, and the deadline is to cut nothing else.
        for task in sorted(tasks, key=lambda task: task["backend"] == "none"):
            process, result = processes[task["name"]], directory / f"{task['name']}.json"
            (directory / f"go-{task['name']}").touch()
            row = {"backend": task["backend"], "head": task["head"]}
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                row["failed"] = f"not done after {seconds:.0f} s"
            end(process)
            if result.exists():
                row |= json.loads(result.read_text())
            else:
                log = (directory / f"{task['name']}.log").read_text()
                print(log[-4000:], file=sys.stderr)
                failed = directory / f"{task['name']}.failed"
                row.setdefault("failed", failed.read_text() if failed.exists() else f"exit code {process.returncode}")
            rows[task["name"]] = row
            print(json.dumps(row), flush=True)
    finally:
        for process in processes.values():
            end(process)
    return [rows[task["name"]] for task in tasks]


def ours(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    mine = [r for r in rows if r["backend"] == "rlhf_losses" and r["head"] == row["head"] and "failed" not in r]
    return mine[0] if mine else None


def markdown(results: dict[str, Any]) -> str:
    size = results["size"]
    tokens = size["sequences"] * (size["prompt"] + size["response"])
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    required = ", ".join(f"{name} {bound}" for name, bound in REQUIRED.items())
    flash = "installed" if results["flash_attn"] else "not installed, so the unfused path takes tokens one by one"
    lines = [
        f"# verl's engine with each head, {results['date']}",
        "",
        f"{results['gpus']} x {results['device']}, {versions}; rlhf_losses at commit {results['commit']}. FSDP2, "
        f"{results['dtype']}, remove-padding, gradient checkpointing, ppo_loss with entropy_coeff 0.001. "
        f"{results['layers']} layers of hidden size {size['hidden']}, vocabulary {size['vocab']}; {tokens} packed "
        f"tokens a card in one micro-batch: {size['sequences']} sequences of {size['prompt']} prompt and "
        f"{size['response']} response tokens. Medians of {results['turns']} turns, of 3 or more where they are slow. "
        "Head part: a pass less the same pass without its head. Ratio: head part of the update to that of rlhf_losses "
        f"(at least: {required}). Memory: peak beyond what was allocated before; of the head, from hidden states to "
        "their gradient. Errors: largest on response tokens against fp64 of the same hidden states. flash-attn: "
        f"{flash}.",
        "",
        "| back end | head | update ms | head part | ratio | log-probs ms | head part | update MiB | its head | "
        "log-probs MiB | its head | log-prob error | entropy error | grad norm |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if "failed" in row:
            lines.append(f"| {row['backend']} | {row['head']} | fails: {row['failed'].replace('|', '/')} |" + " |" * 11)
            continue
        mine = ours(results["rows"], row)
        ratio = f"{row['head_update_ms'] / mine['head_update_ms']:.2f}" if mine else ""
        memory = [f"{row[key]:.0f}" if key in row else "" for key in MEMORY]
        lines.append(
            f"| {row['backend']} | {row['head']} | {row['update_ms']:.1f} | {row['head_update_ms']:.1f} | {ratio} "
            f"| {row['log_prob_ms']:.1f} | {row['head_log_prob_ms']:.1f} | {' | '.join(memory)} "
            f"| {row['log_prob_error']:.1e} | {row['entropy_error']:.1e} | {row['grad_norm']:.5f} |"
        )
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in results["rows"] if "failed" not in row]
    places = range(len(rows))
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    panels = [
        ("time, ms", [("update_ms", "update"), ("head_update_ms", "its head part")]),
        ("peak memory, MiB", [("update_mib", "update"), ("head_update_mib", "its head")]),
    ]
    for axis, (title, bars) in zip(axes, panels, strict=True):
        for (key, label), color, shift in zip(bars, ("lightgray", "tab:blue"), (-0.2, 0.2), strict=True):
            heights = [row.get(key, 0.0) for row in rows]
            drawn = axis.bar([place + shift for place in places], heights, 0.4, color=color, label=label)
            axis.bar_label(drawn, fmt="%.4g", fontsize=7)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(places, [f"{row['backend']}\n{row['head']}" for row in rows], fontsize=8)
        # The unfused head takes many times as much of both.
        axis.set_yscale("symlog", linthresh=1)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"verl {results['versions']['verl']}, {results['device']}, {results['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def installed(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path of the results, without suffix")
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="FSDP2 over so many; 16384 tokens on each")
    parser.add_argument("--tied", nargs="*", choices=TIED, help="back ends for the tied head; all that can run here")
    parser.add_argument("--untied", nargs="*", choices=TIED, default=UNTIED)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=230, help="what is not done by then is given up")
    parser.add_argument("--commit", help="what git says here, unless given")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        try:
            work(task)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200].rstrip(": ")
            (Path(task["directory"]) / f"{task['name']}.failed").write_text(reason)
            raise
        return
    if arguments.out is None:
        parser.error("--out: expected a path for the results")
    tied = arguments.tied
    if tied is None:
        liger = importlib.util.find_spec("liger_kernel") is not None
        needs_gpu = {"triton", "liger"} if arguments.device == "cpu" else set() if liger else {"liger"}
        tied = [backend for backend in TIED if backend not in needs_gpu]
    directory = Path(tempfile.mkdtemp(prefix="verl_engine_"))
    tasks = [
        {
            "name": f"{backend}-{head}",
            "backend": backend,
            "head": head,
            "directory": str(directory),
            "size": arguments.size,
            "device": arguments.device,
            "turns": arguments.turns,
            "seconds": arguments.seconds,
        }
        for head, backends in (("tied", tied), ("untied", arguments.untied))
        for backend in backends
    ]
    if not tasks:
        parser.error("--tied, --untied: expected at least one back end")
    commit = arguments.commit or current_commit()
    size = SIZES[arguments.size]
    try:
        make = partial(make_models, directory, size, arguments.layers, [task["head"] for task in tasks])
        rows = run_all(tasks, arguments.gpus, make, arguments.seconds)
    finally:
        shutil.rmtree(directory)
    results = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "gpus": arguments.gpus,
        "versions": installed(["verl", "torch", "triton", "transformers", "liger_kernel"]),
        "flash_attn": importlib.util.find_spec("flash_attn") is not None,
        "commit": commit,
        "dtype": "bf16" if arguments.device == "cuda" else "fp32",
        "size": asdict(size),
        "layers": arguments.layers,
        "turns": arguments.turns,
        "rows": rows,
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))
    draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
