"""The classes of a DeepSpeed configuration, against what DeepSpeed 0.19.8 has read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctrainer.compat import deepspeed as ours

# Written by DeepSpeed 0.19.8: configurations, and the attributes of its classes.
_KEPT = Path(__file__).parents[2] / "kept" / "deepspeed" / "configurations.json"
CONFIGS = json.loads(_KEPT.read_text())["configs"]


def plain(value: Any) -> Any:
    """Attributes of the classes of sections, as a dict."""
    if not isinstance(value, SimpleNamespace):
        return value
    found = {name: plain(held) for name, held in vars(value).items()}
    if hasattr(value, "pipeline"):
        found["pipeline"] = value.pipeline
    return found


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: str(case["given"])[:60])
def test_attributes_are_deepspeeds(case: dict[str, Any]) -> None:
    config = ours.DeepSpeedConfig(case.pop("given"))
    scale_args = config.float16_config.dynamic_loss_scale_args()
    assert scale_args == case.pop("scale_args")
    for name, wanted in case.items():
        found = plain(getattr(config, name))
        if isinstance(wanted, dict):
            found = {key: found[key] for key in wanted}
        assert found == wanted, name


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        {"train_batch_size": 2, "gradient_accumulation_steps": 4},
        {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
        },
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_agree_are_an_assertion_error(sizes: Any) -> None:
    with pytest.raises(AssertionError):
        ours.DeepSpeedConfig(sizes)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("DeepSpeedZeroConfig", {"stagee": 2}, "did you mean 'stage'"),
        ("DeepSpeedZeroConfig", {"stage": 4}, "stage"),
        ("DeepSpeedZeroConfig", {"elastic_checkpoint": True}, "any number of ranks"),
        ("DeepSpeedZeroOffloadParamConfig", {"device": "gpu"}, "device"),
        ("DeepSpeedZeroOffloadOptimizerConfig", {"ratio": 0.5}, "all of the state"),
        ("DeepSpeedFP16Config", {"fp16_master_weights_and_grads": True}, "float32"),
        ("DeepSpeedBF16Config", {"enable": True}, "did you mean 'enabled'"),
    ],
)
def test_keys_are_checked_as_the_reader_checks_them(
    kind: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(ours, kind)(**keys)


def test_auto_is_rejected_where_only_a_trainer_fills_it_in() -> None:
    with pytest.raises(ValueError, match="train_batch_size is 'auto'"):
        ours.DeepSpeedConfig({"train_batch_size": "auto"})
    with pytest.raises(ValueError, match="mpu is not supported"):
        ours.DeepSpeedConfig({"train_batch_size": 1}, mpu=object())


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_both_names_of_the_section_bf16_are_read(key: str) -> None:
    assert ours.get_bfloat16_config({key: {"enabled": True}}).enabled is True
    assert ours.get_bfloat16_config({}).enabled is False
    assert ours.get_float16_config({"fp16": {"enabled": True}}).enabled is True
