"""A run's DeepSpeed configuration: read, completed by the arguments, and what it means
for a run of ctrainer, without DeepSpeed."""

from __future__ import annotations

import base64
import copy
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from ctrainer.arguments import deepspeed_keys
from ctrainer.arguments.settings import json_value, nearest, parse_json, read

logger = logging.getLogger("ctrainer.arguments")

RULES = ("v5", "v4.5")
_OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_params": "offload_param",
    "cpu_offload_param": "offload_param",
}
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda n: n * n,
    "zero_optimization.stage3_prefetch_bucket_size": lambda n: int(0.9 * n * n),
    "zero_optimization.stage3_param_persistence_threshold": lambda n: 10 * n,
}


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, with the questions that transformers' has.

    Args:
        config_file_or_dict (str | dict): A path, JSON text, its urlsafe base64, or a
            dict, which is copied.

    Raises:
        ValueError: none of these; or a key that is unknown or rejected.

    Attributes:
        config (dict): What was read.

    Example:
        >>> from ctrainer.compat.deepspeed import HfDeepSpeedConfig
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
        >>> config.is_zero2(), config.get_value("zero_optimization.stage")
        (True, 2)
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _load(config_file_or_dict)
        if "bfloat16" in self.config:
            if "bf16" in self.config:
                raise ValueError(
                    "deepspeed: bf16 and its older name bfloat16 are both set; leave "
                    "one out"
                )
            self.config["bf16"] = self.config.pop("bfloat16")
        deepspeed_keys.take(self.config)
        stage = self.config.get("zero_optimization")
        if isinstance(stage, bool):  # DeepSpeed's first format
            self.config["zero_optimization"] = {"stage": int(stage)}
        if all(self.get_value(f"{name}.enabled") is True for name in ("fp16", "bf16")):
            raise ValueError(
                "deepspeed: bfloat16 and fp16 modes cannot be simultaneously enabled"
            )

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 0 without a section of it."""
        return int(self.get_value("zero_optimization.stage", 0))

    def offload_device(self, part: str) -> str:
        """Return where things are offloaded to: none, cpu or nvme.

        Args:
            part (str): "offload_optimizer" or "offload_param", also set under their
                older names.
        """
        older = (old for old, new in _OFFLOADS.items() if new == part)
        if any(self.is_true(f"zero_optimization.{old}") for old in older):
            return "cpu"
        return str(self.get_value(f"zero_optimization.{part}.device", "none"))

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return (the section that has a key, or None; the key's own name).

        Args:
            ds_key_long (str): The key with its sections' names, joined by dots.
        """
        *sections, name = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, name
        return node, name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key.

        Args:
            ds_key_long (str): The key with its sections' names, joined by dots.
            default (default None): Of a key that is not there.
        """
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a section.

        Args:
            ds_key_long (str): Its name with those of the sections around it.
            must_exist (bool, default False): Raise ValueError where it does not.
        """
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ValueError(
                f"Can't find {ds_key_long} entry in the config: {self.config}"
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the key is there and its value true.

        Args:
            ds_key_long (str): The key with its sections' names, joined by dots.
        """
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the key is there and its value false.

        Args:
            ds_key_long (str): The key with its sections' names, joined by dots.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Return whether anything is offloaded in stage 2 or 3."""
        devices = map(self.offload_device, ("offload_optimizer", "offload_param"))
        return self.stage >= 2 and any(device != "none" for device in devices)


class HfTrainerDeepSpeedConfig(HfDeepSpeedConfig):
    """The configuration of a run, completed by its arguments.

    By the rules "v5", those of transformers since 4.6, an "auto" takes the argument's
    value, and any other value has to equal it. By "v4.5" the argument replaces the
    value of the configuration, and 0 stands for "auto".

    Args:
        config_file_or_dict (str | dict): As of HfDeepSpeedConfig.
        rules (str, default 'v5'): "v5" or "v4.5".
    """

    def __init__(self, config_file_or_dict: Any, rules: str = "v5") -> None:
        super().__init__(config_file_or_dict)
        if rules not in RULES:
            raise ValueError(f"deepspeed_rules: {rules!r}; {nearest(rules, RULES)}")
        self.older = rules == "v4.5"
        self.mismatches: list[str] = []
        self._dtype: str | None = None

    def dtype(self) -> Any:
        """Return the torch.dtype that layers compute in.

        Raises:
            ValueError: trainer_config_process() was not called.
        """
        if self._dtype is None:
            raise ValueError("trainer_config_process(), which knows it, was not called")
        from ctrainer.runtime.torch_process import dtype_of

        return dtype_of(self._dtype)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value is to be filled in.

        Args:
            ds_key_long (str): The key with its sections' names, joined by dots.
        """
        value = self.get_value(ds_key_long)
        return bool(value == "auto" or (self.older and value == 0))

    def fill_match(
        self, ds_key_long: str, hf_val: Any, hf_key: str | None = None,
        must_match: bool = True,
    ) -> None:  # fmt: skip
        """Put the argument's value where "auto" is; note any other value that differs.

        Args:
            ds_key_long (str): The key with its sections' names.
            hf_val: The argument's value.
            hf_key (str | None, default None): Its name, for the message.
            must_match (bool, default True): False: other values are kept.
        """
        node, name = self.find_config_node(ds_key_long)
        if node is None:
            return
        value = node.get(name)
        if value == "auto":
            node[name] = hf_val
        elif must_match and value is not None and value != hf_val:
            if self.older:
                logger.info("deepspeed: %s=%s is set to %s", ds_key_long, value, hf_val)
                node[name] = hf_val
            else:
                self.mismatches.append(
                    f"- ds {ds_key_long}={value} vs hf {hf_key}={hf_val}"
                )

    def fill_only(
        self, ds_key_long: str, hf_val: Any, hf_key: str | None = None
    ) -> None:
        """Put the value where "auto" is.

        Args:
            ds_key_long (str): The key with its sections' names.
            hf_val: The value.
            hf_key (str | None, default None): Its name.
        """
        self.fill_match(ds_key_long, hf_val, hf_key, must_match=False)

    def trainer_config_process(
        self, args: Any, auto_find_batch_size: bool = False
    ) -> None:
        """Complete what arguments alone decide.

        Args:
            args (TrainingArguments): Of the run. By the rules "v4.5" it gets
                max_grad_norm and fp16 of the configuration.
            auto_find_batch_size (bool, default False): Batch sizes need not agree.
        """
        if self.older:
            self._take_over(args)
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        agree = not auto_find_batch_size
        fill = self.fill_match
        fill(
            "train_micro_batch_size_per_gpu", args.per_device_train_batch_size,
            "per_device_train_batch_size", agree,
        )  # fmt: skip
        steps = "gradient_accumulation_steps"
        fill(steps, args.gradient_accumulation_steps, steps)
        total = "train_batch_size"
        fill(total, args.world_size * size, f"{total} (calculated)", agree)
        fill("gradient_clipping", args.max_grad_norm, "max_grad_norm")
        fill("optimizer.params.lr", args.learning_rate, "learning_rate")
        betas = [args.adam_beta1, args.adam_beta2]
        fill("optimizer.params.betas", betas, "adam_beta1+adam_beta2")
        fill("optimizer.params.eps", args.adam_epsilon, "adam_epsilon")
        fill("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
        self.fill_only("scheduler.params.warmup_min_lr", 0)
        fill("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
        if args.save_on_each_node:
            of = self.config.setdefault("checkpoint", {})
            of["use_node_local_storage"] = args.save_on_each_node
        fill("fp16.enabled", args.fp16 or args.fp16_full_eval, "fp16|fp16_full_eval")
        fill("bf16.enabled", args.bf16 or args.bf16_full_eval, "bf16|bf16_full_eval")
        self._dtype = (
            "bfloat16" if self.is_true("bf16.enabled")
            else "float16" if self.is_true("fp16.enabled") else "float32"
        )  # fmt: skip
        self._processed = copy.deepcopy((self.config, self.mismatches))

    def _take_over(self, args: Any) -> None:
        """What the rules v4.5 do before: batch sizes are arguments' alone; clipping and
        fp16 may be the configuration's."""
        sizes = ["train_batch_size", "train_micro_batch_size_per_gpu"]
        if any(name in self.config for name in sizes):
            raise ValueError(
                f"Do not include {sizes} entries in the ds config file, as they will "
                "be set via --per_device_train_batch_size or its default"
            )
        steps = "gradient_accumulation_steps"
        if steps in self.config:
            raise ValueError(
                f"Do not include {steps} entries in the ds config file, as they will "
                f"be set via --{steps} or its default"
            )
        if self.config.get("gradient_clipping", "auto") != "auto":
            args.max_grad_norm = float(self.config["gradient_clipping"])
        if self.get_value("fp16.enabled") is True:
            args.fp16 = True
        elif args.fp16:
            self.config["fp16"] = {**self.config.get("fp16", {}), "enabled": True}

    def trainer_config_finalize(
        self, args: Any, model: Any, num_training_steps: int
    ) -> None:
        """Complete what the model and the length of the run decide.

        Args:
            args (TrainingArguments): Of the run.
            model: As in fill_hidden_sizes().
            num_training_steps (int): Updates of the run.

        Raises:
            ValueError: values contradict the arguments; or a key is "auto" by the
                model's hidden size, which its config has not.
        """
        self.config, self.mismatches = copy.deepcopy(self._processed)
        self.fill_hidden_sizes(model)
        total = "scheduler.params.total_num_steps"
        self.fill_match(total, num_training_steps, "num_training_steps (calculated)")
        warmup = args.get_warmup_steps(num_training_steps)
        self.fill_match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
        if self.mismatches:
            lines = "\n".join(self.mismatches)
            raise ValueError(
                "Please correct the following DeepSpeed config values that mismatch "
                f"TrainingArguments values:\n{lines}\nThe easiest method is to set "
                "these DeepSpeed config values to 'auto'."
            )

    def fill_hidden_sizes(self, model: Any) -> None:
        """Complete what the model's hidden size decides.

        Args:
            model: Its config has hidden_size or hidden_sizes, where a key is "auto" by
                these.

        Raises:
            ValueError: a key is, and the config has neither.
        """
        wanted = [key for key in _BY_HIDDEN_SIZE if self.is_auto(key)]
        if not wanted:
            return
        size = _hidden_size(getattr(model, "config", None))
        if size is None:
            raise ValueError(
                "The model's config file has neither `hidden_size` nor "
                "`hidden_sizes` entry, therefore it's not possible to "
                "automatically fill out the following `auto` entries in the "
                f"DeepSpeed config file: {wanted}. You can fix that by replacing "
                "`auto` values for these keys with an integer value of your choice."
            )
        for key in wanted:
            if self.is_zero3() or key.endswith("reduce_bucket_size"):
                node, name = self.find_config_node(key)
                node[name] = _BY_HIDDEN_SIZE[key](size)


def _hidden_size(config: Any) -> int | None:
    of: Any
    for of in (config, getattr(config, "text_config", None)):
        if hasattr(of, "hidden_size"):
            return int(of.hidden_size)
        if hasattr(of, "hidden_sizes"):
            return int(max(of.hidden_sizes))
    return None


def _load(given: Any) -> dict[str, Any]:
    """The configuration as a dict of its own."""
    if isinstance(given, Mapping):
        return dict(json_value(given, "deepspeed"))
    if not isinstance(given, str | os.PathLike):
        raise ValueError(_EXPECTED + repr(given))
    text = str(given)
    if os.path.exists(text):
        try:
            with open(text, encoding="utf-8") as file:
                content = file.read()
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed: {text!r} cannot be read: {error}") from None
        found = parse_json(content, f"deepspeed: {text!r}")
    else:
        found = _decoded(text)
    if not isinstance(found, dict):
        raise ValueError(_EXPECTED + repr(given))
    return found


_EXPECTED = (
    "Expected a string path to an existing deepspeed config, or a dictionary, or a "
    "base64 encoded string. Received: "
)


def _decoded(text: str) -> Any:
    found = text
    if not text.lstrip().startswith("{"):
        try:
            found = base64.urlsafe_b64decode(text).decode("utf-8")
        except ValueError:
            found = ""
    if not found.lstrip().startswith("{"):
        raise ValueError(_EXPECTED + text)
    return parse_json(found, "deepspeed")


# ---- what it means for a run


def config_of(args: Any) -> HfTrainerDeepSpeedConfig | None:
    """The configuration of a run's arguments or of accelerate launch, completed by the
    arguments; None without."""
    given = given_to(args)
    if not given:
        return None
    known: HfTrainerDeepSpeedConfig
    of, known = vars(args).get("_deepspeed_config", (None, None))
    if of != [given, *_facts(args)]:  # as when a search has set the learning rate
        known = HfTrainerDeepSpeedConfig(given, getattr(args, "deepspeed_rules", "v5"))
        known.trainer_config_process(args)
        args._deepspeed_config = [given, *_facts(args)], known
    return known


def _facts(args: Any) -> list[Any]:
    """The arguments that complete a configuration."""
    return [getattr(args, name) for name in _FACTS]


_FACTS = """
    per_device_train_batch_size gradient_accumulation_steps max_grad_norm learning_rate
    adam_beta1 adam_beta2 adam_epsilon weight_decay fp16 fp16_full_eval bf16
    bf16_full_eval save_on_each_node
    """.split()


def given_to(args: Any) -> Any:
    """The argument `deepspeed`, or what accelerate launch --use_deepspeed means: its
    file, or its flags. Source: accelerate 1.15, DeepSpeedPlugin."""
    given, name = getattr(args, "deepspeed", None), "ACCELERATE_USE_DEEPSPEED"
    if not isinstance(given, Mapping | str | os.PathLike | bool | None):
        raise ValueError(_EXPECTED + repr(given))
    if given or not read(os.environ.get(name) or "no", bool, name):
        return given

    def flag(name: str, default: str) -> str:
        return os.environ.get(f"ACCELERATE_{name}", default).lower()

    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path.lower() != "none":
        return path
    devices: dict[str, Any] = {
        part: {"device": flag(f"DEEPSPEED_{part.upper()}_DEVICE", "none")}
        for part in ("offload_optimizer", "offload_param")
    }
    for part, section in devices.items():
        folder = os.environ.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_NVME_PATH")
        if folder not in (None, "none"):
            section["nvme_path"] = folder
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": flag("GRADIENT_ACCUMULATION_STEPS", "auto"),
        "gradient_clipping": flag("GRADIENT_CLIPPING", "auto"),
        "zero_optimization": devices,
    }
    stage = flag("DEEPSPEED_ZERO_STAGE", "2")
    devices["stage"] = read(stage, int, "accelerate launch: zero_stage")
    for key, hint in (
        ("gradient_accumulation_steps", int),
        ("gradient_clipping", float),
    ):
        if config[key] == "none":
            del config[key]
        elif config[key] != "auto":
            config[key] = read(config[key], hint, f"accelerate launch: {key}")
    return config


