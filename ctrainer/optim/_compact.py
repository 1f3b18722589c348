"""Optimizers with compact state: 8-bit moments, and master weights of 24 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import keep_as_saved
from ctrainer.optim._wrapper import EngineOptimizer, own

__all__ = ["AdamWCompact", "LionCompact"]

GROUP = 32  # elements that share a scale


class Compact(TypedDict, total=False):
    """Options that every optimizer with compact state has.

    Args:
        master_weight_bits (int | None, default 24): 24 keeps an 8-bit correction beside
            each bfloat16 parameter, "error_bits", and updates both as one number. None
            rounds the parameter itself at each step. May differ by group. float16 is
            rejected with 24; float32 needs no correction.
        maximize (bool, default False): Step up the gradient.
        stochastic_rounding (bool, default False): As in Precision, for bfloat16 with
            master_weight_bits=None.
        rounding_seed (int, default 0): As in Precision.
    """

    master_weight_bits: int | None
    maximize: bool
    stochastic_rounding: bool
    rounding_seed: int


class _Compact(EngineOptimizer):
    """What they share."""

    _arrays: ClassVar[Mapping[str, torch.dtype]]
    state_block = GROUP
    precision_defaults: ClassVar[Mapping[str, Any]] = {
        "master_weight_bits": 24,
        "maximize": False,
        "stochastic_rounding": False,
        "rounding_seed": 0,
    }

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], **options: Any
    ) -> None:
        for name in ("master_weight_bits", "maximize"):
            defaults[name] = options.pop(name, self.precision_defaults[name])
        _check(defaults["master_weight_bits"], options)
        super().__init__(params, defaults=defaults, **options)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": 0}
        groups = -(-param.numel() // GROUP)
        for name, dtype in self._arrays.items():
            state[name] = _zeros(param, dtype)
            state[f"{name}_scale"] = torch.zeros(
                groups, dtype=torch.float16, device=param.device
            )
        if param.dtype == torch.bfloat16 and group.get("master_weight_bits") == 24:
            state["error_bits"] = _zeros(param, torch.int8)
        return state

    @torch.no_grad()
    def sync_master_weights(self) -> None:
        """Take the parameters, as they are now, for the new master weights."""
        self._engine.check_idle("sync_master_weights()")
        for state in self.state.values():
            if "error_bits" in state:
                state["error_bits"].zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of this class returned.

        Args:
            state_dict (dict[str, Any]): State and groups; 8-bit values and scales are
                taken over bit by bit.
        """
        super().load_state_dict(state_dict)
        keep_as_saved(self, state_dict)
        self._offload_again()


def _zeros(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _check(bits: Any, options: dict[str, Any]) -> None:
    if bits not in (24, None):
        raise ValueError(f"master_weight_bits is {bits!r}; expected 24 or None")
    for name in ("master_weights", "fp32_state"):
        if options.get(name):
            raise ValueError(
                f"{name}=True: compact state takes its place, and master_weight_bits "
                "keeps what bfloat16 cannot hold; leave it out, or use AdamW8bit or "
                "AdamW"
            )
    if bits == 24 and options.get("stochastic_rounding"):
        raise ValueError(
            "stochastic_rounding=True with master_weight_bits=24, whose correction is "
            "of the nearest bfloat16: leave it out, or set master_weight_bits=None"
        )


class AdamWCompact(_Compact):
    """AdamW with compact state: 3 bytes a bfloat16 parameter, not 12.

    A group of 32 elements, in the order of memory, shares a float16 scale. "exp_avg" is
    int8, finer near 0; "exp_avg_sq", uint8, holds square roots; "exp_avg_scale" and
    "exp_avg_sq_scale" are the scales. A bfloat16 parameter and its "error_bits", int8,
    are a master weight of 24 bits; bfloat16 parameters and gradients beside that state
    are 12.25 bytes of memory traffic a parameter in an update, and 2 more where the
    gradient is zeroed. Each step computes in float32, with the same bits on every
    device. A gradient that is Inf or NaN makes the moments of its group NaN. The count
    "step" is an int. There is no amsgrad. sync_master_weights() sets the corrections to
    0, after parameters were changed by other means.

    Scales do not follow a falling gradient where float16 numbers are too far apart: of
    the second moment's root below 6e-5, or with betas[1] above 0.999.

    Args:
        weight_decay (float, default 0.01): A step shrinks the parameter by lr *
            weight_decay; >= 0.
        **precision (Unpack[Compact]): master_weight_bits, 24 or None for no
            corrections; maximize; stochastic_rounding and rounding_seed, with None
            alone. May differ by group.

    Source: "FlashOptim: Optimizers for Memory Efficient Training"; the formulas of the
    package flashoptim 0.1.4, with the differences that csrc/math/compact.h names.
    """

    _kind = "adamw_compact"
    _arrays: ClassVar[Mapping[str, torch.dtype]] = {
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **precision: Unpack[Compact],
    ) -> None:
        super().__init__(**own(locals()))


class LionCompact(_Compact):
    """Lion with compact state: 2 bytes a bfloat16 parameter.

    The state is "exp_avg" with "exp_avg_scale", and "error_bits". See AdamWCompact and
    Lion.

    Args:
        betas (tuple[float, float], default (0.9, 0.99)): Decays of the direction, and
            of the momentum that is kept, in [0, 1).
    """

    _kind = "lion_compact"
    _arrays: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.int8}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **precision: Unpack[Compact],
    ) -> None:
        super().__init__(**own(locals()))
