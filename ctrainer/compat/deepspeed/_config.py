"""DeepSpeed's classes of a configuration: what the reader has read, as attributes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from ctrainer.arguments import deepspeed_keys
from ctrainer.arguments.deepspeed import HfDeepSpeedConfig
from ctrainer.comm import world


class _Section(SimpleNamespace):
    """The keys of a section as attributes, with DeepSpeed's defaults.

    Source: DeepSpeed 0.19, runtime/zero/config.py, runtime/zero/offload_config.py and
    runtime/precision_config.py.
    """

    _path: ClassVar[tuple[str, ...]]  # of the section in a configuration
    _defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, **keys: Any) -> None:
        """Take the keys; "auto" is the default.

        Raises:
            ValueError: a key that is unknown, rejected or of another type.
        """
        keys = {name: value for name, value in keys.items() if value != "auto"}
        config = keys
        for name in reversed(self._path):
            config = {name: config}
        deepspeed_keys.take(config)
        super().__init__(**{**self._defaults, **keys})


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section zero_optimization.offload_param.

    Args:
        **keys: Its keys.

    Example:
        >>> from ctrainer.compat.deepspeed import DeepSpeedZeroOffloadParamConfig
        >>> DeepSpeedZeroOffloadParamConfig(device="cpu").buffer_count
        5
    """

    _path = ("zero_optimization", "offload_param")
    _defaults: ClassVar = {
        "device": "none", "nvme_path": None, "buffer_count": 5,
        "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000, "pin_memory": True,
    }  # fmt: skip


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section zero_optimization.offload_optimizer.

    Args:
        **keys: Its keys.

    Example:
        >>> from ctrainer.compat.deepspeed import DeepSpeedZeroOffloadOptimizerConfig
        >>> DeepSpeedZeroOffloadOptimizerConfig(device="cpu").ratio
        1.0
    """

    _path = ("zero_optimization", "offload_optimizer")
    _defaults: ClassVar = {
        "device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True,
        "pipeline_read": False, "pipeline_write": False, "fast_init": False,
        "ratio": 1.0, "super_offload": False, "cpuadam_cores_perc": 0.8,
    }  # fmt: skip

    @property
    def pipeline(self) -> bool:
        """pipeline_read or pipeline_write."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroConfig(_Section):
    """The section zero_optimization.

    Attributes have the names of the keys without stage3_. The older keys cpu_offload,
    cpu_offload_param and stage3_gather_fp16_weights_on_model_save set the attributes of
    the newer ones.

    Args:
        **keys: Its keys.

    Raises:
        ValueError: a key that is unknown, rejected or of another type.

    Example:
        >>> from ctrainer.compat.deepspeed import DeepSpeedZeroConfig
        >>> config = DeepSpeedZeroConfig(stage=3, cpu_offload=True)
        >>> config.offload_optimizer.device, config.overlap_comm
        ('cpu', True)
    """

    _path = ("zero_optimization",)
    _defaults: ClassVar = {
        "stage": 0, "contiguous_gradients": True, "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000, "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True, "allgather_bucket_size": 500_000_000,
        "overlap_comm": None, "compute_grad_norm": True,
        "load_from_fp32_weights": True, "elastic_checkpoint": False,
        "offload_param": None, "offload_optimizer": None, "zenflow": None,
        "sub_group_size": 1_000_000_000, "cpu_offload_param": None,
        "cpu_offload_use_pin_memory": None, "cpu_offload": None,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_model_persistence_threshold": sys.maxsize,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_allgather_sequential": False, "ignore_unused_parameters": True,
        "legacy_stage1": False, "round_robin_gradients": False,
        "parameter_alignment": False, "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False, "zeropp_loco_param": None,
        "mics_shard_size": -1,
        "memory_efficient_linear": True, "pipeline_loading_checkpoint": False,
        "override_module_apply": True, "log_trace_cache_warnings": False,
        "enable_sanity_checks": False, "save_muon_momentum_buffer_in_memory": False,
        "leaf_module": None,
    }  # fmt: skip

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        held = {n.removeprefix("stage3_"): v for n, v in vars(self).items()}
        older = held.pop("gather_fp16_weights_on_model_save", False)
        held["gather_16bit_weights_on_model_save"] |= older
        if held["overlap_comm"] is None:
            held["overlap_comm"] = held["stage"] == 3
        cpu = {"device": "cpu"}
        params = cpu if held["cpu_offload_param"] else None
        params = cpu if held.pop("cpu_offload_params", None) else params
        optimizer = cpu if held["cpu_offload"] else None
        for name, kind, device in (
            ("offload_param", DeepSpeedZeroOffloadParamConfig, params),
            ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig, optimizer),
        ):
            section = held[name] or device
            held[name] = None if section is None else kind(**section)
        vars(self).clear()
        vars(self).update(held)


