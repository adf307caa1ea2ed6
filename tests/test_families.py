"""Every family of transformers' models against itself: the loss and all gradients, fused and unfused.

Tiny random models in fp64, trained on padded batches with labels left out. transformers casts logits to fp32 for its
loss, so an unfused loss carries fp32's rounding, and is the less exact of the two.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rlhf_losses.integrations.transformers")
from rlhf_losses.integrations.fused_head import fused_head_of  # noqa: E402
from rlhf_losses.integrations.transformers import fuse_head, unfuse_head  # noqa: E402

VOCAB = 160
IMAGE = VOCAB - 1
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2} | {
    name: EXPERTS[name] for name in ("output_router_logits", "router_aux_loss_coef")
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 3}
QWEN_TOKENS["vision_end_token_id"] = VOCAB - 4
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
if transformers.__version__ < "5":
    MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

# Name: (config, its options beside TINY, transform that the head is found to have)
TEXT = {
    "Llama": ("LlamaConfig", {}, {}),
    "Llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}, {}),
    "Mistral": ("MistralConfig", {}, {}),
    "Mixtral": ("MixtralConfig", LOCAL_EXPERTS, {}),
    "Qwen2": ("Qwen2Config", {}, {}),
    "Qwen2-MoE": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 16}, {}),
    "Qwen3": ("Qwen3Config", {}, {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS, {}),
    "Qwen3.5": (
        "Qwen3_5TextConfig",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {},
    ),
    "Gemma": ("GemmaConfig", {}, {}),
    "Gemma-2": ("Gemma2Config", {"final_logit_softcapping": 0.5}, {"softcap": 0.5}),
    "Gemma-3": ("Gemma3TextConfig", {}, {}),
    "Gemma-3-capped": ("Gemma3TextConfig", {"final_logit_softcapping": 0.5}, {"softcap": 0.5}),
    "Phi": ("PhiConfig", {}, {}),
    "Phi-3": ("Phi3Config", {}, {}),
    "Cohere": ("CohereConfig", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "Cohere-2": ("Cohere2Config", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "Granite": ("GraniteConfig", {"logits_scaling": 0.1}, {"logit_scale": 10.0}),
    # With output_router_logits transformers 5.10 fails by itself.
    "Granite-MoE": (
        "GraniteMoeConfig",
        LOCAL_EXPERTS | {"output_router_logits": False, "logits_scaling": 0.1},
        {"logit_scale": 10.0},
    ),
    "OLMo-2": ("Olmo2Config", {}, {}),
    "Falcon-H1": (
        "FalconH1Config",
        {
            "lm_head_multiplier": 3.0,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
        {"logit_scale": 3.0},
    ),
    "GPT-2": (
        "GPT2Config",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
        {},
    ),
    "GPT-NeoX": ("GPTNeoXConfig", {}, {}),
    "GPT-OSS": ("GptOssConfig", LOCAL_EXPERTS | {"sliding_window": 8}, {}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
        {},
    ),
    "GLM-4": ("Glm4Config", {}, {}),
    "SmolLM3": ("SmolLM3Config", {}, {}),
    "Mamba": ("MambaConfig", {"state_size": 8}, {}),
    "Mamba-2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
        {},
    ),
}
VISION = {
    "Qwen2-VL": (
        "Qwen2VLConfig",
        {"text_config": TINY | MROPE, **QWEN_TOKENS}
        | {
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 1,
                "patch_size": 4,
            }
        },
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLConfig",
        {"text_config": TINY | MROPE, **QWEN_TOKENS, "vision_config": QWEN_VISION | {"out_hidden_size": 32}},
    ),
    "Qwen3-VL": (
        "Qwen3VLConfig",
        {
            "text_config": TINY | MROPE,
            **QWEN_TOKENS,
            "vision_config": QWEN_VISION
            | {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
    ),
    "Gemma-3": (
        "Gemma3Config",
        {"text_config": TINY | {"final_logit_softcapping": 0.5}, "vision_config": SIGLIP, "mm_tokens_per_image": 4}
        | {"image_token_index": IMAGE, "image_token_id": IMAGE},
    ),
    "Llava": (
        "LlavaConfig",
        {"text_config": TINY | {"model_type": "llama"}, "vision_config": SIGLIP | {"model_type": "clip_vision_model"}}
        | {"image_token_index": IMAGE, "image_token_id": IMAGE, "vision_feature_layer": -1},
    ),
}


def text_inputs(generator, padding_left=False):
    """[2, 14] ids, padded; the labels leave out the padding and a prompt."""
    ids = torch.randint(3, VOCAB - 8, (2, 14), generator=generator)
    attention = torch.ones_like(ids)
    attention[1, slice(0, 4) if padding_left else slice(10, None)] = 0
    labels = ids.masked_fill(attention == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids * attention, "attention_mask": attention, "labels": labels}


def loss_and_gradients(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_trains_as_itself(model, inputs, transform):
    model.double().train()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    inputs["num_items_in_batch"] = 7 if getattr(model, "accepts_loss_kwargs", True) else None
    before = dict(vars(model))
    own, gradients = loss_and_gradients(model, inputs)
    fuse_head(model)
    for _ in range(2):  # with the check, and without
        fused, fused_gradients = loss_and_gradients(model, inputs)
        assert own.logits is not None
        assert fused.logits is None
        assert type(fused) is type(own)
        assert {name for name in own if name != "logits"} == set(fused)
        torch.testing.assert_close(fused.loss.double(), own.loss.double(), rtol=1e-6, atol=0)
        assert fused_gradients.keys() == gradients.keys()
        largest = max(g.abs().max() for g in gradients.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-5, atol=1e-6 * largest.item(), msg=name)
    if transform is not None:
        assert fused_head_of(model).transform == pytest.approx(transform)
    head = model.get_output_embeddings()
    assert gradients["lm_head.weight" if "lm_head.weight" in gradients else name].abs().max() > 0
    unfuse_head(model)
    assert vars(model).keys() == before.keys()
    assert "forward" not in vars(head)
    assert torch.equal(model(**inputs).loss, own.loss)


def config_of(name, options):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**options)


@pytest.mark.parametrize("family", TEXT)
def test_text(family):
    name, options, transform = TEXT[family]
    if family == "DeepSeek-V3" and transformers.__version__ < "5":
        pytest.skip("its experts take no fp64 before transformers 5")
    config = config_of(name, TINY | options)
    config._attn_implementation = config._experts_implementation = "eager"  # the others take no fp64
    model = transformers.AutoModelForCausalLM.from_config(config)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    assert_trains_as_itself(model, text_inputs(torch.Generator().manual_seed(0)), transform)


@pytest.mark.parametrize("family", VISION)
def test_vision(family):
    name, options = VISION[family]
    model = transformers.AutoModelForImageTextToText.from_config(config_of(name, options))
    generator = torch.Generator().manual_seed(0)
    inputs = text_inputs(generator, padding_left=True)
    inputs["input_ids"][:, 5:9] = IMAGE
    inputs["labels"][:, 5:9] = -100
    if family.startswith("Qwen"):
        inputs["input_ids"][:, 4] = QWEN_TOKENS["vision_start_token_id"]
        vision = model.config.vision_config
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(32, patch, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    else:
        inputs["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator)
        if family == "Gemma-3":
            inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    # Some versions cap the logits of the text model of Gemma 3 and not those of the whole.
    assert_trains_as_itself(model, inputs, None)
