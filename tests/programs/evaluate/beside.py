"""Evaluates the checkpoints of a run that another process has trained."""

from typing import Any

import numpy as np
from tiny import arguments, gpt2, tokens

import ctrainer
from ctrainer.checkpoint import find_checkpoints

DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def metrics_of(prediction: Any) -> dict[str, float]:
    return {"spread": float(np.std(prediction.predictions))}


def evaluate(run: str, folder: str) -> dict[Any, Any]:
    args = arguments(output_dir=f"{folder}/evaluations", per_device_eval_batch_size=4)
    trainer = ctrainer.Trainer(
        gpt2(**DROPOUT), args, eval_dataset=tokens(10), compute_metrics=metrics_of
    )
    results: dict[Any, Any] = {}
    for checkpoint in find_checkpoints(run):
        step = int(checkpoint.rpartition("-")[2])
        trainer._load_from_checkpoint(checkpoint)
        trainer.state.global_step = step
        results[step] = trainer.evaluate()
    history = [(e["step"], e["eval_loss"]) for e in trainer.state.log_history]
    return {**results, "history": history}


if __name__ == "__main__":
    from programs.run import folder, options, tell

    tell(evaluate(options["run"], folder))
