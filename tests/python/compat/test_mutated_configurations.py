"""What mutation has found in the readers of configurations, and a while of it; `make
fuzz SECONDS=3600` mutates for an hour."""

from __future__ import annotations

import base64
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import ranks
import tiny
from draws import draws

from ctrainer import deepspeed_schedules
from ctrainer.arguments.fsdp import sharding_of
from ctrainer.compat.deepspeed import HfDeepSpeedConfig


@pytest.mark.timeout(7200)
def test_mutated_configurations_are_read_or_rejected_with_a_reason(
    tmp_path: Path,
) -> None:
    seconds = str(draws(3, 200))  # of CPU time
    done = ranks.run_alone("compat.mutated_configurations", seconds, "1", str(tmp_path))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def nested(depth: int) -> str:
    return '{"zero_optimization":' * depth + "1" + "}" * depth


def coded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize("text", [nested(101), nested(400), coded(nested(101))])
def test_a_configuration_that_is_nested_deeply_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        HfDeepSpeedConfig(text)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        tiny.arguments(deepspeed=text)


def test_a_name_that_base64_has_twice_is_rejected() -> None:
    with pytest.raises(ValueError, match="'fp16' occurs twice"):
        HfDeepSpeedConfig(coded('{"fp16": {}, "fp16": {}}'))
    with pytest.raises(ValueError, match="Expected a string path"):
        HfDeepSpeedConfig(coded("[1, 2]"))


def test_sections_of_any_mapping_are_read_and_checked() -> None:
    zero = MappingProxyType({"stage": "2"})
    assert HfDeepSpeedConfig({"zero_optimization": zero}).is_zero2()
    wrong = MappingProxyType({"stge": 2})
    with pytest.raises(ValueError, match="has no 'stge'; did you mean 'stage'"):
        HfDeepSpeedConfig({"zero_optimization": wrong})
    with pytest.raises(ValueError, match=r"deepspeed\.fp16=set.* is no value of JSON"):
        HfDeepSpeedConfig({"fp16": set()})


def test_clipping_may_be_auto_by_the_rules_of_4_5() -> None:
    auto = {"gradient_clipping": "auto"}
    args = tiny.arguments(deepspeed=auto, deepspeed_rules="v4.5", max_grad_norm=0.3)
    assert args.hf_deepspeed_config.get_value("gradient_clipping") == 0.3


@pytest.mark.parametrize("power", [1024, 2**63 - 1])
def test_a_loss_scale_that_no_number_holds_is_rejected(power: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": power}
    with pytest.raises(ValueError, match=r"fp16.initial_scale_power.* \[0, 1023\]"):
        HfDeepSpeedConfig({"fp16": fp16})


@pytest.mark.parametrize("name", ["sharded_ddp", "fsdp"])
@pytest.mark.parametrize("value", [Path("/tmp"), 3, {"simple": 1}])
def test_a_word_of_another_type_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a list"):
        sharding_of(SimpleNamespace(**{name: value}, world_size=2))
    with pytest.raises(ValueError, match="Expected a string path to an existing deep"):
        sharding_of(SimpleNamespace(deepspeed=3, world_size=2))


def test_a_schedule_s_parameters_are_asked_for() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    section: dict[str, Any] = {"type": "WarmupDecayLR", "params": {}}
    with pytest.raises(ValueError, match=r"scheduler\.params: .*total_num_steps"):
        deepspeed_schedules.from_config(section, optimizer)
    section["params"] = {"total_num_steps": "many"}
    with pytest.raises(ValueError, match="total_num_steps is 'many'; expected"):
        deepspeed_schedules.from_config(section, optimizer)


@pytest.mark.parametrize("batch", ["3", 1.5, None, [0], 2**53, -(10**30)])
def test_the_batch_that_a_schedule_begins_behind_is_a_number(batch: Any) -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    section = {"type": "WarmupLR", "params": {"last_batch_iteration": batch}}
    with pytest.raises(ValueError, match=r"last_batch_iteration is .*; expected the"):
        deepspeed_schedules.from_config(section, optimizer)
