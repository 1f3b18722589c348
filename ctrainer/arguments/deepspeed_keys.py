"""The keys of a DeepSpeed configuration: the one table that the reader checks by, and
that the documentation is made from.

A key is supported; or has no effect, since what it tunes is done in another way; or is
rejected, with the reason, unless its value asks for nothing. Source: DeepSpeed 0.19,
runtime/config.py, zero/config.py, zero/offload_config.py and precision_config.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from ctrainer.arguments.settings import (
    Count,
    Natural,
    NotNegative,
    Portion,
    Range,
    choices_of,
    read,
    reject_unknown,
    without_none,
)

Stage = Annotated[int, Range("{0, 1, 2, 3}")]
Power = Annotated[int, Range("[0, 1023]")]  # of 2, that a double holds
Dtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class Key:
    """hint: of the value. asks_nothing: None for a key that may be set; else the values
    of one that is rejected with other values. note: what it does, or why it does
    nothing or is rejected."""

    hint: Any
    note: str
    asks_nothing: tuple[Any, ...] | None = None
    supported: bool = True


def _idle(hint: Any, note: str) -> Key:
    return Key(hint, note, supported=False)


def _rejected(note: str, *asks_nothing: Any, hint: Any = Any) -> Key:
    return Key(hint, note, (*asks_nothing, None), supported=False)


def _within(section: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{section}.{name}": key for name, key in keys.items()}


_FLOAT32_SHARDS = "shards are float32 in mixed precision"
_TILES = "the update goes over a shard as a whole"
_UNITS = "a unit's gradients are reduced together when they are complete"
_ELSEWHERE = "set what the model or the data set offers instead"
_TRACKER = "set report_to"

_ZERO = {
    "stage": Key(
        Stage,
        "0: every rank has the whole model; 1 and 2: ranks share gradients and the "
        "optimizer's state; 3: parameters, too",
    ),
    "overlap_comm": Key(bool | None, "False: no unit is prefetched in stage 3"),
    "stage3_prefetch_bucket_size": Key(
        Natural,
        "units of at most so many parameters are prefetched; 0: none",
    ),
    "stage3_max_live_parameters": Key(
        Natural,
        "units are prefetched while two of them have at most so many parameters",
    ),
    "stage3_param_persistence_threshold": Key(
        Natural,
        "the least number of parameters of a unit, where the model names no layers",
    ),
    "offload_optimizer": Key(dict, ""),
    "offload_param": Key(dict, ""),
    "cpu_offload": Key(bool | None, "offload_optimizer to the cpu"),
    "cpu_offload_params": Key(bool | None, "offload_param to the cpu"),
    "cpu_offload_param": Key(bool | None, "offload_param to the cpu"),
    "zero_quantized_weights": Key(bool, "parameters are gathered in 8 bits"),
    "zero_quantized_gradients": Key(bool, "gradients are reduced in 4 bits"),
    "zero_hpz_partition_size": Key(
        Natural,
        "above 1: the ranks of a machine, so many, keep parameters for the backward",
    ),
    "zeropp_loco_param": Key(
        dict | None, "the residual of quantized gradients is added to the next ones"
    ),
    "mics_shard_size": Key(
        int, "above 0: the ranks of a machine, so many, share; machines have replicas"
    ),
    "cpu_offload_use_pin_memory": _idle(bool | None, "offloaded memory is pinned"),
    "stage3_model_persistence_threshold": _idle(Natural, "no parameter is kept whole"),
    "stage3_max_reuse_distance": _idle(
        Natural, "a unit is released after each of its passes"
    ),
    "stage3_gather_16bit_weights_on_model_save": _idle(
        bool, "whole weights are always saved, in float32"
    ),
    "stage3_gather_fp16_weights_on_model_save": _idle(
        bool, "whole weights are always saved, in float32"
    ),
    "reduce_bucket_size": _idle(Natural, _UNITS),
    "allgather_bucket_size": _idle(Natural, "a unit is gathered as a whole"),
    "allgather_partitions": _idle(bool, "units are always gathered"),
    "reduce_scatter": _idle(bool, "gradients are always reduced and scattered"),
    "contiguous_gradients": _idle(bool, "a unit's gradients are always contiguous"),
    "use_multi_rank_bucket_allreduce": _idle(bool, _UNITS),
    "compute_grad_norm": _idle(bool, "the norm is always computed"),
    "load_from_fp32_weights": _idle(bool, _FLOAT32_SHARDS),
    "sub_group_size": _idle(Annotated[float, Range("[0, inf)")], _TILES),
    "stage3_module_granularity_threshold": _idle(int, "units are whole layers"),
    "stage3_use_all_reduce_for_fetch_params": _idle(bool, "units are gathered"),
    "stage3_allgather_sequential": _idle(bool, "units are gathered one by one"),
    "legacy_stage1": _idle(bool, "there is one stage 1"),
    "round_robin_gradients": _idle(bool, _UNITS),
    "parameter_alignment": _idle(bool, "flat parameters are aligned"),
    "memory_efficient_linear": _idle(bool, "layers compute as torch has them"),
    "pipeline_loading_checkpoint": _idle(bool, "shards are read one by one"),
    "override_module_apply": _idle(bool, "modules are initialized before sharding"),
    "log_trace_cache_warnings": _idle(bool, "there is no trace of modules"),
    "enable_sanity_checks": _idle(bool, "they are always on"),
    "save_muon_momentum_buffer_in_memory": _idle(
        bool, "Muon's state is always in memory"
    ),
    "leaf_module": _idle(dict, "units are whole layers"),
    "elastic_checkpoint": _rejected(
        "checkpoints load on any number of ranks as they are", False
    ),
    "ignore_unused_parameters": _rejected(
        "parameters without a gradient keep their values", True
    ),
    "zero_quantized_nontrainable_weights": _rejected(_FLOAT32_SHARDS, False),
    "zenflow": _rejected("each update takes all gradients"),
}

_DEVICE = Literal["none", "cpu", "nvme"]
_PINNED = _idle(bool, "offloaded memory is pinned")
_OFFLOAD_OPTIMIZER = {
    "device": Key(
        _DEVICE,
        "cpu: shards and state are in host memory; nvme: the state is in a file",
    ),
    "nvme_path": Key(str | None, "the folder of the file; it has to exist"),
    "buffer_count": Key(
        Count, "of nvme: pieces of 2**20 elements of state in memory at once"
    ),
    "pin_memory": _PINNED,
    "pipeline_read": _idle(bool, "reading always overlaps the update"),
    "pipeline_write": _idle(bool, "writing always overlaps the update"),
    "fast_init": _idle(bool, "state is made at the first update"),
    "cpuadam_cores_perc": _idle(Portion, "the update's threads are OMP_NUM_THREADS"),
    "ratio": _rejected("all of the state is offloaded", 1, 1.0, hint=Portion),
    "super_offload": _rejected("set device to cpu", False),
}
_OFFLOAD_PARAM = {
    "device": Key(
        _DEVICE,
        "cpu: shards and state are in host memory; nvme: shards are in files",
    ),
    "pin_memory": _PINNED,
    "nvme_path": Key(str | None, "the folder of the files; it has to exist"),
    "buffer_count": Key(Count, "of nvme: units whose shards are read at once, 5"),
    "buffer_size": _idle(Natural, "a buffer is as large as the shards of its unit"),
    "max_in_cpu": Key(
        Natural,
        "of nvme: so many elements a rank, 1e9, stay in memory, of the first units",
    ),
}

_FP16 = {
    "enabled": Key(bool, "computes in float16, as fp16=True"),
    "loss_scale": Key(NotNegative, "0: the loss scale is dynamic"),
    "initial_scale_power": Key(Power, "of two, at the beginning"),
    "loss_scale_window": Key(Count, "updates without overflow until the scale doubles"),
    "hysteresis": Key(Natural, "overflows until the scale is halved"),
    "consecutive_hysteresis": Key(bool, "an update without overflow refills it"),
    "min_loss_scale": Key(Count, "the least scale"),
    "auto_cast": _idle(bool, "inputs of a unit are always cast"),
    "fp16_master_weights_and_grads": _rejected(_FLOAT32_SHARDS, False),
}
_BF16 = {
    "enabled": Key(bool, "computes in bfloat16, as bf16=True"),
    "immediate_grad_update": _idle(bool, "gradients are added where they are made"),
    "check_grad_overflow": _idle(
        bool, "an update with gradients that are not finite stops the run, or is "
        "skipped with skip_nonfinite_updates"
    ),
    "bf16_master_weights_and_grads": _rejected(_FLOAT32_SHARDS, False),
    "bf16_optimizer_states": _rejected(
        "set optim='adamw_compact' without an optimizer section", False
    ),
}  # fmt: skip

_SWITCH: dict[str, str] = {
    "amp": "apex is not used; enable fp16 or bf16",
    "torch_autocast": "enable fp16 or bf16",
    "elasticity": "the number of ranks may change at a resume",
    "compression_training": _ELSEWHERE,
    "sparse_attention": _ELSEWHERE,
    "data_efficiency": _ELSEWHERE,
    "curriculum_learning": _ELSEWHERE,
    "progressive_layer_drop": _ELSEWHERE,
    "quantize_training": _ELSEWHERE,
    "eigenvalue": _ELSEWHERE,
    "hybrid_engine": "generate() gathers the parameters by itself",
    "flops_profiler": "set include_num_input_tokens_seen, and read total_flos",
    "autotuning": "set per_device_train_batch_size, or auto_find_batch_size",
    "tensorboard": _TRACKER,
    "wandb": _TRACKER,
    "csv_monitor": _TRACKER,
    "comet": _TRACKER,
    "comms_logger": "collectives are logged with CTRAINER_LOG=debug",
    "nebula": "checkpoints are written as save_strategy says",
    "datastates_ckpt": "checkpoints are written as save_strategy says",
}

KEYS: dict[str, Key] = {
    "train_batch_size": Key(
        Count,
        "per_device_train_batch_size * gradient_accumulation_steps * world_size",
    ),
    "train_micro_batch_size_per_gpu": Key(Count, "per_device_train_batch_size"),
    "gradient_accumulation_steps": Key(Count, "the argument of this name"),
    "gradient_clipping": Key(NotNegative, "max_grad_norm"),
    "optimizer": Key(dict, "type and params, of one group of all parameters"),
    "scheduler": Key(dict, "type and params, of DeepSpeed's five"),
    "fp16": Key(dict, ""),
    "bf16": Key(dict, ""),
    "bfloat16": Key(dict, "the older name of the section bf16"),
    "zero_optimization": Key(dict | bool, ""),
    "zero_allow_untested_optimizer": Key(
        bool, "the optimizer section may name any optimizer of ctrainer.optim"
    ),
    "communication_data_type": Key(
        Dtype | None, "of gradients when they are reduced; None: fp32"
    ),
    "zero_force_ds_cpu_optimizer": _idle(bool, "all optimizers run on the CPU, too"),
    "prescale_gradients": _idle(bool, "gradients are divided once before their sum"),
    "gradient_predivide_factor": _idle(
        NotNegative, "gradients are divided once before their sum"
    ),
    "steps_per_print": _idle(NotNegative | None, "logging_steps says when"),
    "wall_clock_breakdown": _idle(bool, "set profile, or torch.profiler"),
    "memory_breakdown": _idle(bool, "skip_memory_metrics=False logs memory"),
    "dump_state": _idle(bool, "print(args) shows them"),
    "disable_python_gc": _idle(bool, "an update makes no cycles"),
    "vocabulary_size": _idle(int | None, "no kernel depends on it"),
    "log_level": _idle(str | None, "the argument of this name"),
    "timers": _idle(dict, "logging_steps says when"),
    "aio": _idle(dict, "a thread reads and a thread writes, a piece at a time"),
    "activation_checkpointing": _idle(
        dict, "for models that call DeepSpeed's checkpoint(); gradient_checkpointing "
        "recomputes"
    ),
    "dataloader_drop_last": _rejected("set the argument of this name", False),
    "managed_gradient_accumulation": _rejected("the trainer accumulates", True),
    "disable_allgather": _rejected("parameters would differ on ranks", False),
    "gradient_allreduce_op": _rejected("gradients are means over ranks", "mean"),
    "sequence_parallel_size": _rejected("sequences are not split", 1),
    "seq_parallel_communication_data_type": _idle(str, "sequences are not split"),
    "expert_parallel": _rejected("every rank has all experts", {}),
    "tensor_parallel": _rejected("layers are not split", {}, {"autotp_size": 0}),
    "pipeline": _rejected("layers are not split over ranks", {}),
    "weight_quantization": _rejected(_FLOAT32_SHARDS, {}),
    "use_data_before_expert_parallelism": _rejected(
        "every rank has all experts", False
    ),
    "compile": _rejected(
        "hooks that gather cannot be compiled", {}, {"deepcompile": False}
    ),
    **_within("zero_optimization", _ZERO),
    **_within("zero_optimization.offload_optimizer", _OFFLOAD_OPTIMIZER),
    **_within("zero_optimization.offload_param", _OFFLOAD_PARAM),
    **_within("fp16", _FP16),
    **_within("bf16", _BF16),
    "optimizer.type": Key(str, "the class"),
    "optimizer.params": Key(dict, "its keywords"),
    "optimizer.legacy_fusion": _idle(bool, "updates are always fused"),
    "scheduler.type": Key(str, "the class"),
    "scheduler.params": Key(dict, "its keywords"),
    "data_types": Key(dict, ""),
    "data_types.grad_accum_dtype": _rejected("gradients are float32", "fp32"),
    "data_types.param_dtype": _rejected("fp16 and bf16 say in what layers compute"),
    "data_types.buffer_dtype": _rejected("buffers are float32", "fp32"),
    "data_types.keep_in_fp32_modules": _rejected("buffers are float32", "auto"),
    "checkpoint": Key(dict, ""),
    "checkpoint.use_node_local_storage": _idle(bool, "save_on_each_node says so"),
    "checkpoint.tag_validation": _idle(str, "checkpoints are named by their step"),
    "checkpoint.parallel_write": _idle(dict, "ranks write their shards at once"),
    "checkpoint.load_universal": Key(
        bool, "of initialize(): latest_universal names the checkpoint; a Trainer's "
        "load on any number of ranks as they are"
    ),
    "checkpoint.writer": _idle(dict | None, "asynchronous_save says how"),
}  # fmt: skip
_FREE = {"optimizer.params", "scheduler.params", "zero_optimization.leaf_module"}
# Keys whose "auto" arguments or the model fill in; those of _FREE sections beside.
_FILLED_IN = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    gradient_clipping fp16.enabled bf16.enabled
    zero_optimization.reduce_bucket_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold
    """.split()
)


