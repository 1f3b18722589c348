"""Where a module's parameters are, and the group that shares them there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ctrainer import _C
from ctrainer.comm import nccl


@dataclass(frozen=True)
class Home:
    """Memory that a unit works in. plugin: of its device, None for the host's."""

    device: torch.device
    plugin: Any = None

    def group(self, over: _C.Communicator | None) -> _C.Communicator | None:
        """The ranks of `over`, as a group that takes this memory. Collective."""
        return over if over is None or self.plugin is None else _on_gpu(over)


def home_of(module: nn.Module) -> Home:
    """The one device on which are the module's parameters that no inner unit has.

    Raises ValueError naming parameters on two devices, or one that is neither the host
    nor the current GPU, RuntimeError saying what of the plugin is missing.
    """
    named = [(n, p) for n, p in module.named_parameters() if not _is_taken(p)]
    devices = {param.device: name for name, param in named}
    if len(devices) > 1:
        each = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"a unit's parameters are on one device, and here are {each}: move the "
            "module to one, or wrap the modules on the others as units of their own"
        )
    if not devices:
        return _of_inner_units(module)
    (device,) = devices
    if device.type == "cpu":
        return Home(device)
    return Home(_checked(device), nccl.plugin().plugin)


def _is_taken(param: nn.Parameter) -> bool:
    return hasattr(param, "_is_sharded") or hasattr(param, "_sharded_param")


def _of_inner_units(module: nn.Module) -> Home:
    """A module without parameters of its own is where those below it are."""
    found = (getattr(child, "home", None) for child in module.modules())
    homes = [home for home in found if isinstance(home, Home)]
    return homes[0] if homes else Home(torch.device("cpu"))


def _checked(device: torch.device) -> torch.device:
    if device.type != "cuda":
        raise ValueError(
            f"the module is on {device}; parameters can be sharded on the CPU and on "
            "CUDA devices"
        )
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise ValueError(
            f"the module is on {device} and the current device is cuda:{current}: call "
            f"torch.cuda.set_device({device.index}) first"
        )
    return torch.device("cuda", current)


@functools.cache
def _on_gpu(over: _C.Communicator) -> _C.Communicator:
    """NCCL's group of the same ranks, on a stream beside that of the computation."""
    if over.backend == "nccl":
        return over
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    _streams.append(stream)
    return nccl.communicator(over, stream=int(stream.cuda_stream))


_streams: list[Any] = []  # as long as the groups, which is as long as the process
