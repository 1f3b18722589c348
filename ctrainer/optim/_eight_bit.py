"""Optimizers whose state is kept in 8 bits, in the layout of bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch.optim.optimizer import ParamsT

from ctrainer.optim._precision import keep_as_saved, new_master
from ctrainer.optim._wrapper import EngineOptimizer, own, shape_of

__all__ = ["AdEMAMix8bit", "Adam8bit", "AdamW8bit", "Lion8bit"]

BLOCK = 256  # elements that share a scale
_WRAPPED = "__bnb_optimizer_quant_state__"  # how newer releases save what is quantised


def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the 256 numbers that a code stands for, float32, ascending to 1.

    Each of seven decades below 1 is cut into twice as many equal parts as the one
    below it, whose middles are taken; they have both signs, or are twice as many.

    Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016;
    equal to bitsandbytes.functional.create_dynamic_map in every bit.
    """
    numbers = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32, device="cpu")
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


class EightBit(TypedDict, total=False):
    """Options that every optimizer with 8-bit state has.

    Args:
        optim_bits (int, default 8): 32 keeps a group's state in float32. May differ by
            group.
        min_8bit_size (int, default 4096): Parameters with fewer elements, on all ranks
            together, have state of float32. May differ by group.
        keep_32bit (Iterable[torch.Tensor], default ()): These have state of float32
            too, whatever their group says: embeddings, whose gradients differ in size
            from row to row. A Trainer passes the weights of all nn.Embedding.
        maximize (bool, default False): Step up the gradient.

    And those of Precision, but for fp32_state.
    """

    optim_bits: int
    min_8bit_size: int
    keep_32bit: Iterable[torch.Tensor]
    maximize: bool
    master_weights: bool
    stochastic_rounding: bool
    rounding_seed: int


