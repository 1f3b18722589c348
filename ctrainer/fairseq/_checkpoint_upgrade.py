"""Checkpoints of fairseq's older releases in the layout of its last.

Source: fairseq, checkpoint_utils.py, which lists what each release changed.
"""

from __future__ import annotations

from typing import Any


def upgrade_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """The same state, changed in place, in the layout of today."""
    if "optimizer_history" not in state and "best_loss" in state:
        state["optimizer_history"] = [
            {
                "criterion_name": "CrossEntropyCriterion",
                "best_loss": state.pop("best_loss"),
            }
        ]
        state["last_optimizer_state"] = state.pop("optimizer")
    if "epoch" in state and "extra_state" not in state:
        names = ("epoch", "batch_offset", "val_loss")
        state["extra_state"] = {name: state.pop(name) for name in names}
    if state.get("optimizer_history"):
        _upgrade_history(state)
    extra = state.get("extra_state")
    if extra is not None and "train_iterator" not in extra and "epoch" in extra:
        extra["train_iterator"] = {
            "epoch": extra["epoch"],
            "iterations_in_epoch": extra.get("batch_offset", 0),
        }
    if state.get("args") is not None:
        _upgrade_args(state["args"], extra)
    return state


def _upgrade_history(state: dict[str, Any]) -> None:
    last = state["optimizer_history"][-1]
    if "optimizer" in last:
        state["last_optimizer_state"] = last["optimizer"]
        for entry in state["optimizer_history"]:
            entry.pop("optimizer", None)
    last.setdefault("optimizer_name", "FairseqNAG")
    if "lr_scheduler_state" not in last:
        last["lr_scheduler_state"] = {"best": last.pop("best_loss", None)}
    last.setdefault("num_updates", 0)


def _upgrade_args(args: Any, extra: dict[str, Any] | None) -> None:
    """args: the flat options that releases before 0.10 saved."""
    if not hasattr(args, "task"):
        args.task = "translation"
    if getattr(args, "raw_text", False):
        args.dataset_impl = "raw"
    elif getattr(args, "lazy_load", False):
        args.dataset_impl = "lazy"
    if hasattr(args, "remove_bpe"):
        args.post_process = args.remove_bpe
    if hasattr(args, "max_positions") and not hasattr(args, "max_source_positions"):
        args.max_source_positions = args.max_target_positions = args.max_positions
    position = None if extra is None else extra.get("train_iterator")
    if position is not None:  # epochs were counted from 0 once
        position["epoch"] = max(position.get("epoch", 1), 1)
