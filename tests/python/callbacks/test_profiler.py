"""profiler_steps: torch.profiler records so many updates and no more."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ctrainer import ProfilerCallback, Trainer, TrainerCallback, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        return {"loss": ((self.linear(x)[:, 0] - y) ** 2).mean()}


class Break(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError("broken")


def trainer_in(
    folder: Path, steps: int, callbacks: tuple[Any, ...] = (), **kwargs: Any
) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=2, max_steps=steps,
        gradient_accumulation_steps=2, save_strategy="no", report_to=[],
        disable_tqdm=True, **kwargs,
    )  # fmt: skip
    data = [{"x": torch.ones(3) * i, "y": torch.tensor(1.0)} for i in range(8)]
    return Trainer(Line(), args, train_dataset=data, callbacks=list(callbacks))


def names_of(folder: Path) -> Counter[str]:
    """The events of the only trace, by name."""
    (path,) = (folder / "profile").glob("*.pt.trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    on_cpu = ("cpu_op", "user_annotation")
    return Counter(e["name"] for e in events if e.get("cat") in on_cpu)


def test_so_many_updates_are_recorded_from_the_third_on(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 8, profiler_steps=2)
    trainer.train()
    names = names_of(tmp_path)
    # Updates 3 and 4, each of two micro-batches with one linear layer.
    assert [n for n in sorted(names) if n.startswith("ProfilerStep")] == [
        "ProfilerStep#2", "ProfilerStep#3"
    ]  # fmt: skip
    assert names["aten::linear"] == 4
    assert names["ctrainer.update"] == 2
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["rank0-step4.pt.trace.json", "rank0-step4.txt"]
    assert "aten::linear" in (tmp_path / "profile/rank0-step4.txt").read_text()
    alone = trainer_in(tmp_path, 8)
    alone.train()
    assert torch.equal(trainer.model.linear.weight, alone.model.linear.weight)


def test_a_run_that_ends_earlier_leaves_what_was_recorded(
    tmp_path: Path, caplog: Any
) -> None:
    trainer_in(tmp_path, 4, (ProfilerCallback(50, record_shapes=True),)).train()
    assert names_of(tmp_path)["aten::linear"] == 4
    with caplog.at_level(logging.WARNING, "ctrainer"):
        trainer_in(tmp_path / "short", 2, profiler_steps=1).train()
    assert "has recorded nothing" in caplog.text
    assert not (tmp_path / "short/profile").exists()


def test_a_run_after_one_that_broke_is_recorded(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 6, (Break,), profiler_steps=2)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    trainer.remove_callback(Break)
    trainer.train()
    names = names_of(tmp_path)
    assert names["aten::linear"] == 4
    assert names["ctrainer.update"] == 2


def test_no_updates_to_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        ProfilerCallback(0)
