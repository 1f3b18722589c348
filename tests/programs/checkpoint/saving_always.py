"""A run that saves each step, for ever, in a folder."""

import sys
from pathlib import Path

import torch
from test_trainer_checkpoints import make

torch.set_num_threads(1)
many = {"max_steps": 100000, "logging_steps": 1000, "save_total_limit": 3}
make(Path(sys.argv[1]), save_steps=1, **many).train()
