"""verl's FSDP engine on the CPU, one case after another, fused and unfused: log-probs before and after two updates.

    [torchrun --nproc_per_node 2] engine_cases.py CASES.json RESULTS.pt FOLDER

A case is the arguments of ``run``; RESULTS.pt holds what rank 0 saw, by the case's name. FOLDER keeps the models.
Two cases that differ in ``fused`` alone see the same weights, tokens and losses.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cpu_environment  # noqa: F401 (before verl)
import numpy as np
import torch
import transformers
from tiny_models import save_model, save_vision_model
from torch import Tensor
from verl import DataProto
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group
from verl.utils.model import compute_position_id_with_mask, get_hf_auto_model_class
from verl.workers.config import (
    ActorConfig,
    DistillationConfig,
    DistillationLossConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

SEQUENCES, PROMPT, RESPONSE = 4, 8, 8
TEMPERATURE = 0.7


def tokens(vocab: int, seed: int) -> dict[str, Tensor]:
    """Prompts padded on the left, responses on the right; two tokens of a response are a tool's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocab, (SEQUENCES, PROMPT + RESPONSE), generator=generator)
    attention = torch.ones_like(ids)
    for row in range(SEQUENCES):
        attention[row, :row] = 0
        attention[row, PROMPT + RESPONSE - row % 3 :] = 0
    response_mask = attention[:, PROMPT:].clone()
    response_mask[1, 3:5] = 0
    return {
        "input_ids": ids,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": attention,
        "response_mask": response_mask,
        "position_ids": compute_position_id_with_mask(attention),
        "advantages": torch.randn(SEQUENCES, RESPONSE, generator=generator),
        "temperatures": 0.5 + torch.rand(SEQUENCES, generator=generator),
    }


def with_images(given: dict[str, Any], config: Any) -> None:
    """One image of four tokens at the end of every prompt, and verl's four rows of positions, here all the text's."""
    given["input_ids"][:, PROMPT - 4 : PROMPT] = config.image_token_id
    given["position_ids"] = given["position_ids"][:, None].expand(-1, 4, -1).contiguous()
    vision = config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(SEQUENCES, 16, patch, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 4, 4]])
    images = [{"pixel_values": pixels[row], "image_grid_thw": grid} for row in range(SEQUENCES)]
    given["multi_modal_inputs"] = np.array(images, dtype=object)


