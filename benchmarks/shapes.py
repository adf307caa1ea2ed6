"""The heads that people train, and the numbers of tokens in a call."""

from typing import NamedTuple


class Model(NamedTuple):
    """A head: hidden size H, vocabulary V, and the cap of its logits where it has one."""

    name: str
    depth: int
    vocab: int
    softcap: float | None = None


MODELS = (
    Model("Qwen2.5-0.5B", 896, 151936),
    Model("Qwen2.5-1.5B", 1536, 151936),
    Model("Gemma-2-2B", 2304, 256000, softcap=30.0),
    Model("Qwen3-4B", 2560, 151936),
    Model("Gemma-3-4B", 2560, 262208),
    Model("Qwen2.5-7B", 3584, 152064),
    Model("Llama-3-8B", 4096, 128256),
    Model("Qwen3-8B", 4096, 151936),
    Model("Qwen2.5-32B", 5120, 152064),
    Model("Llama-3-70B", 8192, 128256),
)
TINY_MODELS = (Model("tiny", 64, 1000), Model("tiny-softcap", 32, 700, softcap=30.0))
# Ascending: what compiles for a model does so at its smallest call.
SIZES = {"full": (MODELS, (2048, 8192, 16384, 32768)), "tiny": (TINY_MODELS, (128, 256))}
