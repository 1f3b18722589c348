"""What the constructor's arguments say: checked."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch import nn

from ctrainer.fsdp._tensors import FLOAT_DTYPES


def check_module(module: nn.Module, wrapper: type) -> None:
    """Refuse what is wrapped already, and containers that are never called."""
    if isinstance(module, wrapper):
        raise RuntimeError(
            "Cannot wrap a module that is already wrapped with FSDP. For nested FSDP, "
            "first wrap the inner child modules before wrapping the outer parent "
            "module."
        )
    defined = (
        hasattr(module, "forward")
        and hasattr(module.forward, "__func__")
        and module.forward.__func__ != nn.Module.forward
    )
    if not defined:
        raise RuntimeError(
            "The module wrapped by FSDP *must define a `forward` method and call it "
            "during the module's forward pass for FSDP to work correctly.* "
            "Hence, do not wrap `nn.ModuleList` or `nn.ModuleDict` with FSDP "
            "(since they don't have `forward` defined), "
            "and do not perform the forward pass in other ways apart from the "
            "`forward` method. "
            "(i.e. you should directly call the FSDP-wrapped module itself in your "
            "code, instead of using any of its submodules or its weights)."
        )


def check_parameters(module: nn.Module) -> None:
    """Only float32 ones can be sharded, those of inner units among them."""
    for param in module.parameters():
        if param.dtype != torch.float32:
            raise TypeError("only fp32 parameters are supported")


def float_dtype(name: str, dtype: Any, default: torch.dtype) -> torch.dtype:
    """A dtype to compute in, also by its name ("bfloat16", "torch.bfloat16")."""
    if dtype is None:
        return default
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {FLOAT_DTYPES}, not {dtype}")
    return dtype  # type: ignore[no-any-return]


def poison() -> str:
    """CTRAINER_FSDP_POISON: what released parameters are, "", "nan" or "protect"."""
    wanted = os.environ.get("CTRAINER_FSDP_POISON", "")
    if wanted not in ("", "nan", "protect"):
        raise ValueError(
            f"CTRAINER_FSDP_POISON is {wanted!r}; expected 'nan', 'protect' or nothing"
        )
    return wanted


def backward_prefetch(given: Any) -> str | None:
    """The word BACKWARD_PRE or BACKWARD_POST, also of torch's enum; or None."""
    name = getattr(given, "name", given)
    if name not in (None, "BACKWARD_PRE", "BACKWARD_POST"):
        raise ValueError(
            "backward_prefetch must be BACKWARD_PRE, BACKWARD_POST or None, not "
            f"{given!r}"
        )
    return name  # type: ignore[no-any-return]


def check_flags(init: Any, given: dict[str, Any]) -> None:
    """Refuse text for a truth value: "false" would be true."""
    for name, parameter in inspect.signature(init).parameters.items():
        if parameter.annotation == "bool" and isinstance(given[name], str):
            raise ValueError(f"{name} must be True or False, not {given[name]!r} (str)")


def offloads(given: Any) -> bool:
    """Of cpu_offload: True, False, None or torch's CPUOffload."""
    if isinstance(given, str):
        raise ValueError(f"cpu_offload must be True or False, not {given!r} (str)")
    return bool(getattr(given, "offload_params", given))


def wrap_children(module: nn.Module, policy: Any, wrap: Any) -> None:
    """Wrap the modules below this one that a policy chooses, the inner ones first.

    policy: as torch's and fairscale's are, called with a module, recurse and the number
    of its parameters that are left over, by whatever name it takes them. Raises
    TypeError for what cannot be called so, such as torch's CustomPolicy.
    """
    if not callable(policy):
        raise TypeError(
            "auto_wrap_policy must be a function of (module, recurse, "
            f"nonwrapped_numel), not {policy!r}: pass the one that it was made of"
        )
    for name, child in module.named_children():
        wrap_children(child, policy, wrap)
        left = sum(
            p.numel() for p in child.parameters() if not hasattr(p, "_is_sharded")
        )
        if left > 0 and _chooses(policy, child, left):
            setattr(module, name, wrap(child))


def _chooses(policy: Any, module: nn.Module, left: int) -> bool:
    names = inspect.signature(policy).parameters
    counts = {"nonwrapped_numel", "unwrapped_params"} & set(names)
    options = dict.fromkeys(counts, left)
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and bool(
        policy(module=module, recurse=False, **options)
    )


def predivide_factor(world_size: int) -> float:
    """What gradients are divided by before their sum: about the root of the ranks."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)
