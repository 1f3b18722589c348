"""accelerate's Accelerator as a Trainer's own: it shows the state of ctrainer's loops.

Its collectives, prepare() and files are accelerate's. The loss scale, skipped updates
and the wrapper of the model are ctrainer's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import accelerate

from ctrainer.comm.data_parallel import DataParallel


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The accelerator of a trainer, whose model and optimizer it has as prepared."""

    def __init__(self, trainer: Any, **options: Any) -> None:
        super().__init__(**options)
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self.scaler: Any = LossScale(self._trainer) if trainer.args.fp16 else None
        self.gradient_state._set_sync_gradients(trainer._syncs_gradients)
        self.gradient_state.dataloader_references = [None]
        for reading in trainer._readings:
            self.gradient_state._add_dataloader(reading)
        if trainer._run is not None:
            self.take(trainer)

    def take(self, trainer: Any) -> None:
        """Have the model and the optimizer that a run begins with, and nothing else."""
        self.free_memory()
        self._models.append(trainer.model_wrapped)
        self._optimizers.append(trainer.optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped, of the trainer or of an optimizer that
        the script has prepared."""
        trainer = self._trainer()
        if trainer is not None:
            trainer._await_update()
            if trainer._skipped_update:
                return True
        return any(getattr(o, "step_was_skipped", False) for o in self._optimizers)

    def unwrap_model(
        self,
        model: Any,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> Any:
        """The model within its wrappers, ctrainer's among them."""
        while isinstance(model, DataParallel):
            model = model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)


class LossScale:
    """A trainer's loss scale by the names of torch's GradScaler, for backward() and for
    optimizers that a script has prepared. The trainer's own update unscales, and sets
    the next scale."""

    def __init__(self, trainer: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._unscaled: set[int] = set()  # optimizers, since their last step

    def _scale(self, like: Any) -> Any:
        scale = self._trainer()._scale_of(like)
        return 1.0 if scale is None else scale

    def get_scale(self) -> float:
        scaler = self._trainer()._loss_scaler
        return 1.0 if scaler is None else float(scaler.scale)

    def scale(self, loss: Any) -> Any:
        return loss * self._scale(loss)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale; the trainer's update finds its own so."""
        if optimizer is self._trainer().optimizer or id(optimizer) in self._unscaled:
            return
        self._unscaled.add(id(optimizer))
        for p in _trained(optimizer):
            p.grad.div_(self._scale(p.grad))

    def step(self, optimizer: Any, *args: Any) -> Any:
        """Unscale and step, unless a gradient is Inf or NaN."""
        self.unscale_(optimizer)
        self._unscaled.discard(id(optimizer))
        finite = all(bool(p.grad.isfinite().all()) for p in _trained(optimizer))
        return optimizer.step(*args) if finite else None

    def update(self, new_scale: float | None = None) -> None:
        """Nothing: the trainer sets the scale."""

    def is_enabled(self) -> bool:
        return self._trainer()._loss_scaler is not None

    def state_dict(self) -> dict[str, Any]:
        scaler = self._trainer()._loss_scaler
        return {} if scaler is None else dict(scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._trainer()._loss_scaler.load_state_dict(state)


def _trained(optimizer: Any) -> list[Any]:
    every = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in every if p.grad is not None]
