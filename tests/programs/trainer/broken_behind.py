"""A collective of the GPUs never ends, in an update that would be saved next."""

import ctypes
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import any_gpu
import emulated_torch
from enqueued import Measured, data, run
from programs.run import folder, options, tell
from tiny import Net

import ctrainer
from ctrainer.comm import nccl
from ctrainer.fsdp import trained_model

trained_model.ranks_a_machine = lambda group: 1  # for hybrid sharding
any_gpu.device()
nccl.run = SimpleNamespace(timeout_seconds=lambda: 2.0)  # the hosts wait longer
LAST = 5
wheels = emulated_torch.FOLDER.parent / "wheels"
library = ctypes.CDLL(str(wheels / "nvidia/nccl/lib/libnccl.so.2"))
called = ctypes.c_int.in_dll(library, "fake_nccl_called")
stalls = ctypes.c_int.in_dll(library, "fake_nccl_stalls")


class Slow(Net):
    """Its backward pass of update LAST lasts until the group has been given up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(self._wait)

    def _wait(self, *unused: Any) -> None:
        if stalls.value != 0:
            time.sleep(3.0)


class Stalls(ctrainer.TrainerCallback):
    """A collective of update LAST, which has as many as that before: 1 is the last."""

    before = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
        if state.global_step == LAST - 1:
            each = called.value - self.before
            stalls.value = called.value + max(each - from_last + 1, 1)
        self.before = called.value


error, from_last, slow = "", options.pop("from_last", 1), options.pop("slow", False)
evaluates = options.pop("evaluates", False)
cls = Measured if options.pop("measured", False) else ctrainer.Trainer
try:
    trainer, _ = run(
        folder, cls, set(), model=Slow if slow else Net,
        callbacks=[] if evaluates else [Stalls()],
        save_strategy="no" if evaluates else "steps",
        save_steps=LAST, logging_strategy="no", **options,
    )  # fmt: skip
    if evaluates:
        before = called.value
        trainer.evaluate(data(set()))
        stalls.value = called.value + called.value - before
        trainer.evaluate(data(set()))
except RuntimeError as raised:
    error = str(raised)
tell([error, [path.name for path in Path(folder).glob("checkpoint-*")]])
