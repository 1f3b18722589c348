"""A run that fires the events of training at the display, for the tests of it.

Arguments: seconds that an update takes, and that an evaluation batch takes.
"""

import math
import sys
import time
from types import SimpleNamespace

from ctrainer.callbacks import CallbackHandler, DefaultFlowCallback
from ctrainer.display.progress import ProgressCallback
from ctrainer.trainer_state import TrainerControl, TrainerState

STEPS, EVAL_EVERY, BATCHES = 30, 15, 6


class Run:
    def __init__(self, update_seconds: float, batch_seconds: float) -> None:
        self.update_seconds, self.batch_seconds = update_seconds, batch_seconds
        self.args = SimpleNamespace(
            logging_strategy="steps",
            eval_strategy="steps",
            save_strategy="no",
            logging_first_step=True,
            eval_delay=0,
        )
        self.handler = CallbackHandler(
            [DefaultFlowCallback, ProgressCallback], None, None, None, None
        )
        self.handler.eval_dataloader = range(BATCHES)
        self.state = TrainerState(
            max_steps=STEPS, logging_steps=5, eval_steps=EVAL_EVERY, num_train_epochs=2
        )

    def fire(self, event: str, *more: object) -> TrainerControl:
        self.control = getattr(self.handler, event)(
            self.args, self.state, self.control, *more
        )
        return self.control

    def log(self, logs: dict[str, float]) -> None:
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs)

    def evaluate(self, loss: float) -> None:
        for _ in range(BATCHES):
            time.sleep(self.batch_seconds)
            self.fire("on_prediction_step")
        metrics = {"eval_loss": loss + 0.1, "eval_accuracy": 0.6, "eval_runtime": 1.25}
        self.log(metrics)
        self.fire("on_evaluate", metrics)

    def update(self) -> None:
        self.fire("on_step_begin")
        time.sleep(self.update_seconds)
        state = self.state
        state.global_step += 1
        state.samples_done += 16
        state.epoch = state.global_step / 15
        control = self.fire("on_step_end")
        loss = 3 * math.exp(-state.global_step / 10) + 1
        if control.should_log:
            logs = {"loss": loss, "grad_norm": 0.5, "learning_rate": 5e-5}
            if state.global_step == 10:
                logs |= {"nonfinite_steps": 2, "reward": 0.75}
            self.log(logs)
        if control.should_evaluate:
            self.evaluate(loss)

    def train(self) -> None:
        self.control = TrainerControl()
        self.fire("on_train_begin")
        while not self.control.should_training_stop:
            self.update()
        self.log({"train_runtime": 75.0, "train_loss": 1.5})
        self.fire("on_train_end")


if __name__ == "__main__":
    Run(float(sys.argv[1]), float(sys.argv[2])).train()
