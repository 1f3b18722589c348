"""What ctrainer needs of each framework: forward, backward, parameters."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def for_model(model: Any) -> ModuleType:
    """The adapter of the framework that `model` is written in.

    A torch.nn.Module has ctrainer.adapters.torch, any other object with a
    `parameters()` method ctrainer.adapters.numpy. Raises TypeError for the rest.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return import_module("ctrainer.adapters.torch")
    is_class = isinstance(model, type)
    if callable(getattr(model, "parameters", None)) and not is_class:
        return import_module("ctrainer.adapters.numpy")
    name = (model if is_class else type(model)).__name__
    given = f"the class {name} (pass model={name}(...))" if is_class else f"a {name}"
    raise TypeError(
        f"cannot train {given}: expected a torch.nn.Module, or an "
        "object with parameters() whose call returns a loss with backward()"
    )


def by_name(name: str) -> ModuleType:
    """The adapter of that name, as for_model() has returned it.

    Raises ValueError for any other module.
    """
    known = ("ctrainer.adapters.torch", "ctrainer.adapters.numpy")
    if name not in known:
        raise ValueError(f"no adapter is called {name!r}; there are {known}")
    return import_module(name)


def callbacks_of(args: Any, adapter: ModuleType) -> list[Any]:
    """The callbacks that torch_empty_cache_steps and profiler_steps ask for."""
    from ctrainer.adapters.profiler import ProfilerCallback
    from ctrainer.callbacks import EmptyCacheCallback

    found: list[Any] = []
    if every := args.torch_empty_cache_steps:
        found.append(EmptyCacheCallback(adapter.empty_cache, every))
    if steps := args.profiler_steps:
        found.append(ProfilerCallback(steps))
    return found
