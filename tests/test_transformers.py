"""Supervised training with a fused head: what stays the model's own, what is refused, and who may wrap the model."""

import copy
import threading
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, Allocations, assert_close_to_truth, script
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("rlhf_losses.integrations.transformers")
import rlhf_losses  # noqa: E402
from rlhf_losses.integrations import fused_head  # noqa: E402
from rlhf_losses.integrations.transformers import fuse_head, unfuse_head  # noqa: E402
from rlhf_losses.integrations.unwritten_logits import Unfollowed, UnwrittenLogits  # noqa: E402

VOCAB = 300
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def tiny(kind=transformers.LlamaForCausalLM, **options):
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**TINY | options))


@pytest.fixture
def batch():
    ids = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, batch):
    """The loss, and the gradient of everything that has one."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


# What stays the model's own


def test_everything_else_is_left_alone(batch):
    model, other = tiny().eval(), tiny().eval()
    ids = batch["input_ids"]
    logits, text = model(input_ids=ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    kind, forward, state = type(model), type(model).forward, set(model.state_dict())
    fuse_head(model)
    assert model(**batch).logits is None
    assert torch.equal(model(input_ids=ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
    assert type(model) is kind
    assert kind.forward is forward
    assert set(model.state_dict()) == state
    assert other(**batch).logits is not None


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(40)},
        {"shift_labels": torch.arange(24).reshape(2, 12)},
        {"ignore_index": 0, "shift_labels": torch.arange(24).reshape(2, 12) % 3},
        {"output_hidden_states": True},
    ],
)
def test_loss_is_the_models_own(batch, more):
    model = tiny()
    want = step(model, batch | more)
    fuse_head(model)
    assert_same_step(step(model, batch | more), want)


def test_a_loss_function_of_the_users(batch):
    def weighted(logits, labels, vocab_size, **kwargs):
        losses = F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten(), reduction="none")
        return (losses * torch.arange(22) / 100).sum()

    model = tiny()
    model.loss_function = weighted
    want = step(model, batch)
    fuse_head(model)
    assert_same_step(step(model, batch), want)


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("given", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.3, "z_loss": 0.1}])
def test_smoothing_and_z_loss(batch, given, items):
    model = tiny()
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    count = items or (labels != -100).sum()
    want = F.cross_entropy(logits, labels, label_smoothing=given.get("label_smoothing", 0.0), reduction="sum") / count
    want = want + given.get("z_loss", 0.0) * logits.logsumexp(-1)[labels != -100].square().sum() / count
    model.zero_grad()
    want.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    fuse_head(model, **given)
    assert_same_step(step(model, batch | {"num_items_in_batch": items}), (want.detach(), gradients))


def test_smoothing_of_the_models_own_loss(batch):
    weights = torch.rand(VOCAB)

    def own(logits, labels, vocab_size, **kwargs):
        return nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )

    model = tiny()
    model.loss_function = own
    want = step(model, batch)
    fuse_head(model, label_smoothing=0.1)
    assert_same_step(step(model, batch), want)


@pytest.mark.parametrize("given", [{"label_smoothing": 1.5}, {"z_loss": -1.0}, {"backend": "fast"}, {"validate": "no"}])
def test_options_are_checked(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: expected"):
        fuse_head(tiny(), **given)


def test_labels_by_position(batch):
    model = tiny()
    given = (batch["input_ids"], None, None, None, None, batch["labels"])
    want = model(*given).loss
    fuse_head(model)
    output = model(*given)
    assert output.logits is None
    torch.testing.assert_close(output.loss, want)


def test_tuples(batch):
    model = tiny()
    want = model(**batch, return_dict=False)
    fuse_head(model)
    got = model(**batch, return_dict=False)
    assert got[1] is None
    assert len(got) == len(want)
    torch.testing.assert_close(got[0], want[0])


def test_evaluation_that_wants_logits(batch):
    model = tiny()
    fuse_head(model, in_eval=False)
    assert model.train()(**batch).logits is None
    assert model.eval()(**batch).logits.shape == (2, 12, VOCAB)


def test_nothing_but_ignored_labels(batch):
    model = tiny()
    batch["labels"][:] = -100
    fuse_head(model)
    assert model(**batch).loss == 0  # torch: NaN
    loss, gradients = step(model, batch | {"num_items_in_batch": 7})
    assert loss == 0
    assert all((g == 0).all() for g in gradients.values())


def test_labels_outside_of_the_vocabulary(batch):
    model = tiny()
    fuse_head(model)
    batch["labels"][1, 3] = VOCAB
    assert model(**batch).loss.isnan()
    with pytest.raises(ValueError, match=f"0 <= label < {VOCAB}"):
        rlhf_losses.check()
    unfuse_head(model)
    fuse_head(model, validate="sync")
    with pytest.raises(ValueError, match=f"0 <= label < {VOCAB}"):
        model(**batch)


@pytest.mark.parametrize("way", ["reference", "unfused"])
def test_a_second_backward_names_its_ways_out(batch, way):
    model = tiny()
    fuse_head(model)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"unfuse_head, or fuse_head\(model, backend='reference'\)"):
        loss.backward()
    unfuse_head(model)
    if way == "reference":
        fuse_head(model, backend="reference")
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    first = model.lm_head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * first)


def test_no_logits_are_written():
    model = tiny(vocab_size=2000, num_hidden_layers=1)
    ids = torch.randint(1, 2000, (2, 400))
    fuse_head(model, workspace_bytes=2**18)
    model(input_ids=ids, labels=ids)
    with Allocations() as unfused:
        model(input_ids=ids).logits.sum().backward()
    with Allocations() as fused:
        model(input_ids=ids, labels=ids).loss.backward()
    assert max(unfused.sizes) >= 800 * 2000
    assert max(fused.sizes) < 800 * 2000 / 2


def test_h5_frozen_head(batch):
    model = tiny()
    for frozen in (model.lm_head, model.get_input_embeddings()):
        frozen.requires_grad_(False)
    fuse_head(model)
    loss = model(**batch).loss
    with Allocations(*model.parameters()) as made:
        loss.backward()
    assert model.lm_head.weight.grad is None
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
    assert max(made.sizes) < model.lm_head.weight.numel()


def test_check_draws_no_random_numbers(batch):
    model = tiny(attention_dropout=0.5).train()
    fuse_head(model)
    torch.manual_seed(5)
    first = model(**batch).loss
    torch.manual_seed(5)
    assert torch.equal(model(**batch).loss, first)
    assert model.lm_head.training


@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_check_knows_what_16_bits_round(batch, way):
    config = transformers.Gemma2Config(**TINY, final_logit_softcapping=2.0)
    for seed in range(10):
        torch.manual_seed(seed)
        model = transformers.Gemma2ForCausalLM(config)
        nn.init.normal_(model.lm_head.weight, std=0.2)
        model.to(torch.bfloat16 if way == "weights" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            want = model(**batch).loss
            fuse_head(model)
            # Half a percent is what logits of 16 bits miss, of which the fused loss has none.
            assert model(**batch).loss.item() == pytest.approx(want.item(), rel=2**-8)


# Adapters


PEFT = {
    "body": {"target_modules": ["q_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved-embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("order", ["fused-first", "adapters-first"])
@pytest.mark.parametrize("name", PEFT)
def test_h4_adapters(batch, name, order):
    peft = pytest.importorskip("peft")
    model = tiny()
    if order == "fused-first":
        fuse_head(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **PEFT[name]))
    for key, p in wrapped.named_parameters():
        if "lora_B" in key or "modules_to_save" in key:
            nn.init.normal_(p, std=0.1)
    if order == "adapters-first":
        fuse_head(wrapped)
    got = step(wrapped, batch)
    assert wrapped(**batch).logits is None
    unfuse_head(wrapped)
    assert not [module for module in wrapped.modules() if "forward" in vars(module)]
    assert wrapped(**batch).logits is not None
    assert_same_step(got, step(wrapped, batch))
    if "head" in name:
        assert any("lm_head" in key and g.abs().max() > 0 for key, g in got[1].items())


@pytest.mark.parametrize("kind", ["dora", "adalora"])
def test_h4_other_adapters_on_the_head_are_refused(kind, batch):
    peft = pytest.importorskip("peft")
    config = (
        peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True)
        if kind == "dora"
        else peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], total_step=10, tinit=1, tfinal=2)
    )
    model = peft.get_peft_model(tiny(), config)
    fuse_head(model)
    with pytest.raises(ValueError, match="expected a plain LoRA pair"):
        model(**batch)


@pytest.mark.parametrize("checked", [False, True])
def test_an_adapter_per_row_is_refused_on_the_head(checked, batch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    model = peft.get_peft_model(tiny(), config)
    model.add_adapter("other", config)
    model.eval()
    fuse_head(model)
    if checked:
        model(**batch)
    with pytest.raises(ValueError, match="adapter_names: expected None"):
        model(**batch, adapter_names=["default", "other"])


# What is refused


class Clamped(transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids)[0]).clamp(-5, 5)
        return transformers.modeling_outputs.CausalLMOutput(self.loss_function(logits, labels, VOCAB), logits)


class Biased(Clamped):
    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids)[0]) + torch.arange(VOCAB)
        return transformers.modeling_outputs.CausalLMOutput(self.loss_function(logits, labels, VOCAB), logits)


class Bypassed(Clamped):
    def forward(self, input_ids, labels=None, **kwargs):
        logits = F.linear(self.model(input_ids)[0], self.lm_head.weight)
        return transformers.modeling_outputs.CausalLMOutput(self.loss_function(logits, labels, VOCAB), logits)


class Unused(Clamped):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids)[0]
        return transformers.modeling_outputs.CausalLMOutput(hidden.square().mean(), self.lm_head(hidden))


class Accurate(Clamped):
    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids)[0])
        loss = self.loss_function(logits, labels, VOCAB)
        loss.accuracy = (logits.argmax(-1) == labels).float().mean()
        return transformers.modeling_outputs.CausalLMOutput(loss, logits)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Accurate, "does something else .logits.argmax is asked for: expected .*; train it without the fused head"),
        (Clamped, "expected a forward that scales, caps and cuts its logits .*logits.clamp is asked for"),
        (Biased, r"expected a forward that scales, caps and cuts its logits .*add\(\) is called"),
        (Bypassed, "got one that does not call its head"),
        (Unused, "got one that calls its head and takes no cross entropy of what it returns"),
    ],
)
def test_forwards_that_cannot_be_followed_are_refused(batch, kind, words):
    model = tiny(kind)
    fuse_head(model)
    with pytest.raises(ValueError, match=words):
        model(**batch)
    unfuse_head(model)
    assert model(**batch).logits.shape == (2, 12, VOCAB)


def test_a_head_that_gives_other_logits_is_refused_with_the_numbers(batch):
    model = tiny()
    fuse_head(model)
    model.lm_head.register_forward_hook(lambda module, given, out: out * 1.5 if isinstance(out, torch.Tensor) else out)
    with pytest.raises(ValueError, match=r"own numbers on 8 tokens within .* got errors of \{'log_probs': \d"):
        model(**batch)


@pytest.mark.parametrize("off", [-1e4, -1e9, -torch.inf])
def test_columns_that_are_switched_off_widen_no_bound(off, batch):
    config = transformers.PhiConfig(**TINY)
    model = transformers.PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight)
    never = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, batch["input_ids"].flatten(), False)
    model.lm_head.bias.data[never.nonzero()[:3, 0]] = off
    fuse_head(model)
    assert model(**batch).loss.isfinite()
    unfuse_head(model)
    fuse_head(model)
    model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5 if isinstance(out, torch.Tensor) else out)
    with pytest.raises(ValueError, match=r"own numbers on 8 tokens within 0\.0"):
        model(**batch)


def test_hidden_states_that_are_not_finite_are_named(batch):
    model = tiny()
    fuse_head(model)
    model.model.embed_tokens.weight.data[batch["input_ids"][0, 0]] = torch.nan
    with pytest.raises(ValueError, match="expected finite hidden states"):
        model(**batch)


def test_logits_may_be_flattened_in_every_way(batch):
    model = tiny()
    want = step(model, batch)
    tokens, labels = batch["labels"].numel() - 2, batch["labels"][:, 1:].reshape(-1)
    for flat in (
        lambda logits: logits[:, :-1].reshape(tokens, -1),
        lambda logits: logits[:, :-1].reshape(-1, VOCAB),
        lambda logits: torch.flatten(logits[:, :-1], 0, 1),
        lambda logits: torch.flatten(logits[:, :-1], end_dim=1),
    ):
        model.loss_function = lambda logits, flat=flat, **kwargs: torch.nn.functional.cross_entropy(
            flat(logits), labels
        )
        fuse_head(model)
        assert_same_step(step(model, batch), want)
        unfuse_head(model)
    model.loss_function = lambda logits, **kwargs: logits.reshape(2 * tokens, -1).sum()
    fuse_head(model)
    with pytest.raises(ValueError, match="breaks the vocabulary up"):
        model(**batch)


def test_a_loss_of_two_scales_is_refused_at_once(batch):
    model = tiny()
    labels = batch["labels"].reshape(-1)

    def loss(logits, **kwargs):
        flat = logits.reshape(-1, VOCAB)
        return sum(torch.nn.functional.cross_entropy(flat / by, labels) for by in (1, 2))

    model.loss_function = loss
    fuse_head(model)
    with pytest.raises(ValueError, match="scales the logits by several numbers"):
        model(**batch)


def test_a_transform_that_changes_after_the_check_is_refused(batch):
    config = transformers.CohereConfig(**TINY, logit_scale=0.5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    fuse_head(model)
    model(**batch)
    model.logit_scale = 0.25
    with pytest.raises(ValueError, match=r"\{'logit_scale': 0.5\} that was checked, got \{'logit_scale': 0.25\}"):
        model(**batch)


def test_h9_one_owner():
    model = tiny()
    fuse_head(model)
    with pytest.raises(ValueError, match="fused already"):
        fuse_head(model)
    with pytest.raises(ValueError, match="fused already"):
        fused_head.fuse_head(model)
    for pick in (lambda model: model, lambda model: model.lm_head):
        model = tiny()
        pick(model).forward = lambda *args, **kwargs: None
        with pytest.raises(ValueError, match="has one of its own, which would be lost"):
            fuse_head(model)


@pytest.mark.parametrize("kind", ["forward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_heads_with_hooks_are_refused(batch, kind):
    def look_at_logits(*given):
        return None

    model = tiny()
    handle = getattr(model.lm_head, f"register_{kind}")(look_at_logits)
    with pytest.raises(ValueError, match=r"got <function .*look_at_logits .*; remove it"):
        fuse_head(model)
    handle.remove()
    fuse_head(model)
    assert model(**batch).logits is None


@pytest.mark.parametrize("fuse", [fuse_head, fused_head.fuse_head])
@pytest.mark.parametrize(
    "given", [None, "gpt2", nn.Linear(2, 3), nn.Sequential(tiny()), transformers.LlamaForCausalLM], ids=str
)
def test_what_is_no_model_is_refused(given, fuse):
    with pytest.raises(TypeError, match=rf"model: expected a transformers model .*, got {type(given).__name__}; fuse"):
        fuse(given)


def test_models_without_data_are_refused(batch):
    model = tiny().to("meta")
    fuse_head(model)
    with pytest.raises(ValueError, match=r"hidden_states: .*the meta device; load the model's weights first"):
        model(**{name: x.to("meta") for name, x in batch.items()})


def test_heads_that_are_no_linear_layer_are_refused():
    model = tiny()
    model.set_output_embeddings(nn.Sequential(model.lm_head))
    with pytest.raises(ValueError, match=r"nn\.Linear, got torch\.nn\.modules\.container\.Sequential"):
        fuse_head(model)


def test_unfusing_what_is_not_fused():
    with pytest.raises(ValueError, match="expected a model whose head has been fused"):
        unfuse_head(tiny())


def test_threads_that_share_a_model(batch):
    model = tiny()
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits
    fuse_head(model)
    want = step(model, batch)
    inside, asked, done = threading.Barrier(3, timeout=60), threading.Barrier(3, timeout=60), []
    thread_of_logits = threading.get_ident()

    def body_is_done(module, given, output):
        # Two threads are before the head of the fused forward when the third calls it, and leave it one by one.
        if threading.get_ident() != thread_of_logits:
            inside.wait()
            asked.wait()

    def train(name):
        done.append((name, model(**batch)))

    handle = model.model.register_forward_hook(body_is_done)
    threads = [threading.Thread(target=train, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    inside.wait()
    got = model(input_ids=ids).logits
    asked.wait()
    for thread in threads:
        thread.join()
    handle.remove()
    assert torch.equal(got, logits)
    assert sorted(name for name, _ in done) == ["a", "b"]
    for _, output in done:
        assert output.logits is None
        torch.testing.assert_close(output.loss.detach(), want[0])
    assert "lm_head" not in vars(model)
    assert isinstance(model.lm_head, nn.Linear)


# The description of logits


FOLLOWED = {
    "shifted": lambda z, mask: z[..., :-1, :].contiguous().view(-1, VOCAB),
    "masked": lambda z, mask: z[mask != 0],
    "one-sequence": lambda z, mask: z[0],
    "every-other": lambda z, mask: z[:, ::2].reshape((-1, z.size(-1))),
    "new-axis": lambda z, mask: z[None, :, 1:][0].flatten(0, 1),
    "scaled": lambda z, mask: 2 * z / 3 * 0.25,
    "capped": lambda z, mask: torch.tanh(z / 0.5) * 0.5,
    "capped-unevenly": lambda z, mask: 3 * (0.5 * z).tanh() / 2,
    "just-tanh": lambda z, mask: z.to(torch.float64).tanh(),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_logits_are_followed(name):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 16, generator=generator, dtype=torch.float64)
    mask = torch.randint(2, (2, 6), generator=generator)

    def loss(hidden, target, transform, sample, settings):
        stats = rlhf_losses.linear_log_probs(hidden, weight, target, **transform, backend="reference")
        return -stats.log_probs.mean()

    described = FOLLOWED[name](UnwrittenLogits(hidden, VOCAB, loss), mask)
    logits = FOLLOWED[name](hidden @ weight.T, mask)
    assert described.shape == logits.shape
    assert described.ndim == logits.dim() == described.dim()
    labels = torch.randint(VOCAB, logits.shape[:-1], generator=generator)
    want = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(F.cross_entropy(described, labels), want, rtol=1e-12, atol=0)


REFUSED = {
    "part-of-the-vocabulary": (lambda z: z[..., :100], "a part of the vocabulary"),
    "one-entry": (lambda z: z[:, 2, 5], "a part of the vocabulary"),
    "other-view": (lambda z: z.view(-1, 100), "breaks the vocabulary up"),
    "flattened": (lambda z: z.flatten(), "breaks the vocabulary up"),
    "capped-twice": (lambda z: z.tanh().tanh(), "capped twice"),
    "scaled-by-a-tensor": (lambda z: z * torch.ones(VOCAB), "Tensor"),
    "softmax": (lambda z: torch.softmax(z, -1), r"softmax\(\) is called"),
    "log-softmax": (lambda z: F.log_softmax(z, -1), r"log_softmax\(\) is called"),
    "probabilities": (lambda z: F.cross_entropy(z, torch.ones(2, 6, VOCAB)), "probabilities"),
    "deprecated": (lambda z: F.cross_entropy(z, torch.ones(2, 6).long(), reduce=False), "deprecated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_logits_that_are_not_followed(name):
    function, words = REFUSED[name]
    with pytest.raises(Unfollowed, match=words):
        function(UnwrittenLogits(torch.zeros(2, 6, 200), VOCAB, None))


# Who may wrap the model


@pytest.mark.parametrize("unwrap", [False, True])
def test_accelerates_mixed_precision(batch, unwrap):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny()
    fuse_head(model)
    prepared = accelerator.prepare(model)
    loss = prepared(**batch).loss
    assert loss.dtype == torch.float32
    if unwrap:
        prepared = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert prepared(**batch).logits is None
        assert not torch.equal(prepared(**batch).loss, loss)
    unfuse_head(prepared)
    assert prepared(**batch).logits.dtype == torch.float32


def test_a_checkpoint_around_the_whole_model(batch):
    model = tiny(attention_dropout=0.5).train()
    fuse_head(model)
    torch.manual_seed(0)
    want = step(model, batch)
    model.zero_grad()
    torch.manual_seed(0)
    loss = checkpoint(
        lambda ids: model(input_ids=ids, labels=batch["labels"]).loss, batch["input_ids"], use_reentrant=False
    )
    loss.backward()
    assert_same_step((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), want)


def test_compiled(batch):
    model = tiny()
    want = step(model, batch)
    fuse_head(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        output = compiled(**batch)
        assert output.logits is None
        output.loss.backward()
        assert_same_step((output.loss.detach(), {name: p.grad for name, p in model.named_parameters()}), want)


def test_copies_are_models_of_their_own(batch):
    model = tiny()
    fuse_head(model)
    want = model(**batch).loss
    other = copy.deepcopy(model)
    nn.init.zeros_(model.lm_head.weight)
    torch.testing.assert_close(other(**batch).loss, want)
    torch.testing.assert_close(model(**batch).loss, torch.tensor(VOCAB).float().log())
    unfuse_head(other)
    assert model(**batch).logits is None


@pytest.mark.parametrize("adapted", [False, True])
def test_saved_models_are_unfused(batch, adapted, tmp_path):
    model = tiny()
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))
    fuse_head(model)
    want = step(model, batch)
    torch.save(model, tmp_path / "model.pt")
    assert model(**batch).logits is None
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded(**batch).logits is not None
    assert_same_step(step(loaded, batch), want)
    fuse_head(loaded)
    assert loaded(**batch).logits is None
    assert_same_step(step(loaded, batch), want)
    unfuse_head(loaded)
    assert not [module for module in loaded.modules() if "forward" in vars(module)]


def rows():
    generator = torch.Generator().manual_seed(0)
    made = []
    for row in range(24):
        ids = torch.randint(1, VOCAB, (10,), generator=generator)
        labels = ids.clone()
        labels[: row % 7] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def trained(fused, folder, **options):
    model = tiny()
    if fused:
        fuse_head(model)
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows()[:5])
    called = []
    model.lm_head.register_forward_hook(lambda module, given, out: called.append(isinstance(out, dict)))
    trainer.train()
    losses = [line[name] for line in trainer.state.log_history for name in ("loss", "grad_norm") if name in line]
    return [*losses, trainer.evaluate()["eval_loss"]], any(called)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}])
def test_trainer(tmp_path, options):
    pytest.importorskip("accelerate")
    fused, is_fused = trained(True, tmp_path, **options)
    unfused, _ = trained(False, tmp_path, **options)
    assert fused == pytest.approx(unfused, rel=1e-5)
    assert len(fused) == 9
    # With its own label smoothing Trainer takes the labels away and asks for logits.
    assert is_fused == ("label_smoothing_factor" not in options)


SHARDED = ["ddp", "fsdp1", "fsdp1-tied", "fsdp1-head-apart", "fsdp2", "fsdp2-tied", "fsdp2-head-apart"]
MIXED = ["fsdp1-mixed", "fsdp2-mixed"]
ADAPTED = ["fsdp2-lora", "fsdp2-saved-head"] if find_spec("peft") else []
ZERO3 = ["zero3", "zero3-tied"] if find_spec("deepspeed") else []


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    results = tmp_path_factory.mktemp("sharded") / "results.pt"
    script(ROOT / "tests/sharded_cases.py", results, *SHARDED, *MIXED, *ADAPTED, *ZERO3, ranks=2)
    return torch.load(results)


@pytest.mark.parametrize("case", [*SHARDED, *ADAPTED, *ZERO3])
def test_h6_h7_two_ranks(sharded, case):
    (losses, parameters), (own_losses, own_parameters) = (sharded[case][way] for way in ("fused", "unfused"))
    assert losses == pytest.approx(own_losses, rel=1e-6)
    assert losses[0] != losses[-1]
    assert parameters.keys() == own_parameters.keys()
    for name, own in own_parameters.items():
        torch.testing.assert_close(parameters[name], own, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", MIXED)
def test_two_ranks_with_16_bits(sharded, case):
    def losses(case, way):
        return torch.tensor(sharded[case][way][0])

    truth = losses(case.removesuffix("-mixed"), "unfused").double()
    assert_close_to_truth(losses(case, "fused"), truth, losses(case, "unfused"), torch.bfloat16)
