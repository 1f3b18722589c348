"""Every optimizer of fairseq's configs, in its Trainer, against ctrainer.optim's."""

from __future__ import annotations

import copy
from typing import Any

import fairseq_tiny as tiny
import pytest
import torch

from ctrainer import optim
from ctrainer.fairseq import optim as fairseq_optim
from ctrainer.fairseq.config import as_config
from ctrainer.fairseq.lr_scheduler import build_lr_scheduler

FIXED = {"lr_scheduler___name": "fixed", "lr_scheduler__warmup_updates": 0}
STEPS = 6

# A config group, and the class and the arguments that it stands for beside lr=0.02.
CONFIGS: dict[str, tuple[dict[str, Any], type, dict[str, Any]]] = {
    "adam": (
        {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.1},
        optim.FairseqAdam,
        {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "adamax": (
        {"adamax_betas": "(0.8, 0.9)", "adamax_eps": 1e-6, "no_bias_correction": True},
        optim.FairseqAdamax,
        {"betas": (0.8, 0.9), "eps": 1e-6, "bias_correction": False},
    ),
    "nag": (
        {"momentum": 0.5, "weight_decay": 0.1},
        optim.FairseqNAG,
        {"momentum": 0.5, "weight_decay": 0.1},
    ),
    "sgd": (
        {"momentum": 0.5, "weight_decay": 0.1},
        optim.SGD,
        {"momentum": 0.5, "weight_decay": 0.1},
    ),
    "adadelta": (
        {"adadelta_rho": 0.8, "adadelta_eps": 1e-4},
        optim.Adadelta,
        {"rho": 0.8, "eps": 1e-4},
    ),
    "adagrad": ({"weight_decay": 0.1}, optim.Adagrad, {"weight_decay": 0.1}),
    "adafactor": (
        {"adafactor_eps": "(1e-28, 1e-2)", "clip_threshold": 0.5, "beta1": 0.9,
         "decay_rate": -0.7, "scale_parameter": True, "weight_decay": 0.1},
        optim.Adafactor,
        {"eps": (1e-28, 1e-2), "clip_threshold": 0.5, "beta1": 0.9, "decay_rate": -0.7,
         "scale_parameter": True, "relative_step": False, "weight_decay": 0.1},
    ),
    "cpu_adam": (
        {"adam_betas": "(0.8, 0.9)", "adam_eps": 1e-3, "weight_decay": 0.1},
        optim.AdamW,
        {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "lamb": (
        {"lamb_betas": "(0.8, 0.9)", "lamb_eps": 1e-4, "weight_decay": 0.1},
        optim.LAMB,
        {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1},
    ),
}  # fmt: skip


def tiny_trainer(
    name: str, options: dict[str, Any], model: tiny.Model | None = None, **changes: Any
) -> Any:
    """A trainer whose optimizer is made; the options are its config group's."""
    group = {f"optimizer__{key}": value for key, value in options.items()}
    made = tiny.trainer(model, optimizer___name=name, **{**FIXED, **group, **changes})
    assert made.optimizer is not None
    return made


def train_by_hand(model: tiny.Model, optimizers: list[Any]) -> None:
    """The steps of the trainer, in plain torch."""
    model.train()
    for sample in tiny.batches(STEPS):
        loss, size, _ = tiny.Criterion()(model, sample)
        (loss / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train(ours: Any) -> None:
    for sample in tiny.batches(STEPS):
        ours.train_step([sample])


def assert_alike(a: tiny.Model, b: tiny.Model) -> None:
    """The trainer divides by the sample size in the update, torch in the loss: a
    rounding to float32 in each step, which division by small roots enlarges."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_as_the_optimizer_that_it_names(name: str) -> None:
    options, cls, arguments = CONFIGS[name]
    ours = tiny_trainer(name, options)
    model = tiny.Model()
    train(ours)
    train_by_hand(model, [cls(model.parameters(), lr=0.02, **arguments)])
    assert_alike(ours.model, model)
    assert not torch.equal(model.out.weight, tiny.Model().out.weight)


def test_adafactors_relative_step_takes_the_place_of_the_rate() -> None:
    ours = tiny_trainer("adafactor", {"relative_step": True, "warmup_init": True})
    model = tiny.Model()
    train(ours)
    train_by_hand(
        model,
        [optim.Adafactor(model.parameters(), scale_parameter=False, warmup_init=True)],
    )
    assert_alike(ours.model, model)


# ---- composite ----------------------------------------------------------------------

GROUPS: dict[str, Any] = {
    "words": {
        "lr": 0.05,
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
        "lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 3},
    },
    "default": {
        "optimizer": {"_name": "adafactor", "lr": [0.02]},
        "lr_scheduler": {"_name": "fixed", "lr": [0.02]},
    },
}
PASS_THROUGH = {"lr_scheduler___name": "pass_through"}


def grouped_model() -> tiny.Model:
    model = tiny.Model()
    model.embed.weight.param_group = "words"  # type: ignore[assignment]
    return model


def composite(**changes: Any) -> Any:
    options = {"groups": GROUPS, **changes}
    return tiny_trainer("composite", options, grouped_model(), **PASS_THROUGH)


class Rate:
    """An optimizer as a schedule sees it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def get_lr(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr


def test_a_composite_trains_each_group_by_its_own_optimizer_and_schedule() -> None:
    ours, model = composite(), grouped_model()
    adam = optim.FairseqAdam([model.embed.weight], lr=0.05, betas=(0.9, 0.98))
    rest = optim.Adafactor(
        model.out.parameters(), lr=0.02, scale_parameter=False, relative_step=False
    )
    schedule = build_lr_scheduler(
        "inverse_sqrt", tiny.SimpleNamespace(lr=[0.05], warmup_updates=3), Rate(adam)
    )
    model.train()
    for number, sample in enumerate(tiny.batches(STEPS), 1):
        ours.train_step([sample])
        loss, size, _ = tiny.Criterion()(model, sample)
        (loss / size).backward()
        for optimizer in (adam, rest):
            optimizer.step()
            optimizer.zero_grad()
        rate = schedule.step_update(number)
        assert ours.lr_scheduler.step_update(number) == {"default": 0.02, "words": rate}
    assert_alike(ours.model, model)


def test_a_composite_may_come_from_a_config_file() -> None:
    cfg = as_config(
        {
            "common": {"cpu": True, "seed": 7},
            "optimizer": {"_name": "composite", "groups": GROUPS},
            "lr_scheduler": {"_name": "pass_through"},
        }
    )
    ours = composite()
    other = tiny.Trainer(cfg, tiny.Task(), grouped_model(), tiny.Criterion())
    train(ours)
    train(other)
    assert torch.equal(ours.model.out.weight, other.model.out.weight)
    assert torch.equal(ours.model.embed.weight, other.model.embed.weight)


def test_a_composite_goes_on_from_its_state() -> None:
    ours, other = composite(), composite()
    train(ours)
    other.model.load_state_dict(ours.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    other.lr_scheduler.load_state_dict(ours.lr_scheduler.state_dict())
    other.set_num_updates(ours.get_num_updates())
    train(ours)
    train(other)
    for p, q in zip(ours.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_groups_schedule_on_a_plateau_leaves_the_other_groups_rate() -> None:
    plateau = {"_name": "reduce_lr_on_plateau", "lr_shrink": 0.5, "lr_patience": 0}
    groups = copy.deepcopy(GROUPS)
    groups["words"]["lr_scheduler"] = plateau
    schedules = composite(groups=groups).lr_scheduler
    schedules.step(1, 1.0)
    assert schedules.step(2, 2.0)["words"] == 0.025
    assert schedules.step_update(2) == {"default": 0.02, "words": 0.025}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": {"words": GROUPS["words"]}}, "and the parameters are of"),
        ({"dynamic_groups": True}, "dynamic_groups"),
        (
            {"groups": {**GROUPS, "default": {"optimizer": {"_name": "adagrad"}}}},
            r"groups\['default'\] has no learning rate",
        ),
        (
            {"groups": {**GROUPS, "default": {"lr": 1, "optimizer": {"_name": "sgd"}}}},
            "have no lr_scheduler",
        ),
        (
            {"groups": {n: {"lr": 1, "optimizer": {"_name": "composite"}}
                        for n in GROUPS}},
            "cannot be in one",
        ),
    ],
)  # fmt: skip
def test_groups_that_make_no_composite_are_rejected(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        composite(**change)


def test_groups_without_schedules_take_the_trainers() -> None:
    groups = {
        name: {"lr": 0.05, "optimizer": {"_name": "sgd"}}
        for name in ("words", "default")
    }
    ours = tiny_trainer("composite", {"groups": groups}, grouped_model())
    assert ours.optimizer.lr_scheduler is None
    assert ours.lr_scheduler.step_update(1) == 0.02


# ---- precision ----------------------------------------------------------------------

FLAT = {"adam", "adamax", "adadelta", "sgd", "nag", "cpu_adam"}
EFFICIENT = {"adam", "adamax", "adafactor", "nag", "cpu_adam", "composite"}
NAMES = [*CONFIGS, "composite"]


def precise(name: str, **common: bool) -> Any:
    changes: dict[str, Any] = {f"common__{key}": on for key, on in common.items()}
    if name == "composite":
        changes["optimizer__groups"] = GROUPS
    return tiny_trainer(name, {}, grouped_model(), **changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_trains_a_float32_copy(name: str) -> None:
    ours = precise(name, bf16=True)
    train(ours)
    copies = ours.optimizer.fp32_params
    assert len(copies) == 3
    for p, copied in zip(ours.optimizer.params, copies, strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, copied.reshape(p.shape).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_flat_parameters_are_for_those_of_fairseq_that_take_them(name: str) -> None:
    if name in FLAT:
        assert precise(name, fp16=True).optimizer.flat
        return
    with pytest.raises(RuntimeError, match="does not support flat params"):
        precise(name, fp16=True)
    assert not precise(name, fp16=True, fp16_no_flatten_grads=True).optimizer.flat


@pytest.mark.parametrize("name", NAMES)
def test_memory_efficient_precision_is_for_fairseqs_own(name: str) -> None:
    if name in EFFICIENT:
        made = precise(name, fp16=True, memory_efficient_fp16=True).optimizer
        assert isinstance(made, fairseq_optim.MemoryEfficientFP16Optimizer)
        return
    with pytest.raises(ValueError, match="Unsupported optimizer"):
        precise(name, fp16=True, memory_efficient_fp16=True)


def test_a_name_that_fairseq_has_not_is_rejected() -> None:
    with pytest.raises(ValueError, match="optimizer is 'sophia'; expected one of"):
        tiny_trainer("sophia", {})
