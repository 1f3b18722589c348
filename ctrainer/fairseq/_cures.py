"""What keeps fairseq 0.12 from today's Python and libraries, cured from outside.

fairseq was last released in 2022. Each function removes one obstacle, through Patches
that can be undone, and says in a line what it did.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ctrainer.fairseq._patches import Patches

# Packages whose dataclasses have instances of dataclasses as defaults.
_PACKAGES = ("fairseq", "fairseq_cli", "hydra")
_CONFIG = "FairseqDataclass"


def _made_for_python_310(cls: type) -> bool:
    return cls.__module__.split(".")[0] in _PACKAGES or any(
        base.__name__ == _CONFIG for base in cls.__mro__
    )


def cure_dataclasses(patches: Patches) -> str:
    """Let fairseq's configs be defaults of fields.

    From Python 3.11 on a default has to be hashable, and a dataclass that compares its
    fields is not. A default_factory would not do: fairseq reads the defaults of fields.
    So the configs get the hash of objects; what others define is refused as before.
    """
    original = dataclasses.dataclass

    def hashable(cls: type) -> type:
        if cls.__hash__ is None and _made_for_python_310(cls):
            cls.__hash__ = object.__hash__
        return cls

    @functools.wraps(original)
    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return lambda later: hashable(original(**options)(later))
        return hashable(original(cls, **options))

    patches.set(dataclasses, "dataclass", dataclass)
    return "configs may be defaults of dataclass fields, as before Python 3.11"


def cure_numpy(patches: Patches, numpy: ModuleType) -> str:
    """Give back the names of Python's types that NumPy 1.24 dropped."""
    kinds = {"float": float, "int": int, "object": object, "complex": complex}
    missing = [name for name in kinds if name not in vars(numpy)]
    for name in missing:
        patches.set(numpy, name, kinds[name])
    return f"numpy has {', '.join(missing) or 'all its names'} again"


def cure_bf16(patches: Patches, options: ModuleType) -> str:
    """Let --bf16 mean what it says where there is no TPU.

    options: fairseq.options, which takes --bf16 for a wish for a TPU.
    """
    if find_spec("torch_xla") is not None:
        return "--bf16 stays a wish for a TPU: torch_xla is installed"
    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(*args: Any, **keywords: Any) -> Any:
        made = parse(*args, **keywords)
        given = [*sys.argv[1:], *(keywords.get("input_args") or ())]
        for found in made if isinstance(made, tuple) else (made,):
            if getattr(found, "bf16", False) and "--tpu" not in given:
                found.tpu = False
        return made

    patches.set(options, "parse_args_and_arch", parse_args_and_arch)
    return "--bf16 is no wish for a TPU"


def use_own_metrics() -> str:
    """Give fairseq our meters and metrics, if it has not loaded its own.

    Its aggregators keep 98 bytes of each update for ever, and stay active when an
    exception passes.
    """
    ours = {
        f"fairseq.logging.{name}": import_module(f"ctrainer.fairseq.{name}")
        for name in ("meters", "metrics")
    }
    if "fairseq" in sys.modules and any(
        sys.modules.get(name) is not module for name, module in ours.items()
    ):
        return "fairseq had been imported before and logs into its own metrics"
    sys.modules.update(ours)
    try:
        package = import_module("fairseq.logging")
    except BaseException:
        for name in ours:
            sys.modules.pop(name, None)
        raise
    for name, module in ours.items():
        setattr(package, name.rpartition(".")[2], module)
    return "fairseq logs into ctrainer.fairseq.metrics"
