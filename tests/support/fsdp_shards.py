"""Shard files as XlaFullyShardedDataParallel and a rank's torch.save write them."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
WRAPPED = "_fsdp_wrapped_module"
Tensors = dict[str, torch.Tensor]


@dataclass
class Unit:
    """A wrapped module: its path in the outer one, wrappers included, and its own
    parameters by their names inside."""

    path: str
    parameters: Tensors
    frozen: tuple[str, ...] = ()
    buffers: dict[str, tuple[torch.Tensor, torch.dtype]] = field(default_factory=dict)


@dataclass
class Job:
    units: list[Unit]
    world_size: int
    flat: bool = False
    by_rows: bool = False

    def pad(self, n: int) -> int:
        group = self.world_size * 128
        return -(-n // group) * group

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if self.by_rows:
            rows = tensor.shape[0] // self.world_size
            return tensor[rank * rows : (rank + 1) * rows].clone()
        whole = torch.zeros(self.pad(tensor.numel()), dtype=tensor.dtype)
        whole[: tensor.numel()] = tensor.reshape(-1)
        n = whole.numel() // self.world_size
        return whole[rank * n : (rank + 1) * n].clone()


def join(*words: str) -> str:
    return ".".join(word for word in words if word)


def full_parameters(job: Job, unit: Unit) -> tuple[Tensors, dict[str, Any]]:
    """What the unit shards, by _orig_name, and its flatten_info."""
    if not job.flat:
        inside = join(WRAPPED, "_fpw_module")
        return {join(inside, n): p for n, p in unit.parameters.items()}, {}
    groups = [
        [n for n in unit.parameters if n not in unit.frozen],
        [n for n in unit.parameters if n in unit.frozen],
    ]
    made, info = {}, {}
    for i, names in enumerate(group for group in groups if group):
        tensors = [unit.parameters[n] for n in names]
        made[f"{WRAPPED}.flat_param_{i}"] = torch.cat([t.reshape(-1) for t in tensors])
        shapes, numels = [t.shape for t in tensors], [t.numel() for t in tensors]
        place = join(unit.path, WRAPPED, f"flat_param_{i}")
        info[place] = (tuple(names), tuple(shapes), tuple(numels))
    return made, info


def rank_content(job: Job, rank: int) -> dict[str, Any]:
    """{"model", "shard_metadata"} of one rank."""
    model: Tensors = OrderedDict()
    metadata: dict[str, Any] = {
        "shard_info": {},
        "flatten_info": {},
        "buffer_info": {},
        "world_size": job.world_size,
        "rank": rank,
    }
    for unit in job.units:
        parameters, flatten_info = full_parameters(job, unit)
        metadata["flatten_info"] |= flatten_info
        info = metadata["shard_info"][unit.path] = {}
        for name, tensor in parameters.items():
            shard = f"_fsdp_shard.{name}".replace(".", SEPARATOR)
            info[shard] = {"_orig_size": tensor.shape, "_orig_name": name}
            model[join(unit.path, shard)] = job.shard(tensor, rank)
        for name, (tensor, cast) in unit.buffers.items():
            model[join(unit.path, WRAPPED, name)] = tensor.to(cast)
            inside = join(unit.path, WRAPPED, "_fpw_module", name)
            if tensor.dtype != cast:
                metadata["buffer_info"][inside] = {"_orig_dtype": tensor.dtype}
    return {"model": model, "shard_metadata": metadata}


def moment(tensor: torch.Tensor) -> torch.Tensor:
    """An optimizer's state that can be told from the parameter."""
    return tensor * 0.5 + 1


def with_adam(job: Job, content: dict[str, Any]) -> dict[str, Any]:
    """Adds Adam's state_dict() of the rank; the exp_avg of padding is 0."""
    rank = content["shard_metadata"]["rank"]
    state, index = {}, 0
    for unit in job.units:
        for tensor in full_parameters(job, unit)[0].values():
            state[index] = {
                "step": torch.tensor(7.0),
                "exp_avg": job.shard(moment(tensor), rank),
            }
            index += 1
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(index))}
    content["optimizer"] = {"state": state, "param_groups": [group]}
    return content


def save(job: Job, folder: Path, *, adam: bool = False) -> str:
    """Write every rank's file; return the prefix for "*.pth"."""
    for rank in range(job.world_size):
        content = rank_content(job, rank)
        if adam:
            with_adam(job, content)
        torch.save(content, folder / f"ckpt-rank-{rank}-of-{job.world_size}.pth")
    return str(folder / "ckpt")


def values(*shape: int) -> torch.Tensor:
    torch.manual_seed(math.prod(shape) + len(shape))
    return torch.randn(*shape)


def nested_job(world_size: int, **options: bool) -> Job:
    """A root with an embedding, a frozen matrix and buffers, around an inner unit."""
    inner = Unit(
        f"{WRAPPED}.block",
        {"fc.weight": values(12, 5), "fc.bias": values(12)},
    )
    root = Unit(
        "",
        {"embed.weight": values(24, 12), "frozen.weight": values(12, 12)},
        frozen=("frozen.weight",),
        buffers={
            "norm.running_mean": (values(6).bfloat16().float(), torch.bfloat16),
            "norm.num_batches_tracked": (torch.tensor(3), torch.int64),
            "half": (values(4).half(), torch.float32),
        },
    )
    return Job([root, inner], world_size, **options)


def whole(job: Job) -> Tensors:
    """The unwrapped module's state_dict."""
    found: Tensors = {}
    for unit in job.units:
        inside = unit.path.replace(f"{WRAPPED}.", "")
        found |= {join(inside, n): p for n, p in unit.parameters.items()}
        found |= {join(inside, n): b for n, (b, _) in unit.buffers.items()}
    return found
