"""fairseq's Trainer, of which one rank makes a step or a sample less."""

import os
import time

import fairseq_tiny as tiny
from programs.run import join_gloo, options, rank, tell, world

from ctrainer.fairseq import metrics

join_gloo()


def run(backend, kind, wrong, at):
    """What was raised, and after how many seconds; None: nothing."""
    changes = {"distributed_training__distributed_world_size": world}
    if backend == "bmuf":
        changes |= {
            "optimization__use_bmuf": True,
            "bmuf__distributed_world_size": world,
        }
    else:
        changes["distributed_training__ddp_backend"] = backend
    metrics.reset()
    trainer = tiny.trainer(**changes)
    batches = tiny.batches(8 * world)[rank::world]
    trainer.reset_dummy_batch(batches[0])
    began = time.monotonic()
    try:
        for number, samples in enumerate(tiny.groups(batches, 2)):
            if rank == wrong and number == at:
                if kind == "ends":
                    break
                if kind == "skips":
                    continue
                samples = samples[1:] if kind == "samples" else [None] * 2
            trainer.train_step(samples)
        trainer.valid_step(batches[0])
    except (ValueError, RuntimeError) as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - began]
    return None


last = options["last"]
if options["engine"]:  # torch's group carries everything, as on several machines
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
found = []
for backend, kind, wrong, at in options["cases"]:
    found.append(run(backend, kind, wrong, at))
tell(found)
if last:  # its process ends, without a word
    if rank == world - 1:
        os._exit(3)
    found.append(run(last, "none", -1, 0))
    tell(found)
os._exit(0)
