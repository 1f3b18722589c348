"""fp16_full_eval and bf16_full_eval: in that dtype, and the model as before after it;
the contexts that the loss is computed in."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, rows
from torch import nn

import ctrainer

DTYPES = {"fp16_full_eval": torch.float16, "bf16_full_eval": torch.bfloat16}


class Seen(Net):
    """Notes the dtype of weights and buffers at each forward; takes any."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_mean.normal_(generator=torch.Generator().manual_seed(1))
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        weight = self.layers[0].weight
        self.seen.append((weight.dtype, self.norm.running_mean.dtype))
        y = self.layers(self.norm(x.to(weight.dtype))).squeeze(-1)
        loss = nn.functional.mse_loss(y.float(), labels.float())
        return {"loss": loss, "logits": y}


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def trainer_of(folder: Path, cls: type = ctrainer.Trainer, **args: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 3, "learning_rate": 0.01, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, **args,
    }  # fmt: skip
    model = settings.pop("model", None) or Seen()
    return cls(
        model,
        ctrainer.TrainingArguments(str(folder), **settings),
        train_dataset=rows(),
        eval_dataset=rows(20),
    )


@pytest.mark.parametrize("option", DTYPES)
class TestFullEval:
    def test_evaluates_in_that_dtype(self, tmp_path: Path, option: str) -> None:
        trainer = trainer_of(tmp_path, **{option: True})
        metrics = trainer.evaluate()
        assert set(trainer.model.seen) == {(DTYPES[option], DTYPES[option])}
        exact = trainer_of(tmp_path).evaluate()["eval_loss"]
        # Weights of 8 bits (bf16) or 11 (fp16): some units of their last place.
        assert metrics["eval_loss"] == pytest.approx(exact, rel=2**-6)
        assert metrics["eval_loss"] != exact

    @pytest.mark.parametrize("method", ["evaluate", "predict"])
    def test_hands_the_model_back_with_the_same_bits(
        self, tmp_path: Path, option: str, method: str
    ) -> None:
        trainer = trainer_of(tmp_path, **{option: True})
        own = tensors(trainer.model)
        before = [(t, t.data_ptr(), t.dtype, t.detach().clone()) for t in own]
        getattr(trainer, method)(*[rows(20)] if method == "predict" else [])
        for now, (tensor, address, dtype, value) in zip(
            tensors(trainer.model), before, strict=True
        ):
            assert now is tensor
            assert (now.data_ptr(), now.dtype) == (address, dtype)
            assert torch.equal(now, value)

    def test_hands_it_back_after_an_error_too(
        self, tmp_path: Path, option: str
    ) -> None:
        class Failing(ctrainer.Trainer):
            def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
                raise LookupError("a hook")

        trainer = trainer_of(tmp_path, Failing, **{option: True})
        before = [t.detach().clone() for t in tensors(trainer.model)]
        with pytest.raises(LookupError, match="a hook"):
            trainer.evaluate()
        assert all(map(torch.equal, tensors(trainer.model), before))
        assert trainer.model.layers[0].weight.dtype == torch.float32

    def test_training_goes_on_as_if_nothing_had_been_evaluated(
        self, tmp_path: Path, option: str
    ) -> None:
        plain, evaluated = (trainer_of(tmp_path, **{option: True}) for _ in range(2))
        evaluated.evaluate()
        plain.train()
        evaluated.train()
        assert all(map(torch.equal, tensors(plain.model), tensors(evaluated.model)))

    def test_within_a_training_weights_stay_as_they_are(
        self, tmp_path: Path, option: str
    ) -> None:
        trainer = trainer_of(
            tmp_path, eval_strategy="steps", eval_steps=1, **{option: True}
        )
        trainer.train()
        assert set(trainer.model.seen) == {(torch.float32, torch.float32)}

    def test_compute_metrics_finds_the_model_as_it_was(
        self, tmp_path: Path, option: str
    ) -> None:
        trainer = trainer_of(tmp_path, **{option: True})
        found = []

        def metrics(prediction: Any) -> dict[str, float]:
            found.append(trainer.model.layers[0].weight.dtype)
            return {}

        trainer.compute_metrics = metrics
        trainer.evaluate()
        assert found == [torch.float32]


def test_a_model_of_half_precision_stays_of_it(tmp_path: Path) -> None:
    model = Seen().to(torch.bfloat16)
    trainer = trainer_of(tmp_path, model=model, fp16_full_eval=True)
    before = [t.detach().clone() for t in tensors(model)]
    trainer.evaluate()
    assert {d for d, _ in model.seen} == {torch.float16}
    assert all(map(torch.equal, tensors(model), before))


class Autocasting(ctrainer.Trainer):
    """A trainer with a context of its own, as of older releases of transformers."""

    entered = 0

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        self.entered += 1
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=bool(cache_enabled))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        assert torch.is_autocast_enabled("cpu")
        return super().compute_loss(model, inputs, *args, **kw)


def test_an_override_of_the_autocast_context_holds_in_training_and_evaluation(
    tmp_path: Path,
) -> None:
    trainer = trainer_of(tmp_path, Autocasting, model=Net())
    trainer.train()
    assert trainer.entered == 3
    trainer.evaluate()
    assert trainer.entered == 3 + 3  # 20 rows, 8 a batch
    assert not torch.is_autocast_enabled("cpu")


def test_the_default_contexts_change_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with trainer.compute_loss_context_manager():
        assert not torch.is_autocast_enabled("cpu")
    with trainer.autocast_smart_context_manager(cache_enabled=False):
        assert not torch.is_autocast_enabled("cpu")


def test_the_context_of_the_loss_may_add_to_the_one_of_autocast(tmp_path: Path) -> None:
    entered = []

    class Both(Autocasting):
        def compute_loss_context_manager(self) -> Any:
            stack = contextlib.ExitStack()
            stack.enter_context(super().compute_loss_context_manager())
            entered.append(torch.is_autocast_enabled("cpu"))
            return stack

    trainer_of(tmp_path, Both, model=Net()).train()
    assert entered == [True, True, True]
