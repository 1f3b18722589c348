"""Numbers of fairseq's options: which mean something in fairseq and which are rejected.

The table is written by hand from what fairseq does with a number: where it divides by
it or counts with it, 0 and less mean nothing; where it asks whether it is above 0, -1
is a way to say never.
"""

from __future__ import annotations

import dataclasses
import math
import random
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from draws import draws

from ctrainer.arguments.settings import hints
from ctrainer.fairseq.config import as_config, component_class
from ctrainer.fairseq.config.command_line import only_refers
from ctrainer.fairseq.config.optimizers import OPTIMIZERS
from ctrainer.fairseq.config.schedules import SCHEDULES
from ctrainer.fairseq.config.trees import groups
from ctrainer.fairseq.trainer import check_config

# Numbers that mean something, and numbers that mean nothing.
Numbers = tuple[tuple[float, ...], tuple[float, ...]]
COUNT: Numbers = ((1, 2, 1000), (0, -1, -7))
WHOLE: Numbers = ((0, 1, 1000), (-1, -7))
OR_OFF: Numbers = ((-1, 0, 1, 50), (-2, -50))
AMOUNT: Numbers = ((0.0, 1e-9, 0.5, 3.0, 1e6), (-1e-9, -0.5, -3.0, math.inf))
ABOVE_0: Numbers = ((1e-9, 0.5, 2.0), (0.0, -1e-9, -2.0, math.inf))
PART: Numbers = ((0.0, 0.5, 1.0), (-1e-9, -1.0, 1.001, 2.0, math.inf))
BELOW_1: Numbers = ((0.0, 0.5, 0.999), (-1e-9, 1.0, 2.0, math.inf))
FROM_MINUS_1: Numbers = ((-1.0, 0.0, 0.5), (-1.001, -5.0, math.inf))
BITS: Numbers = ((4, 8, 32), (0, 1, 5, 16, 64, -8))

