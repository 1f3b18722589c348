"""The reader of DeepSpeed configurations, against transformers' on drawn ones."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
import torch
import transformers
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig as Accelerates
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations import deepspeed as theirs

import ctrainer
from ctrainer.arguments import deepspeed_keys
from ctrainer.arguments.deepspeed import config_of
from ctrainer.arguments.fsdp import sharding_of
from ctrainer.compat.deepspeed import (
    HfDeepSpeedConfig,
    HfTrainerDeepSpeedConfig,
    json_schema,
)
from ctrainer.hf import unpatch_transformers

_METHODS = {
    name: value
    for name, value in vars(theirs.HfTrainerDeepSpeedConfig).items()
    if name not in ("__init__", "__dict__", "__weakref__", "__module__", "__doc__")
}


class Theirs(Accelerates):  # type: ignore[misc]
    """transformers' class on accelerate's, which it has where DeepSpeed is there."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._dtype = None
        self.mismatches: list[str] = []


for _name, _value in _METHODS.items():
    setattr(Theirs, _name, _value)


def arguments(**options: Any) -> Any:
    return tiny.arguments(per_device_train_batch_size=4, learning_rate=1e-3, **options)


# Values that agree with the arguments above, others, and keys that nothing fills in.
_VALUES: dict[str, list[Any]] = {
    "train_batch_size": ["auto", 4, 8],
    "train_micro_batch_size_per_gpu": ["auto", 4, 2],
    "gradient_accumulation_steps": ["auto", 1, 3],
    "gradient_clipping": ["auto", 1.0, 0.3],
    "optimizer.type": ["AdamW"],
    "optimizer.params.lr": ["auto", 1e-3, 3e-5],
    "optimizer.params.betas": ["auto", [0.9, 0.999], [0.8, 0.999]],
    "optimizer.params.eps": ["auto", 1e-8],
    "optimizer.params.weight_decay": ["auto", 0.0, 3e-7],
    "scheduler.type": ["WarmupDecayLR"],
    "scheduler.params.warmup_min_lr": ["auto", 0, 1e-5],
    "scheduler.params.warmup_max_lr": ["auto", 1e-3, 1],
    "scheduler.params.warmup_num_steps": ["auto", 5, 7],
    "scheduler.params.total_num_steps": ["auto", 100],
    "fp16.enabled": ["auto", False],
    "fp16.loss_scale": [0, 128],
    "bf16.enabled": ["auto", False, True],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.reduce_bucket_size": ["auto", 5e8],
    "zero_optimization.stage3_prefetch_bucket_size": ["auto", 10],
    "zero_optimization.stage3_param_persistence_threshold": ["auto", 1e4],
    "zero_optimization.offload_optimizer.device": ["none", "cpu"],
    "zero_optimization.offload_param.device": ["none", "cpu"],
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return config


_CONFIGS = st.fixed_dictionaries(
    {}, optional={k: st.sampled_from(v) for k, v in _VALUES.items()}
).map(nested)


class Model:
    def __init__(self, **sizes: Any) -> None:
        self.config = type("Config", (), sizes)()


_MODELS = st.sampled_from(
    [
        Model(hidden_size=16),
        Model(hidden_sizes=[4, 12]),
        Model(text_config=type("Text", (), {"hidden_size": 20})()),
        Model(),
        object(),
    ]
)


def outcome(make: Any, config: Any, args: Any, model: Any) -> Any:
    try:
        made = make(config)
        made.trainer_config_process(args)
        made.trainer_config_finalize(args, model, 100)
    except ValueError as error:
        return str(error)
    asked = (made.is_zero2(), made.is_zero3(), made.is_offload(), made.dtype())
    return made.config, asked


@settings(max_examples=draws(60, 3000), deadline=None)
@given(_CONFIGS, _MODELS, st.sampled_from([{}, {"bf16": True}, {"max_grad_norm": 0.3}]))
def test_configurations_are_completed_as_transformers_completes_them(
    config: dict[str, Any], model: Any, options: dict[str, Any]
) -> None:
    args = arguments(warmup_steps=5, **options)
    given_first = copy.deepcopy(config)
    wanted = outcome(Theirs, copy.deepcopy(config), args, model)
    assert outcome(HfTrainerDeepSpeedConfig, config, args, model) == wanted
    assert config == given_first


def test_a_second_run_of_another_length_is_completed_anew() -> None:
    config = {
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    }
    made = HfTrainerDeepSpeedConfig(config)
    made.trainer_config_process(arguments())
    for steps in (10, 20):
        made.trainer_config_finalize(arguments(), object(), steps)
        assert made.get_value("scheduler.params.total_num_steps") == steps


def test_arguments_that_change_complete_it_anew() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    args = arguments(deepspeed=config)
    first = args.hf_deepspeed_config
    assert args.hf_deepspeed_config is first
    args.learning_rate = 0.25
    assert args.hf_deepspeed_config.get_value("optimizer.params.lr") == 0.25
    trainer = tiny.make(
        ctrainer.Trainer, tiny.gpt2(), tiny.tokens(8), deepspeed=config, max_steps=1,
        lr_scheduler_type="constant", learning_rate=0.5,
    )  # fmt: skip
    trainer.args.learning_rate = 0.125
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.125


FULL = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}


