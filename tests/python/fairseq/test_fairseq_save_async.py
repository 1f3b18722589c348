"""--save-async: checkpoints are written while training goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import fairseq_program as program
import fairseq_tiny as tiny
import pytest
import torch

from ctrainer import _C
from ctrainer.__main__ import main

ASYNC = {"checkpoint__write_checkpoints_asynchronously": True}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Archives are written once this is set."""
    event, write = threading.Event(), _C.write_archive

    def wait_and_write(path: Any, records: Any) -> None:
        assert event.wait(60)
        write(path, records)

    monkeypatch.setattr(_C, "write_archive", wait_and_write)
    return event


def test_the_file_holds_what_was_there_when_it_was_asked_for(
    tmp_path: Path, gate: threading.Event
) -> None:
    """It is written after two more updates, which change the weights in place."""
    trainer, path = tiny.trainer(**ASYNC), tmp_path / "a.pt"
    samples = tiny.batches(4)
    for sample in samples[:2]:
        trainer.train_step([sample])
    before = {k: v.clone() for k, v in trainer.get_model().state_dict().items()}
    assert trainer.save_checkpoint(str(path), {}) == str(path)
    for sample in samples[2:]:
        trainer.train_step([sample])
    assert not path.exists()
    gate.set()
    trainer.finish_saves()
    state = torch.load(path)
    assert state["optimizer_history"][-1]["num_updates"] == 2
    for name, value in before.items():
        assert torch.equal(state["model"][name], value)
        assert not torch.equal(trainer.get_model().state_dict()[name], value)


def test_loading_waits_for_what_is_written(
    tmp_path: Path, gate: threading.Event
) -> None:
    trainer, path = tiny.trainer(**ASYNC), str(tmp_path / "a.pt")
    trainer.train_step([tiny.batches(1)[0]])
    trainer.save_checkpoint(path, {"train_iterator": {"epoch": 3}})
    threading.Timer(0.05, gate.set).start()
    assert trainer.load_checkpoint(path)["train_iterator"] == {"epoch": 3}


@pytest.mark.parametrize("then", ["finish_saves", "save_checkpoint", "load_checkpoint"])
def test_a_failure_is_raised_by_what_comes_next(tmp_path: Path, then: str) -> None:
    trainer, path = tiny.trainer(**ASYNC), str(tmp_path / "a.pt")
    trainer.train_step([tiny.batches(1)[0]])
    done: list[str] = []
    trainer.save_checkpoint(str(tmp_path / "missing" / "a.pt"), {})
    trainer.after_save(lambda: done.append("a copy of nothing"))
    arguments: dict[str, tuple[Any, ...]] = {
        "save_checkpoint": (path, {}),
        "load_checkpoint": (path,),
    }
    with pytest.raises(OSError, match=r"in the background: .*missing"):
        getattr(trainer, then)(*arguments.get(then, ()))
    assert not done
    assert not os.listdir(tmp_path)
    trainer.save_checkpoint(path, {})
    trainer.finish_saves()
    assert torch.load(path)["model"]


def test_the_program_writes_the_same_files(tmp_path: Path) -> None:
    data = program.preprocess(tmp_path)
    options = ["--save-interval-updates", "4", "--keep-interval-updates", "1",
               "--keep-best-checkpoints", "1", "--max-update", "14"]  # fmt: skip
    for folder, more in (("now", ()), ("later", ("--save-async",))):
        arguments = program.lm_arguments(data, tmp_path / folder, *options, *more)
        assert main(arguments) == 0
    found = {p.name for p in (tmp_path / "later").iterdir()}
    assert found == {p.name for p in (tmp_path / "now").iterdir()}
    assert len(found) > 3
    for name in found:
        now, later = (torch.load(tmp_path / f / name) for f in ("now", "later"))
        for key, value in now["model"].items():
            assert torch.equal(later["model"][key], value)
        for key in ("train_iterator", "val_loss", "best"):
            assert later["extra_state"].get(key) == now["extra_state"].get(key)