class DeepSpeedFP16Config(_Section):
    """The section fp16.

    Args:
        **keys: Its keys.

    Example:
        >>> from ctrainer.compat.deepspeed import DeepSpeedFP16Config
        >>> DeepSpeedFP16Config(initial_scale_power=8).initial_dynamic_scale()
        256
    """

    _path = ("fp16",)
    _defaults: ClassVar = {
        "enabled": False, "auto_cast": False, "loss_scale": 0.0,
        "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
        "consecutive_hysteresis": False, "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    }  # fmt: skip

    def initial_dynamic_scale(self) -> int:
        """Return the loss scale of the first update, where it is dynamic."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the options of a dynamic loss scale, by DeepSpeed's names."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(_Section):
    """The section bf16.

    Args:
        **keys: Its keys.

    Example:
        >>> from ctrainer.compat.deepspeed import DeepSpeedBF16Config
        >>> DeepSpeedBF16Config().enabled
        False
    """

    _path = ("bf16",)
    _defaults: ClassVar = {
        "enabled": False, "immediate_grad_update": False, "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False,
    }  # fmt: skip


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section fp16 of a configuration.

    Args:
        param_dict (Mapping[str, Any]): The configuration.
    """
    return DeepSpeedFP16Config(**param_dict.get("fp16") or {})


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section bf16 of a configuration, or the one of its older name
    bfloat16.

    Args:
        param_dict (Mapping[str, Any]): The configuration.
    """
    section = param_dict.get("bf16", param_dict.get("bfloat16"))
    return DeepSpeedBF16Config(**section or {})


class DeepSpeedConfig:
    """A configuration of initialize(): its sections, and the sizes of batches.

    Two of train_batch_size, train_micro_batch_size_per_gpu and
    gradient_accumulation_steps, or one of the first two, give the others.

    Args:
        config (str | dict): As of HfDeepSpeedConfig, without "auto" for sizes.
        mpu (default None): Rejected: layers are not split.
        mesh_device (default None): Rejected, likewise.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps
        (int): Samples of an update, and of a pass of one rank; passes of an update.
        gradient_clipping (float): The largest norm, by default 1; 0: not clipped.
        zero_config (DeepSpeedZeroConfig), float16_config (DeepSpeedFP16Config),
        bfloat16_config (DeepSpeedBF16Config): Sections.

    Raises:
        ValueError: a key that is unknown or rejected; mpu or mesh_device.
        AssertionError: sizes that are missing or do not agree, as in DeepSpeed.

    Source: DeepSpeed 0.19, runtime/config.py.

    Example:
        >>> from ctrainer.compat.deepspeed import DeepSpeedConfig
        >>> config = DeepSpeedConfig({"train_batch_size": 8, "bf16": {"enabled": True}})
        >>> config.train_micro_batch_size_per_gpu, config.bfloat16_config.enabled
        (8, True)
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        for name, value in (("mpu", mpu), ("mesh_device", mesh_device)):
            if value is not None:
                raise ValueError(
                    f"deepspeed: {name} is not supported: layers and sequences are not "
                    "split over ranks"
                )
        #: The configuration as the reader has it.
        self.hf = HfDeepSpeedConfig(config)
        get = self.hf.get_value
        self._param_dict = self.hf.config
        group = world()
        self.global_rank, self.world_size = group.rank, group.world_size
        self.zero_config = DeepSpeedZeroConfig(**get("zero_optimization") or {})
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_config.stage > 0
        self.float16_config = get_float16_config(self._param_dict)
        self.bfloat16_config = get_bfloat16_config(self._param_dict)
        self.fp16_enabled = self.float16_config.enabled
        self.bfloat16_enabled = self.bfloat16_config.enabled
        self.gradient_clipping = self._number("gradient_clipping", 1.0)
        self.steps_per_print = get("steps_per_print")
        self.communication_data_type = get("communication_data_type")
        name = get("optimizer.type")
        self.optimizer_name = name if name is None else str(name).lower()
        self.optimizer_params = get("optimizer.params")
        self.scheduler_name = get("scheduler.type")
        self.scheduler_params = get("scheduler.params")
        self.zero_allow_untested_optimizer = get("zero_allow_untested_optimizer", False)
        self.load_universal_checkpoint = get("checkpoint.load_universal", False)
        self._set_batch_sizes()

    def _number(self, name: str, default: Any = None) -> Any:
        value = self._param_dict.get(name, default)
        if value == "auto":
            raise ValueError(
                f"deepspeed: {name} is 'auto', which the arguments of a Trainer fill "
                "in; give its value"
            )
        return value

    def _set_batch_sizes(self) -> None:
        total = self._number("train_batch_size")
        each = self._number("train_micro_batch_size_per_gpu")
        steps = self._number("gradient_accumulation_steps")
        ranks = self.world_size
        assert total is not None or each is not None, (
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be "
            "provided"
        )
        if total is None:
            steps = steps or 1
            total = each * steps * ranks
        elif each is None:
            steps = steps or 1
            each = total // ranks // steps
        elif steps is None:
            steps = total // each // ranks
        self.train_batch_size = total
        self.train_micro_batch_size_per_gpu = each
        self.gradient_accumulation_steps = steps
        assert each > 0, f"Micro batch size per gpu: {each} has to be greater than 0"
        assert steps > 0, (
            f"Gradient accumulation steps: {steps} has to be greater than 0"
        )
        assert total == each * steps * ranks, (
            "Check batch related parameters. train_batch_size is not equal to "
            "micro_batch_per_gpu * gradient_acc_step * world_size "
            f"{total} != {each} * {steps} * {ranks}"
        )
