"""A script run on transformers' Trainer and on ours, and all that differs afterwards.

A script is a function of a `Lab`. What it imports from transformers, it takes from
`lab.hf`; it gives every trainer `callbacks=[lab.watch]`, and returns a trainer, with
the numbers that it has got, for `lab.show`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers

import ctrainer
from ctrainer.hf import unpatch_transformers

TIMES = re.compile(r"runtime|per_second|preparation_time|_mem_")
# Where rounding differs: norms are summed in another precision, updates in another
# order of operations. Relative; and of a tensor's largest element.
ROUNDING = 1e-4
COARSE = 0.05  # of bfloat16
# A gradient of which all cancels, such as that of a key's bias, is rounding alone, and
# so is what it updates.
NOISE = 5e-5
FLAGS = (
    "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate",
    "should_log",
)  # fmt: skip


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Every event: what it was given, the state, the control, the generators."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **given: Any) -> None:
            seen = {"event": name, "given": sorted(given)}
            seen["state"] = state_of(state)
            seen["control"] = {flag: getattr(control, flag) for flag in FLAGS}
            for key in ("logs", "metrics"):
                if key in given:
                    seen[key] = without_times(given[key])
            if "optimizer" in given and given["optimizer"] is not None:
                groups = given["optimizer"].param_groups
                seen["learning_rates"] = [float(group["lr"]) for group in groups]
            if name == "on_pre_optimizer_step":
                found = [p.grad for p in given["model"].parameters()]
                seen["clipped_norm"] = torch.stack(
                    [g.double().square().sum() for g in found if g is not None]
                ).sum().sqrt().item()  # fmt: skip
            seen["generators"] = generators()
            self.events.append(seen)

        return event


def state_of(state: Any) -> dict[str, Any]:
    """The fields of a TrainerState by name; how long the log is, which is compared at
    the end."""
    found = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return json.loads(json.dumps({**found, "log_history": len(state.log_history)}))


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    """The same, in the same order, None for what depends on the clock."""
    return {k: None if TIMES.search(k) else v for k, v in values.items()}


def generators() -> dict[str, str]:
    """A digest of the state of each of the process's generators."""
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()[1].tolist()).encode(),  # type: ignore[index]
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {name: hashlib.md5(s).hexdigest() for name, s in states.items()}


class Lab:
    """What a script runs with.

    hf: transformers, or where `ours` says so what of ctrainer has the same names.
    """

    def __init__(self, hf: Any, ours: bool) -> None:
        self.hf, self.ours, self.watch = hf, ours, Watch()
        self.batches: dict[str, list[Any]] = {"training": [], "evaluation": []}
        self.shown: list[Any] = []

    def see(self, model: Any) -> Any:
        """Keep a digest of every batch that the model gets; returns the model."""

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            batch = {k: digest(v) for k, v in kwargs.items()}
            self.batches["training" if module.training else "evaluation"].append(batch)

        model.register_forward_pre_hook(keep, with_kwargs=True)
        return model

    def show(self, value: Any) -> None:
        """Compare this, too: nested numbers, arrays and texts."""
        self.shown.append(timeless(value))

    def equal_shares(self, trainer: Any) -> Any:
        """Say that the model takes no count, which its signature seems to promise:
        transformers then weighs micro-batches alike instead of adding their losses up;
        returns the trainer."""
        trainer.model_accepts_loss_kwargs = False
        return trainer


