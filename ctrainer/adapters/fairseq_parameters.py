"""Which parameter each entry of an optimizer's saved state belongs to.

An optimizer numbers its parameters in the order of the model that it was saved with,
and releases of fairseq declare theirs in different orders: 0.9 has `embed_out` before
all others of a decoder, 0.12.2 keeps copies of each encoder layer's weights that are
parameters without gradients. The keys of the saved weights are in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ctrainer.adapters.torch_fairseq import unflatten_state

State = dict[str, Any]


def upgraded_weights(model: Any, weights: State) -> State:
    """Saved weights by the names of today, as the model's upgrade_state_dict() says;
    `weights` stay as they are."""
    made = dict(weights)
    upgrade = getattr(model, "upgrade_state_dict", None)
    if upgrade is not None:
        upgrade(made)
    return made


def state_in_order(
    saved: State, model: Any, weights: State, shapes: list[torch.Size]
) -> State:
    """The state of an optimizer, its parameters numbered as `model` has them.

    saved: of one group of parameters, each with an entry or all joined to one; a state
    of several groups is returned as it is. weights: the model's, as they were saved
    beside it. shapes: of all parameters that the optimizer updates now, in its order:
    the model's that are trained, then any others.

    Raises ValueError where `saved` has another number of parameters.
    """
    order, extra = _places(model, weights, _names_of_trained(model))
    if order is not None:
        others = len(shapes) - len(order)
        if others < 0:
            return saved  # an optimizer of fairseq's own joins its parameters
        order = [*order, *range(len(weights), len(weights) + others)]
    return _in_order(saved, shapes, order, extra)


def _in_order(
    saved: State,
    shapes: list[torch.Size],
    order: list[int] | None,
    extra: dict[int, torch.Size],
) -> State:
    """The state of parameters of these shapes. order: where each is among those that
    were saved, None: in this order; extra: places and shapes of those that may be
    among them and are not wanted."""
    groups = saved["param_groups"]
    if len(groups) != 1:
        return saved
    if order is None:
        order, extra = list(range(len(shapes))), {}
    known = dict(zip(order, shapes, strict=True))
    for kept in (known, {**known, **extra}):
        ranks = {place: rank for rank, place in enumerate(sorted(kept))}
        entries = _entries(saved, [kept[place] for place in ranks])
        if entries is not None:
            numbers = [ranks[place] for place in order]
            state = {i: entries[n] for i, n in enumerate(numbers) if n in entries}
            _check_shapes(state, shapes)
            group = {**groups[0], "params": list(range(len(shapes)))}
            return {**saved, "state": state, "param_groups": [group]}
    raise ValueError(
        f"the checkpoint's optimizer has {_described(saved)}, and this one "
        f"{len(shapes)} parameters of {sum(s.numel() for s in shapes)} elements: reset "
        "the optimizer (--reset-optimizer)"
    )


def _check_shapes(state: dict[int, State], shapes: list[torch.Size]) -> None:
    for i, entry in state.items():
        for name, value in entry.items():
            like = isinstance(value, torch.Tensor) and value.dim() == len(shapes[i])
            if like and value.shape != shapes[i]:
                raise ValueError(
                    f"the checkpoint's optimizer has {name} of shape "
                    f"{tuple(value.shape)} for parameter {i}, which is of "
                    f"{tuple(shapes[i])}: reset the optimizer (--reset-optimizer)"
                )


def sharded_state_in_order(
    saved: State, model: Any, weights: State, names: list[str]
) -> State:
    """The same for an optimizer of sharded parameters, of which `names` are numbered.

    saved: as gather_full_optim_state_dict() gives it, which is returned as it is, or of
    a run without sharding.
    """
    if "param_id_map" in saved:
        return saved
    upgraded = upgraded_weights(model, weights)
    shapes = [upgraded[name].shape for name in names]
    own = [[name] for name in names]
    made = _in_order(saved, shapes, *_places(model, weights, own))
    return {**made, "param_id_map": dict.fromkeys(range(len(names)), 0)}


def _places(
    model: Any, weights: State, names: list[list[str]]
) -> tuple[list[int] | None, dict[int, torch.Size]]:
    """(where in `weights` each of the parameters with these names is, or None where the
    order is the model's own or unknown; the shapes of saved tensors that the
    model has no use for, by their places)."""
    upgraded = upgraded_weights(model, weights)
    index = {name: i for i, name in enumerate(weights)}
    origin = {id(value): i for i, value in enumerate(weights.values())}
    at = {
        name: index[name] if weights.get(name) is value else origin.get(id(value))
        for name, value in upgraded.items()
    }
    here = {name: i for i, name in enumerate(model.state_dict())}
    used = {id(value) for value in upgraded.values()}
    extra = {
        i: value.shape
        for i, (name, value) in enumerate(weights.items())
        if id(value) not in used and name not in here
    }
    places = [_least(at, own) for own in names]
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        return None, {}  # the model makes new tensors of the saved ones
    if not extra and _ranks(known) == _ranks([_least(here, own) or 0 for own in names]):
        return None, {}
    return known, extra


def _names_of_trained(model: Any) -> list[list[str]]:
    """All names of each parameter that is trained, in the order of parameters()."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _least(places: Mapping[str, int | None], names: list[str]) -> int | None:
    found = (places.get(name) for name in names)
    return min((place for place in found if place is not None), default=None)


def _ranks(values: list[int]) -> list[int]:
    """The numbers of the values, in rising order."""
    return sorted(range(len(values)), key=values.__getitem__)


def _entries(saved: State, shapes: list[torch.Size]) -> dict[int, State] | None:
    """The state of each of the parameters of these shapes; None where it is that of
    others. Releases of torch before 1.5 number parameters by their addresses."""
    numbers, state = saved["param_groups"][0]["params"], saved["state"]
    if len(numbers) == len(shapes):
        return {i: state[n] for i, n in enumerate(numbers) if n in state}
    if len(numbers) != 1:
        return None
    if numbers[0] not in state:
        return {}
    joined = {"state": {0: state[numbers[0]]}, "param_groups": [{"params": [0]}]}
    parts = unflatten_state(joined, shapes)
    return None if parts is joined else parts["state"]


def _described(saved: State) -> str:
    numbers = saved["param_groups"][0]["params"]
    if len(numbers) != 1:
        return f"{len(numbers)} parameters"
    values = saved["state"].get(numbers[0], {}).values()
    sizes = [v.numel() for v in values if isinstance(v, torch.Tensor)]
    return f"1 parameter of {max(sizes, default=0)} elements"
