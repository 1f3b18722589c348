"""Muon."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import Precision
from ctrainer.optim._wrapper import EngineOptimizer, given, shape_of

__all__ = ["Muon"]

# torch has Muon from 2.9 on.
_Original: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)


class _AnyShape(torch.optim.Optimizer):
    """In front of torch's Muon, whose constructor looks at the shapes of what it is
    given: of a sharded matrix that is a row."""

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)


class Muon(EngineOptimizer, _AnyShape, _Original):  # type: ignore[misc]
    """Muon, as torch.optim.Muon: momentum, made orthogonal by Newton-Schulz.

    For matrices alone; other parameters take another optimizer, in one step with
    Composite. The iteration is in bfloat16 as torch's, its products added in float32
    and rounded once; that of float64 parameters is in float64. Updates differ from
    torch's by what bfloat16 rounds. state[param] is torch's: momentum_buffer.

    Args:
        params (ParamsT): Matrices on the CPU, or dicts with matrices under 'params' and
            options of their own.
        ns_coefficients (tuple[float, float, float], default (3.4445, -4.775, 2.0315)):
            Of the quintic iteration.
        eps (float, default 1e-07): The least norm that the momentum is divided by.
        ns_steps (int, default 5): Iterations.
        adjust_lr_fn (Literal[original, match_rms_adamw] | None, default None):
            "original" or None multiplies the learning rate by sqrt(max(1, rows /
            columns)), "match_rms_adamw" by 0.2 sqrt(max(rows, columns)).

    Raises:
        ValueError: a parameter that is no matrix; at the first step, an option out of
            range, or a matrix that is not in C order.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
    2024; Liu et al., "Muon is Scalable for LLM Training", 2025.
    """

    _kind = "muon"
    _counts = False
    _moments = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        **precision: Unpack[Precision],
    ) -> None:
        super().__init__(**given(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices.

        Args:
            param_group (dict[str, Any]): "params" and options, as the constructor takes
                them.

        Raises:
            ValueError: a parameter that is no matrix; the group is not added.
        """
        super().add_param_group(param_group)
        shapes = [shape_of(p) for p in self.param_groups[-1]["params"]]
        odd = [shape for shape in shapes if len(shape) != 2]
        if odd:
            del self.param_groups[-1]
            raise ValueError(
                "Muon is for matrices; got a parameter of shape "
                f"{tuple(odd[0])}: give it to another optimizer, for example in "
                "a Composite"
            )
