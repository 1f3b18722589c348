"""The status of each training argument: the one table, from which
docs/reference/arguments.md is made and by which every TrainingArguments, ours or
transformers', is checked.

Nothing is silently ignored: an argument is supported, unless it is in one of the tables
below: supported for some values and rejected for others; or rejected when set; or
without effect, which the documentation lists.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctrainer.arguments import accelerator, fsdp, optimizers
from ctrainer.arguments.settings import nearest, read

_SCRIPTS = "for the script that makes the trainer; the trainer does not read it"
_TRACKERS = "passed on to the trackers of report_to"

RECORDED = {
    "liger_kernel_config": "no effect without use_liger_kernel",
    "run_name": _TRACKERS,
    "project": _TRACKERS,
    "trackio_space_id": _TRACKERS,
    "trackio_bucket_id": _TRACKERS,
    "trackio_static_space_id": _TRACKERS,
    "eval_use_gather_object": "outputs that are no tensors are always sent pickled",
    "do_train": _SCRIPTS,
    "do_eval": _SCRIPTS,
    "do_predict": _SCRIPTS,
    "resume_from_checkpoint": _SCRIPTS + ": call train(resume_from_checkpoint=...)",
    "local_rank": "set by the launcher",
    "fp16_opt_level": "a setting of apex, which half_precision_backend must not name",
    "ray_scope": "no effect outside a search with Ray",
    "_n_gpu": "set by searches; at most one device is used",
}

# Without effect; setting one warns.
WITHOUT_EFFECT = {
    "overwrite_output_dir": _SCRIPTS,
    "save_safetensors": "weights are always written as safetensors",
}

REJECTED = {
    "use_liger_kernel": "apply Liger's kernels to the model before it is passed on",
    "parallelism_config": "ranks hold the whole model; leave it unset",
    "use_mps_device": "training runs on a CPU or a CUDA device",
    "jit_mode_eval": "trace the model yourself, or set torch_compile",
    "tpu_num_cores": "training runs on a CPU or a CUDA device",
    "tpu_metrics_debug": "training runs on a CPU or a CUDA device",
    "push_to_hub_organization": "write it into hub_model_id, as organization/name",
    "mp_parameters": "SageMaker's model parallelism is not supported",
    "sortish_sampler": "set train_sampling_strategy='group_by_length'",
}


@dataclass(frozen=True)
class Limit:
    """Values that are supported, and what to do instead of other values."""

    accepts: Callable[[Any], bool]
    values: str
    instead: str
    advise: Callable[[Any], str] | None = None  # the same, for one value


def one_of(*words: Any, instead: str = "") -> Limit:
    values = ", ".join(repr(w) for w in words)
    return Limit(lambda v: v in words, values, instead)


LIMITED = {
    "debug": Limit(
        lambda words: "tpu_metrics_debug" not in words,
        "underflow_overflow, by transformers' DebugUnderflowOverflow,",
        "leave tpu_metrics_debug out: training runs on a CPU or a CUDA device",
    ),
    "optim": Limit(
        optimizers.supported,
        ", ".join(map(repr, optimizers.RECIPES)) + " and optimizers of packages",
        "install the package, or make the optimizer and pass it as optimizers",
        optimizers.instead,
    ),
    "train_sampling_strategy": one_of(
        "random",
        "sequential",
        "group_by_length",
        instead="override _get_train_sampler",
    ),
    "accelerator_config": Limit(
        lambda config: accelerator.config_of(config) is not None,
        "None, a JSON file, or a dict of " + ", ".join(accelerator.NAMES),
        "",
    ),
    "ddp_backend": one_of(
        None,
        "gloo",
        "nccl",
        instead="leave it unset: ranks of one machine use shared memory, ranks of "
        "several machines gloo, and GPUs nccl",
    ),
    "fsdp_config": Limit(
        lambda config: True,  # read, and rejected, by sharding_of
        fsdp.describe_keys(),
        "",
    ),
    "deepspeed": Limit(
        lambda config: True,  # read, and rejected, by deepspeed.config_of
        "a path, a dict, JSON or its base64, with the keys of How do I come from "
        "DeepSpeed?,",
        "",
    ),
    "include_num_input_tokens_seen": one_of("all", "non_padding", "no", True, False),
    "half_precision_backend": one_of(
        "auto", "amp", "cuda_amp", "cpu_amp", instead="torch's autocast is used"
    ),
    "fp16_backend": one_of("auto", "amp", instead="torch's autocast is used"),
}


def check(args: Any, default_of: Callable[[str], Any]) -> None:
    """Raise ValueError for the first argument whose value is not supported."""
    for name, reason in REJECTED.items():
        value = getattr(args, name, None)
        if value:  # the defaults of all of them are false
            raise ValueError(f"{name}={value!r} is not supported: {reason}")
    for name, limit in LIMITED.items():
        value = getattr(args, name, default_of(name))
        if not limit.accepts(value):
            advice = limit.advise(value) if limit.advise else limit.instead
            instead = f". Otherwise: {advice}" if advice else ""
            raise ValueError(
                f"{name}={_word(value)!r} is not supported; {limit.values} are{instead}"
            )


def _word(value: Any) -> Any:
    return getattr(value, "value", value)


def warn_without_effect(args: Any, default_of: Callable[[str], Any]) -> None:
    """Warn of arguments that are set but have no effect."""
    for name, reason in WITHOUT_EFFECT.items():
        value = getattr(args, name, default_of(name))
        if value != default_of(name):
            warnings.warn(
                f"{name}={value!r} has no effect: {reason}", FutureWarning, stacklevel=4
            )


_ENGINES = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron's engine is not used",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ranks hold the whole model, or shards of it "
    "with fsdp",
}
# ctrainer's variables, with those of the build and the tests.
_PREFIX = "CTRAINER_"
_VARIABLES = (
    "LOG ISA NUM_THREADS CHECK_COLLECTIVES FSDP_POISON CUDA CUDA_ARCHS CFLAGS LDFLAGS "
    "EXHAUSTIVE ORDER"
).split()


def check_environment() -> None:
    """Raise RuntimeError when accelerate launch selects another engine, and warn of
    a variable whose name is close to one of ours."""
    for name, why in _ENGINES.items():
        if read(os.environ.get(name) or "no", bool, name):
            raise RuntimeError(
                f"{name} is set: {why}. Unset it, or start the script without it in "
                "accelerate's configuration"
            )
    ours = {n.removeprefix(_PREFIX) for n in os.environ if n.startswith(_PREFIX)}
    for name in ours - set(_VARIABLES):
        if "did you mean" in (meant := nearest(name, _VARIABLES)):
            warnings.warn(f"{_PREFIX}{name} has no effect; {meant}", stacklevel=4)


def status_of(name: str) -> tuple[str, str]:
    """The status of the argument, and a note on it."""
    if name in LIMITED:
        limit = LIMITED[name]
        if not limit.instead:
            return "supported", limit.values
        return "supported in part", f"{limit.values}; otherwise: {limit.instead}"
    if name in REJECTED:
        return "rejected when set", REJECTED[name]
    if name in WITHOUT_EFFECT:
        return "no effect, with a warning", WITHOUT_EFFECT[name]
    return ("no effect", RECORDED[name]) if name in RECORDED else ("supported", "")
