"""A model's own head, fused on one instance: what it gives, what it leaves alone, what it refuses."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rlhf_losses.integrations.fused_head")
from rlhf_losses.integrations.fused_head import HeadOptions, HeadRequest, fuse_head, logit_transform  # noqa: E402
from rlhf_losses.integrations.logit_chunks import in_chunks  # noqa: E402

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def tiny(config=transformers.LlamaConfig, kind=transformers.AutoModelForCausalLM.from_config, **options):
    torch.manual_seed(0)
    return kind(config(**TINY | options)).eval()


def request(ids, **options):
    return HeadRequest(torch.roll(ids, -1, -1), **options)


@pytest.fixture
def ids():
    return torch.randint(1, 300, (2, 12), generator=torch.Generator().manual_seed(0))


def expected(model, ids, temperature=1.0):
    log_p = (model(input_ids=ids).logits.float() / temperature).log_softmax(-1)
    return log_p.gather(-1, torch.roll(ids, -1, -1)[..., None])[..., 0], torch.special.entr(log_p.exp()).sum(-1)


def assert_same(got, want, most=2e-6):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=most)


@pytest.mark.parametrize("tied", [False, True])
def test_scores_and_gradients(ids, tied):
    model = tiny(tie_word_embeddings=tied)
    want = expected(model, ids, 0.7)
    (want[0].sum() + 0.3 * want[1].sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    fuse_head(model)
    scores = model(input_ids=ids, head_request=request(ids, temperature=0.7))
    assert_same((scores.log_probs, scores.entropy), want)
    (scores.log_probs.sum() + 0.3 * scores.entropy.sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_everything_else_is_left_alone(ids):
    model, other = tiny(), tiny()
    logits = model(input_ids=ids).logits
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    kind, forward, state = type(model), type(model).forward, set(model.state_dict())
    fuse_head(model)
    assert torch.equal(model(input_ids=ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
    assert type(model) is kind
    assert kind.forward is forward
    assert set(model.state_dict()) == state
    assert torch.equal(other(input_ids=ids).logits, logits)


def test_gpt2(ids):
    names = {"n_embd": 32, "n_head": 4, "n_layer": 2}
    model = tiny(transformers.GPT2Config, transformers.GPT2LMHeadModel, **names)
    want = expected(model, ids)
    fuse_head(model)
    scores = model(input_ids=ids, head_request=request(ids))
    assert_same((scores.log_probs, scores.entropy), want)


def test_h10_arguments_of_the_body_are_passed_on(ids):
    model = tiny()
    fuse_head(model)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    embeds = model.get_input_embeddings()(ids)
    got = model(inputs_embeds=embeds, attention_mask=mask, head_request=request(ids)).log_probs
    want = model(inputs_embeds=embeds, attention_mask=mask).logits.log_softmax(-1)
    assert_same([got[0, 4:]], [want.gather(-1, torch.roll(ids, -1, -1)[..., None])[0, 4:, 0]])


def test_check_draws_no_random_numbers_and_leaves_the_mode(ids):
    model = tiny(attention_dropout=0.5).train()
    fuse_head(model)
    torch.manual_seed(5)
    scores = model(input_ids=ids, head_request=request(ids))
    torch.manual_seed(5)
    again = model(input_ids=ids, head_request=request(ids))
    assert model.training
    assert model.lm_head.training
    assert torch.equal(scores.log_probs, again.log_probs)


class AfterTheHead(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output


class BeforeTheHead(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(output[0] / 4))


def with_a_layer_before_the_head(config):
    return transformers.BertLMHeadModel(transformers.BertConfig(**TINY, is_decoder=True))


@pytest.mark.parametrize("kind", [AfterTheHead, BeforeTheHead, with_a_layer_before_the_head])
def test_logits_that_the_config_does_not_explain_are_refused(ids, kind):
    model = tiny(kind=kind)
    fuse_head(model)
    with pytest.raises(ValueError, match="does something to its logits"):
        model(input_ids=ids, head_request=request(ids))


def test_forwards_of_an_instance_are_not_lost():
    for pick in (lambda model: model, lambda model: model.lm_head):
        model = tiny()
        module = pick(model)
        module.forward = lambda *args, **kwargs: None
        with pytest.raises(ValueError, match="has one of its own, which would be lost"):
            fuse_head(model)


def test_rows_are_chosen_by_the_mask(ids):
    model = tiny()
    fuse_head(model)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(input_ids=ids, logits_to_keep=1, head_request=request(ids))


@pytest.mark.parametrize(
    "options", [{"backend": "fast"}, {"validate": "maybe"}, {"workspace_bytes": 1e8}, {"cache_bytes": "all"}]
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        HeadOptions(**options)


@pytest.mark.parametrize(
    ("config", "options", "transform"),
    [
        (transformers.LlamaConfig, {}, {}),
        (transformers.Gemma2Config, {"final_logit_softcapping": 30.0}, {"softcap": 30.0}),
        (transformers.Gemma2Config, {"final_logit_softcapping": None}, {}),
        (transformers.CohereConfig, {"logit_scale": 0.0625}, {"logit_scale": 0.0625}),
        (transformers.GraniteConfig, {"logits_scaling": 16.0}, {"logit_scale": 0.0625}),
        (transformers.GraniteConfig, {"logits_scaling": 1.0}, {}),
        (transformers.FalconH1Config, {"lm_head_multiplier": 0.5}, {"logit_scale": 0.5}),
        (transformers.Gemma3Config, {"text_config": {"final_logit_softcapping": 20.0}}, {"softcap": 20.0}),
    ],
)
def test_h1_h2_transform_of_a_config(config, options, transform):
    assert logit_transform(config(**options)) == transform


def test_h2_unknown_transform_is_refused():
    with pytest.raises(ValueError, match=r"output_multiplier_scale = 0\.5"):
        fuse_head(tiny(output_multiplier_scale=0.5))


def test_h9_second_owner_is_refused():
    model = tiny()
    fuse_head(model)
    with pytest.raises(ValueError, match="expected one owner"):
        fuse_head(model)
    model = tiny()

    def forward_with_torch_backend(self):
        pass

    model.forward = forward_with_torch_backend.__get__(model)
    with pytest.raises(ValueError, match="forward_with_torch_backend"):
        fuse_head(model)


def test_heads_that_are_no_linear_layer_are_refused():
    model = tiny()
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(ValueError, match=r"nn\.Linear, got torch\.nn\.modules\.container\.Sequential"):
        fuse_head(model)


@pytest.mark.parametrize("active", [True, False])
def test_h4_lora_on_the_head(ids, active):
    peft = pytest.importorskip("peft")
    model = tiny()
    fuse_head(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"]))
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    if not active:
        wrapped.base_model.disable_adapter_layers()
    want = expected(wrapped, ids)
    scores = wrapped(input_ids=ids, head_request=request(ids))
    assert_same((scores.log_probs, scores.entropy), want)
    if active:
        names = [name for name, p in wrapped.named_parameters() if p.requires_grad]
        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        assert any("lm_head.lora_A" in name for name in names)
        got = torch.autograd.grad(scores.log_probs.sum(), parameters)
        for x, y in zip(got, torch.autograd.grad(want[0].sum(), parameters), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_h4_saved_copy_of_the_head(ids):
    peft = pytest.importorskip("peft")
    model = tiny()
    fuse_head(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped = peft.get_peft_model(model, config)
    copy = wrapped.base_model.model.lm_head.modules_to_save["default"]
    torch.nn.init.normal_(copy.weight)
    want = expected(wrapped, ids)
    scores = wrapped(input_ids=ids, head_request=request(ids))
    assert_same((scores.log_probs, scores.entropy), want, 1e-5)
    scores.log_probs.sum().backward()
    assert copy.weight.grad.abs().max() > 0


def test_h4_reference_policy_of_a_merged_adapter(ids):
    peft = pytest.importorskip("peft")
    model = tiny()
    want = expected(model, ids)
    fuse_head(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"]))
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    wrapped.merge_adapter()
    with wrapped.disable_adapter():
        scores = wrapped(input_ids=ids, head_request=request(ids))
    assert_same((scores.log_probs, scores.entropy), want, 1e-5)


def test_h4_dora_is_refused(ids):
    peft = pytest.importorskip("peft")
    model = tiny()
    fuse_head(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True))
    with pytest.raises(ValueError, match="expected a plain LoRA pair"):
        wrapped(input_ids=ids, head_request=request(ids))


@pytest.mark.parametrize("workspace_bytes", [1, 3 * 4 * 4 * 50, 2**30])
def test_logits_in_chunks(workspace_bytes):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in [(7, 9), (50, 9), (50,)])
    given = [x.requires_grad_() for x in (hidden, weight, bias)]

    def function(logits, start):
        return logits.logsumexp(-1), logits.argmax(-1), (logits**2).mean(-1).detach()

    got = in_chunks(*given, function, workspace_bytes)
    want = function(torch.nn.functional.linear(*given), 0)
    assert_same(got, want, 1e-4)
    upstream = torch.randn(7, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(got[0], given, upstream, retain_graph=True)
    assert_same(inside, torch.autograd.grad(got[0], given, upstream, retain_graph=True))
    for x, y in zip(
        torch.autograd.grad(got[0], given, upstream), torch.autograd.grad(want[0], given, upstream), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("config", [transformers.GPT2Config, transformers.LlamaConfig])
def test_log_prob_actor_with_padding_on_the_left(ids, tmp_path, config):
    from rlhf_losses.integrations.ray import LogProbActor

    more = {"n_embd": 32, "n_head": 4, "n_layer": 2} if config is transformers.GPT2Config else {}
    model = tiny(config, **more)
    model.save_pretrained(tmp_path)
    want = expected(model, ids)[0][:, :-1].detach()
    actor = LogProbActor(str(tmp_path))
    padded, attention = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    got = torch.from_numpy(actor.score(padded.numpy(), attention.numpy())["log_probs"])
    assert_same([got[:, 4:]], [want])
    # Nothing but padding is before the first token.
    assert (got[:, :4] == 0).all()
    with pytest.raises(ValueError, match="expected 0 <= id < 300, got 0 to 400"):
        actor.score([[0, 400]])
    with pytest.raises(ValueError, match=r"masks of that shape, got \[2, 12\]"):
        actor.score(ids.numpy(), attention.numpy())
