"""HF's Trainer on ranks whose data differ in length."""

import tiny
from programs.run import folder, rank, tell, world
from rank_lengths import OwnLoader, Skipping, Stream, run

import ctrainer

uneven = {"even_batches": False, "dispatch_batches": False}
longer = 8 * (rank == world - 1)
all_read = {"accelerator_config": {"dispatch_batches": False}, "max_steps": 20}
tell(
    {
        "rows": run(folder, ctrainer.Trainer, tiny.rows(41 + (rank == 1))),
        "batches": run(folder, ctrainer.Trainer, tiny.rows(40 + 4 * world * rank)),
        "own": run(folder, OwnLoader, tiny.rows(40 + longer)),
        "stream": run(
            folder, ctrainer.Trainer, Stream(40 + 4 * world * rank), **all_read
        ),
        "skip": run(folder, Skipping, tiny.rows(64 * world), skips=rank == 1),
        "asked for": run(
            folder, OwnLoader, tiny.rows(40 + longer), accelerator_config=uneven
        ),
        "equal": run(folder, ctrainer.Trainer, tiny.rows(41)),
        "equal streams": run(folder, ctrainer.Trainer, Stream(41), max_steps=3),
    }
)
