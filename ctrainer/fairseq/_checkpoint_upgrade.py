"""Checkpoints of fairseq's older releases in the layout of its last.

Source: fairseq, checkpoint_utils.py, which lists what each release changed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeGuard


def upgrade_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """The same state, changed in place, in the layout of today.

    What a checkpoint of any release has to have is as it was: a file without an
    optimizer's history or a position, as published models have none, stays so.
    """
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
    if extra is not None:
        position = {
            "epoch": extra.get("epoch", 0),
            "iterations_in_epoch": extra.get("batch_offset", 0),
        }
        extra.setdefault("train_iterator", position)
        extra.pop("train_meters", None)  # 0.9's; today's are in "metrics"
    if state.get("args") is not None:
        _upgrade_args(vars(state["args"]), extra)
    if _is_group(cfg := state.get("cfg")):
        _upgrade_config(cfg)
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


# Option: the names of its values that were changed.
_RENAMED = {
    "arch": {"audio_cpc": "wav2vec"},
    "criterion": {
        "binary_cross_entropy": "wav2vec",
        "kd_binary_cross_entropy": "wav2vec",
    },
    "task": {"speech_pretraining": "audio_pretraining"},
}


def _upgrade_args(args: dict[str, Any], extra: dict[str, Any] | None) -> None:
    """args: the flat options that releases before 1.0 saved, by name."""
    args.setdefault("task", "translation")
    for old, new in (("raw_text", "raw"), ("lazy_load", "lazy")):
        if args.get(old):
            args["dataset_impl"] = new
            break
    if "remove_bpe" in args:
        args["post_process"] = args["remove_bpe"]
    if "min_lr" in args:
        args["stop_min_lr"] = args.pop("min_lr")
    if "max_positions" in args and "max_source_positions" not in args:
        args["max_source_positions"] = args["max_positions"]
        args["max_target_positions"] = args["max_positions"]
    if args.get("log_keys", ()) is None:
        del args["log_keys"]
    if isinstance(args.get("lr"), float):
        args["lr"] = [args["lr"]]
    if isinstance(args.get("data"), list) and args["data"]:
        args["data"] = args["data"][0]
    for option, names in _RENAMED.items():
        if option in args:
            args[option] = names.get(args[option], args[option])
    position = None if extra is None else extra.get("train_iterator")
    if position is not None:  # epochs were counted from 0 once
        position["epoch"] = max(position.get("epoch", 1), 1)


def _upgrade_config(cfg: MutableMapping[str, Any]) -> None:
    """print_alignment was a truth value once, and is a kind or None."""
    generation, task = cfg.get("generation"), cfg.get("task")
    if _is_group(generation):
        shown = generation.get("print_alignment")
        if isinstance(shown, bool):
            generation["print_alignment"] = "hard" if shown else None
    for holder in (task, _own_task(cfg.get("model"))):
        wer = holder.get("eval_wer_config") if _is_group(holder) else None
        if _is_group(wer) and isinstance(wer.get("print_alignment"), bool):
            wer["print_alignment"] = "hard"


def _is_group(value: Any) -> TypeGuard[MutableMapping[str, Any]]:
    return isinstance(value, MutableMapping)


def _own_task(model: Any) -> Any:
    """The task that a wav2vec model keeps of its own pretraining."""
    inner = model.get("w2v_args") if _is_group(model) else None
    return inner.get("task") if _is_group(inner) else None
