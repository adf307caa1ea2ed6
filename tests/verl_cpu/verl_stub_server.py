"""The Ray actor of the rollout "stub"; in a file of its own because it needs no verl, which takes seconds to import."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class StubServer:
    """Samples with transformers on a CPU.

    A response is a function of weights, prompt and how often the prompt was asked for since the weights came, however
    requests arrive: two runs whose weights agree to rounding see the same responses.
    """

    def __init__(self, path: str, max_tokens: int):
        torch.set_num_threads(1)
        # Eager attention, one unpadded sequence at a time: a path of its own, not the actor's.
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
        self.max_tokens = max_tokens
        self.step = 0
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def update_weights(self, weights: dict[str, torch.Tensor], step: int) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self.step = step
        self.asked.clear()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **unused: Any
    ) -> SimpleNamespace:
        prompt = tuple(prompt_ids)
        draws = random.Random(f"{self.step} {self.asked[prompt]} {prompt}")
        self.asked[prompt] += 1
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < self.max_tokens and tokens[-1:] != [self.model.config.eos_token_id]:
            token, log_prob = self._next([*prompt, *tokens], sampling_params["temperature"], draws.random())
            tokens.append(token)
            log_probs.append(log_prob)
        # The fields of verl's TokenOutput.
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=log_probs,
            routed_experts=None,
            stop_reason="completed",
            num_preempted=None,
            extra_fields={"global_steps": self.step},
        )

    @torch.no_grad()
    def _next(self, tokens: list[int], temperature: float, uniform: float) -> tuple[int, float]:
        log_p = (self.model(torch.tensor([tokens])).logits[0, -1] / temperature).log_softmax(-1)
        # By the inverse of the distribution function: rounding changes a token only where it crosses ``uniform``.
        below = log_p.double().exp().cumsum(-1) < uniform
        token = min(int(below.sum()), len(log_p) - 1)
        return token, log_p[token].item()

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass
