"""chunked_cross_entropy: trainings equal those that hold all logits, ours and
transformers'; whatever else reads the logits gets them."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from draws import draws

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import ranks  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from head_trainings import WORDS, frozen, logged, model, trained  # noqa: E402
from tiny import tokens  # noqa: E402
from torch import nn  # noqa: E402

import ctrainer  # noqa: E402
from ctrainer.adapters.deferred import Deferral, DeferredLogits  # noqa: E402

# With SGD, whose updates are proportional to the gradients. bfloat16 rounds the
# gradient by logits, and hidden states, to 2^-9, in another order.
SGD = {"optim": "sgd", "learning_rate": 0.1}


def check_same(a: Any, b: Any, rtol: float) -> None:
    losses, others = torch.tensor(logged(a)), torch.tensor(logged(b))
    assert len(losses) == 4
    torch.testing.assert_close(losses, others, rtol=rtol, atol=0.0)
    check_near(list(a.model.parameters()), list(b.model.parameters()), min(rtol, 2e-3))


def check_near(mine: list[Any], theirs: list[Any], rtol: float) -> None:
    """All together: some gradients are 0 but for rounding."""
    a, b = (
        torch.cat([t.detach().cpu().flatten() for t in ts]) for ts in (mine, theirs)
    )
    assert (a - b).norm() <= rtol * b.norm()


@pytest.mark.parametrize("number", range(draws(8, 80)))
def test_drawn_trainings_are_those_with_all_logits(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    kind = ("gpt2", "llama", "bert", "t5")[number % 4]
    tied, part = draw.random() < 0.5, draw.choice(["all", "all", "head", "body"])
    smoothing = draw.choice([0.0, 0.1]) if kind != "t5" else 0.0
    bf16 = draw.random() < 0.25
    options: dict[str, Any] = {
        **SGD, "label_smoothing_factor": smoothing, "bf16": bf16,
        "gradient_accumulation_steps": draw.choice([1, 3]),
        "max_grad_norm": draw.choice([0.0, 0.5]),
        "gradient_checkpointing": draw.random() < 0.3,
    }  # fmt: skip
    chunked = trained(
        tmp_path, frozen(model(kind, tied), part), chunked_cross_entropy=True, **options
    )
    plain = trained(tmp_path, frozen(model(kind, tied), part), **options)
    check_same(chunked, plain, 3e-2 if bf16 else 2e-6)
    # transformers adds up the means that the losses of BERT and T5 are.
    if kind in ("gpt2", "llama") or options["gradient_accumulation_steps"] == 1:
        theirs = trained(
            tmp_path, frozen(model(kind, tied), part), theirs=True, **options
        )
        check_same(chunked, theirs, 3e-2 if bf16 else 2e-6)


@pytest.mark.parametrize("wrapped", ["lora", "lora and the head"])
def test_models_of_peft_train_the_same(wrapped: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def made() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights=False,
            modules_to_save=["lm_head"] if "head" in wrapped else None,
        )  # fmt: skip
        return peft.get_peft_model(model("llama", tied=False), config)

    chunked = trained(tmp_path, made(), chunked_cross_entropy=True, **SGD)
    check_same(chunked, trained(tmp_path, made(), **SGD), 2e-6)


def test_two_ranks_train_the_same_and_fail_together(tmp_path: Path) -> None:
    told = ranks.told(ranks.run(tmp_path, "trainer.chunked_cross_entropy"))
    for rank in told:
        chunked, plain = torch.tensor(rank["chunked"]), torch.tensor(rank["plain"])
        torch.testing.assert_close(chunked, plain, rtol=2e-6, atol=0.0)
        assert "has no effect" in rank["error"]


def test_a_resumed_run_continues_with_the_same_losses(tmp_path: Path) -> None:
    options = {**SGD, "chunked_cross_entropy": True}
    whole = trained(
        tmp_path, model("llama"), save_strategy="steps", save_steps=2, **options
    )
    again = copy.copy(tmp_path) / "checkpoint-2"
    args = ctrainer.TrainingArguments(
        str(tmp_path / "again"), report_to=[], disable_tqdm=True, save_strategy="no",
        max_steps=4, logging_steps=1, use_cpu=True, per_device_train_batch_size=4,
        **options,
    )  # fmt: skip
    data = tokens(32, 12, WORDS, padded=True)
    trainer = ctrainer.Trainer(model("llama"), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(again))
    assert logged(trainer)[2:] == logged(whole)[2:]


class ReadsLogits(ctrainer.Trainer):
    """Computes the loss in ways that users do, by `how`."""

    how = ""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        labels = inputs["labels"]
        logits = model(input_ids=inputs["input_ids"]).logits
        if self.how == "shifted":
            logits = logits[..., :-1, :].contiguous()
            return F.cross_entropy(logits.view(-1, WORDS), labels[:, 1:].reshape(-1))
        if self.how == "flattened":
            flat = logits[:, :-1].float().flatten(0, 1)
            return nn.CrossEntropyLoss()(flat, labels[:, 1:].flatten())
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1)
        )
        if self.how == "entropy":
            return (
                loss
                - 0.1 * torch.distributions.Categorical(logits=logits).entropy().mean()
            )
        if self.how == "penalty":
            return loss + 1e-3 * logits.logsumexp(-1).pow(2).mean()
        assert self.how == "mean"
        return loss + 0.1 * (logits * logits).mean() + 0.0 * len(logits)


@pytest.mark.parametrize("how", ["shifted", "flattened", "entropy", "penalty", "mean"])
def test_an_override_that_reads_the_logits_gets_them(how: str, tmp_path: Path) -> None:
    cls = type("Reads", (ReadsLogits,), {"how": how})
    chunked = trained(
        tmp_path, model("gpt2"), cls=cls, chunked_cross_entropy=True, **SGD
    )
    check_same(chunked, trained(tmp_path, model("gpt2"), cls=cls, **SGD), 2e-6)


@pytest.mark.parametrize("kind", ["gemma2", "lora_head"])
def test_without_a_loss_in_chunks_the_first_micro_batch_says_so(
    kind: str, tmp_path: Path
) -> None:
    made = model("llama" if kind == "lora_head" else kind, tied=False)
    if kind == "lora_head":
        peft = pytest.importorskip("peft")
        made = peft.get_peft_model(
            made, peft.LoraConfig(r=2, target_modules=["lm_head"])
        )
    with pytest.raises(ValueError, match=r"no effect: \w+ computes with its logits"):
        trained(tmp_path, made, chunked_cross_entropy=True)
    assert not any("forward" in vars(m) for m in made.modules())


class OwnStep(ctrainer.Trainer):
    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_a_training_step_of_its_own_has_it_or_a_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, model(kind), cls=OwnStep, chunked_cross_entropy=True)
    warned = "no loss of this run was computed in chunks" in caplog.text
    assert warned == (kind == "gemma2")


def test_a_model_without_output_embeddings_is_rejected(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    made = transformers.BertForSequenceClassification(config)
    with pytest.raises(ValueError, match="BertForSequenceClassification has none"):
        trained(tmp_path, made, chunked_cross_entropy=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile": True}, "chunked_cross_entropy and torch_compile exclude"),
        ({"fsdp": "full_shard"}, "chunked_cross_entropy=True does not go with fsdp"),
    ],
)
def test_what_does_not_go_with_it_is_rejected(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, model("gpt2"), chunked_cross_entropy=True, **options)


def test_float16_with_a_loss_scale_trains_the_same(tmp_path: Path) -> None:
    options = {
        **SGD,
        "fp16": True,
        "loss_scaler": {"preset": "static", "loss_scale": 64},
    }
    chunked = trained(tmp_path, model("gpt2"), chunked_cross_entropy=True, **options)
    check_same(chunked, trained(tmp_path, model("gpt2"), **options), 4e-3)


def test_evaluation_computes_all_logits(tmp_path: Path) -> None:
    trainer = trained(tmp_path, model("gpt2"), chunked_cross_entropy=True)
    found = trainer.predict(tokens(5, 12, WORDS))
    assert found.predictions.shape == (5, 12, WORDS)
    assert "forward" not in vars(trainer.model.get_output_embeddings())


# ---- deferred logits -----------------------------------------------------------------


@pytest.fixture
def pair() -> Any:
    """The outputs of two equal models, deferred and computed, and the models."""
    deferred, computed = model("llama", tied=False).train(), model("llama", tied=False)
    deferral = Deferral(deferred)
    ids = tokens(1, 6, WORDS)[0]["input_ids"][None]
    yield deferral, deferred(ids).logits, computed(ids).logits, deferred, computed
    deferral.end()


class Square(torch.autograd.Function):
    """Reads logits behind torch's functions."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2.0 * grad * ctx.saved_tensors[0]


