"""ctrainer's engine under packages that subclass transformers.Trainer themselves."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from types import CellType, FunctionType, ModuleType
from typing import Any

from ctrainer.arguments import deepspeed
from ctrainer.comm import world
from ctrainer.comm.environment import set_local_rendezvous
from ctrainer.runtime import replaced

logger = logging.getLogger(__name__)

# Where transformers keeps the classes: module, name, and our class's home.
_PLACES = (
    ("transformers", "Trainer", "ctrainer.trainer"),
    ("transformers.trainer", "Trainer", "ctrainer.trainer"),
    ("transformers", "Seq2SeqTrainer", "ctrainer.seq2seq"),
    ("transformers.trainer_seq2seq", "Seq2SeqTrainer", "ctrainer.seq2seq"),
)


def patch_transformers() -> None:
    """Put our Trainer and Seq2SeqTrainer in transformers' place.

    Call it before TRL, sentence-transformers, setfit or the like are imported: their
    classes then subclass ours. A module that has taken transformers' Trainer already
    keeps it, and is named in a warning. May be called again.

    Where mpirun or srun has started ranks on this machine, it also sets MASTER_ADDR and
    MASTER_PORT, unless they are set: transformers' TrainingArguments need them.

    Example:
        >>> import ctrainer, transformers
        >>> ctrainer.patch_transformers()
        >>> transformers.Trainer is ctrainer.Trainer
        True
        >>> from ctrainer.hf import unpatch_transformers
        >>> unpatch_transformers()
    """
    set_local_rendezvous(os.environ)
    ours = {name: getattr(import_module(home), name) for _, name, home in _PLACES}
    # All before the first is replaced: transformers defines each when it is asked for,
    # its Seq2SeqTrainer as a subclass of what is called Trainer then.
    found = {
        (place, name): getattr(import_module(place), name) for place, name, _ in _PLACES
    }
    replaced.classes.update(
        (k, cls) for k, cls in found.items() if cls is not ours[k[1]]
    )
    for place, name in found:
        for module in _copies(place):
            setattr(module, name, ours[name])
    _take_deepspeed(_arguments_class())
    late = _holders(set(replaced.classes.values()))
    if late:
        logger.warning(
            "patch_transformers() came after the import of %s, which keep(s) "
            "transformers' Trainer; call it before that import",
            ", ".join(late),
        )


def unpatch_transformers() -> None:
    """Restore transformers' own classes."""
    for (place, name), original in replaced.classes.items():
        for module in _copies(place):
            setattr(module, name, original)
    replaced.classes.clear()
    cls = _arguments_class()
    cls.__post_init__ = inspect.unwrap(cls.__post_init__)


def _arguments_class() -> Any:
    return import_module("transformers.training_args").TrainingArguments


def _take_deepspeed(cls: Any) -> None:
    """Let transformers' arguments leave `deepspeed`, for which they need DeepSpeed, to
    ours."""
    theirs = inspect.unwrap(cls.__post_init__)

    @functools.wraps(theirs)
    def __post_init__(self: Any) -> None:
        given, self.deepspeed = self.deepspeed, None
        name = "ACCELERATE_USE_DEEPSPEED"
        launched = os.environ.pop(name, None)
        try:
            theirs(self)
        finally:
            self.deepspeed = given
            if launched is not None:
                os.environ[name] = launched
        self.hf_deepspeed_config = deepspeed.config_of(self)

    cls.__post_init__ = __post_init__


def _copies(name: str) -> list[ModuleType]:
    """Every module object called `name`: transformers puts a new one into sys.modules
    while it loads, and a script may hold the old."""
    import_module(name)
    objects = gc.get_objects()
    if gc.get_freeze_count():  # a parent's gc.freeze() hides what it has imported
        tables = [getattr(m, "__dict__", {}) for m in list(sys.modules.values())]
        objects += [value for table in tables for value in list(table.values())]
    # By type(): asked for its __class__, a lazy object of another package may load.
    modules = {id(m): m for m in objects if issubclass(type(m), ModuleType)}
    return [m for m in modules.values() if m.__name__ == name]


