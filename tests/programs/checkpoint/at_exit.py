"""A process that ends while a checkpoint is written: its folder, and its fate."""

import shutil
import sys

import numpy as np

from ctrainer.checkpoint import CheckpointWriter

kept = CheckpointWriter()
made = kept.begin(sys.argv[1])
kept.add_safetensors("model.safetensors", {"w": np.ones(1 << 22, np.float32)})
kept.add_bytes("trainer_state.json", b"{}")
if sys.argv[2] == "lost":
    shutil.rmtree(made)
kept.commit()
