"""Many updates of a small model on ranks, with saves and evaluations: what a rank's
process has of memory, descriptors, threads and processor time along the way."""

import gc
import os
import resource
import threading
from typing import Any

from programs.run import folder, options, tell
from tiny import Net, arguments, rows

import ctrainer

UPDATES: int = options["updates"]
PARTS: int = options["parts"]


def sample(step: int) -> dict[str, float]:
    """Resident bytes, open descriptors, threads and seconds of the processor."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step": step,
        "resident": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "seconds": used.ru_utime + used.ru_stime,
    }


class Sampling(ctrainer.TrainerCallback):
    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step % (UPDATES // PARTS) == 0:
            trainer._wait_for_save()  # its files are open until the disk has them
            self.samples.append(sample(state.global_step))
            tell(self.samples)


sampling = Sampling()
args = arguments(
    output_dir=f"{folder}/out", max_steps=UPDATES, per_device_train_batch_size=4,
    save_strategy="steps", save_steps=options["every"], save_total_limit=2,
    eval_strategy="steps", eval_steps=options["every"], logging_steps=500,
    learning_rate=1e-3,
)  # fmt: skip
trainer = ctrainer.Trainer(
    Net(), args, train_dataset=rows(2048), eval_dataset=rows(64), callbacks=[sampling]
)
trainer.remove_callback(ctrainer.PrinterCallback)
trainer.remove_callback(ctrainer.ProgressCallback)
trainer.train()
