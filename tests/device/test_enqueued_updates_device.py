"""Updates that the host enqueues without waiting for their norm: the runs are those in
which the host measures first, also where a gradient is not finite."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import any_gpu
import pytest
import torch
import transformers
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Net, arguments, rows

import ctrainer

UPDATES = 12


@pytest.fixture(scope="module", autouse=True)
def gpu() -> torch.device:
    return any_gpu.device()


class Measured(ctrainer.Trainer):
    """transformers' schedule cannot take a step back: the host has to measure first."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = transformers.get_scheduler(
            self.args.lr_scheduler_type, optimizer or self.optimizer,
            self.args.warmup_steps, num_training_steps,
        )  # fmt: skip
        return self.lr_scheduler


class Notes(ctrainer.TrainerCallback):
    """How often the host had waited, and the enqueued engine, at the end of updates."""

    def __init__(self) -> None:
        self.waits: list[int] = []
        self.enqueued: list[bool] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        self.waits.append(any_gpu.waits())
        self.enqueued.append(self.trainer._enqueued_engine is not None)


def data(bad: set[int]) -> list[dict[str, torch.Tensor]]:
    made = rows(5 * UPDATES)
    for i in bad:
        made[i]["labels"] = torch.tensor(float("nan" if i % 2 else "inf"))
    return made


def run(
    folder: Path, cls: type[ctrainer.Trainer], bad: set[int], **options: Any
) -> tuple[Any, Notes]:
    resume, callbacks = options.pop("resume", None), options.pop("callbacks", [])
    model = options.pop("model", Net)
    args = arguments(
        output_dir=str(folder), use_cpu=False, seed=5, learning_rate=1e-2,
        per_device_train_batch_size=5,
        **{"max_steps": UPDATES, "save_strategy": "no", **options},
    )  # fmt: skip
    notes = Notes()
    trainer = cls(
        model().to(args.device), args, train_dataset=data(bad),
        callbacks=[notes, *callbacks],
    )  # fmt: skip
    trainer.remove_callback(ctrainer.PrinterCallback)
    notes.trainer = trainer
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        trainer.train(resume)
    return trainer, notes


def assert_same_runs(one: Any, other: Any) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)
    for trainer in (one, other):
        assert trainer._enqueued_engine is None
    states = [t.optimizer.state_dict()["state"] for t in (one, other)]
    for key in states[0]:
        for name, value in states[0][key].items():
            found = torch.as_tensor(states[1][key][name]).cpu()
            torch.testing.assert_close(
                found, torch.as_tensor(value).cpu(), rtol=0, atol=0, equal_nan=True
            )
    assert one.lr_scheduler.last_epoch == other.lr_scheduler.last_epoch
    assert one.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()
    logs = [
        [
            {k: str(v) for k, v in e.items() if "time" not in k and "second" not in k}
            for e in t.state.log_history
        ]
        for t in (one, other)
    ]
    assert logs[0] == logs[1]
    if one.weight_average is not None:
        a, b = (t.weight_average.state_dict() for t in (one, other))
        for name, value in a.pop("averages").items():
            found = b["averages"][name]
            torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
        assert all(b[name] == value for name, value in a.items())


RUNS = st.fixed_dictionaries(
    {
        "nonfinite_policy": st.sampled_from(["skip", "skip", "keep"]),
        "max_grad_norm": st.sampled_from([0.0, 0.05, 1.0]),
        "grad_norm_type": st.sampled_from([2.0, 1.0, float("inf")]),
        "gradient_accumulation_steps": st.sampled_from([1, 2]),
        "logging_steps": st.sampled_from([1, 3, 100]),
        "lr_scheduler_type": st.sampled_from(["linear", "constant", "cosine"]),
        "warmup_steps": st.sampled_from([0, 3]),
        "optim": st.sampled_from(
            ["adamw_torch", "sgd", "rmsprop", "adagrad", "adamw_compact"]
        ),
        "average": st.sampled_from(
            [
                {}, {"ema_decay": 0.9}, {"ema_decay": 0.5, "ema_start_update": 3},
                {"ema_decay": 0.9, "ema_update_freq": 2}, {"swa_start_update": 2},
            ]
        ),
    }
)  # fmt: skip


@settings(max_examples=draws(12, 150), deadline=None)
@given(options=RUNS, bad=st.sets(st.integers(0, 5 * UPDATES - 1), max_size=4))
def test_a_run_is_the_one_in_which_the_host_measures_first(
    tmp_path_factory: Any, options: dict[str, Any], bad: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    options = {k: v for k, v in options.items() if k != "average"} | options["average"]
    enqueued, notes = run(folder / "a", ctrainer.Trainer, bad, **options)
    measured, others = run(folder / "b", Measured, bad, **options)
    assert any(notes.enqueued[1:])
    assert not any(others.enqueued)
    assert_same_runs(enqueued, measured)


class Buffered(Net):
    """Its average has more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(16))


@pytest.mark.parametrize("freq", [1, 3])
def test_averages_of_buffers_know_whether_the_update_was_made(
    tmp_path: Path, freq: int
) -> None:
    options = {"model": Buffered, "ema_decay": 0.5, "ema_update_freq": freq}
    enqueued, notes = run(tmp_path, ctrainer.Trainer, {3, 17, 33, 46}, **options)
    measured, _ = run(tmp_path, Measured, {3, 17, 33, 46}, **options)
    assert_same_runs(enqueued, measured)
    assert any(notes.enqueued) == (freq == 3)


def test_a_checkpoint_behind_a_skipped_update_resumes_to_the_bit(
    tmp_path: Path,
) -> None:
    bad = {3, 17, 33, 46}
    save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    save["ema_decay"] = 0.75
    whole, _ = run(tmp_path, ctrainer.Trainer, bad, logging_steps=4, **save)
    folder = tmp_path / "again"
    for step in (3, 7, 8):
        again, _ = run(
            folder, ctrainer.Trainer, bad, logging_steps=4, ema_decay=0.75,
            resume=str(tmp_path / f"checkpoint-{step}"),
        )  # fmt: skip
        assert_same_runs(whole, again)


class Reads(ctrainer.TrainerCallback):
    """What an optimizer says of its last update, while the trainer has not asked."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        optimizer = k["optimizer"]
        name = ("state", "grad_norm", "clip_coef", "finite", "updated")[
            state.global_step % 5
        ]
        if name == "state":
            states = optimizer.state_dict()["state"].values()
            self.found.append([float(of_one["step"]) for of_one in states])
        else:
            self.found.append(str(getattr(optimizer._engine, name)))


def test_whoever_asks_for_the_result_waits_for_it(tmp_path: Path) -> None:
    found = []
    for cls in (ctrainer.Trainer, Measured):
        reads = Reads()
        run(tmp_path, cls, set(range(0, 60, 9)), callbacks=[reads], max_steps=20)
        found.append(reads.found)
    assert found[0] == found[1]
    assert {"True", "False", "nan"} <= {x for x in found[0] if isinstance(x, str)}


def test_a_hundred_updates_wait_for_nothing(tmp_path: Path) -> None:
    """The pass of the next update is on the device before the host asks for the last
    one's result."""
    if any_gpu.REAL:
        pytest.skip("a GPU's driver does not count waits")
    gc.collect()  # releasing an engine waits for its last result
    waits = []
    for cls in (ctrainer.Trainer, Measured):
        _, notes = run(tmp_path, cls, set(), max_steps=103, logging_strategy="no")
        waits.append(notes.waits[-1] - notes.waits[2])
    assert waits == [0, 100]  # those of measuring are counted
