"""Checkpoints of 2 ranks."""

import errno
import os

from programs.run import folder, rank, tell
from rank_checkpoints import files, history, make, weights

import ctrainer
from ctrainer.trainer import checkpoint

best = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "save_total_limit": 2,
}
found = {}
whole = make(folder + "/a")
output = whole.train()
found["whole"] = [weights(whole), history(whole), output.training_loss]
found["tokens"] = whole.state.num_input_tokens_seen
found["files"] = files(folder + "/a")
found["zero"] = [whole.state.is_world_process_zero, whole.is_local_process_zero()]

again = make(folder + "/b")
output = again.train(resume_from_checkpoint=folder + "/a/checkpoint-2")
found["resumed"] = [weights(again), history(again), output.training_loss]
assert again.state.is_world_process_zero == (rank == 0)

# the best model on every rank, rotation by one
chosen = make(folder + "/c", **best)
chosen.train()
found["best"] = [weights(chosen), chosen.state.best_model_checkpoint[-12:]]
found["rotated"] = files(folder + "/c")
again = make(folder + "/c")
found["newest"] = checkpoint.last_checkpoint(again)[-12:]

# an asynchronous save, the model alone
lean = make(folder + "/d", async_save=True, save_only_model=True)
lean.train()
found["lean"] = files(folder + "/d")

# rank 1's files go through the group where it has no part in rank 0's folder
each = make(folder + "/h", save_on_each_node=True)
each.train()
found["each"] = files(folder + "/h")
found["each resumed"] = (
    make(folder + "/i")
    .train(resume_from_checkpoint=folder + "/h/checkpoint-2")
    .training_loss
)


def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


class Full(ctrainer.Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if rank == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._save_optimizer_and_scheduler(output_dir)


class Torn(ctrainer.Trainer):
    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if rank == 1:
            raise ZeroDivisionError("on purpose")


found["full"] = failure(make(folder + "/e", Full).train)
found["torn"] = failure(make(folder + "/f", Torn).train)
blocked = folder + "/g"
trainer = make(blocked)
if rank == 0:
    os.rmdir(blocked)
    open(blocked, "w").close()
found["blocked"] = failure(trainer.train)
found["left"] = {n: os.listdir(f"{folder}/{n}") for n in "ef"}
tell(found)