class _EightBit(EngineOptimizer):
    """What they share. An entry of _arrays is a state's number of arrays and whether
    its numbers have signs."""

    _arrays: tuple[tuple[int, bool], ...]
    takes_keep_32bit = True  # a trainer gives it the embeddings
    state_block = BLOCK
    precision_defaults: ClassVar[Mapping[str, Any]] = {
        "optim_bits": 8,
        "min_8bit_size": 4096,
        "maximize": False,
        "master_weights": False,
        "stochastic_rounding": False,
        "rounding_seed": 0,
    }

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], **options: Any
    ) -> None:
        self._kept = set(options.pop("keep_32bit", ()))
        self._maps: dict[tuple[bool, torch.device], torch.Tensor] = {}
        for name in ("optim_bits", "min_8bit_size", "maximize"):
            defaults[name] = options.pop(name, self.precision_defaults[name])
        super().__init__(params, defaults=defaults, **options)

    def _new_master(self, param: torch.Tensor) -> torch.Tensor:
        master = new_master(param)
        if param in self._kept:
            self._kept.add(master)
        return master

    def _map(self, signed: bool, device: torch.device) -> torch.Tensor:
        if (signed, device) not in self._maps:
            self._maps[signed, device] = dynamic_map(signed).to(device)
        return self._maps[signed, device]

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return what the original keeps before a parameter's first step."""
        coded = self._is_coded(param, group)
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        dtype = torch.uint8 if coded else wide
        state: dict[str, Any] = {"step": 0}
        for number, (n, signed) in enumerate(self._arrays, 1):
            state[f"state{number}"] = _zeros(param, n, dtype)
            if coded:
                blocks = -(-param.numel() // BLOCK)
                shape = (blocks,) if n == 1 else (n, blocks)
                state[f"absmax{number}"] = torch.zeros(
                    shape, dtype=torch.float32, device=param.device
                )
                state[f"qmap{number}"] = self._map(signed, param.device)
        return state

    def _is_coded(self, param: torch.Tensor, group: dict[str, Any]) -> bool:
        bits = group.get("optim_bits", 8)
        if bits not in (8, 32):
            raise ValueError(f"optim_bits is {bits!r}; expected 8 or 32")
        if bits == 8 and group.get("fp32_state"):
            raise ValueError(
                "fp32_state=True with 8-bit state: set optim_bits=32 for that group"
            )
        size: int = group.get("min_8bit_size", 4096)
        whole = shape_of(param).numel()
        return bits == 8 and whole >= size and param not in self._kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of this class or of bitsandbytes' returned.

        Args:
            state_dict (dict[str, Any]): State and groups; 8-bit values and scales are
                taken over bit by bit.
        """
        state_dict = {**state_dict, "state": _unwrapped(state_dict["state"])}
        super().load_state_dict(state_dict)
        keep_as_saved(self, state_dict)
        self._offload_again()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.setdefault("_kept", set())
        self.__dict__.setdefault("_maps", {})
        super().__setstate__(state)


def _zeros(param: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros like the parameter, or n of them one behind the other."""
    if n == 1:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return torch.zeros((n, *param.shape), dtype=dtype, device=param.device)


def _unwrapped(states: dict[Any, Any]) -> dict[Any, Any]:
    """The states, with what newer releases of bitsandbytes wrap where it was."""
    return {
        key: {**{k: v for k, v in state.items() if k != _WRAPPED}, **state[_WRAPPED]}
        if isinstance(state, dict) and _WRAPPED in state
        else state
        for key, state in states.items()
    }


class AdamW8bit(_EightBit):
    """AdamW with 8-bit state, as bitsandbytes.optim.AdamW8bit.

    A parameter's averages are kept as 8-bit values, "state1" and "state2" of uint8,
    with a float32 scale for each 256 elements, "absmax1" and "absmax2", and the numbers
    that the 256 values stand for, "qmap1" and "qmap2": 2 bytes a parameter where AdamW
    has 8. Each step computes in float32 and takes the nearest value. A gradient that is
    Inf or NaN makes its whole block NaN. The count "step" is an int. There is no
    amsgrad.

    Args:
        weight_decay (float, default 0.01): A step shrinks the parameter by lr *
            weight_decay; >= 0.

    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise
    Quantization", 2022.
    """

    _kind = "adamw_8bit"
    _arrays = ((1, True), (1, False))

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **precision: Unpack[EightBit],
    ) -> None:
        super().__init__(**own(locals()))


class Adam8bit(AdamW8bit):
    """AdamW8bit with no weight decay by default, as bitsandbytes.optim.Adam8bit, whose
    weight decay is decoupled too."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **precision: Unpack[EightBit],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **precision)


class Lion8bit(_EightBit):
    """Lion with 8-bit state, as bitsandbytes.optim.Lion8bit.

    The state is "state1" alone, with its "absmax1" and "qmap1". See AdamW8bit and Lion.

    Args:
        betas (tuple[float, float], default (0.9, 0.99)): Decays of the direction, and
            of the momentum that is kept, in [0, 1).
    """

    _kind = "lion_8bit"
    _arrays = ((1, True),)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **precision: Unpack[EightBit],
    ) -> None:
        eps = 1e-8  # as the original's groups have, whose update does not use it
        super().__init__(**own(locals()))


class AdEMAMix8bit(_EightBit):
    """AdEMAMix with 8-bit state, as bitsandbytes.optim.AdEMAMix8bit.

    "state1" is the fast average and, behind it, the slow one, of shape (2,
    *param.shape), with "absmax1" of shape (2, blocks); "state2" is the second moment.
    Parameters have to be contiguous. See AdamW8bit and AdEMAMix.

    Args:
        betas (tuple[float, float, float], default (0.9, 0.999, 0.9999)): Decays of the
            fast average, of the second moment and of the slow average, in [0, 1).
    """

    _kind = "ademamix_8bit"
    _arrays = ((2, True), (1, False))

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: float | None = None,
        t_beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **precision: Unpack[EightBit],
    ) -> None:
        super().__init__(**own(locals()))
