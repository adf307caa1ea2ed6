"""Runs ``python -m verl.trainer.main_ppo`` whole on a CPU: Ray, workers, rollout, weight synchronisation, GRPO steps.

The rollout is a stub that samples with transformers; all the rest is verl's own. Weights, prompts and draws are
functions of seeds, everything is fp32, a process computes on one thread and batches have one order: what differs
between two runs is what their variants differ in.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
from transformers import LlamaConfig
from verl_cpu.tiny_models import VOCAB, WORDS_START, save_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROMPTS, PROMPT_WORDS, RESPONSE_TOKENS = 16, 6, 8
PROMPTS_A_STEP, PROMPTS_AN_UPDATE, RESPONSES_A_PROMPT = 4, 2, 4
LOG_LINES = 60
# Metrics of time and memory, in which no two runs agree.
MEASURED = ("timing_", "perf/", "actor/perf/")


@dataclass(frozen=True)
class Variant:
    """What sets a run apart: over ``settings`` and over ``environment``."""

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


UNFUSED = Variant()
# The same function, summed in another order: how far apart rounding alone takes two runs.
EAGER = Variant({"+actor_rollout_ref.model.override_config.attn_implementation": "eager"})
FUSED = Variant(
    {
        "actor_rollout_ref.model.external_lib": "rlhf_losses.integrations.verl",
        "actor_rollout_ref.model.use_fused_kernels": True,
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "rlhf_losses",
    },
    {"VERL_ENGINE_VENDOR": "rlhf_losses"},
)


def train(
    folder: Path, variants: dict[str, Variant], steps: int, workers: int = 1, timeout: float = 240
) -> dict[str, list[dict[str, float]]]:
    """By variant, the metrics that verl's file logger wrote, step by step, less ``MEASURED``.

    The runs go at the same time: each is a chain of processes that start one after another, a core apiece.
    """
    _write_inputs(folder)
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(_started(folder, name, variant, steps, workers))
            for name, variant in variants.items()
        }
        deadline = time.monotonic() + timeout
        while running:
            for name, process in list(running.items()):
                status = process.poll()
                if status == 0:
                    _stop(running.pop(name))
                elif status is not None or time.monotonic() > deadline:
                    tail = (folder / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
                    found = f"no exit in {timeout:.0f} s" if status is None else f"exit status {status}"
                    raise RuntimeError(
                        "\n".join([f"main_ppo, {name}: expected exit status 0, got {found}; log:", *tail])
                    )
            time.sleep(0.2)
    return {name: _metrics(folder / f"{name}.jsonl", steps) for name in variants}


def _write_inputs(folder: Path) -> None:
    save_model(folder / "model", LlamaConfig)
    generator = random.Random(0)
    rows = []
    for index in range(PROMPTS):
        words = [f"w{generator.randrange(WORDS_START, VOCAB)}" for _ in range(PROMPT_WORDS)]
        rows.append(
            {
                "data_source": "even_words",
                "prompt": [{"role": "user", "content": " ".join(words)}],
                "ability": "words",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")


def _metrics(path: Path, steps: int) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), f"{path.name}: steps are missing"
    return [{key: x for key, x in line["data"].items() if not key.startswith(MEASURED)} for line in lines]


@contextlib.contextmanager
def _started(folder: Path, name: str, variant: Variant, steps: int, workers: int) -> Iterator[subprocess.Popen]:
    """main_ppo in a session of its own, of which nothing is left afterwards."""
    # Ray's sockets lie some 60 characters below, and a socket's path has at most 107: no test's folder will do.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        options = settings(folder, steps, workers) | {
            "+ray_kwargs.ray_init._temp_dir": ray_folder,
            "hydra.run.dir": folder / f"{name}-hydra",
            **variant.settings,
        }
        with open(folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in options.items())],
                cwd=folder,
                env=environment(folder / f"{name}.jsonl") | variant.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            # One that ended well was stopped there and then; by now its id may be somebody else's.
            if process.returncode != 0:
                _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """First as Ctrl-C does, at which the driver stops Ray; then whatever is left of the session."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    # Ray's workers have process groups of their own, but the one session.
    while left := [pid for pid in psutil.pids() if _session(pid) == process.pid]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.1)


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def settings(folder: Path, steps: int, workers: int) -> dict[str, Any]:
    """What differs from verl's defaults; a key with a plus is one that they do not have."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    ray = "ray_kwargs.ray_init"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.seed": 0,
        "data.train_batch_size": PROMPTS_A_STEP,
        "data.max_prompt_length": 2 * PROMPT_WORDS,
        "data.max_response_length": RESPONSE_TOKENS,
        "data.dataloader_num_workers": 0,
        f"{model}.path": folder / "model",
        f"{model}.custom_chat_template": "'{% for m in messages %}{{ m.content }} {% endfor %}'",
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"+{actor}.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.ppo_mini_batch_size": PROMPTS_AN_UPDATE,
        f"{actor}.ppo_micro_batch_size_per_gpu": 2,
        f"{actor}.use_dynamic_bsz": False,
        f"{actor}.entropy_coeff": 0.001,
        f"{actor}.optim.lr": 0.003,
        f"{rollout}.name": "stub",
        f"{rollout}.n": RESPONSES_A_PROMPT,
        f"{rollout}.temperature": 0.7,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 2,
        f"{rollout}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "even_words.py",
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": workers,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.logger": "[console, file]",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.resume_mode": "disable",
        "trainer.v1.sampler.custom_sampler.path": "pkg://verl_ordered_batches",
        "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        f"+{ray}.address": "local",
        f"+{ray}.include_dashboard": False,
        f"+{ray}.object_store_memory": 2**28,
        # verl asks Ray for a CPU an actor and a GPU a worker; Ray believes what it is told.
        f"{ray}.num_cpus": 16,
        f"+{ray}.num_gpus": workers,
        "hydra.output_subdir": "null",
    }


def environment(metrics: Path) -> dict[str, str]:
    """This process's own, less what would choose a device, a kernel or a cluster, and what verl needs on a CPU."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "RAY_", "TRITON_", "VERL_"))}
    path = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform,verl_stub_rollout",
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
