"""fairseq's interface of an optimizer, over any that has torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ctrainer import _C
from ctrainer.adapters import torch_fairseq as tools


class FairseqOptimizer(_C.FairseqOptimizer):
    """fairseq's interface over a torch.optim.Optimizer or the like.

    Args:
        cfg: Its config group, kept for those who read it.
        optimizer: What updates.
        core (LossScaler | None): The loss scale, of the wrappers of a precision.
        flat (bool, default False): The state is saved as of one flat parameter, as
            fairseq does.
        rules (str): How the scaler acts, of the wrappers of a precision.
        **options: scaler and rules of ctrainer._C.FairseqOptimizer.

    Raises:
        ValueError: an expert's parameters, which are not supported.

    Example:
        >>> import torch
        >>> from ctrainer.fairseq.optim import SGD
        >>> from ctrainer import optim
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = SGD(None, optim.SGD(layer.parameters(), lr=0.1))
        >>> optimizer.get_lr()
        0.1
    """

    supports_memory_efficient_fp16: ClassVar[bool] = False
    supports_step_with_scale: ClassVar[bool] = True
    supports_groups: ClassVar[bool] = False
    supports_flat_params: ClassVar[bool] = False
    lr_scheduler: Any = None

    def __init__(self, cfg: Any, optimizer: Any, **options: Any) -> None:
        groups = optimizer.param_groups
        super().__init__(optimizer, tools=tools, **options)
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

    def get_lr(self) -> Any:
        """Return the learning rate of the first parameter group."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: Any) -> None:
        """Set the learning rate of every parameter group.

        Args:
            lr (float): The learning rate.
        """
        for group in self.param_groups:
            group["lr"] = lr

    def all_reduce_grads(self, module: Any) -> None:
        """Call module.all_reduce_grads() where it has one, as wrappers that leave the
        exchange of gradients to the trainer do.

        Args:
            module: The model or the criterion.
        """
        exchange = getattr(module, "all_reduce_grads", None)
        if exchange is not None:
            exchange()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, in torch's layout."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: Any = None
    ) -> None:
        """Load a state.

        Args:
            state_dict (dict[str, Any]): What state_dict() of this class or of fairseq's
                returned.
            optimizer_overrides (default None): Options that then replace those of every
                group.
        """
        self.optimizer.load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def average_params(self) -> None:
        """Average the state over processes, which all have the same."""

    def broadcast_global_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state as it is: all processes have loaded it.

        Args:
            state_dict (dict[str, Any]): The state.
        """
        return state_dict


def _all(groups: list[dict[str, Any]]) -> Iterable[Any]:
    return (p for group in groups for p in group["params"])