def test_every_form_is_read_and_a_dict_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FULL))
    text = json.dumps(FULL)
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    for form in (str(path), path, text, coded, FULL):
        assert HfDeepSpeedConfig(form).config == FULL
    args = arguments(deepspeed=FULL)
    assert FULL["train_batch_size"] == "auto"
    assert args.deepspeed == FULL
    assert args.hf_deepspeed_config.config["train_batch_size"] == 4
    assert pickle.loads(pickle.dumps(args)).hf_deepspeed_config.is_zero2()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("no such file.json", "Expected a string path to an existing deepspeed config"),
        (3, "Expected a string path to an existing deepspeed config"),
        ('{"zero_optimization": {"stage": 2}', "is not valid JSON"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' occurs twice"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stge": 2}}, "has no 'stge'; did you mean 'stage'?"),
        ({"zero_optimization": {"stage": 4}}, r"stage must be a whole number in {0, 1"),
        ({"fp16": {"enabled": "maybe"}}, "fp16.enabled must be true or false"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}},
         "bfloat16 and fp16 modes cannot be simultaneously enabled"),
        ({"amp": {"enabled": True}}, "amp=.* is not supported: apex is not used"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_rejected_by_name(bad: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HfDeepSpeedConfig(bad)


@pytest.mark.parametrize(
    "key", [k for k, v in deepspeed_keys.KEYS.items() if v.asks_nothing is not None]
)
def test_a_key_that_is_not_supported_is_rejected_unless_it_asks_for_nothing(
    key: str,
) -> None:
    *nothing, _ = deepspeed_keys.KEYS[key].asks_nothing or ()
    for value in nothing:
        HfDeepSpeedConfig(nested({key: value}))
    with pytest.raises(ValueError, match=rf"deepspeed: {key}=.* is not supported: \w"):
        HfDeepSpeedConfig(nested({key: {"else": 1}}))


def test_words_and_numbers_become_of_their_types() -> None:
    config = {"fp16": {"enabled": "false", "loss_scale_window": 1e3}}
    found = HfDeepSpeedConfig({**config, "zero_optimization": "true"})
    assert found.get_value("fp16.enabled") is False
    assert type(found.get_value("fp16.loss_scale_window")) is int
    assert found.stage == 1
    assert config["fp16"]["enabled"] == "false"
    assert HfDeepSpeedConfig({"bfloat16": {"enabled": True}}).is_true("bf16.enabled")
    with pytest.raises(ValueError, match="the section bf16 has no 'enabld'"):
        HfDeepSpeedConfig({"bfloat16": {"enabld": True}})
    with pytest.raises(ValueError, match="bfloat16 are both set"):
        HfDeepSpeedConfig({"bfloat16": {}, "bf16": {}})


@pytest.mark.parametrize(
    "key", ["zero_optimization.zero_quantized_weights", "zero_optimization.stage",
            "zero_optimization.cpu_offload", "fp16.loss_scale"]
)  # fmt: skip
def test_auto_that_nothing_fills_in_is_rejected(key: str) -> None:
    with pytest.raises(ValueError, match=rf"deepspeed: {key} must be .* not 'auto'"):
        HfDeepSpeedConfig(nested({key: "auto"}))


def test_a_section_that_is_off_is_taken() -> None:
    off = {name: {"enabled": False} for name in ("amp", "wandb", "elasticity")}
    assert HfDeepSpeedConfig(off).config == off


def sharded(zero: dict[str, Any], **more: Any) -> Any:
    return sharding_of(arguments(deepspeed={"zero_optimization": zero, **more}))


def test_what_the_section_zero_optimization_means() -> None:
    assert sharded({"stage": 0}) is None
    for stage in (1, 2, 3):
        plan = sharded({"stage": stage})
        assert plan.reshard_after_forward == plan.forward_prefetch == (stage == 3)
        assert not plan.cpu_offload
        assert not plan.hybrid
    assert sharded(True).reshard_after_forward is False  # type: ignore[arg-type]
    assert sharded({"stage": 2, "cpu_offload": True}).cpu_offload
    assert sharded({"stage": 3, "offload_param": {"device": "cpu"}}).cpu_offload
    plan = sharded({"stage": 3, "overlap_comm": False, "mics_shard_size": 2})
    assert not plan.forward_prefetch
    assert plan.backward_prefetch is None
    assert plan.hybrid
    assert plan.group_size == 2
    plan = sharded(
        {"stage": 3, "stage3_prefetch_bucket_size": 1e6, "zero_quantized_weights": True,
         "stage3_max_live_parameters": 1e9, "zero_quantized_gradients": True,
         "stage3_param_persistence_threshold": 1e4}
    )  # fmt: skip
    assert (plan.prefetch_numel, plan.unnamed_min_num_params) == (10**6, 10**4)
    assert (plan.gather_bits, plan.reduce_bits) == (8, 4)
    assert not plan.error_feedback
    assert plan.secondary_shards is None
    plan = sharded({"stage": 3, "zero_hpz_partition_size": 4})
    assert plan.secondary_shards == 4
    on_nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": "5"}
    plan = sharded({"stage": 2, "offload_optimizer": on_nvme})
    assert (plan.cpu_offload, plan.offload_folder) == (True, "/nvme")
    assert plan.offload_buffers == 5
    plan = sharded({"stage": 3, "offload_optimizer": {**on_nvme, "device": "cpu"}})
    assert (plan.cpu_offload, plan.offload_folder) == (True, None)
    with pytest.raises(ValueError, match="device is 'nvme'; set nvme_path beside it"):
        sharded({"stage": 3, "offload_optimizer": {"device": "nvme"}})
    assert plan.shard_folder is None
    with pytest.raises(ValueError, match=r"offload_param.device is 'nvme'; set nvme"):
        sharded({"stage": 3, "offload_param": {"device": "nvme"}})
    plan = sharded({"stage": 3, "offload_param": on_nvme})
    assert (plan.cpu_offload, plan.shard_folder) == (True, "/nvme")
    assert (plan.read_ahead, plan.max_in_memory) == (5, 10**9)
    assert plan.offload_folder is None
    more = {"max_in_cpu": 1e3, "buffer_count": 2, "buffer_size": 1e8}
    plan = sharded({"stage": 3, "offload_param": {**on_nvme, **more}})
    assert (plan.read_ahead, plan.max_in_memory) == (2, 1000)
    with pytest.raises(ValueError, match="communication_data_type='bf16' is neither"):
        sharded({"stage": 3}, communication_data_type="bf16")
    with pytest.raises(ValueError, match="fsdp and deepspeed both shard"):
        arguments(deepspeed={"zero_optimization": {"stage": 3}}, fsdp="full_shard")


def train(deepspeed: Any, model: Any = None, **options: Any) -> Any:
    made = tiny.make(
        ctrainer.Trainer, model or tiny.gpt2(), tiny.tokens(16), deepspeed=deepspeed,
        max_steps=3, per_device_train_batch_size=4, **options,
    )  # fmt: skip
    made.train()
    return made


def adam(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **params}}}


