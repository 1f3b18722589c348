"""Memory figures among the metrics: what `skip_memory_metrics=False` asks for.

Source: transformers 5.17, trainer_utils.py (names of the stages and of the metrics).
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import sys
from typing import Any

_STAGES = {
    "__init__": "init",
    "train": "train",
    "_inner_training_loop": "train",
    "evaluate": "eval",
    "predict": "test",
}


def _torch() -> Any:
    """torch if it is loaded and uses a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def resident_bytes() -> int | None:
    """Resident memory of the process; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _peak_bytes() -> int:
    """Highest resident memory since it was last reset, or ever."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> None:
    """Linux forgets the peak on request; elsewhere it stays that of the process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


class TrainerMemoryTracker:
    """Measures memory over a stage: init, train, eval or test.

    A stage begun inside another (an evaluation while training) is not measured on its
    own: the outer one covers it. Without `stage` the name of the calling function says.
    """

    stages = _STAGES

    def __init__(self, skip_memory_metrics: bool = False) -> None:
        self.skip_memory_metrics = skip_memory_metrics
        self.cur_stage: str | None = None
        self.init_reported = False
        self.cpu: dict[str, dict[str, int]] = {}
        self.gpu: dict[str, dict[str, int]] = {}

    def start(self, stage: str | None = None) -> None:
        """Begin to measure."""
        if self.skip_memory_metrics:
            return
        stage = stage or _calling_stage()
        if self.cur_stage not in (None, stage):
            return
        self.cur_stage = stage
        gc.collect()
        _reset_peak()
        self._begin_cpu = resident_bytes() or 0
        if (torch := _torch()) is not None:
            torch.cuda.reset_peak_memory_stats()
            self._begin_gpu = torch.cuda.memory_allocated()

    def stop_and_update_metrics(
        self, metrics: dict[str, Any] | None = None, stage: str | None = None
    ) -> None:
        """End the stage and add its figures, in bytes, to the metrics."""
        if self.skip_memory_metrics:
            return
        stage = stage or _calling_stage()
        if self.cur_stage != stage:
            return
        self._stop(stage)
        if metrics is not None:
            self._report(stage, metrics)

    def _stop(self, stage: str) -> None:
        gc.collect()
        now = resident_bytes() or 0
        self.cpu[stage] = _figures(self._begin_cpu, now, _peak_bytes())
        if (torch := _torch()) is not None:
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            self.gpu[stage] = _figures(self._begin_gpu, now, peak)
        self.cur_stage = None

    def _report(self, stage: str, metrics: dict[str, Any]) -> None:
        stages = [stage] if self.init_reported else ["init", stage]
        self.init_reported = True
        memories = (("cpu", self.cpu), ("gpu", self.gpu))
        for name, (where, figures) in itertools.product(stages, memories):
            for kind in ("alloc", "peaked") if name in figures else ():
                metrics[f"{name}_mem_{where}_{kind}_delta"] = figures[name][kind]
        for where, figures in memories:
            if stages[0] == "init" and "init" in figures:
                metrics[f"before_init_mem_{where}"] = figures["init"]["begin"]


def _figures(begin: int, end: int, peak: int) -> dict[str, int]:
    return {
        "begin": begin,
        "end": end,
        "alloc": end - begin,
        "peaked": max(0, peak - end),
    }


def _calling_stage() -> str:
    """The stage that the function is, which called a method of the tracker."""
    name = sys._getframe(2).f_code.co_name
    if name not in _STAGES:
        raise ValueError(
            f"memory is measured over {', '.join(_STAGES)}, not over {name}; say which "
            "stage it is"
        )
    return _STAGES[name]
