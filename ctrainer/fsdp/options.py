"""The constructor's arguments: options, the device, the groups of ranks."""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ctrainer import _C, comm
from ctrainer.comm import nccl
from ctrainer.fsdp.layout import FLOAT_DTYPES, FROZEN_DTYPES
from ctrainer.fsdp.shard_files import dtype_name
from ctrainer.runtime.torch_process import accelerator


def check_module(module: nn.Module, wrapper: type) -> None:
    """Reject what is wrapped already, and containers that are never called."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            "module must be an nn.Module, whose parameters FSDP shards, not a "
            f"{type(module).__name__}"
        )
    if isinstance(module, wrapper):
        raise RuntimeError(
            "Cannot wrap a module that is already wrapped with FSDP. For nested FSDP, "
            "first wrap the inner child modules before wrapping the outer parent "
            "module."
        )
    forward = getattr(module.forward, "__func__", module.forward)
    if forward is nn.Module.forward:
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
    """Of the dtypes that can be sharded, those of inner units among them."""
    for name, param in module.named_parameters():
        if is_traceable_wrapper_subclass(param):
            raise TypeError(
                f"{name} is a {type(param).__name__}, of several tensors, and a shard "
                "is a part of one: quantize with bitsandbytes, whose 4-bit weights are "
                "one tensor, or train without sharding"
            )
        known = FLOAT_DTYPES if param.requires_grad else FLOAT_DTYPES + FROZEN_DTYPES
        if param.dtype not in known:
            names = ", ".join(map(dtype_name, known))
            raise TypeError(
                f"{name} is {param.dtype}; "
                f"{'trained' if param.requires_grad else 'frozen'} parameters may be "
                f"{names}: convert it first"
            )


def is_float32(module: nn.Module) -> bool:
    return all(param.dtype == torch.float32 for param in module.parameters())


def float_dtype(name: str, dtype: Any) -> torch.dtype | None:
    """A dtype to compute in, also by its name ("bfloat16", "torch.bfloat16")."""
    if dtype is None:
        return None
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


def forward_prefetch(given: Any) -> bool | None:
    """True, False, or None: by the device."""
    if isinstance(given, str):
        raise ValueError(
            f"forward_prefetch must be True, False or None, not {given!r} (str)"
        )
    return None if given is None else bool(given)


def backward_prefetch(given: Any) -> str | None:
    """The word BACKWARD_PRE, BACKWARD_POST or AUTO, also of torch's enum; or None."""
    name = getattr(given, "name", given)
    if name not in (None, "AUTO", "BACKWARD_PRE", "BACKWARD_POST"):
        raise ValueError(
            "backward_prefetch must be BACKWARD_PRE, BACKWARD_POST, AUTO or None, not "
            f"{given!r}"
        )
    return name  # type: ignore[no-any-return]


def block(size: int | None, by_rows: bool) -> int:
    """block_size, 1 for None."""
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"block_size must be 1 or more elements or None, not {size!r}")
    if size is not None and by_rows:
        raise ValueError(
            f"block_size={size} is of parameters that are cut between any elements, "
            "and on_neuron=True or shard_param_on_dim_0=True cuts them between rows: "
            "pass on_neuron=False without shard_param_on_dim_0, or no block_size"
        )
    return size or 1


def check_flags(init: Any, given: dict[str, Any]) -> None:
    """Reject text for a truth value: "false" would be true."""
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


# The device of a module's parameters, and the group of its ranks there.


@dataclass(frozen=True)
class Home:
    """Memory that a unit works in. plugin: of its device, None for the host's."""

    device: torch.device
    plugin: Any = None

    def group(self, over: _C.Communicator | None) -> _C.Communicator | None:
        """The ranks of `over`, as a group that takes this memory. Collective."""
        return over if over is None or self.plugin is None else _on_gpu(over)


def home_of(module: nn.Module, given: torch.device | None = None) -> Home:
    """The one device on which are the module's parameters that no inner unit has.

    Raises ValueError naming parameters on two devices, one that is neither the host
    nor the current GPU, or another than is given; RuntimeError saying what of the
    plugin is missing.
    """
    devices = {
        param.device: name
        for name, param in module.named_parameters()
        if not hasattr(param, "_is_sharded") and not hasattr(param, "_sharded_param")
    }
    if len(devices) > 1:
        each = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"a unit's parameters are on one device, and here are {each}: move the "
            "module to one, or wrap the modules on the others as units of their own"
        )
    if not devices:
        return _of_inner_units(module)
    (device,) = devices
    if given is not None and device != given:
        raise ValueError(
            f"the module is on {device} and device_id is {given}: only what is on the "
            "CPU or the meta device is moved there. Move the module, or leave device_id"
        )
    return at(device)


def at(device: torch.device) -> Home:
    """Of the host or the current GPU.

    Raises ValueError for another device, RuntimeError saying what of the plugin is
    missing.
    """
    if device.type == "cpu":
        return Home(device)
    return Home(_usable(device), nccl.plugin().plugin)


def _of_inner_units(module: nn.Module) -> Home:
    """A module without parameters of its own is where those below it are."""
    found = (getattr(child, "home", None) for child in module.modules())
    homes = [home for home in found if isinstance(home, Home)]
    return homes[0] if homes else Home(torch.device("cpu"))


def device_of(given: Any) -> torch.device | None:
    """device_id: a device, its name, or the number of a GPU; None stays None."""
    if given is None:
        return None
    there = accelerator()
    if isinstance(given, bool) or (isinstance(given, int) and there is None):
        raise ValueError(
            f"device_id is {given}; expected a torch.device, or the number of a GPU "
            f"where torch finds one, which is {there or 'none'} here"
        )
    if isinstance(given, int):
        assert there is not None
        given = torch.device(there.type, given)
    device = torch.device(given)
    return torch.device("cpu") if device.type == "cpu" else _usable(device)