@pytest.mark.parametrize(
    ("section", "cls", "options"),
    [
        (adam("AdamW", weight_decay=0.5), torch.optim.AdamW, {"weight_decay": 0.5}),
        (adam("Adam", weight_decay=0.5), torch.optim.AdamW, {"weight_decay": 0.5}),
        (adam("Adam", weight_decay=0.1, adam_w_mode=False), torch.optim.Adam,
         {"weight_decay": 0.1}),
        (adam("Adam", torch_adam=True), torch.optim.AdamW, {"weight_decay": 0.0}),
        (adam("SGD", momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
        (adam("adagrad"), torch.optim.Adagrad, {}),
    ],
)  # fmt: skip
def test_the_section_optimizer_is_torch_s_rule_over_all_parameters_alike(
    section: dict[str, Any], cls: Any, options: dict[str, Any]
) -> None:
    run = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    run |= {"weight_decay": section["optimizer"]["params"].get("weight_decay", 0.0)}
    run |= {"train_sampling_strategy": "sequential"}
    ours = train(section, tiny.llama(), **run).model
    model: Any = tiny.llama().train()
    optimizer = cls(model.parameters(), lr=1e-2, **options)
    batches = torch.utils.data.DataLoader(tiny.tokens(16), 4)
    for batch in [*batches][:3]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        (adam("Lamb"), "optimizer.type='Lamb' is not supported: FusedLamb clips"),
        (adam("OneBitAdam"), "zero_quantized_gradients"),
        (adam("AdamW", max_grad_norm=1.0), "'max_grad_norm' is not supported as an"),
        (adam("AdamW", bias_correction=False), "bias_correction=False is not supp"),
        (adam("AdamW", weight_deca=0.1), "did you mean 'weight_decay'?"),
        (adam("Nothing"), "optimizer.type='Nothing' is not in ctrainer.optim"),
        (adam("SGD", momentum="auto"), "momentum is 'auto', and no argument fills it"),
        (adam("SGD") | {"zero_optimization": {"stage": 2}},
         "You are using an untested ZeRO Optimizer"),
        ({"scheduler": {"type": "Cosine", "params": {}}},
         "DeepSpeed does not recognize LR scheduler Cosine"),
        (adam("AdamW", lr=3e-5), r"- ds optimizer.params.lr=3e-05 vs hf learning_rate"),
    ],
)  # fmt: skip
def test_sections_that_cannot_be_taken_are_rejected_before_the_first_update(
    section: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        train(section, learning_rate=1e-2)


def test_without_a_model_the_class_is_that_of_optim() -> None:
    args = arguments(deepspeed=adam("SGD", lr=1e-3))
    cls, _ = ctrainer.Trainer.get_optimizer_cls_and_kwargs(args)
    assert cls is ctrainer.optim.AdamW


def test_the_loss_scale_is_that_of_the_section_fp16() -> None:
    fp16 = {"enabled": "auto", "initial_scale_power": 5, "loss_scale_window": 2}
    scaler = train({"fp16": fp16}, fp16=True)._loss_scaler
    assert scaler.scale == 64  # of 2**5, doubled after two updates
    static = {"enabled": True, "loss_scale": 128}
    assert train({"fp16": static}, fp16=True)._loss_scaler.scale == 128


# ---- the rules v4.5, and examples of the documentation of transformers 4.5

ZERO2 = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000,
             "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8,
        "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
        "contiguous_gradients": True, "cpu_offload": True},
    "optimizer": {"type": "AdamW", "params": {
        "lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "steps_per_print": 2000, "wall_clock_breakdown": False,
}  # fmt: skip
ZERO3 = ZERO2 | {
    "zero_optimization": {
        "stage": 3, "cpu_offload": True, "cpu_offload_params": True,
        "cpu_offload_use_pin_memory": True, "overlap_comm": True,
        "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": 0,
        "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_fp16_weights_on_model_save": True}
}  # fmt: skip
OLD = {"deepspeed_rules": "v4.5", "learning_rate": 1e-2, "warmup_steps": 2}


@pytest.mark.parametrize("config", [ZERO2, ZERO3])
def test_the_arguments_replace_values_by_the_rules_of_4_5(
    config: dict[str, Any],
) -> None:
    made = train(config, **OLD, weight_decay=0.1)
    (group,) = made.optimizer.param_groups
    assert group["betas"] == (0.9, 0.999)
    assert group["weight_decay"] == 0.1
    assert made.args.fp16
    assert made._loss_scaler.scale == 2**16
    assert made.lr_scheduler.get_last_lr() == pytest.approx([1e-2])
    filled = made.args.hf_deepspeed_config.config["zero_optimization"]
    if config is ZERO3:
        assert filled["reduce_bucket_size"] == 16 * 16
        assert filled["stage3_prefetch_bucket_size"] == int(0.9 * 16 * 16)
        assert filled["stage3_param_persistence_threshold"] == 160
    logs = [log["loss"] for log in made.state.log_history if "loss" in log]
    assert len(logs) == 3


@pytest.mark.parametrize(
    "key",
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ],
)
def test_batch_sizes_are_arguments_by_the_rules_of_4_5(key: str) -> None:
    with pytest.raises(ValueError, match=r"Do not include .* entries in the ds config"):
        arguments(deepspeed={key: 4}, deepspeed_rules="v4.5")