BOUNDS: dict[str, dict[str, Numbers]] = {
    "common": {
        "log_interval": COUNT,
        "seed": ((0, 1, 2**32 - 1), (-1, 2**32)),  # numpy.random.seed
        "fp16_init_scale": COUNT,
        "fp16_scale_window": COUNT,
        "fp16_scale_tolerance": PART,
        "min_loss_scale": AMOUNT,
        "threshold_loss_scale": AMOUNT,
        "amp_batch_retries": WHOLE,
        "amp_init_scale": COUNT,
        "amp_scale_window": COUNT,
        "empty_cache_freq": OR_OFF,
        "all_gather_list_size": COUNT,
        "model_parallel_size": COUNT,
    },
    "distributed_training": {
        "distributed_world_size": COUNT,
        "distributed_num_procs": WHOLE,  # 0 where fairseq sees no GPU
        "distributed_rank": WHOLE,
        "distributed_port": ((-1, 0, 8080, 65535), (-2, 65536)),
        "device_id": WHOLE,
        "bucket_cap_mb": COUNT,
        "heartbeat_timeout": OR_OFF,
        "slowmo_momentum": BELOW_1,
        "localsgd_frequency": COUNT,
        "nprocs_per_node": COUNT,
        "pipeline_chunks": WHOLE,
        "gather_bits": BITS,
        "reduce_bits": BITS,
    },
    "dataset": {
        "num_workers": WHOLE,
        "max_tokens": COUNT,
        "batch_size": COUNT,
        "required_batch_size_multiple": COUNT,
        "required_seq_len_multiple": COUNT,
        "data_buffer_size": WHOLE,
        "validate_interval": COUNT,
        "validate_interval_updates": OR_OFF,
        "validate_after_updates": WHOLE,
        "fixed_validation_seed": ((-1, 0, 2**40), ()),  # torch.manual_seed
        "max_tokens_valid": COUNT,
        "batch_size_valid": COUNT,
        "max_valid_steps": COUNT,
        "curriculum": WHOLE,
        "num_shards": COUNT,
        "shard_id": WHOLE,
    },
    "optimization": {
        "max_epoch": WHOLE,
        "max_update": WHOLE,
        "stop_time_hours": AMOUNT,
        "clip_norm": ((0.0, 0.1, 25.0, math.inf), (-1e-9, -1.0)),
        "update_freq": COUNT,
        "lr": AMOUNT,
        "stop_min_lr": FROM_MINUS_1,
    },
    "checkpoint": {
        "save_interval": COUNT,
        "save_interval_updates": OR_OFF,
        "keep_interval_updates": OR_OFF,
        "keep_interval_updates_pattern": ((-1, 1, 50), (0, -2, -50)),
        "keep_last_epochs": OR_OFF,
        "keep_best_checkpoints": OR_OFF,
        "patience": OR_OFF,
        "checkpoint_shard_count": COUNT,
    },
    "bmuf": {
        "block_lr": AMOUNT,
        "block_momentum": AMOUNT,
        "global_sync_iter": COUNT,
        "warmup_iterations": WHOLE,
        "delta_bits": BITS,
    },
    "ema": {
        "ema_decay": PART,
        "ema_start_update": WHOLE,
        "ema_update_freq": COUNT,
    },
    "optimizer.adam": {"adam_eps": AMOUNT, "weight_decay": AMOUNT},
    "optimizer.cpu_adam": {"adam_eps": AMOUNT, "weight_decay": AMOUNT},
    "optimizer.nag": {"momentum": AMOUNT, "weight_decay": AMOUNT},
    "optimizer.adamax": {"adamax_eps": AMOUNT, "weight_decay": AMOUNT},
    "optimizer.sgd": {"momentum": AMOUNT, "weight_decay": AMOUNT},
    "optimizer.adadelta": {
        "adadelta_rho": PART,
        "adadelta_eps": AMOUNT,
        "weight_decay": AMOUNT,
    },
    "optimizer.adagrad": {"weight_decay": AMOUNT},
    "optimizer.adafactor": {
        "clip_threshold": ABOVE_0,
        "decay_rate": ((-0.8, -5.0, 0.0), (0.1, 1.0, -math.inf)),
        "beta1": BELOW_1,
        "weight_decay": AMOUNT,
    },
    "optimizer.lamb": {"lamb_eps": AMOUNT, "weight_decay": AMOUNT},
    "optimizer.composite": {},
    "lr_scheduler.fixed": {
        "force_anneal": WHOLE,
        "lr_shrink": AMOUNT,
        "warmup_updates": WHOLE,
    },
    "lr_scheduler.inverse_sqrt": {
        "warmup_updates": WHOLE,
        "warmup_init_lr": FROM_MINUS_1,
    },
    "lr_scheduler.cosine": {
        "warmup_updates": WHOLE,
        "warmup_init_lr": FROM_MINUS_1,
        "min_lr": AMOUNT,
        "t_mult": ABOVE_0,
        "lr_period_updates": FROM_MINUS_1,
        "lr_shrink": AMOUNT,
    },
    "lr_scheduler.polynomial_decay": {
        "warmup_updates": WHOLE,
        "force_anneal": WHOLE,
        "end_learning_rate": AMOUNT,
        "power": AMOUNT,
        "total_num_update": AMOUNT,
    },
    "lr_scheduler.reduce_lr_on_plateau": {
        "lr_shrink": BELOW_1,
        "lr_threshold": AMOUNT,
        "lr_patience": WHOLE,
        "warmup_updates": WHOLE,
        "warmup_init_lr": FROM_MINUS_1,
    },
    "lr_scheduler.tri_stage": {
        "warmup_steps": WHOLE,
        "hold_steps": WHOLE,
        "decay_steps": WHOLE,
        "init_lr_scale": AMOUNT,
        "final_lr_scale": ABOVE_0,
    },
    "lr_scheduler.triangular": {
        "max_lr": AMOUNT,
        "lr_period_updates": ((2.0, 5000.0), (1.999, 0.0, -1.0, math.inf)),
        "lr_shrink": AMOUNT,
    },
    "lr_scheduler.step": {
        "warmup_updates": WHOLE,
        "warmup_init_lr": FROM_MINUS_1,
        "min_lr": AMOUNT,
        "lr_deacy_period": COUNT,
        "lr_decay": PART,
    },
    "lr_scheduler.manual": {},
    "lr_scheduler.pass_through": {},
}
CASES = [(group, name) for group, names in BOUNDS.items() for name in names]


def class_of(group: str) -> type:
    component, _, name = group.partition(".")
    return component_class(component, name) if name else groups()[component]


def config_with(group: str, name: str, value: Any) -> dict[str, Any]:
    component, _, kind = group.partition(".")
    if not kind:
        return {component: {name: value}}
    needed = {"max_lr": 1.0} if kind == "triangular" else {}
    return {component: {"_name": kind, **needed, name: value}}


def kept(config: Any, group: str, name: str) -> Any:
    return config[group.partition(".")[0]][name]


def holds_numbers(hint: Any) -> bool:
    parts = get_args(hint)
    return hint in (int, float) or any(map(holds_numbers, parts))


def test_every_number_has_its_bounds_in_the_table() -> None:
    """A number that only refers to another option has those of the other."""
    components = {f"optimizer.{n}" for n in OPTIMIZERS}
    components |= {f"lr_scheduler.{n}" for n in SCHEDULES}
    assert set(BOUNDS) == components | set(groups())
    for group, bounds in BOUNDS.items():
        cls = class_of(group)
        numbers = {
            option.name
            for option in dataclasses.fields(cls)
            if holds_numbers(hints(cls)[option.name])
            and not only_refers(option)
            and option.name not in ("lr", "phase_ratio")
        }
        assert numbers == bounds.keys() - {"lr"}, group


