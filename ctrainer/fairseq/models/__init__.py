"""fairseq's models: their base classes, and which of them there are by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ctrainer.fairseq.config.components import register_architecture
from ctrainer.fairseq.models.fairseq_decoder import (
    FairseqDecoder,
    FairseqIncrementalDecoder,
)
from ctrainer.fairseq.models.fairseq_encoder import FairseqEncoder
from ctrainer.fairseq.models.fairseq_model import (
    BaseFairseqModel,
    FairseqEncoderDecoderModel,
    FairseqLanguageModel,
)
from ctrainer.fairseq.registry import Registry

__all__ = [
    "ARCH_CONFIG_REGISTRY",
    "ARCH_MODEL_NAME_REGISTRY",
    "ARCH_MODEL_REGISTRY",
    "MODEL_REGISTRY",
    "BaseFairseqModel",
    "FairseqDecoder",
    "FairseqEncoder",
    "FairseqEncoderDecoderModel",
    "FairseqIncrementalDecoder",
    "FairseqLanguageModel",
    "build_model",
    "register_model",
    "register_model_architecture",
]

A = TypeVar("A", bound=Callable[[Any], Any])

_registry = Registry("model", lambda: BaseFairseqModel)
MODEL_REGISTRY = _registry.classes
register_model = _registry.register
ARCH_MODEL_REGISTRY: dict[str, type] = {}
ARCH_MODEL_NAME_REGISTRY: dict[str, str] = {}
ARCH_CONFIG_REGISTRY: dict[str, Callable[[Any], Any]] = {}


def register_model_architecture(model_name: str, arch_name: str) -> Callable[[A], A]:
    """Return a decorator of a function that completes options.

    It sets, of the options it is given, those that are not there; --arch `arch_name` is
    then the model with these defaults.

    Args:
        model_name (str): Of the model.
        arch_name (str): Of the architecture.

    Raises:
        ValueError: an unknown model, and a name that is taken unless it is that of the
            model itself.
    """

    def keep(function: A) -> A:
        if not callable(function):
            raise ValueError(
                f"Model architecture must be callable ({arch_name}), got {function!r}"
            )
        model = _registry.find(model_name)
        register_architecture(arch_name, model_name, function)
        ARCH_MODEL_REGISTRY[arch_name] = model
        ARCH_MODEL_NAME_REGISTRY[arch_name] = model_name
        ARCH_CONFIG_REGISTRY[arch_name] = function
        return function

    return keep


def build_model(cfg: Any, task: Any, from_checkpoint: bool = False) -> Any:
    """Return the model that a config names, by its own name or an architecture's, made
    by its class's build_model().

    Args:
        cfg: Its options, with `_name` or `arch`.
        task: The task.
        from_checkpoint (bool, default False): Not read.
    """
    name: Any = _registry.name_in(cfg) or getattr(cfg, "arch", None)
    cls: Any = ARCH_MODEL_REGISTRY.get(name) or _registry.find(name)
    return cls.build_model(_registry.complete(cfg), task)


# These register themselves.
from ctrainer.fairseq.models import transformer, transformer_lm  # noqa: E402, F401