def test_clipping_is_the_configuration_s_by_the_rules_of_4_5() -> None:
    args = arguments(deepspeed={"gradient_clipping": 0.3}, deepspeed_rules="v4.5")
    assert config_of(args) is args.hf_deepspeed_config
    assert args.max_grad_norm == 0.3
    auto = {"fp16": {"enabled": "auto"}}
    assert not arguments(deepspeed=auto, deepspeed_rules="v4.5").fp16
    with pytest.raises(ValueError, match="deepspeed_rules"):
        arguments(deepspeed={}, deepspeed_rules="v4")


@settings(max_examples=draws(100, 5000), deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["auto", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([name.rpartition(".")[2] for name in deepspeed_keys.KEYS]),
        inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_content_is_read_or_rejected(content: Any) -> None:
    said = ""
    try:
        HfDeepSpeedConfig(content)
    except ValueError as error:
        said = str(error)
    assert not said or "deepspeed" in said


def reads(config: Any) -> bool:
    try:
        HfDeepSpeedConfig(config)
    except ValueError as error:
        return "simultaneously enabled" in str(error) or "both set" in str(error)
    return True


_SCHEMA = jsonschema.Draft202012Validator(json_schema())
_DRAWN = st.sampled_from(
    ["auto", None, True, False, 0, 1, 3, -1, 0.5, 1e9, "cpu", "fp32", [], {}]
)


@settings(max_examples=draws(150, 5000), deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(deepspeed_keys.KEYS)), _DRAWN, max_size=3)
    | st.dictionaries(st.sampled_from(["amp", "wandb", "zero", "fp16"]), _DRAWN)
)
def test_what_the_schema_accepts_is_read(flat: dict[str, Any]) -> None:
    try:
        config = nested(dict(sorted(flat.items(), reverse=True)))
    except (AttributeError, TypeError):  # a key within a value that is no section
        return
    assert reads(config) or not _SCHEMA.is_valid(config)