def digest(value: Any) -> Any:
    """Shape, dtype and a sum that depends on the order; of what is no array whether it
    is there: our count of items must not be read."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value is not None
    data = value.detach().float().double()
    weights = torch.arange(1, data.numel() + 1).double()
    return [list(value.shape), str(value.dtype), float(data.flatten() @ weights)]


Script = Callable[[Lab], Any]


def run(script: Script, folder: Path, *, ours: bool, hf: Any) -> dict[str, Any]:
    """Everything that is seen of the script in a folder of its own."""
    folder.mkdir(exist_ok=True)  # of every rank
    before = os.getcwd()
    os.chdir(folder)
    lab = Lab(hf, ours)
    if ours:
        ctrainer.patch_transformers()
    transformers.set_seed(11)
    found: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = script(lab)
        found = ends_of(trainer)
    finally:
        if ours:
            unpatch_transformers()
        os.chdir(before)
    assert isinstance(trainer, ctrainer.Trainer) is ours
    found |= {
        "events": lab.watch.events, "batches": lab.batches, "shown": lab.shown,
        # Rank 0 is the last that writes.
        "files": files_of(folder) if os.environ.get("RANK", "0") == "0" else {},
        "generators": generators(),
    }  # fmt: skip
    return found


def ends_of(trainer: Any) -> dict[str, Any]:
    state = trainer.state
    model = torch.nn.Module() if trainer.model is None else trainer.model
    return {
        "state": state_of(state),
        "log_history": [without_times(entry) for entry in state.log_history],
        "weights": dict(model.state_dict()),
        "training": model.training,
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "control": {flag: getattr(trainer.control, flag) for flag in FLAGS},
        "callbacks": [
            type(c).__name__ for c in trainer.callback_handler.callbacks
        ],
        "optimizer": trainer.optimizer and trainer.optimizer.state_dict(),
        "lr": None if trainer.lr_scheduler is None
        else trainer.lr_scheduler.get_last_lr(),
    }  # fmt: skip


def files_of(folder: Path) -> dict[str, Any]:
    """The content of every file, by its path."""
    return {
        str(path.relative_to(folder)): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def content(path: Path) -> Any:
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text()))
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return {"metadata": file.metadata(), "tensors": tensors}
    if path.suffix in (".pt", ".pth", ".bin"):
        made = torch.load(path, weights_only=False)
        return made.to_dict() if hasattr(made, "to_dict") else made
    return path.read_text().splitlines() if path.suffix == ".md" else path.read_bytes()


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return without_times({k: timeless(v) for k, v in value.items()})
    return [timeless(v) for v in value] if isinstance(value, list) else value


# ---- Comparison


@dataclasses.dataclass(frozen=True)
class Difference:
    path: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        if isinstance(self.theirs, torch.Tensor) and isinstance(
            self.ours, torch.Tensor
        ):
            if self.theirs.shape == self.ours.shape:
                far = (self.theirs.double() - self.ours.double()).abs().max()
                return (
                    f"{self.path}: differ by {far:.2g} of {self.theirs.abs().max():.2g}"
                )
        return (
            f"{self.path}: transformers {self.theirs!s:.150}; ours {self.ours!s:.150}"
        )


ABSENT = "absent"


def differences(
    theirs: Any, ours: Any, rounding: float = ROUNDING, path: str = ""
) -> Iterator[Difference]:
    """Where two nested values differ. Floats may differ by rounding, unless they are
    counted or scheduled; names, their order, and types may not."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = list(theirs), list(ours)
        for name in {**theirs, **ours}:
            own = f"{path}/{name}"
            if name not in ours or name not in theirs:
                yield Difference(own, theirs.get(name, ABSENT), ours.get(name, ABSENT))
            else:
                yield from differences(theirs[name], ours[name], rounding, own)
        both = [[n for n in each if n in theirs and n in ours] for each in names]
        if both[0] != both[1]:
            yield Difference(f"{path}/(order)", both[0], both[1])
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        if len(theirs) != len(ours):
            yield Difference(f"{path}/(length)", len(theirs), len(ours))
        for i, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            yield from differences(a, b, rounding, f"{path}/{i}")
    elif not same(theirs, ours, rounding, path):
        yield Difference(path, theirs, ours)


EXACT = re.compile(r"(learning_rates?|lr|epoch|total_flos|betas|eps)(/\d+)*$")


def same(theirs: Any, ours: Any, rounding: float, path: str) -> bool:
    if isinstance(theirs, torch.Tensor | np.ndarray):
        if type(theirs) is not type(ours) or theirs.dtype != ours.dtype:
            return False
        a, b = as_array(theirs), as_array(ours)
        if a.shape != b.shape:
            return False
        if a.dtype.kind != "f":
            return np.array_equal(a, b)
        largest = np.abs(np.nan_to_num(a)).max(initial=0.0)
        bound = max(rounding * largest, 1e-16 if path.endswith("_sq") else 1e-8)
        if largest < NOISE:
            bound = NOISE
        return np.allclose(a, b, 0, bound, equal_nan=True)
    if type(theirs) is not type(ours):
        return False
    if isinstance(theirs, float):
        if EXACT.search(path) or path.startswith("/batches"):
            return theirs == ours
        if math.isnan(theirs):
            return math.isnan(ours)
        return math.isclose(theirs, ours, rel_tol=rounding, abs_tol=1e-12)
    return bool(theirs == ours)


def as_array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.float() if value.dtype == torch.bfloat16 else value
        return value.numpy()
    return value
