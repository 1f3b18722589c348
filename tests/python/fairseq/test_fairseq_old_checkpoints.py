"""Checkpoints of fairseq's older releases are brought up to date, as fairseq does it,
and a run goes on from one."""

import copy
import os
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch
from places import PYTHONPATH
from ranks import run_alone

from ctrainer.fairseq.checkpoint_utils import upgrade_state_dict
from ctrainer.fairseq.config import checkpoint_config

ADAM = {"criterion_name": "Criterion", "optimizer_name": "FairseqAdam"}
ITERATOR = {"epoch": 3, "iterations_in_epoch": 5}


def _first() -> dict[str, Any]:
    """The layout of fairseq 0.4: no history, no extra_state, flat options."""
    return {
        "args": Namespace(lr=0.25, max_positions=64, data=["a", "b"], min_lr=1e-9),
        "model": {"w": 1},
        "optimizer": {"state": "moments"},
        "best_loss": 3.5,
        "epoch": 0,
        "batch_offset": 7,
        "val_loss": 3.75,
    }


def _second() -> dict[str, Any]:
    """Each entry of the history had its state; the loss was the schedule's."""
    return {
        "args": Namespace(
            task="language_modeling", raw_text=False, lazy_load=True, remove_bpe="@@ ",
            log_keys=None, lr=[0.5], data="a",
        ),
        "model": {},
        "optimizer_history": [
            {"criterion_name": "C", "optimizer": "old"},
            {"criterion_name": "C", "optimizer": "new", "best_loss": 2.0},
        ],
        "extra_state": {"epoch": 4, "batch_offset": 2, "val_loss": 2.5},
    }  # fmt: skip


LAYOUTS = {"first": _first, "second": _second}


def test_the_first_layout() -> None:
    state = upgrade_state_dict(_first())
    assert state.pop("args") == Namespace(
        lr=[0.25], max_positions=64, max_source_positions=64, max_target_positions=64,
        data="a", stop_min_lr=1e-9, task="translation",
    )  # fmt: skip
    assert state == {
        "model": {"w": 1},
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyCriterion",
                "optimizer_name": "FairseqNAG",
                "lr_scheduler_state": {"best": 3.5},
                "num_updates": 0,
            }
        ],
        "last_optimizer_state": {"state": "moments"},
        "extra_state": {
            "epoch": 0,
            "batch_offset": 7,
            "val_loss": 3.75,
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 7},
        },
    }


def test_the_second_layout() -> None:
    state = upgrade_state_dict(_second())
    args = state["args"]
    assert args.task == "language_modeling"
    assert (args.dataset_impl, args.post_process) == ("lazy", "@@ ")
    assert not hasattr(args, "log_keys")
    assert state["last_optimizer_state"] == "new"
    assert [sorted(entry) for entry in state["optimizer_history"]] == [
        ["criterion_name"],
        ["criterion_name", "lr_scheduler_state", "num_updates", "optimizer_name"],
    ]
    assert state["extra_state"]["train_iterator"] == {
        "epoch": 4,
        "iterations_in_epoch": 2,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_up_to_date_stays(layout: str) -> None:
    once = upgrade_state_dict(LAYOUTS[layout]())
    assert upgrade_state_dict(copy.deepcopy(once)) == once


def test_a_published_model_has_nothing_but_weights() -> None:
    assert upgrade_state_dict({"model": {}}) == {"model": {}}


def test_old_options_are_a_config_of_today() -> None:
    state = upgrade_state_dict(_first())
    cfg = checkpoint_config(state)
    assert cfg.optimization.lr == [0.25]
    assert cfg.optimization.stop_min_lr == 1e-9


def test_a_run_goes_on_from_an_old_checkpoint(tmp_path: Path) -> None:
    """The same numbers as from today's: state inside the history, the position flat."""
    trainer = tiny.trainer()
    samples = tiny.batches(6)
    for sample in samples[:4]:
        trainer.train_step([sample])
    new, old = str(tmp_path / "new.pt"), str(tmp_path / "old.pt")
    trainer.save_checkpoint(new, {"train_iterator": dict(ITERATOR)})
    state = torch.load(new)
    state["optimizer_history"][-1]["optimizer"] = state.pop("last_optimizer_state")
    del state["extra_state"]["train_iterator"]
    state["extra_state"].update(epoch=3, batch_offset=5)
    state["args"] = Namespace(arch="tiny")
    torch.save(state, old)
    ends = []
    for path in (new, old):
        resumed = tiny.trainer()
        extra = resumed.load_checkpoint(path)
        assert extra["train_iterator"] == ITERATOR
        assert resumed.get_num_updates() == 4
        for sample in samples[4:]:
            resumed.train_step([sample])
        ends.append(resumed.get_model().state_dict())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name])


@pytest.mark.skipif(
    find_spec("fairseq") is None,
    reason="fairseq is not installed here; docs/start/from_fairseq.md says how",
)
def test_fairseq_makes_the_same_of_them() -> None:
    """Of the options too, but for those that it then hands to its parsers."""
    paths = os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])
    flags = ["-W", "ignore"]
    done = run_alone("fairseq.old_checkpoints", flags=flags, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
