"""torch: what fairseq's Trainer needs of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ctrainer.adapters.torch import empty_cache, no_grad

__all__ = ["empty_cache", "no_grad"]

Module = nn.Module


def choose_device(cpu: bool) -> torch.device:
    usable = torch.cuda.is_available() and not cpu
    return torch.device("cuda" if usable else "cpu")


def seed(value: int) -> None:
    """Seed the generators of the host and, where there are any, of GPUs.

    As torch.manual_seed, which also formats tracebacks for devices that are not there:
    200 microseconds.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)


def rng_state() -> dict[str, Any]:
    """States of Python's and NumPy's generators; each update seeds torch's itself."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def set_rng_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


# Modules


def has_parameters(module: Any) -> bool:
    return any(True for _ in module.parameters())


def trainable(*modules: Module) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def cast(module: Module, fp16: bool, bf16: bool) -> Module:
    """The module in the precision of the run, in place."""
    if fp16:
        return module.half()
    return module.to(torch.bfloat16) if bf16 else module


def _named(module: Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Every dotted path at which a parameter is found."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _named(child, f"{prefix}{name}.")


def shared_parameters(module: Module) -> list[list[str]]:
    """The paths of each parameter that is found at more than one."""
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in _named(module):
        paths.setdefault(parameter, []).append(path)
    return [found for found in paths.values() if len(found) > 1]


def tie(module: Module, first: str, other: str) -> None:
    """Make the parameter at the path `other` that at the path `first`."""
    owner, _, name = other.rpartition(".")
    setattr(module.get_submodule(owner), name, module.get_parameter(first))


# Samples


def convert_sample(
    sample: Any, dtype: torch.dtype | None, device: torch.device, early: bool
) -> Any:
    """A nested sample on `device`, its float32 tensors in `dtype` (None: as they are).

    early: convert before the copy to the device, which then has half the bytes.
    """
    if isinstance(sample, torch.Tensor):
        wanted = dtype if sample.dtype == torch.float32 else None
        if early and wanted is not None:
            sample = sample.to(wanted)
        sample = sample.to(device, non_blocking=True)
        return sample if wanted is None else sample.to(wanted)
    if isinstance(sample, dict):
        pairs = {k: convert_sample(v, dtype, device, early) for k, v in sample.items()}
        return type(sample)(pairs)
    if isinstance(sample, list | tuple | set):
        values = [convert_sample(v, dtype, device, early) for v in sample]
        named = isinstance(sample, tuple) and hasattr(sample, "_fields")
        return type(sample)(*values) if named else type(sample)(values)
    return sample


def sample_dtype(fp16: bool, bf16: bool) -> torch.dtype | None:
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else None


# Gradients in a device's memory


def on_host(parameters: Iterable[torch.Tensor]) -> bool:
    return all(p.device.type == "cpu" for p in parameters)


def grad_norm(groups: list[dict[str, Any]]) -> torch.Tensor:
    """The norm of all gradients, computed where they are."""
    return nn.utils.get_total_norm(_grads(groups))


def divide_grads(groups: list[dict[str, Any]], by: float) -> None:
    grads = _grads(groups)
    if grads:
        torch._foreach_div_(grads, by)


def _grads(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [p.grad for g in groups for p in g["params"] if p.grad is not None]


def memory_gb() -> float:
    """GiB of the GPU that were never in use since the last call."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    used = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return float(total - used) / 2**30


def memory_summaries() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.memory_summary(i) for i in range(torch.cuda.device_count())]
