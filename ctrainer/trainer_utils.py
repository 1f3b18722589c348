"""What trainers return, seeds, speeds, and metrics as text and files.

Source: transformers 5.17, trainer_utils.py and trainer_pt_utils.py (names and fields).
"""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ctrainer.enums import (
    EvaluationStrategy,
    HubStrategy,
    IntervalStrategy,
    SaveStrategy,
    SchedulerType,
)

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "EvalLoopOutput",
    "EvalPrediction",
    "EvaluationStrategy",
    "HubStrategy",
    "IntervalStrategy",
    "PredictionOutput",
    "SaveStrategy",
    "SchedulerType",
    "TrainOutput",
    "denumpify_detensorize",
    "enable_full_determinism",
    "get_last_checkpoint",
    "has_length",
    "metrics_format",
    "print_metrics",
    "seed_loaded",
    "seed_worker",
    "set_seed",
    "speed_metrics",
    "write_metrics",
]

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


class EvalPrediction:
    """The argument of compute_metrics. Unpacks and indexes like a tuple of the parts
    that are not None.

    Args:
        predictions: Outputs of all rows: an array of shape (rows, ...), or a tuple of
            them.
        label_ids: Labels of all rows, likewise.
        inputs (default None): Inputs of all rows, with include_for_metrics=["inputs"].
        losses (default None): Loss of each batch, with include_for_metrics=["loss"].

    Example:
        >>> from ctrainer import EvalPrediction
        >>> predictions, labels = EvalPrediction(predictions=[1, 0], label_ids=[1, 1])
        >>> labels
        [1, 1]
    """

    def __init__(
        self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None
    ) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        more = tuple(part for part in (inputs, losses) if part is not None)
        self.elements = (predictions, label_ids, *more)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, idx: int) -> Any:
        if not 0 <= idx < len(self.elements):
            raise IndexError(f"index {idx} of {len(self.elements)} elements")
        return self.elements[idx]


class EvalLoopOutput(NamedTuple):
    """What evaluation_loop returns.

    Args:
        predictions: Outputs of all rows.
        label_ids: Labels of all rows; None without.
        metrics (dict[str, float] | None): Results by name.
        num_samples (int | None): Rows.

    Example:
        >>> from ctrainer.trainer_utils import EvalLoopOutput
        >>> EvalLoopOutput(None, None, {"eval_loss": 0.5}, 8).num_samples
        8
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What predict returns.

    Args:
        predictions: Outputs of all rows.
        label_ids: Labels of all rows; None without.
        metrics (dict[str, float] | None): Results by name.

    Example:
        >>> from ctrainer.trainer_utils import PredictionOutput
        >>> PredictionOutput([1, 0], None, {"test_loss": 0.5}).metrics
        {'test_loss': 0.5}
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """What train returns.

    Args:
        global_step (int): Updates done.
        training_loss (float): Mean loss over them.
        metrics (dict[str, float]): Times, rates and totals of the run by name.

    Example:
        >>> from ctrainer.trainer_utils import TrainOutput
        >>> TrainOutput(10, 0.25, {}).global_step
        10
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed random, NumPy and, where it is installed, torch (which this imports).

    Args:
        seed (int): In [0, 2**32), which is NumPy's range.
        deterministic (bool, default False): Let torch use deterministic algorithms
            alone.

    Example:
        >>> import random
        >>> from ctrainer import set_seed
        >>> set_seed(1)
        >>> first = random.random()
        >>> set_seed(1)
        >>> random.random() == first
        True
    """
    seed_loaded(seed)
    if find_spec("torch") is None:
        return
    from ctrainer.runtime import torch_process

    torch_process.seed_torch(seed)
    if deterministic:
        torch_process.be_deterministic()


def seed_loaded(seed: int) -> None:
    """Seed random and NumPy, and torch if it has been imported.

    Args:
        seed (int): In [0, 2**32).
    """
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        from ctrainer.runtime import torch_process

        torch_process.seed_torch(seed)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed, and let torch and CUDA use deterministic algorithms alone.

    Sets environment variables that CUDA reads when it starts: call it before.

    Args:
        seed (int): In [0, 2**32).
        warn_only (bool, default False): Warn of an operation without a deterministic
            algorithm instead of raising.
    """
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    set_seed(seed)
    if find_spec("torch") is not None:
        from ctrainer.runtime import torch_process

        torch_process.be_deterministic(warn_only)


