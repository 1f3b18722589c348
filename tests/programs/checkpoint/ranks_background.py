"""Files that each rank writes in the background, of a save that rank 0 publishes.

Of rank 1 the files of step 4 are written only after two more updates (`late`), never,
as it dies then (`killed`), or its disk is full (`full`).
"""

import os
import resource
import signal

from programs.run import folder, options, rank, tell
from rank_checkpoints import files, history, make, weights

import ctrainer
from ctrainer.checkpoint import CheckpointWriter, verify_checkpoint
from ctrainer.trainer import checkpoint

how, out = options.pop("how"), folder + "/out"
overrides = options.pop("overrides", False)
if options.pop("reserves", False):  # memory for snapshots, of this model, too
    checkpoint._WORTH_RESERVING = 0
commit = CheckpointWriter.commit
held = []
seen = []
memory = []  # for snapshots, at the begin and when the last save has begun


def hold(writer, **kwargs):
    if not writer.folder.endswith("-4"):
        commit(writer, **kwargs)
    elif how == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        commit(writer, **kwargs)
    else:
        held.append((writer, kwargs))


def snapshot_bytes():
    """Of the writer, if there is one."""
    trainer._wait_for_save()
    writer = trainer._checkpoint_writer
    return 0 if writer is None else writer.snapshot_bytes


class Acting(ctrainer.TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        memory.append(snapshot_bytes())

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != 6:
            return
        # Two steps after the save, which waits for rank 1's files.
        seen.append(sorted(n for n in os.listdir(out) if n.startswith("checkpoint")))
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while held:
            writer, kwargs = held.pop()
            commit(writer, **kwargs)
        if how in ("whole", "late"):
            memory.append(snapshot_bytes())


class Overriding(ctrainer.Trainer):
    """Finds the files of this rank that super() has saved, and adds others."""

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        super().save_model(output_dir + "/copy", _internal_call)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        assert os.path.getsize(f"{output_dir}/rng_state_{rank}.pth") > 0

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        name = f"shard-{rank:05d}-of-00002.safetensors"
        if options:
            assert os.path.getsize(f"{output_dir}/{name}") > 0

    def _save_checkpoint(self, model, trial=None):
        super()._save_checkpoint(model, trial)
        step = f"checkpoint-{self.state.global_step}"
        with open(f"{self._get_output_dir(trial)}/{step}/own-{rank}", "w") as file:
            file.write(step)


if rank == 1 and how != "whole":
    CheckpointWriter.commit = hold
cls = Overriding if overrides else ctrainer.Trainer
trainer = make(out, cls, save_steps=4, max_steps=8, **options)
trainer.add_callback(Acting())
try:
    trainer.train()
    problem = None
except Exception as error:
    problem = f"{type(error).__name__}: {error}"
told = {"problem": problem, "seen": seen, "left": sorted(os.listdir(out))}
told["memory"] = [nbytes > 0 for nbytes in memory]
if problem is None:
    told["history"] = history(trainer)
    told["files"] = files(out)
    told["wrong"] = [verify_checkpoint(f"{out}/{name}") for name in told["left"]]
    # From the folder whose files were written late: the same run.
    again = make(folder + "/again", save_steps=4, max_steps=8, **options)
    again.train(resume_from_checkpoint=out + "/checkpoint-4")
    told["again"] = [history(again), weights(again) == weights(trainer)]
tell(told)
