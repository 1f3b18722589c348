"""What a run gets through: its tokens, and how many rows, updates, tokens and
operations a second.

Functions of Trainer, which has the first as a method.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ctrainer.adapters.peak import device_peak
from ctrainer.runtime import messages
from ctrainer.trainer_utils import speed_metrics


def track_tokens(trainer: Any, inputs: Any) -> None:
    """Count a micro-batch's tokens, with or without padding, where it maps names to
    tensors, if the arguments ask for a count. Of several ranks they come into the state
    together, before a log or a checkpoint."""
    if not trainer._counts_tokens:
        return
    name = trainer._main_input_name
    if not hasattr(inputs, "keys") or name not in inputs:
        return
    tokens = inputs[name]
    count = int(tokens.numel() if hasattr(tokens, "numel") else np.size(tokens))
    if trainer.args.include_num_input_tokens_seen == "non_padding":
        pad = getattr(trainer.processing_class, "pad_token_id", None)
        if "attention_mask" in inputs:
            count = int(inputs["attention_mask"].sum())
        elif pad is not None:
            count = int((tokens != pad).sum())
        else:
            messages.counting_padding()
    if trainer.args.world_size == 1:
        trainer.state.num_input_tokens_seen += count
    else:
        trainer._counted_tokens += count


def since(trainer: Any, start_time: float) -> dict[str, float]:
    """What this train() does a second: its tokens, where they are counted, and the part
    of the devices' peak that its operations are (MFU), where both are known."""
    found: dict[str, float] = {}
    state = trainer.state
    if trainer._counts_tokens:
        new = state.num_input_tokens_seen - trainer._initial_num_input_tokens_seen
        found.update(speed_metrics("train", start_time, num_tokens=new))
    flos, seconds = (
        state.total_flos - getattr(state, "resumed_flos", 0.0),
        time.time() - start_time,
    )
    peak = device_peak(trainer.args) if flos > 0 and seconds > 0 else None
    if peak is not None:
        devices = trainer.args.world_size
        found["train_mfu"] = float(f"{flos / seconds / (peak * 1e12 * devices):.4g}")
    return found


def of_run(trainer: Any, start_time: float, rows: int) -> dict[str, float]:
    """Seconds and speeds of a train() that ends, by what it has done.

    rows: of all ranks; 0: not known, and counted as full batches.
    """
    steps = trainer.state.global_step - getattr(trainer.state, "resumed_at", 0)
    rows = rows or steps * trainer.get_total_train_batch_size(trainer.args)
    return {
        **since(trainer, start_time),
        **speed_metrics("train", start_time, rows, steps),
    }
