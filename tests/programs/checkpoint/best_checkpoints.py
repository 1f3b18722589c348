"""Ranks that keep the best three checkpoints, in two runs of three updates."""

import os
from typing import Any

from programs.run import folder, tell
from tiny import Net, arguments, rows

import ctrainer

ACCURACIES = [0.1, 0.9, 0.8, 0.2, 0.7, 0.1]


class Scripted(ctrainer.Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_accuracy": ACCURACIES[self.state.global_step - 1]}


for steps in (3, 6):
    args = arguments(
        output_dir=folder, max_steps=steps, save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, save_best_limit=3,
        metric_for_best_model="accuracy",
    )  # fmt: skip
    trainer = Scripted(Net(), args, train_dataset=rows(90), eval_dataset=rows(3))
    trainer.train(resume_from_checkpoint=steps > 3)
names = [n for n in os.listdir(folder) if n.startswith("checkpoint-")]
tell({"kept": sorted(int(n.split("-")[1]) for n in names)})
