"""fairscale's format of an optimizer's whole state: parameters are numbered."""

from __future__ import annotations

from typing import Any

import torch

from ctrainer.fsdp import optim_state
from ctrainer.fsdp.optim_state import held_in

State = dict[str, Any]


def is_singleton_tensor(x: Any) -> bool:
    """Return whether it is a tensor of no dimension, as a count of steps is.

    Args:
        x: Anything.
    """
    return isinstance(x, torch.Tensor) and x.dim() == 0


def _names_of(module: Any) -> list[list[str]]:
    """Of the parameters in each shard, units in the order of modules()."""
    return [held.names for held in held_in(module)]


def gather(module: Any, optim: torch.optim.Optimizer) -> State | None:
    """See FullyShardedDataParallel.gather_full_optim_state_dict."""
    full = optim_state.full_optim_state_dict(module, optim)
    if not full:
        return None
    shards = [i for i, names in enumerate(_names_of(module)) for _ in names]
    names = [name for names in _names_of(module) for name in names]
    numbers = {name: number for number, name in enumerate(names)}
    numbered = optim_state.rekeyed(full, numbers)
    return {
        "state": dict(sorted(numbered["state"].items())),
        "param_groups": numbered["param_groups"],
        "param_id_map": dict(enumerate(shards)),
        "uncollected_local_ids": [],
    }


def shard(module: Any, full: State) -> State:
    """See FullyShardedDataParallel.get_shard_from_optim_state_dict."""
    names = [name for names in _names_of(module) for name in names]
    if set(range(len(names))) != set(full["param_id_map"]):
        raise AssertionError(
            f"Including itself, this model has {len(module.units())} nested instances "
            f"with {len(names)} parameters. When the optimizer state was saved there "
            f"were {len(full['param_id_map'])} parameters"
        )
    named = optim_state.rekeyed(full, dict(enumerate(names)))
    known = ("state", "param_groups", "param_id_map", "uncollected_local_ids")
    rest = {key: value for key, value in full.items() if key not in known}
    return rest | optim_state.shard_full_optim_state_dict(named, module)
