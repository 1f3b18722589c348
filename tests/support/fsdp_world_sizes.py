"""Saving a sharded module and its optimizer, and going on with them, on any ranks.

What every rank of a group calls, whatever the group is made of. A digest is of all
values, so that runs on different numbers of ranks can be compared bit for bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import fsdp_trees as trees
import torch
from fsdp_trees import Case, Layer
from torch import nn

from ctrainer.fsdp import FullyShardedDataParallel as FSDP
from ctrainer.fsdp import load_shard, reshard_checkpoints, save_shard

LAYERS = (
    Layer("tied", unit=True),
    Layer("norm", frozen=True),
    Layer("nest", (Layer("scale"), Layer("linear", unit=True), Layer("norm"))),
    Layer("again"),
)
# By name: the options, and the ending of files.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "flat": ({"flatten_parameters": True}, "pth"),
    "each": ({"_shard_size_multiple": 8}, "safetensors"),
    "rows": ({"shard_param_on_dim_0": True}, "safetensors"),
    "views": ({"flatten_parameters": True, "use_orig_params": True}, "pth"),
}
BEFORE, AFTER = 3, 2  # updates
SIZES = (1, 2, 3, 4)


def by_shards(layout: str) -> bool:
    """Whether files can be made for other ranks; views' states are of their ranks."""
    return layout != "views"


def digest(model: FSDP, optimizer: torch.optim.Optimizer) -> str:
    state = FSDP.optim_state_dict(model, optimizer)["state"]
    found = hashlib.sha256()
    for name, value in sorted(model.full_state_dict().items()):
        found.update(f"{name} {value.shape}".encode() + value.cpu().numpy().tobytes())
    for name, values in sorted(state.items()):
        for key, value in sorted(values.items()):
            found.update(f"{name} {key}".encode() + value.cpu().numpy().tobytes())
    return found.hexdigest()


def made(group: Any, plain: nn.Sequential, layout: str) -> tuple[FSDP, Any]:
    model = trees.sharded(plain, Case(first=LAYOUTS[layout][0]), group)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: FSDP, optimizer: Any, group: Any, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        x, y = trees.part(number, group.rank, group.world_size)
        trees.loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def prefix_of(folder: Path, layout: str, world: int) -> str:
    return f"{folder}/{layout}-by-{world}"


def path_of(prefix: str, rank: int, world: int, ending: str) -> str:
    return f"{prefix}-rank-{rank}-of-{world}.{ending}"


def save(group: Any, plain: nn.Sequential, layout: str, folder: Path) -> list[str]:
    """Train and save; the digests at the save and some updates later."""
    model, optimizer = made(group, plain, layout)
    train(model, optimizer, group, 0, BEFORE)
    world, ending = group.world_size, LAYOUTS[layout][1]
    prefix = prefix_of(folder, layout, world)
    full = {"model": model.full_state_dict()}
    full["optimizer"] = FSDP.optim_state_dict(model, optimizer)
    if group.rank == 0:
        torch.save(full, f"{prefix}.full")
    content = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    save_shard(content, path_of(prefix, group.rank, world, ending))
    digests = [digest(model, optimizer)]
    train(model, optimizer, group, BEFORE, AFTER)
    return [*digests, digest(model, optimizer)]


def reshard(folder: Path, layout: str, old: int, new: int) -> None:
    """Make the files of `new` ranks of those that `old` have saved."""
    prefix = prefix_of(folder, layout, old)
    ending = LAYOUTS[layout][1]
    reshard_checkpoints(
        prefix, f"-rank-?-of-{old}.{ending}", world_size=new, save_prefix=prefix
    )


def resume(
    group: Any, plain: nn.Sequential, layout: str, folder: Path, old: int, ways: str
) -> list[str]:
    """Go on with what `old` ranks saved, by "shards" or by the "full" states; the
    digests of what was loaded and some updates later."""
    model, optimizer = made(group, plain, layout)
    prefix, ending = prefix_of(folder, layout, old), LAYOUTS[layout][1]
    if ways == "full":
        full = torch.load(f"{prefix}.full", weights_only=True)
        model.load_full_state_dict(full["model"])
        state = FSDP.shard_full_optim_state_dict(full["optimizer"], model, optimizer)
        optimizer.load_state_dict(state)
    else:
        path = path_of(prefix, group.rank, group.world_size, ending)
        content = load_shard(path)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    digests = [digest(model, optimizer)]
    train(model, optimizer, group, BEFORE, AFTER)
    return [*digests, digest(model, optimizer)]