def forms(value: float) -> Iterator[Any]:
    """The number as files, command lines and scripts bring it along."""
    yield value
    yield repr(value)
    yield np.float64(value) if isinstance(value, float) else np.int64(value)


def names_it(error: ValueError, group: str, name: str, value: Any) -> bool:
    component = group.partition(".")[0]
    shown = value.item() if isinstance(value, np.generic) else value
    where = f"{component}.{name}"
    text = str(error)
    if text.startswith(f"{where}[0] must"):  # "0,1" is a list of numbers
        return str(shown) in text
    return (
        text.startswith(f"{where} must")
        and repr(shown) in text
        and type(shown).__name__ in text
    )


@pytest.mark.parametrize(("group", "name"), CASES)
def test_what_means_something_is_taken_and_the_rest_is_named(
    group: str, name: str
) -> None:
    inside, outside = BOUNDS[group][name]
    for value in inside:
        for given in forms(value):
            found = kept(as_config(config_with(group, name, given)), group, name)
            assert found == ([value] if isinstance(found, list) else value)
            assert not isinstance(found, (np.generic, str))
    for value in (*outside, math.nan, -math.inf):
        for given in forms(value):
            with pytest.raises(ValueError, match=name) as told:
                as_config(config_with(group, name, given))
            assert names_it(told.value, group, name, given), str(told.value)
            if value in outside and math.isfinite(value):
                assert any(c in str(told.value) for c in "[({"), str(told.value)
    for given in (True, False, "", [None], {}, "much", 1j):
        with pytest.raises(ValueError, match=name):
            as_config(config_with(group, name, given))


@pytest.mark.parametrize("name", ["lr", "update_freq"])
def test_a_list_of_rates_or_batches_is_not_empty(name: str) -> None:
    for empty in ([], (), ""):
        with pytest.raises(
            ValueError, match=rf"^optimization.{name} must be a list .*"
        ):
            as_config({"optimization": {name: empty}})
    with pytest.raises(ValueError, match=rf"^optimization.{name}\[1\] must .* in \["):
        as_config({"optimization": {name: [1, -1]}})


PAIRS = {
    "optimizer.adam": "adam_betas",
    "optimizer.cpu_adam": "adam_betas",
    "optimizer.adamax": "adamax_betas",
    "optimizer.lamb": "lamb_betas",
    "optimizer.adafactor": "adafactor_eps",
}


@pytest.mark.parametrize(("group", "name"), PAIRS.items())
def test_a_pair_is_two_numbers(group: str, name: str) -> None:
    for text in ("(0.9, 0.98)", "[0.0, 0.5]", "0.9, 0.98"):
        found = kept(as_config(config_with(group, name, text)), group, name)
        assert found == text
    wrong = ["(0.9,)", "(0.9, 0.98, 1)", "0.9", "(0.9, -1)", "(0.9, 'a')", "(0.9", ""]
    for text in [*wrong, "(0.9, nan)", "(" * 5000, "{0.9: 1}['a']"]:
        with pytest.raises(ValueError, match=f"{name} must be .* of two numbers in"):
            as_config(config_with(group, name, text))
    if name.endswith("betas"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            as_config(config_with(group, name, "(0.9, 1.0)"))


def test_every_source_is_checked() -> None:
    """The same table by dicts of text and namespaces, and by what a Trainer is given
    that as_config() has not made."""
    of_groups = [case for case in CASES if "." not in case[0]]
    chance = random.Random(5)
    chance.shuffle(of_groups)
    for group, name in of_groups[: draws(20, len(of_groups))]:
        inside, outside = BOUNDS[group][name]
        for value in (*inside, *outside):
            taken = [outcome(as_config, {group: {name: str(value)}})]
            if group not in ("bmuf", "ema"):
                taken.append(outcome(as_config, Namespace(**{name: value})))
            own = as_config()
            listed = [value] if name in ("lr", "update_freq") else value
            setattr(own[group], name, listed)
            plain = SimpleNamespace(**{group: SimpleNamespace(**{name: listed})})
            excluded = name == "model_parallel_size" and value > 1
            if not excluded:
                taken += [outcome(check_config, own), outcome(check_config, plain)]
            assert taken == [value in inside] * len(taken), (group, name, value)


def outcome(read: Any, given: Any) -> bool:
    """Is it taken?"""
    try:
        read(given)
    except ValueError:
        return False
    return True
