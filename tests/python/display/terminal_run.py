"""A run of a small NumPy model that counts for itself what it does: options as JSON.

Beside the display it writes, to report<rank>.json, the rows of each update, the times
between which each began and ended, and what train() returned.
"""

import json
import logging
import os
import signal
import sys
import time
import warnings

import numpy as np

from ctrainer import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from ctrainer.adapters.numpy import Loss, Parameter

options = json.loads(sys.argv[1])
rank = int(os.environ.get("RANK", "0"))
report = {"updates": [], "pauses": [], "begin": [], "end": [], "returned": None}


class Slow:
    """y = w x; an update sleeps for a while, as does a batch of an evaluation."""

    training, rows, called = True, 0, 0.0

    def __init__(self):
        self.w = Parameter(np.ones(1, np.float32))

    def named_parameters(self):
        yield "w", self.w

    def parameters(self):
        yield self.w

    def __call__(self, x, labels=None):
        if labels is None or not trainer.model_is_training:
            time.sleep(options.get("eval_seconds", 0.01))
            return {"loss": Loss(np.float32(1.0), lambda scale: None), "logits": x}
        self.rows += len(x)
        time.sleep(options.get("seconds", 0.01))
        self.called = time.perf_counter()
        loss = float(np.mean((self.w.data * x - labels) ** 2))
        return {
            "loss": Loss(loss, lambda scale: self.w.accumulate(scale * self.w.data))
        }


class Recount(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        report["begin"].append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        times = [trainer.model.called, time.perf_counter()]
        report["updates"].append([times, state.global_step, trainer.model.rows])

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "train_loss" in logs:
            report["end"].append(time.perf_counter())


class Acts(TrainerCallback):
    """What the options ask for after an update."""

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step == options.get("stop_at"):
            control.should_training_stop = True
        if step == options.get("interrupt_at"):
            os.kill(os.getpid(), signal.SIGINT)
        if step == options.get("fail_at"):
            raise ValueError("the callback fails")
        for kind in options.get("writes", ()):
            WRITES[kind](f"{kind} {rank} {step}")


class Run(Trainer):
    model_is_training = False

    def training_step(self, *args, **kwargs):
        self.model_is_training = True
        loss = super().training_step(*args, **kwargs)
        self.model_is_training = False
        return loss

    def _prepare_for_training(self, *args, **kwargs):
        made = super()._prepare_for_training(*args, **kwargs)
        report["begin"].append(time.perf_counter())
        return made

    def _finalize_training(self, *args, **kwargs):
        report["end"].append(time.perf_counter())
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        begin = time.perf_counter()
        found = super().evaluation_loop(*args, **kwargs)
        report["pauses"].append([begin, time.perf_counter()])
        return found

    def evaluate(self, *args, **kwargs):
        begin = self.model.called or report["begin"][0]
        found = super().evaluate(*args, **kwargs)
        report["pauses"][-1] += [begin, time.perf_counter()]
        return found


def unfinished(text):
    print(text, end="", flush=True)
    time.sleep(0.12)  # longer than the display waits between two frames
    print(" is finished")


WRITES = {
    "print": print,
    "stderr": lambda text: print(text, file=sys.stderr),
    "lines": lambda text: print(f"{text} a\n{text} b"),
    "unfinished": unfinished,
    "log": logging.getLogger("user").warning,
    "warning": lambda text: warnings.warn(text, stacklevel=2),
    "progress": lambda text: sys.stderr.write(f"\r{text}\r{' ' * len(text)}\r"),
}
logging.basicConfig(format="%(message)s")  # before the display is there
warnings.simplefilter("always")
rows = np.arange(options.get("rows", 64), dtype=np.float32)
data = [{"x": x, "labels": x} for x in rows]
made = {
    "max_steps": 30, "per_device_train_batch_size": 4, "logging_steps": 7,
    "save_strategy": "no", "report_to": "none", "output_dir": options["folder"],
}  # fmt: skip
patience = options.get("patience")
callbacks = [Recount(), Acts()]
if patience:
    callbacks.append(EarlyStoppingCallback(patience))
trainer = Run(
    Slow(),
    TrainingArguments(**made | options.get("args", {})),
    train_dataset=data,
    eval_dataset=data[:24],
    callbacks=callbacks,
)
try:
    output = trainer.train(resume_from_checkpoint=options.get("resume"))
    report["returned"] = output.metrics
    for _ in range(options.get("evaluations_after", 0)):
        trainer.evaluate()
finally:
    report["history"] = trainer.state.log_history
    with open(f"{options['folder']}/report{rank}.json", "w") as file:
        json.dump(report, file)
