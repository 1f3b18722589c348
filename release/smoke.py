"""Does an installed ctrainer work, with NumPy alone? Run by the Python to be asked.

A network is trained and its run resumed from a checkpoint; the weights after one update
are compared with the formula in NumPy. Imports nothing of the sources.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import ctrainer
from ctrainer import Trainer, TrainingArguments
from ctrainer.adapters.numpy import Loss, Parameter

ROWS, BATCH, LEARNING_RATE = 32, 8, 0.1
DRAW = np.random.default_rng(0)
INPUTS = DRAW.standard_normal((ROWS, 5)).astype(np.float32)
TARGETS = (INPUTS @ np.arange(5, dtype=np.float32)).astype(np.float32)


class Line:
    """y = x w, with half the mean of the squared errors as its loss."""

    def __init__(self) -> None:
        self.w = Parameter(np.zeros(5, np.float32))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "w", self.w

    def parameters(self) -> Iterator[Parameter]:
        yield self.w

    def __call__(self, x: Any, y: Any) -> dict[str, Any]:
        error = x @ self.w.data - y

        def backward(scale: float) -> None:
            self.w.accumulate(x.T @ error * np.float32(scale / len(x)))

        return {"loss": Loss(float((error**2).mean() / 2), backward)}


def trained(folder: str, steps: int, batch: int, resume: bool = False) -> Any:
    """The weights after so many updates of SGD, from the checkpoint or from zeros."""
    model = Line()
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=batch, optim="sgd",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0.0,
        save_steps=2, report_to="none", logging_strategy="no",
    )  # fmt: skip
    data = [{"x": x, "y": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return model.w.data


def check_training(folder: str) -> None:
    update = LEARNING_RATE * INPUTS.T @ TARGETS / ROWS
    got = trained(f"{folder}/1", 1, ROWS)
    assert np.allclose(got, update, rtol=1e-5), f"{got}, and {update} by the formula"
    whole = trained(f"{folder}/6", 6, BATCH)
    trained(f"{folder}/2", 2, BATCH)
    resumed = trained(f"{folder}/2", 6, BATCH, resume=True)
    assert resumed.tobytes() == whole.tobytes(), f"resumed {resumed}, whole {whole}"


def check_plugin() -> None:
    from ctrainer import _cuda

    assert Path(_cuda.__file__).parent.name == "ctrainer_cuda13", _cuda
    assert _cuda.versions()["runtime"].split(".")[0] == "13", _cuda.versions()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--plugin", action="store_true", help="ctrainer-cuda13 is there"
    )
    options = parser.parse_args()
    here = Path(ctrainer.__file__).resolve()
    assert here.is_relative_to(sys.prefix), f"{here} is not of the environment"
    assert version("ctrainer") == ctrainer.__version__
    with tempfile.TemporaryDirectory() as folder:
        check_training(folder)
    if options.plugin:
        check_plugin()
    script = Path(sys.executable).with_name("ctrainer")
    for option, expected in (
        ("--version", ctrainer.__version__),
        ("env", str(here.parent)),
    ):
        done = subprocess.run([script, option], capture_output=True, text=True)
        assert done.returncode == 0, done
        assert expected in done.stdout, done
    print(
        f"Python {sys.version.split()[0]}, NumPy {np.__version__}: {here.parent} works"
    )


if __name__ == "__main__":
    main()
