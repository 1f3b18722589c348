"""trainer.accelerator beside the trainer's own loss scale and skipped updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import tiny
import torch
from torch import nn

import ctrainer
from ctrainer.fsdp import FullyShardedDataParallel

SCALED = {"fp16": True, "loss_scaler": {"init_scale": 1024.0}}


def run(folder: Path, cls: type, **options: Any) -> Any:
    args = ctrainer.TrainingArguments(
        folder, use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=4,
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
        logging_steps=1, learning_rate=1e-2, **options,
    )  # fmt: skip
    trainer = cls(tiny.Net(), args, train_dataset=tiny.rows(32))
    trainer.train()
    return trainer


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Backward(ctrainer.Trainer):
    """Weighs and runs backward itself, with a second model and its optimizer."""

    critic: Any = None

    def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        if self.critic is None:
            critic = nn.Linear(8, 1)
            nn.init.ones_(critic.weight)
            nn.init.zeros_(critic.bias)
            self.critic, self.own = self.accelerator.prepare(
                critic, torch.optim.SGD(critic.parameters(), lr=0.01)
            )
        self.accelerator.backward(self.critic(inputs["x"]).square().mean())
        self.own.step()
        self.own.zero_grad()
        loss = self.compute_loss(model, inputs) / 2
        self.accelerator.backward(loss)
        return loss.detach()


def test_backward_of_an_override_has_the_loss_scale(tmp_path: Path) -> None:
    whole = run(tmp_path / "own", ctrainer.Trainer, **SCALED)
    ours = run(tmp_path / "override", Backward, **SCALED)
    # A power of 2 scales without rounding, and the halves of an update are alike.
    torch.testing.assert_close(
        parameters(ours.model), parameters(whole.model), rtol=1e-6, atol=1e-7
    )
    plain = run(tmp_path / "plain", Backward)
    assert torch.equal(parameters(ours.critic), parameters(plain.critic))
    scale = ours.accelerator.scaler
    assert (scale.get_scale(), scale.is_enabled()) == (1024.0, True)
    assert plain.accelerator.scaler is None


def test_an_optimizer_of_the_script_skips_gradients_that_overflow(
    tmp_path: Path,
) -> None:
    trainer = run(tmp_path, Backward, **SCALED)
    before = parameters(trainer.critic)
    for value, changes in ((math.inf, False), (1024.0, True)):
        for p in trainer.critic.parameters():
            p.grad = torch.full_like(p, value)
        trainer.own.step()
        assert trainer.accelerator.optimizer_step_was_skipped is not changes
        assert torch.equal(parameters(trainer.critic), before) is not changes
    # 0.01 times the gradient without its scale
    torch.testing.assert_close(
        before - parameters(trainer.critic), torch.full((9,), 0.01)
    )


class Clipping(ctrainer.Trainer):
    """Clips in training_step, while gradients have the loss scale."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.norms: list[list[float]] = []

    def training_step(self, model: Any, *args: Any, **kw: Any) -> Any:
        loss = super().training_step(model, *args, **kw)

        def norm() -> float:
            every = torch.cat([p.grad.flatten() for p in model.parameters()])
            return (every / 1024).norm().item()

        if self.accelerator.sync_gradients:
            before = norm()
            told = self.accelerator.clip_grad_norm_(model.parameters(), 0.5)
            self.norms.append([before, told.item(), norm()])
            self.accelerator.clip_grad_value_(model.parameters(), 0.1)
            assert max(p.grad.abs().max() for p in model.parameters()) == 102.4
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = self.accelerator.clip_grad_norm_(model.parameters(), 0.01)
        self.norms[-1].append(norm.item())
        return self.accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_clipping_in_training_step_leaves_the_loss_scale_out(tmp_path: Path) -> None:
    for before, told, after, of_update in run(tmp_path, Clipping, **SCALED).norms:
        assert told == pytest.approx(before, rel=1e-6)  # of a sum in float32
        assert after == pytest.approx(0.5, rel=1e-5)  # torch adds 1e-6 to the norm
        assert 0.1 <= of_update <= 0.5


class Spoiled(ctrainer.Trainer):
    """The second update has a gradient that is not a number."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.skipped: list[bool] = []
        self.add_callback(Watch(self.skipped, self))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kw)
        return loss * (math.nan if self.state.global_step == 1 else 1.0)


class Watch(ctrainer.TrainerCallback):
    def __init__(self, skipped: list[bool], trainer: Any) -> None:
        self.skipped, self.trainer = skipped, trainer

    def on_optimizer_step(self, *args: Any, **kw: Any) -> None:
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)


def test_a_part_of_a_sharded_model_is_not_clipped_by_norm(tmp_path: Path) -> None:
    """Its norm would be that of this rank's shards."""
    args = ctrainer.TrainingArguments(tmp_path, use_cpu=True)
    trainer = ctrainer.Trainer(tiny.Net(), args)
    model = FullyShardedDataParallel(tiny.Net())
    trainer.accelerator._models.append(model)
    part = [*model.parameters(), nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"has (\d) of \1 of them with 1 others"):
        trainer.accelerator.clip_grad_norm_(part, 1.0)


def test_uneven_inputs_of_the_trainers_model_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ctrainer.TrainingArguments(tmp_path, use_cpu=True)
    accelerator = ctrainer.Trainer(tiny.Net(), args).accelerator
    model = FullyShardedDataParallel(tiny.Net())
    with accelerator.join_uneven_inputs([model]):
        pass  # on a CPU it has no effect in accelerate either
    monkeypatch.setattr(type(accelerator), "multi_device", True)
    with pytest.raises(ValueError, match="does not take the trainer's model"):
        accelerator.join_uneven_inputs([model])


@pytest.mark.filterwarnings("ignore:the gradients of step 2:RuntimeWarning")
@pytest.mark.parametrize("options", [{}, SCALED, {"optim": "sgd"}])
def test_updates_that_were_skipped_are_known(tmp_path: Path, options: Any) -> None:
    assert run(tmp_path, Spoiled, **options).skipped == [False, True, False, False]


def test_one_made_in_the_middle_of_a_run_knows_where_it_is(tmp_path: Path) -> None:
    seen = []

    class Late(ctrainer.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            if self.state.global_step == 3:
                accelerator = self.accelerator
                seen.append((
                    accelerator.sync_gradients,
                    accelerator.gradient_state.end_of_dataloader,
                    accelerator._models == [self.model_wrapped],
                ))  # fmt: skip
            return super().compute_loss(model, inputs, *args, **kw)

    run(tmp_path, Late)
    assert seen == [(False, False, True), (True, True, True)]


def test_a_stream_may_be_prepared_by_accelerate(tmp_path: Path) -> None:
    """Its loader says of rows that it has no length by an error."""

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(tiny.rows(32))

    class Own(ctrainer.Trainer):
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
            return self.accelerator.prepare(loader)

    plain, streamed = (run(tmp_path, cls) for cls in (InOrder, Own))
    assert torch.equal(parameters(streamed.model), parameters(plain.model))


class InOrder(ctrainer.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)
