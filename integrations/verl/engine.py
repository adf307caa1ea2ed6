"""verl's FSDP engine with what the fused head can do and verl's own fused path can't ask for.

Temperature tensors, sums of squared probabilities, rows outside of the loss left out, options from
``fused_kernel_options``, and the check that the model really was fused. Everything else is verl's engine, whose layout
of packed, padded and sequence-parallel tokens is used as it comes out of its unfused path.

Registered beside verl's engine under the vendors of CUDA devices, which verl looks up first, and under "rlhf_losses"
for ``VERL_ENGINE_VENDOR``. Without ``impl_backend=rlhf_losses`` it is verl's engine.
"""

import functools
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import (
    get_ulysses_sequence_parallel_group,
    set_ulysses_sequence_parallel_group,
    slice_input_tensor,
    ulysses_pad_and_slice_inputs,
)
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from rlhf_losses.integrations.fused_head import HeadOptions, HeadRequest, fused_head_of
from rlhf_losses.integrations.verl import BACKEND

VENDORS = ["nvidia", "amd", "rlhf_losses"]
# Output of the op, and its name in verl's model_output.
_NAMES = {"log_probs": "log_probs", "entropy": "entropy", "sum_p_squared": "sum_pi_squared"}


@functools.cache
def install() -> None:
    """Register the engine, once."""
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=VENDORS)(
        FusedHeadEngine
    )


def head_options(given: dict[str, Any]) -> tuple[HeadOptions, str]:
    """The options of the head, and which rows it scores: "loss" (the default) or "all".

    Raises ValueError for a key that is not one of ours, or a value of ``rows`` that is not one of these.
    """
    names = [field.name for field in fields(HeadOptions)]
    options = {name: value for name, value in given.items() if name not in ("impl_backend", "rows")}
    unknown = sorted(options.keys() - set(names))
    rows = given.get("rows", "loss")
    if unknown or rows not in ("loss", "all"):
        raise ValueError(
            f"fused_kernel_options: expected keys out of {['impl_backend', 'rows', *names]} and rows 'loss' or 'all', "
            f"got {dict(given)}"
        )
    return HeadOptions(**options), rows