def _holders(classes: set[type]) -> list[str]:
    """Packages other than transformers that have subclasses of `classes`."""
    found = set()
    for cls in classes:
        for subclass in _subclasses(cls):
            found.add(subclass.__module__.split(".")[0])
    return sorted(found - {"transformers", "ctrainer"})


def _subclasses(cls: type) -> set[type]:
    direct: set[type] = set(cls.__subclasses__())
    return direct.union(*(_subclasses(c) for c in direct))


def native(cls: type) -> type:
    """A copy of `cls`, a subclass of transformers.Trainer, that is one of ours.

    For classes that were defined before patch_transformers() could be called. Methods
    are the same code; `super()` in them leads to ctrainer.Trainer. A subclass of ours
    is returned as it is. Raises TypeError for any other class.
    """
    made: dict[type, type] = {}
    for place, name, home in _PLACES:
        original = replaced.original(place, name)
        ours = getattr(import_module(home), name)
        if issubclass(cls, ours):
            return cls
        made[original] = ours
    roots = tuple(made)
    if not issubclass(cls, roots):
        raise TypeError(f"{cls.__name__} is not a subclass of transformers.Trainer")
    for part in reversed(cls.__mro__):
        if issubclass(part, roots) and part not in made:
            made[part] = _rebase(part, made)
    return made[cls]


def _rebase(cls: type, made: dict[type, type]) -> type:
    """`cls` with the bases that `made` has for its own."""
    cell = CellType()
    namespace = {
        name: _rebound(value, cell)
        for name, value in vars(cls).items()
        if name not in ("__dict__", "__weakref__")
    }
    bases = tuple(made.get(base, base) for base in cls.__bases__)
    rebased = type(cls)(cls.__name__, bases, namespace)
    cell.cell_contents = rebased
    return rebased


def _rebound(value: Any, cell: CellType) -> Any:
    """A method whose `super()` and `__class__` mean the class in `cell`."""
    if isinstance(value, staticmethod | classmethod):
        return type(value)(_rebound(value.__func__, cell))
    if isinstance(value, property):
        fget, fset, fdel = (
            _rebound(f, cell) for f in (value.fget, value.fset, value.fdel)
        )
        return property(fget, fset, fdel, value.__doc__)
    if not isinstance(value, FunctionType):
        return value
    if "__class__" not in value.__code__.co_freevars:
        return value
    cells = tuple(
        cell if name == "__class__" else old
        for name, old in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        )
    )
    copy = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    return update_wrapper(copy, value)


# ---- models of which one rank has the values


def load_on_first_rank(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`load(*args, **kwargs)`, say of AutoModel.from_pretrained, on rank 0 of the run.

    The other ranks read no file: they get a model of the same class, configuration and
    dtype on the meta device, of no memory. A Trainer with fsdp, or ctrainer.fsdp with
    sync_module_states, brings them rank 0's values, a unit at a time. Collective.

    load: returns a PreTrainedModel of transformers. Raises RuntimeError, with what went
    wrong, on the other ranks where it raises on rank 0.
    """
    group = world()
    if group.rank == 0:
        try:
            model = load(*args, **kwargs)
            described = json.dumps(_described(model))
        except BaseException as error:
            group.broadcast_bytes(json.dumps({"failed": repr(error)}).encode(), 0)
            raise
        group.broadcast_bytes(described.encode(), 0)
        return model
    described = json.loads(group.broadcast_bytes(None, 0))
    if "failed" in described:
        raise RuntimeError(f"rank 0 could not load the model: {described['failed']}")
    return _on_meta(described)


def _described(model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation_config", None)
    return {
        "class": [type(model).__module__, type(model).__qualname__],
        "config": model.config.to_dict(),
        "generation": None if generation is None else generation.to_dict(),
        "attention": getattr(model.config, "_attn_implementation", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "training": model.training,
    }


def _on_meta(described: dict[str, Any]) -> Any:
    import torch

    place, name = described["class"]
    cls = getattr(import_module(place), name)
    config = cls.config_class.from_dict(described["config"])
    if described["attention"] is not None:
        config._attn_implementation = described["attention"]
    with torch.device("meta"):
        model = cls(config)
    if described["generation"] is not None:
        kind = type(model.generation_config)
        model.generation_config = kind.from_dict(described["generation"])
    model.to(getattr(torch, described["dtype"]))
    return model.train(described["training"])
