"""The trainer on a NumPy model: no torch in the process, the same loop."""

import copy
import importlib.util
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from draws import draws
from places import ROOT

from ctrainer import Trainer, TrainingArguments
from ctrainer.adapters import reading

EXAMPLE = ROOT / "examples" / "digits_numpy.py"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_numpy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(digits: ModuleType) -> Any:
    draw = np.random.default_rng(0)
    pixels = draw.standard_normal((160, 64)).astype(np.float32)
    return digits.examples(pixels, pixels[:, :10].argmax(axis=1))


def trainer(
    digits: ModuleType, data: Any, folder: Path, cls: type = Trainer, **options: Any
) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(**{**settings, **options})
    made: Trainer = cls(
        model=digits.MLP(64, 16, 10),
        args=args,
        train_dataset=data,
        eval_dataset=None if isinstance(data, Stream) else data[:32],
        compute_metrics=lambda p: {
            "right": (p.predictions.argmax(1) == p.label_ids).mean()
        },
    )
    return made


def weights(made: Trainer) -> list[bytes]:
    return [p.data.tobytes() for p in made.model.parameters()]


def test_the_example_reaches_its_accuracy_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--output", str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = re.search(r"test accuracy ([\d.]+) %.*torch imported: (\w+)", done.stdout)
    assert found is not None
    assert float(found[1]) >= 96
    assert found[2] == "False"


def test_loss_falls_and_evaluation_agrees(
    digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    made = trainer(digits, data, tmp_path, num_train_epochs=20, learning_rate=1e-2)
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_loss"] < before["eval_loss"] / 2
    batch = made.data_collator(data[:32])
    outputs = made.model(**batch)
    assert after["eval_loss"] == pytest.approx(float(outputs["loss"]), rel=1e-5)
    right = outputs["logits"].argmax(1) == batch["labels"]
    assert after["eval_right"] == right.mean()
    assert made.predict(data[:32]).predictions.shape == (32, 10)


def test_accumulated_micro_batches_equal_one_batch(
    digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    whole = trainer(digits, data, tmp_path)
    parts = trainer(
        digits, data, tmp_path,
        per_device_train_batch_size=4, gradient_accumulation_steps=4,
    )  # fmt: skip
    assert whole.train().global_step == parts.train().global_step == 20
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        np.testing.assert_allclose(a.data, b.data, atol=2e-5)


@pytest.mark.parametrize("step", [7, 10])  # an epoch has 10
def test_resumed_run_is_bit_identical_whatever_its_seed(
    digits: ModuleType, data: Any, tmp_path: Path, step: int
) -> None:
    options = {"save_strategy": "steps", "save_steps": step, "max_steps": 18}
    whole = trainer(digits, data, tmp_path, **options)
    result = whole.train()
    resumed = trainer(digits, data, tmp_path, **options, seed=step)
    again = resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert weights(resumed) == weights(whole)
    assert again.training_loss == result.training_loss


class Stream:
    """Rows whose order follows from the epoch, with random numbers in some."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = [*range(len(self.rows))]
        random.Random(self.epoch).shuffle(order)
        for i in order:
            noise = np.random.randn() + random.random()
            yield {**self.rows[i], "pixels": self.rows[i]["pixels"] + noise}


@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_a_stream_is_read_past_and_tells_how_far_it_is(
    digits: ModuleType,
    data: Any,
    tmp_path: Path,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reading, "SECONDS_BETWEEN_LINES", 0.0)
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    rows = Stream(data[:80])  # 5 batches
    whole = trainer(digits, rows, tmp_path, **options)
    whole.train()
    resumed = trainer(digits, rows, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert weights(resumed) == weights(whole)
    seen = step % 5
    line = f"of {seen} batches that the run has seen"
    assert (line in caplog.text) == (seen > 0)


def test_checkpoint_of_another_model_changes_nothing(
    digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    made = trainer(digits, data, tmp_path)
    made.save_model(str(tmp_path / "model"))
    other = trainer(digits, data, tmp_path)
    other.model = digits.MLP(64, 8, 10)
    before = weights(other)
    with pytest.raises(ValueError, match="w1"):
        other._load_from_checkpoint(str(tmp_path / "model"))
    assert weights(other) == before
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        made._load_from_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "hook", ["compute_loss", "training_step", "log", "_save", "_save_rng_state"]
)
def test_exception_of_a_hook_arrives(
    hook: str, digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise LookupError(hook)

    cls = type("Failing", (Trainer,), {hook: fail})
    made = trainer(
        digits, data, tmp_path, cls, save_strategy="steps", save_steps=2,
        logging_steps=2,
    )  # fmt: skip
    with pytest.raises(LookupError, match=hook):
        made.train()


def test_gradient_that_is_not_finite_is_skipped(
    digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    bad = [dict(example) for example in data]
    bad[3]["pixels"] = np.full(64, np.nan, np.float32)
    made = trainer(digits, bad, tmp_path, num_train_epochs=1)
    with pytest.warns(RuntimeWarning, match="not finite"):
        result = made.train()
    assert result.global_step == 10
    assert result.metrics["nonfinite_steps"] == 1
    assert all(np.isfinite(p.data).all() for p in made.model.parameters())


@pytest.mark.parametrize(
    ("option", "value"),
    [("bf16", True), ("label_smoothing_factor", 0.1), ("torch_compile", True)],
)
def test_options_that_need_torch_are_rejected(
    option: str, value: Any, digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{option}.*needs a torch model"):
        trainer(digits, data, tmp_path, **{option: value})


def right(prediction: Any) -> dict[str, float]:
    return {"right": float((prediction.predictions.argmax(1) == 1).mean())}


def copied_options(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "optim": draw.choice(["adamw_torch", "sgd", "adagrad", "rmsprop"]),
        "lr_scheduler_type": draw.choice(["linear", "cosine", "constant"]),
        "gradient_accumulation_steps": draw.choice([1, 2]),
        "max_grad_norm": draw.choice([0.0, 0.1]),
        "save_strategy": draw.choice(["no", "steps"]), "save_steps": 2,
        **draw.choice([{}, {"ema_decay": 0.5}]), "max_steps": 4, "logging_steps": 1,
    }  # fmt: skip


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "cloudpickle"])
def test_a_copy_trains_to_the_same_bits_before_and_after_training(
    way: str, digits: ModuleType, data: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "digits_numpy", digits)  # where pickle looks
    dumps = (pytest.importorskip("cloudpickle") if way[0] == "c" else pickle).dumps
    for seed in range(draws(3, 40)):
        options = copied_options(seed)
        original = trainer(digits, data, tmp_path / "original", **options)
        original.compute_metrics = right
        for _ in range(2):
            other = (
                copy.deepcopy(original)
                if way == "deepcopy"
                else pickle.loads(dumps(original))
            )
            assert other.model is not original.model
            for made in (other, original):
                made.train()
            assert weights(other) == weights(original), options
            logs = [
                [log["loss"] for log in made.state.log_history if "loss" in log]
                for made in (other, original)
            ]
            assert logs[0] == logs[1], options


def test_a_numpy_trainer_with_an_open_thing_says_what_cannot_be_pickled(
    digits: ModuleType, data: Any, tmp_path: Path
) -> None:
    made = trainer(digits, data, tmp_path)
    made.model.log = (tmp_path / "log").open("w")
    with made.model.log, pytest.raises(TypeError, match="TextIOWrapper"):
        copy.deepcopy(made)
