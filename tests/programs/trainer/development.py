"""A run in Python's development mode."""

from tiny import Net, make, rows

import ctrainer

options = {"max_steps": 3, "save_steps": 2, "save_strategy": "steps"}
trainer = make(ctrainer.Trainer, Net(), rows(), **options)
trainer.train()
del trainer
