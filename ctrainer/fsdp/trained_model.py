"""A sharded Trainer's files: shards of checkpoints, and the whole weights."""

from __future__ import annotations

import glob
import os
import tempfile
from typing import Any

import torch

from ctrainer import _C
from ctrainer.adapters import _saved_names
from ctrainer.adapters._torch_checkpoint import raise_unless_all, weight_files
from ctrainer.adapters._torch_files import load_plain
from ctrainer.checkpoint.files import expected_of, unchanged
from ctrainer.fsdp import _files, _full, _metadata
from ctrainer.fsdp._optimizer_state import consolidate_optimizers
from ctrainer.fsdp._shard_set import find_shards, shard_paths
from ctrainer.fsdp._shards import Shard, described, read_shard
from ctrainer.fsdp.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    one_shard,
)
from ctrainer.fsdp.optim_state import (
    rekeyed,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from ctrainer.fsdp.shard_files import save_shard, tensors_of

PREFIX, SUFFIX = "shard-", "[0-9]*-of-*.safetensors"
State = dict[str, Any]


def file_name(rank: int, world_size: int) -> str:
    return f"{PREFIX}{rank:05d}-of-{world_size:05d}.safetensors"


# ---- saving


def is_first_replica(model: Any, world: _C.Communicator) -> bool:
    """Is the rank one of those that save its shards for all that have the same?"""
    return bool(world.rank < model.world_size)


def save(folder: str, model: Any, optimizer: Any) -> None:
    """Write this rank's shards, and the optimizer's state of them."""
    content = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": sharded_optim_state_dict(model, optimizer),
    }
    name = file_name(model.rank, model.world_size)
    save_shard(content, os.path.join(folder, name))


def gather(model: Any, folder: str, keep: bool) -> dict[str, torch.Tensor]:
    """The unwrapped module's state_dict(), for the ranks that keep it; {} for others.

    Its memory is a file without a name in `folder`, so that the process itself has no
    more of it than one unit at a time. Collective.
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
        fd, path = tempfile.mkstemp(dir=folder, prefix=".whole-")
        try:
            os.posix_fallocate(fd, 0, max(n_bytes, 1))
            self._flat = torch.from_file(
                path, shared=True, size=n_bytes // torch.float32.itemsize
            )
        finally:
            os.close(fd)
            os.unlink(path)
        self._at = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        begin, self._at = self._at, self._at + tensor.numel()
        room = self._flat[begin : self._at].view(tensor.shape)
        return room.copy_(tensor)


# ---- loading


def load_model(model: Any, folder: str) -> None:
    """Load this rank's shards, of a checkpoint of any number of ranks and any units.

    Raises RuntimeError where the names or shapes of parameters differ.
    """
    if _same_units(model, folder):
        model.load_state_dict(_own(model, folder, "model"))
    else:
        model.load_full_state_dict(_whole_weights(folder))


def load_weights(model: Any, folder: str) -> None:
    """Load this rank's part of whole weights, in transformers' files, which are mapped.

    Raises ValueError naming parameters and buffers that the files lack, under every
    name that they have, or have beyond the model's, and RuntimeError for shapes that
    differ; FileNotFoundError without any file.
    """
    files = weight_files(folder)
    with unchanged(*files):
        _load_mapped(model, folder, files)


def _load_mapped(model: Any, folder: str, files: list[str]) -> None:
    from ctrainer.fsdp import _trained

    state: State = {}
    for path in files:
        if path.endswith(".safetensors"):
            state |= _files.mapped(path)
        else:
            state |= load_plain(path, expected_of(path))
    module, own = _trained.unwrapped(model), _own_names(model)
    with _trained.without_wrappers(model):
        layout = _saved_names.layout(module, own, state)
        raise_unless_all(folder, *layout.fit(state))
        state = layout.state(state)
    model.load_full_state_dict(state, strict=False)


def _own_names(model: Any) -> State:
    """The whole weights' names, with tensors of their shapes and no memory."""
    names = _full.names_of(model)
    own = dict(_full.persistent_buffers(model))
    for _, group, _ in _full.groups_of(model.units()):
        for entry in group.entries:
            empty = torch.empty(entry.param.shape, device="meta")
            own.update(dict.fromkeys(names[id(entry.param)], empty))
    return own


def load_into_whole(model: torch.nn.Module, folder: str) -> None:
    """Load the shards of all ranks into a model that is not sharded.

    Raises RuntimeError where names or shapes differ.
    """
    model.load_state_dict(_whole_weights(folder))


