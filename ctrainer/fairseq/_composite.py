"""fairseq's composite: an optimizer and a schedule for each group of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ctrainer.fairseq._optim_options import name_of
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler


@dataclass(frozen=True)
class Group:
    """Parameters whose param_group is the name, and their two config groups."""

    name: str
    params: list[Any]
    optimizer: Any
    lr_scheduler: Any


def groups_of(cfg: Any, params: Iterable[Any]) -> list[Group]:
    """The groups of a config `composite`, in the order of their names.

    A parameter belongs to the group that its attribute param_group names, "default"
    where it has none. A group's own `lr` overrides that of its two configs.

    Raises ValueError for groups without parameters or parameters without a group, for a
    group without a rate, and for dynamic_groups.
    """
    if getattr(cfg, "dynamic_groups", False):
        raise ValueError(
            "optimizer.dynamic_groups: groups are not made of the parameters' "
            "optim_overrides here; name each of them in optimizer.groups"
        )
    members: dict[str, list[Any]] = {}
    for param in params:
        members.setdefault(getattr(param, "param_group", "default"), []).append(param)
    configs = cfg.groups
    if set(configs) != set(members):
        raise ValueError(
            f"optimizer.groups has {sorted(configs)}, and the parameters are of "
            f"{sorted(members)}: these have to be the same (a parameter without the "
            "attribute param_group is of 'default')"
        )
    return [_group(name, configs[name], members[name]) for name in sorted(members)]


def _options(cfg: Any) -> dict[str, Any]:
    return dict(cfg) if isinstance(cfg, Mapping) else dict(vars(cfg))


def _group(name: str, cfg: Any, params: list[Any]) -> Group:
    options = _options(cfg)
    rate = {"lr": options["lr"]} if options.get("lr") is not None else {}
    made = {
        key: SimpleNamespace(**{**_options(options[key]), **rate})
        for key in ("optimizer", "lr_scheduler")
        if options.get(key) is not None
    }
    if not hasattr(made.get("optimizer"), "lr"):
        raise ValueError(
            f"optimizer.groups[{name!r}] has no rate: give it `lr`, or its `optimizer`"
        )
    return Group(name, params, made["optimizer"], made.get("lr_scheduler"))


class CompositeLRScheduler:
    """A schedule for each group, as the optimizer's lr_scheduler: the schedule
    pass_through hands everything on to it."""

    def __init__(self, schedules: dict[str, Any]) -> None:
        self.lr_schedulers = schedules

    def _each(self, method: str, *args: Any) -> dict[str, Any]:
        return {k: getattr(s, method)(*args) for k, s in self.lr_schedulers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states by the groups' names."""
        return self._each("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what state_dict() of the same groups gave."""
        for name, schedule in self.lr_schedulers.items():
            schedule.load_state_dict(state_dict[name])

    def step_begin_epoch(self, epoch: int) -> dict[str, Any]:
        """Begin an epoch in every group; the rates by the groups' names."""
        return self._each("step_begin_epoch", epoch)

    def step(self, epoch: int, val_loss: float | None = None) -> dict[str, Any]:
        """End an epoch in every group; the rates by the groups' names."""
        return self._each("step", epoch, val_loss)

    def step_update(self, num_updates: int) -> dict[str, Any]:
        """Set every group's rate; the rates by the groups' names."""
        return self._each("step_update", num_updates)


def schedules_of(cfg: Any, optimizer: Any) -> CompositeLRScheduler | None:
    """The schedules of a config `composite` over an optimizer made of its groups, or
    None where no group has one.

    Raises ValueError where some have and others have not.
    """
    from ctrainer.adapters.torch_fairseq import OneGroup

    groups = groups_of(cfg, (p for g in optimizer.param_groups for p in g["params"]))
    without = [group.name for group in groups if group.lr_scheduler is None]
    if len(without) == len(groups):
        return None
    if without:
        raise ValueError(
            f"optimizer.groups {without} have no lr_scheduler, and others have: give "
            "every group one, or none"
        )
    return CompositeLRScheduler(
        {
            group.name: build_lr_scheduler(
                group.lr_scheduler._name, group.lr_scheduler, OneGroup(optimizer, index)
            )
            for index, group in enumerate(groups)
        }
    )


def is_composite(cfg: Any) -> bool:
    """Whether a config group names composite."""
    return name_of(cfg) == "composite"
