"""fsdp and fsdp_config of every release, read and rejected."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctrainer import TrainingArguments
from ctrainer.arguments.fsdp import Sharding, sharding_of


def read(fsdp: Any, **config: Any) -> Sharding | None:
    return sharding_of(SimpleNamespace(fsdp=fsdp, fsdp_config=config or None))


@pytest.mark.parametrize("value", [None, "", False, [], "false"])
def test_nothing_is_sharded_unless_asked(value: Any) -> None:
    assert read(value) is None


@pytest.mark.parametrize(
    ("fsdp", "config", "differs"),
    [
        (True, {}, {}),
        ("true", {}, {}),
        ("full_shard auto_wrap offload", {}, {"cpu_offload": True}),
        (True, {"cpu_offload": "true"}, {"cpu_offload": True}),
        (["shard_grad_op"], {}, {"reshard_after_forward": False}),
        (True, {"reshard_after_forward": "false"}, {"reshard_after_forward": False}),
        (True, {"version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
         {"reshard_after_forward": False}),
        ("no_shard", {}, {"replicates": True}),
        ("hybrid_shard", {"reshard_after_forward": True}, {"hybrid": True}),
        ("hybrid_shard_zero2", {}, {"hybrid": True, "reshard_after_forward": False}),
        (True, {"transformer_layer_cls_to_wrap": "A, B"}, {"layers": ("A", "B")}),
        (True, {"transformer_layer_cls_to_wrap": ["A"]}, {"layers": ("A",)}),
        (True, {"min_num_params": "100"}, {"min_num_params": 100}),
        (True, {"auto_wrap_policy": "no_wrap"}, {"wraps": False}),
        (True, {"auto_wrap_policy": "SIZE_BASED_WRAP"}, {"min_num_params": 0}),
        (True, {"state_dict_type": "SHARDED_STATE_DICT"}, {"saves_full": False}),
        (True, {"activation_checkpointing": True}, {"recomputes": True}),
        (True, {"sync_module_states": "false"}, {"synchronizes": False}),
        (True, {"xla": True, "xla_fsdp_grad_ckpt": True}, {"recomputes": True}),
        (True, {"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16",
                                                   "pin_layout_in_collective_ops": 1}},
         {"xla_options": {"compute_dtype": "bfloat16"}}),
    ],
)  # fmt: skip
def test_every_spelling_means_the_same(
    fsdp: Any, config: dict[str, Any], differs: dict[str, Any]
) -> None:
    assert read(fsdp, **config) == Sharding(**differs)


@pytest.mark.parametrize(
    ("fsdp", "config", "text"),
    [
        ("fully", {}, "fsdp may be full_shard, .* not 'fully'"),
        ("full_shard no_shard", {}, "several strategies, full_shard, no_shard"),
        (True, {"wrap": 1}, "fsdp_config has no 'wrap'; did you mean 'auto_wrap"),
        (True, {"auto_wrap_policy": "ALL"}, "must be one of TRANSFORMER_BASED_WRAP"),
        (True, {"backward_prefetch": "ALWAYS"}, "one of NO_PREFETCH, BACKWARD_PRE"),
        (True, {"state_dict_type": "LOCAL_STATE_DICT"}, "state_dict_type must be one"),
        (True, {"min_num_params": "many"}, "a whole number in .*, not 'many'"),
        (True, {"min_num_params": 9, "transformer_layer_cls_to_wrap": "A"}, "set one"),
        (True, {"reshard_after_forward": "half"}, "not 'half'"),
        (True, {"activation_checkpointing": "perhaps"}, "true or false, not 'perhaps'"),
        (True, {"xla_fsdp_v2": True}, "xla_fsdp_v2 is not supported: .* SPMD"),
        (True, {"activation_checkpointing_offload": True}, "in host memory already"),
        (True, {"xla_fsdp_settings": {"compute_dtype": "float16"}}, "need xla=True"),
        (True, {"cpu_ram_efficient_loading": True, "sync_module_states": False},
         "only rank 0 has values"),
        (True, {"xla": True, "xla_fsdp_settings": {"shard_param_on_dim_0": True}},
         "has shard_param_on_dim_0=True; supported are"),
    ],
)  # fmt: skip
def test_what_is_unknown_or_contradicts_is_named(
    fsdp: Any, config: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        read(fsdp, **config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("backward_pre", "BACKWARD_PRE"),
        ("BACKWARD_POST", "BACKWARD_POST"),
        ("2", "BACKWARD_POST"),
        ("NO_PREFETCH", None),
        (None, "AUTO"),
        ("none", "AUTO"),
    ],
)
def test_prefetching_is_read(given: str | None, expected: str | None) -> None:
    found = read(True, fsdp_forward_prefetch="true", backward_prefetch=given)
    assert found == Sharding(forward_prefetch=True, backward_prefetch=expected)


def test_the_config_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"min_num_params": 7}))
    args = TrainingArguments(str(tmp_path), fsdp="full_shard", fsdp_config=str(path))
    assert sharding_of(args) == Sharding(min_num_params=7)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"fsdp.json' is not valid JSON"):
        sharding_of(args)


def test_the_older_fields_go_into_the_config(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), fsdp="full_shard", fsdp_min_num_params=9)
    assert sharding_of(args) == Sharding(min_num_params=9)
    with pytest.raises(ValueError, match="has no 'wrap'"):
        TrainingArguments(str(tmp_path), fsdp=True, fsdp_config={"wrap": 1})


def test_accelerate_launch_is_heard_where_the_arguments_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variables of `accelerate launch --use_fsdp` with its defaults."""
    launched = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_FORWARD_PREFETCH": "false", "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    }  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert read(None) == Sharding(wraps=False)
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "2")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    expected = {"reshard_after_forward": False, "saves_full": False}
    assert read(None) == Sharding(layers=("Block",), **expected)
    given = pytest.importorskip("transformers").TrainingArguments("o", fsdp=True)
    plugin = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin
    theirs = plugin(**given.fsdp_plugin_args)
    assert (theirs.reshard_after_forward, theirs.state_dict_type.name) == (
        True, "FULL_STATE_DICT",
    )  # fmt: skip
    assert read(True) == Sharding(layers=(*theirs.transformer_cls_names_to_wrap,))
    assert read(True, min_num_params=9) == Sharding(min_num_params=9)