@settings(max_examples=draws(30, 1000), deadline=None)
@given(_CONFIGS)
def test_configurations_that_transformers_reads_are_of_the_schema(
    config: dict[str, Any],
) -> None:
    _SCHEMA.validate(config)


def test_the_schema_accepts_examples_and_names_what_is_wrong() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for config in (ZERO2, ZERO3, FULL):
        _SCHEMA.validate(config)
    with pytest.raises(jsonschema.ValidationError, match="'stge' was unexpected"):
        _SCHEMA.validate({"zero_optimization": {"stge": 2}})


FLAGS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
}


@pytest.mark.parametrize(
    "flags", [{}, FLAGS, {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, None]
)
def test_accelerate_launch_s_flags_are_a_configuration(
    flags: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """accelerate's own plugin reads the same variables; None: a file's."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FULL))
    file = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    for name, value in (file if flags is None else flags).items():
        monkeypatch.setenv(name, value)
    wanted = Theirs(DeepSpeedPlugin().hf_ds_config.config)
    wanted.trainer_config_process(arguments())
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    args = arguments()
    ours = args.hf_deepspeed_config
    for key in ("train_batch_size", "zero_optimization.stage", "gradient_clipping",
                "zero_optimization.offload_param.device"):  # fmt: skip
        assert ours.get_value(key) == wanted.get_value(key), key
    assert ours.is_offload() == (flags is FLAGS)
    plan = sharding_of(args)
    assert plan is not None
    assert plan.reshard_after_forward == (flags is FLAGS)
    assert args.distributed_state.num_processes == 1
    with pytest.raises(ValueError, match="fsdp and deepspeed both shard"):
        arguments(fsdp="full_shard")


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
def test_accelerate_launch_names_the_folder_on_nvme(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    prefix = f"ACCELERATE_DEEPSPEED_{part.upper()}"
    for name, value in (("DEVICE", "nvme"), ("NVME_PATH", "/Nvme")):
        monkeypatch.setenv(f"{prefix}_{name}", value)
    if part == "offload_param":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    key = f"zero_optimization.{part}.nvme_path"
    assert DeepSpeedPlugin().hf_ds_config.get_value(key) == "/Nvme"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    plan = sharding_of(arguments())
    assert plan is not None
    of_shards = part == "offload_param"
    assert plan.offload_folder == (None if of_shards else "/Nvme")
    assert plan.shard_folder == ("/Nvme" if of_shards else None)


_TEXT = json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}})


@settings(max_examples=draws(60, 20000), deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, len(_TEXT)), st.integers(0, 4)), max_size=3),
    put=st.binary(max_size=4),
)
def test_any_bytes_of_a_file_are_read_or_rejected(
    cuts: list[tuple[int, int]], put: bytes
) -> None:
    """A configuration with bytes taken out and others put in their place."""
    content = _TEXT.encode()
    for begin, n in cuts:
        content = content[:begin] + put + content[begin + n :]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(content)
        file.flush()
        try:
            wanted = json.loads(content.decode())
        except ValueError:
            wanted = None
        if not isinstance(wanted, dict):
            with pytest.raises(ValueError, match=r"deepspeed"):
                HfDeepSpeedConfig(file.name)
            return
        found: Any = None
        with contextlib.suppress(ValueError):  # unknown keys and other types
            found = HfDeepSpeedConfig(file.name).config
        assert found is None or found.keys() == wanted.keys()


def test_arguments_of_transformers_take_one_after_patching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = transformers.TrainingArguments.__post_init__
    ctrainer.patch_transformers()
    try:
        ctrainer.patch_transformers()  # again
        args = arguments(cls=transformers.TrainingArguments, deepspeed=FULL)
        assert args.deepspeed == FULL
        assert args.hf_deepspeed_config.config["train_batch_size"] == 4
        made = ctrainer.Trainer(tiny.gpt2(), args, train_dataset=tiny.tokens(8))
        assert made.is_fsdp_enabled
        assert arguments(cls=transformers.TrainingArguments).hf_deepspeed_config is None
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        args = arguments(cls=transformers.TrainingArguments)
        assert args.hf_deepspeed_config.is_zero2()
        monkeypatch.undo()
    finally:
        unpatch_transformers()
    assert transformers.TrainingArguments.__post_init__ is own
    with pytest.raises(ImportError, match="deepspeed"):
        arguments(cls=transformers.TrainingArguments, deepspeed=FULL)