def loss_scaler_of(config: HfDeepSpeedConfig) -> dict[str, Any]:
    """The setting of loss_scaler that the section fp16 means."""
    section = dict(config.get_value("fp16") or {})
    for name in ("enabled", "auto_cast", "fp16_master_weights_and_grads"):
        section.pop(name, None)
    return {"preset": "deepspeed", **section}


# Classes of ctrainer.optim by DeepSpeed's names, which are in any case.
_CLASSES = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad", "lion": "Lion"}
_OTHERS = {
    "lamb": "FusedLamb clips its trust ratio, which ctrainer.optim.LAMB does not",
    "muon": "DeepSpeed's Muon takes parameters that carry a mark",
    "onebitadam": "gradients are compressed with zero_quantized_gradients",
    "onebitlamb": "gradients are compressed with zero_quantized_gradients",
    "zerooneadam": "gradients are compressed with zero_quantized_gradients",
    "muadam": "it is in the package mup",
    "muadamw": "it is in the package mup",
    "musgd": "it is in the package mup",
}


def optimizer_of(config: HfDeepSpeedConfig) -> tuple[str, dict[str, Any]] | None:
    """The name of a class of ctrainer.optim and its keywords, as the section optimizer
    says; None without one.

    Raises ValueError for a type or a keyword that is not supported.
    """
    section = config.get_value("optimizer")
    if section is None:
        return None
    given, params = str(section.get("type")), dict(section.get("params") or {})
    name = given.lower()
    if "max_grad_norm" in params:
        raise ValueError(
            "'max_grad_norm' is not supported as an optimizer parameter, please switch "
            "to using the deepspeed parameter 'gradient_clipping' see: "
            "https://www.deepspeed.ai/docs/config-json/#gradient-clipping for more "
            "details"
        )
    if name in _OTHERS:
        raise ValueError(
            f"deepspeed: optimizer.type={given!r} is not supported: {_OTHERS[name]}; "
            "leave the section out, and set optim"
        )
    tested = name in _CLASSES or config.is_true("zero_allow_untested_optimizer")
    if config.stage > 0 and not tested:
        raise ValueError(
            "You are using an untested ZeRO Optimizer. Please add "
            '<"zero_allow_untested_optimizer": true> in the configuration file to use '
            "it."
        )
    unfilled = [key for key, value in params.items() if value == "auto"]
    if unfilled:
        raise ValueError(
            f"deepspeed: optimizer.params.{unfilled[0]} is 'auto', and no argument "
            "fills it in; give its value"
        )
    if name not in ("adam", "adamw"):
        return _CLASSES.get(name, given), params
    decoupled = params.pop("adam_w_mode", True) or name == "adamw"
    for key, fixed in _OF_FUSED_ADAM.items():
        value = params.pop(key, fixed)
        if fixed is not None and value != fixed:
            raise ValueError(
                f"deepspeed: optimizer.params.{key}={value!r} is not supported; "
                f"{fixed!r} is"
            )
    params.setdefault("weight_decay", 0.0)  # FusedAdam's default, not torch's
    return "AdamW" if decoupled else "Adam", params


# Keywords of FusedAdam and DeepSpeedCPUAdam beyond torch's; None: any value.
_OF_FUSED_ADAM = {
    "torch_adam": None,
    "bias_correction": True,
    "fp32_optimizer_states": True,
    "set_grad_none": None,
}
