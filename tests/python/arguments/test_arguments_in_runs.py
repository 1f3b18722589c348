"""Arguments and callbacks at work in real runs of a tiny model."""

import io
import json
import logging
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ctrainer  # noqa: E402
from ctrainer.callbacks import TrainerCallback  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def rows(n: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.tensor(i % 2)}
        for i in range(n)
    ]


def trainer_of(folder, callbacks=(), **given) -> ctrainer.Trainer:
    settings = {"save_strategy": "no", "logging_steps": 4, "use_cpu": True, **given}
    settings.setdefault("disable_tqdm", True)
    args = ctrainer.TrainingArguments(folder, max_steps=8, **settings)
    data = rows()
    return ctrainer.Trainer(
        Model(), args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks]
    )


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def recorder(base: type) -> object:
    """A callback whose `events` are the names of those that it saw."""

    def method(name: str):
        return lambda self, *args, **kwargs: self.events.append(name)

    methods = {name: method(name) for name in EVENTS}
    made = type("Recording", (base,), methods)()
    made.events = []
    return made


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps"},
        {"eval_strategy": "epoch", "logging_first_step": True, "eval_on_start": True},
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "best",
            "metric_for_best_model": "loss",
        },
        {
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
        },
    ],
)
def test_events_come_in_transformers_order(given, tmp_path) -> None:
    hf = pytest.importorskip("transformers")

    ours, theirs = recorder(TrainerCallback), recorder(hf.TrainerCallback)
    trainer_of(tmp_path / "a", [ours], save_steps=4, **given).train()
    settings = {"save_strategy": "no", "save_steps": 4, "logging_steps": 4, **given}
    args = hf.TrainingArguments(
        str(tmp_path / "b"), max_steps=8, use_cpu=True, disable_tqdm=True, **settings
    )
    data = rows()
    hf.Trainer(
        Model(), args, train_dataset=data, eval_dataset=data, callbacks=[theirs]
    ).train()
    assert ours.events == theirs.events


@pytest.mark.parametrize(
    "name", ["ProgressCallback", "PrinterCallback", "EarlyStoppingCallback"]
)
def test_callbacks_of_transformers_work(name, tmp_path, capsys) -> None:
    hf = pytest.importorskip("transformers")
    trainer = trainer_of(
        tmp_path,
        [getattr(hf, name)()],
        eval_strategy="steps",
        metric_for_best_model="loss",
        disable_tqdm=False,
    )
    trainer.train()
    assert trainer.state.global_step > 0
    assert trainer.pop_callback(getattr(hf, name)) is not None
    assert capsys.readouterr().out


def test_display_can_be_removed_by_transformers_name(tmp_path, capsys) -> None:
    hf = pytest.importorskip("transformers")
    trainer = trainer_of(tmp_path, disable_tqdm=False)
    assert isinstance(
        trainer.pop_callback(hf.ProgressCallback), ctrainer.ProgressCallback
    )
    trainer.train()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_plain_lines_are_what_was_logged(tmp_path, capsys) -> None:
    trainer = trainer_of(tmp_path, disable_tqdm=False)
    trainer.train()
    lines = [x for x in capsys.readouterr().out.splitlines() if " loss=" in x]
    steps = [e["step"] for e in trainer.state.log_history if "loss" in e]
    assert steps == [4, 8]
    assert [f" step={step} " in line for step, line in zip(steps, lines, strict=True)]


def test_async_save_off_waits_for_the_folder(tmp_path) -> None:
    seen = []

    class Looking(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            seen.append((folder / "trainer_state.json").exists())

    trainer_of(
        tmp_path, [Looking], save_strategy="steps", save_steps=2, async_save=False
    ).train()
    assert seen == [True] * 4


@pytest.mark.parametrize("package", ["ctrainer", "transformers"])
def test_patience_outlives_a_resume(package, tmp_path) -> None:
    stopping = pytest.importorskip(package).EarlyStoppingCallback

    class Worse(ctrainer.Trainer):
        """Evaluations that get worse and worse."""

        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": float(self.state.global_step)}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics

    def trainer(max_steps: int):
        stopper = stopping(early_stopping_patience=4)
        args = ctrainer.TrainingArguments(
            tmp_path,
            max_steps=max_steps,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            logging_steps=1,
            load_best_model_at_end=True,
            use_cpu=True,
            disable_tqdm=True,
        )
        data = rows()
        made = Worse(
            Model(), args, train_dataset=data, eval_dataset=data, callbacks=[stopper]
        )
        return made, stopper

    first, stopper = trainer(3)
    first.train()
    assert stopper.early_stopping_patience_counter == 2
    second, stopper = trainer(8)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    # The first evaluation is the best; two more of the first run and two of the second
    # are not.
    assert second.state.global_step == 5
    assert stopper.early_stopping_patience_counter == 4


def test_log_level_is_taken(tmp_path) -> None:
    loaded = "transformers" in sys.modules  # then its loggers have these lines
    logger = logging.getLogger("transformers" if loaded else "ctrainer")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    before = logger.level
    logger.addHandler(handler)
    try:
        trainer_of(tmp_path, log_level="info").evaluate()
        assert "Running Evaluation" in stream.getvalue()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_metrics_of_scripts_are_written(tmp_path, capsys) -> None:
    trainer = trainer_of(tmp_path)
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    assert "***** train metrics *****" in capsys.readouterr().out
    stored = json.loads((tmp_path / "train_results.json").read_text())
    assert stored == result.metrics
    state = ctrainer.TrainerState.load_from_json(tmp_path / "trainer_state.json")
    assert state.global_step == 8


def test_arguments_of_transformers_train(tmp_path) -> None:
    hf = pytest.importorskip("transformers")
    args = hf.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = ctrainer.Trainer(Model(), args, train_dataset=rows())
    assert trainer.args is args
    assert trainer.train().global_step == 3


def test_arguments_changed_after_the_fact_are_checked(tmp_path) -> None:
    args = ctrainer.TrainingArguments(tmp_path, use_cpu=True)
    args.nonfinite_policy = "ignore"
    with pytest.raises(ValueError, match=r"nonfinite_policy must be .* not 'ignore'"):
        ctrainer.Trainer(Model(), args)


def test_best_needs_a_metric(tmp_path) -> None:
    hf = pytest.importorskip("transformers")
    given = {"save_strategy": "best", "eval_strategy": "epoch", "use_cpu": True}
    for cls in (ctrainer.TrainingArguments, hf.TrainingArguments):
        args = cls(str(tmp_path), **given)
        assert (args.metric_for_best_model, args.greater_is_better) == (None, None)
        with pytest.raises(ValueError, match="metric_for_best_model` must be"):
            ctrainer.Trainer(Model(), args)
