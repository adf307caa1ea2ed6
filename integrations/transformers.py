"""Supervised training of a transformers model without its logits.

    from rlhf_losses.integrations.transformers import fuse_head

    model = AutoModelForCausalLM.from_pretrained(...)
    fuse_head(model)                              # before or after adapters; before FSDP, DeepSpeed and Trainer
    loss = model(input_ids=ids, labels=ids).loss  # and .logits is None

Called with ``labels`` the model runs its own forward, in which its head returns a description of the logits
(``unwritten_logits``) and the cross entropy of it is computed from hidden states and weight. All else is the model's
own: the shift of the labels, ``num_items_in_batch``, auxiliary losses of experts, images. Called without labels, in
``generate`` too, it is the model that it was.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_losses import LinearCrossEntropyLoss, linear_cross_entropy
from rlhf_losses.integrations.fused_head import (
    CHECKED_TOKENS,
    Entrance,
    FusedHead,
    HeadOptions,
    HeadRequest,
    attach,
    detach,
    fused_head_of,
    head_layer,
    require_model,
    without_dropout,
)
from rlhf_losses.integrations.unwritten_logits import Unfollowed, UnwrittenLogits

# How far a forward has come.
_CALLED = "that calls its head and takes no cross entropy of what it returns"
_SCORED = "that takes the cross entropy"

# Who enters and who leaves a model's forward; one for all models, since a lock can't be copied with one.
_entering = threading.Lock()


def fuse_head(
    model: nn.Module,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    in_eval: bool = True,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    validate: str = "async",
) -> None:
    """Let ``model``, any transformers model with a causal language model's head, train without logits.

    Works on this instance alone. With ``labels`` its forward returns what it always did, the loss from the fused op and
    ``logits`` None; before the first such loss, what the model does to its logits is held against the model's own
    logits of a few tokens.

    Args:
        model: a ``PreTrainedModel``, or a PEFT model of one. Adapters may be put on later; FSDP, DDP, DeepSpeed and
            accelerate's hooks must be.
        label_smoothing, z_loss: as for ``linear_cross_entropy``; both are divided as the model divides its loss.
        in_eval: whether a model in eval mode that gets labels goes without logits, too; False for an evaluation that
            looks at them (``compute_metrics`` of ``Trainer``).
        backend, workspace_bytes, validate: as for ``linear_cross_entropy``.

    Raises:
        TypeError for what is no such model. ValueError for a head that is no nn.Linear or has hooks, for a forward that
        somebody else has replaced, and, at the first loss, with the numbers, for a model whose own logits differ from
        the fused ones or can't be followed.
    """
    options = HeadOptions(backend=backend, workspace_bytes=workspace_bytes, validate=validate)
    attach(require_model(model), _TrainedHead(options, label_smoothing, z_loss, in_eval))


def unfuse_head(model: nn.Module) -> None:
    """Put everything back that ``fuse_head`` changed. ``model`` may be wrapped by now (PEFT, DDP, FSDP, DeepSpeed).

    Raises ValueError for a model that is not fused.
    """
    fused = [module for module in model.modules() if isinstance(fused_head_of(module), _TrainedHead)]
    if not fused:
        raise ValueError(f"{type(model).__name__}: expected a model whose head has been fused, got one that has not")
    for module in fused:
        detach(module)


class _TrainedHead(FusedHead):
    """Runs the model's own forward with logits that are not written."""

    explains = "its forward"

    def __init__(self, options: HeadOptions, label_smoothing: float, z_loss: float, in_eval: bool):
        super().__init__(options, {})
        LinearCrossEntropyLoss(label_smoothing=label_smoothing, z_loss=z_loss)  # checks them
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.in_eval = in_eval
        self.places: list[tuple[nn.Module, str]] = []
        self.stand_ins: dict[int, _StandIn] = {}  # of the threads that are in the model's forward

    @torch.compiler.disable(recursive=False)  # the model's own forward below it is compiled
    def forward(self, model: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not (model.training or self.in_eval) or not self._has_labels(args, kwargs):
            return original(*args, **kwargs)
        head = self.head_of(model)
        stand_in = _StandIn(self, model, head, threading.get_ident())
        with self._standing_in(model, head, stand_in):
            try:
                output = original(*args, **kwargs)
            except Exception as error:
                if stand_in.state != _CALLED and not isinstance(error, Unfollowed):
                    raise
                raise ValueError(
                    f"{type(model).__name__}: expected a forward that scales, caps and cuts its logits and takes their "
                    f"cross entropy, got one that does something else ({error}); train it without the fused head"
                ) from error
        if stand_in.state != _SCORED:
            raise ValueError(
                f"{type(model).__name__}: expected a forward that calls its head and takes the cross entropy of what "
                f"it returns, got one {stand_in.state}; train it without the fused head"
            )
        return _without_logits(output)

    def _has_labels(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        if args:
            names = list(self.wrapper.__signature__.parameters)[1:]
            kwargs = kwargs | dict(zip(names, args, strict=False))
        return kwargs.get("labels") is not None

    @contextmanager
    def _standing_in(self, model: nn.Module, head: nn.Module, stand_in: "_StandIn") -> Iterator[None]:
        """Wherever the model has its head as an attribute, the instance's dictionary hides it: it stays registered.

        What hides it is an entrance, behind which each thread that calls the model finds its own.
        """
        with _entering:
            if not self.places or any(module._modules.get(name) is not head for module, name in self.places):
                self.places = [
                    (x, name) for x in model.modules() for name, child in x._modules.items() if child is head
                ]
            self.stand_ins[stand_in.thread] = stand_in
            for module, name in self.places:
                vars(module)[name] = Entrance(head, self.stand_ins)
        try:
            yield
        finally:
            with _entering:
                del self.stand_ins[stand_in.thread]
                for module, name in self.places if not self.stand_ins else ():
                    del vars(module)[name]

    def loss(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, request: "_Loss") -> dict[str, Tensor]:
        loss = linear_cross_entropy(
            hidden_states,
            weight,
            request.target,
            bias=bias,
            reduction=request.reduction,
            label_smoothing=request.label_smoothing,
            class_weight=request.class_weight,
            z_loss=self.z_loss,
            outputs=(),
            ignore_index=request.ignore_index,
            backend=self.options.backend,
            workspace_bytes=self.options.workspace_bytes,
            validate=self.options.validate,
            **self.transform,
        ).loss
        return {"loss": loss}


class _Loss:
    """Arguments of torch's cross_entropy. A plain class, of which FSDP casts nothing, as ``HeadRequest``."""

    def __init__(
        self, target: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ):
        self.target = target
        self.class_weight = class_weight
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing


class _StandIn:
    """Called in place of the head in one call of the model's forward."""

    def __init__(self, fused: _TrainedHead, model: nn.Module, head: nn.Module, thread: int):
        self.fused, self.model, self.head, self.thread = fused, model, head, thread
        self.state = "that does not call its head"

    def __call__(self, hidden_states: Tensor) -> UnwrittenLogits:
        self.state = _CALLED
        sample = None
        if not self.fused.checked and hidden_states.numel():
            self.checked_rows = hidden_states.detach().flatten(0, -2)[:CHECKED_TOKENS]
            with torch.no_grad(), without_dropout(self.head):
                # Adapters that the fused head does not serve say so here.
                labels = torch.zeros(len(self.checked_rows), dtype=torch.int64, device=hidden_states.device)
                self.head(self.checked_rows, request=HeadRequest(labels, outputs=()), score=self.fused.score)
                sample = self.head(self.checked_rows)
                self.product = sample.dtype
        return UnwrittenLogits(hidden_states, _layer(self.head).out_features, self._loss, sample)

    @torch.compiler.disable
    def _loss(
        self,
        hidden_states: Tensor,
        target: Tensor,
        transform: dict[str, float],
        sample: Tensor | None,
        settings: dict[str, Any],
    ) -> Tensor:
        self.state = _SCORED
        fused = self.fused
        if sample is not None and not fused.checked:
            fused.transform = transform
            fused.compare(self.model, self.head, self.checked_rows, sample, self.product)
        elif transform != fused.transform and fused.checked:
            raise ValueError(
                f"{type(self.model).__name__}: expected the logit transform {fused.transform or 'none'} that was "
                f"checked, got {transform or 'none'}; after a change of the config, unfuse_head and fuse_head; a loss "
                "that scales the logits by several numbers, or by one that changes, trains without the fused head"
            )
        settings["label_smoothing"] = settings["label_smoothing"] or fused.label_smoothing
        request = _Loss(target.to(hidden_states.device), **settings)
        return self.head(hidden_states, request=request, score=fused.loss)["loss"]


def _layer(head: nn.Module) -> nn.Module:
    """The nn.Linear below FSDP1's wrapper and PEFT's layers."""
    head = head_layer(head)
    if hasattr(head, "modules_to_save"):
        return _layer(head.original_module)
    return _layer(head.get_base_layer()) if hasattr(head, "lora_A") else head


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(None if isinstance(x, UnwrittenLogits) else x for x in output)
    return type(output)(**{name: x for name, x in output.items() if not isinstance(x, UnwrittenLogits)})
