"""Several optimizers, by parameter group, in one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from ctrainer.optim._adafactor import Adafactor
from ctrainer.optim._adam import Adam, Adamax, AdamW, AdEMAMix, RAdam
from ctrainer.optim._adaptive import Adadelta, Adagrad, RMSprop
from ctrainer.optim._fairseq import FairseqAdam, FairseqAdamax, FairseqNAG
from ctrainer.optim._layerwise import LAMB, LARS
from ctrainer.optim._muon import Muon
from ctrainer.optim._precision import Precision
from ctrainer.optim._sgd import SGD, Lion
from ctrainer.optim._wrapper import EngineOptimizer

__all__ = ["Composite"]

_CLASSES: dict[str, type[EngineOptimizer]] = {
    cls._kind: cls
    for cls in (
        *(AdamW, Adam, AdEMAMix, Adamax, RAdam, Adadelta, Adagrad, RMSprop, Lion, SGD),
        *(FairseqAdam, FairseqAdamax, FairseqNAG, Adafactor, LAMB, LARS, Muon),
    )
}


class Composite(EngineOptimizer):
    """An optimizer of its own for each group, all in one step.

    Any optimizer of ctrainer.optim will do but the schedule-free ones, which have modes
    of their own. One norm and one clipping span all groups. The groups of param_groups
    are live and name their optimizer under "kind", so state_dict() brings it back; load
    it into a Composite of groups with the same optimizers.

    Args:
        groups (Iterable[dict[str, Any]]): Dicts of "params", "optimizer" (a class of
            ctrainer.optim; AdamW where it is missing) and that class's options, whose
            defaults are filled in.
        precision (Unpack[Precision]): Precision's options, the defaults of every group.

    Raises:
        TypeError: "optimizer" is no class of ctrainer.optim's; an option that it lacks.
        ValueError: as that class's; loading groups of other kinds.

    Example:
        >>> import torch
        >>> from ctrainer.optim import Composite, Muon
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = Composite([
        ...     {"params": layer.weight, "optimizer": Muon, "lr": 0.02},
        ...     {"params": layer.bias, "lr": 3e-4, "weight_decay": 0.0},
        ... ])
        >>> [group["kind"] for group in optimizer.param_groups]
        ['muon', 'adamw']
    """

    _kind = AdamW._kind

    def __init__(
        self, groups: Iterable[dict[str, Any]], **precision: Unpack[Precision]
    ) -> None:
        super().__init__(groups, defaults={}, **precision)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of "params", "optimizer" and options.

        Args:
            param_group (dict[str, Any]): The group, as the constructor takes it; "kind"
                may stand for "optimizer".

        Raises:
            TypeError: "optimizer" is no class of ctrainer.optim's.
        """
        options = dict(param_group)
        params = options.pop("params")
        cls = (
            options.pop("optimizer", None) or _CLASSES[options.pop("kind", self._kind)]
        )
        if not (isinstance(cls, type) and cls in _CLASSES.values()):
            names = ", ".join(sorted(c.__name__ for c in _CLASSES.values()))
            raise TypeError(f"optimizer is {cls!r}; expected one of {names}")
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        wrapper: Any = cls
        (group,) = wrapper(params, **options).param_groups
        super().add_param_group({**group, "kind": wrapper._kind})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of a Composite of the same optimizers returned.

        Args:
            state_dict (dict[str, Any]): State and groups; each group names its
                optimizer under "kind".

        Raises:
            ValueError: the groups' optimizers are others than the saved ones.
        """
        ours = [group["kind"] for group in self.param_groups]
        saved = [group.get("kind", self._kind) for group in state_dict["param_groups"]]
        if ours != saved:
            raise ValueError(f"the groups' optimizers are {ours}, those saved {saved}")
        super().load_state_dict(state_dict)

    def _new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state that the group's own optimizer begins with."""
        return _CLASSES[group["kind"]]._state_of(param, group)