@pytest.mark.parametrize("named", ["2", "shard_grad_op", "SHARD_GRAD_OP"])
def test_the_strategy_of_accelerate_launch_is_not_its_default_of_resharding(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", named)
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    found = read(None)
    assert found is not None
    theirs = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin()
    assert theirs.sharding_strategy.name == "SHARD_GRAD_OP"
    assert not found.reshard_after_forward


def test_what_the_arguments_leave_out_accelerate_launch_fills_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As accelerate's plugin does, which transformers makes of the arguments."""
    launched = {
        "OFFLOAD_PARAMS": "true", "ACTIVATION_CHECKPOINTING": "true",
        "TRANSFORMER_CLS_TO_WRAP": "Block", "RESHARD_AFTER_FORWARD": "true",
        "AUTO_WRAP_POLICY": "NO_WRAP", "MIN_NUM_PARAMS": "100",
    }  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    assert read("shard_grad_op") == Sharding(reshard_after_forward=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert read("shard_grad_op", activation_checkpointing=False) == Sharding(
        reshard_after_forward=False, cpu_offload=True, layers=("Block",)
    )
    monkeypatch.setenv("FSDP_IGNORED_MODULES", "head")
    with pytest.raises(ValueError, match=r"ignored_modules is not .* sets FSDP_"):
        read(True)


def of_fairscale(words: Any, world_size: int = 2, **others: Any) -> Sharding | None:
    return sharding_of(
        SimpleNamespace(sharded_ddp=words, world_size=world_size, **others)
    )


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        (True, {"wraps": False, "reshard_after_forward": False}),
        ("simple", {"wraps": False, "reshard_after_forward": False}),
        ("zero_dp_2", {"wraps": False, "reshard_after_forward": False}),
        ("zero_dp_3", {"wraps": False}),
        ("zero_dp_3 auto_wrap", {}),
        (["zero_dp_3", "auto_wrap", "offload"], {"cpu_offload": True}),
        ("zero_dp_2 cpu_offload",
         {"wraps": False, "reshard_after_forward": False, "cpu_offload": True}),
    ],
)  # fmt: skip
def test_sharded_ddp_means_what_fairscale_s_classes_do(
    words: Any, differs: dict[str, Any]
) -> None:
    assert of_fairscale(words) == Sharding(unnamed_min_num_params=100_000, **differs)
    for nothing in ("", None, False, [], "false"):
        assert of_fairscale(nothing) is None


@pytest.mark.parametrize(
    ("words", "others", "error"),
    [
        ("offload", {}, r"`--sharded_ddp offload` can't work on its own\. It needs to"),
        ("offload", {}, r'For example, `--sharded_ddp "zero_dp_2 offload"`\.'),
        ("simple offload", {}, "`--sharded_ddp simple` is not compatible with any "),
        ("zero_dp_2 zero_dp_3", {}, "zero_dp_2` is not compatible with `--sharded_ddp"),
        ("auto_wrap", {}, "add zero_dp_2 or zero_dp_3"),
        ("zero_dp3", {}, "did you mean 'zero_dp_3'"),
        ("simple", {"world_size": 1}, "Using sharded DDP only works in distributed tr"),
        ("simple", {"fsdp": True}, "sharded_ddp xxx together with --fsdp is not poss"),
        ("simple", {"deepspeed": {}, "deepspeed_rules": "v5"}, None),
        ("simple", {"deepspeed": "{}"}, "xxx together with --deepspeed is not possi"),
    ],
)  # fmt: skip
def test_options_of_sharded_ddp_that_exclude_each_other(
    words: str, others: dict[str, Any], error: str | None
) -> None:
    if error is None:  # an empty configuration is none
        assert of_fairscale(words, **others) is not None
        return
    with pytest.raises(ValueError, match=error):
        of_fairscale(words, **others)
