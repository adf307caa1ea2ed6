"""A model trained under each way of sharding it, fused and unfused; test_transformers.py compares the two.

    torchrun --nproc_per_node 2 sharded_cases.py RESULTS.pt CASE...

RESULTS.pt holds what rank 0 saw: by case and by "fused" or "unfused", the losses and the parameters after three steps.
"""

import os
import sys
from functools import partial

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Gemma2Config

from rlhf_losses.integrations.transformers import fuse_head, unfuse_head

STEPS = 3
CONFIG = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "final_logit_softcapping": 2.0,
    "attn_implementation": "eager",
}


def ddp(model):
    return DistributedDataParallel(model)


def fsdp1(model, head_apart=False, mixed=False):
    layers = type(model.model.layers[0])
    policy = ModuleWrapPolicy({layers})
    if head_apart:
        policy = partial(by_kind, kinds=(layers,), apart=model.get_output_embeddings())
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if mixed else None,
    )


def by_kind(module, recurse, nonwrapped_numel, kinds, apart):
    return recurse or module is apart or isinstance(module, kinds)


def fsdp2(model, head_apart=False, mixed=False):
    policy = MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if head_apart:
        fully_shard(inner.get_output_embeddings(), mp_policy=policy, reshard_after_forward=True)
    for layer in inner.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def lora_fsdp2(model):
    return fsdp2(lora(model))


def saved_head_fsdp2(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return fsdp2(get_peft_model(model, config), head_apart=True)


def zero3(model):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    assert engine.module.get_output_embeddings().weight.numel() == 0
    return engine


CASES = {
    "ddp": (ddp, False),
    "fsdp1": (fsdp1, False),
    "fsdp1-tied": (fsdp1, True),
    "fsdp1-head-apart": (partial(fsdp1, head_apart=True), False),
    "fsdp2": (fsdp2, False),
    "fsdp2-tied": (fsdp2, True),
    "fsdp2-head-apart": (partial(fsdp2, head_apart=True), False),
    "fsdp2-lora": (lora_fsdp2, False),
    "fsdp2-saved-head": (saved_head_fsdp2, False),
    "fsdp1-mixed": (partial(fsdp1, mixed=True), False),
    "fsdp2-mixed": (partial(fsdp2, mixed=True), False),
    "zero3": (zero3, False),
    "zero3-tied": (zero3, True),
}


def whole(model):
    """The parameters without their shards, by name."""
    if hasattr(model, "zero_optimization"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
            return {name: p.detach().clone() for name, p in model.module.named_parameters()}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        name: p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in model.named_parameters()
    }


def run(case, fused):
    wrap, tied = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma2Config(**CONFIG, tie_word_embeddings=tied))
    model.gradient_checkpointing_enable()
    if fused:
        fuse_head(model)
    # The ranks' batches differ in their numbers of labels that count.
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(1, 300, (2, 12), generator=generator)
    labels = ids.clone()
    labels[0, : 3 + 4 * dist.get_rank()] = -100
    model = wrap(model)
    model.train()
    if not hasattr(model, "zero_optimization"):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(STEPS):
        output = model(input_ids=ids, labels=labels, num_items_in_batch=9, use_cache=False)
        assert (output.logits is None) == fused
        if hasattr(model, "zero_optimization"):
            model.backward(output.loss)
            model.step()
        else:
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(output.loss.item())
    if fused:
        unfuse_head(model)
        assert model(input_ids=ids, labels=labels).logits is not None
    return losses, whole(model)


def main(results, *cases):
    dist.init_process_group("gloo")
    found = {case: {way: run(case, way == "fused") for way in ("fused", "unfused")} for case in cases}
    if dist.get_rank() == 0:
        torch.save(found, results)
    dist.barrier()
    # The process groups that FSDP1 and DeepSpeed make for themselves now and then abort a process that ends in order.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
