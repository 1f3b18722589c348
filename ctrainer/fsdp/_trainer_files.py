"""A sharded Trainer's files: shards of checkpoints, and the whole weights."""

from __future__ import annotations

import glob
import os
import tempfile
from typing import Any

import torch

from ctrainer.fsdp import _full
from ctrainer.fsdp._optimizer_state import consolidate_optimizers
from ctrainer.fsdp._shards import Shard, find_shards, read_shard
from ctrainer.fsdp.consolidate import (
    consolidate_sharded_model_checkpoints,
    one_shard,
)
from ctrainer.fsdp.shard_files import load_shard, save_shard, tensors_of

PREFIX, SUFFIX = "shard-", "[0-9]*-of-*.safetensors"
State = dict[str, Any]


def file_name(rank: int, world_size: int) -> str:
    return f"{PREFIX}{rank:05d}-of-{world_size:05d}.safetensors"


# ---- saving


def save(folder: str, model: Any, optimizer: Any) -> None:
    """Write this rank's shards, and the optimizer's state of them."""
    content = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": _named(model, optimizer),
    }
    name = file_name(model.rank, model.world_size)
    save_shard(content, os.path.join(folder, name))


def _named(model: Any, optimizer: Any) -> State:
    """The optimizer's state with the names of its parameters, by which the shards of
    several ranks are put together."""
    state: State = optimizer.state_dict()
    names = {id(p): name for name, p in model.state_dict(keep_vars=True).items()}
    groups = [
        group | {"param_names": [names[id(p)] for p in own["params"]]}
        for group, own in zip(
            state["param_groups"], optimizer.param_groups, strict=True
        )
    ]
    return state | {"param_groups": groups}


def gather(model: Any, folder: str, keep: bool) -> dict[str, torch.Tensor]:
    """The unwrapped module's state_dict(), for the ranks that keep it; {} for others.

    Its memory is a file without a name in `folder`, so that the process itself has no
    more of it than one parameter at a time. Collective.
    """
    if not keep:
        for unit, group, shard in _full.groups_of(model.units()):
            _full.gathered(unit, group, shard)
        return {}
    os.makedirs(folder, exist_ok=True)
    names = _full.names_of(model)
    memory = _Scratch(folder, _full_bytes(model))
    state: dict[str, torch.Tensor] = {}
    for unit, group, shard in _full.groups_of(model.units()):
        full = _full.gathered(unit, group, shard)
        for entry in group.entries:
            value = memory.copy(_full.view_of(full, entry))
            state.update(dict.fromkeys(names[id(entry.param)], value))
    for name, buffer in _full.persistent_buffers(model):
        dtype = getattr(buffer, "_orig_dtype", buffer.dtype)
        state[name] = buffer.detach().to(dtype, copy=True)
    return state


def _full_bytes(model: Any) -> int:
    groups = _full.groups_of(model.units())
    entries = (entry for _, group, _ in groups for entry in group.entries)
    return sum(entry.numel for entry in entries) * torch.float32.itemsize


class _Scratch:
    """Memory that is a file without a name."""

    def __init__(self, folder: str, n_bytes: int) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".whole-") as file:
            os.posix_fallocate(file.fileno(), 0, max(n_bytes, 1))
            self._flat = torch.from_file(
                file.name, shared=True, size=n_bytes // torch.float32.itemsize
            )
        self._at = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        begin, self._at = self._at, self._at + tensor.numel()
        room = self._flat[begin : self._at].view(tensor.shape)
        return room.copy_(tensor)


# ---- loading


def load_model(model: Any, folder: str) -> None:
    """Load this rank's shards, of a checkpoint of any number of ranks."""
    model.load_state_dict(_own(model, folder)["model"])


def load_into_whole(model: torch.nn.Module, folder: str) -> None:
    """Load the shards of all ranks into a model that is not sharded.

    Raises RuntimeError where names or shapes differ.
    """
    place = os.path.join(glob.escape(folder), PREFIX)
    state, _ = consolidate_sharded_model_checkpoints(place, SUFFIX, save_model=False)
    model.load_state_dict(state)


def optimizer_state(model: Any, optimizer: Any, folder: str) -> State | None:
    """What the optimizer's load_state_dict() takes, out of a checkpoint's shards; None
    where they have none. Of a sharded model this rank's part; of None all of it.

    Raises ValueError where the groups are not those that were saved.
    """
    state = _whole(folder) if model is None else _own(model, folder).get("optimizer")
    if state is None or model is None:
        return state
    mine, saved = _named(model, optimizer)["param_groups"], state["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (mine, saved)]
    names = [[group.pop("param_names") for group in groups] for groups in (mine, saved)]
    if names[0] != names[1]:
        raise ValueError(
            f"{folder}: the optimizer was saved with groups of {sizes[1]} parameters, "
            f"and has groups of {sizes[0]}, or others in them; make the same groups, "
            "or start anew from the weights"
        )
    return state


def _whole(folder: str) -> State | None:
    """The optimizer's state of whole parameters, which it counts as torch does."""
    shards = _shards(folder)
    if shards[0].optimizer is None:
        return None
    state = tensors_of(consolidate_optimizers(shards))
    groups = state["param_groups"]
    numbers: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            numbers[name] = len(numbers)
        group["params"] = [numbers[name] for name in group["params"]]
    values = {numbers[name]: value for name, value in state["state"].items()}
    return {"state": values, "param_groups": groups}


def part_of_whole(model: Any, optimizer: Any, state: State | None) -> State | None:
    """This rank's part of the state of an optimizer of whole parameters, which come in
    the same order."""
    if state is None:
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def cut(param: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != param._orig_size:
            return value
        part = torch.zeros(param.shape, dtype=value.dtype)
        begin = model.rank * param.numel()
        values = value.reshape(-1)[begin : begin + param.numel()]
        part.view(-1)[: values.numel()] = values
        return part

    own = {
        number: {name: cut(params[number], v) for name, v in values.items()}
        for number, values in state["state"].items()
    }
    return state | {"state": own}


def _shards(folder: str) -> list[Shard]:
    return find_shards(os.path.join(glob.escape(folder), PREFIX), SUFFIX)


def _own(model: Any, folder: str) -> State:
    """What this rank would have saved, with tensors in memory."""
    path = os.path.join(folder, file_name(model.rank, model.world_size))
    if os.path.isfile(path) and _cut_alike(model, path):
        return load_shard(path)
    return tensors_of(one_shard(_shards(folder), model.rank, model.world_size))


def _cut_alike(model: Any, path: str) -> bool:
    """Were the shards cut as the model's are?"""
    saved, own = read_shard(path).metadata, model.get_shard_metadata()
    return all(
        saved.get(key) == own[key]
        for key in ("world_size", "shard_param_on_dim_0", "shard_size_multiple")
    )