def seed_worker(worker_id: int, num_workers: int = 0, rank: int = 0) -> None:
    """Seed a worker of a DataLoader; torch has given each its own initial seed.

    Args:
        worker_id (int): Not read: DataLoader passes it.
        num_workers (int, default 0): Workers of each rank.
        rank (int, default 0): The rank, so that no two ranks' workers have the same
            seed.
    """
    from ctrainer.runtime import torch_process

    set_seed(num_workers * rank + torch_process.initial_seed())


def has_length(dataset: Any) -> bool:
    """Return whether len() of it works.

    Args:
        dataset: Any object.
    """
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):  # Ray's data sets raise the latter
        return False


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the folder checkpoint-N of the highest N, whole or not; None without one.

    Args:
        folder (str | os.PathLike[str]): Where to look.
    """
    steps = {
        int(match[1]): name
        for name in os.listdir(folder)
        if (match := _CHECKPOINT.match(name)) and os.path.isdir(Path(folder, name))
    }
    return os.path.join(folder, steps[max(steps)]) if steps else None


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return seconds and rates, named `split`_runtime, `split`_samples_per_second and
    so on.

    Args:
        split (str): Prefix of the names, such as "eval".
        start_time (float): In seconds, as time.time() returned it.
        num_samples (int | None, default None): Rows since; None: no rate of rows.
        num_steps (int | None, default None): Updates or batches since; None: no rate.
        num_tokens (int | None, default None): Tokens since; None: no rate.
    """
    runtime = time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime, 4)}
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    for name, count in counts.items():
        if count is not None and runtime > 0:
            rate = count / runtime
            rounded = round(rate, 3) if rate >= 1 else float(f"{rate:.4g}")
            metrics[f"{split}_{name}_per_second"] = rounded
    return metrics


def denumpify_detensorize(metrics: Any) -> Any:
    """Return the same structure with NumPy's and torch's single numbers as Python's.

    Args:
        metrics: Dicts, lists and tuples, nested as you like.
    """
    if isinstance(metrics, list | tuple):
        return type(metrics)(denumpify_detensorize(m) for m in metrics)
    if isinstance(metrics, dict):
        return type(metrics)({k: denumpify_detensorize(v) for k, v in metrics.items()})
    if isinstance(metrics, np.generic):
        return metrics.item()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(metrics, torch.Tensor) and metrics.numel() == 1:
        return metrics.item()
    return metrics


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics as people read them: memory in MB, times as h:mm:ss, 4 decimals.

    Args:
        metrics (dict[str, Any]): Numbers by name.
    """
    return {name: _readable(name, value) for name, value in metrics.items()}


def _readable(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        return _clock(value)
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _clock(seconds: float) -> str:
    """h:mm:ss.cc, cut, not rounded, to hundredths."""
    whole = str(datetime.timedelta(seconds=int(seconds)))
    return f"{whole}.{int(abs(seconds - int(seconds)) * 100):02d}"


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print metrics as an aligned list under the name of the split.

    Args:
        split (str): "train", "eval" and so on.
        metrics (dict[str, Any]): Numbers by name.
    """
    shown = {name: str(value) for name, value in metrics_format(metrics).items()}
    widest = max(map(len, shown), default=0)
    rightmost = max(map(len, shown.values()), default=0)
    print(f"***** {split} metrics *****")
    for name in sorted(shown):
        print(f"  {name:<{widest}} = {shown[name]:>{rightmost}}")


def write_metrics(
    output_dir: str | os.PathLike[str],
    split: str,
    metrics: dict[str, Any],
    combined: bool = True,
) -> None:
    """Write `split`_results.json.

    Args:
        output_dir (str | os.PathLike[str]): Folder, which is made where it is missing.
        split (str): "train", "eval" and so on.
        metrics (dict[str, Any]): Numbers by name.
        combined (bool, default True): Also add them to all_results.json.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    _write_json(Path(output_dir, f"{split}_results.json"), metrics)
    if combined:
        path = Path(output_dir, "all_results.json")
        known = json.loads(path.read_text()) if path.exists() else {}
        _write_json(path, {**known, **metrics})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=4, sort_keys=True))
