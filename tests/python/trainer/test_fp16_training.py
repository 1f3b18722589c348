"""fp16=True on the CPU: the loss scale in a run, its file and its argument."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, rows
from torch import nn

import ctrainer
from ctrainer import LossScaler, optim
from ctrainer.callbacks import TrainerCallback

STEPS = 12
TOO_HIGH = {"init_scale": 2.0**24, "growth_interval": 4}  # overflows for some steps


class Watch(TrainerCallback):
    """The scale, and the weights, after each step."""

    trainer: ctrainer.Trainer

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = self.trainer._loss_scaler
        self.scales.append(scaler.scale if scaler is not None else 1.0)
        self.weights.append(flat(self.trainer.model))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def trainer_of(
    folder: Path,
    model: nn.Module | None = None,
    optimizer: Any = None,
    watch: Watch | None = None,
    **args: Any,
) -> ctrainer.Trainer:
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 0.01,
        "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "fp16": True, **args,
    }  # fmt: skip
    made = ctrainer.Trainer(
        model or Net(),
        ctrainer.TrainingArguments(str(folder), **settings),
        train_dataset=rows(),
        optimizers=(optimizer, None),
        callbacks=[watch] if watch else [],
    )
    if watch:
        watch.trainer = made
    return made


def run(folder: Path, resume: str | None = None, **options: Any) -> ctrainer.Trainer:
    trainer = trainer_of(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: ctrainer.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def torch_loop(accumulation: int, **scaler: Any) -> tuple[nn.Module, Any, list[float]]:
    """The same training by torch's autocast and GradScaler."""
    model, data, told = Net(), rows(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = optim.get_scheduler("linear", optimizer, 0, STEPS)
    grad_scaler = torch.amp.GradScaler("cpu", **scaler)
    batches = [data[i : i + 8] for i in range(0, len(data), 8)]
    at = 0
    for _ in range(STEPS):
        total = 0.0
        micro = batches[at : at + accumulation]
        at = 0 if at + accumulation >= len(batches) else at + accumulation
        for batch in micro:
            x = torch.stack([row["x"] for row in batch])
            y = torch.stack([row["labels"] for row in batch])
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x=x, labels=y)["loss"] / len(micro)
            total += loss.item()
            grad_scaler.scale(loss).backward()
        before = grad_scaler.get_scale()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if grad_scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
        told.append(total)
    return model, grad_scaler, told


