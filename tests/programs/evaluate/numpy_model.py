"""Evaluation and prediction of a model that is all NumPy."""

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


def largest(p):
    return {"largest": p.predictions.max()}


rows = [row(i) for i in range(10)]
args = TrainingArguments(
    sys.argv[1], per_device_eval_batch_size=4, report_to="none", disable_tqdm=True
)
trainer = Trainer(Line(), args, eval_dataset=rows, compute_metrics=largest)
x, labels = (np.stack([r[k] for r in rows]) for k in ("x", "labels"))
y = x @ np.full((2, 3), 0.5)

metrics = trainer.evaluate()
assert np.isclose(metrics["eval_loss"], ((y - labels) ** 2).mean(), rtol=1e-15)
assert metrics["eval_largest"] == y.max()
assert type(metrics["eval_largest"]) is float
output = trainer.predict([{"x": r["x"]} for r in rows])
assert output.predictions.dtype == np.float64
assert (output.predictions == y).all()
assert output.label_ids is None
assert "test_loss" not in output.metrics
output = trainer.predict(rows)
assert (output.label_ids == labels).all()
assert "torch" not in sys.modules
