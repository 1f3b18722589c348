"""torch.profiler over some updates of a run: profiler_steps, and its callback."""

from __future__ import annotations

import logging
import os
from typing import Any

from ctrainer.callbacks import TrainerCallback

__all__ = ["ProfilerCallback"]

logger = logging.getLogger("ctrainer.profiler")

BEFORE = 2  # updates: one that is not recorded, and one for the profiler's own start


class ProfilerCallback(TrainerCallback):
    """Records some updates of a run with torch.profiler; `profiler_steps` adds one.

    The third update of a train() is the first that is recorded. After the last, or at
    the end of a shorter run, `output_dir/profile` has two files of each rank:
    `rankR-stepN.pt.trace.json`, for ui.perfetto.dev, chrome://tracing and TensorBoard,
    and `rankR-stepN.txt`, a table of the operations with the most time of their own.
    N is the last update recorded. `ProfilerStep#I` in a trace is a whole update with
    its batch, forward and backward pass, log, evaluation and save; `ctrainer.update`
    the optimizer's part, which runs in C. What follows is not recorded and costs
    nothing.

    Args:
        steps (int, default 3): Updates that are recorded.
        **options: Of torch.profiler.profile, such as record_shapes, profile_memory,
            with_stack and activities.

    Args of every method:
        args (TrainingArguments): The run's.
        state (TrainerState): How far the run is.
        control (TrainerControl): Stays as it is.
        **kwargs: Not read.

    Raises:
        ValueError: steps is below 1.

    Example:
        >>> from ctrainer import ProfilerCallback
        >>> ProfilerCallback(steps=2, record_shapes=True).steps
        2
    """

    def __init__(self, steps: int = 3, **options: Any) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}; expected 1 or more")
        self.steps, self.options = steps, options
        self._profile: Any = None
        self._written = False
        self._update: Any = None  # the optimizer's part, which has begun

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Start to count updates."""
        from torch import profiler

        self._written = True  # nothing of a run that an exception has ended
        self._stop()

        def write(profile: Any) -> None:
            if self._written or profile.step_num <= BEFORE:
                return
            folder = os.path.join(args.output_dir, "profile")
            os.makedirs(folder, exist_ok=True)
            name = f"rank{args.process_index}-step{state.global_step}"
            path = os.path.join(folder, name)
            profile.export_chrome_trace(f"{path}.pt.trace.json")
            with open(f"{path}.txt", "w", encoding="utf-8") as file:
                averages = profile.key_averages()
                file.write(averages.table(sort_by="self_cpu_time_total", row_limit=50))
            self._written = True
            logger.info("torch.profiler: %s.pt.trace.json", path)

        self._written = False
        when = profiler.schedule(wait=1, warmup=BEFORE - 1, active=self.steps, repeat=1)
        self._profile = profiler.profile(
            schedule=when, on_trace_ready=write, **self.options
        )
        self._profile.start()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Mark the beginning of the optimizer's part."""
        if self._profile is not None:
            from torch.profiler import record_function

            begun: Any = record_function("ctrainer.update")
            begun.__enter__()
            self._update = begun

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Mark the end of the optimizer's part."""
        if self._update is not None:
            update, self._update = self._update, None
            update.__exit__(None, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the update; write the files after the last that is recorded."""
        if self._profile is not None:
            self._profile.step()
            if self._written:
                self._stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the files of a run that ends earlier."""
        self._stop()
        if not self._written:
            logger.warning(
                "torch.profiler has recorded nothing: it begins with the third update "
                "of a train(), and this one has ended at step %d", state.global_step,
            )  # fmt: skip

    def _stop(self) -> None:
        profile, self._profile, self._update = self._profile, None, None
        if profile is not None:
            profile.stop()
