"""The head of one model instance, made to score labels instead of writing logits; what the trainers' adapters share.

``fuse_head`` replaces the ``forward`` of the model and of its head on this instance alone; the class, and every other
model of it, stay as they were. Called with ``head_request=HeadRequest(...)`` the model runs its own body and returns
``ScoredTokens``; called without, it is the model it was (``generate`` included). The head is reached through its own
``__call__``, so that FSDP gathers its weight and reduces its gradient as for any other module.

What the model does to its logits is read from its config, and what was read is held against the model's own logits on
a few tokens before the first scores are given out.
"""

import copy
import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rlhf_losses import LogitTransform, backend_for, linear_log_probs, log_probs_from_logits
from rlhf_losses.functions import DEFAULT_WORKSPACE_BYTES
from rlhf_losses.integrations.logit_chunks import in_chunks
from rlhf_losses.kernels.backends import BACKENDS
from rlhf_losses.validation import per_token_temperature, require_cache_bytes, require_validate

# Keys of a config that say what is done to the logits, as arguments of linear_log_probs.
_TRANSFORMS: dict[str, Callable[[float], dict[str, float]]] = {
    "final_logit_softcapping": lambda cap: {"softcap": cap},  # Gemma 2, Gemma 3
    "logit_scale": lambda scale: {"logit_scale": scale},  # Cohere
    "logits_scaling": lambda divisor: {"logit_scale": 1.0 / divisor},  # Granite
    "lm_head_multiplier": lambda scale: {"logit_scale": scale},  # Falcon-H1
}
_SUSPICIOUS = re.compile(r"logit|lm_head|output_mult|unembed")
_NOT_THE_HEAD = re.compile(r"^(attn|attention|router|image|moe)_|keep|aux|router")
CHECKED_TOKENS = 8
# What this process has been told of its fused heads: an actor and a reference policy say it once.
_said: set[str] = set()


class HeadRequest:
    """What the head is to compute for hidden states [..., H]; labels, mask and a temperature tensor are shaped [...].

    ``of_logits`` is for what is no token statistic: called with the logits [n, V] of some tokens, after the transform,
    and their places [n] among all, it gives tensors [n] by name, which come back as ``ScoredTokens.of_logits``.

    A plain class on purpose: FSDP casts float tensors in the containers and dataclasses it knows to the parameters'
    dtype on their way into a module, where a temperature of 0.7 becomes 0.69921875.
    """

    def __init__(
        self,
        labels: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        outputs: tuple[str, ...] = ("log_probs", "entropy"),
        of_logits: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None,
    ):
        self.labels = labels
        self.mask = mask
        self.temperature = temperature
        self.outputs = outputs
        self.of_logits = of_logits