def take(config: dict[str, Any]) -> None:
    """Convert the values to their types.

    Raises ValueError for the first key that is unknown, with the nearest one, of
    another type, or rejected; and for "auto" that nothing fills in.
    """
    for section, long, value in _keys_of(config, ""):
        if long in _SWITCH:
            if value and (not isinstance(value, dict) or value.get("enabled")):
                raise ValueError(_sentence(long, value, _SWITCH[long]))
            continue
        key = KEYS[long]
        if value == "auto" and long in _FILLED_IN:
            continue
        if key.asks_nothing is None:
            found = read(value, key.hint, f"deepspeed: {long}")
            if not isinstance(found, dict):
                section[long.rpartition(".")[2]] = found
        elif value not in key.asks_nothing:
            raise ValueError(_sentence(long, value, key.note))


def _is_section(long: str) -> bool:
    return long not in _FREE and any(key.startswith(f"{long}.") for key in KEYS)


def _sentence(key: str, value: Any, why: str) -> str:
    return f"deepspeed: {key}={value!r} is not supported: {why}"


def _keys_of(
    section: dict[str, Any], prefix: str
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(its section, long name, value) of the keys of a section and of those in it."""
    known = [n.removeprefix(prefix) for n in KEYS if n.startswith(prefix)]
    known = [name for name in known if "." not in name]
    if not prefix:
        known += _SWITCH
    where = f"the section {prefix[:-1]}" if prefix else "the configuration"
    reject_unknown(f"deepspeed: {where}", section, known)
    for name, value in section.items():
        long = prefix + name
        yield section, long, value
        if _is_section(long) and isinstance(value, dict):
            yield from _keys_of(value, f"{long}.")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration, by draft 2020-12, for editors and
    validators: every key that may be set, of its type or, where that is filled in,
    "auto"."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed configuration, as ctrainer reads it",
        **_schema_of_section(""),
    }


def _schema_of_section(prefix: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for long, key in KEYS.items():
        name = long.removeprefix(prefix)
        if not long.startswith(prefix) or "." in name:
            continue
        described = {"description": key.note} if key.note else {}
        properties[name] = {**described, **_schema_of_key(long, key)}
    for name, why in _SWITCH.items() if not prefix else ():
        off = {"type": "object", "properties": {"enabled": {"const": False}}}
        properties[name] = {"description": why, "anyOf": [off, {"const": False}]}
    return {
        "type": "object", "properties": properties, "additionalProperties": False
    }  # fmt: skip


def _schema_of_key(long: str, key: Key) -> dict[str, Any]:
    long = "bf16" if long == "bfloat16" else long
    if key.asks_nothing is not None:
        return {"enum": list(key.asks_nothing)}
    if _is_section(long):
        types = ["object"] if key.hint is dict else ["object", "boolean"]
        return {**_schema_of_section(f"{long}."), "type": types}
    auto = [{"const": "auto"}] if long in _FILLED_IN else []
    return {"anyOf": [*_schemas_of(key.hint), *auto]}


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _schemas_of(hint: Any) -> list[dict[str, Any]]:
    """What an annotation allows."""
    inner, optional = without_none(hint)
    nothing: list[dict[str, Any]] = [{"type": "null"}] if optional else []
    words = choices_of(inner)
    if words is not None:
        return [{"enum": list(words)}, *nothing]
    spans: tuple[Range, ...] = ()
    if get_origin(inner) is Annotated:
        inner, *rest = get_args(inner)
        spans = tuple(rest)
    found: dict[str, Any] = {"type": _TYPES.get(inner, "object")}
    for span in spans:
        ends = [float(end) for end in span.text[1:-1].split(",")]
        if span.text.startswith("{"):
            found = {"enum": ends}
        else:
            found["minimum"] = ends[0]
            if ends[-1] < math.inf:
                found["maximum"] = ends[-1]
    return [found, *nothing]


def describe() -> Iterator[tuple[str, str, str]]:
    """(key, "supported", "no effect" or "rejected", note), for the documentation."""
    for name, key in KEYS.items():
        if key.note:
            rejected = key.asks_nothing is not None
            status = "supported" if key.supported else "no effect"
            yield name, "rejected" if rejected else status, key.note
    for name, why in _SWITCH.items():
        yield f"{name}.enabled", "rejected", why
