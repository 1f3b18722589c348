"""State of an optimizer in a file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ctrainer._C import DiskMemory

_LEAST = 1 << 16  # bytes of a tensor that is worth a read and a write an update


class DiskState:
    """The file, and which tensors are in there: those of state[param] that have an
    element for each of the parameter's, from 64 KiB on."""

    def __init__(self, optimizer: Any, folder: str, buffers: int) -> None:
        self.folder, self.buffers = folder, buffers
        self._end = 0
        self._with_master: set[int] = set()  # the numbers of parameters
        cls = type(optimizer)
        self._make_state: Callable[..., dict[str, Any]] = cls._new_state.__get__(
            optimizer
        )
        self._make_master: Callable[..., torch.Tensor] = cls._new_master
        sizes = [
            _bytes_of(tensor)
            for group in optimizer.param_groups
            for param in group["params"]
            for tensor in self._tensors(optimizer, group, param)
            if _belongs(param, tensor)
        ]
        self.memory = DiskMemory(sum(sizes), folder) if sizes else None

    def _tensors(
        self, optimizer: Any, group: dict[str, Any], param: torch.Tensor
    ) -> Iterator[Any]:
        """The state that a parameter has, or will have."""
        if param.device.type != "cpu":
            raise ValueError(
                f"offload_state(): a parameter is on {param.device}, and state in a "
                "file is updated in host memory: shard the module with cpu_offload=True"
            )
        if optimizer.state.get(param):
            yield from optimizer.state[param].values()
            return
        half = param.dtype in (torch.bfloat16, torch.float16)
        wide = half and (group.get("master_weights") or group.get("fp32_state"))
        like = torch.empty_like(
            param, dtype=torch.float32 if wide else None, device="meta"
        )
        yield from self._make_state(like, group).values()
        if half and group.get("master_weights"):
            self._with_master.add(id(param))
            yield like

    def new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """As _new_state() of the optimizer's class."""
        made = self._make_state(param, group)
        return {name: self.moved(param, value) for name, value in made.items()}

    def new_master(self, param: torch.Tensor) -> torch.Tensor:
        """As _new_master() of the optimizer's class."""
        made = self._make_master(param)
        if id(param) not in self._with_master:
            return made  # what state is made like, and nothing that stays
        moved: torch.Tensor = self.moved(param, made)
        if hasattr(param, "_part"):
            moved._part = param._part  # type: ignore[attr-defined]
        return moved

    def moved(self, param: torch.Tensor, value: Any) -> Any:
        """The value, in the file if it belongs and fits there."""
        if not _belongs(param, value):
            return value
        assert self.memory is not None
        begin, end = self._end, self._end + _bytes_of(value)
        if end > self.memory.nbytes:  # of a parameter that has become larger
            return value
        flat = torch.frombuffer(
            self.memory, dtype=value.dtype, offset=begin, count=value.numel()
        )
        self._end = end
        made = flat.as_strided(value.shape, value.stride())
        made.copy_(value)
        self.memory.drop_pages()
        return made


def _belongs(param: torch.Tensor, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == param.shape
        and value.nbytes >= _LEAST
    )


def _bytes_of(tensor: torch.Tensor) -> int:
    """In whole pages."""
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@torch.no_grad()
def offload(optimizer: Any, folder: str | os.PathLike[str], buffers: int) -> DiskState:
    """Move the optimizer's state into a new file, and have new state made there."""
    kinds = tuple({g.get("kind", optimizer._kind) for g in optimizer.param_groups})
    made = DiskState(optimizer, os.fspath(folder), buffers)
    optimizer._engine.use_disk(made.memory, buffers, kinds)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            state[name] = made.moved(param, value)
    vars(optimizer).update(_new_state=made.new_state, _new_master=made.new_master)
    return made
