"""The loss and the gradient of an update are those of its whole batch, however it is
cut into micro-batches and whoever computes the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import Net, gpt2, llama, make, rows, run, tokens
from torch import nn
from torch.nn.functional import cross_entropy

import ctrainer
from ctrainer.adapters.torch import ItemCount

ROUNDING = 1e-6  # relative: fp32 sums of a few terms in another order
# An element of a gradient sums hundreds of terms that may cancel: bound by its tensor.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def cut(
    cls: type,
    make_model: Callable[[], nn.Module],
    data: Any,
    micro: int,
    **options: Any,
) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one update over 16 rows, in 16 / micro micro-batches."""
    gradients: list[torch.Tensor] = []

    class Look(ctrainer.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            gradients.extend(p.grad.clone() for p in model.parameters())

    trainer = make(
        cls, make_model(), data, callbacks=[Look()], max_steps=1, max_grad_norm=0.0,
        per_device_train_batch_size=micro, gradient_accumulation_steps=16 // micro,
        **options,
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history[0]["loss"], gradients


def assert_cuts_agree(
    cls: type, make_model: Callable[[], nn.Module], data: Any, **options: Any
) -> tuple[float, list[torch.Tensor]]:
    whole, gradients = cut(cls, make_model, data, 16, **options)
    for micro in (4, 8):
        loss, parts = cut(cls, make_model, data, micro, **options)
        assert loss == pytest.approx(whole, rel=ROUNDING)
        for part, gradient in zip(parts, gradients, strict=True):
            torch.testing.assert_close(part, gradient, **CLOSE)
    return whole, gradients


class Plain(nn.Module):
    """A language model that knows no count: the mean over its own micro-batch, of which
    each label is predicted in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        logits = self.out(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


class IgnoresTheCount(ctrainer.Trainer):
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class KnowsNoCount(ctrainer.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False
    ) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class OldStep(ctrainer.Trainer):
    def training_step(self, model: Any, inputs: Any) -> torch.Tensor:
        return super().training_step(model, inputs)


@pytest.mark.parametrize("make_model", [llama, gpt2, Plain])
@pytest.mark.parametrize(
    "cls", [ctrainer.Trainer, IgnoresTheCount, KnowsNoCount, OldStep]
)
def test_unequally_padded_rows_weigh_by_their_targets(
    cls: type, make_model: Callable[[], nn.Module]
) -> None:
    assert_cuts_agree(cls, make_model, tokens(16, padded=True))


@pytest.mark.parametrize("make_model", [llama, gpt2])
def test_the_loss_is_the_model_s_own_of_the_whole_batch(
    make_model: Callable[[], nn.Module],
) -> None:
    data = tokens(16, padded=True)
    loss, _ = cut(ctrainer.Trainer, make_model, data, 4)
    batch = {k: torch.stack([r[k] for r in data]) for k in data[0]}
    logits = make_model().eval()(batch["input_ids"]).logits[:, :-1]
    wanted = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert loss == pytest.approx(wanted.item(), rel=ROUNDING)


def test_transformers_shrinks_the_loss_of_a_bare_gpt2() -> None:
    """Why the test above is not a comparison: 11 of 12 labels are predicted."""
    theirs, _ = cut(transformers.Trainer, gpt2, tokens(16), 4)
    ours, _ = cut(ctrainer.Trainer, gpt2, tokens(16), 4)
    assert theirs == pytest.approx(ours * 11 / 12, rel=ROUNDING)


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    data = tokens(16)
    for row in data[:8]:
        row["labels"] = torch.full_like(row["labels"], -100)

    class InOrder(ctrainer.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    for make_model in (llama, Plain):
        loss, _ = assert_cuts_agree(InOrder, make_model, data)
        assert loss > 1.0


@pytest.mark.parametrize("cls", [ctrainer.Trainer, OldStep])
def test_rows_without_labels_weigh_alike(cls: type) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.down, self.up = nn.Linear(8, 3), nn.Linear(3, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.up(self.down(x)) - x).square().mean()}

    assert_cuts_agree(cls, Encoder, [{"x": r["x"]} for r in rows(16)])


def test_a_last_short_micro_batch_weighs_by_its_rows() -> None:
    trainer = make(
        ctrainer.Trainer, Net(), rows(11), num_train_epochs=1, max_grad_norm=0.0,
        per_device_train_batch_size=4, gradient_accumulation_steps=4,
    )  # fmt: skip
    batch = {k: torch.stack([r[k] for r in rows(11)]) for k in ("x", "labels")}
    wanted = Net()(**batch)["loss"].item()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=ROUNDING)


@pytest.mark.parametrize("every", [1, 2, 3, 50])
def test_the_training_loss_is_the_mean_over_all_updates(every: int) -> None:
    each, output = [], None
    for steps in (1, every):
        trainer = make(
            ctrainer.Trainer, Net(), rows(28), max_steps=7, logging_steps=steps,
            per_device_train_batch_size=4,
        )  # fmt: skip
        output = trainer.train()
        each = each or [log["loss"] for log in trainer.state.log_history[:7]]
    assert output is not None
    assert output.training_loss == pytest.approx(sum(each) / 7, rel=ROUNDING)
    assert output.metrics["train_loss"] == output.training_loss
    assert trainer.state.log_history[-1]["train_loss"] == output.training_loss


def reads(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"].flatten(0, 1)
    total = cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / num_items_in_batch


def ignores(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def test_a_compute_loss_func_may_read_or_ignore_the_count() -> None:
    data = tokens(16, padded=True)
    read = assert_cuts_agree(
        ctrainer.Trainer, Plain, data, parts={"compute_loss_func": reads}
    )
    ignored = assert_cuts_agree(
        ctrainer.Trainer, Plain, data, parts={"compute_loss_func": ignores}
    )
    assert read[0] == pytest.approx(ignored[0], rel=ROUNDING)


def test_label_smoothing_reads_the_count() -> None:
    data = tokens(16, padded=True)
    assert_cuts_agree(ctrainer.Trainer, llama, data, label_smoothing_factor=0.1)


def test_a_value_that_is_no_function_turns_weighting_off() -> None:
    """As TRL does, whose trainers normalise by themselves."""
    with_mean, _ = cut(KnowsNoCount, Plain, tokens(16), 16)
    summed, _ = cut(
        KnowsNoCount, Plain, tokens(16), 4, parts={"compute_loss_func": "normalised"}
    )
    assert summed == pytest.approx(4 * with_mean, rel=ROUNDING)


def test_evaluation_and_training_report_the_same_loss_of_the_same_rows() -> None:
    data = tokens(16, padded=True)
    trainer = make(ctrainer.Trainer, llama(), data, per_device_eval_batch_size=16)
    wanted, _ = cut(ctrainer.Trainer, llama, data, 4)
    metrics = trainer.evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(wanted, rel=ROUNDING)


# The count


def counted(n: int = 7) -> Any:
    from ctrainer.adapters import torch as adapter

    return adapter.item_count(n, "cpu")


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda n: n.item(),
    "int": int,
    "float": float,
    "divided by": lambda n: torch.tensor(3.0) / n,
    "divided": lambda n: n / 2,
    "times": lambda n: 2 * n,
    "compared": lambda n: n > 3,
    "moved": lambda n: n.to(torch.float64),
    "cloned": lambda n: n.clone(),
    "clamped": lambda n: torch.clamp(n, min=1),
    "as a list": lambda n: n.tolist(),
    "as bool": bool,
    "formatted": lambda n: f"{n.item():d}",
    "stacked": lambda n: torch.stack([n, n]),
    "data": lambda n: n.data,
}


@pytest.mark.parametrize("name", READS)
def test_using_the_count_s_value_is_noticed(name: str) -> None:
    count = counted()
    assert not count.was_read
    READS[name](count)
    assert count.was_read


QUERIES: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda n: isinstance(n, torch.Tensor),
    "is_tensor": torch.is_tensor,
    "shape": lambda n: n.shape,
    "dim": lambda n: n.dim(),
    "size": lambda n: n.size(),
    "dtype": lambda n: n.dtype,
    "device": lambda n: n.device,
    "requires_grad": lambda n: n.requires_grad,
    "repr": repr,
    "is None": lambda n: n is None,
}


@pytest.mark.parametrize("name", QUERIES)
def test_asking_what_the_count_is_does_not_read_it(name: str) -> None:
    count = counted()
    QUERIES[name](count)
    assert not count.was_read


def test_the_count_behaves_as_a_tensor() -> None:
    count = counted()
    assert isinstance(count, torch.Tensor)
    assert torch.is_tensor(count)
    assert type(count) is ItemCount
    assert count.item() == 7
    assert int(count) == 7
    assert count.dtype is torch.int64
    assert count.shape == ()
    assert torch.equal(count + 1, torch.tensor(8))
    assert type(count * 2) is torch.Tensor
    assert type(count.to("cpu", torch.float32)) is torch.Tensor
    assert (torch.tensor(14.0, requires_grad=True) / count).item() == 2.0


def test_a_count_of_the_user_s_own_is_passed_on() -> None:
    seen = []

    class Counts(ctrainer.Trainer):
        def get_batch_samples(self, iterator: Any, n: int, device: Any = None) -> Any:
            batches, _ = super().get_batch_samples(iterator, n, device)
            return batches, 10

        def compute_loss(
            self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kw: Any
        ) -> torch.Tensor:
            seen.append(num_items_in_batch)
            return model(**inputs)["loss"] / num_items_in_batch

    ours = run(
        Counts, Net(), rows(32), max_steps=1, per_device_train_batch_size=8,
        gradient_accumulation_steps=4, max_grad_norm=0.0,
    )  # fmt: skip
    assert seen == [10] * 4
    with torch.no_grad():
        losses = [Net()(**b)["loss"].item() / 10 for b in ours.batches]
    assert ours.logged("loss")[0] == pytest.approx(sum(losses), rel=ROUNDING)


def test_a_function_that_sums_over_the_targets_gets_their_number() -> None:
    counts: list[int] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        counts.append(int(num_items_in_batch))
        return reads(outputs, labels, num_items_in_batch)

    data = tokens(16, padded=True)
    cut(ctrainer.Trainer, Plain, data, 4, parts={"compute_loss_func": loss})
    wanted = sum(int((r["labels"] != -100).sum()) for r in data)
    assert counts == [wanted] * 4
