"""evaluate and predict of models that are all NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_alone

from ctrainer import _C, Trainer, TrainingArguments
from ctrainer.adapters.numpy import Loss, Parameter
from ctrainer.trainer import evaluation
from ctrainer.trainer.data import Reading, begin_reading


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


def test_the_loop_survives_every_failed_allocation(tmp_path: Path) -> None:
    testcapi = pytest.importorskip("_testcapi")
    args = TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True)
    trainer = Trainer(Model(), args)
    batches = [{"x": np.ones((2, 3)), "labels": np.ones(2)}] * 2
    take = evaluation._taker(trainer, trainer.model, False, None)
    begin_reading(trainer, Reading(batches))

    def run() -> tuple[Any, ...]:
        sinks = (_C.ArrayAccumulator(), [], [])
        losses: list[float] = []
        counts = trainer._evaluate_batches(
            take, batches, sinks, max_waiting=1, keeps_values=True, by_token=False,
            keep_losses=lambda loss, rows: losses.append(loss), on_batch=None,
            exchange=None, parts=None,
        )  # fmt: skip
        return counts, losses, sinks[0].result().tolist(), len(sinks[1])

    wanted = (2, 4, 2.0, None), [2.0, 2.0], [[2.0] * 3] * 4, 2
    assert run() == wanted
    found = None
    for start in range(2000):
        testcapi.set_nomemory(start)
        try:
            found = run()
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        if found is not None:
            break
    assert start > 50  # or the loop would not have been tried at all
    assert found == wanted