def current(kind: str) -> torch.device:
    """The current device of a type."""
    return _usable(torch.device(kind))


def _usable(device: torch.device) -> torch.device:
    there = accelerator()
    if there is None or device.type != there.type:
        raise ValueError(
            f"the module is to be on {device}; parameters can be sharded on the CPU "
            f"and on torch's accelerator, which is {there or 'none'} here"
        )
    current = torch.device(there.type, torch.accelerator.current_device_index())
    if device.index not in (None, current.index):
        raise ValueError(
            f"the module is to be on {device}, the current device is {current}: call "
            f"torch.{there.type}.set_device({device.index}) first"
        )
    return current


@functools.cache
def _on_gpu(over: _C.Communicator) -> _C.Communicator:
    """NCCL's group of the same ranks, on a stream beside that of the computation."""
    if over.backend == "nccl":
        return over
    there = torch.accelerator.current_accelerator()
    assert there is not None  # where the parameters are
    return nccl.beside(over, there)


# The sharding group and the replicate group.


Groups = tuple[_C.Communicator, _C.Communicator | None]


def hybrid_groups(
    ranks_a_group: int, world: _C.Communicator | None = None
) -> tuple[_C.Communicator, _C.Communicator]:
    """Divide the ranks into groups of so many, one after the other, for hybrid
    sharding.

    Collective.

    Args:
        ranks_a_group (int): Ranks of a sharding group, best the number of ranks on a
            machine.
        world (_C.Communicator | None, default None): The ranks to divide; None:
            ctrainer.comm.world().

    Returns:
        This rank's sharding group, and its replicate group: the ranks that have its
        place in their groups. FSDP takes the pair as process_group.

    Raises:
        ValueError: the ranks cannot be divided so.

    Example:
        >>> from ctrainer.fsdp import hybrid_groups
        >>> sharding_group, replicate_group = hybrid_groups(1)
        >>> sharding_group.world_size, replicate_group.world_size
        (1, 1)
    """
    world = comm.world() if world is None else world
    if ranks_a_group < 1 or world.world_size % ranks_a_group != 0:
        raise ValueError(
            f"ranks_a_group is {ranks_a_group}; expected a divisor of the "
            f"{world.world_size} ranks"
        )
    sharding_group = world.split(world.rank // ranks_a_group)
    replicate_group = world.split(world.rank % ranks_a_group)
    assert sharding_group is not None
    assert replicate_group is not None
    return sharding_group, replicate_group


def groups_of(
    process_group: Any,
    device_mesh: Any,
    sharding_groups: Any,
    replica_groups: Any,
    rank: int | None,
    world_size: int | None,
) -> Groups:
    """The sharding group and the replicate group of the constructor's arguments."""
    given = process_group if device_mesh is None else _of_mesh(device_mesh)
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(
                f"process_group is a tuple of {len(given)}; expected the sharding "
                "group and the replicate group"
            )
        return _checked(_adopted(given[0]), _adopted(given[1]))
    shards = _sharding_group(given, sharding_groups, rank, world_size)
    if replica_groups is None:
        return shards, None
    return _checked(shards, _of_lists(replica_groups))


def _sharding_group(
    process_group: Any, sharding_groups: Any, rank: int | None, world_size: int | None
) -> _C.Communicator:
    """The sharding group: as given, this rank's list of ranks, or all ranks."""
    if process_group is not None:
        return _adopted(process_group)
    if sharding_groups is None:
        return comm.world()
    if rank is None or world_size is None:
        raise ValueError(
            "sharding_rank and sharding_world_size must be provided when "
            "sharding_groups is specified"
        )
    found = _of_lists(sharding_groups)
    if (found.rank, found.world_size) != (rank, world_size):
        raise ValueError(
            f"sharding_rank={rank} and sharding_world_size={world_size}, but "
            f"sharding_groups makes this rank {found.rank} of {found.world_size}"
        )
    return found


def _checked(
    sharding_group: _C.Communicator, replicate_group: _C.Communicator
) -> Groups:
    """Replicas must have the same rank in sharding groups of one size. Collective."""
    own = f"rank {sharding_group.rank} of {sharding_group.world_size}"
    for replica, place in enumerate(replicate_group.gather_bytes(own.encode())):
        if place.decode() != own:
            raise ValueError(
                f"replica {replica} has the shards of {place.decode()}, replica "
                f"{replicate_group.rank} those of {own}: they do not have the same "
                "shards"
            )
    return sharding_group, replicate_group


def _of_mesh(mesh: Any) -> Any:
    """Of torch's DeviceMesh: (shard) or (replicate, shard)."""
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"device_mesh has {mesh.ndim} dimensions; expected 1, or 2 for hybrid "
            "sharding: replicate and shard"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    return mesh.get_group(1), mesh.get_group(0)


def _adopted(group: Any) -> _C.Communicator:
    if isinstance(group, _C.Communicator):
        return group
    from ctrainer.comm import process_group

    return process_group.shared_communicator(group)


def _of_lists(groups: Any) -> _C.Communicator:
    if isinstance(groups, _C.Communicator):
        return groups
    return _own_group(tuple(tuple(group) for group in groups))


@functools.cache
def _own_group(groups: tuple[tuple[int, ...], ...]) -> _C.Communicator:
    """The communicator of the list that this rank is in, one for all units."""
    world = comm.world()
    own = [group for group in groups if world.rank in group]
    if len(own) != 1:
        raise ValueError(
            f"rank {world.rank} must be in exactly one of the lists of ranks {groups}"
        )
    if len(own[0]) == world.world_size:
        return world
    made = world.split(groups.index(own[0]), own[0].index(world.rank))
    assert made is not None
    return made
