"""ema_decay and swa_start_update of the arguments: in the update, in evaluation, in
checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, rows

import ctrainer


class Watched(Net):
    """Has a buffer that changes and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.idle = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += len(x)
        return super().forward(x, labels)


class Snapshots(ctrainer.TrainerCallback):
    """The weights after each update."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        self.states.append({k: v.cpu().clone() for k, v in model.state_dict().items()})


def run(
    folder: Path, resume: str | None = None, parts: Any = None, **args: Any
) -> tuple[ctrainer.Trainer, list[dict[str, torch.Tensor]]]:
    settings: dict[str, Any] = {
        "max_steps": 12, "save_steps": 6, "logging_steps": 1, "learning_rate": 3e-2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, **args,
    }  # fmt: skip
    training = ctrainer.TrainingArguments(str(folder), **settings)
    watch = Snapshots()
    trainer = ctrainer.Trainer(
        Watched(), training, train_dataset=rows(), eval_dataset=rows(20),
        callbacks=[watch], **(parts or {}),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch.states


def replay(states: list[dict[str, torch.Tensor]], decay: float) -> dict[str, Any]:
    averages = {k: v.clone() for k, v in Watched().state_dict().items()}
    for state in states:
        for name, value in state.items():
            averages[name] = averages[name] * decay + (1 - decay) * value
    return averages


@pytest.mark.parametrize("native", [True, False])
def test_every_update_is_averaged_in_whatever_optimizer(
    tmp_path: Path, native: bool
) -> None:
    def torchs(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=3e-2)

    class Foreign(ctrainer.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torchs(self.model)
            return self.optimizer

    args = ctrainer.TrainingArguments(
        str(tmp_path), max_steps=12, ema_decay=0.8, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", learning_rate=3e-2,
    )  # fmt: skip
    watch = Snapshots()
    cls = ctrainer.Trainer if native else Foreign
    trainer = cls(Watched(), args, train_dataset=rows(), callbacks=[watch])
    trainer.train()
    assert trainer.weight_average is not None
    expected = replay(watch.states, 0.8)
    averages = trainer.weight_average.averages
    assert averages.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(averages[name], value, rtol=1e-6, atol=1e-6)
    assert not torch.equal(
        averages["layers.0.weight"], watch.states[-1]["layers.0.weight"]
    )


@pytest.mark.parametrize("native", [True, False])
def test_an_update_between_two_that_are_averaged_leaves_the_averages_alone(
    tmp_path: Path, native: bool
) -> None:
    """SWA from update 3 on, every third: the mean of the weights after 3, 6, 9, 12."""

    class Foreign(ctrainer.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-2)
            return self.optimizer

    averages: list[torch.Tensor] = []

    class Averages(ctrainer.TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            average = trainer.weight_average.averages["layers.0.weight"]
            averages.append(average.clone())

    watch = Snapshots()
    args = ctrainer.TrainingArguments(
        str(tmp_path), max_steps=12, swa_start_update=3, swa_update_freq=3,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        learning_rate=3e-2,
    )  # fmt: skip
    cls = ctrainer.Trainer if native else Foreign
    trainer = cls(Watched(), args, train_dataset=rows(), callbacks=[watch, Averages()])
    trainer.train()
    weights = [state["layers.0.weight"] for state in watch.states]
    for update in range(3, 13):
        mean = torch.stack(weights[2:update:3]).mean(0)
        torch.testing.assert_close(averages[update - 1], mean, rtol=1e-6, atol=1e-6)


def test_evaluation_runs_with_the_averages_unless_it_is_told_not_to(
    tmp_path: Path,
) -> None:
    trainer, states = run(tmp_path, ema_decay=0.9)
    live = trainer.model.state_dict()["layers.0.weight"].clone()
    averaged = trainer.evaluate()["eval_loss"]
    assert torch.equal(trainer.model.layers[0].weight, live)
    trainer.args.average_in_eval = False
    plain = trainer.evaluate()["eval_loss"]
    assert averaged != plain
    assert trainer.weight_average is not None
    trainer.weight_average.copy_to(trainer.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(averaged, rel=1e-6)
    assert len(states) == 12


@pytest.mark.parametrize(
    "options",
    [{"ema_decay": 0.9, "ema_update_freq": 4}, {"swa_start_update": 3}],
)
def test_a_resumed_run_has_the_same_averages(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, _ = run(tmp_path / "whole", **options)
    again, _ = run(tmp_path / "again", str(tmp_path / "whole/checkpoint-6"), **options)
    assert whole.weight_average is not None
    assert again.weight_average is not None
    assert again.weight_average.core.num_updates == 12
    assert again.weight_average.core.n_averaged == whole.weight_average.core.n_averaged
    for name, value in whole.weight_average.averages.items():
        assert torch.equal(again.weight_average.averages[name], value), name


def test_a_checkpoint_without_an_average_starts_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "plain")
    trainer, _ = run(
        tmp_path / "on", str(tmp_path / "plain/checkpoint-6"), ema_decay=0.5
    )
    assert "has no weight_average.pt" in caplog.text
    assert trainer.weight_average is not None
    assert trainer.weight_average.core.n_averaged == 6


def test_a_skipped_update_is_not_averaged(tmp_path: Path) -> None:
    class Spoilt(ctrainer.Trainer):
        def training_step(self, model: Any, *rest: Any, **named: Any) -> Any:
            loss = super().training_step(model, *rest, **named)
            if self.state.global_step % 3 == 1:
                model.layers[0].weight.grad.fill_(float("nan"))
            return loss

    args = ctrainer.TrainingArguments(
        str(tmp_path), max_steps=12, ema_decay=0.8, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Spoilt(Watched(), args, train_dataset=rows())
    with pytest.warns(RuntimeWarning, match="not finite"):
        trainer.train()
    assert trainer.weight_average is not None
    assert trainer.weight_average.core.num_updates == 8
    assert all(a.isfinite().all() for a in trainer.weight_average.averages.values())


def test_two_averages_at_once_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keeps one average"):
        run(tmp_path, ema_decay=0.9, swa_start_update=1)


def test_an_average_of_ones_own_is_driven_too(tmp_path: Path) -> None:
    args = ctrainer.TrainingArguments(
        str(tmp_path), max_steps=5, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = ctrainer.Trainer(Watched(), args, train_dataset=rows())
    trainer.weight_average = ctrainer.SWA(trainer.model)
    trainer.train()
    assert trainer.weight_average.core.n_averaged == 5
