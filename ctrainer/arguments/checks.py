"""Normalizing and validating training arguments."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from ctrainer.arguments import accelerator
from ctrainer.arguments.best import best_metrics
from ctrainer.arguments.bmuf import way_of
from ctrainer.arguments.fields import read_field
from ctrainer.arguments.fsdp import sharding_of
from ctrainer.arguments.loss_scaler import make_loss_scaler
from ctrainer.arguments.older_fields import ALIASES, default_of
from ctrainer.arguments.settings import hints, parse_json, read
from ctrainer.enums import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)

if TYPE_CHECKING:
    from ctrainer.training_args import TrainingArguments

_DICTS = (
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
    "gradient_checkpointing_kwargs",
    "loss_scaler",
    "lr_scheduler_kwargs",
    "parallelism_config",
)
# Read by their own readers, which accept several forms.
_ELSEWHERE = frozenset(
    """
    accelerator_config debug deepspeed fsdp fsdp_config generation_config loss_scaler
    parallelism_config sharded_ddp
    """.split()
)
# Types beyond the annotation, which transformers' parser reads too.
_ALSO = {"resume_from_checkpoint": bool, "logging_steps": None, "save_steps": None}
# Whose defaults are texts, as in transformers, and whose values are members.
_WORDS: dict[str, Callable[[Any], Any]] = {
    "eval_strategy": IntervalStrategy,
    "hub_strategy": HubStrategy,
    "logging_strategy": IntervalStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "save_strategy": SaveStrategy,
}
_SCHEDULES_ON_METRIC = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def current_log_level() -> int:
    """Level that the user has set: transformers' where it is loaded, else ours."""
    name = "transformers" if "transformers" in sys.modules else "ctrainer"
    return logging.getLogger(name).getEffectiveLevel()


def normalize(args: TrainingArguments, trackers: Callable[[], list[str]]) -> None:
    """Convert each field to its canonical form; trackers: those that are installed."""
    for name in _DICTS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            value = _typed(parse_json(value, f"{name}={value!r}"))
        if isinstance(value, dict) and name.endswith("_kwargs"):
            value = _typed(value)
        setattr(args, name, value)
    for name, typed in _read(args, type(args)):
        setattr(args, name, typed)
    for name, member in _WORDS.items():
        setattr(args, name, member(getattr(args, name)))
    args.output_dir = os.path.expanduser(args.output_dir or "trainer_output")
    if args.logging_dir is not None:
        args.logging_dir = os.path.expanduser(args.logging_dir)
    config: Any = accelerator.config_of(args.accelerator_config)
    args.accelerator_config = config
    words = args.debug.split() if isinstance(args.debug, str) else args.debug or []
    args.debug = [DebugOption(word) for word in words]
    if isinstance(args.include_num_input_tokens_seen, bool):
        counted = "all" if args.include_num_input_tokens_seen else "no"
        args.include_num_input_tokens_seen = counted
    args.report_to = _reporters(args.report_to, trackers)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        _whole(args, name)


