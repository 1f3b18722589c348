"""Our Trainer inside fairseq: with the optimizers and schedules registered there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ctrainer.adapters import torch_fairseq as tools
from ctrainer.fairseq.config.base import setting
from ctrainer.fairseq.lr_scheduler import SCHEDULES
from ctrainer.fairseq.optim import OPTIMIZERS
from ctrainer.fairseq.trainer import Trainer as Ours

__all__ = ["Trainer"]


class Trainer(Ours):
    """Ours, but for an optimizer or a schedule that fairseq alone knows, such as one
    of a --user-dir: then both are fairseq's, as its schedules take its optimizers
    only."""

    def _build_optimizer(self) -> None:
        if self.cfg.optimizer._name in OPTIMIZERS and (
            self.cfg.lr_scheduler._name in SCHEDULES
        ):
            super()._build_optimizer()
            return
        if self._bmuf:
            raise ValueError(
                f"--use-bmuf does not go with optimizer {self.cfg.optimizer._name!r} "
                f"and schedule {self.cfg.lr_scheduler._name!r}, of which fairseq alone "
                "knows one: workers would never synchronize"
            )
        params = tools.trainable(self._model, self._criterion)
        self._optimizer = self._of_fairseq(import_module("fairseq.optim"), params)
        schedules = import_module("fairseq.optim.lr_scheduler")
        self._lr_scheduler = schedules.build_lr_scheduler(
            self.cfg.lr_scheduler, self._optimizer
        )
        self._lr_scheduler.step_update(0)

    def _of_fairseq(self, optim: Any, params: list[Any]) -> Any:
        """fairseq's optimizer, in the wrapper of the run's precision."""
        wanted = {
            name: setting(self.cfg, "common", name)
            for name in (
                "fp16", "bf16", "amp", "memory_efficient_fp16", "memory_efficient_bf16",
            )
        }  # fmt: skip
        if not any(wanted.values()):
            return optim.build_optimizer(self.cfg.optimizer, params)
        if wanted["memory_efficient_fp16"] or wanted["memory_efficient_bf16"]:
            kind = optim.MemoryEfficientFP16Optimizer
        else:
            kind = optim.AMPOptimizer if wanted["amp"] else optim.FP16Optimizer
        return kind.build_optimizer(self.cfg, params)
