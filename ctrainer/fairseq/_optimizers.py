"""fairseq's optimizers by its class names, over ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools


class FairseqOptimizer(_C.FairseqOptimizer):
    """fairseq's interface over a torch.optim.Optimizer or the like.

    optimizer: what updates. cfg: its config group, kept for those who read it.
    """

    supports_memory_efficient_fp16: ClassVar[bool] = False
    supports_step_with_scale: ClassVar[bool] = True
    supports_groups: ClassVar[bool] = False
    supports_flat_params: ClassVar[bool] = False
    lr_scheduler: Any = None

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        groups = optimizer.param_groups
        super().__init__(optimizer, on_host=tools.on_host(_all(groups)), **options)
        self.cfg = cfg
        if any(hasattr(p, "expert") for p in _all(groups)):
            raise ValueError(
                "a parameter is marked as an expert's: mixtures of experts need "
                "several processes that hold different ones, and here all are alike"
            )

    @property
    def params(self) -> list[Any]:
        """Every parameter, group by group."""
        return list(_all(self.param_groups))

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The options of the first group, without its parameters."""
        return {k: v for k, v in self.param_groups[0].items() if k != "params"}

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, in torch's layout."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state; optimizer_overrides then replace options of every group."""
        self.optimizer.load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def average_params(self) -> None:
        """Average the state over processes, which all have the same."""

    def broadcast_global_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Send the state to all processes, which have all loaded it."""
        return state_dict

    _scalar = staticmethod(tools.scalar)

    def _device_norm(self) -> Any:
        return tools.grad_norm(self.param_groups)

    def _device_divide(self, by: float) -> None:
        tools.divide_grads(self.param_groups, by)


def _all(groups: list[dict[str, Any]]) -> Iterable[Any]:
    return (p for group in groups for p in group["params"])


class FairseqAdam(FairseqOptimizer):
    """Adam with decoupled weight decay and eps outside of the bias correction."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class FairseqAdamax(FairseqOptimizer):
    """Adamax with decoupled weight decay."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class FairseqNAG(FairseqOptimizer):
    """Nesterov's accelerated gradient, whose momentum follows the learning rate."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class SGD(FairseqOptimizer):
    """torch's SGD."""

    supports_flat_params = True


class Adadelta(FairseqOptimizer):
    """torch's Adadelta."""

    supports_flat_params = True


class Adagrad(FairseqOptimizer):
    """torch's Adagrad."""


class FairseqAdafactor(FairseqOptimizer):
    """Adafactor, without fairseq's compounding of scaled rates."""

    supports_memory_efficient_fp16 = True


class FairseqLAMB(FairseqOptimizer):
    """apex's LAMB, which clips all gradients to a norm of 1 as well."""


class FairseqCPUAdam(FairseqOptimizer):
    """DeepSpeed's Adam of the host, which is torch's AdamW."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True


class FairseqCompositeOptimizer(FairseqOptimizer):
    """An optimizer for each group of parameters, all in one step.

    lr_scheduler: the groups' schedules, where the config has them; for pass_through.
    """

    supports_groups = True


CLASSES: dict[str, type[FairseqOptimizer]] = {
    "adafactor": FairseqAdafactor,
    "composite": FairseqCompositeOptimizer,
    "cpu_adam": FairseqCPUAdam,
    "lamb": FairseqLAMB,
    "adam": FairseqAdam,
    "adamax": FairseqAdamax,
    "nag": FairseqNAG,
    "sgd": SGD,
    "adadelta": Adadelta,
    "adagrad": Adagrad,
}
