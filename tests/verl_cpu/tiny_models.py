"""Tiny models with random weights and a tokenizer of made-up words, as verl wants them: in a directory."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# verl looks for a token that is one line break, for some families.
WORDS_START = len(SPECIAL) + 1
VOCAB = 1000
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(folder: Path, config: type[PreTrainedConfig], seed: int = 0, **options: Any) -> None:
    """A model of ``config``'s architecture with fp32 weights, the same for the same seed, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(**TINY | options), dtype=torch.float32)
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)


def save_vision_model(folder: Path, config: type[PreTrainedConfig], seed: int = 0, **options: Any) -> None:
    """As ``save_model``, for a Qwen2.5-VL, whose text model is the tiny one."""
    text = TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: VOCAB - 1 - i for i, name in enumerate(names)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        whole = config(text_config=text, vision_config=vision, **ids, **options)
        model = AutoModelForImageTextToText.from_config(whole, dtype=torch.float32)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """One token a word: "w5", "w6", ... are the tokens 5, 6, ..."""
    tokens = [*SPECIAL.values(), "\n", *(f"w{i}" for i in range(WORDS_START, vocab))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["\n"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
