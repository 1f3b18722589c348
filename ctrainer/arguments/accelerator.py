"""accelerator_config: how the batches of a run are distributed over its ranks."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ctrainer.arguments.settings import (
    Count,
    hints,
    parse_json,
    read,
    read_options,
    reject_unknown,
)


@dataclass(slots=True)
class _Accumulation:
    num_steps: Count = 1
    adjust_scheduler: bool = True  # of a schedule that accelerate prepares: none is
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class AcceleratorConfig:
    """Settings of accelerate for a trainer's data and accumulation.

    split_batches: each batch is sharded over the ranks; else each rank gets whole
    batches. dispatch_batches: rank 0 reads for all; None: an iterable data set only.
    even_batches: the last round is filled up. use_seedable_sampler: the order follows
    from the seed and the epoch, else from torch's generator. non_blocking: asynchronous
    copies to a device. gradient_accumulation_kwargs: num_steps, in place of a
    gradient_accumulation_steps of 1; sync_each_batch, which averages gradients after
    every micro-batch; adjust_scheduler and sync_with_dataloader, which are for
    trainer.accelerator alone. use_configured_state: take the device of an existing
    accelerate state.

    Source: transformers 5.17, AcceleratorConfig, whose names, order and defaults.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def __post_init__(self) -> None:
        for name, hint in hints(AcceleratorConfig).items():
            value = getattr(self, name)
            setattr(self, name, read(value, hint, f"accelerator_config: {name}"))
        given = self.gradient_accumulation_kwargs
        if given is not None:
            where = "gradient_accumulation_kwargs of accelerator_config"
            options = asdict(read_options(_Accumulation, given, where))
            self.gradient_accumulation_kwargs = {name: options[name] for name in given}

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Read a JSON object. ValueError for names that are no settings."""
        with open(json_file, encoding="utf-8") as file:
            text = file.read()
        return _of_dict(parse_json(text, f"accelerator_config: {str(json_file)!r}"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def pop(self, key: str, default: Any = None) -> Any:
        return vars(self).pop(key, default)


NAMES = tuple(f.name for f in fields(AcceleratorConfig))


def config_of(config: Any) -> AcceleratorConfig:
    """accelerator_config as an object: from None, a dict, the path of a JSON file, or
    an object of transformers.

    Raises ValueError for names that are no settings, OSError for a file that cannot be
    read.
    """
    if isinstance(config, AcceleratorConfig):
        return config
    if isinstance(config, type):
        raise NotImplementedError(
            f"accelerator_config is the class {config.__name__}: give an object of it, "
            f"{config.__name__}(...)"
        )
    if isinstance(config, str | os.PathLike):
        return AcceleratorConfig.from_json_file(config)
    if config is None:
        return AcceleratorConfig()
    return _of_dict(config.to_dict() if hasattr(config, "to_dict") else config)


def _of_dict(given: Any) -> AcceleratorConfig:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"accelerator_config must be a dict, or the path of a JSON file with one, "
            f"not {given!r} ({type(given).__name__})"
        )
    reject_unknown("accelerator_config", given, NAMES)
    return AcceleratorConfig(**copy.deepcopy(dict(given)))


def take_accumulation(args: Any) -> None:
    """Set gradient_accumulation_steps to num_steps of gradient_accumulation_kwargs.

    Raises ValueError where both are set to different numbers, and warns of one that
    accelerate launch sets.
    """
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    launched = os.environ.get(name)
    if launched not in (None, "", "1", str(args.gradient_accumulation_steps)):
        warnings.warn(
            f"{name}={launched} has no effect on a Trainer, here as in transformers: "
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}; set "
            "it in the training arguments",
            stacklevel=4,
        )
    kwargs = config_of(getattr(args, "accelerator_config", None))
    steps = (kwargs.gradient_accumulation_kwargs or {}).get("num_steps")
    if steps is None or steps == args.gradient_accumulation_steps:
        return
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"The `AcceleratorConfig`'s `num_steps` is set but differs: it is {steps}, "
            f"and gradient_accumulation_steps is {args.gradient_accumulation_steps}; "
            "set one of them"
        )
    args.gradient_accumulation_steps = steps


def syncs_each_batch(args: Any) -> bool:
    """Are gradients averaged over the ranks after every micro-batch?"""
    config = config_of(getattr(args, "accelerator_config", None))
    return bool((config.gradient_accumulation_kwargs or {}).get("sync_each_batch"))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a run's batches are distributed; the flags are accelerate's."""

    rank: int
    world_size: int
    split_batches: bool
    dispatch_batches: bool | None
    even_batches: bool
    drops_last: bool  # a round that is not whole, where the loader drops its last batch

    @property
    def evaluates(self) -> bool:
        """Each row once, each batch whole; in training only whole rounds count."""
        return not self.drops_last


def batch_plan(args: Any, training: bool) -> BatchPlan | None:
    """How batches are distributed by `args`; None for a run of one process.

    Every row is evaluated once, so batches are even in training alone.
    """
    if args.world_size == 1:
        return None
    config = config_of(getattr(args, "accelerator_config", None))
    return BatchPlan(
        args.process_index, args.world_size, config.split_batches,
        config.dispatch_batches, training and config.even_batches, training,
    )  # fmt: skip
