"""The display of a run: a live line on a terminal, a line per log elsewhere, a picture
in a notebook.

CTRAINER_LOG chooses: live, plain, json or notebook; unset, by what the output is.
NO_COLOR and TERM=dumb are supported.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from ctrainer.callbacks import TrainerCallback
from ctrainer.display.html import line, page
from ctrainer.display.terminal import Line, release
from ctrainer.display.text import (
    Progress,
    ends_run,
    evaluation_line,
    log_json,
    log_line,
    number,
    render,
    summary,
)
from ctrainer.memory_tracker import resident_bytes
from ctrainer.trainer_utils import has_length

MODES = ("live", "plain", "json", "notebook")
_INTERVALS = {"live": 0.1, "notebook": 0.25}  # seconds between two frames, at least
_DRAWING_SHARE = 20  # at most one part in 21 of the time is spent on frames
_RATE_WINDOW_SECONDS = 15.0
_MAX_LOSSES = 1024
_TEXT_COLUMNS = 100  # of a notebook's text form
_SHOWN = {
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "total_flos",
    "num_input_tokens_seen",
    "train_loss",
    "nonfinite_steps",
}


def choose_mode(stream: TextIO) -> str:
    """How to show a run on `stream`. Raises ValueError for an unknown CTRAINER_LOG."""
    wanted = os.environ.get("CTRAINER_LOG", "")
    if wanted:
        if wanted not in MODES:
            raise ValueError(
                f"CTRAINER_LOG={wanted!r} is not known; set it to one of "
                + ", ".join(MODES)
            )
        return wanted
    if _in_notebook():
        return "notebook"
    live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return "live" if live else "plain"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Speed:
    """How much a count grows a second, over the last seconds."""

    def __init__(self) -> None:
        self.marks: deque[tuple[float, int]] = deque()  # time, count

    def add(self, now: float, count: int) -> None:
        if self.marks and count == self.marks[-1][1]:
            return
        self.marks.append((now, count))
        while len(self.marks) > 2 and now - self.marks[0][0] > _RATE_WINDOW_SECONDS:
            self.marks.popleft()

    def per_second(self) -> float | None:
        """None before two marks."""
        (then, had), (now, has) = self.marks[0], self.marks[-1]
        return (has - had) / (now - then) if now > then else None


class Meter:
    """Follows a run by its events and measures its speeds: those of the last seconds of
    training, evaluations left out, and at the end those of the whole run, as its log
    has them."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.started = self.seen = time.monotonic()  # seen: the last step's end
        self.paused_seconds = 0.0
        self.of_run = False  # the speeds are those of the whole run
        self.steps, self.samples, self.tokens = Speed(), Speed(), Speed()

    def start(self, args: Any, state: Any) -> None:
        self.__init__()  # type: ignore[misc]
        self.progress.total = (
            state.max_steps if 0 < state.max_steps < sys.maxsize else 0
        )
        self.progress.epochs = state.num_train_epochs or None
        self.move(args, state)

    def move(self, args: Any, state: Any) -> None:
        """Take over how far the run is."""
        p, now = self.progress, time.monotonic()
        p.step, p.epoch = state.global_step, state.epoch
        p.memory_bytes = memory_in_use()
        if self.of_run:
            return
        p.elapsed_seconds = now - self.started
        trained = self.seen - self.paused_seconds
        ranks = getattr(args, "world_size", 1)
        self.steps.add(trained, state.global_step)
        self.samples.add(trained, getattr(state, "samples_done", 0) * ranks)
        self.tokens.add(trained, state.num_input_tokens_seen)
        p.samples_per_second = self.samples.per_second()
        p.tokens_per_second = self.tokens.per_second()
        p.eta_seconds = self._remaining(state)

    def _remaining(self, state: Any) -> float | None:
        """Seconds, with as much time for evaluations as these have taken so far."""
        rate, p = self.steps.per_second(), self.progress
        if not rate or not p.total:
            return None
        done = state.global_step - getattr(state, "resumed_at", 0)
        paused = self.paused_seconds / done if done > 0 else 0.0
        return (p.total - p.step) * (1 / rate + paused)

    def resume(self) -> None:
        """The time since the last step was not spent on training."""
        now = time.monotonic()
        self.paused_seconds += now - self.seen
        self.seen = now

    def note(self, logs: Mapping[str, Any], step: int) -> None:
        """Take over the numbers of a log. Of a long course every other loss goes."""
        p = self.progress
        if isinstance(logs.get("loss"), int | float):
            p.losses.append((step, float(logs["loss"])))
        if len(p.losses) > _MAX_LOSSES:
            del p.losses[:-1:2]
        p.learning_rate = _finite(logs.get("learning_rate"), p.learning_rate)
        p.grad_norm = _finite(logs.get("grad_norm"), p.grad_norm)
        p.mfu = _finite(logs.get("train_mfu"), p.mfu)
        if ends_run(logs):
            self.of_run, p.eta_seconds = True, None
            p.elapsed_seconds = logs["train_runtime"]
            p.samples_per_second = logs.get("train_samples_per_second")
            p.tokens_per_second = logs.get("train_tokens_per_second")


