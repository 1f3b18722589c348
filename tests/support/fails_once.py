"""A callback that raises, of either engine."""

from typing import Any

from transformers import TrainerCallback


class FailsOnce(TrainerCallback):
    """Raises an ArithmeticError after an update, the first time that it is made."""

    def __init__(self, step: int) -> None:
        self.step, self.raised = step, False

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.step and not self.raised:
            self.raised = True
            raise ArithmeticError("on_step_end")
