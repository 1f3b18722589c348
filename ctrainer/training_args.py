"""TrainingArguments: transformers' names, order and defaults, without its imports."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ctrainer import integrations
from ctrainer.arguments import accelerator, checks, deepspeed, table
from ctrainer.arguments.docstrings import (
    Argument,
    compose,
    values_of,
)
from ctrainer.arguments.docstrings import (
    default_of as default_text,
)
from ctrainer.arguments.fields import arg
from ctrainer.arguments.fsdp import sharding_of
from ctrainer.arguments.older_fields import ALIASES, default_of, take_shadowed
from ctrainer.arguments.setters import Setters
from ctrainer.arguments.settings import read
from ctrainer.comm import run, world
from ctrainer.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainingArguments",
    "TrainingArguments",
    "adopt",
    "set_log_level",
]

logger = logging.getLogger(__name__)


@dataclass
class TrainingArguments(Setters):
    """Settings of a run.

    The fields of transformers 5.17 in its order, then, by keyword only, those of
    earlier releases and ctrainer's own. Subclass it as a dataclass to add fields.
    Making one imports neither torch nor transformers; `device` imports torch.

    Raises:
        TypeError: a keyword that is no argument; the message has the nearest.
        ValueError: a value of the wrong type, that is rejected, or that contradicts
            another; ddp_backend on several ranks of a torch that lacks it.
        RuntimeError: accelerate launch asks for DeepSpeed or another engine.

    Example:
        >>> from ctrainer import TrainingArguments
        >>> args = TrainingArguments("out", learning_rate="1e-4", max_steps=100)
        >>> args.learning_rate
        0.0001
    """

    deepspeed_plugin: ClassVar[None] = None

    @property
    def hf_deepspeed_config(self) -> deepspeed.HfTrainerDeepSpeedConfig | None:
        """The configuration that `deepspeed` has, completed by these arguments; None
        without one."""
        return deepspeed.config_of(self)

    def __post_init__(self) -> None:
        table.check_environment()
        take_shadowed(self)
        checks.normalize(self, integrations.installed_reporters)
        checks.derive(self)
        if accelerator.config_of(self.accelerator_config).use_configured_state:
            integrations.configured_state()
        checks.validate(self)
        table.check(self, self._default_of)
        table.warn_without_effect(self, self._default_of)
        self._ready = True
        if run.place().joins_torch and "torch" in sys.modules:
            _ = self.device  # and scripts find torch.distributed's group

    @classmethod
    def _default_of(cls, name: str) -> Any:
        return default_of(cls, name)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_device", "_deepspeed_config")  # made anew where they are needed
        return {k: v for k, v in vars(self).items() if k not in left_out}

    def __str__(self) -> str:
        lines = [f"{name}={value!r}" for name, value in sorted(self._shown().items())]
        return f"{type(self).__name__}(\n" + ",\n".join(lines) + ",\n)"

    __repr__ = __str__

    def _shown(self) -> dict[str, Any]:
        """Fields by name, without the old names of others and without secrets."""
        shown = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.init and f.name not in ALIASES
        }
        secret = {
            name: f"<{name.upper()}>"
            for name, value in shown.items()
            if name.endswith("_token") and not isinstance(value, bool)
        }
        return {**shown, **secret}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold; tokens are left out."""
        return {name: _plain(value) for name, value in self._shown().items()}

    def to_json_string(self) -> str:
        """Return the fields as JSON; tokens are left out."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the fields as values that trackers can show: numbers, bools and
        strings."""
        values = {
            **self.to_dict(),
            "train_batch_size": self.train_batch_size,
            "eval_batch_size": self.eval_batch_size,
        }
        kept = (bool, int, float, str)
        return {k: v if type(v) in kept else str(v) for k, v in values.items()}

    @property
    def train_batch_size(self) -> int:
        """Rows in a micro-batch; one device, so the same as per device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows in an evaluation batch."""
        return self.per_device_eval_batch_size

    @property
    def mixed_precision(self) -> str:
        """The type of autocast: fp16, bf16 or no."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "no"

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """ddp_timeout, which is in seconds, as a timedelta."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def device(self) -> torch.device:
        """Where the model is trained: a GPU where one is visible, that of the process's
        index on its machine, unless use_cpu.

        Imports torch, and applies `tf32` there; on several ranks it joins them as
        torch.distributed's default group, by ddp_backend, or gloo on the CPU and nccl
        elsewhere.
        """
        if accelerator.config_of(self.accelerator_config).use_configured_state:
            return integrations.configured_state().device  # type: ignore[no-any-return]
        if "_device" not in vars(self):
            from ctrainer.runtime.torch_process import choose_device

            self._device = choose_device(
                self.use_cpu, self.tf32, self.local_process_index, self.world_size
            )
            self.join_torch()
            affinity = "ACCELERATE_CPU_AFFINITY"  # of accelerate launch
            if read(os.environ.get(affinity) or "no", bool, affinity):
                _ = self.distributed_state  # accelerate binds the process to cores
        return self._device

    def join_torch(self) -> None:
        """Join the run's ranks as torch.distributed's default group, as `device` does,
        which calls it."""
        from ctrainer.comm.processes import join_run

        backend = "gloo" if self.device.type == "cpu" else "nccl"
        join_run(self.ddp_backend, backend, self.ddp_timeout)

    # What transformers' Trainer reads: WandbCallback makes one of our arguments.
    fsdp_plugin_args = None

    @property
    def _setup_devices(self) -> torch.device:
        return self.device

    def __getattr__(self, name: str) -> Any:
        """The default of an argument that only a newer transformers has."""
        theirs = getattr(
            sys.modules.get("transformers.training_args"), "TrainingArguments", None
        )
        spec = getattr(theirs, "__dataclass_fields__", {}).get(name)
        if spec is None or spec.default is MISSING:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)
        return spec.default

    @property
    def n_gpu(self) -> int:
        """Devices used: 1 on a GPU, 0 on the CPU."""
        return int(self.device.type != "cpu")

    @property
    def world_size(self) -> int:
        """Processes of the run, from the launcher's variables, without a collective."""
        return run.place().world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return run.place().rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return run.place().local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED in a run of several processes, and of one under torchrun."""
        joins = run.place().joins_torch
        return ParallelMode.DISTRIBUTED if joins else ParallelMode.NOT_PARALLEL

    @property
    def should_log(self) -> bool:
        """Does this process log? The first, or with log_on_each_node the first of each
        machine."""
        if self.log_on_each_node:
            return self.local_process_index == 0
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Does this process write checkpoints? The first, or with save_on_each_node the
        first of each machine."""
        if self.save_on_each_node:
            return self.local_process_index == 0
        return self.process_index == 0

    @property
    def place_model_on_device(self) -> bool | None:
        """A subclass may return False to keep the model where it is; None: the trainer
        decides."""
        return None

    @property
    def distributed_state(self) -> Any:
        """accelerate's PartialState of this process; None in a run of one process
        without accelerate.

        Scripts and trainers of other packages use it, ctrainer does not. Raises
        ImportError on several ranks without accelerate.
        """
        if self.world_size == 1 and find_spec("accelerate") is None:
            return None
        return integrations.partial_state(self)

    def get_process_log_level(self) -> int:
        """Return the level of the logging module for this process."""
        name = self.log_level if self.should_log else self.log_level_replica
        name = "DEBUG" if name == "detail" else name.upper()
        return logging.getLevelNamesMapping().get(name, checks.current_log_level())

    @contextlib.contextmanager
    def main_process_first(
        self, local: bool = True, desc: str = "work"
    ) -> Iterator[None]:
        """Run the block on the main process before the others.

        It calls a barrier of the run's group, so all processes have to call it.

        Args:
            local (bool, default True): The first process of each machine goes first;
                else the first of all.
            desc (str, default 'work'): What the block does, for the log.

        Yields:
            None; the other processes' blocks begin when the first block has ended.
        """
        index = self.local_process_index if local else self.process_index
        if self.world_size == 1:
            yield
            return
        group = world(self.ddp_timeout)
        if index > 0:
            logger.debug("rank %d waits for the first to do: %s", index, desc)
            group.barrier()
        try:
            yield
        finally:
            if index == 0:
                group.barrier()

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up updates.

        Args:
            num_training_steps (int): Updates of the run; warmup_steps below 1 is a
                fraction of them.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    name = str(value)
    return name.removeprefix("torch.") if name.startswith("torch.") else value


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments for models that are evaluated by generating.

    Example:
        >>> from ctrainer import Seq2SeqTrainingArguments
        >>> Seq2SeqTrainingArguments(predict_with_generate=True).generation_max_length
    """

    sortish_sampler: bool = arg(False, "Order of transformers' old example scripts.")
    predict_with_generate: bool = arg(False, "Evaluate on generated sequences.")
    generation_max_length: int | None = arg(
        None, "max_length in evaluation; None: the model's."
    )
    generation_num_beams: int | None = arg(
        None, "num_beams in evaluation; None: the model's."
    )
    generation_config: str | Path | None = arg(
        None, "GenerationConfig for evaluation, or its folder."
    )


def _arguments(cls: type) -> Iterator[Argument]:
    """The arguments of TrainingArguments, or of a subclass here, with their status."""
    known = checks.read_table(cls)
    for option in fields(cls):
        if option.name in ALIASES:
            text = f"The old name of {ALIASES[option.name].successor}."
            yield Argument(option.name, "", default_text(option), text)
        elif option.init:
            spec, hint = known.get(option.name, (option, Any))
            status, note = table.status_of(option.name)
            supported = f"Supported: {note}." if note else ""
            more = supported if status == "supported" else f"{status}: {note}."
            text = f"{option.metadata.get('help', '')} {more[:1].upper()}{more[1:]}"
            yield Argument(
                option.name, values_of(spec, hint), default_text(option), text.strip()
            )


for _cls in (TrainingArguments, Seq2SeqTrainingArguments):
    compose(_cls, partial(_arguments, _cls))


def adopt(args: Any) -> Any:
    """Check training arguments, ours or transformers', and return the same object.

    A foreign object gets the fields that it lacks, at ctrainer's defaults, and the
    precision and compilation of accelerate launch where it sets none; its other fields
    are not changed.

    Args:
        args: TrainingArguments of ctrainer or transformers.

    Raises:
        TypeError: an object of another kind.
        ValueError: a value that is rejected, or save_strategy="best" without a metric.
    """
    table.check_environment()
    if not isinstance(args, TrainingArguments):
        checks.require_arguments(args)
        checks.complete(args, TrainingArguments)
        checks.take_launched(args)
        table.warn_without_effect(args, TrainingArguments._default_of)
    checks.check_types(args, TrainingArguments)
    table.check(args, TrainingArguments._default_of)
    accelerator.take_accumulation(args)
    sharding_of(args)
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ValueError(
            "`args.metric_for_best_model` must be provided with save_strategy='best': "
            "it is None; set it, "
            'for example to "loss"'
        )
    return args


def set_log_level(args: Any) -> None:
    """Set the log level of ctrainer, and of transformers where it is loaded.

    'passive' does not change the levels. Below warnings, messages go to stderr where
    the program has no handler for them.

    Args:
        args (TrainingArguments): log_level holds; on ranks that do not log,
            log_level_replica.
    """
    if (args.log_level if args.should_log else args.log_level_replica) == "passive":
        return
    level = args.get_process_log_level()
    for name in ("ctrainer", "transformers"):
        if name == "ctrainer" or name in sys.modules:
            logging.getLogger(name).setLevel(level)
    if level < logging.WARNING and not logging.getLogger("ctrainer").hasHandlers():
        logging.getLogger("ctrainer").addHandler(logging.StreamHandler())
