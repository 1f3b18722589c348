"""Fields that only older releases of transformers have, and ctrainer's own.

All are keyword-only. A field with a successor is an `Alias`: setting the alias, at
construction or later, sets the successor, with a FutureWarning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, Literal

from ctrainer.arguments.fields import CurrentFields, arg, read_field
from ctrainer.arguments.settings import Count, Natural, NotNegative, Range, hints
from ctrainer.enums import IntervalStrategy


class _Read:
    """Marks a value read through an alias: dataclasses.replace passes it back to the
    constructor, where it must not count as set by the user."""


class _ReadStr(_Read, str):
    pass


class _ReadFloat(_Read, float):
    pass


class _ReadInt(_Read, int):
    pass


def _marked(value: Any) -> Any:
    value = getattr(value, "value", value)  # a member of an enumeration
    for plain, marked in ((str, _ReadStr), (float, _ReadFloat), (int, _ReadInt)):
        if isinstance(value, plain):
            return marked(value)
    return value


class Alias:
    """Data descriptor of a field with a successor.

    `to` makes the successor's value from the alias's and the successor's current value;
    `back` makes the alias's value from the successor's, for code that still reads it.
    """

    def __init__(
        self,
        successor: str,
        to: Callable[[Any, Any], Any] = lambda value, current: value,
        back: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.successor = successor
        self.to = to
        self.back = back

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def attach(self, owner: type, spec: Field[Any]) -> None:
        self.name, self.default, self.field = spec.name, spec.default, spec
        setattr(owner, spec.name, self)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self.default
        return _marked(self.back(getattr(instance, self.successor)))

    def __set__(self, instance: Any, value: Any) -> None:
        ready = "_ready" in vars(instance)
        if isinstance(value, _Read):
            return
        value = read_field(self.field, hints(OlderFields)[self.name], value)
        if value == self.default and not ready:
            return
        current = getattr(instance, self.successor)
        new = self.to(value, current)
        self._check(instance, value, current, new, ready)
        warnings.warn(
            f"{self.name} is the old name of {self.successor}: "
            f"set {self.successor}={new!r} instead of {self.name}={value!r}",
            FutureWarning,
            stacklevel=2 if ready else 3,
        )
        setattr(instance, self.successor, new)

    def _check(
        self, instance: Any, value: Any, current: Any, new: Any, ready: bool
    ) -> None:
        default = default_of(type(instance), self.successor)
        if not ready and current not in (default, new):
            raise ValueError(
                f"{self.name}={value!r} and {self.successor}={current!r} contradict "
                f"each other: {self.name} is the old name of {self.successor}; "
                f"set only {self.successor}"
            )


def default_of(cls: type, name: str) -> Any:
    """Default of a dataclass field."""
    found = next(f for f in fields(cls) if f.name == name)
    if found.default_factory is not MISSING:
        return found.default_factory()
    return found.default


def _ratio_to_steps(ratio: float, current: float) -> float:
    return min(float(ratio), math.nextafter(1.0, 0.0))  # 1.0 would mean one step


def _with_inputs(wanted: bool, current: list[str]) -> list[str]:
    rest = [name for name in current if name != "inputs"]
    return [*rest, "inputs"] if wanted else rest


ALIASES = {
    "evaluation_strategy": Alias("eval_strategy"),
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "warmup_ratio": Alias(
        "warmup_steps", _ratio_to_steps, lambda steps: steps if steps < 1 else 0.0
    ),
    "no_cuda": Alias("use_cpu"),
    "adafactor": Alias(
        "optim",
        lambda wanted, current: "adafactor" if wanted else current,
        lambda optim: optim == "adafactor",
    ),
    "group_by_length": Alias(
        "train_sampling_strategy",
        lambda wanted, current: "group_by_length" if wanted else "random",
        lambda strategy: strategy == "group_by_length",
    ),
    "include_inputs_for_metrics": Alias(
        "include_for_metrics", _with_inputs, lambda names: "inputs" in names
    ),
    "include_tokens_per_second": Alias(
        "include_num_input_tokens_seen",
        lambda wanted, current: "all" if wanted else "no",
        lambda counted: counted not in ("no", False),
    ),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_token": Alias("hub_token"),
    "torchdynamo": Alias("torch_compile_backend"),
}


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class OlderFields(CurrentFields):
    """Arguments of transformers 4.5 to 4.57 that 5.17 does not have."""

    evaluation_strategy: IntervalStrategy | str = arg(
        "no", "eval_strategy before 4.41."
    )
    overwrite_output_dir: bool = arg(
        False, "For scripts: train although output_dir has content."
    )
    per_gpu_train_batch_size: Count | None = arg(
        None, "per_device_train_batch_size before 3.0."
    )
    per_gpu_eval_batch_size: Count | None = arg(
        None, "per_device_eval_batch_size before 3.0."
    )
    warmup_ratio: Annotated[float, Range("[0, 1]")] = arg(
        0.0, "Fraction of the run with warm-up."
    )
    logging_dir: str | None = arg(None, "Folder of TensorBoard's files.")
    save_safetensors: bool = arg(True, "Weights as safetensors.")
    no_cuda: bool = arg(False, "use_cpu before 4.32.")
    use_mps_device: bool = arg(False, "Train on Apple's GPU.")
    jit_mode_eval: bool = arg(False, "Evaluate a traced model.")
    fp16_opt_level: str = arg("O1", "Level of apex's mixed precision.")
    half_precision_backend: str = arg(
        "auto",
        "Library of mixed precision.",
        choices=["auto", "apex", "cpu_amp", "cuda_amp", "amp"],
    )
    fp16_backend: str = arg(
        "auto", "half_precision_backend before 4.13.", choices=["auto", "apex", "amp"]
    )
    tpu_num_cores: int | None = arg(None, "Cores of a TPU.")
    tpu_metrics_debug: bool = arg(False, "Metrics of a TPU.")
    past_index: int = arg(-1, "Index of the output to pass to the next batch as mems.")
    fsdp_min_num_params: Natural = arg(0, "In fsdp_config since 4.26.")
    fsdp_transformer_layer_cls_to_wrap: str | None = arg(
        None, "In fsdp_config since 4.26."
    )
    adafactor: bool = arg(False, "optim='adafactor' before 4.16.")
    group_by_length: bool = arg(False, "Batches of rows of similar length.")
    use_legacy_prediction_loop: bool = arg(False, "Evaluate by prediction_loop.")
    include_inputs_for_metrics: bool = arg(False, "Pass the inputs to compute_metrics.")
    push_to_hub_model_id: str | None = arg(None, "hub_model_id before 4.13.")
    push_to_hub_organization: str | None = arg(None, "Part of hub_model_id since 4.13.")
    push_to_hub_token: str | None = arg(None, "hub_token before 4.13.")
    mp_parameters: str = arg("", "Of SageMaker's launcher.")
    torchdynamo: str | None = arg(None, "torch_compile_backend before 4.26.")
    ray_scope: str | None = arg("last", "Of a search with Ray.")
    include_tokens_per_second: bool = arg(False, "Tokens per second among the metrics.")
    sharded_ddp: str = arg(
        "",
        "Shard as fairscale does: 'simple' or 'zero_dp_2': gradients and the "
        "optimizer's state; 'zero_dp_3': parameters, too; with 'auto_wrap' layer by "
        "layer, and 'offload' to host memory.",
        nargs="?",
        const=True,
    )
    _n_gpu: int = field(init=False, repr=False, default=-1)


for _field in fields(OlderFields):
    if _field.name in ALIASES:
        ALIASES[_field.name].attach(OlderFields, _field)


def take_shadowed(args: Any) -> None:
    """A subclass that gives an old name a default of its own hides the descriptor: the
    value is then an attribute like any other, and set here."""
    for name, alias in ALIASES.items():
        if vars(args).get(name, alias.default) != alias.default:
            alias.__set__(args, vars(args)[name])


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class OwnFields(OlderFields):
    """Arguments that transformers does not have."""

    nonfinite_policy: Literal["skip", "stop", "keep"] = arg(
        "skip",
        "For updates whose gradients are NaN or Inf: skip them, stop with an error, or "
        "keep them.",
    )
    skip_grad_norm_sigmas: Annotated[float, Range("(0, inf)")] | None = arg(
        None,
        "Skip an update, on all ranks, whose gradient norm exceeds the mean of the 128 "
        "before by more than this many of their standard deviations, such as 6; the "
        "log counts spike_steps. The first 64 are never skipped.",
    )
    log_outputs: list[str] | None = arg(
        None,
        "Outputs of the model that are numbers, such as an auxiliary loss, logged as "
        "means over micro-batches and ranks; trainer.log_mean() logs others.",
    )
    save_minutes: Annotated[float, Range("(0, inf)")] | None = arg(
        None,
        "Also save a checkpoint this many minutes after the last, beside what "
        "save_strategy asks for.",
    )
    save_best_limit: Count | None = arg(
        None,
        "Keep the checkpoints with this many best evaluations and the save_total_limit "
        "newest (None: 1), and no others; save_strategy='best' saves each that is "
        "among them.",
    )
    save_best_metrics: list[str] | None = arg(
        None,
        "Metrics by which save_best_limit keeps the best checkpoints, that many by "
        "each; 'NAME:min' and 'NAME:max' say what is better, else lower is for names "
        "that end in 'loss'. None: metric_for_best_model.",
    )
    crash_record: bool = arg(
        False,
        "An exception in an update leaves its batches, the generators' states and the "
        "weights in output_dir/crash, for ctrainer replay.",
    )
    chunked_cross_entropy: bool = arg(
        False,
        "Compute the model's logits and their cross entropy a chunk of rows at a time, "
        "so that training never holds all logits.",
    )
    split_coupled_rows: bool = arg(
        False,
        "auto_find_batch_size also splits where the loss of a row depends on the other "
        "rows (negatives of the batch, BatchNorm), which changes it.",
    )
    loss_scaler: dict[str, Any] | str | None = arg(
        None,
        "Loss scaler of fp16: 'torch', 'fairseq', 'deepspeed' or 'static'; with "
        "options, a dict of 'preset' and these options, or its JSON. None: 'torch'.",
    )
    master_weights: bool = arg(
        False, "Update float32 copies of bfloat16 and float16 parameters."
    )
    stochastic_rounding: bool = arg(
        False,
        "Update bfloat16 parameters with stochastic rounding, without float32 copies.",
    )
    ema_decay: Annotated[float, Range("[0, 1]")] | None = arg(
        None,
        "Decay of an exponential moving average of the weights: the factor of the old "
        "average at each update; None: no average.",
    )
    ema_start_update: Natural = arg(
        0, "Before this update the average is a copy of the weights."
    )
    ema_update_freq: Count = arg(1, "Average one update in this many.")
    ema_fp32: bool = arg(False, "Keep the average of bf16 and fp16 weights in float32.")
    swa_start_update: Natural | None = arg(
        None,
        "Keep an equal average of the weights from this update on; None: no average.",
    )
    swa_update_freq: Count = arg(1, "Add one update in this many to the equal average.")
    average_in_eval: bool = arg(True, "Evaluate and predict with the averaged weights.")
    grad_norm_type: Annotated[float, Range("(0, inf]")] = arg(
        2.0,
        "p of the gradient norm, for max_grad_norm and in the log: > 0, or inf for the "
        "largest element.",
    )
    max_grad_value: Annotated[float, Range("(0, inf]")] | None = arg(
        None,
        "After clipping by norm, each element of a gradient is clipped to "
        "[-max_grad_value, max_grad_value]; None: not clipped.",
    )
    clip_by_group: bool = arg(
        False,
        "Clip each parameter group by its own norm. A group with a 'max_grad_norm' of "
        "its own is clipped to that norm in any case.",
    )
    log_layer_grad_norms: bool = arg(
        False,
        "Log the norm of each parameter's gradient as grad_norm/NAME, of the type "
        "grad_norm_type, before clipping.",
    )
    layer_grad_norm_depth: Count | None = arg(
        None,
        "With log_layer_grad_norms: one norm for all parameters whose names have this "
        "many first parts in common; None: one for each parameter.",
    )
    use_bmuf: bool = arg(
        False,
        "On several ranks: each runs local steps, and all synchronize at the ends "
        "of blocks of updates, as with fairseq's --use-bmuf.",
    )
    use_diloco: bool = arg(
        False, "Like use_bmuf with DiLoCo's outer step between blocks."
    )
    global_sync_iter: Count | None = arg(
        None, "Updates in a block; None: 50, or DiLoCo's 500."
    )
    block_lr: NotNegative | None = arg(
        None, "Learning rate of blocks; None: 1, or DiLoCo's 0.7."
    )
    block_momentum: NotNegative | None = arg(
        None,
        "Block momentum, 0: the models are averaged; None: 0.875, or DiLoCo's 0.9.",
    )
    warmup_iterations: Natural | None = arg(
        None,
        "Updates after which all ranks take the first rank's model; None: 500, or "
        "DiLoCo's 0, never.",
    )
    use_nbm: bool = arg(False, "Nesterov's block momentum, as in fairseq.")
    average_sync: bool = arg(
        False,
        "Average Adam's moments when ranks synchronize; without it the moments are "
        "reset after the warm-up.",
    )
    delta_bits: Literal[32, 8, 4] = arg(
        32,
        "Bits of a block's parameter deltas: 32, or quantized to 8 or 4 with an "
        "error-feedback residual.",
    )
    overlap_steps: Natural = arg(
        0, "Updates that run while the parameter deltas of the last block are summed."
    )
    malloc_tuning: bool = arg(
        True,
        "On the CPU, set glibc to keep large blocks instead of mapping them anew each "
        "step. Applies to the whole process.",
    )
    dataloader_seed_by_place: bool = arg(
        True,
        "Rows and collators draw random numbers by the seed, the epoch and the batch's "
        "number in the epoch: the same after a resume and for any number of workers. "
        "False: workers are seeded as in torch.",
    )
    async_save: bool = arg(True, "Write checkpoints in the background, from a copy.")
    profiler_steps: Natural = arg(
        0,
        "Updates of each train() that torch.profiler records, from the third on; the "
        "trace is written to output_dir/profile. 0: none.",
    )
    peak_tflops: Annotated[float, Range("(0, inf)")] | None = arg(
        None,
        "Peak of one device in 10^12 floating-point operations a second, for train_mfu "
        "in the log. None: that of a known GPU in bf16 or fp16, else no train_mfu.",
    )
    save_on_signal: bool = arg(
        True, "On SIGTERM or Ctrl-C save a checkpoint before the end."
    )
    min_world_size: Count | None = arg(
        None,
        "When ranks die, continue with the others if so many are left: from the last "
        "whole update, or, where shards of the model are lost, from the last "
        "checkpoint. None: the run ends.",
    )
    eval_loss_by_token: bool = arg(
        False,
        "Also report eval_loss_by_token, the mean over targets; eval_loss is the mean "
        "over rows and so depends on the batch size.",
    )
    max_tokens_per_batch: Count | None = arg(
        None,
        "Batches of rows of like length, for training and evaluation, each of as many "
        "rows as have this many tokens when padded to the longest; batch sizes have no "
        "effect then. Lengths as for train_sampling_strategy='group_by_length'.",
    )
    pack_sequences: bool = arg(
        False,
        "Join the rows of a training micro-batch into one without padding, for causal "
        "language models of transformers, after a check that the model keeps them "
        "apart; max_tokens_per_batch then limits their sum.",
    )
    deepspeed_rules: Literal["v5", "v4.5"] = arg(
        "v5",
        "Which transformers' rules complete `deepspeed`: v5: 'auto' takes the value of "
        "an argument, and other values have to equal it; v4.5: arguments replace "
        "values, batch sizes may not be set, and 0 stands for 'auto'.",
    )
    eval_spill_bytes: Natural | None = arg(
        None,
        "Size of predictions in bytes from which on they are written to a temporary "
        "file; None: they stay in memory.",
    )
