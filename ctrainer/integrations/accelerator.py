"""accelerate's Accelerator as a Trainer's own: it shows the state of ctrainer's loops.

Its collectives, prepare() and files are accelerate's. The loss scale, skipped updates
and the wrapper of the model are ctrainer's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment

from ctrainer.arguments.fsdp import Sharding
from ctrainer.comm.data_parallel import DataParallel


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The accelerator of a trainer, whose model and optimizer it has as prepared."""

    _optimizers: list[Any]

    def __init__(self, trainer: Any, **options: Any) -> None:
        super().__init__(**options)
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self.scaler: Any = LossScale(self._trainer) if trainer.args.fp16 else None
        self.show_sharding(trainer._sharding)
        self.gradient_state._set_sync_gradients(trainer._syncs_gradients)
        self.gradient_state.dataloader_references = [None]
        for reading in trainer._readings:
            self.gradient_state._add_dataloader(reading)
        if trainer._run is not None:
            self.take(trainer)

    def take(self, trainer: Any) -> None:
        """Have the model and the optimizer that a run begins with, and nothing else."""
        self.free_memory()
        model = trainer.model_wrapped
        if model is not trainer.model or _is_sharded(model):
            model._is_accelerate_prepared = True  # prepare() returns it as it is
        self._models.append(model)
        self._optimizers.append(trainer.optimizer)

    def show_sharding(self, sharding: Sharding | None) -> None:
        """Have accelerate's plugin of the sharding in the state, None: have none.
        Clients shard models of their own by it, such as a reference."""
        shared = accelerate.state.AcceleratorState._shared_state
        shared.pop("fsdp_plugin", None)
        if sharding is not None:
            # The plugin sets this variable.
            with patch_environment(fsdp_cpu_ram_efficient_loading="false"):
                plugin = FullyShardedDataParallelPlugin(
                    fsdp_version=2, cpu_ram_efficient_loading=False,
                    reshard_after_forward=sharding.reshard_after_forward,
                    cpu_offload=sharding.cpu_offload and self.device.type != "cpu",
                )  # fmt: skip
            if self.mixed_precision != "no":
                plugin.set_mixed_precision(self.mixed_precision)
            shared["fsdp_plugin"] = plugin

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

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Any:
        """torch's Join of models that the script has prepared, on GPUs. ValueError for
        the trainer's model."""
        for model in joinables if self.multi_device else ():
            if isinstance(model, DataParallel) or _is_sharded(model):
                raise ValueError(
                    "join_uneven_inputs does not take the trainer's model: "
                    "even_batches in accelerator_config gives all ranks equally many "
                    "batches; prepare() another model to join"
                )
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float | str = 2
    ) -> Any:
        """Clip by the norm, without the loss scale and, of a sharded model, over all
        ranks; return the norm before."""
        parameters = _listed(parameters)
        sharded = self._sharded_with(parameters)
        clip = super().clip_grad_norm_
        scale = self._scale_of(parameters)
        if sharded is None:
            return clip(parameters, max_norm * scale, norm_type) / scale
        return sharded.clip_grad_norm_(max_norm * scale, norm_type) / scale

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        parameters = _listed(parameters)
        limit = clip_value * self._scale_of(parameters)
        super().clip_grad_value_(parameters, limit)

    def _scale_of(self, parameters: list[Any]) -> Any:
        """The loss scale that the gradients of the parameters have."""
        trainer = self._trainer()
        if self.scaler is None or trainer is None or not trainer._grads_scaled:
            return 1.0
        groups = trainer.optimizer.param_groups
        own = {id(p) for group in groups for p in group["params"]}
        scaled = [p.grad for p in parameters if id(p) in own and p.grad is not None]
        return self.scaler._scale(scaled[0]) if scaled else 1.0

    def _sharded_with(self, parameters: list[Any]) -> Any:
        """The sharded model whose parameters these are, or None."""
        given = {id(p) for p in parameters}
        for model in self._models:
            if not _is_sharded(model):
                continue
            own = {id(p) for p in model.parameters()}
            if own & given and own != given:
                raise ValueError(
                    "clip_grad_norm_ takes all parameters of a sharded model, "
                    f"model.parameters(), and has {len(own & given)} of {len(own)} of "
                    f"them with {len(given - own)} others; max_grad_norm and "
                    "clip_by_group of the training arguments clip parts"
                )
            if own & given:
                return model
        return None

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The model's state_dict(), of a sharded model its whole values: collective."""
        if _is_sharded(model):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Write a folder with the models and optimizers, sharded ones as whole."""
        with self._whole_optimizers():
            return super().save_state(*args, **options)

    def load_state(self, *args: Any, **options: Any) -> None:
        """Read a folder that save_state() has written, on any number of ranks."""
        hook = self.register_load_state_pre_hook(_take_whole)  # behind the script's
        try:
            with self._whole_optimizers():
                super().load_state(*args, **options)
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _whole_optimizers(self) -> Iterator[None]:
        """The optimizers of sharded models have the state of whole ones meanwhile."""
        before = self._optimizers
        trainer = self._trainer()
        on_all = self.project_configuration.save_on_each_node
        self._optimizers = [
            WholeOptimizer(trainer.model_wrapped, optimizer, on_all)
            if optimizer is getattr(trainer, "optimizer", None)
            and _is_sharded(trainer.model_wrapped)
            else optimizer
            for optimizer in before
        ]
        try:
            yield
        finally:
            self._optimizers = before


class WholeModel:
    """A sharded model with the state of the model before; its calls are collective."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._model.full_state_dict()
        return state

    def load_state_dict(
        self, state: dict[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        self._model.load_full_state_dict(state)
        return [], []


class WholeOptimizer:
    """A sharded model's optimizer with the state of a whole model's; collective."""

    def __init__(self, model: Any, optimizer: Any, on_all: bool) -> None:
        self._model, self._optimizer, self._on_all = model, optimizer, on_all

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on the first rank or on all; {} on others."""
        state: dict[str, Any] = self._model.full_optim_state_dict(
            self._model, self._optimizer, rank0_only=not self._on_all
        )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        part = self._model.shard_full_optim_state_dict(
            state, self._model, optim=self._optimizer
        )
        self._optimizer.load_state_dict(part)


def _take_whole(models: list[Any], folder: str) -> None:
    models[:] = [WholeModel(m) if _is_sharded(m) else m for m in models]


def _is_sharded(model: Any) -> bool:
    return hasattr(type(model), "load_full_state_dict")


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if hasattr(parameters, "grad") else list(parameters)


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
