#!/usr/bin/env bash
# GRPO with verl, the actor's and the reference policy's head by rlhf_losses.
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct TRAIN=train.parquet VAL=val.parquet GPUS=8 bash verl_grpo.sh [more overrides]
# The three lines that begin with actor_rollout_ref.model.{external_lib,use_fused_kernels,fused_kernel_options} are all
# that a run of your own needs; docs/verl.md says what they change.
set -euo pipefail

python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.model.external_lib=rlhf_losses.integrations.verl \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.model.fused_kernel_options.impl_backend=rlhf_losses \
    actor_rollout_ref.model.path="${MODEL:?a model}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${TOKENS:-16384}" \
    actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH:-256}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name="${ROLLOUT:-vllm}" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:?prompts}" \
    data.val_files="${VAL:?prompts}" \
    data.train_batch_size="${BATCH:-1024}" \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.nnodes="${NODES:-1}" \
    'trainer.logger=[console]' \
    "$@"