def _finite(value: Any, otherwise: float | None) -> float | None:
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else otherwise


def memory_in_use() -> int | None:
    """Bytes: torch's on the GPU once it uses one, else what is resident; None if the
    system does not say."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    return resident_bytes()


class ProgressCallback(TrainerCallback):
    """Shows how far a run is and how it goes: a line in a terminal, a page in a
    notebook, lines in a log. The logs that it is shown are never changed.

    Args:
        max_str_len (int, default 100): Longer texts among the logs are cut.

    Args of every method:
        args (TrainingArguments): The run's.
        state (TrainerState): How far the run is.
        control (TrainerControl): Not read.
        eval_dataloader: Of the evaluation, for its number of batches.
        metrics (dict): Of the evaluation or prediction.
        logs (dict): Numbers by name.
        **kwargs: Not read.

    Example:
        >>> from ctrainer import ProgressCallback
        >>> ProgressCallback(max_str_len=40).max_str_len
        40
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.mode = choose_mode(sys.stderr)
        self.interval = _INTERVALS.get(self.mode, math.inf)  # seconds
        self.due = 0.0  # monotonic time of the next look at a step or a batch
        self.predicted = 0  # batches since the last evaluation or prediction ended
        self.meter = Meter()
        self.line = Line(sys.stderr)
        self.training = False
        self.warnings: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.handle: Any = None
        self.next_draw = 0.0

    def __reduce__(self) -> Any:
        return type(self), (self.max_str_len,)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self.training, self.predicted, self.due = True, 0, 0.0
        self.warnings.clear()
        self.history = state.log_history
        self.handle = None
        self.meter.start(args, state)
        if self.mode == "live":
            self.line.hold()
        if state.global_step > 0:
            self._say_resumed(state)
        self._draw(state, force=True)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self.due:
            return False
        self.due = now + self.interval
        return True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.seen = time.monotonic()
        if self._is_due():
            self.meter.move(args, state)
            self._draw(state)

    def on_prediction_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        self.predicted += 1
        if self._is_due():
            if self.mode == "live":
                self.line.hold()
            of = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.meter.progress.evaluating = (self.predicted, of)
            self.meter.progress.step = state.global_step
            self._draw(state)

    def _end_prediction(self) -> None:
        self.predicted, self.due = 0, 0.0
        self.meter.progress.evaluating = None
        self.meter.resume()

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._end_prediction()
        if self.training:
            self.meter.move(args, state)
        if self.mode == "live" and state.is_world_process_zero and metrics:
            self.line.finish(evaluation_line(state.global_step, metrics))
        if self.training:
            self._draw(state, force=True)
        else:
            self._end_alone(state, metrics)

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._end_prediction()
        if not self.training:
            self._end_alone(state, metrics)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        step = state.global_step
        self.meter.note(logs, step)
        self._note_nonfinite(logs, step)
        if self.mode in ("plain", "json"):
            self._write(self._shortened(logs), step)
        elif self.mode == "live" and not _is_evaluation(logs):
            self._finish_unusual(logs, step)
        if self.training and self._may_draw():
            self.meter.move(args, state)
            self._draw(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training:
            self.meter.move(args, state)
        self._draw(state, force=True)
        self.training = False
        if self.mode == "live":
            release()
        if not state.is_world_process_zero or self.mode == "json":
            return
        first = getattr(state, "resumed_at", 0)
        table = "\n".join(summary(state.log_history, state.global_step, first))
        if self.mode == "notebook":
            self.handle = None
            self._show("", table)  # as text alone: the page has it
            self.handle = None
        else:
            print(table, file=self.line.stream if self.mode == "live" else sys.stdout)

    def _may_draw(self) -> bool:
        return self.mode in _INTERVALS and time.monotonic() >= self.next_draw

    def _draw(self, state: Any, *, force: bool = False) -> None:
        """Show the progress, unless that was done a moment ago. A picture that takes
        long to make is made less often: it must not slow the run down."""
        idle = not self.training and self.meter.progress.evaluating is None
        if not state.is_world_process_zero or idle or not (force or self._may_draw()):
            return
        begun = time.monotonic()
        if self.mode == "live":
            self.line.draw(self.meter.progress)
        elif self.mode == "notebook":
            self._show(*self._page())
        ended = time.monotonic()
        pause = max(self.interval, _DRAWING_SHARE * (ended - begun))
        self.next_draw = ended + pause

    def _page(self) -> tuple[str, str]:
        """What a notebook shows: HTML, and text for where there is none."""
        text = render(self.meter.progress, _TEXT_COLUMNS)
        if not self.training:
            return line(text), text
        return page(self.meter.progress, self.history, self.warnings), text

    def _show(self, html: str, text: str) -> None:
        from IPython.display import display

        frame = {"text/html": html, "text/plain": text}
        if self.handle is None:
            self.handle = display(frame, raw=True, display_id=True)
        else:
            self.handle.update(frame, raw=True)

    def _say_resumed(self, state: Any) -> None:
        """The step and the folder that the run resumes from: a line, or a log."""
        folder, step = getattr(state, "resumed_from", ""), state.global_step
        text = f"resumed from step {step}" + (f": {folder}" if folder else "")
        self.meter.progress.resumed = text
        if self.mode == "live" and state.is_world_process_zero:
            self.line.finish(text)
        elif self.mode in ("plain", "json") and state.is_world_process_zero:
            self._write({"resumed_from": folder}, step)

    def _end_alone(self, state: Any, metrics: Mapping[str, Any] | None) -> None:
        """End what an evaluation or a prediction outside of training has shown."""
        text = evaluation_line(state.global_step, metrics) if metrics else ""
        if self.mode == "live":
            if state.is_world_process_zero:
                self.line.clear()
            release()
        elif self.mode == "notebook" and state.is_world_process_zero:
            self._show(line(text), text)
            self.handle = None

    def _write(self, logs: Mapping[str, Any], step: int) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if self.mode == "json":
            wall = time.monotonic() - self.meter.started
            print(log_json(logs, step, now, wall), flush=True)
        else:
            print(log_line(logs, step, now), flush=True)

    def _shortened(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        limit = self.max_str_len
        return {
            name: f"{value[:limit]}... ({len(value)} characters)"
            if isinstance(value, str) and len(value) > limit
            else value
            for name, value in logs.items()
        }

    def _note_nonfinite(self, logs: Mapping[str, Any], step: int) -> None:
        count = logs.get("nonfinite_steps")
        if not count or ends_run(logs):
            return
        note = f"step {step}: gradients NaN or Inf, updates affected: {count}"
        self.warnings.append(note)
        if self.mode == "live":
            self.line.finish(f"warning: {note}")

    def _finish_unusual(self, logs: Mapping[str, Any], step: int) -> None:
        """Numbers that the live line has no place for get a line of their own."""
        others = {
            name: value
            for name, value in self._shortened(logs).items()
            if name not in _SHOWN and not name.startswith("train_")
        }
        if others:
            parts = [
                f"{k} {number(v) if isinstance(v, int | float) else v}"
                for k, v in others.items()
            ]
            self.line.finish("  ".join([f"log {step}", *parts]))


def _is_evaluation(logs: Mapping[str, Any]) -> bool:
    return any(name.endswith("_runtime") and name != "train_runtime" for name in logs)


class NotebookProgressCallback(ProgressCallback):
    """The display, whatever the output, as in a notebook."""

    def __init__(self, max_str_len: int = 100) -> None:
        super().__init__(max_str_len)
        self.mode, self.interval = "notebook", _INTERVALS["notebook"]
