"""Every configuration that the documentation of transformers shows, of 4.57 and of the
releases with DeepSpeed 0.3, with DeepSpeed's keys of the one and of the other age: each
is read, and a tiny model trains with it.

Source: transformers, docs/source/{en,ja,ko,zh}, tests/deepspeed, and
docs/source/main_classes/trainer.rst; Apache License 2.0. Each is there once.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from draws import EXHAUSTIVE

import ctrainer

EXAMPLES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("deepspeed_examples.json").read_text(encoding="utf-8")
)
_NUMBERS = range(len(EXAMPLES))
# What an example asks for that there is not, and what to set instead.
_OTHERWISE = {
    "amp": ("apex is not used; enable fp16 or bf16", {"fp16": {"enabled": True}}),
    "aio": ("the section zero_optimization has no 'aio'", None),
}


def named(number: int) -> dict[str, Any]:
    return copy.deepcopy(EXAMPLES[number]["config"])  # type: ignore[no-any-return]


def arguments_like(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments that agree with the values of a configuration."""
    found: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2}
    params = config.get("optimizer", {}).get("params", {})
    schedule = config.get("scheduler", {}).get("params", {})
    pairs = {
        "learning_rate": params.get("lr", schedule.get("warmup_max_lr")),
        "adam_epsilon": params.get("eps"),
        "weight_decay": params.get("weight_decay"),
        "warmup_steps": schedule.get("warmup_num_steps"),
        "max_grad_norm": config.get("gradient_clipping"),
        "max_steps": schedule.get("total_num_steps"),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "per_device_train_batch_size": config.get("train_micro_batch_size_per_gpu"),
    }
    found |= {k: v for k, v in pairs.items() if v not in ("auto", None)}
    if isinstance(params.get("betas"), list):
        found["adam_beta1"], found["adam_beta2"] = params["betas"]
    total = config.get("train_batch_size")
    if isinstance(total, int):
        size = found["per_device_train_batch_size"]
        found["gradient_accumulation_steps"] = total // size
    for name in ("fp16", "bf16"):
        if config.get(name, {}).get("enabled") is True:
            found[name] = True
    return found


def trained(config: dict[str, Any], folder: Path) -> Any:
    made = tiny.make(
        ctrainer.Trainer, tiny.gpt2(), tiny.tokens(24), deepspeed=config,
        output_dir=str(folder), **arguments_like(config),
    )  # fmt: skip
    made.train()
    return made


def with_what_there_is(config: dict[str, Any], folder: Path) -> None:
    """What the messages say: aio is a section of its own, and the folder on NVMe has to
    exist."""
    zero = config.get("zero_optimization", {})
    if "aio" in zero:
        config["aio"] = zero.pop("aio")
    for part in ("offload_optimizer", "offload_param"):
        if zero.get(part, {}).get("device") == "nvme":
            zero[part]["nvme_path"] = str(folder)


@pytest.mark.parametrize("number", _NUMBERS)
def test_an_example_of_the_documentation_is_read_or_names_what_to_set(
    number: int, tmp_path: Path
) -> None:
    config = named(number)
    zero = config.get("zero_optimization", {})
    wrong = [
        why
        for why, found in (
            ("amp", "amp" in config),
            ("aio", "aio" in zero),
        )
        if found
    ]
    if wrong:
        with pytest.raises(ValueError, match=_OTHERWISE[wrong[0]][0]):
            tiny.arguments(deepspeed=config, **arguments_like(config))
        config = {**config, **(_OTHERWISE[wrong[0]][1] or {})}
        config.pop("amp", None)
        with_what_there_is(config, tmp_path)
    options = arguments_like(config)
    args = tiny.arguments(deepspeed=config, **options)
    ours = args.hf_deepspeed_config
    assert ours.stage == config.get("zero_optimization", {}).get("stage", 0)


@pytest.mark.parametrize("number", _NUMBERS if EXHAUSTIVE else _NUMBERS[3::9])
def test_a_model_trains_with_an_example_of_the_documentation(
    number: int, tmp_path: Path
) -> None:
    config = named(number)
    if config.pop("amp", None):
        config["fp16"] = {"enabled": True}
    with_what_there_is(config, tmp_path)
    made = trained(config, tmp_path)
    steps = config.get("scheduler", {}).get("params", {}).get("total_num_steps")
    assert made.state.global_step == (steps if isinstance(steps, int) else 2)
    assert made.is_fsdp_enabled == (
        config.get("zero_optimization", {}).get("stage", 0) > 0
    )
