"""Trainer: the optimizer, the schedule, and what the loop asks of the framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrainer import average
from ctrainer.trainer.base import TrainerBase


class OptimMixin(TrainerBase):
    """Hooks that make the optimizer and the schedule; answers to the loop."""

    # Optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule that were not passed."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make self.optimizer unless there is one, and return it.

        Weight decay applies to the parameters of get_decay_parameter_names alone.
        """
        if self.optimizer is None:
            target = self.model if model is None else model
            decay = self.get_decay_parameter_names(target)
            groups = self._adapter.optimizer_groups(
                target, decay, self.args.weight_decay
            )
            cls: Callable[..., Any]
            if self.optimizer_cls_and_kwargs is not None:
                cls, kwargs = self.optimizer_cls_and_kwargs
            else:
                cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, target)
            kwargs = dict(kwargs)
            for name in ("params", "model", "optimizer_dict"):  # an override's groups
                groups = kwargs.pop(name, groups)
            self.optimizer = cls(groups, **kwargs)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: Any, model: Any = None
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The class that args.optim names and its keywords, without the parameters."""
        from ctrainer.arguments.optimizers import optimizer_class

        return optimizer_class(args, model)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        return list(self._adapter.decay_parameter_names(model))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make self.lr_scheduler unless there is one, and return it."""
        if self.lr_scheduler is None:
            args = self.args
            self.lr_scheduler = self._adapter.make_scheduler(
                str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
                self.optimizer if optimizer is None else optimizer,
                args.get_warmup_steps(num_training_steps),
                num_training_steps,
                dict(args.lr_scheduler_kwargs or {}),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # The average of the weights

    def _make_weight_average(self) -> None:
        """Make self.weight_average anew if the arguments ask for one."""
        made = average.from_arguments(self.args, self.model)
        if made is not None:
            self.weight_average = made

    @property
    def _weight_average(self) -> Any:
        """What the loop drives."""
        return None if self.weight_average is None else self.weight_average.core

    def _averaged_weights(self) -> Any:
        """A context in which the model has the averaged weights, or None: what
        evaluation and prediction run in."""
        chosen = self.weight_average
        if chosen is None or not getattr(self.args, "average_in_eval", True):
            return None
        return chosen.applied() if chosen.core.n_averaged > 0 else None

    # What the loop asks of the framework

    def _prepare_input(self, data: Any) -> Any:
        """`data` with its tensors on the device; overrides see every batch here that
        is no plain dict, or goes to a GPU."""
        return self._adapter.prepare_input(data, self.args.device)

    def _item_count(self, n: int, device: Any) -> Any:
        return self._adapter.item_count(n, device, bool(self.args.torch_compile))

    def _count_targets(self, labels: Any, shifted: bool) -> int | None:
        return self._adapter.count_targets(labels, shifted)  # type: ignore[no-any-return]

    def _no_loss(self, loss: Any) -> Any:
        return self._adapter.no_loss(loss)

    def _add_device_loss(self, total: Any, loss: Any) -> Any:
        return self._adapter.add_device_loss(total, loss)

    def _read_device_loss(self, total: Any) -> tuple[float, int]:
        steps = self.args.gradient_accumulation_steps
        return self._adapter.read_device_loss(total, steps)  # type: ignore[no-any-return]

    def _device_grad_norms(
        self, optimizer: Any, norm_type: float, by_group: bool
    ) -> list[float]:
        return self._adapter.grad_norms(  # type: ignore[no-any-return]
            optimizer, norm_type, by_group
        )

    def _device_layer_norms(self, optimizer: Any, norm_type: float) -> list[float]:
        return self._adapter.layer_norms(  # type: ignore[no-any-return]
            optimizer, norm_type
        )

    def _parameter_labels(self) -> dict[Any, str]:
        """What log_layer_grad_norms calls each parameter."""
        depth = self.args.layer_grad_norm_depth
        return self._adapter.parameter_labels(  # type: ignore[no-any-return]
            self.model, depth
        )

    def _device_grad_clip(
        self, optimizer: Any, factors: list[float], limit: float | None
    ) -> None:
        self._adapter.clip_grads(optimizer, factors, limit)

    def _smoothed_loss(self, model: Any, outputs: Any, labels: Any, count: Any) -> Any:
        shift = self._loss_shifts_labels
        return self.label_smoother(outputs, labels, shift, num_items_in_batch=count)
