"""evaluate and predict of a model that is all NumPy, in a process without torch."""

import subprocess
import sys
import textwrap
from pathlib import Path

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