@cache
def read_table(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """(field, annotation) of the fields that are read here: ours, by name.

    A subclass that declares a field anew may widen its annotation; an annotation that
    cannot be resolved is not checked.
    """
    ours = next(c for c in cls.__mro__ if c.__module__ == "ctrainer.training_args")
    known, table = {spec.name: spec for spec in fields(ours)}, {}
    for spec in fields(cls):
        name = spec.name
        if name not in known or name in _ELSEWHERE | ALIASES.keys() or not spec.init:
            continue
        hint = hints(ours)[name]
        if name in _ALSO:
            hint = hint | _ALSO[name]
        if spec is not known[name]:
            hint = hint | _declared(cls, name)
        table[name] = spec, hint
    return table


def _declared(cls: type, name: str) -> Any:
    try:
        return hints(cls)[name]
    except TypeError:
        return Any


def _read(args: Any, cls: type) -> Iterator[tuple[str, Any]]:
    """The fields that `args` has, each with its value converted to its type."""
    for name, (spec, hint) in read_table(cls).items():
        if hasattr(args, name):
            yield name, read_field(spec, hint, getattr(args, name))


def as_its_type(args: Any, cls: type, name: str, value: Any) -> Any:
    """A new value for a field of `cls`, as its annotation says; for any other
    attribute, as the type of the value that it has."""
    table = read_table(type(args) if isinstance(args, cls) else cls)
    had = getattr(args, name)
    kind = type(had)
    if name in table:
        value = read_field(*table[name], value)
        return float(value) if kind is float and isinstance(value, int) else value
    if kind in (bool, int, float, str):
        return read(value, kind, name)
    return value if had is None else kind(value)


def check_types(args: Any, cls: type) -> None:
    """Raise ValueError for a field of another type than the class `cls` declares, and
    for text that stands for another value: 'false' is true in an if statement."""
    ours = type(args) if isinstance(args, cls) else cls
    for name, typed in _read(args, ours):
        value = getattr(args, name)
        if isinstance(value, str | bool) and value != typed:
            raise ValueError(
                f"{name}={value!r} ({type(value).__name__}) does not have the type of "
                f"{typed!r}; set {name}={typed!r}"
            )


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """A command line's or a file's dict: words that are numbers or bools become such,
    NaN and infinity apart."""
    return {name: _typed_value(value) for name, value in values.items()}


def _typed_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _typed(value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for number in (int, float):
        try:
            return value if not math.isfinite(made := number(value)) else made
        except (ValueError, OverflowError):
            continue
    return value


def _reporters(
    names: str | list[str] | None, trackers: Callable[[], list[str]]
) -> list[str]:
    if names in (None, "none", ["none"], []):
        return []
    if names in ("all", ["all"]):
        return trackers()
    return [names] if isinstance(names, str) else list(names or [])


def _whole(args: TrainingArguments, name: str) -> None:
    steps = getattr(args, name)
    if steps is None or steps <= 1:
        return
    if steps != int(steps):
        raise ValueError(f"{name} above 1 must be a whole number, not {steps!r}")
    setattr(args, name, int(steps))


def derive(args: TrainingArguments) -> None:
    """Fill in what follows from other fields."""
    if args.disable_tqdm is None:
        args.disable_tqdm = current_log_level() > logging.WARNING
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps
    wants_metric = (
        args.load_best_model_at_end or args.lr_scheduler_type in _SCHEDULES_ON_METRIC
    )
    if args.metric_for_best_model is None and wants_metric:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.torch_compile_mode is not None or args.torch_compile_backend is not None:
        args.torch_compile = True
    take_launched(args)
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.enable_jit_checkpoint:
        args.save_on_signal = True
    if args.use_cpu:
        args.dataloader_pin_memory = False
    if args.world_size > 1:
        args.local_rank = args.local_process_index


_NOT_PASSED = ("USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")


def take_launched(args: Any) -> None:
    """Take accelerate launch's precision and settings of torch.compile where the
    arguments have none."""
    _take_compilation(args)
    _take_mixed_precision(args)


def _take_compilation(args: Any) -> None:
    launched = {
        name: os.environ.get(f"ACCELERATE_DYNAMO_{name}", "").lower()
        for name in ("BACKEND", "MODE", *_NOT_PASSED)
    }
    if not args.torch_compile and launched["BACKEND"] in ("", "no"):
        return
    for name in _NOT_PASSED:
        if read(launched[name] or "no", bool, f"ACCELERATE_DYNAMO_{name}"):
            raise ValueError(
                f"ACCELERATE_DYNAMO_{name} is set, which torch_compile does not pass "
                "on; pass torch.compile(model, ...) instead"
            )
    if not args.torch_compile:
        args.torch_compile, args.torch_compile_backend = True, launched["BACKEND"]
    args.torch_compile_mode = args.torch_compile_mode or launched["MODE"] or None


def _take_mixed_precision(args: Any) -> None:
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if args.fp16 or args.bf16 or launched == "no":
        return
    if launched not in ("fp16", "bf16"):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={launched} is not supported; set it to fp16, "
            "bf16 or no"
        )
    setattr(args, launched, True)


def validate(args: TrainingArguments) -> None:
    """Raise ValueError for a value out of range or a contradiction."""
    _validate_epochs(args)
    _validate_steps(args)
    _validate_schedule(args)
    if args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
        _validate_best(args)
    if best_metrics(args) and args.eval_strategy == IntervalStrategy.NO:
        raise ValueError(
            "save_best_limit needs evaluations, by whose metrics it keeps checkpoints, "
            "and eval_strategy is 'no'; set it to 'steps' or 'epoch'"
        )
    if args.save_best_metrics is not None and args.save_best_limit is None:
        raise ValueError(
            "save_best_metrics needs save_best_limit, the number of checkpoints to "
            "keep by each metric; set it, too"
        )
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if getattr(args, first) and getattr(args, second):
            raise ValueError(f"{first} and {second} exclude each other; set one")
    if args.loss_scaler is not None and not args.fp16:
        raise ValueError("loss_scaler scales the loss of fp16=True, which is not set")
    make_loss_scaler(args.loss_scaler)
    if args.chunked_cross_entropy and args.torch_compile:
        raise ValueError(
            "chunked_cross_entropy and torch_compile exclude each other: a compiled "
            "model computes its logits within one graph; set one"
        )
    if args.dataloader_num_workers == 0 and args.dataloader_prefetch_factor is not None:
        raise ValueError(
            "dataloader_prefetch_factor needs dataloader_num_workers above 0: only "
            "workers prefetch"
        )
    if way_of(args) is not None and args.min_world_size is not None:
        raise ValueError(
            "min_world_size does not go with local steps, whose ranks differ: "
            "BMUF.regroup() lets ranks leave and join"
        )
    sharding_of(args)
    unknown = set(args.include_for_metrics) - {"inputs", "loss"}
    if unknown:
        raise ValueError(
            f"include_for_metrics may have 'inputs' and 'loss', not {sorted(unknown)}"
        )


def _validate_epochs(args: TrainingArguments) -> None:
    epochs = args.num_train_epochs
    if args.max_steps <= 0 and not 0 <= epochs < math.inf:
        raise ValueError(
            f"num_train_epochs must be at least 0 and finite, or max_steps above 0; "
            f"they are {epochs!r} and {args.max_steps!r}"
        )


def _validate_steps(args: TrainingArguments) -> None:
    for kind in ("logging", "eval", "save"):
        steps = getattr(args, f"{kind}_steps")
        if getattr(args, f"{kind}_strategy") != "steps":
            continue
        if not (steps is not None and steps > 0):
            raise ValueError(
                f"{kind}_strategy 'steps' needs {kind}_steps above 0, not {steps!r}"
            )


def _validate_schedule(args: TrainingArguments) -> None:
    on_metric = args.lr_scheduler_type in _SCHEDULES_ON_METRIC
    if on_metric and args.eval_strategy == IntervalStrategy.NO:
        raise ValueError(
            f"lr_scheduler_type '{args.lr_scheduler_type}' follows a metric of the "
            "evaluations, and eval_strategy is 'no'; set it to 'steps' or 'epoch'"
        )
    for name in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
        options = getattr(args, name)
        if not (options is None or isinstance(options, dict)):
            raise ValueError(f"{name} must be a dict, or its JSON, not {options!r}")


def _validate_best(args: TrainingArguments) -> None:
    if args.eval_strategy != args.save_strategy:
        raise ValueError(
            "load_best_model_at_end needs a checkpoint of each evaluation: "
            f"eval_strategy is '{args.eval_strategy}' but save_strategy "
            f"'{args.save_strategy}'; set them to the same, or save_strategy to 'best'"
        )
    if args.eval_strategy != IntervalStrategy.STEPS:
        return
    every, evaluated = args.save_steps, args.eval_steps
    assert evaluated is not None  # validated before
    mixed = (every < 1) != (evaluated < 1)
    million = 1_000_000  # fractions are compared as whole millionths
    if mixed or round(every * million) % round(evaluated * million) != 0:
        raise ValueError(
            "load_best_model_at_end needs save_steps to be a multiple of eval_steps"
            f"{', both fractions or both counts' if mixed else ''}; they are {every!r} "
            f"and {evaluated!r}"
        )


def require_arguments(args: Any) -> None:
    """Raise TypeError unless `args` is like transformers' TrainingArguments."""
    missing = [
        name
        for name in ("output_dir", "per_device_train_batch_size", "get_warmup_steps")
        if not hasattr(args, name)
    ]
    if missing:
        raise TypeError(
            "args must be TrainingArguments, ctrainer's or transformers', not "
            f"{type(args).__name__} (it has no {missing[0]})"
        )
    if getattr(args, "n_gpu", 0) > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible and a process trains on one GPU: set "
            "CUDA_VISIBLE_DEVICES to the GPU to use"
        )


def complete(args: Any, cls: type) -> None:
    """Give a foreign object the fields that it lacks."""
    for field in fields(cls):
        if not hasattr(args, field.name) and field.name not in ALIASES:
            setattr(args, field.name, _foreign_default(args, field.name, cls))


def _foreign_default(args: Any, name: str, cls: type) -> Any:
    """A newer field of an older object may follow from the field that it replaced."""
    if name == "train_sampling_strategy" and getattr(args, "group_by_length", False):
        return "group_by_length"
    return default_of(cls, name)
