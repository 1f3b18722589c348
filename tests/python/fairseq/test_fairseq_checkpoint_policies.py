"""Which checkpoints are written and kept, and which one a run begins with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import draws

from ctrainer.fairseq import checkpoint_utils
from ctrainer.fairseq.checkpoint_utils import upgrade_state_dict
from ctrainer.fairseq.config import as_config


class Trainer:
    """A trainer whose checkpoints are small, at some update."""

    checkpoint_suffix = ""
    should_save_checkpoint_on_current_rank = True
    always_call_state_dict_during_save_checkpoint = False

    def __init__(self) -> None:
        self.updates = 0
        self.saved: list[tuple[str, Any]] = []
        self.loaded: list[Any] = []

    def get_num_updates(self) -> int:
        return self.updates

    def consolidate_optimizer(self) -> None:
        pass

    def finish_saves(self) -> None:
        pass

    def after_save(self, job: Callable[[], None]) -> None:
        job()

    def save_checkpoint(self, path: str, extra_state: Any) -> None:
        Path(path).write_text(str(self.updates))
        self.saved.append((Path(path).name, extra_state))

    def load_checkpoint(self, *arguments: Any, **more: Any) -> Any:
        self.loaded.append((*arguments, more))
        return getattr(self, "extra_state", None)

    def get_train_iterator(self, epoch: int, **more: Any) -> Any:
        return Epoch(epoch, False)

    def lr_step(self, epoch: int) -> None:
        pass


class Epoch:
    """The iterator of an epoch, at its end or not."""

    def __init__(self, epoch: int, ends: bool) -> None:
        self.epoch, self.ends = epoch, ends

    def end_of_epoch(self) -> bool:
        return self.ends

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def config(folder: Path, **options: Any) -> Any:
    group = {"save_dir": str(folder), **options}
    return as_config({"checkpoint": group}).checkpoint


def names(folder: Path) -> set[str]:
    return {p.name.removeprefix("checkpoint") for p in folder.iterdir()}


def save_epochs(cfg: Any, losses: list[Any]) -> Trainer:
    trainer = Trainer()
    for epoch, loss in enumerate(losses, 1):
        trainer.updates = 10 * epoch
        checkpoint_utils.save_checkpoint(cfg, trainer, Epoch(epoch, True), loss)
    return trainer


def test_an_epoch_the_best_and_the_last_are_written(tmp_path: Path) -> None:
    trainer = save_epochs(config(tmp_path), [3.0, 2.0, 2.5])
    assert names(tmp_path) == {"1.pt", "2.pt", "3.pt", "_best.pt", "_last.pt"}
    assert (tmp_path / "checkpoint_best.pt").read_text() == "20"
    assert (tmp_path / "checkpoint_last.pt").read_text() == "30"
    assert [extra["best"] for _, extra in trainer.saved] == [3.0, 2.0, 2.0]
    assert trainer.saved[2][1]["val_loss"] == 2.5


def test_one_that_is_as_good_takes_the_bests_place(tmp_path: Path) -> None:
    save_epochs(config(tmp_path), [2.0, 2.0])
    assert (tmp_path / "checkpoint_best.pt").read_text() == "20"


def test_greater_may_be_better(tmp_path: Path) -> None:
    save_epochs(config(tmp_path, maximize_best_checkpoint_metric=True), [3.0, 2.0])
    assert (tmp_path / "checkpoint_best.pt").read_text() == "10"


def test_options_leave_some_out(tmp_path: Path) -> None:
    options = {"no_epoch_checkpoints": True, "no_last_checkpoints": True}
    save_epochs(config(tmp_path, **options), [None, None])
    assert names(tmp_path) == set()
    save_epochs(config(tmp_path, no_save=True), [3.0])
    assert names(tmp_path) == set()
    save_epochs(config(tmp_path, save_interval=2), [None] * 5)
    assert names(tmp_path) == {"2.pt", "4.pt", "_last.pt"}


def test_the_last_epochs_are_kept(tmp_path: Path) -> None:
    save_epochs(config(tmp_path, keep_last_epochs=2), [None] * 11)
    assert names(tmp_path) == {"10.pt", "11.pt", "_last.pt"}


def test_the_last_updates_are_kept_and_those_of_a_pattern(tmp_path: Path) -> None:
    cfg = config(
        tmp_path, save_interval_updates=5, keep_interval_updates=2,
        keep_interval_updates_pattern=20,
    )  # fmt: skip
    trainer = Trainer()
    for updates in range(5, 46, 5):
        trainer.updates = updates
        checkpoint_utils.save_checkpoint(cfg, trainer, Epoch(1, False), None)
    assert names(tmp_path) == {
        "_1_20.pt", "_1_40.pt", "_1_35.pt", "_1_45.pt", "_last.pt"
    }  # fmt: skip


@pytest.mark.parametrize("maximize", [True, False])
def test_the_best_are_kept_and_ties_among_them(tmp_path: Path, maximize: bool) -> None:
    sign = -1 if maximize else 1
    cfg = config(
        tmp_path, keep_best_checkpoints=3, no_epoch_checkpoints=True,
        maximize_best_checkpoint_metric=maximize,
    )  # fmt: skip
    save_epochs(cfg, [sign * x for x in (1.5, 3.0, 1.5, 2.0, 9.0)])
    mark = "-" if maximize else ""
    assert names(tmp_path) == {
        f".best_loss_{mark}1.5000.pt", f".best_loss_{mark}1.5001.pt",
        f".best_loss_{mark}2.0000.pt", "_best.pt", "_last.pt",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(draws(20, 500)))
def test_of_any_metrics_those_with_the_best_numbers_are_kept(
    seed: int, tmp_path: Path
) -> None:
    """A name has the metric in three decimals and a digit that tells equal ones apart;
    the new file counts as one of those that are to be kept."""
    chance = random.Random(seed)
    most, maximize = chance.randint(1, 3), bool(seed % 2)
    values = [chance.choice([1.0, 1.5, 2.0, 2.5]) for _ in range(6)]
    cfg = config(
        tmp_path, keep_best_checkpoints=most, no_epoch_checkpoints=True,
        no_last_checkpoints=True, maximize_best_checkpoint_metric=maximize,
    )  # fmt: skip
    save_epochs(cfg, values)
    kept: list[float] = []
    for value in values:
        alike = (round(value + digit / 10_000, 4) for digit in range(10))
        kept.append(next(number for number in alike if number not in kept))
        kept = sorted(kept, reverse=maximize)[:most]
    best = {f".best_loss_{number:.4f}.pt" for number in kept}
    assert names(tmp_path) == {*best, "_best.pt"}


def test_the_score_is_a_trainers_own_and_survives_a_restart() -> None:
    score = checkpoint_utils.score_of(Trainer())
    for value in (3.0, 2.0, 2.0, 2.5):
        score.note(value, maximize=False)
    assert [score.wait(x, False) for x in (3.0, 2.0, 2.0, 2.5)] == [0, 0, 1, 2]
    again = checkpoint_utils.score_of(Trainer())
    assert again.best is None
    again.load_state_dict(score.state_dict())
    assert again == score
    assert again.wait(2.0, False) == 3
    again.load_state_dict({"best": 1.0})  # fairseq's
    assert again.wait(1.5, False) == 1


def load(cfg: Any, trainer: Trainer) -> Any:
    checkpoint_utils.load_checkpoint(cfg, trainer)
    return trainer.loaded[-1]


class TestRestoring:
    def test_a_run_begins_anew_or_goes_on_from_its_last(self, tmp_path: Path) -> None:
        path, *resets, more = load(config(tmp_path), Trainer())
        assert path == str(tmp_path / "checkpoint_last.pt")
        assert (resets, more) == ([False, False, {}], {"reset_meters": False})

    def test_what_another_run_left_is_taken_once(self, tmp_path: Path) -> None:
        first = tmp_path / "first.pt"
        first.write_text("")
        cfg = config(tmp_path, continue_once=str(first))
        assert load(cfg, Trainer())[0] == str(first)
        (tmp_path / "checkpoint_last.pt").write_text("")
        assert load(cfg, Trainer())[0] == str(tmp_path / "checkpoint_last.pt")

    def test_finetuning_takes_the_model_alone(self, tmp_path: Path) -> None:
        first = tmp_path / "first.pt"
        first.write_text("")
        trainer = Trainer()
        trainer.extra_state = {"train_iterator": {"epoch": 7}, "best": 1.0}
        path, *rest = load(config(tmp_path, finetune_from_model=str(first)), trainer)
        assert path == str(first)
        assert rest == [True, True, {}, {"reset_meters": True}]
        assert checkpoint_utils.score_of(trainer).best is None

    def test_a_named_file_is_found_in_the_folder_too(self, tmp_path: Path) -> None:
        (tmp_path / "mine.pt").write_text("")
        cfg = config(tmp_path, restore_file="mine.pt", optimizer_overrides="{'lr': 1}")
        assert load(cfg, Trainer())[:4] == (
            str(tmp_path / "mine.pt"), False, False, {"lr": 1}
        )  # fmt: skip

    def test_the_position_and_the_score_are_restored(self, tmp_path: Path) -> None:
        trainer = Trainer()
        trainer.extra_state = {"train_iterator": {"epoch": 7}, "best": 1.0}
        _, itr = checkpoint_utils.load_checkpoint(config(tmp_path), trainer)
        assert itr.epoch == 7
        assert checkpoint_utils.score_of(trainer).best == 1.0
        _, itr = checkpoint_utils.load_checkpoint(
            config(tmp_path, reset_dataloader=True), trainer
        )
        assert itr.epoch == 1

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"restore_file": "x.pt"}, FileNotFoundError, "--restore-file: there"),
            ({"continue_once": "x.pt"}, FileNotFoundError, "--continue-once"),
            ({"finetune_from_model": "x.pt"}, FileNotFoundError, "--finetune-from"),
            ({"finetune_from_model": "x.pt", "reset_meters": True}, ValueError,
             "together with --reset-meters"),
            ({"finetune_from_model": "x.pt", "restore_file": "y.pt"}, ValueError,
             "can not be specified together"),
        ],
    )  # fmt: skip
    def test_what_is_not_there_or_contradicts_is_said(
        self, tmp_path: Path, options: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            load(config(tmp_path, **options), Trainer())


def test_the_oldest_layout_is_brought_up_to_date() -> None:
    state = {
        "args": SimpleNamespace(raw_text=True, max_positions=9, remove_bpe="@@ "),
        "model": {},
        "best_loss": 2.5,
        "optimizer": {"state": {}},
        "epoch": 0,
        "batch_offset": 4,
        "val_loss": 3.0,
    }
    new = upgrade_state_dict(state)
    assert new["optimizer_history"] == [
        {
            "criterion_name": "CrossEntropyCriterion",
            "optimizer_name": "FairseqNAG",
            "lr_scheduler_state": {"best": 2.5},
            "num_updates": 0,
        }
    ]
    assert new["last_optimizer_state"] == {"state": {}}
    assert new["extra_state"]["train_iterator"] == {
        "epoch": 1, "iterations_in_epoch": 4
    }  # fmt: skip
    assert new["args"].task == "translation"
    assert new["args"].dataset_impl == "raw"
    assert new["args"].max_source_positions == 9
    assert new["args"].post_process == "@@ "


def test_a_layout_of_today_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    state = {
        "args": None,
        "cfg": {"model": {"_name": "mine", "width": 3}, "task": None},
        "model": {"decoder.w": torch.ones(2), "encoder.w": torch.zeros(2)},
        "optimizer_history": [],
        "extra_state": {"train_iterator": {"epoch": 2}},
    }
    torch.save(state, path)
    loaded = checkpoint_utils.load_checkpoint_to_cpu(path, {"width": 5})
    assert loaded["cfg"]["model"]["width"] == 5
    assert loaded["extra_state"] == state["extra_state"]
    assert torch.equal(loaded["model"]["decoder.w"], torch.ones(2))
