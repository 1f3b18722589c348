"""Which dataclass configures the task, model, optimizer and so on of a given name."""

from __future__ import annotations

from argparse import Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import is_dataclass

from ctrainer.fairseq.config.optimizers import OPTIMIZERS
from ctrainer.fairseq.config.root import COMPONENTS
from ctrainer.fairseq.config.schedules import SCHEDULES
from ctrainer.fairseq.config.tasks import CRITERIONS, TASKS

Architecture = Callable[[Namespace], None]
AddArgs = Callable[[_ArgumentGroup], object]

_classes: dict[str, dict[str, type]] = {
    **{component: {} for component in COMPONENTS},
    "criterion": dict(CRITERIONS),
    "lr_scheduler": dict(SCHEDULES),
    "optimizer": dict(OPTIMIZERS),
    "task": dict(TASKS),
}
# Components without a dataclass, whose classes declare their options with argparse.
_legacy: dict[str, dict[str, AddArgs | None]] = {name: {} for name in COMPONENTS}
_architectures: dict[str, tuple[str, Architecture]] = {}


def register_component(component: str, name: str, dataclass: type) -> None:
    """Let a dataclass check and complete the options of a component.

    Args:
        component (str): A group of FairseqConfig without a class of its own, such as
            "task".
        name (str): Of the component.
        dataclass (type): Its options.

    Raises:
        ValueError: another group, a class that is no dataclass, or a name that is taken
            by another class.
    """
    if component not in _classes:
        raise ValueError(
            f"{component!r} is no component; expected one of {', '.join(_classes)}"
        )
    if not is_dataclass(dataclass):
        raise ValueError(f"{component} {name!r}: {dataclass!r} is no dataclass")
    if _classes[component].setdefault(name, dataclass) is not dataclass:
        raise ValueError(f"{component} {name!r} is registered already")


def register_legacy_options(
    component: str, name: str, add_args: AddArgs | None
) -> None:
    """Let `name` be a component without a dataclass: its config holds the options of
    all groups, and those that add_args(parser) declares.

    Raises ValueError for a name that is taken.
    """
    if name in _classes[component] or name in _legacy[component]:
        raise ValueError(f"{component} {name!r} is registered already")
    _legacy[component][name] = add_args


def is_legacy(component: str, name: str | None) -> bool:
    """Whether it is registered without a dataclass."""
    return _model_of(component, name) in _legacy[component]


def legacy_options(component: str, name: str | None) -> AddArgs | None:
    """What declares the options of that component, or None."""
    return _legacy[component].get(_model_of(component, name) or "")


def register_architecture(arch: str, model: str, complete: Architecture) -> None:
    """Let a name mean a model with other defaults.

    Args:
        arch (str): The name.
        model (str): Of the model.
        complete (Architecture): Called with the flat options; sets those that are not
            there.

    Raises:
        ValueError: a name that is taken, or an unknown model.
    """
    if arch in _architectures or arch in _classes["model"]:
        raise ValueError(f"architecture {arch!r} is registered already")
    if model not in _classes["model"] and model not in _legacy["model"]:
        raise ValueError(f"architecture {arch!r}: there is no model {model!r}")
    _architectures[arch] = (model, complete)


def component_class(component: str, name: str | None) -> type | None:
    """Return the dataclass of a component, or None where none is known.

    Args:
        component (str): The group.
        name (str | None): Of the component.
    """
    return _classes[component].get(_model_of(component, name) or "")


def _model_of(component: str, name: str | None) -> str | None:
    """The model of an architecture; any other name as it is."""
    if component == "model" and name in _architectures:
        return _architectures[name][0]
    return name


def component_names(component: str) -> list[str]:
    """Return the names that are known, sorted; of models the architectures too.

    Args:
        component (str): The group.
    """
    extra = _architectures if component == "model" else {}
    return sorted({*_classes[component], *_legacy[component], *extra})


def complete_architecture(options: Namespace) -> None:
    """Give `options` the defaults of the architecture in options.arch."""
    arch = getattr(options, "arch", None)
    if arch in _architectures:
        _architectures[arch][1](options)
