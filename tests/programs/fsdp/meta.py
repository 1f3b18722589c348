"""HF's Trainer with fsdp and models on the meta device, on 2 ranks."""

import os

import meta_trainings as runs
from programs.run import folder, tell

from ctrainer.comm import world

assert world(60).world_size == 2
told = {"first": runs.of_first_rank(folder)}
told["whole"] = runs.of_whole_weights(folder)
told["anew"], told["loaded"] = runs.anew(folder), runs.loaded(folder)
runs.rejected(folder)
del os.environ["CTRAINER_FSDP_POISON"]  # which takes all the pages
told["memory"] = runs.memory(folder)  # last: what is made once is there
tell(told)