class TestScalingInARun:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_equals_a_loop_with_torchs_scaler_to_the_bit(
        self, tmp_path: Path, accumulation: int
    ) -> None:
        model, grad_scaler, told = torch_loop(accumulation, **TOO_HIGH)
        ours = Net()
        sgd = torch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.9)
        trainer = run(
            tmp_path, model=ours, optimizer=sgd, loss_scaler=TOO_HIGH,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        assert torch.equal(flat(ours), flat(model))
        assert trainer._loss_scaler is not None
        assert trainer._loss_scaler.state_dict() == grad_scaler.state_dict()
        assert grad_scaler.get_scale() < 2.0**24
        assert losses(trainer) == told  # the loss as it is, without its scale

    def test_our_optimizer_does_the_same_update(self, tmp_path: Path) -> None:
        model, grad_scaler, _ = torch_loop(1, **TOO_HIGH)
        trainer = run(
            tmp_path, optim="sgd", optim_args="momentum=0.9", loss_scaler=TOO_HIGH
        )
        assert isinstance(trainer.optimizer, optim.SGD)
        torch.testing.assert_close(flat(trainer.model), flat(model), rtol=1e-5, atol=0)
        assert trainer._loss_scaler is not None
        assert trainer._loss_scaler.state_dict() == grad_scaler.state_dict()

    def test_an_overflow_skips_the_step_and_lowers_the_scale(
        self, tmp_path: Path
    ) -> None:
        watch = Watch()
        start = flat(Net())
        trainer = run(tmp_path, watch=watch, loss_scaler=TOO_HIGH)
        before, scale, skipped = start, 2.0**24, 0
        for weights, after in zip(watch.weights, watch.scales, strict=True):
            if after < scale:
                assert after == scale / 2
                assert torch.equal(weights, before)
                skipped += 1
            else:
                assert not torch.equal(weights, before)
            before, scale = weights, after
        assert 0 < skipped < STEPS
        assert trainer.state.global_step == STEPS
        assert trainer.lr_scheduler.last_epoch == STEPS - skipped
        assert {p["step"].item() for p in trainer.optimizer.state.values()} == {
            STEPS - skipped
        }

    @pytest.mark.parametrize(
        ("setting", "first"),
        [
            (None, 65536.0),
            ("fairseq", 32768.0),
            ({"preset": "deepspeed", "initial_scale_power": 9}, 512.0),
            ({"preset": "static", "loss_scale": 128.0}, 128.0),
        ],
    )
    def test_the_preset_scales_the_loss_of_backward(
        self, tmp_path: Path, setting: Any, first: float
    ) -> None:
        seen = []

        class Scaled(Net):
            def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
                out = super().forward(x, labels)
                out["loss"].register_hook(lambda g: seen.append(g.item()))
                return out

        run(tmp_path, model=Scaled(), loss_scaler=setting, max_steps=1)
        assert seen == [first]

    def test_a_scale_that_cannot_fall_ends_the_run(self, tmp_path: Path) -> None:
        least = {"preset": "fairseq", "init_scale": 2.0**24, "min_loss_scale": 2.0**23}
        with pytest.raises(FloatingPointError, match=r"^Minimum loss scale reached"):
            run(tmp_path, loss_scaler=least)

    def test_a_disabled_one_leaves_the_policy_to_the_arguments(
        self, tmp_path: Path
    ) -> None:
        trainer = run(tmp_path, loss_scaler={"enabled": False}, max_steps=2)
        assert trainer._loss_scaler is None


class TestTheFile:
    @pytest.mark.parametrize(
        "setting",
        [
            TOO_HIGH,
            {
                "preset": "fairseq",
                "init_scale": 2.0**24,
                "scale_window": 3,
                "tolerance": 0.3,
            },
            {
                "preset": "deepspeed",
                "initial_scale_power": 24,
                "loss_scale_window": 3,
            },
            {"preset": "static", "loss_scale": 64.0},
        ],
    )
    def test_a_resumed_run_is_the_uninterrupted_one(
        self, tmp_path: Path, setting: dict[str, Any]
    ) -> None:
        saving = {"save_strategy": "steps", "save_steps": 5, "loss_scaler": setting}
        whole, again = Watch(), Watch()
        first = run(tmp_path / "whole", watch=whole, **saving)
        checkpoint = str(tmp_path / "whole/checkpoint-5")
        second = run(tmp_path / "again", checkpoint, watch=again, **saving)
        assert again.scales == whole.scales[5:]
        assert torch.equal(flat(first.model), flat(second.model))
        assert losses(first) == losses(second)

    def test_torchs_scaler_reads_it_and_writes_it(self, tmp_path: Path) -> None:
        saving = {"save_strategy": "steps", "save_steps": 6}
        first = run(tmp_path / "a", loss_scaler=TOO_HIGH, **saving)
        checkpoint = tmp_path / f"a/checkpoint-{STEPS}"
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(torch.load(checkpoint / "scaler.pt", weights_only=True))
        assert first._loss_scaler is not None
        assert theirs.state_dict() == first._loss_scaler.state_dict()

        state = {**theirs.state_dict(), "scale": 2.0, "_growth_tracker": 3}
        theirs.load_state_dict(state)
        torch.save(theirs.state_dict(), checkpoint / "scaler.pt")
        (
            checkpoint / "ctrainer_manifest.json"
        ).unlink()  # which knows the file as it was
        watch = Watch()
        run(tmp_path / "b", str(checkpoint), watch=watch, max_steps=STEPS + 1)
        assert watch.scales == [4.0]  # the fourth clean step of growth_interval=4

    def test_that_of_another_preset_is_rejected(self, tmp_path: Path) -> None:
        run(tmp_path, save_strategy="steps", save_steps=6)
        with pytest.raises(ValueError, match=r"scaler\.pt: .*'loss_scale'.*of another"):
            run(tmp_path, str(tmp_path / "checkpoint-6"), loss_scaler="fairseq")

    def test_where_there_is_none_the_scale_starts_anew_and_this_is_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run(tmp_path / "a", fp16=False, save_strategy="steps", save_steps=6)
        with caplog.at_level(logging.WARNING, "ctrainer"):
            trainer = run(tmp_path / "b", str(tmp_path / "a/checkpoint-6"))
        assert "has no loss scale" in caplog.text
        assert trainer._loss_scaler is not None


class Half(Net):
    """Parameters of float16; inputs and labels come as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.half()

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.layers(x.half()).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y.float(), labels), "logits": y}


class TestFloat16Parameters:
    def test_are_rejected_as_torchs_scaler_rejects_them(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"layers\.0\.weight is float16.*master_weights=True"
        ):
            run(tmp_path, model=Half())

    def test_are_trained_with_master_weights(self, tmp_path: Path) -> None:
        trainer = run(
            tmp_path, model=Half(), master_weights=True, loss_scaler=TOO_HIGH,
            max_steps=40,
        )  # fmt: skip
        told = losses(trainer)
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
        assert trainer._loss_scaler is not None
        assert trainer._loss_scaler.scale < 2.0**24
        assert sum(told[-5:]) < sum(told[:5])


class TestTheArgument:
    @pytest.mark.parametrize(
        ("setting", "text"),
        [
            ("torhc", "no preset 'torhc'; did you mean 'torch'"),
            ("amp", "no preset 'amp'; there is torch, fairseq, deepspeed, static"),
            ({"preset": "fairseq", "scale_windw": 3}, "did you mean 'scale_window'"),
            ({"hysteresis": 3}, "'torch' has no 'hysteresis'; there is init_sc"),
            ({"growth_interval": 0}, "growth_interval must be >= 1"),
            ({"growth_interval": "soon"}, "str"),
            ("static", "loss_scale"),
            (7, "not int"),
        ],
    )
    def test_what_it_cannot_mean_is_rejected(
        self, tmp_path: Path, setting: Any, text: str
    ) -> None:
        with pytest.raises(ValueError, match=text):
            ctrainer.TrainingArguments(
                str(tmp_path), use_cpu=True, fp16=True, loss_scaler=setting
            )

    def test_without_fp16_it_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="fp16=True"):
            ctrainer.TrainingArguments(str(tmp_path), loss_scaler="torch")

    def test_a_command_line_gives_json(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        parser = transformers.HfArgumentParser(ctrainer.TrainingArguments)
        given = '{"preset": "deepspeed", "hysteresis": "3"}'
        (args,) = parser.parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--fp16", "--loss_scaler", given]
        )
        assert args.loss_scaler == {"preset": "deepspeed", "hysteresis": 3}
        assert args.to_dict()["loss_scaler"] == args.loss_scaler

    def test_the_scaler_is_made_by_a_method_that_may_be_overridden(
        self, tmp_path: Path
    ) -> None:
        class Own(ctrainer.Trainer):
            def _make_loss_scaler(self) -> LossScaler:
                return LossScaler.static(4.0)

        args = ctrainer.TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to="none", fp16=True,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Own(Net(), args, train_dataset=rows())
        trainer.train()
        assert trainer._loss_scaler is not None
        assert trainer._loss_scaler.scale == 4.0
