"""What a run gets through: its tokens, and how many rows, updates and tokens a second.

Functions of Trainer, which has the first as a method.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ctrainer.trainer_utils import speed_metrics


def track_tokens(trainer: Any, inputs: Any) -> None:
    """Count a micro-batch's tokens, with or without padding, where it maps names to
    tensors. Of several ranks they come into the state together, before a log or a
    checkpoint."""
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
    if trainer.args.world_size == 1:
        trainer.state.num_input_tokens_seen += count
    else:
        trainer._counted_tokens += count


def since(trainer: Any, start_time: float) -> dict[str, float]:
    """Seconds since `start_time`, and the tokens of this train() a second where they
    are counted."""
    if not trainer._counts_tokens:
        return {}
    new = trainer.state.num_input_tokens_seen - trainer._initial_num_input_tokens_seen
    return speed_metrics("train", start_time, num_tokens=new)


def of_run(trainer: Any, start_time: float, rows: int) -> dict[str, float]:
    """Seconds and speeds of a train() that ends, by what it has done.

    rows: of all ranks; 0: not known, and counted as full batches.
    """
    steps = trainer.state.global_step - trainer.state.resumed_at
    rows = rows or steps * trainer.get_total_train_batch_size(trainer.args)
    return {
        **since(trainer, start_time),
        **speed_metrics("train", start_time, rows, steps),
    }
