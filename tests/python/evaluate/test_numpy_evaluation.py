"""evaluate and predict of models that are all NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_alone

from ctrainer import Trainer, TrainingArguments
from ctrainer.adapters.numpy import Loss, Parameter


def test_evaluates_and_predicts_without_torch(tmp_path: Path) -> None:
    done = run_alone("evaluate.numpy_model", str(tmp_path))
    assert done.returncode == 0, done.stderr


class Model:
    """Doubles its input; the loss is the mean."""

    def __init__(self) -> None:
        self.factor = Parameter(np.full(1, 2.0))

    def parameters(self) -> list[Parameter]:
        return [self.factor]

    def __call__(self, x: Any, labels: Any = None) -> dict[str, Any]:
        y = x * self.factor.data
        return {"loss": Loss(y.mean(), lambda scale: None), "y": y}


def test_survives_every_failed_allocation(tmp_path: Path) -> None:
    testcapi = pytest.importorskip("_testcapi")
    args = TrainingArguments(
        str(tmp_path),
        per_device_eval_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        include_for_metrics=["loss"],
        dataloader_seed_by_place=False,  # NumPy's seed() does not survive it
    )
    trainer = Trainer(Model(), args, compute_metrics=lambda p: {"n": len(p.losses)})
    batches = [{"x": np.ones((2, 3)), "labels": np.ones(2)}] * 2
    wanted = trainer.evaluation_loop(batches, "Evaluation")
    assert wanted.metrics == {"eval_loss": 2.0, "eval_n": 4}
    output = None
    for start in range(2000):
        testcapi.set_nomemory(start)
        try:
            output = trainer.evaluation_loop(batches, "Evaluation")
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        if output is not None:
            break
    assert start > 100  # or the loop would not have been tried at all
    assert output.metrics == wanted.metrics
    np.testing.assert_array_equal(output.predictions, wanted.predictions)