def optimizer_state(model: Any, optimizer: Any, folder: str) -> State | None:
    """What the optimizer's load_state_dict() takes, out of a checkpoint's shards; None
    where they have none. Of a sharded model this rank's part; of None all of it.

    Raises ValueError where the optimizer has parameters that were not saved.
    """
    if model is None:
        return _numbered(_whole_optimizer(folder))
    if not _same_units(model, folder):
        full = _whole_optimizer(folder)
        return full and shard_full_optim_state_dict(full, model, optim=optimizer)
    state: State | None = _own(model, folder, "optimizer")
    if state is None:
        return None
    mine = sharded_optim_state_dict(model, optimizer)["param_groups"]
    saved = state["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (mine, saved)]
    names = [[group.pop("param_names") for group in groups] for groups in (mine, saved)]
    if names[0] != names[1]:
        raise ValueError(
            f"{folder}: the optimizer was saved with groups of {sizes[1]} parameters, "
            f"and has groups of {sizes[0]}, or others in them; make the same groups, "
            "or start anew from the weights"
        )
    return state


def part_of_whole(model: Any, optimizer: Any, state: State | None) -> State | None:
    """This rank's part of the state of an optimizer of whole parameters, which come in
    the same order."""
    if state is None:
        return None
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = {number: names[id(p)] for number, p in enumerate(params)}
    return shard_full_optim_state_dict(rekeyed(state, own), model, optim=optimizer)


def average_state(model: Any, average: Any, folder: str, load: Any) -> State | None:
    """What the load_state_dict() of a weight average takes, out of a checkpoint of
    other ranks or units; None where it has none.

    model: sharded, whose part it is; None: the average is of the whole model. load:
    reads an object out of a folder, None where it has not that file.
    """
    saved: State | None = load(folder, "weight_average.pt")
    saved = _whole_average(folder, load) if saved is None else saved
    if saved is None:
        return None
    whole = saved["averages"]
    if model is None:
        own = {name: whole[name] for name in average.averages if name in whole}
    else:
        own = _own_average(model, average, whole)
    return saved | {"averages": own}


def _whole_average(folder: str, load: Any) -> State | None:
    """Rank 0's counts, and the averages of all ranks' shards put together."""
    place = os.path.join(glob.escape(folder), f"{PREFIX}{SUFFIX}")
    _, metadata = described(sorted(glob.glob(place))[0])
    states = [
        load(folder, f"weight_average_{rank}.pt")
        for rank in range(metadata["world_size"])
    ]
    if any(state is None for state in states):
        return None
    averages = [state["averages"] for state in states]
    names = metadata | {"shared_info": {}}  # of which frozen ones are no part
    whole = consolidate_sharded_state_dicts(averages, names)
    return {**states[0], "averages": whole}


def _own_average(model: Any, average: Any, whole: State) -> State:
    """This rank's part of whole averages, by the names that its own have."""
    names = _full.names_of(model)
    keys = {id(v): key for key, v in model.state_dict(keep_vars=True).items()}
    own = {
        key: whole[_metadata.original_name(key)]
        for key in average.averages
        if _metadata.original_name(key) in whole
    }
    for unit, group, shard in _full.groups_of(model.units()):
        key = keys[id(shard)]
        if key in average.averages:
            own[key] = torch.zeros_like(average.averages[key])
            _full.load_group(unit, group, own[key], names, whole)
    return own


def _numbered(full: State | None) -> State | None:
    """A full state as torch has it, whose parameters are numbers."""
    if full is None:
        return None
    names = [name for group in full["param_groups"] for name in group["params"]]
    return rekeyed(full, {name: number for number, name in enumerate(names)})


def _whole_optimizer(folder: str) -> State | None:
    with unchanged(*_shard_paths(folder)):
        shards = _shards(folder)
        if shards[0].optimizer is None:
            return None
        return tensors_of(consolidate_optimizers(shards))


def _whole_weights(folder: str) -> State:
    place = os.path.join(glob.escape(folder), PREFIX)
    return consolidate_sharded_model_checkpoints(place, SUFFIX, save_model=False)[0]


def _shard_paths(folder: str) -> list[str]:
    return shard_paths(os.path.join(glob.escape(folder), PREFIX), SUFFIX)


def _shards(folder: str) -> list[Shard]:
    return find_shards(os.path.join(glob.escape(folder), PREFIX), SUFFIX)


def _own(model: Any, folder: str, part: str) -> Any:
    """What this rank would have saved under "model" or "optimizer", in memory."""
    path = os.path.join(folder, file_name(model.rank, model.world_size))
    with unchanged(*_shard_paths(folder)):
        if os.path.isfile(path) and _cut_alike(model, path):
            shard = read_shard(path)
            content = {"model": shard.model, "optimizer": shard.optimizer}
        else:
            content = one_shard(_shards(folder), model.rank, model.world_size)
        return tensors_of({part: content.get(part)})[part]


def _cut_alike(model: Any, path: str) -> bool:
    """Were the shards cut as the model's are?"""
    _, saved = described(path)
    own = model.get_shard_metadata()
    return all(
        saved.get(key) == own[key]
        for key in ("world_size", "shard_param_on_dim_0", "shard_size_multiple")
    )


def same_layout(model: Any, folder: str) -> bool:
    """Are the checkpoint's shards those of as many ranks and the same units?"""
    path = os.path.join(folder, file_name(model.rank, model.world_size))
    alike = os.path.isfile(path) and _cut_alike(model, path)
    return alike and _same_units(model, folder)


def _same_units(model: Any, folder: str) -> bool:
    """Have the shards the names that the model's have, and of the same parameters?"""
    place = os.path.join(glob.escape(folder), f"{PREFIX}{SUFFIX}")
    names, saved = described(sorted(glob.glob(place))[0])
    own = _files.plain(model.get_shard_metadata())
    return names == list(model.state_dict()) and all(
        saved[key] == own[key] for key in ("shard_info", "flatten_info")
    )