def by_transformers(folder: str, given: dict[str, Any], temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """log-probs and entropy of the responses by the model's own logits, sequence by sequence, [SEQUENCES, RESPONSE]."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = get_hf_auto_model_class(config)
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    log_probs, entropy = torch.zeros(2, SEQUENCES, RESPONSE)
    for row in range(SEQUENCES):
        inside = given["attention_mask"][row].bool()
        ids = given["input_ids"][row, inside]
        more = {}
        if "multi_modal_inputs" in given:
            more = given["multi_modal_inputs"][row] | {"position_ids": given["position_ids"][row, :, None, inside]}
        with torch.no_grad():
            log_p = (model(ids[None], **more).logits[0].float() / temperatures[row]).log_softmax(-1)
        count = int(inside[PROMPT:].sum())
        rows = slice(len(ids) - count - 1, len(ids) - 1)
        log_probs[row, :count] = log_p[rows].gather(1, ids[rows.start + 1 :, None])[:, 0]
        entropy[row, :count] = torch.special.entr(log_p[rows].exp()).sum(1)
    return log_probs, entropy


def run(
    folder: Path,
    *,
    family: str = "Llama",
    model: dict[str, Any] | None = None,
    fused: bool = True,
    options: dict[str, Any] | None = None,
    strategy: str = "fsdp2",
    packed: bool = True,
    sequence_parallel: int = 1,
    temperature_per_sample: bool = False,
    sum_of_squares: bool = False,
    entropy_coefficient: float = 0.01,
    lora: dict[str, Any] | None = None,
    distillation: dict[str, Any] | None = None,
    reference: bool = False,
) -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0 and not (folder / "config.json").exists():
        (save_vision_model if family == "Qwen2_5_VL" else save_model)(
            folder, getattr(transformers, f"{family}Config"), **(model or {})
        )
    torch.distributed.barrier()
    torch.manual_seed(0)
    model_config = HFModelConfig(
        path=str(folder),
        external_lib="rlhf_losses.integrations.verl",
        use_remove_padding=packed,
        use_fused_kernels=fused,
        fused_kernel_options={"impl_backend": "rlhf_losses" if fused else "torch", **(options or {})},
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
        **({"lora_alpha": 16} | lora if lora else {}),
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=model_config,
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            ulysses_sequence_parallel_size=sequence_parallel,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=0, total_training_steps=10),
        checkpoint_config=None,
    )
    engine.initialize()

    given = tokens(model_config.hf_config.get_text_config().vocab_size, seed=rank // sequence_parallel)
    temperatures = given.pop("temperatures")
    if family == "Qwen2_5_VL":
        with_images(given, model_config.hf_config)
    if distillation is not None:
        teacher = torch.randn(*given["input_ids"].shape, 1000, generator=torch.Generator().manual_seed(rank))
        given["teacher_logprobs"], given["teacher_ids"] = teacher.log_softmax(-1).topk(4)
    if not temperature_per_sample:
        temperatures = torch.full_like(temperatures, TEMPERATURE)

    def batch(**more: Tensor):
        data = DataProto.from_single_dict(given | more).to_tensordict()
        if temperature_per_sample:
            data["temperature"] = temperatures
        data = left_right_2_no_padding(data)
        settings = {
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "use_remove_padding": packed,
            "use_fused_kernels": fused,
            "calculate_entropy": True,
            "distillation_use_topk": bool(more) and distillation is not None,
            "calculate_sum_pi_squared": sum_of_squares,
            "global_batch_size": SEQUENCES * world // sequence_parallel,
        }
        if not temperature_per_sample:
            settings["temperature"] = TEMPERATURE
        tu.assign_non_tensor(data, **settings)
        return data

    def score() -> dict[str, Tensor]:
        with engine.eval_mode():
            output = engine.infer_batch(batch(), loss_function=None)["model_output"]
        return {name: no_padding_2_padding(x, batch()).float() for name, x in output.items()}

    config = ActorConfig(
        strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=entropy_coefficient
    )
    loss = partial(ppo_loss, config=config)
    if distillation is not None:
        settings = DistillationConfig(distillation_loss=DistillationLossConfig(topk=4, **distillation))
        loss = partial(distillation_ppo_loss, config=config, distillation_config=settings)
    result: dict[str, Any] = {"before": score(), "mask": given["response_mask"].bool(), "updates": []}
    for _ in range(2):
        with engine.train_mode():
            # Old log-probs a little off: some ratios are clipped.
            old = result["before"]["log_probs"] + 0.3 * torch.sin(torch.arange(RESPONSE))
            output = engine.train_batch(batch(old_log_probs=old), loss_function=loss)
        if engine.is_mp_src_rank_with_outputs():
            numbers = {
                name: sum(x) for name, x in output["metrics"].items() if "distillation" in name and type(x) is list
            }
            result["updates"].append(
                {"grad_norm": float(output["metrics"]["grad_norm"]), "loss": float(sum(output["loss"])), **numbers}
            )
    result["after"] = score()
    if reference and rank == 0:
        result["reference"] = by_transformers(str(folder), given, temperatures)
    return result


def main(cases: str, results: str, folder: str) -> None:
    initialize_global_process_group()
    found: dict[str, Any] = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        model = json.dumps([case.get("family"), case.get("model")])
        try:
            found[name] = run(Path(folder) / hashlib.sha256(model.encode()).hexdigest()[:8], **case)
        except Exception as error:
            # A case may be there to be refused; of two ranks the other would wait for this one.
            if torch.distributed.get_world_size() > 1:
                raise
            found[name] = error
    if torch.distributed.get_rank() == 0:
        torch.save(found, results)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