class FusedHeadEngine(FSDPEngineWithLMHead):
    def _build_module(self) -> nn.Module:
        given = dict(self.model_config.fused_kernel_options or {})
        self._fuses_head = bool(self.model_config.use_fused_kernels) and given.get("impl_backend") == BACKEND
        if not self._fuses_head:
            return super()._build_module()
        options, self._rows = head_options(given)
        module = super()._build_module()
        head = fused_head_of(module)
        if head is None:
            raise ValueError(
                f"{type(module).__name__}: expected a model that verl lets a fused back end into, got one that it "
                "leaves alone (KimiVL); switch use_fused_kernels off"
            )
        head.options = options
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._is_fused(micro_batch):
            return super().prepare_model_inputs(micro_batch)
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        given_temperature = micro_batch["temperature"]
        plain = micro_batch.copy()
        tu.assign_non_tensor(plain, use_fused_kernels=False)
        inputs, output_args = super().prepare_model_inputs(plain)

        counted = self._counted_rows(micro_batch)
        labels = output_args["input_ids_rmpad_rolled"]
        if packed:
            labels = labels[None]
            temperature = output_args["temperature_rmpad"][None]
            mask = None if counted is None else self._as_packed(counted)
        else:
            offsets = micro_batch["input_ids"].offsets()
            inside = _inside(offsets, inputs["input_ids"].shape[1])
            labels, mask = _padded(labels, inside), inside if counted is None else _padded(counted, inside)
            temperature = output_args["temperature"]
        if not isinstance(given_temperature, Tensor):
            temperature = float(given_temperature)
        inputs["head_request"] = HeadRequest(
            labels,
            mask=mask,
            temperature=temperature,
            outputs=_outputs(micro_batch),
            of_logits=self._distillation(micro_batch, None if packed else inside),
        )
        return inputs, output_args

    def _distillation(self, micro_batch: TensorDict, inside: Tensor | None) -> Any:
        """verl's own top-k loss as a function of some tokens' logits; None without distillation.

        ``inside`` [sequences, width] tells padded sequences; packed ones are this rank's part of all tokens.
        """
        if not _wants(micro_batch, "distillation_use_topk"):
            return None
        teacher = {}
        for name in ("teacher_logprobs", "teacher_ids"):
            values = micro_batch[name].values()
            if inside is not None:
                values = _padded(values, inside).flatten(0, 1)
            elif self.use_ulysses_sp:
                values = slice_input_tensor(values, dim=0)
            teacher[name] = values
        processor = self._loss_function

        def of_logits(logits: Tensor, places: Tensor) -> dict[str, Tensor]:
            bounds = torch.tensor([0, len(places)], device=logits.device)
            data = {name: torch.nested.nested_tensor_from_jagged(x[places], bounds) for name, x in teacher.items()}
            # The rows are this rank's already: verl would cut its part out of them once more.
            group = get_ulysses_sequence_parallel_group()
            set_ulysses_sequence_parallel_group(None)
            try:
                results = processor(student_logits=logits[None], data=data)
            finally:
                set_ulysses_sequence_parallel_group(group)
            return {name: x[0] for name, x in results.items()}

        return of_logits

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        self._loss_function = loss_function
        return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        if not self._is_fused(micro_batch):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        offsets = micro_batch["input_ids"].offsets()
        scores = {_NAMES[name]: getattr(output, name) for name in _outputs(micro_batch)} | (output.of_logits or {})
        if "entropy" in scores and _entropy_coefficient(logits_processor_func) == 0:
            scores["entropy"] = scores["entropy"].detach()
        result = {}
        for name, values in scores.items():
            if packed:
                values = self._gather_and_unpad_packed(values[0], output_args["pad_size"])
            else:
                values = values[_inside(offsets, values.shape[1])]
            result[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
        return result

    def _is_fused(self, micro_batch: TensorDict) -> bool:
        return self._fuses_head and _wants(micro_batch, "use_fused_kernels")

    def _counted_rows(self, micro_batch: TensorDict) -> Tensor | None:
        """[tokens] bool, of the packed tokens: the rows whose next token is in the loss; None where all are scored."""
        mask = micro_batch.get("loss_mask", None)
        if self._rows == "all" or mask is None:
            return None
        offsets = micro_batch["input_ids"].offsets()
        if mask.is_nested and torch.equal(mask.offsets().to(offsets), offsets):
            # Whole sequences, as supervised training has them.
            return torch.roll(mask.values(), -1).bool()
        if mask.is_nested:
            lengths, values = mask.offsets().diff(), mask.values()
        else:
            # Responses, padded on the right.
            lengths = micro_batch["attention_mask"][:, -mask.shape[1] :].sum(1)
            values = mask[torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]]
        # A response token is scored by the row before it; responses end their sequences.
        starts = offsets[1:] - lengths - 1
        rows = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
        rows = rows + torch.arange(len(rows), device=rows.device)
        counted = torch.zeros(int(offsets[-1]), dtype=torch.bool, device=rows.device)
        counted[rows] = values.bool()
        return counted

    def _as_packed(self, values: Tensor) -> Tensor:
        """[tokens] bool of the global packed sequence -> [1, tokens of this rank], padded as verl pads the ids."""
        values = values.to(torch.int32)[None]
        static = self._get_packed_pad_size(values.shape[1]) if hasattr(self, "_get_packed_pad_size") else 0
        values = nn.functional.pad(values, (0, static))
        if self.use_ulysses_sp:
            values, _, _ = ulysses_pad_and_slice_inputs(values, sp_size=self.ulysses_sequence_parallel_size)
        return values.bool()


def _wants(micro_batch: TensorDict, key: str) -> bool:
    return tu.get_non_tensor_data(data=micro_batch, key=key, default=False)


def _outputs(micro_batch: TensorDict) -> tuple[str, ...]:
    wanted = {
        "log_probs": not _wants(micro_batch, "distillation_only"),
        "entropy": _wants(micro_batch, "calculate_entropy"),
        "sum_p_squared": _wants(micro_batch, "calculate_sum_pi_squared"),
    }
    return tuple(name for name, it_is in wanted.items() if it_is)


def _entropy_coefficient(loss: Any) -> float | None:
    """The coefficient that verl's own loss, a partial of its config, gives the entropy; None for anybody else's."""
    if not isinstance(loss, functools.partial) or loss.func not in (ppo_loss, distillation_ppo_loss):
        return None
    return getattr(loss.keywords.get("config"), "entropy_coeff", None)


def _inside(offsets: Tensor, width: int) -> Tensor:
    """[sequences, width] bool: the places of sequences padded on the right."""
    return torch.arange(width, device=offsets.device) < offsets.diff()[:, None]


def _padded(values: Tensor, inside: Tensor) -> Tensor:
    """Packed [tokens, ...] to [sequences, width, ...], zeros in the padding."""
    padded = values.new_zeros(*inside.shape, *values.shape[1:])
    padded[inside] = values
    return padded