READ: dict[str, Any] = {
    "autograd function": Square.apply,
    "in place": lambda x: x.mul_(2.0).sum() + F.cross_entropy(
        x.view(-1, WORDS), torch.arange(6)),
    "in place on a view": lambda x: x[:, 1:].mul_(2.0).sum() + F.cross_entropy(
        x.view(-1, WORDS), torch.arange(6)),
    "a column": lambda x: x[..., 3].sum() + x[0, 1, 2] + x[:, :, :4].sum(),
    "a mask": lambda x: x[x > 0].sum() + x[torch.tensor([0])].sum(),
    "another width": lambda x: x.view(1, 12, WORDS // 2).logsumexp(-1).sum(),
    "an argument": lambda x: torch.where(torch.ones(()).bool(), x, 0.0).sum(),
    "weights": lambda x: F.cross_entropy(
        x.view(-1, WORDS), torch.arange(6), weight=torch.arange(float(WORDS))),
    "no reduction": lambda x: F.cross_entropy(
        x.view(-1, WORDS), torch.arange(6), reduction="none").square().sum(),
    "probabilities": lambda x: F.cross_entropy(
        x.view(-1, WORDS), torch.full((6, WORDS), 1 / WORDS)),
    "chunked, then read": lambda x: F.cross_entropy(
        x[0], torch.arange(6)) + x.float().sum(),
    "to another dtype": lambda x: x.to(torch.float64).sum() + x.bfloat16().sum(),
    "to a device": lambda x: x.to(device="cpu", dtype=torch.float32).sum(),
    "stacked": lambda x: torch.stack([x, x]).mean() + sum(r.sum() for r in x),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
def test_whatever_reads_deferred_logits_has_the_same_gradients(
    how: str, pair: Any
) -> None:
    _, deferred, computed, model_a, model_b = pair
    assert type(deferred) is DeferredLogits
    assert deferred.shape == computed.shape
    assert (deferred.dtype, deferred.device) == (computed.dtype, computed.device)
    got, wanted = READ[how](deferred), READ[how](computed)
    torch.testing.assert_close(got, wanted)
    got.backward()
    wanted.backward()
    grads = [[p.grad for p in m.parameters()] for m in (model_a, model_b)]
    check_near(*grads, 2e-6)


def test_only_a_loss_in_chunks_is_counted(pair: Any) -> None:
    deferral, logits, *_ = pair
    with pytest.raises(ValueError, match="no effect"):
        deferral.check()
    F.cross_entropy(logits[0], torch.arange(6), reduction="none")
    assert deferral.losses == 0
    F.cross_entropy(logits[0], torch.arange(6))  # computed: they are there
    assert deferral.losses == 0


def test_what_is_changed_in_place_before_it_is_read_is_an_error() -> None:
    made = nn.Module()
    made.get_output_embeddings = lambda: head  # type: ignore[assignment]
    head = nn.Linear(4, 9)
    deferral = Deferral(made)
    hidden = torch.randn(3, 4, requires_grad=True).clone()
    logits = head(hidden)
    hidden.add_(1.0)
    for read in (torch.sum, lambda x: F.cross_entropy(x, torch.arange(3))):
        with pytest.raises(RuntimeError, match="changed in place before"):
            read(logits)
    deferral.end()


def test_deferred_logits_are_copied_and_pickled_as_what_they_are(pair: Any) -> None:
    _, deferred, computed, *_ = pair
    assert torch.equal(pickle.loads(pickle.dumps(deferred.detach())), computed.detach())
    assert torch.equal(copy.deepcopy(deferred.detach()), computed.detach())
    assert deferred.tolist() == computed.tolist()
    assert "tensor" in repr(deferred)
