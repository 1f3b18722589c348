"""Parameters as users change them after their module was wrapped: frozen or trained
again, and, which is rejected, by the forward while they are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ctrainer.fsdp import shard_files
from ctrainer.fsdp.layout import Entry, Group, Place, tensor_over

# Frozen, or trained again.


def _held(unit: Any) -> Iterator[tuple[Group, Entry, Any]]:
    """Each parameter, and the tensor that optimizers have: a view, or a shard."""
    for number, (group, shard) in enumerate(
        zip(unit._groups, unit.sharded_params, strict=True)
    ):
        views = unit._views[number].pieces if unit.use_orig_params else ()
        for place, entry in enumerate(group.entries):
            yield group, entry, views[place][0] if views else shard


def watched(unit: Any) -> tuple[Any, ...]:
    """The tensors whose requires_grad the engine compares before a forward: for each
    parameter the optimizers' tensor and itself, first for those wrapped as trained."""
    trained: list[Any] = []
    frozen: list[Any] = []
    for group, entry, held in _held(unit):
        (trained if group.requires_grad else frozen).extend((held, entry.param))
    return (*trained, *frozen)


def settle(unit: Any) -> tuple[bool, ...]:
    """Which of the parameters that were wrapped as trained are frozen now; sets both
    tensors of a parameter to the requires_grad that has changed.

    Raises RuntimeError for a parameter that was wrapped frozen and is to be trained,
    and for a part of a flat parameter.
    """
    found = []
    for group, entry, held in _held(unit):
        own, shown = entry.param.requires_grad, held.requires_grad
        path = entry.places[0].path
        if not group.requires_grad:
            if own or shown:
                raise RuntimeError(
                    f"{path} requires a gradient, and was frozen when it was wrapped: "
                    "there is no room for one. Wrap it while it requires gradients, "
                    "and freeze it after that"
                )
            continue
        trains = shown if shown != entry.trains else own
        if trains != shown and not unit.use_orig_params and len(group.entries) > 1:
            raise RuntimeError(
                f"{path}.requires_grad is {own}, and it is part of a flat parameter, "
                f"whose requires_grad is {shown}: wrap with use_orig_params=True, "
                "which has a parameter for each, or flatten_parameters=False"
            )
        entry.trains = trains
        entry.param.requires_grad_(trains)
        held.requires_grad_(trains)
        found.append(not trains)
    return tuple(found)


# Replaced or changed in place by a forward.


def _each_attribute(unit: Any) -> Iterator[tuple[int, Entry, Place]]:
    """The attributes that are parameters, with the numbers of their groups."""
    for number, group in enumerate(unit._groups):
        for entry in group.entries:
            for place in entry.places:
                yield number, entry, place


def attributes(unit: Any) -> tuple[Any, ...]:
    """What the engine compares after a forward: for each attribute that is a parameter
    the __dict__ that has it, its name, the parameter and its address."""
    found: list[Any] = []
    for _, entry, place in _each_attribute(unit):
        at = entry.param.data_ptr()
        found.extend((place.module.__dict__, place.name, entry.param, at))
    return tuple(found)


def _path(unit: Any, place: Place) -> str:
    return shard_files.original_name(f"{unit._unit.path}.{place.path}".lstrip("."))


_INSTEAD = (
    "Change parameters between updates, in summon_full_params(), or keep what the "
    "forward changes in a buffer"
)


def _written(path: str) -> RuntimeError:
    return RuntimeError(
        f"{path} was changed in the forward of its sharded unit: gathered parameters "
        "are dropped afterwards, and the shards, which optimizers and checkpoints "
        f"have, do not change with them. {_INSTEAD}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of which NaNs are equal, too."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _home(unit: Any, number: int, entry: Entry) -> torch.Tensor:
    """The parameter's place in the unit's memory."""
    dtype = unit._groups[number].gathered_as(unit.compute_dtype)
    begin = unit._unit.offsets[number] // dtype.itemsize
    return tensor_over(unit._unit.full, dtype, begin + entry.at, entry.param.size())


def restore(unit: Any, index: int) -> None:
    """Move a parameter that a forward gave other memory back to the unit's, as cuDNN's
    recurrent layers do in flatten_parameters().

    Raises RuntimeError if the forward has changed or replaced it.
    """
    number, entry, place = [*_each_attribute(unit)][index]
    path, found = _path(unit, place), place.module.__dict__.get(place.name)
    if found is not entry.param:
        raise RuntimeError(
            f"{path} is another object than when its module was wrapped: a sharded "
            "unit gathers, reduces and updates the parameter that it was given. "
            "Replace parameters before the module is wrapped"
        )
    param: Any = entry.param
    home = _home(unit, number, entry)
    if param.data_ptr() == home.data_ptr():
        raise _written(path)
    kinds = [(it.dtype, it.shape, it.device) for it in (param, home)]
    if kinds[0] != kinds[1] or not torch.equal(_bits(param), _bits(home)):
        raise RuntimeError(
            f"{path}.data has been assigned since its module was wrapped: a sharded "
            "unit gathers the parameter into memory of its own, and what was assigned "
            f"would never be trained or saved. {_INSTEAD}"
        )
    param.data = home


@torch.no_grad()
def compare_gathered(unit: Any) -> None:
    """Raise RuntimeError where the gathered parameters are not what this rank's shards
    are: a change through `.data` has no version.

    Quantized parameters differ from shards, and shards in a file are not read again.
    """
    if unit.gather_bits or unit._shard_file is not None:
        return
    engine = unit._unit
    for group, shard, offset in zip(
        unit._groups, unit.sharded_params, engine.offsets, strict=True
    ):
        dtype = group.gathered_as(unit.compute_dtype)
        begin = offset // dtype.itemsize + unit.rank * shard.numel()
        own = tensor_over(engine.full, dtype, begin, shard.size())
        expected = shard.to(own.device, dtype)
        if torch.equal(own, expected):
            continue
        differ = (own != expected) & ~(own.isnan() & expected.isnan())
        changed = differ.view(-1).nonzero()
        if len(changed) > 0:
            at = unit.rank * shard.numel() + int(changed[0])
            entry = max((e for e in group.entries if e.at <= at), key=lambda e: e.at)
            raise _written(_path(unit, entry.places[0]))
