"""evaluate and predict of models that are all NumPy."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctrainer import Trainer, TrainingArguments
from ctrainer.adapters.numpy import Loss, Parameter

SCRIPT = textwrap.dedent(
    """
    import sys
    import numpy as np
    from ctrainer import Trainer, TrainingArguments
    from ctrainer.adapters.numpy import Loss, Parameter

    class Line:
        def __init__(self):
            self.w = Parameter(np.full((2, 3), 0.5))

        def parameters(self):
            return [self.w]

        def __call__(self, x, labels=None):
            y = x @ self.w.data
            if labels is None:
                return {"y": y}
            loss = Loss(((y - labels) ** 2).mean(), lambda scale: None)
            return {"loss": loss, "y": y}

    def row(i):
        return {"x": np.float64([i, 1]), "labels": np.float64([i, 0, 1])}

    rows = [row(i) for i in range(10)]
    args = TrainingArguments(
        sys.argv[1], per_device_eval_batch_size=4, report_to="none", disable_tqdm=True
    )
    metric = lambda p: {"largest": p.predictions.max()}
    trainer = Trainer(Line(), args, eval_dataset=rows, compute_metrics=metric)
    x, labels = (np.stack([r[k] for r in rows]) for k in ("x", "labels"))
    y = x @ np.full((2, 3), 0.5)

    metrics = trainer.evaluate()
    assert np.isclose(metrics["eval_loss"], ((y - labels) ** 2).mean(), rtol=1e-15)
    assert metrics["eval_largest"] == y.max() and type(metrics["eval_largest"]) is float
    output = trainer.predict([{"x": r["x"]} for r in rows])
    assert output.predictions.dtype == np.float64 and (output.predictions == y).all()
    assert output.label_ids is None and "test_loss" not in output.metrics
    output = trainer.predict(rows)
    assert (output.label_ids == labels).all()
    assert "torch" not in sys.modules
    """
)


def test_evaluates_and_predicts_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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