@dataclass
class ScoredTokens(ModelOutput):
    """What a fused model returns, each shaped like the labels and fp32; None where not asked for."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    sum_p_squared: Tensor | None = None
    of_logits: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class HeadOptions:
    """Arguments of ``linear_log_probs`` that a user may set for all calls."""

    backend: str = "auto"
    workspace_bytes: int | None = None
    validate: str = "async"
    cache_bytes: int | str = 0

    def __post_init__(self) -> None:
        # Whether the back end can be had is for the process that computes to say; a driver may have no GPU.
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {self.backend!r}")
        require_validate(self.validate)
        require_cache_bytes(self.cache_bytes)
        if self.workspace_bytes is not None and not (type(self.workspace_bytes) is int and self.workspace_bytes > 0):
            raise ValueError(f"workspace_bytes: expected an integer > 0 or None, got {self.workspace_bytes!r}")


def logit_transform(config: Any) -> dict[str, float]:
    """softcap and logit_scale of a transformers config, of its text config where it has one.

    Raises ValueError for a number whose name speaks of logits or the head and that is not among the known ones.
    """
    config = config.get_text_config()
    found: dict[str, float] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name in _TRANSFORMS:
            found |= _TRANSFORMS[name](float(value))
        elif _SUSPICIOUS.search(name) and not _NOT_THE_HEAD.search(name) and value != 1:
            raise ValueError(
                f"{type(config).__name__}.{name} = {value}: expected a config whose logit transform is known "
                f"({', '.join(_TRANSFORMS)}), got a setting that may change the logits; train without the fused head"
            )
    return {name: value for name, value in found.items() if (name, value) != ("logit_scale", 1.0)}


def fused_head_of(model: nn.Module) -> "FusedHead | None":
    return vars(model).get("_fused_head")


def fuse_head(
    model: nn.Module,
    options: HeadOptions | None = None,
    translate: Callable[[tuple, dict[str, Any]], HeadRequest | None] | None = None,
) -> None:
    """Let ``model``, a transformers model with an output embedding, answer to ``head_request``.

    ``translate`` makes a request out of a trainer's own positional and keyword arguments, taking out what is no
    argument of the model's body; None where the call is an ordinary one.

    Raises TypeError for what is no such model, ValueError where the head, the body or the logit transform is not
    understood, or somebody else has replaced this model's forward with a fused one.
    """
    require_model(model)
    fused = _RequestedHead(options or HeadOptions(), logit_transform(model.config), translate)
    head = fused.head_of(model)
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(body, nn.Module) or any(module is head for module in body.modules()):
        raise ValueError(
            f"{type(model).__name__}: expected a body under {model.base_model_prefix!r} that ends in hidden states, "
            f"got {type(body).__name__}"
        )
    attach(model, fused)


def require_model(model: nn.Module) -> nn.Module:
    """The model below PEFT's adapters; TypeError for what has no head to be fused."""
    model = model.get_base_model() if isinstance(model, nn.Module) and hasattr(model, "get_base_model") else model
    if not (isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings")):
        raise TypeError(
            f"model: expected a transformers model with a language model's head, or a PEFT model of one, got "
            f"{type(model).__name__}; fuse it before anything else wraps it, and pass the model, not its name or head"
        )
    return model


def attach(model: nn.Module, fused: "FusedHead") -> None:
    """Give the model's calls to ``fused``; ValueError where the head or the forward is not what can be replaced."""
    _refuse_second_owner(model, fused.head_of(model))
    model._fused_head = fused
    original = type(model).forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        fused = fused_head_of(self)
        if fused is None:  # taken off below somebody's wrapper
            return original(self, *args, **kwargs)
        return fused.forward(self, functools.partial(original, self), args, kwargs)

    # generate() and trainers look at the signature; by __wrapped__ accelerate would dig the original out again.
    forward.__signature__ = inspect.signature(original)
    del forward.__wrapped__
    fused.wrapper = forward
    model.forward = MethodType(forward, model)


def detach(model: nn.Module) -> None:
    """Undo ``attach``: the forwards of the model and of all that stands for its head are their classes' again."""
    fused = vars(model).pop("_fused_head")
    # Where somebody (accelerate's mixed precision) has wrapped it, ours stays below and hands on.
    if _own_forward(model) is fused.wrapper:
        del model.forward
    for module in model.get_output_embeddings().modules():
        if _own_forward(module) in _HEAD_FORWARDS:
            del module.forward


def _own_forward(module: nn.Module) -> Any:
    """The function that the instance has as its forward, or what else it has; None for its class's forward."""
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    return None if function is type(module).forward else function


def _refuse_second_owner(model: nn.Module, head: nn.Module) -> None:
    """A forward that is not transformers' own would be passed over, on the instance, or have its head taken away."""
    name = type(model).__name__
    if fused_head_of(model) is not None:
        raise ValueError(f"{name}: expected one owner of its head, but it has been fused already")
    forward = type(model).forward
    verls = forward.__name__ in ("forward_with_torch_backend", "forward_with_triton_backend")
    if verls or forward.__module__.startswith("liger_kernel"):
        raise ValueError(
            f"{name}: expected one owner of its head, but its forward is {forward.__module__}.{forward.__name__}; "
            "switch the other fused linear cross entropy off (use_liger's, or a second impl_backend)"
        )
    for what, module in (("it", model), *(("its head", layer) for layer in head.modules())):
        if _own_forward(module) not in (None, *_HEAD_FORWARDS):
            raise ValueError(
                f"{name}: expected the forward of its class, but {what} has one of its own, which would be lost "
                f"({vars(module)['forward']!r}; accelerate's hooks and some patches put it there); fuse the head first"
            )
    for layer in head.modules():
        hooks = [*layer._forward_hooks.values(), *layer._backward_hooks.values(), *layer._backward_pre_hooks.values()]
        if hooks:
            raise ValueError(
                f"{name}: expected a head without forward and backward hooks, which would look for logits that are not "
                f"written, got {hooks[0]!r}; remove it (its handle's .remove()), or train without the fused head"
            )


def head_layer(head: nn.Module) -> nn.Module:
    """The head without FSDP1's wrapper."""
    while isinstance(inner := head._modules.get("_fsdp_wrapped_module"), nn.Module):
        head = inner
    return head


def _answering(head: nn.Module) -> bool:
    """Let all that may stand for the head answer a request: the layer, PEFT's LoRA around it, its saved copies.

    False where it is nothing of these.
    """
    head = head_layer(head)
    if hasattr(head, "lora_A"):
        if _own_forward(head) is None:
            head.forward = MethodType(_lora_head_forward, head)
        return isinstance(head.get_base_layer(), nn.Linear)
    copies = getattr(head, "modules_to_save", None)
    if copies is not None:
        return all(_answering(layer) for layer in (head.original_module, *copies.values()))
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    if _own_forward(head) is None:
        head.forward = MethodType(_head_forward, head)
    return True


def _head_forward(self: nn.Linear, hidden_states: Tensor, request: HeadRequest | None = None, score: Any = None):
    if request is None:
        return nn.functional.linear(hidden_states, self.weight, self.bias)
    return score(hidden_states, self.weight, self.bias, request)


def _lora_head_forward(self: nn.Module, hidden_states: Tensor, *args, request=None, score=None, **kwargs):
    """PEFT's LoRA layer around the head: h W' + s (dropout(h) A') B' is one product of wider operands."""
    if request is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if kwargs.get("adapter_names") is not None:
        raise ValueError(
            "adapter_names: expected None, the fused head has one product for all rows, got a name per row; call it "
            "without labels, or of fuse_head with in_eval=False"
        )
    if self.disable_adapters and self.merged:
        self.unmerge()  # as PEFT's own forward does
    base = self.get_base_layer()
    hidden, weight = [hidden_states], [base.weight]
    if not (self.disable_adapters or self.merged):
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            down, up = self.lora_A[name], self.lora_B[name]
            variant = self.use_dora.get(name) or getattr(self, "lora_variant", {}).get(name)
            plain = all(type(x) is nn.Linear for x in (up, down)) and up.bias is None
            if variant or not plain:
                raise ValueError(
                    f"adapter {name!r} on the head: expected a plain LoRA pair of nn.Linear, got {variant or up}; "
                    "DoRA, aLoRA, AdaLoRA, lora_bias and FSDP1-wrapped adapters are not served: keep them off lm_head"
                )
            x = self.lora_dropout[name](hidden_states.to(down.weight.dtype))
            hidden.append((down(x) * self.scaling[name]).to(hidden_states.dtype))
            weight.append(up.weight.to(base.weight.dtype))
    if len(hidden) == 1:
        return score(hidden_states, base.weight, base.bias, request)
    return score(torch.cat(hidden, -1), torch.cat(weight, 1), base.bias, request)


_HEAD_FORWARDS = (_head_forward, _lora_head_forward)
# pickle writes a method down by its name: a saved model has its classes' forwards, as if it had never been fused.
for _forward in _HEAD_FORWARDS:
    _forward.__name__ = "forward"


class Entrance:
    """In the head's place: calls what this thread has in ``stand_ins``, else the head; asked for all else, the head."""

    def __init__(self, head: nn.Module, stand_ins: dict[int, Callable]):
        self.head, self.stand_ins = head, stand_ins

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.stand_ins.get(threading.get_ident(), self.head)(*args, **kwargs)


class FusedHead:
    """What a fused model knows of its head; a subclass says what its forward does."""

    explains = "its config"
    wrapper: Callable | None = None

    def __init__(self, options: HeadOptions, transform: dict[str, float]):
        self.options = options
        self.transform = transform
        self.checked = False

    def __reduce__(self) -> tuple:
        return type(None), ()  # saved with its model, which is saved without it

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedHead":
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def forward(self, model: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def score(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest) -> dict[str, Any]:
        """The fields of ``ScoredTokens`` that need no logits: a dict of tensors, which FSDP's hooks see through."""
        if not request.outputs:
            return {}
        stats = linear_log_probs(
            hidden_states,
            weight,
            request.labels,
            bias=bias,
            temperature=request.temperature,
            mask=request.mask,
            outputs=request.outputs,
            backend=self.options.backend,
            workspace_bytes=self.options.workspace_bytes,
            validate=self.options.validate,
            cache_bytes=self.options.cache_bytes,
            **self.transform,
        )
        return {name: getattr(stats, name) for name in request.outputs}

    def head_of(self, model: nn.Module) -> nn.Module:
        """The head as it is now (PEFT may have put a layer around it), made to answer a request."""
        head = model.get_output_embeddings()
        if isinstance(head, Entrance):  # another thread is in the model's forward
            head = head.head
        if not (isinstance(head, nn.Module) and _answering(head)):
            raise ValueError(
                f"{type(model).__name__}: expected its head, bare, in a LoRA layer or in modules_to_save, to be an "
                f"nn.Linear, got {type(head).__module__}.{type(head).__qualname__}; train it without the fused head"
            )
        return head

    @torch.no_grad()
    def compare(
        self,
        model: nn.Module,
        head: nn.Module,
        hidden_states: Tensor,
        logits: Tensor,
        product: torch.dtype | None = None,
    ) -> None:
        """Hold the scores of some hidden states [..., H] against the logits [..., V] that the model makes of them.

        ``product`` is the type in which they came out of the head, where that is known: many are widened after it.
        Raises ValueError with the numbers where they differ.
        """
        labels = logits.argmax(-1)
        names = ("log_probs", "entropy", "logsumexp")
        with without_dropout(head):
            scores = head(hidden_states, request=HeadRequest(labels, outputs=names), score=self.score)
        if not hidden_states.isfinite().all():
            raise ValueError(
                f"{type(model).__name__}: expected finite hidden states of the first tokens, which the fused head is "
                f"checked with, got {hidden_states}"
            )
        wanted = log_probs_from_logits(logits, labels, outputs=names, backend="reference", validate="off")
        errors = {name: (scores[name] - getattr(wanted, name)).abs().max().item() for name in names}
        # The model rounds its logits to a type, up to four times (product, scale, cap); a GPU may take TF32.
        types = {logits.dtype, hidden_states.dtype, product or logits.dtype}
        if torch.is_autocast_enabled(logits.device.type):
            types.add(torch.get_autocast_dtype(logits.device.type))
        eps = max(2.0**-11, *(torch.finfo(dtype).eps for dtype in types))
        # A column that is switched off (a bias of -1e9, -inf) has no part in the numbers, nor in what they may be off.
        near = logits >= logits.amax(-1, keepdim=True) - 40
        bound = 4 * eps * max(1.0, logits.abs().where(near, 0.0).max().item())
        if not all(math.isfinite(error) and error <= bound for error in errors.values()):
            raise ValueError(
                f"{type(model).__name__}: expected the fused head to give the model's own numbers on {labels.numel()} "
                f"tokens within {bound:.2g}, got errors of {errors}; this model does something to its logits that "
                f"{self.explains} does not say ({self.transform or 'nothing'} was read from it): train it without the "
                "fused head"
            )
        self.checked = True
        choice = backend_for(hidden_states, self.options.backend)
        what = (
            f"{type(model).__name__.removeprefix('FSDP')}'s head is computed by the {choice.name} back end "
            f"({choice.reason}), logit transform {self.transform or 'none'}"
        )
        if what not in _said:
            _said.add(what)
            error = max(errors.values())
            print(f"rlhf_losses: {what}; it agrees with the model's own logits within {error:.1e}", flush=True)


@contextmanager
def without_dropout(head: nn.Module) -> Iterator[None]:
    """LoRA's: the check draws no random numbers."""
    modes = [(module, module.training) for module in head.modules()]
    head.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _RequestedHead(FusedHead):
    """Scores the labels of a ``HeadRequest``, from the model's own body."""

    def __init__(self, options: HeadOptions, transform: dict[str, float], translate: Callable | None):
        super().__init__(options, transform)
        self.translate = translate

    def score(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest) -> dict[str, Any]:
        scores = super().score(hidden_states, weight, bias, request)
        if request.of_logits is not None:
            scores["of_logits"] = self._score_logits(hidden_states, weight, bias, request)
        return scores

    def _score_logits(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest
    ) -> dict[str, Tensor]:
        shape = request.labels.shape
        mask = torch.ones_like(request.labels) if request.mask is None else request.mask
        places = mask.reshape(-1).nonzero().squeeze(1)
        transform = LogitTransform(
            scale=self.transform.get("logit_scale"),
            softcap=self.transform.get("softcap"),
            temperature=per_token_temperature(request.temperature, request.labels),
        )
        names: list[str] = []

        def function(raw: Tensor, start: int) -> tuple[Tensor, ...]:
            here = places[start : start + len(raw)]
            z, _ = transform.for_rows(here).apply(raw)
            results = request.of_logits(z, here)
            names[:] = results
            return tuple(results.values())

        workspace = self.options.workspace_bytes or DEFAULT_WORKSPACE_BYTES
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])[places]
        results = in_chunks(hidden, weight, bias, function, workspace)
        return {
            name: x.new_zeros(shape.numel()).index_copy(0, places, x).reshape(shape)
            for name, x in zip(names, results, strict=True)
        }

    def forward(self, model: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        request = kwargs.pop("head_request", None)
        if request is None and self.translate is not None:
            request = self.translate(args, kwargs)
        if request is None:
            return original(*args, **kwargs)
        head = self.head_of(model)
        if kwargs.pop("logits_to_keep", 0):
            raise ValueError("logits_to_keep: expected none beside a head_request, whose mask says which rows to score")
        for name in ("labels", "return_dict"):
            kwargs.pop(name, None)
        body = getattr(model, model.base_model_prefix)
        output = body(*args, return_dict=True, **kwargs)
        if not self.checked:
            self.check(model, head, body, output, functools.partial(original, *args, **kwargs))
        return ScoredTokens(**head(output[0], request=request, score=self.score))

    @torch.no_grad()
    def check(self, model: nn.Module, head: nn.Module, body: nn.Module, output: ModelOutput, own: Callable) -> None:
        """Compare on a few of the body's hidden states.

        The model's own forward runs with a body that answers at once. So it needs no second pass, draws no random
        numbers, and asks of other ranks what any call of the head does.
        """
        hidden_states = output[0][..., :CHECKED_TOKENS, :].detach()
        short = type(output)(**{**output, next(iter(output)): hidden_states})
        replaced = vars(body).get("forward")
        body.forward = lambda *args, **kwargs: short
        try:
            with without_dropout(head):
                logits = own().logits
        finally:
            del body.forward
            if replaced is not None:
                body.forward = replaced
        self.compare(model, head, hidden_states, logits)
