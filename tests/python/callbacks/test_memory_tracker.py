"""Memory figures among the metrics."""

import numpy as np
import pytest

from ctrainer import _C
from ctrainer.memory_tracker import TrainerMemoryTracker

MEGABYTE = 1 << 20


def test_allocations_and_peaks_are_measured() -> None:
    _C.malloc_tune(False)  # an earlier training run may have freed memory kept
    tracker, metrics = TrainerMemoryTracker(), {}
    tracker.start("init")
    tracker.stop_and_update_metrics(stage="init")
    tracker.start("train")
    peak = np.ones(96 * MEGABYTE, dtype=np.int8)
    del peak
    kept = np.ones(32 * MEGABYTE, dtype=np.int8)
    tracker.stop_and_update_metrics(metrics, "train")
    assert kept[0] == 1
    # Other allocations of the process come and go meanwhile: within a few megabytes.
    assert metrics["train_mem_cpu_alloc_delta"] == pytest.approx(
        32 * MEGABYTE, abs=8 * MEGABYTE
    )
    assert metrics["train_mem_cpu_peaked_delta"] == pytest.approx(
        64 * MEGABYTE, abs=8 * MEGABYTE
    )
    assert metrics["before_init_mem_cpu"] > 0
    assert "init_mem_cpu_alloc_delta" in metrics


def test_init_is_reported_once_and_inner_stages_not_at_all() -> None:
    tracker, first, inner, second = TrainerMemoryTracker(), {}, {}, {}
    tracker.start("train")
    tracker.start("eval")
    tracker.stop_and_update_metrics(inner, "eval")
    tracker.stop_and_update_metrics(first, "train")
    tracker.start("eval")
    tracker.stop_and_update_metrics(second, "eval")
    assert inner == {}
    assert set(first) == {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"}
    assert set(second) == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}


def test_stage_is_that_of_the_calling_function() -> None:
    tracker, metrics = TrainerMemoryTracker(), {}

    def predict() -> None:
        tracker.start()
        tracker.stop_and_update_metrics(metrics)

    predict()
    assert "test_mem_cpu_alloc_delta" in metrics
    with pytest.raises(ValueError, match="say which stage it is"):
        tracker.start()


def test_nothing_is_measured_by_default(tmp_path) -> None:
    tracker, metrics = TrainerMemoryTracker(skip_memory_metrics=True), {}
    tracker.start()
    tracker.stop_and_update_metrics(metrics)
    assert metrics == {}


def test_trainer_reports_when_asked(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    import ctrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 4
    args = ctrainer.TrainingArguments(
        tmp_path, skip_memory_metrics=False, use_cpu=True, disable_tqdm=True
    )
    trainer = ctrainer.Trainer(Model(), args, eval_dataset=rows)
    metrics = trainer.evaluate()
    assert {"eval_mem_cpu_alloc_delta", "init_mem_cpu_alloc_delta"} <= set(metrics)
