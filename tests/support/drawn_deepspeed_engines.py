"""Trainings of DeepSpeed's engine, ours, with options drawn together, and the same
written out in torch, in float32 and in one process."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import deepspeed_engines as engines
import torch
from torch import nn

UPDATES, SAVED, RANKS, LR, WARMUP, TOTAL = 6, 3, 2, 1e-2, 3, 8


@dataclasses.dataclass(frozen=True)
class Drawn:
    stage: int
    dtype: str
    optimizer: str
    in_groups: bool
    schedule: str
    accumulates: int
    clip: float
    decay: float
    places: tuple[str, str]  # of the optimizer's state and the shards
    in_memory: int
    overlaps: bool
    holds: bool
    resumes: bool
    stays: bool  # the engine that goes on resumes, in an update

    @property
    def is_rough(self) -> bool:
        return self.dtype != "fp32"


def drawn(number: int) -> Drawn:
    draw = random.Random(number)
    stage = draw.choice([0, 1, 2, 2, 3, 3, 3])
    places = ("none", "none", "cpu", "nvme")
    return Drawn(
        stage=stage,
        dtype=draw.choice(["fp32", "fp32", "fp32", "bf16", "fp16"]),
        optimizer=draw.choice(["AdamW", "AdamW", "Adam", "Adagrad", "Lion", "SGD"]),
        in_groups=draw.random() < 0.4,
        schedule=draw.choice(["", "linear", "log", "decay"]),
        accumulates=draw.choice([1, 2, 3]),
        clip=draw.choice([0.0, 0.05, 1.0]),
        decay=draw.choice([0.0, 0.1]),
        places=(
            draw.choice(places) if stage else "none",
            draw.choice(places) if stage == 3 else "none",
        ),
        in_memory=draw.choice([0, 0, 30]),
        overlaps=draw.random() < 0.5,
        holds=draw.random() < 0.3,
        resumes=draw.random() < 0.5,
        stays=draw.random() < 0.5,
    )


def batches_of(case: Drawn) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the ranks in turn."""
    draws = torch.Generator().manual_seed(5)
    kind = engines.DTYPES[case.dtype]
    return [
        tuple(torch.randn(2, size, generator=draws).to(kind) for size in (5, 3))
        for _ in range(RANKS * UPDATES * case.accumulates)
    ]


def configuration(case: Drawn, folder: str) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": case.stage, "overlap_comm": case.overlaps}
    for part, place in zip(("optimizer", "param"), case.places, strict=True):
        if place != "none":
            section[f"offload_{part}"] = {"device": place}
        if place == "nvme":
            section[f"offload_{part}"]["nvme_path"] = folder
    if case.stage == 3:
        section["stage3_param_persistence_threshold"] = case.in_memory
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": section,
        "gradient_accumulation_steps": case.accumulates,
        "gradient_clipping": case.clip, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8}
    if case.optimizer != "SGD":
        params: dict[str, Any] = {"lr": LR, "weight_decay": case.decay}
        if case.optimizer == "Adam":
            params["adam_w_mode"] = False
        config["optimizer"] = {"type": case.optimizer, "params": params}
    if case.schedule:
        kind = "log" if case.schedule == "log" else "linear"
        params = {
            "warmup_max_lr": LR, "warmup_num_steps": WARMUP, "warmup_type": kind
        }  # fmt: skip
        if case.schedule == "decay":
            params["total_num_steps"] = TOTAL
        name = "WarmupDecayLR" if case.schedule == "decay" else "WarmupLR"
        config["scheduler"] = {"type": name, "params": params}
    return config


def parameters(case: Drawn, model: nn.Module) -> list[Any]:
    """In groups vectors are not decayed, and the others always."""
    return engines.parameters(model, case.in_groups)


def sgd(case: Drawn, params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=case.decay)


def trained(case: Drawn, initialize: Any, folder: str) -> dict[str, Any]:
    engine = made(case, initialize, folder)
    losses, rates = [], []
    own = batches_of(case)[engine.global_rank :: RANKS]
    for update in range(UPDATES):
        if update == SAVED and case.resumes:
            engine.save_checkpoint(f"{folder}/saved")
            if case.stays:
                one_pass(engine, own[0])
            else:
                engine = made(case, initialize, folder)
            engine.load_checkpoint(f"{folder}/saved")
        rates.append(engine.get_lr()[0])
        for at in range(case.accumulates):
            batch = own[update * case.accumulates + at]
            if case.holds and at < case.accumulates - 1:
                with engine.no_sync():
                    losses.append(one_pass(engine, batch))
            else:
                losses.append(one_pass(engine, batch))
            engine.step()
    of = engine.module
    whole = of.full_state_dict() if hasattr(of, "units") else of.state_dict()
    return {
        "loss": losses, "rates": rates, "steps": engine.global_steps,
        "weights": {name: value.float().tolist() for name, value in whole.items()},
    }  # fmt: skip


def one_pass(engine: Any, batch: Any) -> float:
    loss = engine(*engines.placed(engine, batch))
    engine.backward(loss)
    return float(loss)


def made(case: Drawn, initialize: Any, folder: str) -> Any:
    model, given = engines.Model(), {}
    params = parameters(case, model)
    if case.optimizer == "SGD":
        given["optimizer"] = lambda params: sgd(case, params)
    return initialize(
        model=model,
        model_parameters=params,
        config=configuration(case, folder),
        **given,
    )[0]


# The same, written out


def rate_of(case: Drawn, done: int) -> float:
    """The learning rate of the update after `done` ones."""
    if not case.schedule:
        return LR
    at = max(done - 1, 0)  # DeepSpeed's schedules begin with the first step
    if at < WARMUP:
        is_log = case.schedule == "log"
        return LR * (math.log(at + 1) / math.log(WARMUP) if is_log else at / WARMUP)
    if case.schedule == "decay":
        return LR * (TOTAL - at) / (TOTAL - WARMUP)
    return LR


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                sign = (0.9 * m + 0.1 * p.grad).sign()
                p -= group["lr"] * (sign + group["weight_decay"] * p)
                self.state[p]["m"] = 0.99 * m + 0.01 * p.grad


def optimizer_of(case: Drawn, params: list[Any]) -> torch.optim.Optimizer:
    options = {"lr": LR, "weight_decay": case.decay}
    if case.optimizer == "SGD":
        return sgd(case, params)
    if case.optimizer == "Lion":
        return Lion(params, options)
    return getattr(torch.optim, case.optimizer)(params, **options)  # type: ignore[no-any-return]


def expected(case: Drawn) -> dict[str, Any]:
    model = engines.Model()
    optimizer = optimizer_of(case, parameters(case, model))
    each = RANKS * case.accumulates
    batches = batches_of(case)
    losses: list[float] = []
    for done in range(UPDATES):
        optimizer.zero_grad()
        for x, y in batches[done * each : (done + 1) * each]:
            loss = model(x.float(), y.float())
            (loss / each).backward()
            losses.append(loss.item())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(case, done)
        optimizer.step()
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    rates = [rate_of(case, done) for done in range(UPDATES)]
    return {"loss": losses, "rates": rates, "weights": weights}
